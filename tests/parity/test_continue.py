"""Runs that continue from the checkpoint of another run: an older release's, or of an earlier stage of the training."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.base.errors import UserError
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.extras.compat.dialect import DIALECT
from megalite.extras.convert.hf import export_hf
from megalite.extras.inference.evaluate import mean_loss
from megalite.extras.inference.generate import generate
from megalite.extras.inference.load import find_weights, load_model
from megalite.extras.inference.score import Scorer, scoring_config
from megalite.extras.saved_model import resolve_checkpoint
from megalite.runtime.options.fields import GROUPS
from tests.parity.runs import losses, train
from tests.ranks import ROOT
from tests.unit.checkpoint.jobs import whole_tensors
from tests.workers import WorkerPool

# Saved by release 0.1.0 on dp 2 after step 2 of 4. Every later version resumes it and reaches these losses and norms.
RELEASE = ROOT / "tests/data/checkpoint_0.1.0"
RELEASED = [
    *("--num-layers", "1", "--hidden-size", "4", "--num-heads", "1", "--vocab-size", "11", "--ffn-hidden-size", "8"),
    *("--seq-len", "8", "--global-batch-size", "4", "--mock-data", "--device", "cpu", "--lr", "1e-2"),
    *("--lr-decay-steps", "4", "--train-steps", "4"),
]
STEPS_3_AND_4 = [(3, 2.329104594886303, 0.6534492610090132), (4, 2.3380914852023125, 0.5627079527118354)]


@pytest.mark.parametrize("world", [1, 2])
def test_a_checkpoint_of_an_older_release_resumes(pool: WorkerPool, tmp_path: Path, world: int) -> None:
    there = tmp_path / "checkpoints" / "step_00000002"
    shutil.copytree(RELEASE, there)
    if world == 1:
        forget_defaults(there)
    pool.run(world, train, [*RELEASED, "--run-dir", str(tmp_path)], world)
    for found, expected in zip(losses(tmp_path), STEPS_3_AND_4, strict=True):
        assert found == pytest.approx(expected, rel=1e-6)


def forget_defaults(checkpoint: Path) -> None:
    """Make a checkpoint of a release that had none of the options which are at their defaults."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for section, options in manifest["meta"]["config"].items():
        defaults = dataclasses.asdict(GROUPS[section]())
        for name in [name for name, value in options.items() if value == defaults[name]]:
            del options[name]
    text = json.dumps(manifest).encode()
    (checkpoint / "manifest.json").write_bytes(text)
    (checkpoint / "COMMIT").write_text(hashlib.sha256(text).hexdigest() + "\n")


STAGE = [
    *("--num-layers", "2", "--hidden-size", "16", "--num-heads", "2", "--vocab-size", "90", "--seq-len", "16"),
    *("--global-batch-size", "4", "--mock-data", "--device", "cpu", "--precision", "fp16", "--loss-scale-window", "2"),
    *("--initial-loss-scale", "4", "--lr", "1e-2", "--warmup-steps", "4"),
]


def stage(rank: int, arguments: list[str], world: int) -> dict[str, Any]:
    """Open a run, note the state that it starts from, and train."""
    import torch

    from megalite.core.mesh.context import ParallelContext
    from megalite.core.mesh.grid import Grid
    from megalite.runtime.loop.loop import fit
    from megalite.runtime.options import cli
    from megalite.runtime.start.start import open_run

    cfg = cli.parse(arguments, dialect=DIALECT).config
    run = open_run(cfg, ParallelContext.create(Grid.from_config(cfg.parallel, world), torch.device("cpu")))
    try:
        optimizer, scaler = run.engine.optimizer, run.engine.scaler
        start = {
            "step": run.step,
            "consumed_samples": run.consumed_samples,
            "num_steps": optimizer.num_steps,
            "loss_scale": scaler.scale,
            "rewind_to": [path.name for _, path in run.saved],
            "states": {
                (s.role, s.name, box.offset): s.flat[box.at : box.at + box.numel].reshape(box.shape).clone().numpy()
                for s in optimizer.states()
                for box in s.slices
            },
        }
        fit(run)
        return start
    finally:
        run.close()


