"""Counts of the package's source: code lines, functions, files, and which module imports which."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

_SPACE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(text: str) -> int:
    """Count the lines that hold code: no comments, no docstrings, no descriptions of fields."""
    alone: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            alone.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _SPACE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - alone)


class House:
    """A package's modules by dotted name below it ("train.step"; "" is the package itself)."""

    def __init__(self, package: Path) -> None:
        self.package = package.name
        self.texts = {_dotted(path.relative_to(package)): path.read_text() for path in sorted(package.rglob("*.py"))}

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Module -> modules of the package that it imports, wherever the import stands."""
        return {name: set(self._imported(text)) - {name} for name, text in self.texts.items()}

    def _imported(self, text: str) -> Iterator[str]:
        for node in ast.walk(ast.parse(text)):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom):
                # `from a import b`: the module a.b, or what a defines.
                for alias in node.names:
                    inner = self._below(f"{node.module}.{alias.name}")
                    names.append(inner if inner in self.texts else self._below(f"{node.module}"))
            elif isinstance(node, ast.Import):
                names = [self._below(alias.name) for alias in node.names]
            yield from (name for name in names if name in self.texts)

    def _below(self, name: str) -> str:
        first, _, rest = name.partition(".")
        return rest if first == self.package else f"not of {self.package}: {name}"

    def functions(self) -> Iterator[tuple[str, int]]:
        """Yield every function and its lines, signature and docstring included."""
        for module, text in self.texts.items():
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{module}.{node.name}", (node.end_lineno or node.lineno) - node.lineno + 1

    def arrows(self) -> set[tuple[str, str]]:
        """Pairs of rooms of which the first imports the second; a room is the first part of a name."""
        return {
            (a.split(".")[0], b.split(".")[0])
            for a, imported in self.imports.items()
            for b in imported
            if a and a.split(".")[0] != b.split(".")[0]
        }

    def in_circles(self) -> set[str]:
        """Modules that import themselves by way of others, or import such a module."""
        left = dict(self.imports)
        while ends := {name for name, imported in left.items() if not imported & left.keys()}:
            left = {name: imported for name, imported in left.items() if name not in ends}
        return set(left)


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
