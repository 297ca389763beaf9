"""Text to which files were added while a run trained on it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megalite.runtime.data.stream.order import Ints, Part
from megalite.runtime.data.stream.sources import Source, TextSource


class GrownSource(Source):
    """The files that a run began with, and those of each addition: each cut into pieces by itself, one after the other.

    Args:
        whole: all files.
        last_files: names of the last file that the run began with, and of each addition, in their order.

    Raises:
        UserError: there is no file in one of them.
    """

    def __init__(self, whole: TextSource, last_files: Sequence[str]) -> None:
        self._parts = [whole.between(a, b) for a, b in zip([None, *last_files[:-1]], last_files)]
        first, *others = self._parts
        self.name, self.num_pieces = first.name, first.num_pieces
        self.tokens, self.template, self.marked = first.tokens, first.template, first.marked
        self.added, self.last_files = [part.num_pieces for part in others], last_files
        self._firsts = np.cumsum([0, *(part.num_pieces for part in self._parts)])

    def describe_last(self) -> str:
        """Say what was added last."""
        catalogue = self._parts[-1].catalogue
        names = dict.fromkeys((catalogue.files[0].name, catalogue.files[-1].name))
        files = f"{len(catalogue.files)} file{'s' * (len(catalogue.files) > 1)}"
        return f"{files} ({' to '.join(names)}), {catalogue.text_bytes / 1e6:.3g} MB"

    def _at(self, piece: int) -> tuple[TextSource, int]:
        """Return what a piece is of, and its number there."""
        number = int(np.searchsorted(self._firsts, piece, "right")) - 1
        return self._parts[number], piece - int(self._firsts[number])

    def sizes(self, piece: int, part: int) -> Part:
        source, own = self._at(piece)
        return source.sizes(own, part)

    def read(self, piece: int, part: int, row: int, token: int, count: int) -> Ints:
        source, own = self._at(piece)
        return source.read(own, part, row, token, count)

    def marks(self, piece: int, part: int, row: int) -> npt.NDArray[np.uint8]:
        source, own = self._at(piece)
        return source.marks(own, part, row)

    def key(self, piece: int, part: int) -> str:
        source, own = self._at(piece)
        return source.key(own, part)

    def ahead(self, piece: int, part: int) -> None:
        source, own = self._at(piece)
        source.ahead(own, part)

    def identity(self) -> str:
        return _joined([part.identity() for part in self._parts])

    def content_hash(self) -> str:
        return _joined([part.content_hash() for part in self._parts])


def _joined(hashes: Sequence[str]) -> str:
    """Hash several; one alone is what it was before anything was added."""
    return hashes[0] if len(hashes) == 1 else hashlib.sha256(" ".join(hashes).encode()).hexdigest()
