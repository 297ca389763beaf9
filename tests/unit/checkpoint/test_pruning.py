"""Which checkpoints stay: the newest, the best, and what the run continues; in a folder and in a store."""

from __future__ import annotations

import copy
import json
import math
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.core.mesh.context import ParallelContext
from megalite.extras.view.checkpoint import describe
from megalite.runtime.checkpoint.load import find_good, read_meta
from megalite.runtime.checkpoint.manifest import commit_text
from megalite.runtime.checkpoint.mirror import Mirror
from megalite.runtime.checkpoint.pruning import Keep, ranked
from megalite.runtime.checkpoint.save import Checkpointer
from megalite.runtime.loop.loop import fit
from megalite.runtime.loop.run import save
from megalite.runtime.options import cli
from megalite.runtime.options.run import RunConfig
from megalite.runtime.places.folder_place import FolderPlace
from megalite.runtime.places.names import step_name, step_of
from megalite.runtime.places.place import COMMIT, MANIFEST, Place, Save
from megalite.runtime.places.store import Store
from megalite.runtime.places.store_place import StorePlace
from megalite.runtime.start.start import open_run
from tests.faults import checkpoint_states as cs
from tests.stores import S3
from tests.unit.checkpoint.parts import make_part, upload_parts

CTX = ParallelContext.single()


def put(place: Place, step: int, loss: float | None) -> str:
    """Publish a checkpoint that records a loss, or none; its name."""
    saved, judged = Save(step_name(step), f"{step:016x}"), {} if loss is None else {"valid_loss": loss}
    if isinstance(place, FolderPlace):
        (place.root / place.parts_of(saved)).mkdir()
    manifest = json.dumps({"step": step, "meta": {"step": step, **judged}}).encode()
    place.publish(saved, manifest, commit_text(manifest), [])
    return saved.name if isinstance(place, FolderPlace) else place.parts_of(saved)


def places(kind: str) -> Iterator[Place]:
    """An empty place."""
    with tempfile.TemporaryDirectory() as folder:
        yield FolderPlace(Path(folder)) if kind == "folder" else StorePlace(Store(f"memory://{secrets.token_hex(8)}"))


# Few values, so that there are equal ones.
LOSSES = st.lists(st.one_of(st.none(), st.sampled_from([0, 1.0, 1.5, 2.5, 1e300])), min_size=1, max_size=9)


@pytest.mark.parametrize("kind", ["folder", "memory"])
@settings(max_examples=60)
@given(LOSSES, st.integers(2, 4), st.integers(0, 3), st.sets(st.integers(0, 8), max_size=2))
def test_the_newest_the_best_and_the_protected_stay_and_nothing_else(
    kind: str, losses: list[float | None], last: int, best: int, protected: set[int]
) -> None:
    for place in places(kind):
        names = [put(place, step, loss) for step, loss in enumerate(losses)]
        keep = Keep(last, tuple(names[i] for i in protected if i < len(names)), best)
        assert Keep.from_job(json.loads(json.dumps(keep.to_job()))) == keep
        assert place.tidy(names[-1], partial(keep.staying, place)) == []

        def is_best(i: int) -> bool:
            mine = losses[i]
            if mine is None:
                return False
            # Of equal losses the later one is better.
            better = [j for j, other in enumerate(losses) if other is not None and (other, -j) < (mine, -i)]
            return len(better) < best

        stay = [i for i in range(len(names)) if i >= len(names) - last or i in protected or is_best(i)]
        assert place.committed() == [names[i] for i in reversed(stay)]


RULES = [field.name for field in fields(Keep) if field.name != "names"]
"""What of `Keep` an option asks for."""


def test_every_rule_has_an_option_and_reaches_the_store() -> None:
    assert {f"keep_{name}" for name in RULES} == {f.name for f in fields(RunConfig) if f.name.startswith("keep_")}
    for name in RULES:
        alone: dict[str, Any] = {name: 5}
        keep = replace(Keep(), **alone)
        asked = copy.copy(RunConfig())
        object.__setattr__(asked, f"keep_{name}", 5)  # alone, without what else it asks for
        assert Keep.of(asked) == keep
        assert Keep.from_job(json.loads(json.dumps(keep.to_job()))) == keep


