"""Runs of pretrain_gpt.py's body in a pool's workers, and what they leave."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

from megalite.extras.prepare.preprocess import preprocess

STEPS = 6
MODEL = [
    *("--num-layers", "4", "--hidden-size", "32", "--num-heads", "4", "--num-kv-heads", "4", "--vocab-size", "90"),
    *("--seq-len", "16", "--global-batch-size", "8", "--mock-data", "--device", "cpu", "--lr", "1e-3"),
    *("--hidden-dropout", "0.1", "--lr-decay-steps", str(STEPS)),
]
# Without a process for each rank, which takes longer to start than these runs.
ALONE = ["--watchdog-timeout", "0"]
LAYOUTS = {
    "one": (1, []),
    "dp2": (2, []),
    "tp2-pp2": (4, ["--tp", "2", "--pp", "2"]),
    "dp2-zero0-bf16": (2, ["--zero", "0", "--precision", "bf16"]),
    "pp2-vp2": (2, ["--pp", "2", "--vp", "2"]),
    "dp4-zero3-hybrid": (
        4,
        ["--zero", "3", "--zero-group", "2", "--zero-whole-below", "500", "--eval-every", "2", "--eval-steps", "2"],
    ),
    "dp2-cp2": (4, ["--cp", "2", "--cp-comm", "ring", "--zero", "3", "--zero-whole-below", "500"]),
    "tp2-cp2": (4, ["--tp", "2", "--cp", "2", "--zero", "2"]),
    "dp2-pp2-zero2": (4, ["--zero", "2", "--pp", "2"]),
    "dp2-tp2-powersgd": (4, ["--tp", "2", "--compress", "powersgd:2"]),
    "dp2-pp2-tied-topk-fp16": (
        4,
        ["--pp", "2", "--tie-embeddings", "--compress", "topk:0.05", "--precision", "fp16", "--loss-scale-window", "2"],
    ),
}


def train(rank: int, arguments: list[str], world: int) -> tuple[list[Any], str]:
    """Run pretrain_gpt's body; this rank's final state as a hash."""
    import torch

    from megalite.core.mesh.context import ParallelContext
    from megalite.core.mesh.grid import Grid
    from megalite.extras.compat.dialect import DIALECT
    from megalite.runtime.loop.loop import fit
    from megalite.runtime.options import cli
    from megalite.runtime.start.start import open_run

    cfg = cli.parse([*arguments, *ALONE], dialect=DIALECT).config
    context = ParallelContext.create(Grid.from_config(cfg.parallel, world), torch.device("cpu"))
    with open_run(cfg, context) as run:
        fit(run)
        digest = hashlib.sha256()
        for state in run.engine.optimizer.states():
            digest.update(f"{state.name} {state.role}".encode())
            digest.update(state.flat.view(torch.uint8).numpy().tobytes())
        return [run.step, run.consumed_samples], digest.hexdigest()


def losses(run_dir: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of the last line of each step."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    by_step = {line["step"]: line for line in lines if "event" not in line}
    return [(step, by_step[step]["loss"], by_step[step]["grad_norm"]) for step in sorted(by_step)]


def carried(rank: int, arguments: list[str], world: int) -> tuple[dict[str, tuple[Any, Any]], float]:
    """Load a checkpoint and save it again: (pieces of all states that this rank writes; loss of the step after it)."""
    import torch

    from megalite.core.mesh.context import ParallelContext
    from megalite.core.mesh.grid import Grid
    from megalite.runtime.loop.loop import steps
    from megalite.runtime.loop.run import save
    from megalite.runtime.options import cli
    from megalite.runtime.start.start import open_run

    cfg = cli.parse([*arguments, *ALONE]).config
    context = ParallelContext.create(Grid.from_config(cfg.parallel, world), torch.device("cpu"))
    held: dict[str, tuple[Any, Any]] = {}
    with open_run(cfg, context) as run:
        for state in (state for state in run.engine.optimizer.states() if state.is_owner):
            _, pieces = held.setdefault(f"{state.role} {state.name}", (state.shape, []))
            for piece in state.slices:
                part = state.flat[piece.at : piece.at + piece.numel].view(piece.shape)
                pieces.append((piece.index, part.numpy().copy()))
        if run.step:
            save(run)
            run.checkpointer.finish()
        return held, next(steps(run))["loss"]


WORDS = ["red", "blue", "cat", "dog", "sun", "moon", "tree"]


def preferred_in_upper_case(tmp_path: Path, number: int = 100) -> str:
    """Prefix of so many pairs of texts, of which the answer in upper case is preferred."""
    draws, lines = random.Random(0), []
    for _ in range(number):
        prompt, answer = (" ".join(draws.choices(WORDS, k=2)) for _ in range(2))
        lines.append(json.dumps({"prompt": prompt, "chosen": answer.upper(), "rejected": answer}))
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    preprocess([str(tmp_path / "pairs.jsonl")], "bytes", str(tmp_path / "pairs"), pairs=True, chat_template="chatml")
    return str(tmp_path / "pairs")
