"""The house rules that tools can check: floors, style, types."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.unit.house import Figures, House, code_lines, imported_tests, wing_of

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_floors() -> None:
    run(str(Path(sys.executable).with_name("lint-imports")), "--no-cache")


def test_ruff() -> None:
    run(sys.executable, "-m", "ruff", "check", "--no-cache", ".")
    run(sys.executable, "-m", "ruff", "format", "--no-cache", "--check", ".")


@pytest.mark.full
def test_types() -> None:
    run(sys.executable, "-m", "mypy", "--cache-dir", "/dev/null")


RUFF_READS = ("-m", "ruff", "check", "--no-cache", "--show-files", ".")
# No option of mypy prints them without a check of all.
MYPY_READS = ("-c", "from mypy.main import process_options; print(*(s.path for s in process_options([])[0]))")


@pytest.mark.parametrize("reads", [RUFF_READS, MYPY_READS], ids=["ruff", "mypy"])
def test_every_file_is_read(reads: tuple[str, ...]) -> None:
    shown = subprocess.run((sys.executable, *reads), cwd=ROOT, capture_output=True, text=True)
    tracked = subprocess.run(("git", "ls-files", "*.py"), cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("requires a git checkout")
    files = {ROOT / name for name in tracked.stdout.split()}
    if reads is MYPY_READS:  # which reads a stub in place of the file beside it
        files = {stub if (stub := file.with_suffix(".pyi")).exists() else file for file in files}
    assert files <= {ROOT / name for name in shown.stdout.split()}


@cache
def figures() -> Figures:
    """Those of this checkout."""
    return Figures(ROOT)


def test_what_no_reader_forgives() -> None:
    """No file is over 500 lines, no function over 80, and nothing imports itself."""
    house = figures().house
    assert house.in_circles() == set()
    assert not [name for name, text in house.texts.items() if len(text.splitlines()) > 500]
    assert not [name for name, lines in house.functions() if lines > 80]


def test_tests_share_modules_that_are_no_tests() -> None:
    assert imported_tests(ROOT) == []


def test_imports_of_tests_by_hand(tmp_path: Path) -> None:
    files = {
        "jobs.py": "def f() -> None:\n    import tests.room.test_b\n",
        "test_a.py": "from tests.jobs import test_me\nfrom tests.room import more, test_b\n",
        "room/test_b.py": "import test_data\nfrom tests.room.test_b import x\n",
        "room/more.py": "import tests.room.testing\nfrom tests import jobs\n",
    }
    for name, text in files.items():
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / name).write_text(text)
    assert imported_tests(tmp_path) == [
        (f"tests/{name}", "tests/room/test_b.py") for name in ("jobs.py", "room/test_b.py", "test_a.py")
    ]


def test_the_step_is_as_large_as_the_readme_says() -> None:
    """What the step's module imports is what can be read in an afternoon."""
    closure = figures().closure("core.step")
    lines = sum(code_lines(figures().house.texts[name]) for name in closure)
    assert not [name for name in closure if name.startswith("core.parts")]
    assert len(closure) <= 85
    assert lines <= 6100
    text = " ".join((ROOT / "README.md").read_text().split())
    ((files, claimed),) = re.findall(r"are (\d+) files with ([\d,]+) lines of code", text)
    assert len(closure) == int(files)
    assert lines == pytest.approx(int(claimed.replace(",", "")), rel=0.01)


