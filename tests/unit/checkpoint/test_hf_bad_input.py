"""What the converters refuse: one `error:` line, exit code 2, and nothing written."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megalite.core.parts.families import FAMILIES
from megalite.extras.convert.command import main
from megalite.extras.convert.hf import import_hf
from megalite.extras.tool import run_tool
from tests.unit.checkpoint.hf_models import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_model("llama", folder)
    return folder


def run_converter(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        run_tool(lambda: main(arguments))
    return int(left.value.code or 0)


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        content = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({k: v for k, v in content.items() if v != "DELETE"}))

    return edit


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return edit


def to_index(folder: Path, **files: str) -> None:
    """Two files and their index, with changes to the index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in halves.items():
        save_file({n: tensors[n] for n in part}, folder / file)
    weight_map = {n: file for file, part in halves.items() for n in part} | files
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


class Canary:
    def __reduce__(self) -> Any:
        return os.mkdir, ("canary",)


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Canary()))


def pickle_as_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(pickle.dumps(Canary()))


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)


def longer(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as f:
        f.write(b"x")


def with_header(**tensors: Any) -> Callable[[Path], None]:
    """A file with this header and 8 bytes."""

    def edit(folder: Path) -> None:
        text = json.dumps(tensors).encode()
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))

    return edit


def tied_head_of_integers(folder: Path) -> None:
    edit_config(tie_word_embeddings=True)(folder)
    edit_tensors(lambda t: t.update({"lm_head.weight": t["lm_head.weight"].int()}))(folder)


def second_half_missing(folder: Path) -> None:
    to_index(folder)
    (folder / "b.safetensors").unlink()


def index_leads_outside(folder: Path) -> None:
    to_index(folder, **{"lm_head.weight": "../b.safetensors"})


def index_lies(folder: Path) -> None:
    to_index(folder, **{"model.norm.weight": "a.safetensors"})


