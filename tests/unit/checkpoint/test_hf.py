"""Hugging Face both ways: bit-identical tensors, exact key sets, transformers' own logits in every layout."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

import megalite
from megalite.core.base.errors import UserError
from megalite.core.base.slices import Slice
from megalite.core.batch import ForwardPass, MicroBatch
from megalite.core.mesh.grid import Grid
from megalite.core.microbatches import to_microbatches, weigh_parts
from megalite.core.model.parameters import param_map
from megalite.core.options.model import ModelConfig
from megalite.core.parts.families import FAMILIES, PRESETS
from megalite.core.parts.options.attention_options import FULL, SLIDING
from megalite.extras.convert.hf import export_hf, import_hf
from megalite.extras.inference.load import load_model as load_for_inference
from megalite.runtime.checkpoint.hf.config import read_config, write_config
from megalite.runtime.checkpoint.hf.packing import file_tensors
from megalite.runtime.checkpoint.hf.source import HFSource
from megalite.runtime.checkpoint.hf.start import hf_model_config, load_hf
from megalite.runtime.checkpoint.manifest import read_manifest
from megalite.runtime.data import Rows
from tests.limits import GIVES_BACK
from tests.parity.jobs import make_config, start
from tests.rows import always_run
from tests.unit.checkpoint.hf_models import (
    CASES,
    LLAMA3_ROPE,
    YARN_ROPE,
    gradients,
    load_model,
    logits_of,
    make_model,
    read_all,
    tokens,
)
from tests.unit.checkpoint.jobs import bytes_of_tensors, hf_job
from tests.workers import WorkerPool

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder and logits of each case, made by transformers once."""
    made: dict[str, tuple[Path, np.ndarray]] = {}

    def get(case: str) -> tuple[Path, np.ndarray]:
        if case not in made:
            folder = tmp_path_factory.mktemp(case)
            model = make_model(case, folder)
            with torch.no_grad():
                made[case] = folder, model(tokens()).logits.numpy()
        return made[case]

    return get


def assert_same_weights(a: Path, b: Path) -> None:
    one, other = read_all(a), read_all(b)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


def test_every_family_is_tested() -> None:
    assert {model_type for model_type, _ in CASES.values()} == set(FAMILIES)


LAYOUT = {"tp": 2, "pp": 2}
# One of each sort of names and packings.
ALWAYS = ("llama", "gpt2", "gemma3", "bloom", "deepseek_v3", "qwen3_next", "gpt_oss")
EXPERTS = [(case, {"ep": 2, "tp": 2}) for case in ("mixtral", "qwen2_moe")]
ROWS = [*((case, LAYOUT if case in ALWAYS else {"tp": 2}) for case in CASES), *EXPERTS]


@pytest.mark.parametrize("row", always_run(ROWS, *((case, LAYOUT) for case in ALWAYS), EXPERTS[0]), ids=str)
def test_logits_and_round_trip(pool: WorkerPool, models: Any, tmp_path: Path, row: tuple[str, dict[str, int]]) -> None:
    case, parallel = row
    folder, expected = models(case)
    cfg = make_config(dataclasses.replace(hf_model_config(folder), seq_len=16), parallel)
    world = Grid.from_config(cfg.parallel).world
    logits = pool.run(world, hf_job, cfg, world, str(folder), str(tmp_path / "ckpt"))[-1]
    # Gemma 3's hidden states are the largest.
    np.testing.assert_allclose(logits, expected, atol=2e-5 if case.startswith("gemma3") else 1e-5, rtol=0)
    export_hf(tmp_path / "ckpt", tmp_path / "out")
    assert_same_weights(folder, tmp_path / "out")


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_transformers(models: Any, tmp_path: Path, case: str) -> None:
    folder, _ = models(case)
    # Without the padding token: transformers gives its embedding no gradient.
    hf, ids = load_model(folder), tokens() % 88 + 2
    expected = F.cross_entropy(hf(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())
    expected.backward()
    theirs = gradients(hf, tmp_path)

    model = dataclasses.replace(hf_model_config(folder), seq_len=15, hidden_dropout=0.0, attention_dropout=0.0)
    cfg = make_config(model, micro_batch_size=2, global_batch_size=2)
    engine = start(0, cfg, 1)
    load_hf(folder, model, engine.optimizer.states(), engine.ctx)
    engine.optimizer.finish_load()
    batches = to_microbatches(Rows.of(ids.numpy()), 2, engine.ctx.device)
    engine.optimizer.start_step(1)
    loss = engine.executor.run(engine.train_program(1), batches, 1, 0, 1 / 30)
    assert loss.item() / 30 == pytest.approx(expected.item(), rel=1e-6)
    ours = {p.shard.spec.name: p.main_grad for p in engine.stages[0].parameters()}
    # Scores that are not scaled are large: torch's kernel is 1.4e-5 off fp64 there, its matrix products are 5e-6.
    most = 2e-5 if model.arch == "gpt_neo" else 1e-5
    for spec in param_map(model).values():
        if spec.tied_to is None:
            where = FAMILIES[model.arch].place(spec.name, model.num_layers)
            mine = ours[spec.name][tuple(slice(n) for n in spec.shape)]
            for part in file_tensors(where, spec, model):
                reference = theirs[part.name]
                # Without rope, one bias for all keys shifts every score of a query: its gradient is 0, and rounded.
                shifts = part.name.endswith("k_proj.bias") and model.position != "rope"
                scale = (mine if shifts else reference).norm()
                for box, rows in part.views(reference):
                    assert (mine[box.index] - rows).norm() <= most * scale, part.name


@pytest.mark.parametrize("case", CASES)
def test_import_export_is_read_alike(models: Any, tmp_path: Path, case: str) -> None:
    folder, expected = models(case)
    import_hf(folder, tmp_path / "ckpt")
    export_hf(tmp_path / "ckpt", tmp_path / "out")
    assert_same_weights(folder, tmp_path / "out")
    np.testing.assert_allclose(logits_of(tmp_path / "out").numpy(), expected, atol=1e-6, rtol=0)
    ours, theirs = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "out", folder))
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert ours[key] == theirs[key]


