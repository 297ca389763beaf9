"""Checkpoints with every part's state, in tests/data/checkpoints: written once, and resumed by all that comes after.

    python -m tests.golden.checkpoints NAME...      write some anew, by this checkout or --checkout DIR

Each is that of step 2 of a run of 4 steps; steps.json holds loss and gradient norm of steps 3 and 4, not interrupted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.golden.doors import ROOT, call, enter
from tests.golden.states import digests, newest

FOLDER = ROOT / "tests" / "data" / "checkpoints"
_BASE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_heads": 2,
    "ffn_hidden_size": 16,
    "vocab_size": 16,
    "seq_len": 8,
    "vocab_divisible_by": 8,
    "global_batch_size": 4,
    "mock_data": True,
    "device": "cpu",
    "lr": 1e-2,
    "lr_decay_steps": 4,
}
_LATENTS = {"kv_lora_rank": 4, "q_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}
_EXPERTS = {"num_experts": 2, "moe_topk": 1, "moe_renormalize": False, "moe_ffn_size": 4}
_DELTA = {
    "linear_attention_freq": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "head_dim": 8,
}
OPTIONS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "experts": (
        2,
        {
            **_LATENTS,
            **_EXPERTS,
            "arch": "deepseek_v3",
            "num_experts": 4,
            "moe_topk": 2,
            "moe_renormalize": True,
            "moe_shared_ffn_size": 4,
            "moe_router_num_groups": 2,
            "moe_router_group_topk": 1,
            "mtp_num_layers": 1,
        },
        {"ep": 2},
    ),
    "delta_nets": (
        2,
        {**_DELTA, **_EXPERTS, "arch": "qwen3_next", "moe_shared_ffn_size": 4, "optimizer": "lion"},
        {"tp": 2},
    ),
    "sinks": (
        2,
        {**_EXPERTS, "arch": "gpt_oss", "window": 4, "head_dim": 4, "optimizer": "muon", "muon_ns": "fp32"},
        {"pp": 2},
    ),
    "fp8": (
        2,
        {
            "num_layers": 1,
            "hidden_size": 16,
            "num_heads": 1,
            "seq_len": 16,
            "fp8": "rowwise",
            "fp8_emulate": True,
            "precision": "bf16",
            "moments_dtype": "bf16",
            "master_dtype": "bf16",
        },
        {"zero": 2},
    ),
    "fp16": (
        1,
        {
            "arch": "gpt2",
            "precision": "fp16",
            "loss_scale_window": 3,
            "initial_loss_scale": 64,
            "hidden_dropout": 0.1,
            "optimizer": "ademamix",
        },
        {},
    ),
}
"""Name -> ranks, options of the run (`megalite.configure`), and options of the layout in which it was written."""


def options(name: str, layout: bool = True) -> dict[str, Any]:
    """Return the options of a run, in the layout in which it was written or in one process."""
    _, own, parallel = OPTIONS[name]
    return {**_BASE, **own, **(parallel if layout else {})}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.golden.checkpoints",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="+", choices=OPTIONS, metavar="NAME", help=", ".join(OPTIONS))
    parser.add_argument("--checkout", type=Path, default=ROOT, metavar="DIR", help="what writes them (this checkout)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        enter(args.checkout.resolve(), Path(folder).resolve())
        for name in args.names:
            _write(name)


def _write(name: str) -> None:
    whole, parts = Path(f"{name}-whole"), Path(f"{name}-parts")
    _train(name, whole, 4)
    _train(name, parts, 2)
    shutil.rmtree(FOLDER / name, ignore_errors=True)
    shutil.copytree(newest(parts), FOLDER / name)
    _train(name, parts, 4)
    steps = _steps(whole)
    if steps[2:] != _steps(parts)[2:] or digests(newest(whole)) != digests(newest(parts)):
        sys.exit(f"{name}: a run that is interrupted after step 2 computes something else")
    (FOLDER / name / "steps.json").write_text(json.dumps(steps[2:]) + "\n")


def _train(name: str, place: Path, steps: int) -> None:
    words = [
        (f"--{flag}" if value else f"--no-{flag}") if isinstance(value, bool) else f"--{flag}={value}"
        for flag, value in ((name.replace("_", "-"), value) for name, value in options(name).items())
    ]
    ranks = OPTIONS[name][0]
    done = call("pretrain_gpt.py", *words, f"--train-steps={steps}", f"--run-dir={place}", ranks=ranks)
    assert not any(done.codes), done.err


def _steps(place: Path) -> list[tuple[float, float]]:
    records = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    return [(record["loss"], record["grad_norm"]) for record in records if "event" not in record]


if __name__ == "__main__":
    main()
