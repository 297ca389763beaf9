"""Pages in a browser, for tests: what is on them, and what runs left that it must agree with."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (.ci/peers.sh has it)")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium (apt-get install chromium)")
VIEWS = ("curves", "grid", "schedule", "messages", "memory", "experts", "checkpoints", "why")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as p:
        opened = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


class Seen:
    """A page, and what it said and asked for."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(**{"offline": url.startswith("file:"), **options})
        self.page = self.context.new_page()
        self.page.set_default_timeout(120_000)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: self.said.append("dialog"))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url)
        self.page.wait_for_selector("html[data-ready]")

    def open(self, view: str) -> None:
        self.page.click(f"#tab-{view}")
        self.page.wait_for_function("name => window.megalite.view() === name", arg=view)

    def rows(self, table: str) -> list[list[str]]:
        """The cells of a table, also of one that is folded up."""
        script = "t => [...t.tBodies[0].rows].map(r => [...r.cells].map(c => c.textContent))"
        return list(self.page.eval_on_selector(f"#{table}", script))

    def select(self, label: str, value: str) -> None:
        self.page.locator("label", has_text=label).locator("select").first.select_option(value)

    def curve(self, name: str) -> dict[str, Any]:
        """What is drawn of a curve."""
        self.page.wait_for_function("n => (window.megalite.drawn('curves') || []).some(c => c.name === n)", arg=name)
        script = "n => window.megalite.drawn('curves').find(c => c.name === n)"
        return dict(self.page.evaluate(f"n => {{ const {{valueAt, ...rest}} = ({script})(n); return rest; }}", name))

    def value(self, name: str, x: float, k: int = 0) -> Any:
        script = "([n, x, k]) => window.megalite.drawn('curves').find(c => c.name === n).valueAt(x, k)"
        return self.page.evaluate(script, [name, x, k])


def manifest(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "checkpoints/latest/manifest.json").read_text())
    return content


def owned(run: Path, kind: str, name: str) -> dict[int, int]:
    """Rank -> elements of a tensor in the shard that it wrote: an oracle of what ZeRO-1 gives it."""
    out: dict[int, int] = {}
    for file, _, _, shape in manifest(run)["tensors"][kind][name]["boxes"]:
        out[file] = out.get(file, 0) + math.prod(shape)
    return out


def elements(shown: str) -> int:
    """How many elements a cell of the page speaks of: "1,024–2,047", or "none"."""
    if shown == "none":
        return 0
    first, last = (int(n.replace(",", "")) for n in shown.split("–"))
    return last - first + 1


def size(shown: str) -> float:
    """Bytes that a cell speaks of: "12.3 kB"."""
    number, unit = shown.split(" ")
    return float(number.replace(",", "")) * {"B": 1, "kB": 1e3, "MB": 1e6}[unit]
