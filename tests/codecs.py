"""Values of `--compress` for every codec in the table, so that a new one is tested as it is."""

from __future__ import annotations

from megalite.core.options.compression import CODECS

# None: no argument. Several that one codec reads show whether it tells them apart.
ARGUMENTS = (None, "2", "3", "0.25", "0.5")


def specs_of(name: str) -> list[str]:
    """List those of `ARGUMENTS` that a codec reads, as they are given."""
    read = [argument for argument in ARGUMENTS if CODECS[name].read(argument) is not None]
    assert read, f"--compress {name}: reads none of {ARGUMENTS}; add an argument that it does"
    return [name if argument is None else f"{name}:{argument}" for argument in read]
