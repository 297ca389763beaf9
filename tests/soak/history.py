"""What a run directory holds, and what it ever held."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from megalite.core.base.errors import UserError
from megalite.runtime.checkpoint.manifest import read_manifest
from megalite.runtime.checkpoint.reader import ShardReader
from tests.soak.fuzz import Failed

# --keep-last of all runs.
KEEP = 2


class History:
    """What was ever committed in a run directory, and checks that it is still there.

    Attributes:
        verified: checkpoints whose checksums were all checked.
    """

    def __init__(self, run_dir: Path) -> None:
        self.root = run_dir / "checkpoints"
        self.known: dict[str, dict[str, str]] = {}
        self.verified = 0

    def newest(self) -> int:
        """The newest step that was ever committed."""
        return max((int(name.removeprefix("step_")) for name in self.known), default=0)

    def check(self) -> None:
        """Look again; raises `Failed` if a checkpoint was lost, damaged, or committed in a bad state."""
        found = {}
        for path in self.root.glob("step_*"):
            if (path / "COMMIT").exists():
                found[path.name] = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in path.iterdir()}
            else:
                raise Failed(f"{path} exists without COMMIT: {sorted(p.name for p in path.iterdir())}")
        for name, digests in self.known.items():
            if name in found and found[name] != digests:
                raise Failed(f"{self.root / name} has changed since it was committed")
            newer = [other for other in found if other > name]
            if name not in found and len(newer) < KEEP:
                raise Failed(f"{self.root / name} was committed and is lost; there are {sorted(found)}")
        for name in found.keys() - self.known.keys():
            try:
                reader = ShardReader(self.root / name, read_manifest(self.root / name))
                reader.verify()
                reader.close()
            except UserError as e:
                raise Failed(f"a committed checkpoint is damaged: {e}") from None
            self.verified += 1
        self.known.update(found)


def records(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a line that was cut by a kill is skipped."""
    path, out = run_dir / "metrics.jsonl", []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        with contextlib.suppress(ValueError):
            out.append(json.loads(line))
    return [r for r in out if isinstance(r, dict)]


def losses(run_dir: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of every line, repeated steps too."""
    return [(r["step"], r["loss"], r["grad_norm"]) for r in records(run_dir) if "event" not in r]