@settings(max_examples=30)
@given(LOSSES, st.integers(2, 3), st.lists(st.integers(0, 4), min_size=len(RULES), max_size=len(RULES)))
def test_every_rule_goes_by_a_checkpoint_alone(losses: list[float | None], stride: int, asked: list[int]) -> None:
    """Not by how many are left: what each save leaves is what one that judges all would. Rules add to each other."""
    rules: list[dict[str, Any]] = [{name: max(n, 2) if name == "last" else n} for name, n in zip(RULES, asked)]
    whole = Keep(**{name: n for rule in rules for name, n in rule.items()})
    left = []
    for kind, keep, at_once in (
        *(("folder", whole, False), ("memory", whole, False), ("memory", whole, True)),
        *(("memory", Keep(**rule), True) for rule in rules),
    ):
        for place in places(kind):
            for i, loss in enumerate(losses, 1):
                name = put(place, stride * i, loss)
                if i == len(losses) or not at_once:
                    assert place.tidy(name, partial(keep.staying, place)) == []
            left.append({*steps_of(place.committed())})
    assert left[0] == left[1] == left[2] == set.union(*left[3:])


def test_what_cannot_be_trusted_is_not_best() -> None:
    """A manifest that is not the committed one, no COMMIT, a loss that is no number; of an earlier release none."""
    for place in places("folder"):
        names = [put(place, step, loss) for step, loss in ((1, 0.5), (2, 0.4), (3, 3.0), (4, 2.0))]
        root = place.root if isinstance(place, FolderPlace) else Path()
        (root / names[0] / MANIFEST).write_bytes((root / names[0] / MANIFEST).read_bytes().replace(b"0.5", b"0.1"))
        (root / names[1] / COMMIT).unlink()
        odd = [NEVER.replace("STEP", str(step)) for step in (5, 6, 7)]
        for step, text, value in zip((5, 6, 7), odd, ('"0.1"', "NaN", "true")):
            name, manifest = put(place, step, None), text.replace("VALUE", value).encode()
            (root / name / MANIFEST).write_bytes(manifest)
            (root / name / COMMIT).write_bytes(commit_text(manifest))
            names.append(name)
        assert ranked(place, names[::-1]) == [(2.0, names[3]), (3.0, names[2])]


NEVER = '{"step": STEP, "meta": {"step": STEP, "valid_loss": VALUE}}'


def test_orders_of_an_earlier_release() -> None:
    """They wait on a disk for a store."""
    assert Keep.from_job({"keep_last": 3, "keep": ["a"], "owner": "me"}) == Keep(3, ("a",), 0)


def save_steps(checkpointer: Checkpointer, losses: dict[int, float | None]) -> None:
    for step, loss in losses.items():
        judged = {} if loss is None else {"valid_loss": loss}
        checkpointer.save(step, cs.states_at(step), {"step": step, **judged})
        assert checkpointer.settle()


def steps_of(names: Sequence[str]) -> list[int]:
    return [int(name.removeprefix("step_").partition("-")[0]) for name in names]


