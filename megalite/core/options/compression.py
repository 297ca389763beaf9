"""Compression of gradients over the batch axes (`--compress`), as options and plans know it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from megalite.core.base.errors import UserError
from megalite.core.base.table import Table


class Gradients(NamedTuple):
    """The gradients of a rank, for a plan of their compression.

    Attributes:
        total: number of elements.
        largest: elements of the largest bucket.
        waiting: elements whose messages wait until all gradients are complete.
        matrices: (rows, columns) of each matrix.
    """

    total: int
    largest: int
    waiting: int
    matrices: Sequence[tuple[int, int]]


class Compression(ABC):
    """A codec with its argument: `--compress NAME`, or NAME:ARGUMENT.

    Attributes:
        form: how it is given, for errors.
        about: a few words on it, which --help shows.
        reads_values: whether the host reads values of gradients, which an estimate without a device does not have.
        element_bytes: bytes that a rank sends per element, over those of the same collective, for plans of time.
    """

    form: ClassVar[str]
    about: ClassVar[str] = ""
    reads_values: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def read(cls, argument: str | None) -> Compression | None:
        """Read the argument, None if there is none; return None if it is not valid."""

    @abstractmethod
    def codec(self, params: Sequence[Any], numel: int, axis: Any, device: Any) -> Any:
        """Make the codec of a bucket, a `core.optim.codec.Codec` (arguments: see there)."""

    @property
    def element_bytes(self) -> float:
        return 1.0

    @abstractmethod
    def memory(self, grads: Gradients) -> tuple[int, int]:
        """Compute the bytes that a rank keeps between steps, and those that it uses within a step."""


CODECS: Table[type[Compression]] = Table("megalite.core.parts.codecs", "CODEC")
"""Name (`--compress`) -> codec."""


def read_compression(spec: str) -> Compression | None:
    """Read `--compress`; None for "none".

    Raises:
        UserError: no such codec, or not with this argument.
    """
    if spec == "none":
        return None
    name, colon, argument = spec.partition(":")
    compression = CODECS[name].read(argument if colon else None) if name in CODECS else None
    if compression is None:
        # The simplest first.
        *forms, longest = sorted((codec.form for codec in CODECS.values()), key=len)
        rule = f"must be none, {', '.join(forms)}, or {longest}"
        raise UserError(f"--compress {spec}", rule, "use --compress int8")
    return compression
