"""The tutorials run from top to bottom, assert their figures on the way, and the Chinese ones keep step."""

from __future__ import annotations

import base64
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from docs.tutorials import execute
from docs.tutorials.execute import ENGLISH, chinese, code_cells, read, source
from tests.rows import always_run

LARGEST_PICTURE = 60_000


def name(path: Path) -> str:
    return path.name


def kinds(cell: dict[str, Any]) -> list[str]:
    """Kinds of a cell's outputs: text or picture."""
    return [output["output_type"] for output in cell["outputs"]]


@pytest.mark.parametrize(
    "path", always_run(ENGLISH, *(path for path in ENGLISH if path.name.startswith("02"))), ids=name
)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    notebook = read(path)
    for number, (cell, outputs) in enumerate(zip(code_cells(notebook), execute.run(notebook), strict=True), start=1):
        assert kinds({"outputs": outputs}) == kinds(cell), f"cell {number}: run docs/tutorials/execute.py"
    # Run where they are, they leave a checkout clean.
    ignored = [Path(line).name for line in (execute.FOLDER.parents[1] / ".gitignore").read_text().splitlines()]
    left = [file.name for file in tmp_path.iterdir()]
    assert [file for file in left if not any(fnmatch(file, pattern) for pattern in ignored if pattern)] == []


@pytest.mark.parametrize("path", ENGLISH, ids=name)
def test_pictures_are_small(path: Path) -> None:
    outputs = [output for cell in code_cells(read(path)) for output in cell["outputs"]]
    pictures = [base64.b64decode(output["data"]["image/png"]) for output in outputs if "data" in output]
    assert pictures
    assert max(map(len, pictures)) <= LARGEST_PICTURE


def test_pages_show_the_pictures_of_the_tutorials() -> None:
    drawn = [cell for path in ENGLISH for cell in code_cells(read(path)) if "picture" in cell["metadata"]]
    assert drawn
    for cell in drawn:
        file = execute.FOLDER.parent / "images" / cell["metadata"]["picture"]
        assert file.read_bytes() == execute.picture(cell), "run docs/tutorials/execute.py"


@pytest.mark.parametrize("path", ENGLISH, ids=name)
def test_the_chinese_one_differs_in_its_text_only(path: Path) -> None:
    ours, theirs = read(path)["cells"], read(chinese(path))["cells"]
    assert [cell["cell_type"] for cell in ours] == [cell["cell_type"] for cell in theirs]
    for cell, twin in zip(ours, theirs):
        if cell["cell_type"] == "code":
            assert cell["source"] == twin["source"]
            assert cell["outputs"] == twin["outputs"]
        else:
            assert headings(cell) == headings(twin)
            assert any("\u4e00" <= letter <= "\u9fff" for letter in source(twin))


def headings(cell: dict[str, Any]) -> list[int]:
    """Levels of a text's headings."""
    return [len(line) - len(line.lstrip("#")) for line in source(cell).splitlines() if line.startswith("#")]


def test_every_tutorial_has_its_twin() -> None:
    assert ENGLISH
    assert sorted(map(chinese, ENGLISH)) == sorted((execute.FOLDER / "zh").glob("*.ipynb"))