def whole(ranks: list[dict[str, Any]], like: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Logical tensors of what the ranks hold, by "role name"."""
    full = {name: np.full(tensor.shape, np.nan, np.float32) for name, tensor in like.items()}
    for rank in ranks:
        for (role, name, offset), part in rank["states"].items():
            full[f"{role} {name}"][tuple(slice(o, o + n) for o, n in zip(offset, part.shape))] = part
    return full


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def first_stage(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps on two ranks; the loss scale grows from 4 to 8 meanwhile."""
    run_dir = tmp_path_factory.mktemp("first") / "a"
    pool.run(2, stage, [*STAGE, "--train-steps", "4", "--run-dir", str(run_dir)], 2)
    return run_dir


# Resets -> (flags); step, consumed samples, steps of Adam's bias correction and loss scale at the start; which line
# says so, and to what the learning rate rises.
RESETS: dict[str, tuple[list[str], tuple[int, int, int, float], str, str]] = {
    "data": (
        ["--reset-data", "--seed", "5", "--seq-len", "24", "--rope-theta", "500000"],
        *((4, 0, 4, 8.0), "resumed from", "0.00854"),
    ),
    "optimizer": (["--reset-optimizer"], (4, 16, 0, 4.0), "weights from", "0.00854"),
    "step": (["--reset-step"], (0, 16, 4, 8.0), "resumed from", "0.0025"),
    "all": (["--reset-data", "--reset-optimizer", "--reset-step"], (0, 0, 0, 4.0), "weights from", "0.0025"),
}


@pytest.mark.parametrize("resets", RESETS)
def test_what_is_reset_and_what_is_kept(pool: WorkerPool, first_stage: Path, tmp_path: Path, resets: str) -> None:
    flags, expected, line, rate = RESETS[resets]
    world = 1 if resets == "data" else 2
    before = contents(first_stage / "checkpoints")
    second = [*STAGE, *flags, "--resume", str(first_stage), "--run-dir", str(tmp_path), "--train-steps", "8"]
    ranks = pool.run(world, stage, second, world)
    for rank in ranks:
        assert (rank["step"], rank["consumed_samples"], rank["num_steps"], rank["loss_scale"]) == expected
        assert rank["rewind_to"] == [], "a new stage has no history to rewind to"
    saved = whole_tensors(first_stage / "checkpoints" / "step_00000004")
    zero = "--reset-optimizer" in flags
    for name, tensor in whole(ranks, saved).items():
        want = np.zeros_like(tensor) if zero and not name.startswith("master") else saved[name]
        assert tensor.tobytes() == want.tobytes(), name
    assert contents(first_stage / "checkpoints") == before, "the run that is continued is only read"
    steps = [line for line in lines_of(tmp_path) if "event" not in line]
    assert [line["step"] for line in steps] == list(range(expected[0] + 1, 9))
    assert steps[0]["consumed_samples"] == expected[1] + 4
    assert steps[0]["consumed_tokens"] == (expected[1] + 4) * (24 if resets == "data" else 16)
    # Warmup to 0.01 in 4 steps, then half a cosine over the 4 others.
    lr = [0.0025, 0.005, 0.0075, 0.01, *(0.005 * (1 + math.cos(math.pi * i / 4)) for i in (1, 2, 3, 4))]
    assert [line["lr"] for line in steps] == pytest.approx(lr[expected[0] :], abs=1e-12)
    log = (tmp_path / "logs" / "rank_0.log").read_text()
    assert re.findall("new run|resumed from|weights from", log) == [line]
    assert re.findall(r"rises: (\S+) in step 4 of the checkpoint, (\S+) in", log) == [("0", rate)]


def alone_on_cpu() -> ParallelContext:
    return ParallelContext.create(Grid.of(1), torch.device("cpu"))


def test_longer_samples_with_yarn_are_shared(pool: WorkerPool, first_stage: Path, tmp_path: Path) -> None:
    """The recipe of docs/long_sequences.md: four times the tokens, on two ranks that share them and on one."""
    yarn = "{rope_type: yarn, factor: 8.0, original_max_position_embeddings: 16}"
    second = [*STAGE, "--resume", str(first_stage), "--reset-data", "--seq-len", "64", "--train-steps", "6"]
    second += ["--rope-scaling", yarn, "--precision", "fp32"]
    for world in (1, 2):
        pool.run(world, stage, [*second, "--cp", str(world), "--run-dir", str(tmp_path / str(world))], world)
    alone, shared = (losses(tmp_path / str(world)) for world in (1, 2))
    assert [step for step, *_ in alone] == [5, 6]
    np.testing.assert_allclose(shared, alone, rtol=1e-5)
    # What reads a run reads one whose samples were shared.
    read = []
    ids = np.random.default_rng(6).integers(0, 80, 150)
    for world in (1, 2):
        weights = find_weights(tmp_path / str(world))
        scorer = Scorer(scoring_config(weights, 1, 1, 1, rows=2, max_length=64), alone_on_cpu(), weights)
        scores = [score for score, _ in scorer.score([(ids[:60].tolist(), 59), (ids[60:90].tolist(), 29)])]
        loaded = load_model(tmp_path / str(world), torch.device("cpu"))
        read.append(([mean_loss(loaded, ids)[0], *scores], generate(loaded, ids[:50].tolist(), 8, temperature=0)))
    np.testing.assert_allclose(read[1][0], read[0][0], rtol=1e-5)
    assert read[1][1] == read[0][1]
    model = export_hf(tmp_path / "2", tmp_path / "hf")
    assert model["rope_parameters"]["rope_type"] == "yarn"
    # transformers 4 takes the quotient with the original length for the factor.
    assert model["max_position_embeddings"] == 128


@pytest.mark.parametrize("place", ["another_folder", "its_own_folder"])
def test_a_stage_that_is_started_again_continues(first_stage: Path, tmp_path: Path, place: str) -> None:
    first = tmp_path / "a"
    shutil.copytree(first_stage, first, symlinks=True)
    source = first / "checkpoints" / "step_00000004"
    run_dir = tmp_path / "b" if place == "another_folder" else first
    second = [*STAGE, "--resume", str(source), "--reset-data", "--reset-step", "--run-dir", str(run_dir)]
    second += ["--seed", "6", "--train-steps", "2", "--save-every", "1"]
    assert stage(0, second, 1)["step"] == 0
    kept = {path.name for path in (run_dir / "checkpoints").iterdir() if path.is_dir() and not path.is_symlink()}
    aside = set() if place == "another_folder" else {"aside_1_step_00000004"}
    assert kept == {"step_00000001", "step_00000002", *aside}
    shutil.rmtree(run_dir / "checkpoints" / "step_00000002")
    again = stage(0, [*second, "--zero", "0"], 1)
    assert (again["step"], again["consumed_samples"]) == (1, 4)
    if place == "another_folder":
        assert stage(0, [*second, "--lr", "5e-3"], 1)["step"] == 0, "another command starts where it says"


NEWER = ("fp8", "fp8_emulate", "fp8_keep_bf16", "max_minutes", "layer_types", "moe_dense_layers", "moe_aux_loss_coeff")


def test_a_stage_that_an_older_release_began_continues(first_stage: Path, tmp_path: Path) -> None:
    """Its checkpoints lack the options that have come since; how often and how long a job runs is not what it is."""
    second = [*STAGE, "--resume", str(first_stage), "--reset-data", "--reset-step", "--run-dir", str(tmp_path)]
    second += ["--rope-scaling", "{factor: 4.0, original_max_position_embeddings: 16}", "--train-steps", "2"]
    assert stage(0, [*second, "--save-every", "1"], 1)["step"] == 0
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000002")
    forget(tmp_path / "checkpoints" / "step_00000001", (*NEWER, "rope_type", "beta_slow", "beta_fast", "truncate"))
    assert stage(0, [*second, "--max-minutes", "60", "--save-every", "2"], 1)["step"] == 1
    log = (tmp_path / "logs" / "rank_0.log").read_text()
    assert "the same command has saved checkpoints in" in log
    assert "options changed" not in log.split("the same command")[1], "an option that is newer has its default there"


def forget(checkpoint: Path, names: Collection[str]) -> None:
    """Make a checkpoint of a release that did not have these options."""

    def without(tree: Any) -> Any:
        return {k: without(v) for k, v in tree.items() if k not in names} if isinstance(tree, dict) else tree

    manifest = json.loads((checkpoint / "manifest.json").read_text())
    before, manifest["meta"]["config"] = manifest["meta"]["config"], without(manifest["meta"]["config"])
    assert before != manifest["meta"]["config"]
    text = json.dumps(manifest).encode()
    (checkpoint / "manifest.json").write_bytes(text)
    (checkpoint / "COMMIT").write_text(hashlib.sha256(text).hexdigest() + "\n")


def test_what_a_new_stage_may_not_change(first_stage: Path, tmp_path: Path) -> None:
    second = [*STAGE, "--resume", str(first_stage), "--run-dir", str(tmp_path / "b"), "--train-steps", "8"]
    flags = r"--resume \S+step_00000004 --reset-data .*--reset-optimizer.*--reset-step"
    for other in (["--seed", "5"], ["--seq-len", "24"]):
        with pytest.raises(UserError, match=rf"{other[0][2:].replace('-', '_')} \d+ there, {other[1]} here.*{flags}"):
            stage(0, [*second, *other], 1)
    with pytest.raises(UserError, match="rope_theta 10000.0 there, 500000.0 here"):
        stage(0, [*second, "--rope-theta", "500000"], 1)
    with pytest.raises(UserError, match="--reset-data with --resume latest: .*--resume PATH"):
        stage(0, [*STAGE, "--reset-data", "--run-dir", str(tmp_path / "b")], 1)
    learned = [*STAGE, "--position", "learned", "--train-steps", "2"]
    stage(0, [*learned, "--save-model-every", "1", "--run-dir", str(tmp_path / "c")], 1)
    second = [*learned, "--resume", str(tmp_path / "c"), "--run-dir", str(tmp_path / "d"), "--reset-data"]
    with pytest.raises(UserError, match="max_position_embeddings 16 there, 24 here.*cannot be extended"):
        stage(0, [*second, "--seq-len", "24"], 1)
    # Weights saved alone: the optimizer starts anew with them, its step count included.
    weights = str(tmp_path / "c" / "checkpoints" / "model_00000001")
    start = stage(0, [*learned, "--resume", weights, "--run-dir", str(tmp_path / "d")], 1)
    assert (start["step"], start["consumed_samples"], start["num_steps"]) == (1, 4, 0)
    assert re.findall(r"weights from \S+ at step 1 \(bf16\)", (tmp_path / "d" / "logs" / "rank_0.log").read_text())


def test_a_fresh_run_from_the_same_masters_makes_the_same_updates(first_stage: Path, tmp_path: Path) -> None:
    export_hf(first_stage, tmp_path / "hf", "fp32")
    flags = [*STAGE, "--seed", "5", "--train-steps", "2"]
    resets = ["--reset-data", "--reset-optimizer", "--reset-step", "--resume", str(first_stage)]
    for name, start in (("stage", resets), ("fresh", ["--init-from-hf", str(tmp_path / "hf")])):
        stage(0, [*flags, *start, "--run-dir", str(tmp_path / name)], 1)
    assert losses(tmp_path / "stage") == losses(tmp_path / "fresh")
    states = [whole_tensors(tmp_path / name / "checkpoints" / "step_00000002") for name in ("stage", "fresh")]
    assert states[0].keys() == states[1].keys()
    assert all(states[0][name].tobytes() == states[1][name].tobytes() for name in states[0])


def test_checkpoints_of_megatron_are_refused(tmp_path: Path) -> None:
    folder, words = tmp_path / "m", "holds a Megatron-LM checkpoint.*import it first: see docs/megatron.md"
    (folder / "iter_0000010" / "mp_rank_00").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("10\n")
    before = contents(folder)
    for arguments in (
        ["--save", str(folder), "--load", str(folder)],
        ["--save", str(tmp_path / "b"), "--load", str(folder)],
        ["--save", str(tmp_path / "b"), "--load", str(folder / "iter_0000010")],
    ):
        with pytest.raises(UserError, match=words):
            stage(0, [*STAGE, *arguments], 1)
    with pytest.raises(UserError, match=words):
        resolve_checkpoint(folder)
    assert contents(folder) == before
    assert not (tmp_path / "b").exists()
    # A run of our own beside them is resumed.
    first = [*STAGE, "--train-steps", "1"]
    stage(0, [*first, "--run-dir", str(tmp_path / "c")], 1)
    shutil.copytree(tmp_path / "c" / "checkpoints", folder / "checkpoints", symlinks=True)
    assert stage(0, [*first, "--run-dir", str(folder)], 1)["step"] == 1


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
