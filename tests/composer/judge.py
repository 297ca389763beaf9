"""Whether the training of a draw is the same in its layout as in one process."""

from __future__ import annotations

import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megalite.core.base.errors import UserError
from megalite.core.parts.families import FAMILIES
from megalite.runtime.options import cli
from tests.composer import draws, job
from tests.composer.data import write_files
from tests.composer.draws import Draw
from tests.composer.outcome import Boxes, Outcome, Task
from tests.composer.shrink import shrink
from tests.workers import WorkerError, WorkerPool

# Far beyond the slowest run, also on busy cores: what takes longer hangs.
HUNG_S = 300.0
NOISE_FACTOR = 30.0
"""A difference counts from this many times what moving all weights by one rounding does."""
OTHER_SEEDS = (1, 2)
"""A difference counts if it comes back with the draw's seed moved by each of these."""
# Differences below these are rounding, whatever the model is. Weights are compared by the length of their way: the
# first steps of Adam have the sign of a gradient, and rounding may turn that of a tiny one.
_SAME = {"figure": 3e-6, "gradient": 1e-5, "weights": 1e-3}
# A gradient that is zero but for rounding, of a bias of keys, is compared with the norm of all.
_LEAST = 1e-6
# How a run ends, and by which words that shows. The trainer itself compares copies before it saves.
_ENDINGS = {"hang": "gave no result", "copies": r"SaveError: nothing saved: .*\bcopies"}


class Verdict(NamedTuple):
    """What became of a draw.

    Attributes:
        kind: "same", "refused", or how it fails: "differs", "copies", "crash", "hang", "refuses" (without a rule),
            "export", each with "resumed: " in front where the other layout does.
        why: one line.
    """

    kind: str
    why: str = ""

    @property
    def fails(self) -> bool:
        return self.kind not in ("same", "refused")


class Judge:
    """Runs draws and judges them.

    Args:
        pool: workers.
        fault: what is planted into runs of layouts, see `faults`.
    """

    def __init__(self, pool: WorkerPool, fault: str = "") -> None:
        self.pool, self.fault = pool, fault
        self._data = tempfile.TemporaryDirectory(prefix="megalite-composer-")
        self.folder = Path(self._data.name)
        write_files(self.folder)

    def close(self) -> None:
        self._data.cleanup()

    def least(self, draw: Draw, kind: str, seconds: float) -> Draw:
        """Return a least draw that fails in the same way, as far as that is found in some seconds."""
        return shrink(draw, lambda other: self.judge(other, sure=False).kind == kind, seconds)

    def judge(self, draw: Draw, sure: bool = True) -> Verdict:
        """Return the verdict.

        Args:
            draw: the draw.
            sure: ask other seeds, where figures differ.
        """
        verdict = self._judge(draw)
        if sure and verdict.kind.endswith("differs"):
            for more in OTHER_SEEDS:
                if not self._judge({**draw, "seed": draw.get("seed", 1234) + more}).fails:
                    return Verdict("same", f"with another seed, but {verdict.why}")
        return verdict

    def _judge(self, draw: Draw) -> Verdict:
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            return _Trial(self, draw, Path(folder)).verdict()


class _Failed(Exception):
    """A verdict that ends a trial."""


