#!/usr/bin/env python3
"""Run the tutorials and store what they print and draw, in the English and in the Chinese notebooks.

    python docs/tutorials/execute.py                 # all
    python docs/tutorials/execute.py 01 03           # those whose names begin so

Code is written in the English notebook; its Chinese twin gets the same code and the same outputs. A cell whose metadata
name a `picture` draws that file of docs/images too.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import linecache
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ENGLISH = sorted(FOLDER.glob("0*.ipynb"))


def chinese(path: Path) -> Path:
    """The Chinese twin of an English notebook."""
    return path.parent / "zh" / path.name


def read(path: Path) -> dict[str, Any]:
    """A notebook as JSON."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return notebook


def write(path: Path, notebook: dict[str, Any]) -> None:
    """Write a notebook as Jupyter does."""
    path.write_text(json.dumps(notebook, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def source(cell: dict[str, Any]) -> str:
    """A cell's text."""
    return "".join(cell["source"])


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells that run."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Run the code cells in this process, in the current folder and among new names; yield each one's outputs.

    As in Jupyter, figures that a cell leaves open are its output.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(notebook), start=1):
        said, code, file = io.StringIO(), source(cell), f"<cell {number}>"
        # For tracebacks.
        linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
        with contextlib.redirect_stdout(said):
            exec(compile(code, file, "exec"), names)
        text = said.getvalue().splitlines(keepends=True)
        outputs: list[dict[str, Any]] = [{"name": "stdout", "output_type": "stream", "text": text}] if text else []
        for figure in map(plt.figure, plt.get_fignums()):
            data = {"image/png": base64.b64encode(png(figure)).decode(), "text/plain": ["<Figure>"]}
            outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
        plt.close("all")
        yield outputs


def png(figure: Any) -> bytes:
    """A figure as a PNG of at most 64 colors: a third of the size."""
    from PIL import Image  # matplotlib requires it

    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=80, bbox_inches="tight")
    Image.open(drawn).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
    return small.getvalue()


def picture(cell: dict[str, Any]) -> bytes:
    """The one picture among a cell's stored outputs."""
    (data,) = (output["data"] for output in cell["outputs"] if "data" in output)
    return base64.b64decode(data["image/png"])


def store(path: Path) -> None:
    """Run an English notebook in an empty folder; write its code and outputs to it and to its Chinese twin."""
    english, twin = read(path), read(chinese(path))
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            results = list(run(english))
        finally:
            os.chdir(here)
    cells = code_cells(english), code_cells(twin)
    if len(cells[0]) != len(cells[1]):
        sys.exit(
            f"error: {path.name} has {len(cells[0])} code cells, the Chinese one {len(cells[1])}; add or remove some"
        )
    for number, (ours, theirs, outputs) in enumerate(zip(*cells, results), start=1):
        ours.update(execution_count=number, outputs=outputs)
        theirs.update(source=ours["source"], execution_count=number, outputs=outputs)
        if "picture" in ours["metadata"]:
            (FOLDER.parent / "images" / ours["metadata"]["picture"]).write_bytes(picture(ours))
    write(path, english)
    write(chinese(path), twin)


def main() -> None:
    wanted = [path for path in ENGLISH if not sys.argv[1:] or path.name.startswith(tuple(sys.argv[1:]))]
    if not wanted:
        sys.exit(f"error: no tutorial begins with {' or '.join(sys.argv[1:])}; there are {[p.name for p in ENGLISH]}")
    for path in wanted:
        began = time.perf_counter()
        store(path)
        print(f"{path.name}: {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
