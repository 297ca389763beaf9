"""Import of Megatron-LM checkpoints that megatron-core itself wrote: bit for bit, and its own logits."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger
from megalite.core.model.parameters import param_map
from megalite.core.options.model import ModelConfig
from megalite.extras.convert.megatron.convert import import_megatron
from megalite.extras.inference.load import load_model
from megalite.runtime.checkpoint.load import model_config
from megalite.runtime.checkpoint.manifest import read_manifest
from tests.parity.runs import train
from tests.unit.checkpoint.jobs import whole_tensors

WRITER = Path(__file__).with_name("megatron_writer.py")
_STATES = {"master": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the checkpoints that megatron-core wrote."""
    if not importlib.util.find_spec("megatron"):
        pytest.skip("megatron-core is not installed (pip install --no-deps megatron-core==0.16.1)")
    folder = tmp_path_factory.mktemp("megatron")
    done = subprocess.run([sys.executable, WRITER, folder], capture_output=True, text=True, timeout=300)
    if "ImportError" in done.stderr or "ModuleNotFoundError" in done.stderr:
        pytest.skip(f"this megatron-core cannot be imported: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return folder


def expected(folder: Path, name: str, cfg: ModelConfig) -> dict[str, np.ndarray]:
    """What a checkpoint must hold, from the tensors that megatron-core's own reader gives."""
    plain = torch.load(folder / f"{name}.pt", weights_only=True)
    out = {}
    for role, key in _STATES.items():
        spelled = [f"optimizer.state.{key}.", f"optimizer.state.fp32_{key}."]
        prefix = next((p for p in spelled if f"{p}embedding.word_embeddings.weight" in plain), "")
        for ours in (spec.name for spec in param_map(cfg).values() if spec.tied_to is None):
            out[f"{role} {ours}"] = _theirs_of(ours, plain, prefix, cfg).float().numpy()
    return out


def _theirs_of(ours: str, plain: dict[str, torch.Tensor], prefix: str, cfg: ModelConfig) -> torch.Tensor:
    found = re.fullmatch(r"layers\.(\d+)\.(.*)\.(weight|bias)", ours)
    if not found:
        names = {"embed_tokens": "embedding.word_embeddings", "embed_positions": "embedding.position_embeddings"}
        names |= {"norm": "decoder.final_layernorm", "lm_head": "output_layer"}
        stem, leaf = ours.rsplit(".", 1)
        return plain[f"{prefix}{names[stem]}.{leaf}"][: cfg.vocab]
    names = {
        "input_layernorm": "self_attention.linear_qkv.layer_norm_",
        "self_attn.qkv_proj": "self_attention.linear_qkv.",
        "self_attn.q_norm": "self_attention.q_layernorm.",
        "self_attn.k_norm": "self_attention.k_layernorm.",
        "self_attn.o_proj": "self_attention.linear_proj.",
        "post_attention_layernorm": "mlp.linear_fc1.layer_norm_",
        "mlp.gate_up_proj": "mlp.linear_fc1.",
        "mlp.up_proj": "mlp.linear_fc1.",
        "mlp.down_proj": "mlp.linear_fc2.",
    }
    leaf, layer = f"{names[found[2]]}{found[3]}", int(found[1])
    stacked = plain.get(f"{prefix}decoder.layers.{leaf}")
    tensor = plain[f"{prefix}decoder.layers.{layer}.{leaf}"] if stacked is None else stacked[layer]
    if found[2] != "self_attn.qkv_proj":
        return tensor
    # One block of rows per head: of each group its queries, its key and its value.
    blocks, per = tensor.split(cfg.head_size), cfg.num_heads // cfg.kv_heads
    queries = [g * (per + 2) + j for g in range(cfg.kv_heads) for j in range(per)]
    keys = [g * (per + 2) + per for g in range(cfg.kv_heads)]
    return torch.cat([blocks[i] for i in (*queries, *keys, *(k + 1 for k in keys))])


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "kind", "vocab"),
    [
        ("llama", "fully_reshardable", 100),
        ("llama", "torch", None),
        ("qwen", "fully_reshardable", None),
        ("gpt", "torch_dist", None),
        ("gpt", "torch", 100),
        ("gpt16", "torch_dist", None),
    ],
)
def test_weights_and_moments_bit_for_bit(theirs: Path, tmp_path: Path, name: str, kind: str, vocab: int | None) -> None:
    """tp 2 pp 2 with the distributed optimizer (llama), one rank, and an ordinary optimizer, in both formats."""
    import_megatron(theirs / f"{name}_{kind}", tmp_path / "ckpt", vocab_size=vocab, shard_bytes=30_000)
    manifest = read_manifest(tmp_path / "ckpt")
    cfg = model_config(manifest.meta, tmp_path)
    assert (manifest.step, manifest.meta["consumed_samples"], manifest.meta["scalars"]["num_steps"]) == (7, 56, 2)
    assert cfg.vocab == (vocab or 128)
    ours, wanted = whole_tensors(tmp_path / "ckpt"), expected(theirs, name, cfg)
    assert ours.keys() == wanted.keys()
    for key, tensor in wanted.items():
        np.testing.assert_array_equal(ours[key], tensor, err_msg=key)
    if name in ("gpt", "qwen"):
        reference = torch.load(theirs / f"{name}_logits.pt", weights_only=True)
        model = load_model(tmp_path / "ckpt", torch.device("cpu"))
        logits = model.logits(reference["ids"])
        np.testing.assert_allclose(logits.numpy(), reference["logits"][..., : cfg.vocab].numpy(), atol=1e-5, rtol=0)


