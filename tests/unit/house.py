"""Counts of the package's source: code lines, functions, files, and which module imports which.

python -m tests.unit.house      the figures of this checkout
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
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
    def trees(self) -> dict[str, ast.Module]:
        """Module -> its syntax."""
        return {name: ast.parse(text) for name, text in self.texts.items()}

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Module -> modules of the package that it imports, wherever the import stands."""
        return {name: set(self._imported(tree)) - {name} for name, tree in self.trees.items()}

    def imported_by(self, tree: ast.Module) -> set[str]:
        """Return the modules of the package that a module imports, wherever the import stands."""
        return set(self._imported(tree))

    def _imported(self, tree: ast.Module) -> Iterator[str]:
        for node in _statements(tree):
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
        for module, tree in self.trees.items():
            for node in _statements(tree):
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


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk over statements without their expressions: a tenth of the nodes."""
    yield tree
    for block in ("body", "handlers", "orelse", "finalbody", "cases"):
        for inner in getattr(tree, block, ()):
            yield from _statements(inner)


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_tests(root: Path) -> list[tuple[str, str]]:
    """List (file of tests, file whose tests pytest collects that it imports), wherever the import stands."""
    found = []
    for path in sorted((root / "tests").rglob("*.py")):
        text = path.read_text()
        # Few of them name a test: the others need no parser.
        for node in _statements(ast.parse(text)) if "test_" in text else ():
            names: list[str] = []
            if isinstance(node, ast.ImportFrom):
                # `from a import b`: the module a.b, or what a defines.
                names = [f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            files = {root.joinpath(*name.split(".")).with_suffix(".py") for name in names}
            tests = sorted(file for file in files if file.name.startswith("test_") and file.exists())
            found += [(str(path.relative_to(root)), str(file.relative_to(root))) for file in tests]
    return found


def wing_of(module: str) -> str:
    """Return the wing of a module: core, runtime or extras; the doors are the runtime's."""
    first = module.split(".")[0]
    return first if first in ("core", "extras") else "runtime"


