"""What the fuzzer knows of a reader of files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

Form = Callable[[Random, bytes], bytes]


@dataclass(frozen=True)
class Reader:
    """A reader under test.

    Attributes:
        make: writes valid files into a folder.
        read: reads them, in full; what it returns is compared where `exact`.
        forms: file name pattern -> changes that respect the format around them (a length, a checksum).
        exact: what is read must be what was written: checksums cover everything.
    """

    make: Callable[[Path], None]
    read: Callable[[Path], Any]
    forms: dict[str, Form] = dataclasses.field(default_factory=dict)
    exact: bool = False