Q = "model.layers.0.self_attn.q_proj.weight"
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "family": (edit_config(model_type="mamba"), f"'mamba' is not one of {', '.join(FAMILIES)}"),
    "no_family": (edit_config(model_type="DELETE"), f"None is not one of {', '.join(FAMILIES)}"),
    "no_size": (edit_config(hidden_size="DELETE"), "has no hidden_size"),
    "size_of_wrong_type": (edit_config(hidden_size="64"), "config.json"),
    "truth_as_text": (edit_config(attention_bias="false"), "attention_bias 'false': is of the wrong type"),
    "rope_as_list": (edit_config(rope_parameters=[1]), "rope_parameters [1]: is of the wrong type"),
    "rope_of_text": (edit_config(rope_parameters={"rope_theta": "big"}), "rope_theta 'big': is of the wrong type"),
    "rope_type_as_list": (edit_config(rope_parameters={"rope_type": [1]}), "rope_type [1]: is of the wrong type"),
    "truncate_as_text": (
        edit_config(rope_parameters={"rope_type": "yarn", "truncate": "false"}),
        "truncate 'false': is of the wrong type",
    ),
    "layer_types_as_number": (edit_config(layer_types=5), "layer_types 5: is of the wrong type"),
    "layer_types_of_a_family_without": (
        edit_config(layer_types=["sliding_attention"] * 2),
        "must all be full_attention",
    ),
    "many_layers": (edit_config(num_hidden_layers=10**8), "--num-layers 100000000: must be at least 1 and below 10001"),
    "many_extents": (
        with_header(a={"dtype": "F32", "shape": [2**50] * 100_000, "data_offsets": [0, 8]}),
        "tensor a has 100000 dimensions, more than 8",
    ),
    "large_header": (
        with_header(a={"dtype": "F32", "shape": [2], "data_offsets": [0, 8], "x": "x" * (9 << 20)}),
        "more than the limit of 8388608",
    ),
    "activation": (edit_config(hidden_act="relu"), "hidden_act 'relu'"),
    "rope": (edit_config(rope_parameters={"rope_type": "longrope", "rope_theta": 1.0}), "rope_type 'longrope'"),
    "rope_twice": (edit_config(rope_theta=77.0), "rope_theta: rope_parameters say 500.0, the old keys 77.0"),
    "missing": (edit_tensors(lambda t: t.pop(Q)), f"tensor {Q} is missing, required by its config.json"),
    "extra": (edit_tensors(lambda t: t.update({"model.extra": torch.ones(2)})), "tensor model.extra is unexpected"),
    "shape": (edit_tensors(lambda t: t.update({Q: torch.ones(32, 31)})), f"{Q} has shape [32, 31]"),
    "type": (edit_tensors(lambda t: t.update({Q: torch.ones(32, 32).int()})), f"{Q} has type I32"),
    "type_of_tied_head": (
        tied_head_of_integers,
        "lm_head.weight has type I32",
    ),
    "untied_without_head": (edit_tensors(lambda t: t.pop("lm_head.weight")), "lm_head.weight is missing"),
    "tied_with_other_head": (edit_config(tie_word_embeddings=True), "tie_word_embeddings is true"),
    "layers": (edit_config(num_hidden_layers=3), "9 tensors (model.layers.2"),
    "no_config": (lambda f: (f / "config.json").unlink(), "config.json: cannot be opened"),
    "config_is_no_json": (lambda f: (f / "config.json").write_text("{" * 100000), "is not JSON"),
    "no_weights": (lambda f: (f / "model.safetensors").unlink(), "are missing"),
    "only_pickle": (only_pickle, "pytorch_model.bin is a pickle"),
    "pickle_as_safetensors": (pickle_as_safetensors, "is not a complete safetensors file (header too large)"),
    "truncated": (
        truncated,
        "model.safetensors: is not a complete safetensors file (incomplete metadata, file not fully covered)",
    ),
    "longer": (longer, "is not a complete safetensors file"),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "is not a complete safetensors file"),
    "header_of_other_json": (with_header(a=[1]), "is not a complete safetensors file"),
    "overlap": (
        with_header(
            a={"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            b={"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        ),
        "is not a complete safetensors file",
    ),
    "unknown_type": (
        with_header(a={"dtype": "OBJ", "shape": [2], "data_offsets": [0, 8]}),
        "is not a complete safetensors file",
    ),
    "huge_shape": (
        with_header(a={"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]}),
        "is not a complete safetensors file",
    ),
    "half_written": (second_half_missing, "b.safetensors: cannot be opened"),
    "index_leads_outside": (index_leads_outside, "must be a plain name"),
    "index_lies": (index_lies, "do not list the same tensors"),
}


@pytest.mark.parametrize("case", BAD)
def test_import_refuses(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    case: str,
) -> None:
    spoil, words = BAD[case]
    shutil.copytree(model, tmp_path / "hf")
    spoil(tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    code = run_converter("import", "--hf", str(tmp_path / "hf"), "--out", str(tmp_path / "out"))
    errors = capsys.readouterr().err.splitlines()
    assert code == 2
    assert len(errors) == 1, errors
    assert errors[0].startswith("error: ")
    assert words in errors[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"], "nothing written, no canary"


def test_a_taken_target_is_left_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import_hf(model, tmp_path / "ckpt")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    for arguments in (
        ["import", "--hf", str(model), "--out", str(tmp_path / "out")],
        ["export", "--checkpoint", str(tmp_path / "ckpt"), "--out", str(tmp_path / "out")],
    ):
        assert run_converter(*arguments) == 2
        assert "must be absent or an empty directory" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "holds no manifest.json"),
        ("flipped", "differ from what was written (CRC32)"),
        ("no_shard", "cannot be opened"),
        ("dtype", "--dtype int8: must be one of fp32, bf16, fp16"),
    ],
)
def test_export_refuses(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    words: str,
) -> None:
    ckpt = tmp_path / "ckpt"
    import_hf(model, ckpt)
    shard = ckpt / "rank_00000.safetensors"
    if name == "nothing":
        shutil.rmtree(ckpt)
        ckpt.mkdir()
    elif name == "no_shard":
        shard.unlink()
    elif name == "flipped":
        data = bytearray(shard.read_bytes())
        data[-9] ^= 4
        shard.write_bytes(data)
    extra = ["--dtype", "int8"] if name == "dtype" else []
    code = run_converter("export", "--checkpoint", str(ckpt), "--out", str(tmp_path / "out"), *extra)
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert code == 2
    assert len(errors) == 1
    assert words in errors[0]
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]


def test_a_model_its_family_cannot_say(tmp_path: Path, model: Path) -> None:
    from megalite.core.base.errors import UserError
    from megalite.core.options.model import ModelConfig
    from megalite.runtime.checkpoint.hf.config import write_config

    odd = ModelConfig(hidden_size=32, num_heads=4, vocab_size=90, qk_norm="head")
    with pytest.raises(UserError, match="has qk_norm 'head', but a config.json of this family means 'none'"):
        write_config(odd, "float32", {})
    odd = ModelConfig(hidden_size=32, num_heads=4, vocab_size=90, activation="geglu")
    with pytest.raises(UserError, match="cannot be exported .*hidden_act 'geglu'"):
        write_config(odd, "float32", {})
