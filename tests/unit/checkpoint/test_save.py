"""Saving in the background, pruning, setting aside, weights alone, replicas, and what loading costs in memory."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.base.errors import UserError
from megalite.core.mesh.context import ParallelContext
from megalite.extras.view.checkpoint import describe
from megalite.runtime.checkpoint import writer
from megalite.runtime.checkpoint.load import find_good, load_checkpoint, read_meta
from megalite.runtime.checkpoint.manifest import Manifest, committable
from megalite.runtime.checkpoint.pruning import Keep
from megalite.runtime.checkpoint.save import Checkpointer, SaveError
from megalite.runtime.places.folder_place import FolderPlace
from megalite.runtime.places.place import Save
from tests.faults import checkpoint_states as cs
from tests.limits import GIVES_BACK
from tests.parity.jobs import llama, make_config
from tests.unit.checkpoint.jobs import bit_flip, layout, whole_tensors
from tests.workers import WorkerPool

ROOT = Path(__file__).resolve().parents[3]
CTX = ParallelContext.single()


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if p.name.startswith(("step_", "aside_", "model_")))


def save_steps(root: Path, *steps: int, after: Path | None = None, keep_last: int = 9) -> None:
    checkpointer = Checkpointer(root, CTX, keep=Keep(last=keep_last))
    if after is not None:
        checkpointer.continues(after)
    for step in steps:
        checkpointer.save(step, cs.states_at(step), {"step": step})
    checkpointer.close()


def test_states_may_change_while_they_are_written(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, CTX, keep=Keep(last=9))
    states = cs.states_at(5)
    os.kill(checkpointer._writer.process.pid, signal.SIGSTOP)
    path = checkpointer.save(5, states, {"step": 5}, background=True)
    assert path is not None
    assert checkpointer.poll() is None
    assert not path.exists()
    for state in states:
        state.flat.fill_(float("nan"))
    os.kill(checkpointer._writer.process.pid, signal.SIGCONT)
    while (done := checkpointer.poll()) is None:
        time.sleep(0.01)
    assert done == path
    assert checkpointer.poll() is None, "told once"
    # The memory of the first snapshot is used again, by a larger and a smaller one.
    for step, specs in ((6, [*cs.SPECS, cs.ParamSpec("more.weight", (300, 16))]), (7, cs.SPECS[:2])):
        checkpointer.save(step, cs.states_at(step, specs=specs), {"step": step}, background=True)
    checkpointer.close()
    loaded = cs.states_at(-1)
    load_checkpoint(path, loaded, CTX)
    cs.assert_states(loaded, 5)
    small = cs.states_at(-1, specs=cs.SPECS[:2])
    load_checkpoint(tmp_path / "step_00000007", small, CTX)
    assert torch.equal(small[0].flat, cs.states_at(7)[0].flat)


def test_a_save_says_what_it_cost_though_its_folder_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    checkpointer = Checkpointer(tmp_path, CTX)
    checkpointer.on_commit = lambda **saved: told.append(saved)
    path = checkpointer.save(1, cs.states_at(1), {"step": 1}, background=True)
    assert path is not None
    wait = checkpointer._writer.wait
    sizes: list[int] = []

    def wait_long(seconds: float | None) -> bool:
        time.sleep(0.2)
        arrived = wait(seconds)
        if path.exists():
            sizes.append(sum(file.stat().st_size for file in path.iterdir()))
            shutil.rmtree(path)
        return arrived

    monkeypatch.setattr(checkpointer._writer, "wait", wait_long)
    assert checkpointer.finish()
    checkpointer.close()
    (saved,) = told
    assert (saved["step"], saved["checkpoint"], [saved["bytes"]]) == (1, str(path), sizes)
    # Training waits for a save that is not done when the next is due.
    assert saved["seconds"] >= saved["pause_s"] >= 0.2


def test_prune_keeps_the_newest_and_what_was_resumed_from(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    save_steps(tmp_path, 4, 5, 6, after=tmp_path / "step_00000003", keep_last=2)
    assert names(tmp_path) == ["step_00000003", "step_00000005", "step_00000006"]
    with pytest.raises(UserError, match="--keep-last 1: must be at least 2"):
        Checkpointer(tmp_path, CTX, keep=Keep(last=1))


def test_a_history_left_behind_is_set_aside(tmp_path: Path) -> None:
    """Resumed from step 2: its own 4 is newer than the old 3 and 6, of which nothing may be lost or mixed in."""
    save_steps(tmp_path, 2, 3, 6)
    before = cs.digest(tmp_path / "step_00000006")
    checkpointer = Checkpointer(tmp_path, CTX)
    checkpointer.continues(tmp_path / "step_00000002")
    assert names(tmp_path) == ["step_00000002", "step_00000003", "step_00000006"], "nothing moves before a commit"
    checkpointer.save(4, cs.states_at(44), {"step": 4})
    checkpointer.save(6, cs.states_at(66), {"step": 6})
    checkpointer.close()
    assert names(tmp_path) == [
        "aside_1_step_00000003",
        "aside_1_step_00000006",
        "step_00000002",
        "step_00000004",
        "step_00000006",
    ]
    assert cs.digest(tmp_path / "aside_1_step_00000006") == before
    # A new run in the same folder, not a continuation: all of the old history gives way, twice if need be.
    save_steps(tmp_path, 1)
    assert "step_00000001" in names(tmp_path)
    assert "aside_2_step_00000006" in names(tmp_path)
    assert [n for n in names(tmp_path) if n.startswith("step_")] == ["step_00000001"]
    # Earlier ones too: where the new run's own is damaged, --resume-fallback must not go on from another history.
    save_steps(tmp_path, 7)
    assert [n for n in names(tmp_path) if n.startswith("step_")] == ["step_00000007"]


@pytest.mark.parametrize("writer_first", [True, False])
def test_cleaning_up_while_a_writer_without_its_rank_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer_first: bool
) -> None:
    """One of the two is first, and then it is as if the other had not been there: whole or gone, never half."""
    save_steps(tmp_path, 1)
    manifest = Manifest.from_json((tmp_path / "step_00000001" / "manifest.json").read_bytes(), "manifest")
    place, save = FolderPlace(tmp_path), Save("step_00000002", "id")
    temporary = tmp_path / ".tmp_step_00000002_id"
    shutil.copytree(tmp_path / "step_00000001", temporary, ignore=shutil.ignore_patterns("manifest.json", "COMMIT"))
    rename, rmtree = os.rename, shutil.rmtree

    def rename_last(source: Path, target: Path) -> None:
        monkeypatch.undo()
        place.publish(save, *committable(manifest), [])
        rename(source, target)

    def delete_last(path: Path) -> None:
        monkeypatch.undo()
        with pytest.raises(FileNotFoundError):
            place.publish(save, *committable(manifest), [])
        # Such a writer may also be deleting, in a folder that it prunes.
        rmtree(path)
        raise FileNotFoundError

    if writer_first:
        monkeypatch.setattr(os, "rename", rename_last)
    else:
        monkeypatch.setattr(shutil, "rmtree", delete_last)
    assert place.clean_up() == ([] if writer_first else [temporary.name])
    steps = ["step_00000001", "step_00000002"] if writer_first else ["step_00000001"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", *steps]
    good = find_good(tmp_path, CTX)
    assert good is not None
    assert good.path == tmp_path / steps[-1]


def test_a_snapshot_without_room_fails_the_save_and_leaves_the_next_one(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.write_text("in the way")
    checkpointer = Checkpointer(tmp_path / "run", CTX, scratch=scratch)
    with pytest.raises(SaveError, match=r"not saved: rank 0: no room for the snapshot \(.*File exists: '.*scratch'"):
        checkpointer.save(3, cs.states_at(3), {"step": 3})
    scratch.unlink()
    assert checkpointer.save(4, cs.states_at(4), {"step": 4}) == tmp_path / "run" / "step_00000004"
    checkpointer.close()
    assert names(tmp_path / "run") == ["step_00000004"]


def test_weights_alone(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, CTX)
    full = checkpointer.save(3, cs.states_at(3), {"step": 3}, background=True)
    assert checkpointer.save_model(3, cs.states_at(3), {}) == full, "the full one holds them"
    path = checkpointer.save_model(4, cs.states_at(4), {"step": 4})
    checkpointer.close()
    assert path is not None
    assert names(tmp_path) == ["model_00000004", "step_00000003"]
    assert (tmp_path / "latest").resolve() == full
    states = cs.states_at(-1)
    load_checkpoint(path, states, CTX)
    for state, exact in zip(states, cs.states_at(4)):
        expected = exact.flat.bfloat16().float() if state.role == "master" else torch.zeros_like(exact.flat)
        assert torch.equal(state.flat, expected)
    size = sum(p.stat().st_size for p in path.glob("*.safetensors"))
    assert size < sum(p.stat().st_size for p in full.glob("*.safetensors")) / 4


def test_meta_comes_back_and_must_be_json(tmp_path: Path) -> None:
    meta = {"step": 3, "scalars": {"loss_scale": 65536.0}, "text": "é\n", "none": None}
    checkpointer = Checkpointer(tmp_path, CTX, run_id="run-7")
    path = checkpointer.save(3, cs.states_at(3), meta)
    assert path is not None
    with pytest.raises(ValueError, match="Out of range float"):
        checkpointer.save(4, cs.states_at(4), {"loss": float("nan")})
    checkpointer.close()
    assert read_meta(path) == meta
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["run_id"] == "run-7"
    assert manifest["topology"] == {"world": 1, "pp": 1, "dp": 1, "cp": 1, "tp": 1}


def test_describe(tmp_path: Path) -> None:
    save_steps(tmp_path, 3)
    text = "\n".join(describe(tmp_path, tensors=True, verify=True))
    assert "step 3" in text
    elements = sum(s.numel for s in cs.SPECS)
    assert f"master: 4 tensors (F32), {elements:,} elements, {4 * elements:,} bytes, 4 boxes" in text
    assert "exp_avg_sq layers.0.qkv_proj.weight [48, 16] F32" in text
    size = (tmp_path / "step_00000003" / "rank_00000.safetensors").stat().st_size
    assert f"verified: {size:,} bytes" in text


def test_the_writer_starts_without_torch(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, CTX)
    checkpointer.save(1, cs.states_at(1), {})
    maps = Path(f"/proc/{checkpointer._writer.process.pid}/maps").read_text()
    checkpointer.close()
    assert "libtorch" not in maps
    assert "megalite-snapshot" in maps


@pytest.mark.full
def test_loading_needs_little_memory(tmp_path: Path) -> None:
    """A shard of 192 MB into states that exist: less than a fifth of it on top."""
    code = """
