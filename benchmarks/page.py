"""Measure how fast a browser shows and zooms the curves of a long run: the page of `megalite view`, in Chromium. JSON.

Needs the package playwright and a Chromium. The unit is a hundred fills of canvases of the charts' sizes, in the page.

python -m benchmarks.page --steps 100000 --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from megalite.extras.view.page.collect import collect
from megalite.extras.view.page.curves import MOST_POINTS
from megalite.extras.view.page.embed import page

# When the charts are on the canvas, in ms since the navigation began: reading a pixel waits for what was drawn.
FIRST = """async () => {
  const seen = () => [...document.querySelectorAll(".chart canvas")];
  while (!(window.megalite.drawn("curves") || []).length) await new Promise(requestAnimationFrame);
  await new Promise(requestAnimationFrame);
  for (const c of seen()) c.getContext("2d").getImageData(0, 0, 1, 1);
  return performance.now();
}"""
# The medians of zooms of all charts by keyboard, and of a hundred plain fills of canvases of their sizes, in ms.
PAN = """async () => {
  const box = document.querySelector(".chart");
  const canvases = [...document.querySelectorAll(".chart canvas")];
  const flush = (list) => { for (const c of list) c.getContext("2d").getImageData(0, 0, 1, 1); };
  const median = (xs) => xs.sort((a, b) => a - b)[xs.length >> 1];
  const times = { zoom: [], fill: [] };
  const plain = canvases.map(({ width, height }) => Object.assign(document.createElement("canvas"), { width, height }));
  for (let i = 0; i < 12; i += 1) {
    let begun = performance.now();
    for (let n = 0; n < 100; n += 1) {
      for (const c of plain) {
        const context = c.getContext("2d");
        context.fillStyle = `rgb(${n}, 0, 0)`;
        context.fillRect(0, 0, c.width, c.height);
      }
      flush(plain);
    }
    times.fill.push(performance.now() - begun);
    begun = performance.now();
    box.dispatchEvent(new KeyboardEvent("keydown", { key: "+-+-+0+-+-+0"[i] }));
    // uPlot draws when the script is done.
    await Promise.resolve();
    await Promise.resolve();
    flush(canvases);
    times.zoom.push(performance.now() - begun);
  }
  return { zoom: median(times.zoom), fill: median(times.fill) };
}"""


def write_run(folder: Path, steps: int, every: int) -> None:
    """Write the metrics of a long run, with a save and an evaluation each `every` steps."""
    draw = random.Random(0)
    with (folder / "metrics.jsonl").open("w") as file:
        file.write('{"event": "start", "step": 0, "ranks": 8}\n')
        for step in range(1, steps + 1):
            line = {
                "step": step,
                "loss": 5 / step**0.1 + draw.random(),
                "grad_norm": 1 + draw.random(),
                "lr": 1e-3 * (1 - step / steps),
                "time": 1.7e9 + step,
                "consumed_tokens": step * 2**20,
                "tokens_per_s": 9e5 + 1e4 * draw.random(),
                "memory_gib": 61.0,
                "data_wait_s": draw.random() / 1e3,
            }
            events: list[dict[str, Any]] = []
            if step % every == 0:
                folder_name = f"checkpoints/step_{step:08d}"
                events = [
                    {"event": "eval", "step": step, "loss": line["loss"]},
                    {"event": "save", "step": step},
                    {"event": "saved", "step": step, "checkpoint": folder_name, "bytes": 1, "seconds": 1, "pause_s": 1},
                ]
            file.writelines(json.dumps(each) + "\n" for each in (line, *events))


def measure(browser: Browser, url: str) -> dict[str, float]:
    """Open the page once in a new context; milliseconds."""
    context = browser.new_context(offline=True, viewport={"width": 1200, "height": 900})
    shown = context.new_page()
    shown.set_default_timeout(600_000)
    shown.goto(url)
    first = shown.evaluate(FIRST)
    times = {"first_ms": first, **{f"{name}_ms": ms for name, ms in shown.evaluate(PAN).items()}}
    context.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000, help="of the run (100000)")
    parser.add_argument("--every", type=int, default=100, help="steps from one save and evaluation to the next (100)")
    parser.add_argument("--rounds", type=int, default=5, help="how often the page is opened (5)")
    args = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as p:
        run, html = Path(folder, "run"), Path(folder, "run.html")
        run.mkdir()
        write_run(run, args.steps, args.every)
        html.write_text(page(collect([("run", run)], "now", MOST_POINTS, None, estimate=False), "run"))
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        measure(browser, html.as_uri())
        rounds = [measure(browser, html.as_uri()) for _ in range(args.rounds)]
        version = browser.version
        browser.close()
    told = {name: round(statistics.median(times[name] for times in rounds), 2) for name in rounds[0]}
    ratios = {
        f"{name}_units": round(statistics.median(times[f"{name}_ms"] / times["fill_ms"] for times in rounds), 1)
        for name in ("first", "zoom")
    }
    machine = {"chromium": version, "load": round(os.getloadavg()[0], 1)}
    print(json.dumps({"steps": args.steps, "every": args.every, **told, **ratios, **machine}, indent=1))


if __name__ == "__main__":
    main()
