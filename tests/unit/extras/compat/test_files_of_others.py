"""Files as other projects publish them: which options come of them, and what has to be given beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megalite.core.base.errors import UserError
from megalite.extras.compat.dialect import DIALECT
from megalite.extras.compat.foreign_files import recognize
from megalite.runtime.options import cli
from megalite.runtime.options.run import Config

TREE = yaml.safe_load((Path(__file__).parents[3] / "data" / "files_of_others.yaml").read_text(encoding="utf-8"))
ROWS = [(tool, row) for tool in ("deepspeed", "accelerate") for row in TREE[tool]]


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = {key: merged(one[key], other[key]) for key in one.keys() & other.keys() if isinstance(one[key], dict)}
    return {**one, **other, **both}


def content(row: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for part in (*(TREE["parts"][name] for name in row["parts"]), row.get("keys", {})):
        tree = merged(tree, part)
    return tree


@pytest.mark.parametrize(("tool", "row"), ROWS, ids=[row["of"].replace(" ", "-") for _, row in ROWS])
def test_a_file_becomes_the_options_that_it_asks_for(tmp_path: Path, tool: str, row: dict[str, Any]) -> None:
    tree = content(row)
    path = tmp_path / ("file.json" if tool == "deepspeed" else "file.yaml")
    path.write_text(json.dumps(tree) if tool == "deepspeed" else yaml.safe_dump(tree))
    world = tree.get("num_processes", 4)
    flags = [f"--{tool}-config", str(path), "--mock-data", *row.get("flags", "").split()]
    cfg = cli.parse(flags, dialect=DIALECT, world=world).config
    changed = {
        name: value
        for group, default in vars(Config()).items()
        for name, value in vars(getattr(cfg, group)).items()
        if value != getattr(default, name) and name != "mock_data"
    }
    assert changed == row["options"]


@pytest.mark.parametrize(
    ("tool", "remedy", "text"),
    [
        (
            "DeepSpeed",
            "--deepspeed-config",
            '{\n  "train_micro_batch_size_per_gpu": 4,\n  "zero_optimization": {"stage": 2}\n}',
        ),
        ("Accelerate", "--accelerate-config", "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n"),
        (
            "a model of Hugging Face",
            "--init-from-hf",
            '{"architectures": ["LlamaForCausalLM"],\n "model_type": "llama"}',
        ),
        (
            "Axolotl",
            "--preset",
            "base_model: NousResearch/Llama-3.2-1B\ndatasets:\n  - path: tatsu-lab/alpaca\n    type: alpaca\n",
        ),
        ("LLaMA-Factory", "--preset", "model_name_or_path: m\nstage: sft\nfinetuning_type: full\ntemplate: llama3\n"),
        (
            "GPT-NeoX",
            "Megatron-LM's names",
            '{\n  "pipe-parallel-size": 1,\n  "model-parallel-size": 1,\n  # model\n  "num-layers": 12,\n}',
        ),
        ("torchtitan", "--preset", '[job]\ndump_folder = "./outputs"\n[training]\nsteps = 1000\n[parallelism]\n'),
        (
            "NeMo",
            "--preset",
            "trainer:\n  devices: 8\n  num_nodes: 1\nexp_manager:\n  name: gpt\nmodel:\n  micro_batch_size: 4\n",
        ),
        ("nanotron", "--preset", "general:\n  project: x\nparallelism:\n  dp: 1\ntokens:\n  sequence_length: 256\n"),
        (
            "the Hugging Face Trainer",
            "as flags",
            "output_dir: out\nper_device_train_batch_size: 8\nlearning_rate: 1.0e-4\n",
        ),
        ("", "must be one of model, parallel", "madel:\n  num_layers: 2\n"),
        ("", "is not valid YAML", "model: [\n"),
    ],
)
def test_a_configuration_of_another_trainer_is_named(tmp_path: Path, tool: str, remedy: str, text: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        cli.parse(["--config", str(path), "--mock-data"], dialect=DIALECT)
    said = str(error.value)
    assert remedy in said
    assert tool == "" or f"--config {path}: is a configuration of {tool}; " in said
    assert "\n" not in said


def test_a_file_of_ours_is_of_no_other_tool() -> None:
    assert recognize(cli.to_yaml(Config())) is None
