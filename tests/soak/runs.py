"""Training runs under random faults: real ranks of pretrain_gpt.py, stopped and started again until they are done.

A case is one run directory. Each attempt has a layout and a fault (`tests/soak/faults.py`); the last one has none.
After every attempt: all processes are gone in time, every committed checkpoint is as it was, the newest one is what the
next attempt resumes from. In the end the losses of all steps are those of a run that nothing happened to. A quarter of
the runs, or all, read text that processes tokenize meanwhile.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from tests.faults.zygote import Zygote
from tests.soak.attempt import END_S, Attempt
from tests.soak.faults import Fault, draw
from tests.soak.fuzz import Failed
from tests.soak.history import KEEP, History, losses, records

_SIZES = [
    *("--num-layers", "4", "--hidden-size", "16", "--num-heads", "2", "--seq-len", "16"),
    *("--global-batch-size", "8", "--device", "cpu", "--lr", "1e-3"),
]
MODEL = [*_SIZES, "--vocab-size", "64", "--mock-data"]
# A run of 40 steps begins with pieces all along.
_FILES, _LINES = 48, 6
_OF_TEXT = [
    *("--tokenizer", "bytes", "--split", "1,0,0", "--data-lanes", "6", "--shuffle-tokens", "64", "--document-mask"),
    *("--data-workers", "1"),
]
# World size and options of each layout. The first is the reference of all.
LAYOUTS: list[tuple[int, list[str]]] = [
    (1, []),
    (2, []),
    (2, ["--tp", "2"]),
    (2, ["--pp", "2"]),
    (2, ["--pp", "2", "--vp", "2"]),
    (2, ["--zero", "3"]),
    (2, ["--zero", "2", "--micro-batch-size", "2"]),
    (4, ["--tp", "2", "--pp", "2"]),
    (4, ["--tp", "2", "--zero", "0"]),
    (4, ["--pp", "2", "--zero", "3"]),
    (4, ["--zero", "1", "--offload", "optimizer"]),
]
TOLERANCE = 1e-5


class Soak:
    """Runs cases.

    Args:
        folder: to work in; each case has a folder in it, deleted when it survives.
        seed: of all cases.
        tally: counted up.
        report: called with a line for every attempt.
        zygote: starts ranks.
        disk_library: of disk faults; None without a compiler.
        kinds: of faults; none: all.
        steps: of each run.
        text: all runs read text, not only a quarter.
    """

    def __init__(
        self,
        folder: Path,
        seed: str,
        tally: Counter[str],
        report: Callable[[str], None],
        zygote: Zygote,
        disk_library: Path | None,
        kinds: Sequence[str] = (),
        steps: int = 40,
        text: bool = False,
    ) -> None:
        self.folder, self.seed, self.tally, self.report = folder, seed, tally, report
        self.zygote, self.disk_library, self.kinds, self.steps = zygote, disk_library, kinds, steps
        self.text, self._references = text, dict[str, list[tuple[int, float, float]]]()

    def reference(self, layout: int, dropout: bool, text: bool) -> list[tuple[int, float, float]]:
        """The losses of a run that nothing happens to, made once."""
        key = f"{layout}{'d' * dropout}{'t' * text}"
        if key not in self._references:
            world, words = LAYOUTS[layout]
            place = self.folder / f"reference_{key}"
            place.mkdir(parents=True)
            attempt = Attempt(place, world, 0)
            attempt.fork(self.zygote, [*self.words(place, dropout, text), *words], {})
            attempt.wait(END_S)
            if attempt.codes() != [0] * world:
                raise Failed(f"the undisturbed run failed: {attempt.codes()}\n{attempt.text()[-3000:]}")
            self._references[key] = losses(place / "run")
            shutil.rmtree(place)
        return self._references[key]

    def words(self, place: Path, dropout: bool, text: bool) -> list[str]:
        return [
            *(self._of_text(place) if text else MODEL),
            "--run-dir",
            str(place / "run"),
            "--train-steps",
            str(self.steps),
            "--hidden-dropout",
            "0.1" if dropout else "0",
        ]

    def _of_text(self, place: Path) -> list[str]:
        """Write the text once; each run tokenizes for itself."""
        folder = self.folder / "text"
        if not folder.exists():
            folder.mkdir()
            for file in range(_FILES):
                lines = (json.dumps({"text": f"file {file} line {line} " + "ab" * line}) for line in range(_LINES))
                (folder / f"{file:02}.jsonl").write_text("\n".join(lines))
        return [*_SIZES, *_OF_TEXT, "--data", str(folder), "--cache-dir", str(place / "cache")]

    def case(self, number: int) -> None:
        """Run a case; raises `Failed`, and leaves its folder, if something was lost."""
        rng = Random(f"{self.seed}:run:{number}")
        place = self.folder / f"run_{number}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        fixed = rng.randrange(len(LAYOUTS)) if rng.random() < 0.4 else None
        every = rng.choice((1, 1, 2, 5))
        history, attempts = History(place / "run"), 0
        faults = [draw(rng, self.disk_library, self.kinds) for _ in range(rng.choice((1, 2, 2, 3)))]
        if fixed is not None and any(fault.world(LAYOUTS[fixed][0]) != LAYOUTS[fixed][0] for fault in faults):
            fixed = None
        text = self.text or Random(f"{self.seed}:text:{number}").random() < 0.25
        common = [*self.words(place, fixed is not None, text), "--save-every", str(every), "--keep-last", str(KEEP)]
        try:
            for fault in [*faults, None]:
                layout = rng.randrange(len(LAYOUTS)) if fixed is None else fixed
                codes = self.attempt(place, attempts, layout, common, fault, history)
                attempts += 1
                if history.newest() == self.steps and not any(codes):
                    break
            self.finished(place / "run", history, fixed, text)
        except Failed as e:
            raise Failed(f"case {number}, attempt {attempts}: {e}") from None
        self.tally["runs"] += 1
        self.tally["runs on text"] += text
        self.tally["checkpoints verified"] += history.verified
        shutil.rmtree(place)

    def attempt(
        self, place: Path, number: int, layout: int, common: list[str], fault: Fault | None, history: History
    ) -> list[int]:
        """Start the run once, with a fault or None, check what is left, and return the exit codes."""
        world, words = LAYOUTS[layout]
        before, newest = len(records(place / "run")), history.newest()
        attempt = Attempt(place, fault.world(world) if fault else world, number)
        words = words if attempt.world == world else []
        started = time.monotonic()
        line = (
            f"{place.name} attempt {number}: {' '.join(words) or 'plain'} on {attempt.world}, {fault or 'undisturbed'}"
        )
        try:
            if fault:
                hit = fault.run(attempt, self.zygote, [*common, *words])
                self.tally[fault.name if hit else "too late"] += 1
            else:
                attempt.fork(self.zygote, [*common, *words], {})
                attempt.wait(END_S)
            history.check()
            codes, wanted = attempt.codes(), fault.codes if fault else (0,)
            if any(code not in wanted for code in codes):
                raise Failed(f"exit codes {codes}, expected {wanted}\n{attempt.text()[-3000:]}")
            for event in records(place / "run")[before:]:
                if event.get("event") in ("resume", "start") and event["step"] != newest:
                    raise Failed(f"{event} although step {newest} was committed")
        except Failed as e:
            raise Failed(f"{line}: {e}") from None
        self.report(f"{line}: exit {codes} after {time.monotonic() - started:.1f} s, step {history.newest()} committed")
        return codes

    def finished(self, run_dir: Path, history: History, fixed: int | None, text: bool) -> None:
        """Check a run that is done against the one that nothing happened to."""
        if history.newest() != self.steps:
            raise Failed(f"the run did not finish: step {history.newest()} of {self.steps}")
        left = sorted(p.name for p in (run_dir / "checkpoints").iterdir() if p.name.startswith((".tmp_", "lock")))
        steps = list((run_dir / "checkpoints").glob("step_*"))
        if left or len(steps) > KEEP + 1:
            raise Failed(f"left in the folder: {left}, {sorted(p.name for p in steps)}")
        expected = {step: rest for step, *rest in self.reference(fixed or 0, fixed is not None, text)}
        found = losses(run_dir)
        if {step for step, *_ in found} != set(range(1, self.steps + 1)):
            raise Failed(f"metrics.jsonl has the steps {sorted({step for step, *_ in found})}")
        for step, *values in found:
            same = values == expected[step] if fixed is not None else _close(values, expected[step])
            if not same:
                raise Failed(f"step {step}: loss and norm {values}, undisturbed {expected[step]}")
        self.tally["losses compared"] += len(found)


def _close(values: list[float], expected: list[float]) -> bool:
    return all(abs(a - b) <= TOLERANCE * max(1.0, abs(b)) for a, b in zip(values, expected))
