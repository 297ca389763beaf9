"""Saving a run's state: a snapshot, then one writer process per rank; one save is in progress at a time.

A save in the foreground is a save in the background, followed by a wait.
"""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megalite.core.base.log import logger
from megalite.core.mesh.agree import agree
from megalite.core.mesh.collectives import gather_texts
from megalite.core.mesh.context import ParallelContext
from megalite.core.sharding import StateTensor
from megalite.runtime.checkpoint.claim import Claim
from megalite.runtime.checkpoint.coded import zstd
from megalite.runtime.checkpoint.mirror import Mirror, SaveError
from megalite.runtime.checkpoint.pruning import Keep
from megalite.runtime.checkpoint.snapshot import Source, WriterProcess, boxes_of
from megalite.runtime.checkpoint.writer import ABANDONED
from megalite.runtime.places.folder_place import FolderPlace
from megalite.runtime.places.lock import LOCK
from megalite.runtime.places.names import model_name, step_name, store_name
from megalite.runtime.places.place import Save

# How long a process that exits waits for its writer to complete a save in progress.
_CLOSE_S = 8.0

# Outcomes of the beginning of a save, worst first: the worst of all ranks counts.
_OUTCOMES = ("taken", "not-finite", "failed", "ok")


@dataclass
class _Save:
    """A save in progress: begun, passed to the writer, answered by it, then committed or failed.

    Attributes:
        name: name of the checkpoint's folder.
        step: optimizer steps done.
        temporary: folder in which it is written.
        started: `time.perf_counter` at its beginning.
        base: name of the snapshot that it is a difference of; "": it is whole.
        stalled: seconds that training waited.
        reported: whether `poll` has reported the writer's answer.
    """

    name: str
    step: int
    temporary: Path
    started: float
    base: str = ""
    stalled: float = 0.0
    reported: bool = False