def test_bf16_round_trip_and_sharded_files(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path / "hf", torch.bfloat16, max_shard_size="20KB")
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists()
    import_hf(tmp_path / "hf", tmp_path / "ckpt", shard_bytes=30_000)
    assert len(read_manifest(tmp_path / "ckpt").files) > 2
    config = export_hf(tmp_path / "ckpt", tmp_path / "out", shard_bytes=20_000)
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert_same_weights(tmp_path / "hf", tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    weights = read_all(tmp_path / "out")
    assert index["weight_map"].keys() == weights.keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * 2 for t in weights.values())
    count = len(set(index["weight_map"].values()))
    assert f"model-00001-of-{count:05d}.safetensors" in index["weight_map"].values()
    assert logits_of(tmp_path / "out").isfinite().all()


def test_dtype_rounds_once(models: Any, tmp_path: Path) -> None:
    import_hf(models("llama")[0], tmp_path / "ckpt")
    export_hf(tmp_path / "ckpt", tmp_path / "out", dtype="bf16")
    source = read_all(models("llama")[0])
    for name, tensor in read_all(tmp_path / "out").items():
        assert torch.equal(tensor, source[name].to(torch.bfloat16)), name


def test_sequences_longer_than_the_models_positions(models: Any, tmp_path: Path) -> None:
    """Said at the start, and the export is for that length, in the precision of the training."""
    folder, _ = models("llama")
    positions = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    for seq_len, run in ((2 * positions, "longer"), (positions // 2, "shorter")):
        cfg = megalite.configure(
            init_from_hf=str(folder),
            seq_len=seq_len,
            mock_data=True,
            train_steps=1,
            device="cpu",
            run_dir=str(tmp_path / run),
        )
        with megalite.start(cfg) as started:
            assert len(list(megalite.steps(started))) == 1
        words = f"--seq-len {seq_len} is more than the {positions} positions of the model in {folder}"
        log = "".join(path.read_text() for path in (tmp_path / run / "logs").iterdir())
        assert (words in log) == (run == "longer")
        config = export_hf(tmp_path / run, tmp_path / f"{run}-hf")
        assert config["max_position_embeddings"] == max(positions, seq_len)
        assert config["dtype"] == "float32"
    with pytest.raises(UserError, match="nowhere: is not a directory; get a model with: hf download NAME"):
        hf_model_config(tmp_path / "nowhere")


Weights = dict[str, torch.Tensor]


def with_module(folder: Path, out: Path, number: int = 1, odd: str = "", **keys: Any) -> tuple[Weights, Weights]:
    """Write a folder in bf16, biases in fp32, with a module that predicts a further token: a layer after the last one
    and like it, with copies of what it shares; config.json names `number`. The copy `odd` is none.

    Returns:
        The weights of the model, and of the module.
    """
    out.mkdir(exist_ok=True)
    config, weights = json.loads((folder / "config.json").read_text()), read_all(folder)
    weights = {k: v if k.endswith("_bias") else v.bfloat16() for k, v in weights.items()}
    g, hidden, last = torch.Generator().manual_seed(0), config["hidden_size"], config["num_hidden_layers"]
    layers = f"layers.{last - 1}.", f"layers.{last}."
    module = {
        **{name.replace(*layers): x + 1 for name, x in weights.items() if layers[0] in name},
        f"model.layers.{last}.eh_proj.weight": torch.randn(hidden, 2 * hidden, generator=g).bfloat16(),
        **{
            f"model.layers.{last}.{name}.weight": torch.randn(hidden, generator=g).bfloat16()
            for name in ("enorm", "hnorm", "shared_head.norm")
        },
        f"model.layers.{last}.embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        f"model.layers.{last}.shared_head.head.weight": weights["lm_head.weight"].clone(),
    }
    if odd:
        module[f"model.layers.{last}.{odd}.weight"] += 1
    save_file(weights | module, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": number, **keys}))
    return weights, module


FURTHER = pytest.mark.parametrize("family", ["deepseek_v3", pytest.param("glm4_moe", marks=pytest.mark.full)])


def with_qwen_module(folder: Path, out: Path, **keys: Any) -> tuple[Weights, Weights]:
    """Write a folder of Qwen3-Next in bf16 with a module, as published: a layer like the second, which has attention.
    config.json need not name it.

    Returns:
        The weights of the model, and of the module.
    """
    out.mkdir(exist_ok=True)
    config, g = json.loads((folder / "config.json").read_text()), torch.Generator().manual_seed(0)
    weights = {name: x.bfloat16() for name, x in read_all(folder).items()}
    layer, hidden = "model.layers.1.", config["hidden_size"]
    module = {
        **{
            name.replace(layer, "mtp.layers.0."): x + torch.randn(x.shape, generator=g).bfloat16() / 10
            for name, x in weights.items()
            if name.startswith(layer)
        },
        "mtp.fc.weight": torch.randn(hidden, 2 * hidden, generator=g).bfloat16(),
        **{
            f"mtp.{name}.weight": torch.randn(hidden, generator=g).bfloat16()
            for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        },
    }
    save_file(weights | module, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps({**config, **keys}))
    return weights, module


NO_MODULES = "config.json names 1 modules that predict further tokens, and its files hold none"


@FURTHER
def test_modules_that_predict_further_tokens(
    models: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str
) -> None:
    """To a checkpoint and back, bit for bit. transformers saves a model without them, and their number: that alone
    means none, which the log says. Biases stay fp32 beside weights in bf16, and are of no type.
    """
    folder, _ = models(family)
    more = tmp_path / "more"
    alias = {"deepseek_v3": "kimi_k2"}.get(family, family)
    for name, number, has in (("with", 1, True), ("without", 1, False), ("none", 0, False)):
        caplog.clear()
        weights, module = with_module(folder, more, number, model_type=alias)
        held = module if has else {}
        save_file(weights | held, more / "model.safetensors")
        import_hf(more, tmp_path / name)
        written = export_hf(tmp_path / name, tmp_path / f"{name}-hf")
        assert (written["model_type"], written["num_nextn_predict_layers"]) == (family, has)
        assert written["dtype"] == "bfloat16"
        out = read_all(tmp_path / f"{name}-hf")
        assert out.keys() == (weights | held).keys()
        assert all(torch.equal(out[k], x) and out[k].dtype == x.dtype for k, x in (weights | held).items())
        assert out["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
        assert "differs" not in caplog.text
        assert caplog.text.count(NO_MODULES) == (name == "without")
    save_file(weights | module, more / "model.safetensors")
    with pytest.raises(UserError, match="eh_proj.weight.* unexpected|unexpected: its config.json does not have it"):
        import_hf(more, tmp_path / "other")
    # Evaluation and generation do without the module.
    ids = torch.arange(12).view(1, -1)
    inference = [load_for_inference(tmp_path / name, torch.device("cpu")) for name in ("with", "with-hf", "none")]
    assert all(torch.equal(model.logits(ids), inference[0].logits(ids)) for model in inference)
    assert not any("eh_proj" in name for model in inference for name, _ in model.stage.named_parameters())


@pytest.mark.parametrize("layers", [4, 3], ids=["attention last", "delta net last"])
def test_the_module_of_qwen3_next(
    pool: WorkerPool, models: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, layers: int
) -> None:
    """To a checkpoint and back bit for bit, whether config.json names it or not, and as saved in any layout."""
    folder, _ = models("qwen3_next")
    last: dict[str, Any] = (
        {} if layers == 4 else {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention"] * 2}
    )
    keys = {**last, "layer_types": last["layer_types"][:3]} if last else {}
    weights, module = with_qwen_module(folder, tmp_path / "hf", **keys)
    held = {k: x for k, x in (weights | module).items() if not k.startswith(f"model.layers.{layers}.")}
    save_file(held, tmp_path / "hf" / "model.safetensors")
    import_hf(tmp_path / "hf", tmp_path / "one")
    model = dataclasses.replace(hf_model_config(tmp_path / "hf"), seq_len=16)
    assert model.mtp_num_layers == 1
    for layout in ({"tp": 2}, {"pp": 2}):
        name = "".join(layout)
        pool.run(2, hf_job, make_config(model, layout), 2, str(tmp_path / "hf"), str(tmp_path / name))
    for name in ("one", "tp", "pp"):
        written = export_hf(tmp_path / name, tmp_path / f"{name}-hf", dtype="bf16")
        assert written["num_nextn_predict_layers"] == 1
        out = read_all(tmp_path / f"{name}-hf")
        assert out.keys() == held.keys()
        assert all(torch.equal(out[k], x) for k, x in held.items())
    assert hf_model_config(tmp_path / "one-hf") == hf_model_config(tmp_path / "hf")
    # Without the module, config.json need not say so; with a part of it, or other modules, the folder is none.
    assert "further tokens" not in caplog.text
    assert hf_model_config(folder).mtp_num_layers == 0
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**written, "num_nextn_predict_layers": 2}))
    with pytest.raises(UserError, match="num_nextn_predict_layers 2: megalite reads one module of this family"):
        hf_model_config(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(written))
    del held["mtp.fc.weight"]
    save_file(held, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(UserError, match="tensor mtp.fc.weight is missing"):
        hf_model_config(tmp_path / "hf")


@pytest.mark.full
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_a_run_trains_the_modules_of_a_folder_if_it_is_told_to(
    models: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    """Without the option it is what it was before the folder's modules could be read, and the log names the option."""
    written = with_qwen_module if family == "qwen3_next" else with_module
    weights, module = written(models(family)[0], tmp_path / "hf")

    def start(run: str, **more: Any) -> Any:
        options = {
            "seq_len": 16,
            "mock_data": True,
            "train_steps": 1,
            "device": "cpu",
            "eval_every": 1,
            "eval_steps": 1,
        }
        cfg = megalite.configure(init_from_hf=str(tmp_path / "hf"), run_dir=str(tmp_path / run), **{**options, **more})
        return megalite.start(cfg)

    for run, modules in (("plain", None), ("further", 1)):
        with start(run, mtp_num_layers=modules) as started:
            (record,) = megalite.steps(started)
        assert ("mtp_loss" in record) == (run == "further")
        log = "".join(path.read_text() for path in (tmp_path / run / "logs").iterdir())
        assert log.count("modules that predict further tokens left out: 1 (--mtp-num-layers 1 trains") == (
            run == "plain"
        )
        out = tmp_path / f"{run}-out"
        assert export_hf(tmp_path / run, out)["num_nextn_predict_layers"] == (modules or 0)
        assert (read_all(out).keys() == (weights | module).keys()) == (run == "further")
    # Neither more nor fewer later, and not more than there are.
    with pytest.raises(
        UserError, match=r"mtp_num_layers 1 there, 0 here\); give --mtp-num-layers 1, or start a new run"
    ):
        start("further")
    with pytest.raises(UserError, match=r"0 there, 1 here\); give --mtp-num-layers 0: none can be added later"):
        start("plain", mtp_num_layers=1)
    with pytest.raises(UserError, match=r"--mtp-num-layers 2: .*/hf holds 1 such modules; lower it, or drop it"):
        start("more", mtp_num_layers=2)
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(UserError, match=r"--mtp-num-layers 1: .*/hf holds 0 such modules; lower it, or drop it"):
        start("none", mtp_num_layers=1)
    # Qwen3-Next's config.json names no number.
    assert capsys.readouterr().err.count(NO_MODULES) == (family == "deepseek_v3")


COPIES = {"embed_tokens": "embed_tokens.weight", "shared_head.head": "lm_head.weight"}


def test_copies_in_modules_are_compared_once_where_modules_are_read(
    pool: WorkerPool, models: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At import, and by rank 0 of a run that trains the module; elsewhere none of their bytes is read."""
    for copy, of in COPIES.items():
        folder = tmp_path / copy
        _, module = with_module(models("deepseek_v3")[0], folder, odd=copy)
        caplog.clear()
        model = dataclasses.replace(hf_model_config(folder), seq_len=16)
        assert "differs" not in caplog.text
        import_hf(folder, tmp_path / f"{copy}-ckpt")
        assert caplog.text.count(f"{copy}.weight differs from {of}, which it is a copy of and which is kept") == 1
    names = [name for name in module if name.endswith(tuple(f"{copy}.weight" for copy in COPIES))]
    size = sum(module[name].nbytes for name in names)
    for modules, first in ((0, 0), (1, size)):
        cfg = make_config(dataclasses.replace(model, mtp_num_layers=modules))
        assert pool.run(2, bytes_of_tensors, cfg, 2, str(folder), names) == [first, 0]
    # Their shapes are checked everywhere.
    wrong = {names[0]: module[names[0]][:7].clone()}
    save_file(read_all(folder) | wrong, folder / "model.safetensors")
    with pytest.raises(UserError, match=rf"{names[0]} has shape \[7, 32\], config.json implies \[90, 32\]"):
        hf_model_config(folder)


def test_modules_that_a_family_has_no_files_for_are_left_out_of_an_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"preset": "tiny", "mock_data": True, "seq_len": 16, "train_steps": 1, "device": "cpu"}
    cfg = megalite.configure(run_dir=str(tmp_path / "run"), mtp_num_layers=2, **options)
    with megalite.start(cfg) as started:
        (record,) = megalite.steps(started)
    assert "mtp_loss" in record
    assert "mtp_num_layers" not in export_hf(tmp_path / "run", tmp_path / "out")
    words = "modules that predict further tokens left out: 2 (files of --arch llama do not hold them)"
    assert capsys.readouterr().err.count(words) == 1
    assert hf_model_config(tmp_path / "out") == dataclasses.replace(cfg.model, mtp_num_layers=0)
    ids = torch.arange(12).view(1, -1)
    ours, theirs = (load_for_inference(tmp_path / name, torch.device("cpu")).logits(ids) for name in ("run", "out"))
    assert torch.equal(ours, theirs)


def assert_same_gradients(hf: Any, module: Any, engine: Any, model: Any, ids: torch.Tensor, tmp_path: Path) -> None:
    """Of the loss and of the module's, in Qwen3-Next, each divided by the number of its own targets."""
    ids = ids % 88 + 2  # without the padding token: transformers gives its embedding no gradient
    seen = hf(ids[:, :-1], output_hidden_states=True)
    positions = torch.arange(1, ids.shape[1] - 1)[None]
    hidden = module.forward_layer(0, seen.hidden_states[-1][:, :-1], positions, None, input_ids=ids[:, 1:-1])
    losses = [
        F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        for logits, targets in ((seen.logits, ids[:, 1:]), (module.shared_head(hidden), ids[:, 2:]))
    ]
    (losses[0] + engine.cfg.train.mtp_loss_scaling_factor * losses[1]).backward()
    block, extras = module.layers[0].mtp_block, module.layers[0]
    theirs = gradients(hf, tmp_path / "main")
    # Its block takes the place of one of the model, whose names transformers writes.
    hf.model.layers[1] = block
    of_block = gradients(hf, tmp_path / "block")
    theirs |= {
        name.replace("model.layers.1.", "mtp.layers.0."): x for name, x in of_block.items() if "layers.1." in name
    }
    theirs |= {"mtp.fc.weight": extras.eh_proj.weight.grad, "mtp.norm.weight": extras.post_norm.weight.grad}
    theirs["mtp.pre_fc_norm_embedding.weight"] = extras.enorm.weight.grad
    theirs["mtp.pre_fc_norm_hidden.weight"] = extras.hnorm.weight.grad

    rows = Rows.of(ids.numpy())
    batches = to_microbatches(rows, 2, engine.ctx.device, engine.ctx.axis("cp"), *weigh_parts(engine, rows))
    engine.optimizer.start_step(1)
    loss = engine.executor.run(engine.train_program(1), batches, 1, 0, 1 / 30)
    assert loss.item() / 30 == pytest.approx(losses[0].item(), rel=1e-6)
    ours = {p.shard.spec.name: p.main_grad for p in engine.stages[0].parameters()}
    for spec in param_map(model).values():
        if spec.tied_to is None:
            mine = ours[spec.name][tuple(slice(n) for n in spec.shape)]
            for part in file_tensors(FAMILIES["qwen3_next"].place(spec.name, model.num_layers), spec, model):
                reference = theirs.pop(part.name)
                for box, view in part.views(reference):
                    assert (mine[box.index] - view).norm() <= 1e-5 * reference.norm(), part.name
    assert not theirs


@pytest.mark.parametrize(
    "family", ["qwen3_next", *(pytest.param(name, marks=pytest.mark.full) for name in ("deepseek_v3", "glm4_moe"))]
)
def test_transformers_computes_the_logits_of_a_module_too(
    models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Its own module, read from our export, and its own drafting with it. It knows modules by the number of
    their layer in published models.
    """
    transformers, layers = pytest.importorskip("transformers"), pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("this transformers has no modules that predict further tokens")
    (with_qwen_module if family == "qwen3_next" else with_module)(models(family)[0], tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "ckpt")
    last = export_hf(tmp_path / "ckpt", tmp_path / "out", dtype="fp32")["num_hidden_layers"]
    known = "_keys_to_ignore_on_load_unexpected"
    names = [rf"model\.layers\.{last}.*", r"^mtp.*"]
    monkeypatch.setattr(getattr(transformers, FAMILIES[family].architecture), known, names)
    hf, ids = load_model(tmp_path / "out"), tokens()
    if family == "qwen3_next":
        hf.config.num_mtp_layers, hf.config.mtp_layer_types = 1, ["full_attention"]
    module = layers.MtpModel.from_pretrained(hf).eval()
    with torch.no_grad():
        seen = hf(ids[:, :-1], output_hidden_states=True)
        positions = torch.arange(1, ids.shape[1])[None]
        hidden = module.forward_layer(0, seen.hidden_states[-1], positions, None, input_ids=ids[:, 1:])
        expected = module.shared_head(hidden).numpy()
    model = dataclasses.replace(hf_model_config(tmp_path / "out"), seq_len=15)
    assert model.mtp_num_layers == 1
    engine = start(0, make_config(model, micro_batch_size=2, global_batch_size=2), 1)
    load_hf(tmp_path / "out", model, engine.optimizer.states(), engine.ctx)
    engine.optimizer.finish_load()
    stage, logits = engine.stages[0], []
    stage.lm_head.register_forward_hook(lambda *args: logits.append(args[-1]))
    tokens_SB, ahead = (MicroBatch.of_samples(x.t().contiguous(), None) for x in (ids[:, :-1], ids[:, 1:]))
    with torch.no_grad():
        stage(tokens_SB.tokens_SB, dataclasses.replace(tokens_SB, further=(ahead,)), ForwardPass(0, 0, training=False))
    for ours, theirs in zip(logits, (seen.logits.numpy(), expected), strict=True):
        np.testing.assert_allclose(ours[..., : model.vocab].transpose(0, 1), theirs, atol=1e-5, rtol=0)
    if family == "qwen3_next":
        assert_same_gradients(hf, module, engine, model, ids, tmp_path)
        return
    # Drafts are right or corrected.
    prompt, more = ids[:1, :5], {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(hf.generate(prompt, use_mtp=True, **more), hf.generate(prompt, **more))


def test_experts_in_mxfp4_are_read_as_transformers_reads_them(models: Any, tmp_path: Path) -> None:
    """Every number of 4 bits and many scales; in whole, and slice by slice where a cut is inside of a scale's group."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    folder, _ = models("gpt_oss_wide")
    weights = {name: t.bfloat16() for name, t in read_all(folder).items()}
    expected, g = dict(weights), torch.Generator().manual_seed(0)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, out = weights.pop(name).shape
        blocks = torch.randint(0, 256, (experts, out, inner // 32, 16), generator=g, dtype=torch.uint8)
        scales = torch.randint(119, 129, (experts, out, inner // 32), generator=g, dtype=torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = mxfp4.convert_moe_packed_tensors(blocks, scales)
    packed = tmp_path / "packed"
    packed.mkdir()
    save_file(weights, packed / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    import_hf(packed, tmp_path / "ckpt")
    assert "quantization_config" not in export_hf(tmp_path / "ckpt", tmp_path / "out")
    exported = read_all(tmp_path / "out")
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    source = HFSource(packed)
    assert source.dtype == "bfloat16"
    for spec, packing in source.tensors():
        if ".experts." in spec.name and len(spec.shape) == 3:
            whole, (e, o, i) = source.full(spec, packing), spec.shape
            box = Slice((1, o // 4, i // 4), (e - 1, o // 2, i // 2))
            assert torch.equal(source.full(spec, packing, box), whole[1:, o // 4 : o // 4 * 3, i // 4 : i // 4 * 3])
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="missing, required by its config.json"):
        import_hf(packed, tmp_path / "other")


@pytest.mark.parametrize("rope", [LLAMA3_ROPE, YARN_ROPE])
@pytest.mark.parametrize("old", [False, True])
def test_positions_before_scaling_are_those_that_transformers_takes(
    models: Any, rope: dict[str, Any], old: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the scaling does not have them: those of the model."""
    from transformers import AutoConfig

    key = "original_max_position_embeddings"
    raw = json.loads((models("llama")[0] / "config.json").read_text())
    raw = {k: v for k, v in raw.items() if k not in ("rope_parameters", "rope_scaling", "rope_theta")}
    without = {k: v for k, v in rope.items() if k != key}
    for scaling in (without, rope):
        keys = {"rope_scaling": dict(scaling), "rope_theta": 10000.0} if old else {"rope_parameters": dict(scaling)}
        theirs = AutoConfig.for_model(**json.loads(json.dumps({**raw, **keys}))).rope_parameters
        caplog.clear()
        ours = read_config({**raw, **keys}, "config.json").rope_scaling
        assert ours is not None
        assert ours.original_max_position_embeddings == theirs[key]
        told = f"config.json: rope scaling {rope['rope_type']} has no {key}: {raw['max_position_embeddings']}, as"
        assert (told in caplog.text) == (scaling is without)
    for other in ({"model_type": "phi3"}, {key: 24}):
        with pytest.raises(UserError, match=f"rope scaling {rope['rope_type']} has no {key}"):
            read_config({**raw, **other, "rope_theta": 10000.0, "rope_scaling": without}, "config.json")


def test_gpt_oss_without_keys_of_rope_is_read_as_transformers_reads_it(models: Any) -> None:
    raw = json.loads((models("gpt_oss")[0] / "config.json").read_text())
    bare = {k: v for k, v in raw.items() if not k.startswith("rope_")}
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(**bare).rope_parameters
    assert read_config(bare, "config.json") == read_config({**raw, "rope_parameters": theirs}, "config.json")
    with pytest.raises(UserError, match="rope_type: rope_parameters say 'yarn', the old keys 'default'"):
        read_config({**bare, "rope_scaling": None}, "config.json")
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}, "rope_scaling": None}
    assert read_config({**bare, **plain}, "config.json").rope_scaling is None


def test_layers_of_llama_4_that_follow_no_pattern_are_refused(models: Any) -> None:
    raw = json.loads((models("llama4")[0] / "config.json").read_text())
    for key, value in (
        ("no_rope_layers", [1, 0, 0, 1]),
        ("layer_types", ["chunked_attention", "full_attention", "full_attention", "chunked_attention"]),
    ):
        with pytest.raises(UserError, match=f"{key}: is not supported: megalite computes"):
            read_config({**raw, key: value}, "config.json")
    # The hub's files: an empty list is the interval's, and a number is true.
    hub = {**raw, "no_rope_layers": [], "attn_temperature_tuning": 4, "layer_types": None, "moe_layers": None}
    assert read_config(hub, "config.json") == read_config(raw, "config.json")


LAYER_TYPES = ["linear_attention", "full_attention", "full_attention", "linear_attention"]


@pytest.mark.parametrize(
    ("case", "key", "value", "says"),
    [
        ("deepseek_v2", "topk_method", "noaux_tc", "must be one of greedy, group_limited_greedy"),
        ("deepseek_v2", "norm_topk_prob", True, "megalite computes False"),
        ("deepseek_v3", "topk_method", "greedy", "megalite computes 'noaux_tc'"),
        ("deepseek_v3", "scoring_func", "softmax", "megalite computes 'sigmoid'"),
        ("gpt_oss", "swiglu_limit", 6.0, "megalite computes 7.0"),
        ("gpt_oss", "attention_dropout", 0.1, "megalite computes 0.0"),
        ("qwen3_next", "layer_types", LAYER_TYPES, "megalite computes"),
        ("opt", "_remove_final_layer_norm", True, "megalite computes False"),
    ],
)
def test_what_a_family_does_not_compute_is_refused(models: Any, case: str, key: str, value: Any, says: str) -> None:
    raw = json.loads((models(case)[0] / "config.json").read_text())
    with pytest.raises(UserError, match=f"{key}.*: .*{says}"):
        read_config({**raw, key: value}, "config.json")


def test_weights_in_fp8_are_refused_by_name(models: Any, tmp_path: Path) -> None:
    folder, _ = models("deepseek_v3")
    copytree(folder, tmp_path / "fp8")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="quantization_config fp8: weights in this format are not read"):
        import_hf(tmp_path / "fp8", tmp_path / "ckpt")


@pytest.mark.parametrize(("case", "prefix"), [("opt", "model."), ("bloom", "transformer."), ("gptj", "transformer.")])
def test_files_without_the_prefix(models: Any, tmp_path: Path, case: str, prefix: str) -> None:
    """As older classes wrote them; a head, with its bias, has none."""
    folder, _ = models(case)
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").write_text((folder / "config.json").read_text())
    tensors = {k.removeprefix(prefix): v for k, v in read_all(folder).items()}
    save_file(tensors, tmp_path / "hub" / "model.safetensors")
    import_hf(tmp_path / "hub", tmp_path / "ckpt")
    export_hf(tmp_path / "ckpt", tmp_path / "out")
    assert_same_weights(folder, tmp_path / "out")


def test_hub_files_of_gpt2(models: Any, tmp_path: Path) -> None:
    """No prefix, and attention masks that are no weights."""
    folder, _ = models("gpt2")
    hub = tmp_path / "hub"
    hub.mkdir()
    (hub / "config.json").write_text((folder / "config.json").read_text())
    tensors = {k.removeprefix("transformer."): v for k, v in read_all(folder).items()}
    tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 32, 32).tril().bool() for i in range(2)}
    tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, hub / "model.safetensors")
    import_hf(hub, tmp_path / "ckpt")
    export_hf(tmp_path / "ckpt", tmp_path / "out")
    assert_same_weights(folder, tmp_path / "out")


@pytest.mark.parametrize("case", CASES)
def test_config_says_it_in_old_and_new_keys(models: Any, case: str) -> None:
    raw = json.loads((models(case)[0] / "config.json").read_text())
    cfg = read_config(raw, "config.json")
    written = write_config(cfg, "float32", {})
    old = {k: v for k, v in written.items() if k not in ("rope_parameters", "dtype")}
    new = {
        k: v for k, v in written.items() if k not in ("rope_theta", "rope_scaling", "rotary_emb_base", "torch_dtype")
    }
    assert read_config(old, "old") == read_config(new, "new") == read_config(written, "both")
    if "rope_parameters" in written:
        theta = "rotary_emb_base" if "rotary_emb_base" in written else "rope_theta"
        with pytest.raises(UserError, match="rope_theta: rope_parameters say"):
            read_config({**written, theta: 12345.0}, "config.json")


# config.json of models on the hub, without what says nothing of the weights; they leave out what is a default.
HUB: dict[str, dict[str, Any]] = {
    "opt-125m": {"model_type": "opt", "activation_function": "relu", "attention_dropout": 0.0, "dropout": 0.1}
    | {"do_layer_norm_before": True, "ffn_dim": 3072, "hidden_size": 768, "init_std": 0.02, "layerdrop": 0.0}
    | {"max_position_embeddings": 2048, "num_attention_heads": 12, "num_hidden_layers": 12, "vocab_size": 50272}
    | {"word_embed_proj_dim": 768},
    "opt-350m": {"model_type": "opt", "activation_function": "relu", "attention_dropout": 0.0, "dropout": 0.1}
    | {"do_layer_norm_before": False, "ffn_dim": 4096, "hidden_size": 1024, "init_std": 0.02, "layerdrop": 0.0}
    | {"max_position_embeddings": 2048, "num_attention_heads": 16, "num_hidden_layers": 24, "vocab_size": 50272}
    | {"word_embed_proj_dim": 512},
    "bloom-560m": {"model_type": "bloom", "attention_dropout": 0.0, "hidden_dropout": 0.0, "n_embed": 1024}
    | {"layer_norm_epsilon": 1e-05, "n_inner": None, "n_layer": 24, "num_attention_heads": 16, "offset_alibi": 100}
    | {"pretraining_tp": 1, "seq_length": 2048, "skip_bias_add": True, "vocab_size": 250880},
    "gpt-neo-1.3b": {"model_type": "gpt_neo", "attention_types": [[["global", "local"], 12]], "embed_dropout": 0}
    | {"attention_layers": ["global", "local"] * 12, "hidden_size": 2048, "intermediate_size": None}
    | {"max_position_embeddings": 2048, "num_heads": 16, "num_layers": 24, "resid_dropout": 0, "vocab_size": 50257}
    | {"window_size": 256, "attention_dropout": 0},
    "gpt-j-6b": {"model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_inner": None, "n_layer": 28, "rotary": True}
    | {"n_positions": 2048, "rotary_dim": 64, "scale_attn_weights": True, "tie_word_embeddings": False}
    | {"vocab_size": 50400},
}


@pytest.mark.parametrize("preset", HUB)
def test_config_of_the_hub_is_the_preset(preset: str) -> None:
    read = read_config(HUB[preset], "config.json")
    meant = ModelConfig.from_arch(**PRESETS[preset])
    assert dataclasses.replace(read, hidden_dropout=0.0, attention_dropout=0.0) == meant


def test_entries_of_attention_types_may_be_cut_in_any_way() -> None:
    neo = {name: value for name, value in HUB["gpt-neo-1.3b"].items() if name != "attention_layers"}
    for entries, kinds in (
        ([[["global"], 1], [["local", "global"], 11], [["local"], 1]], (FULL, SLIDING) * 12),
        ([[["global"], 12], [["local"], 12]], (FULL,) * 12 + (SLIDING,) * 12),
    ):
        read = read_config({**neo, "attention_types": entries}, "config.json")
        assert [read.window_of(layer) for layer in range(24)] == [256 if kind == SLIDING else None for kind in kinds]
    with pytest.raises(UserError, match="attention_layers: is not supported"):
        read_config({**HUB["gpt-neo-1.3b"], "attention_types": [[["global"], 24]]}, "config.json")
    with pytest.raises(UserError, match="attention_types: is not supported"):
        read_config({**neo, "attention_types": [[["global"], 23]]}, "config.json")


def test_links_of_the_hub_cache(models: Any, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "abc", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, name in enumerate(("config.json", "model.safetensors")):
        (blobs / str(number)).write_bytes((models("llama")[0] / name).read_bytes())
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    import_hf(snapshot, tmp_path / "ckpt")
    (tmp_path / "elsewhere").write_bytes((blobs / "1").read_bytes())
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a link"):
        import_hf(snapshot, tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.full
def test_memory_stays_near_one_tensor(tmp_path: Path) -> None:
    """A model of 24 tensors of 16 MiB: import and export stay below two tensors and a buffer above the start."""
    code = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import save_file
from megalite.core.mesh.grid import Grid
from megalite.extras.convert.hf import export_hf, import_hf
from megalite.extras.inference.load import load_model as load_for_inference
from megalite.runtime.checkpoint.hf.config import write_config
from megalite.runtime.checkpoint.hf.packing import file_tensors
from megalite.core.options.model import ModelConfig
from megalite.core.parts.families import FAMILIES
from megalite.core.model.parameters import param_map
from tests.limits import memory_limit
root = Path(sys.argv[1])
cfg = ModelConfig(num_layers=2, hidden_size=1024, num_heads=8, ffn_hidden_size=4096, vocab_size=4096, seq_len=64)
(root / "hf").mkdir()
for spec in param_map(cfg).values():
    where = FAMILIES["llama"].place(spec.name, 2)
    for part in file_tensors(where, spec, cfg):
        save_file({part.name: torch.ones(part.shape)}, root / "hf" / f"{part.name}.safetensors")
index = {p.stem: p.name for p in (root / "hf").glob("*.safetensors")}
(root / "hf" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
(root / "hf" / "config.json").write_text(json.dumps(write_config(cfg, "float32", {})))
import_hf(root / "hf", root / "warm")
largest = 2 * 4096 * 1024 * 4  # gate_up_proj, 32 MiB
with memory_limit(2 * largest + (24 << 20)):
    import_hf(root / "hf", root / "ckpt")
    export_hf(root / "ckpt", root / "out")
"""
    command, env = [sys.executable, "-c", code, str(tmp_path)], {**os.environ, **GIVES_BACK}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# transformers 4.57 leaves mscale_all_dim out of DeepSeek-V2's softmax scale, and ignores Llama 4's attention_bias.
WRONG_IN_4 = {"deepseek_v2_lite", "llama4_maverick"}


@pytest.mark.slow
def test_transformers_4_reads_it_alike(models: Any, tmp_path: Path) -> None:
    """And what it writes is read here. MEGALITE_TRANSFORMERS4_PYTHON: a Python with transformers 4.57 and torch."""
    python = os.environ.get("MEGALITE_TRANSFORMERS4_PYTHON")
    if not python:
        pytest.skip("needs transformers 4.57 in an environment of its own (MEGALITE_TRANSFORMERS4_PYTHON)")
    cases = [case for case in CASES if case not in WRONG_IN_4]
    for case in cases:
        import_hf(models(case)[0], tmp_path / case / "ckpt")
        export_hf(tmp_path / case / "ckpt", tmp_path / case / "out")
    code = """
import sys, numpy as np, torch, transformers
from pathlib import Path
from tests.unit.checkpoint.hf_models import logits_of, make_model
assert transformers.__version__.startswith("4.57"), transformers.__version__
for case in sys.argv[2:]:
    folder = Path(sys.argv[1]) / case
    np.save(folder / "logits.npy", logits_of(folder / "out").numpy())
    make_model(case, folder / "hf4")
    np.save(folder / "logits4.npy", logits_of(folder / "hf4").numpy())
"""
    done = subprocess.run([python, "-c", code, str(tmp_path), *cases], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for case in cases:
        folder = tmp_path / case
        np.testing.assert_allclose(np.load(folder / "logits.npy"), models(case)[1], atol=3e-6, rtol=0, err_msg=case)
        import_hf(folder / "hf4", folder / "ckpt4")
        export_hf(folder / "ckpt4", folder / "out4")
        assert_same_weights(folder / "hf4", folder / "out4")
        again = logits_of(folder / "out4").numpy()
        np.testing.assert_allclose(again, np.load(folder / "logits4.npy"), atol=3e-6, rtol=0, err_msg=case)