class _Trial:
    """The runs of one draw."""

    def __init__(self, judge: Judge, draw: Draw, folder: Path) -> None:
        self.judge, self.draw, self.folder = judge, draw, folder
        self.plain = draws.alone(draw)

    def verdict(self) -> Verdict:
        try:
            return self._verdict()
        except _Failed as e:
            return e.args[0]

    def _verdict(self) -> Verdict:
        if refused := self._refused_by_rule(self.draw):
            return Verdict("refused", refused)
        ranks = self._run(self.draw, "layout", self.judge.fault)
        alone = self._run(self.plain, "plain")
        if alone[0].refused or ranks[0].refused:
            return self._judge_refusal(ranks, alone[0].refused)
        self._compare(ranks, alone, "")
        if "resume" in self.draw:
            self._resume(alone)
        if self.draw.get("export"):
            self._export(ranks)
        return Verdict("same")

    def _refused_by_rule(self, draw: Draw) -> str:
        """Return the line by which the options are refused before anything runs: a rule that is written down."""
        try:
            cli.parse(draws.words(draw, str(self.judge.folder)))
        except UserError as e:
            return str(e)
        return ""

    def _run(self, draw: Draw, name: str, fault: str = "", more: Sequence[str] = (), **task: Any) -> list[Outcome]:
        world, own = draws.ranks(draw), draw.get("data", "mock")
        words = [*draws.words(draw, str(self.judge.folder)), "--run-dir", str(self.folder / name), *more]
        data = own if own.startswith("own") else ""
        try:
            return self.judge.pool.run(world, job.run, Task(words, world, data, fault=fault, **task), timeout=HUNG_S)
        except WorkerError as e:
            text = str(e)
        kind = (
            "hang"
            if "gave no result" in text
            else "copies"
            if "SaveError: nothing saved: the copies" in text
            else "crash"
        )
        raise _Failed(Verdict(f"{_prefix(name)}{kind}", _last_line(text)))

    def _judge_refusal(self, ranks: Sequence[Outcome], alone: str) -> Verdict:
        lines = {rank.refused for rank in ranks}
        if len(lines) > 1:
            return Verdict("refuses", f"not on every rank: {sorted(lines)}")
        (line,) = lines
        if _rule(line) == _rule(alone) or any(re.search(rule, line) for rule in RULES):
            return Verdict("refused", line)
        return Verdict("refuses", f"{line!r}, in one process {alone!r}")

    def _compare(self, ranks: Sequence[Outcome], alone: Sequence[Outcome], what: str) -> None:
        """Compare copies, then figures, with what moving the weights by one rounding does."""
        if different := _different_copies(ranks):
            raise _Failed(Verdict(f"{what}copies", different))
        far = {name: d for name, d, kind in differences(ranks, alone) if not d <= _SAME[kind]}
        if not far:
            return
        noise = dict.fromkeys(far, 0.0)
        for move in (1, -1):
            shutil.rmtree(self.folder / "moved", ignore_errors=True)
            moved = self._run(self.plain, "moved", move=move)
            for name, d, _ in differences(moved, alone):
                if name in noise:
                    noise[name] = max(noise[name], d)
        far = {name: d for name, d in far.items() if not d <= NOISE_FACTOR * noise[name]}
        if far:
            worst = sorted(far, key=lambda name: far[name] / (noise[name] or 1e-9), reverse=True)[:3]
            words = "; ".join(f"{name} by {far[name]:.1e} (one rounding: {noise[name]:.1e})" for name in worst)
            raise _Failed(Verdict(f"{what}differs", f"{words}; {len(far)} in all"))

    def _resume(self, alone: Sequence[Outcome]) -> None:
        """Continue from the second step in another layout."""
        other = draws.resumed(self.draw)
        if self._refused_by_rule(other):
            return
        start = self.folder / "layout" / "checkpoints" / "step_00000002"
        ranks = self._run(other, "resumed", self.judge.fault, ["--resume", str(start)])
        if ranks[0].refused:
            verdict = self._judge_refusal(ranks, "")
            if verdict.fails:
                raise _Failed(Verdict(f"resumed: {verdict.kind}", verdict.why))
            return
        self._compare(ranks, alone, "resumed: ")

    def _export(self, ranks: Sequence[Outcome]) -> None:
        """Write the weights as a Hugging Face folder, and read the same bits back."""
        folder = self.folder / "hf"
        (refused,) = self.judge.pool.run(1, job.export, str(self.folder / "layout"), str(folder), timeout=HUNG_S)
        if refused:
            if not any(re.search(rule, refused) for rule in EXPORT_RULES):
                raise _Failed(Verdict("export", f"refuses: {refused}"))
            return
        # Files of most families hold no modules that predict further tokens.
        cfg = cli.parse(draws.words(self.plain, str(self.judge.folder))).config.model
        held = FAMILIES[cfg.arch].holds(cfg.mtp_num_layers)
        plain = {**self.plain, **({} if held else {"mtp_num_layers": 0})}
        (loaded,) = self._run(plain, "loaded", weights_of=str(folder))
        if loaded.refused:
            raise _Failed(Verdict("export", f"cannot be loaded: {loaded.refused}"))
        there, here = put_together([loaded.weights]), put_together([rank.weights for rank in ranks])
        for name, weights in there.items():
            if not np.array_equal(weights, here[name]):
                raise _Failed(Verdict("export", f"{name} is not what was trained"))


