"""The list of mutants: what is planted where, and which tests find it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    """A mistake.

    Attributes:
        name: the mistake, in words.
        file: file of this repository.
        find: text that occurs in it once.
        replace: text in its place.
        tests: files, folders or IDs of tests, of which at least one fails.
    """

    name: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]

    def planted(self, text: str) -> str:
        """Return the text of the file with the mistake."""
        assert text.count(self.find) == 1, f"{self.file} has {text.count(self.find)} of {self.find!r}"
        return text.replace(self.find, self.replace)


def mutants() -> list[Mutant]:
    """Read the list."""
    rows = yaml.safe_load((Path(__file__).parent / "mutants.yaml").read_text())
    return [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]