import sys
from megalite.runtime.checkpoint.load import load_checkpoint
from megalite.runtime.checkpoint.save import Checkpointer, SaveError
from megalite.core.mesh.context import ParallelContext
from tests.faults import checkpoint_states as cs
from tests.limits import memory_limit
specs = [cs.ParamSpec("w", (16384, 1024))]
states = cs.states_at(1, specs=specs)
checkpointer = Checkpointer(sys.argv[1], ParallelContext.single())
path = checkpointer.save(1, states, {})
checkpointer.close()
with memory_limit(3 * 16384 * 1024 * 4 // 5):
    load_checkpoint(path, states, ParallelContext.single())
"""
    command, env = [sys.executable, "-c", code, str(tmp_path)], {**os.environ, **GIVES_BACK}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("options", "victim", "name", "words"),
    [
        ({"dp": 2}, 1, "layers.1.mlp.down_proj.weight", "copies of layers.1.mlp.down_proj.weight on ranks 0, 1 differ"),
        ({"tp": 2, "dp": 2}, 1, "norm.weight", "copies of norm.weight on ranks"),
        ({"tp": 2}, 0, "layers.0.input_layernorm.weight", "copies of layers.0.input_layernorm.weight on ranks 0, 1"),
        ({"pp": 2}, 0, "embed_tokens.weight", "copies of embed_tokens.weight on ranks 0, 1 differ"),
        ({"tp": 2, "pp": 2}, 3, "lm_head.weight", "copies of embed_tokens.weight on ranks 1, 3 differ"),
        ({"tp": 2}, 0, "layers.0.mlp.down_proj.weight", ""),
        (
            {"dp": 4},
            2,
            "embed_tokens.weight",
            "embed_tokens.weight of rank [2] differs from its copies on rank [0, 1, 3]",
        ),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_flipped_bit_in_a_copy(
    pool: WorkerPool, tmp_path: Path, options: dict[str, int], victim: int, name: str, words: str, precision: str
) -> None:
    """Copies over dp, over tp of what is not cut, and of a tied embedding; a cut weight has no copy over tp."""
    parallel, world = layout(**options)
    cfg = make_config(llama(2, tie_embeddings=True), parallel, precision=precision)
    texts = pool.run(world, bit_flip, cfg, world, victim, name)
    assert len(set(texts)) == 1, "all ranks say the same"
    assert words in texts[0]
    assert bool(words) == bool(texts[0])


@pytest.mark.parametrize(("parallel", "world"), [({"ep": 2}, 2), ({"tp": 2}, 2), ({"pp": 2, "ep": 2}, 4)], ids=str)
def test_a_flipped_bit_in_a_routing_bias(pool: WorkerPool, parallel: dict[str, int], world: int) -> None:
    """Every rank of a stage holds all of it, and no loss shows it."""
    experts = {"num_experts": 8, "moe_ffn_size": 16}
    biased = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    cfg, name = make_config(llama(2, **experts, **biased), parallel), "layers.1.mlp.router.bias"
    texts = pool.run(world, bit_flip, cfg, world, world - 1, name)
    assert len(set(texts)) == 1, "all ranks say the same"
    assert f"copies of {name} on ranks {world - 2}, {world - 1} differ" in texts[0]


def test_whole_tensors_are_read_independently(tmp_path: Path) -> None:
    """The oracle of the resharding tests, against what was saved."""
    save_steps(tmp_path, 3)
    whole = whole_tensors(tmp_path / "step_00000003")
    assert len(whole) == 12
    for spec in cs.SPECS:
        np.testing.assert_array_equal(whole[f"exp_avg {spec.name}"], cs.value(spec, "exp_avg", 3).numpy())


def test_state_that_is_not_finite_is_told_from_large_numbers(tmp_path: Path) -> None:
    """One bad element of any tensor is found; elements that only add up to infinity are saved."""
    states = cs.states_at(5, specs=[*cs.SPECS, cs.ParamSpec("large.weight", (300, 1000))])
    large = states[-1]
    checkpointer = Checkpointer(tmp_path, CTX, on_error="warn")
    for value in (torch.nan, torch.inf, -torch.inf):
        for at in (0, 150_000, -1):
            usual, large.flat[at] = large.flat[at].item(), value
            with pytest.raises(SaveError, match=f"nothing saved: {large.role} of large.weight on rank 0 is not finite"):
                checkpointer.save(5, states, {}, background=True)
            large.flat[at] = usual
    assert [p.name for p in tmp_path.iterdir()] == ["lock"]
    large.flat.fill_(3e38)
    assert checkpointer.save(5, states, {}) == tmp_path / "step_00000005"
    checkpointer.close()


def test_a_shard_is_complete_with_its_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 may commit, and so rename the folder, as soon as the last mark is there: the writer needs it no more."""
    temporary, rename = tmp_path / ".tmp_save", os.rename
    temporary.mkdir()

    def commit_at_once(source: Path, target: Path) -> None:
        rename(source, target)
        rename(temporary, tmp_path / "committed")

    monkeypatch.setattr(writer.os, "rename", commit_at_once)
    job = {"temporary": str(temporary), "rank": 1, "num_bytes": 0, "boxes": [], "save_id": "one", "code": "none"}
    mine, other = socket.socketpair()
    with mine, other:
        assert writer._serve(job, None, mine) == {"ok": True}
    assert {path.name for path in (tmp_path / "committed").iterdir()} == {"rank_00001.safetensors", "rank_00001.json"}


def test_a_writer_starts_without_what_few_saves_use() -> None:
    """Each rank starts one, in 0.08 s of processor time; these would nearly double that."""
    seldom = "{'torch', 'numpy', 'asyncio', 'yaml'}"
    code = f"import sys, megalite.runtime.checkpoint.writer; print({seldom} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