# Refusals that follow from the layout when a run starts, as its documentation says.
RULES = (
    r"requires pp <= group size <= micro-batches",
    r"must be divisible by micro-batch size",
    r"must give each of \d+ data-parallel ranks a micro-batch",
    r"must make groups of at least two ranks",
    r"must divide the \d+ ranks of",
    r"the number of ranks must be a multiple",
)
# What the formats of Hugging Face have no word for.
EXPORT_RULES = (
    r"a config.json of this family means",
    r"cannot be exported \(",
    r"tied embeddings cannot hold the multiplier of muP",
)


def _prefix(name: str) -> str:
    return {"layout": "", "plain": "one process: ", "moved": "one process: "}.get(name, f"{name}: ")


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")[:300]


def _rule(line: str) -> str:
    """Return a refusal without its numbers."""
    return re.sub(r"\d+", "", line)


def differences(got: Sequence[Outcome], want: Sequence[Outcome]) -> Iterator[tuple[str, float, str]]:
    """Yield (name, relative difference, kind) of everything that two layouts must agree in; NaN differs from all."""
    for rank, outcome in enumerate(got):
        for step, figures in outcome.figures.items():
            for name, value in figures.items():
                expected = want[0].figures[step].get(name)
                if expected is None:
                    yield f"{name} of step {step}", math.inf, "figure"
                    continue
                d = abs(value - expected) / max(abs(expected), 1e-12)
                if rank == 0 or not d <= _SAME["figure"]:
                    yield f"{name} of step {step}", d, "figure"
    if min(got[0].figures) == 1:  # else it was resumed, and those are of a later step
        yield from _of_gradients(_whole(got, "grads"), _whole(want, "grads"))
    yield from _of_weights(_whole(got, "weights"), _whole(want, "weights"), _whole(want, "start"))


def _whole(ranks: Sequence[Outcome], part: str) -> dict[str, np.ndarray]:
    return put_together([getattr(rank, part) for rank in ranks])


def _of_gradients(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> Iterator[tuple[str, float, str]]:
    norm = math.sqrt(sum(float(np.square(g, dtype=np.float64).sum()) for g in want.values()))
    for name in sorted({*got, *want}):
        if name not in got or name not in want:
            yield f"gradient of {name}, which one of them has not", math.inf, "gradient"
            continue
        scale = max(float(np.abs(want[name]).max()), _LEAST * norm, 1e-30)
        yield f"gradient of {name}", float(np.abs(got[name] - want[name]).max()) / scale, "gradient"


def _of_weights(
    got: dict[str, np.ndarray], want: dict[str, np.ndarray], start: dict[str, np.ndarray]
) -> Iterator[tuple[str, float, str]]:
    for name in sorted({*got, *want}):
        if name not in got or name not in want:
            yield f"{name}, which one of them has not", math.inf, "weights"
            continue
        way = max(float(np.linalg.norm(want[name] - start[name])), 1e-6 * float(np.linalg.norm(want[name])), 1e-30)
        yield f"way of {name}", float(np.linalg.norm(got[name] - want[name])) / way, "weights"


def put_together(ranks: Sequence[Boxes]) -> dict[str, np.ndarray]:
    """Make whole tensors; NaN where no rank, or more than one, holds an element."""
    whole: dict[str, np.ndarray] = {}
    for boxes in ranks:
        for name, (shape, held) in boxes.items():
            tensor = whole.setdefault(name, np.full(shape, np.nan, np.float32))
            for index, part in held:
                tensor[index] = np.where(np.isnan(tensor[index]), part, np.nan)
    return whole


def _different_copies(ranks: Sequence[Outcome]) -> str:
    """Describe the first weight of which copies differ; "" if none do."""
    held: dict[tuple[str, tuple[int, ...]], dict[str, list[str]]] = {}
    for outcome in ranks:
        for axis, members, digests in outcome.copies:
            for name in (first := held.setdefault((axis, members), digests)).keys() | digests.keys():
                if first.get(name) != digests.get(name):
                    return f"{name} over {axis} (ranks {', '.join(map(str, members))})"
    return ""