def test_what_the_readme_lists_to_read_is_there() -> None:
    text = (ROOT / "README.md").read_text().split("## Read the code")[1].split("\n## ")[0]
    links = re.findall(r"\]\((megalite/[^)]+|pretrain_gpt\.py)\)", text)
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_counts_of_a_house_by_hand(tmp_path: Path) -> None:
    files = {
        "__init__.py": "from home.a import f\n",
        "a/__init__.py": "",
        "a/one.py": '"""Doc."""\n\n\ndef f() -> None:\n    from home.b import two\n\n    two.g()  # why\n',
        "b/two.py": 'from home.a.one import f\n\nx = 1\n"""Of the field."""\n',
        "b/three.py": "import home.b.two\nimport os\n",
    }
    for name, text in files.items():
        (tmp_path / "home" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "home" / name).write_text(text)
    house = House(tmp_path / "home")
    assert {name: code_lines(text) for name, text in house.texts.items()} == {
        "": 1,
        "a": 0,
        "a.one": 3,
        "b.two": 2,
        "b.three": 2,
    }
    assert house.arrows() == {("a", "b"), ("b", "a")}
    assert dict(house.functions()) == {"a.one.f": 4}
    assert house.in_circles() == {"a.one", "b.two", "b.three"}


@pytest.mark.full
def test_figures_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{figures()}")
    assert {"core.step", "core.options.model"} <= figures().closure("core.step")


def test_figures_of_a_house_by_hand(tmp_path: Path) -> None:
    files = {
        "megalite/__init__.py": "",
        "megalite/core/step.py": (
            "from megalite.runtime.data import rows\nfrom megalite.core.mesh import grid\na, b, c = 1, 2, 3\n"
        ),
        "megalite/runtime/data/rows.py": "# fmt: skip\nx = 1\n",
        "megalite/core/mesh/grid.py": "def check_it(m: Any, n: int, flags: dict[str, Any]) -> None:\n    m.asked()\n",
        "megalite/core/model/kinds.py": (
            "class LayerKind:\n    def asked(self):\n        pass\n\n\n"
            "class Mixer(LayerKind):\n    def unasked(self):\n        self.asked()\n"
        ),
        "megalite/core/model/rows.py": "class Own(Mixer):\n    def unasked(self):\n        self.unasked()\n",
        "megalite/runtime/recover/hub.py": (
            "y = 'go' in message or message['to'] or message.get('by') or other['x']\nguard()\n"
        ),
        "pretrain_gpt.py": "guard()\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    own = Figures(tmp_path)
    assert [wing_of(name) for name in ("core.step", "api", "runtime.loop", "extras.plan")] == [
        *("core", "runtime", "runtime", "extras")
    ]
    assert own.upward() == [("core.step", "runtime.data.rows")]
    assert own.closure("core.step") == {"core.step", "runtime.data.rows", "core.mesh.grid"}
    assert own.kind_methods() == {"asked": True, "unasked": False}
    rows = dict(own.rows())
    assert {name: rows[name] for name in list(rows)[4:6]} == {
        "closure of the step: modules / code lines": "3 / 6",
        "imports core -> runtime": "1",
    }
    assert [rows[name] for name in rows][8:16] == ["1", "1", "1", "2", "3", "1 of 2", "2", "0 / 0"]


def test_no_pickle_in_the_library() -> None:
    pattern = re.compile(r"torch\.load|torch\.save|import pickle|gather_object|broadcast_object")
    found = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in sorted((ROOT / "megalite").rglob("*.py"))
        for line in path.read_text().splitlines()
        # Checkpoints of Megatron-LM are pickles; test_checkpoint_damage.py names the one file that reads them. What a
        # notebook sends to its own processes is one.
        if pattern.search(line) and path.parent.name not in ("megatron", "notebook")
    ]
    assert not found


def test_the_process_grid_is_not_global() -> None:
    """No literal device in the library, and the environment is read where processes are started only."""
    # Credentials of the environment are masked by their values.
    allowed = ("core/mesh/", "core/base/log.py", "core/base/redact.py", "extras/", "runtime/recover/main.py")
    for path in sorted((ROOT / "megalite").rglob("*.py")):
        inside = path.relative_to(ROOT / "megalite")
        if not str(inside).startswith(allowed) and "os.environ" in path.read_text():
            pytest.fail(f"{inside} reads os.environ")