class Figures:
    """What is counted and printed, and no test asserts: a cliff at a number means that a limit cut, not an idea."""

    def __init__(self, root: Path) -> None:
        self.root, self.house = root, House(root / "megalite")
        self.trees = self.house.trees

    @cached_property
    def lines(self) -> dict[str, int]:
        """Module -> its lines of code."""
        return {name: code_lines(text) for name, text in self.house.texts.items()}

    def __str__(self) -> str:
        return "\n".join(f"{name:<48} {figure}" for name, figure in self.rows())

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield (what is counted, the figure)."""
        texts, functions = self.house.texts, [lines for _, lines in self.house.functions()]
        files = [len(text.splitlines()) for text in texts.values()]
        for wing in ("core", "runtime", "extras"):
            of_wing = [lines for name, lines in self.lines.items() if wing_of(name) == wing]
            yield f"{wing}: files / code lines", f"{len(of_wing)} / {sum(of_wing)}"
        yield "all: files / code lines", f"{len(files)} / {sum(self.lines.values())}"
        closure = self.closure(next(name for name in ("core.step", "train.step") if name in texts))
        yield "closure of the step: modules / code lines", f"{len(closure)} / {sum(self.lines[n] for n in closure)}"
        yield "imports core -> runtime", str(len(self.upward()))
        yield "files of 296-300 / 301-305 lines", f"{_within(files, 296, 300)} / {_within(files, 301, 305)}"
        yield "functions of 48-50 / 51-53 lines", f"{_within(functions, 48, 50)} / {_within(functions, 51, 53)}"
        yield "fmt: skip", str(sum(text.count("fmt: skip") for text in texts.values()))
        yield "assignments that pack three or more values", str(sum(map(_packs, self._nodes())))
        yield (
            "parameters typed Any in options and checks",
            str(sum(map(_any_parameters, self.trees, self.trees.values()))),
        )
        program = ast.walk(ast.parse((self.root / "pretrain_gpt.py").read_text()))
        yield "guard()", str(sum(_called(node) == "guard" for node in (*self._nodes(), *program)))
        recovery = [tree for name, tree in self.trees.items() if ".recover" in name]
        yield "keys of messages that are strings", str(sum(_is_key(n) for tree in recovery for n in ast.walk(tree)))
        kinds = self.kind_methods()
        without = [name for name, called in kinds.items() if not called]
        yield "methods of a kind without a caller in core", f"{len(without)} of {len(kinds)}"
        names = Counter(path.name for path in (self.root / "megalite").rglob("*.py") if path.name != "__init__.py")
        yield "files whose name another file has", str(sum(count for count in names.values() if count > 1))
        for word, pattern in (("fp8", "(?i)fp8"), ("URLs", "(?i)url"), ('"cp"', r"\bcp\b")):
            found = [wing_of(name) == "extras" for name, text in texts.items() if re.search(pattern, text)]
            yield f"files that name {word}: core and runtime / extras", f"{found.count(False)} / {found.count(True)}"
        yield (
            "lines of tests",
            str(sum(len(path.read_text().splitlines()) for path in (self.root / "tests").rglob("*.py"))),
        )

    def closure(self, module: str) -> set[str]:
        """Return the modules that a module imports, by way of others too, wherever the import stands."""
        found: set[str] = set()
        left = {module}
        while left:
            found |= left
            left = set().union(*(self.house.imports[name] for name in left)) - found
        return found

    def upward(self) -> list[tuple[str, str]]:
        """List the imports of the runtime by the core."""
        pairs = ((a, b) for a, imported in self.house.imports.items() for b in imported if wing_of(a) == "core")
        return sorted((a, b) for a, b in pairs if wing_of(b) == "runtime" and self.lines[b])

    def kind_methods(self) -> dict[str, bool]:
        """Method of a kind of layer -> whether the core calls it, outside of the kinds themselves."""
        classes = [
            (name, node) for name, tree in self.trees.items() for node in tree.body if isinstance(node, ast.ClassDef)
        ]
        sorts = {"LayerKind", *(node.name for _, node in classes if "LayerKind" in map(ast.unparse, node.bases))}
        kinds = {name for name, node in classes if node.name in sorts or sorts & set(map(ast.unparse, node.bases))}
        functions = (
            f for _, node in classes if node.name in sorts for f in node.body if isinstance(f, ast.FunctionDef)
        )
        core = [tree for name, tree in self.trees.items() if wing_of(name) == "core" and name not in kinds]
        called = {_called(node) for tree in core for node in ast.walk(tree)}
        return {f.name: f.name in called for f in functions}

    def _nodes(self) -> Iterator[ast.AST]:
        for tree in self.trees.values():
            yield from ast.walk(tree)


def _within(values: list[int], low: int, high: int) -> int:
    return sum(low <= value <= high for value in values)


def _packs(node: ast.AST) -> bool:
    """Whether `a, b, c = x, y, z`, or more of them."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return any(isinstance(to, ast.Tuple) and len(to.elts) > 2 for to in node.targets)


def _any_parameters(module: str, tree: ast.Module) -> int:
    """Count the parameters typed Any of functions in rooms of options, and of those that check something elsewhere."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    counted = (f for f in functions if {"config", "options"} & {*module.split(".")[:-1]} or f.name.startswith("check"))
    return sum(ast.unparse(arg.annotation) == "Any" for f in counted for arg in f.args.args if arg.annotation)


def _called(node: ast.AST) -> str | None:
    """Return the name of the function or method that a node calls, if it calls one."""
    if not isinstance(node, ast.Call):
        return None
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)


def _is_key(node: ast.AST) -> bool:
    """Whether a message is asked for a string: message["x"], message.get("x"), "x" in message."""
    of: ast.AST | None = None
    if isinstance(node, ast.Subscript) and _is_string(node.slice):
        of = node.value
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn) and _is_string(node.left):
        of = node.comparators[0]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        of = node.func.value if node.args and _is_string(node.args[0]) else None
    return of is not None and re.search("message|turn|asked|hello|_broken|_meeting|_hear", ast.unparse(of)) is not None


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


if __name__ == "__main__":
    print(Figures(Path(__file__).resolve().parents[2]))