@pytest.mark.full
def test_moments_by_bucket_are_left_and_the_log_says_so(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command itself, on the sharding that does not map, and on an iteration folder."""
    from megalite.extras.convert import command

    folder = theirs / "llama_dp_reshardable" / "iter_0000007"
    command.main(["import", "--megatron", str(folder), "--out", str(tmp_path / "ckpt")])
    printed = capsys.readouterr()
    assert "iteration 7" in printed.out
    assert "optimizer will start at zero" in printed.out + printed.err
    manifest = read_manifest(tmp_path / "ckpt")
    wanted = expected(theirs, "llama", model_config(manifest.meta, tmp_path))
    weights = torch.load(theirs / "llama.pt", weights_only=True)["output_layer.weight"]
    assert set(manifest.tensors) == {"master"}
    assert manifest.meta["scalars"] == {}
    ours = whole_tensors(tmp_path / "ckpt")
    assert len(ours) == len(wanted) // 3
    np.testing.assert_array_equal(ours["master lm_head.weight"], weights.float().numpy())


@pytest.mark.full
def test_training_continues_at_its_iteration(theirs: Path, tmp_path: Path) -> None:
    """With the flags of the Megatron-LM script; an Adam update with no gradient history would be larger."""
    import_megatron(theirs / "gpt_torch_dist", tmp_path / "ckpt")
    flags = "--arch gpt2 --num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --vocab-size 128"
    flags += " --seq-length 16 --norm-epsilon 1e-6 --mock-data --device cpu --train-iters 9 --global-batch-size 8"
    arguments = [*flags.split(), "--micro-batch-size", "8", "--resume", str(tmp_path / "ckpt")]
    (step, consumed), _ = train(0, [*arguments, "--run-dir", str(tmp_path / "run")], 1)
    assert (step, consumed) == (9, 56 + 16)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "event" not in line] == [8, 9]
    saved = read_manifest(tmp_path / "run" / "checkpoints" / "step_00000009")
    assert saved.meta["scalars"]["num_steps"] == 2 + 2


@pytest.mark.full
def test_loss_scale_and_copies_that_differ(
    theirs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss scale is imported; masters that are not the weights are refused, a tied head that drifted is logged."""
    files = {rank: f"mp_rank_{rank}/model_optim_rng.pt" for rank in ("00_000", "00_001")}
    source = theirs / "gpt16_torch" / "iter_0000007"
    contents = {rank: torch.load(source / file, weights_only=False) for rank, file in files.items()}

    def save() -> Path:
        for rank, file in files.items():
            (tmp_path / "theirs" / file).parent.mkdir(parents=True, exist_ok=True)
            torch.save(contents[rank], tmp_path / "theirs" / file)
        return tmp_path / "theirs"

    contents["00_000"]["optimizer"]["grad_scaler"] = {"scale": torch.tensor([1024.0]), "growth_tracker": 5}
    scalars = import_megatron(save(), tmp_path / "one").meta["scalars"]
    assert scalars == {"num_steps": 2, "loss_scale": 1024.0, "loss_scale_good_steps": 5}
    contents["00_000"]["optimizer"]["fp32_from_fp16_params"][0][1].add_(1)
    contents["00_001"]["model"]["output_layer.weight"].add_(1)
    with pytest.raises(UserError, match="differ from its weights.*--weights-only"):
        import_megatron(save(), tmp_path / "two")
    monkeypatch.setattr(logger, "propagate", True)
    assert set(import_megatron(save(), tmp_path / "two", weights_only=True).tensors) == {"master"}
    assert "output_layer.weight differs from embedding.word_embeddings.weight" in caplog.text
