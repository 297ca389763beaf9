"""The options of all parts in one class, found by their files; the stub beside it lists them for type checkers."""

from megalite.core.options.part import PARTS

AllParts = type("AllParts", tuple(part.options for part in PARTS.values() if part.options is not None), {})
