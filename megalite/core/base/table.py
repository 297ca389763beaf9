"""Tables of parts: what the modules of a package offer, by name."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping, MutableMapping
from functools import cached_property
from importlib import import_module
from typing import TypeVar

_T = TypeVar("_T")


class Table(MutableMapping[str, _T]):
    """Name -> part: every module of a package that has the attribute `leaf` offers one.

    A part has its own `name`, or that of its module; a module with several small parts offers a mapping of them by
    name. The modules are imported when the table is first read, so that a module that holds a table imports none of its
    parts.

    Args:
        package: dotted name of the package.
        leaf: name of the attribute.
    """

    def __init__(self, package: str, leaf: str) -> None:
        self._package = package
        self._leaf = leaf

    @cached_property
    def _parts(self) -> dict[str, _T]:
        names = sorted(module.name for module in pkgutil.iter_modules(import_module(self._package).__path__))
        modules = {name: import_module(f"{self._package}.{name}") for name in names}
        parts: dict[str, _T] = {}
        for name, module in modules.items():
            part = getattr(module, self._leaf, {})
            parts |= part if isinstance(part, Mapping) else {getattr(part, "name", name): part}
        return parts

    def __getitem__(self, name: str) -> _T:
        return self._parts[name]

    def __setitem__(self, name: str, part: _T) -> None:
        self._parts[name] = part

    def __delitem__(self, name: str) -> None:
        del self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)