def test_a_run_that_goes_on_knows_the_best_of_the_folder(tmp_path: Path) -> None:
    """The process that saved it is gone; and of a branch that is left nothing is deleted, nor counts."""
    first = Checkpointer(tmp_path, CTX, keep=Keep(2, best=1))
    save_steps(first, {1: 3.0, 2: 1.0, 3: 2.0, 4: None, 5: 0.5})
    first.close()
    assert steps_of(FolderPlace(tmp_path).committed()) == [5, 4]
    second = Checkpointer(tmp_path, CTX, keep=Keep(2, best=2))
    second.continues(tmp_path / step_name(4))
    save_steps(second, {6: 2.0, 7: 1.5, 8: 1.8, 9: 1.9})
    second.close()
    assert (tmp_path / f"aside_1_{step_name(5)}" / COMMIT).exists()
    assert steps_of(FolderPlace(tmp_path).committed()) == [9, 8, 7, 4]
    lines = describe(tmp_path)
    assert "validation loss: 1.9000" in lines
    judged = [line for line in lines if ": validation loss " in line]
    assert judged[0] == f"{tmp_path / step_name(7)}: validation loss 1.5000 (best)"
    assert [line.endswith("(best)") for line in judged] == [True, False, False]
    good = find_good(tmp_path, CTX)
    assert good is not None
    assert good.path.name == step_name(9), "a resume takes the newest"


def test_a_lost_disk_loses_no_best_of_a_store(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    place = StorePlace(Store(f"{url}/checkpoints"))
    for disk, losses in (("a", {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.5}), ("b", {5: 2.6, 6: 2.7, 7: 2.8})):
        run_dir = tmp_path / disk
        mirror = Mirror(url, run_dir)
        checkpointer = Checkpointer(run_dir / "checkpoints", CTX, keep=Keep(2, best=1), mirror=mirror)
        if newest := place.committed()[:1]:
            checkpointer.continues(mirror.fetch(newest[0]))
        checkpointer.take()
        save_steps(checkpointer, dict(losses))
        checkpointer.close()
    assert steps_of(place.committed()) == [7, 6, 4, 2], "the newest, what the run continued, and the best"
    assert read_meta(mirror.fetch(place.committed()[-1]))["valid_loss"] == 1.0


def test_a_server_that_speaks_s3_keeps_the_best(s3: S3, tmp_path: Path) -> None:
    url, written = s3.url(f"runs/{secrets.token_hex(4)}/checkpoints"), list[str]()
    for step, loss in ((1, 1.0), (2, 3.0), (3, 0.9), (4, 3.0), (5, 3.0)):
        part = make_part(tmp_path, url, step, save_id=str(step) * 16, written=written, keep_best=2)
        part.job["manifest"]["meta"]["valid_loss"] = loss
        written.append(part.name)
        assert upload_parts(url, part)[0]["error"] == ""
    assert [step_of(name) for name in StorePlace(Store(url)).committed()] == [5, 4, 3, 1]


RUN = [
    *["--device", "cpu", "--num-layers", "1", "--hidden-size", "8", "--num-heads", "2", "--seq-len", "8"],
    *["--vocab-size", "31", "--global-batch-size", "2", "--watchdog-timeout", "0", "--eval-steps", "1", "--mock-data"],
]


def losses_in(root: Path) -> dict[int, Any]:
    return {
        step: read_meta(root / step_name(step)).get("valid_loss") for step in steps_of(FolderPlace(root).committed())
    }


def test_a_checkpoint_records_the_evaluation_of_its_own_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one of an earlier step, nor one before a rewind, nor one that is no number."""
    monkeypatch.setattr("signal.signal", lambda *_: None)  # pytest keeps its own handlers
    flags = [*RUN, "--train-steps", "5", "--save-every", "1", "--eval-every", "2", "--keep-last", "9"]
    root = tmp_path / "checkpoints"
    with open_run(cli.parse([*flags, "--run-dir", str(tmp_path)]).config, CTX) as run:
        fit(run)
        lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
        evaluated = {line["step"]: line["loss"] for line in lines if line.get("event") == "eval"}
        assert losses_in(root) == {1: None, 2: evaluated[2], 3: None, 4: evaluated[4], 5: evaluated[5]}
        assert run.valid_loss == evaluated[5]
        run.sample_offset += 2
        assert run.valid_loss is None, "of the same step, after other samples"
        run.step += 1
        for loss in (math.nan, math.inf, 1.25):
            run.evaluated = run.step, run.consumed_samples, loss
            save(run)
            run.checkpointer.settle()
            assert losses_in(root)[6] == (1.25 if loss == 1.25 else None)