class Checkpointer:
    """Write the checkpoints of one run, all its ranks together.

    Args:
        root: folder of the run's checkpoints ("RUN_DIR/checkpoints"); made if missing, owned until `close`.
        ctx: this rank's axes.
        run_id: recorded in the manifest, and shown to a second job that finds the folder in use.
        keep: which full checkpoints stay (default: the newest 2); the others are deleted after a commit.
        on_error: "stop" raises when a save fails, "warn" logs a warning and continues.
        scratch: folder for an unnamed file that holds the snapshot of a save; None: host memory.
        mirror: where checkpoints are uploaded; None: nowhere.
        code: how shards are coded (`coded`); "none": plain safetensors files.
        delta: every so many snapshots of weights one is whole, the others are differences of it; 0: all are whole.

    Attributes:
        on_commit: called on rank 0 for each checkpoint that is there to stay: step, checkpoint (its path), bytes (of
            its files), seconds (of the save), pause_s (those that training waited).

    Raises:
        UserError: the folder is in use or cannot be written, or the package zstandard is missing (on every rank).
    """

    def __init__(
        self,
        root: str | Path,
        ctx: ParallelContext,
        run_id: str = "",
        keep: Keep | None = None,
        on_error: Literal["stop", "warn"] = "stop",
        scratch: Path | None = None,
        mirror: Mirror | None = None,
        code: Literal["none", "planes-zstd"] = "none",
        delta: int = 0,
    ) -> None:
        self.root = Path(root)
        self.ctx = ctx
        self.on_error = on_error
        self.mirror = mirror
        self._code, self._delta = code, delta
        # The last whole snapshot of this process, and the number of differences that refer to it.
        self._whole, self._differences = "", 0
        self.on_commit: Callable[..., None] = lambda **saved: None
        agree(ctx, lambda: zstd(f"--save-code {code}") if code != "none" else None)
        agree(ctx, lambda: zstd(f"--save-model-delta {delta}") if delta else None)
        self.run_id = run_id or secrets.token_hex(8)
        self._claim = Claim(self.root, self.run_id, keep or Keep(), mirror)
        agree(ctx, self._claim.acquire if ctx.rank == 0 else lambda: None)
        if mirror is not None:
            mirror.meet(self.root / LOCK, ctx)
            if delta and not mirror.shared:
                logger.warning(f"--save-model-delta {delta}: the hosts share no folder, so all snapshots are whole")
        self._writer = WriterProcess(ctx.device, scratch)
        self._current: _Save | None = None

    def take(self) -> None:
        """Take the run's place in a store, which ends a run that has it: only when this one is certain to start.

        Every rank calls it.
        """
        if self.mirror is not None:
            agree(self.ctx, self.mirror.take if self.ctx.rank == 0 else lambda: None)

    def continues(self, path: str | Path) -> None:
        """Name the checkpoint that this run continues.

        It is never pruned, and uploaded if that has not been done. The first commit sets aside only the later
        checkpoints of the folder: they belong to a history that this run does not continue.
        """
        self._claim.continues(Path(path))
        if self.ctx.rank == 0 and (job := self._claim.catch_up()) is not None:
            logger.info(f"{path} is not in the store yet: uploading it")
            self._writer.upload(job)

    @property
    def pending(self) -> str:
        """Name of the save in progress, as far as this rank knows since `poll`; "" if there is none."""
        return self._current.name if self._current is not None and not self._current.reported else ""

    def adopt(self, name: str) -> None:
        """Name a checkpoint that an earlier process of this run has written; every rank calls it."""
        self._claim.add(name)

    def save(
        self, step: int, states: Sequence[StateTensor], meta: dict[str, Any], background: bool = False
    ) -> Path | None:
        """Save the full state; every rank calls it.

        Args:
            step: optimizer steps done.
            states: what this rank holds; they may change as soon as this returns.
            meta: JSON content that loading returns.
            background: return after the snapshot; `poll` or `finish` report the outcome.

        Returns:
            The checkpoint's folder (in the background: where it will be); None if the save failed and `on_error` is
            "warn".

        Raises:
            SaveError: this save or the previous one failed; raised on every rank.
        """
        return self._save(step_name(step), step, boxes_of(states, None), meta, background)

    def save_model(
        self, step: int, states: Sequence[StateTensor], meta: dict[str, Any], background: bool = False
    ) -> Path | None:
        """Save the weights alone, as bf16, to `model_NNNNNNNN`: a sixth of the bytes, for evaluation and export.

        Write nothing if a full checkpoint of this step exists or is being written. These checkpoints are never pruned,
        and a run never resumes from them automatically.
        """
        full = step_name(step)
        if full in self._claim or (self._current is not None and self._current.name == full):
            return self.root / full
        return self._save(model_name(step), step, boxes_of(states, "model"), meta, background)

    def _save(self, name: str, step: int, boxes: list[Source], meta: dict[str, Any], background: bool) -> Path | None:
        self.finish()
        # Content that is not JSON is an error here, not in the writer.
        json.dumps(meta, allow_nan=False)
        started = time.perf_counter()
        begun = self._begin(name, boxes)
        if begun is None:
            return None
        save_id, hold, base = begun.split(" ")
        save = _Save(name, step, self._temporary(name, save_id), started, base)
        self._writer.start_job(self._make_job(save, save_id, step, meta, hold == "hold"), boxes)
        save.stalled = time.perf_counter() - started
        self._current = save
        return self.root / name if background or self.finish() else None

    def _begin(self, name: str, boxes: list[Source]) -> str | None:
        """Take the snapshot on every rank, and make the folder on rank 0.

        Returns:
            The save's random ID, by which all ranks recognize its files, "hold" during an earlier upload, and the base
            of a difference, separated by spaces; None if that failed and `on_error` is "warn".

        Raises:
            SaveError: it failed; state is not finite; another job has taken the run directory.
        """
        outcome, text = self._prepare(name, boxes)
        answers = gather_texts(f"{outcome} {text}", self.ctx.world, self.ctx.device)
        answer = min(answers, key=lambda a: _OUTCOMES.index(a.partition(" ")[0]))
        worst, _, problem = answer.partition(" ")
        if worst == "ok":
            return problem
        if outcome == "ok" and self.ctx.rank == 0:
            self._temporary(name, text.partition(" ")[0]).rmdir()
        if worst == "taken":
            # Two jobs in one run directory: to continue with a warning would mix their files.
            raise SaveError(f"checkpoint not saved: {self.root} has been taken by {problem}; this run must end")
        if worst == "not-finite":
            raise SaveError(
                f"nothing saved: {problem}; resume from the last checkpoint, with a lower --lr if it recurs"
            )
        self._fail(problem)
        return None

    def _prepare(self, name: str, boxes: list[Source]) -> tuple[str, str]:
        """Begin the save on this rank; return one of `_OUTCOMES`, and the ID of the save or a description."""
        save_id, rank = secrets.token_hex(8), self.ctx.rank
        temporary = self._temporary(name, save_id)
        try:
            if bad := self._writer.snapshot.take(boxes):
                return "not-finite", f"{bad.kind} of {bad.name} on rank {rank} is not finite"
            if rank == 0:
                if other := self._claim.taken_by():
                    return "taken", other
                temporary.mkdir()
        except OSError as e:
            return "failed", f"rank {rank}: " + (f"{temporary}: {e.strerror}" if e.strerror else str(e))
        hold = "hold" * (self.mirror is not None and self.mirror.is_busy)
        # Without a shared folder there is no local base.
        follows = name.startswith("model_") and self._differences < self._delta - 1
        base = self._whole * (follows and (self.mirror is None or self.mirror.shared))
        return "ok", f"{save_id} {hold} {base}"

    def _make_job(self, save: _Save, save_id: str, step: int, meta: dict[str, Any], hold: bool) -> dict[str, Any]:
        """Describe the job of this rank's writer; the writer of rank 0 also commits."""
        job = {
            "root": str(self.root),
            "temporary": str(save.temporary),
            "name": save.name,
            "full": save.name == step_name(step),
            "save_id": save_id,
            "rank": self.ctx.rank,
            "world": self.ctx.world.size,
            "code": "planes-zstd" if self._delta and save.name == model_name(step) else self._code,
            "base": save.base,
            "remote": self._claim.at_upload(store_name(save.name, save_id), hold),
        }
        if self.ctx.rank == 0:
            job |= {
                "manifest": {
                    "run_id": self.run_id,
                    "step": step,
                    "topology": self.ctx.grid.as_dict(),
                    "meta": meta,
                },
                **self._claim.at_commit(),
            }
        return job

    def _temporary(self, name: str, save_id: str) -> Path:
        return self.root / FolderPlace(self.root).parts_of(Save(name, save_id))

    def poll(self) -> Path | None:
        """Check a save in the background without waiting; call it at every step.

        Returns:
            On rank 0, the checkpoint's folder, once, after it was committed; otherwise None.

        Raises:
            SaveError: this rank's write failed; the other ranks raise in `finish`.
        """
        if self.mirror is not None:
            self.mirror.check(self._writer, self.on_error == "stop")
        save = self._current
        if save is None or save.reported or not self._writer.wait(0):
            return None
        save.reported = True
        if self._writer.error:
            self._fail(f"rank {self.ctx.rank}: {self._writer.error}")
            return None
        return self._log_commit(save) if self.ctx.rank == 0 else None

    def finish(self) -> bool:
        """Wait for the save in progress, if any; every rank calls it.

        Returns:
            False if the save failed and `on_error` is "warn".

        Raises:
            SaveError: it failed; raised on every rank, naming the first one that failed.
        """
        save, rank0, begun = self._current, self.ctx.rank == 0, time.perf_counter()
        if save is None:
            return True
        # The writer of rank 0 waits for all others, so it must be informed if one of them fails.
        if not rank0:
            self._writer.wait(None)
        errors = self._gather_errors()
        if rank0:
            if any(errors) and not self._writer.wait(0):
                self._writer.abandon()
            self._writer.wait(None)
        errors = [early or late for early, late in zip(errors, self._gather_errors())]
        self._current = None
        if not any(errors):
            if rank0 and not save.reported:
                save.stalled += time.perf_counter() - begun
                self._log_commit(save)
            self._claim.add(save.name)
            # What rank 0 knows counts (`_begin`): its writer tells whether the base could be read.
            if rank0 and save.name == model_name(save.step):
                refers = bool(self._writer.answer("base"))
                self._whole = save.base if refers else save.name
                self._differences = self._differences + 1 if refers else 0
            return True
        self._claim.failed()
        # Its base may be gone.
        self._whole = ""
        if rank0:
            shutil.rmtree(save.temporary, ignore_errors=True)
        first = next(rank for rank, text in enumerate(errors) if text and text != ABANDONED)
        self._fail(f"rank {first}: {errors[first]}")
        return False

    def settle(self) -> bool:
        """As `finish`, and wait for uploads too, whose attempts are bounded; every rank calls it."""
        saved = self.finish()
        if self.mirror is None:
            return saved
        if problem := self.mirror.settle(self._writer, self.ctx):
            whole = "; the local one is whole" * self.mirror.shared
            self._fail(f"{problem}{whole}", "the last checkpoint is not uploaded")
            return False
        if not self.mirror.shared:
            self.mirror.tidy(self.root)
        return saved

    def _gather_errors(self) -> list[str]:
        return list(gather_texts(self._writer.error, self.ctx.world, self.ctx.device))

    def _log_commit(self, save: _Save) -> Path:
        path = self.root / save.name
        seconds = time.perf_counter() - save.started
        # Where the hosts share no folder it is saved once it is uploaded.
        what = f"saved {path}" if self.mirror is None or self.mirror.shared else f"wrote the parts of {save.name}"
        logger.info(f"{what} in {seconds:.2f} s, training paused for {save.stalled:.2f} s")
        size = self._writer.committed_bytes  # None where the hosts share no folder
        self.on_commit(step=save.step, checkpoint=str(path), bytes=size, seconds=seconds, pause_s=save.stalled)
        for moved in self._writer.answer("moved"):
            logger.warning(f"set aside, because this run does not continue it: {moved}")
        for problem in self._writer.answer("problems"):
            logger.warning(f"the checkpoint is saved, but {problem}")
        return path

    def _fail(self, problem: str, what: str = "checkpoint not saved") -> None:
        if self.on_error == "stop":
            raise SaveError(f"{what}: {problem}")
        logger.warning(f"{what}, training continues (--save-errors warn): {problem}")

    def close(self) -> None:
        """Release the folder and end the writer. A save in progress gets a few more seconds; `finish` waits for it."""
        if self._current is not None:
            self._writer.wait(_CLOSE_S)
        self._writer.close()
        if self.ctx.rank == 0:
            self._claim.release()
