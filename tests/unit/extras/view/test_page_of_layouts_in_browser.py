"""Pages of runs with --moe-overlap, --offload and --elastic in a real browser."""

from __future__ import annotations

import random
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from megalite.core.pipeline.order import together
from megalite.core.pipeline.schedule import build_schedule
from megalite.extras.view.page.command import main
from tests.faults import guarded_hosts
from tests.faults.guarded_hosts import Hosts
from tests.faults.guarded_hosts import hosts as hosts
from tests.faults.harness import codes, metrics, waits_at
from tests.faults.zygote import Zygote
from tests.unit.extras.view.browser import VIEWS, Seen, elements, manifest, needs_chromium, owned, size
from tests.unit.extras.view.browser import browser as browser

pytestmark = needs_chromium

MODEL = """
    --arch llama --num-layers 4 --hidden-size 32 --num-heads 4 --vocab-size 256 --seq-len 16 --mock-data --device cpu
    --micro-batch-size 1 --train-steps 6 --lr 1e-3 --save-every 6
"""
PAIRED = "--num-experts 4 --moe-ffn-size 32 --pp 2 --ep 2 --global-batch-size 12 --moe-overlap --record-schedule 3:6"
AWAY = "--zero 3 --zero-whole-below 0 --recompute full --offload optimizer+params --global-batch-size 8"
LANE = 30


def page_of(zygote: Zygote, browser: Any, folder: Path, flags: str, world: int) -> tuple[Path, Seen]:
    run, html = folder / "run", folder / "run.html"
    arguments = [*MODEL.split(), *flags.split(), "--run-dir", str(run)]
    assert codes(zygote.start(arguments, world, folder).end()) == [0] * world
    main([str(run), "--html", str(html)])
    return run, Seen(browser, html.as_uri(), viewport={"width": 1200, "height": 900})


def check_all_views(it: Seen) -> None:
    for view in VIEWS:
        it.open(view)
        assert not {"undefined", "NaN", "[object"} & set(re.split(r"\s", it.page.inner_text("main"))), view
    assert (it.said, len(it.asked)) == ([], 1)
    it.context.close()


def test_pairs_and_what_the_pointer_finds(browser: Any, zygote: Zygote, tmp_path: Path) -> None:
    """Each operation of the table lies where the pointer finds it, at any zoom; those of a pair above each other."""
    _, it = page_of(zygote, browser, tmp_path, PAIRED, 4)
    it.open("schedule")
    it.page.wait_for_function("() => window.megalite.drawn('schedule').lanes.every(n => n > 0)")
    assert "1f1b-overlap" in it.page.inner_text("main")
    programs = build_schedule("1f1b-overlap", 2, 1, 6).programs
    pairs = [[a.kind + str(a.microbatch) for a in op] for p in programs for op in together(p) if len(op) == 2]
    for number, key in enumerate(("measured", "planned")):
        rows = it.rows(f"ops-{key}")
        beside = [[row[1], row[7]] for row in rows if row[7] != "–" and row[1][0] == "F"]
        assert beside == pairs, key
        canvas = it.page.locator("canvas").nth(number)
        for _ in range(2):
            canvas.scroll_into_view_if_needed()
            box, shown = canvas.bounding_box(), it.page.evaluate("window.megalite.drawn('schedule')")
            assert box is not None
            for rank, label, begin, end, *_, other in random.Random(1).sample(rows, 12):
                middle = (float(begin.replace(",", "")) + float(end.replace(",", ""))) / 2
                if not shown["from"] <= middle <= shown["to"]:
                    continue
                lane, half = int(rank[2:]), 0.5 if other == "–" else 0.35 if label[0] == "F" else 0.65
                x = (middle - shown["from"]) / (shown["to"] - shown["from"]) * box["width"]
                it.page.mouse.move(box["x"] + x, box["y"] + LANE * (lane + half))
                told = it.page.inner_text("#operation")
                assert told.startswith(f"{rank}, {label}: "), (key, label)
                assert (f"It takes turns with {other}." in told) == (other != "–")
            it.page.get_by_role("button", name="zoom in").click()
        it.page.get_by_role("button", name="Whole step").click()
    # A wait is drawn before the operation that waits, and tells of it.
    rank, label, begin, _, wait, maker, *_ = max(
        (row for row in it.rows("ops-measured") if row[1] != "F0"), key=lambda row: float(row[4].replace(",", ""))
    )
    start, waited = (float(text.replace(",", "")) for text in (begin, wait))
    canvas = it.page.locator("canvas").first
    canvas.scroll_into_view_if_needed()
    box, shown = canvas.bounding_box(), it.page.evaluate("window.megalite.drawn('schedule')")
    assert box is not None
    x = (start - waited / 2) / (shown["to"] - shown["from"]) * box["width"]
    it.page.mouse.move(box["x"] + x, box["y"] + LANE * (int(rank[2:]) + 0.5))
    assert it.page.inner_text("#operation").startswith(f"{rank}, {label}: ")
    assert f"ms for {maker}." in it.page.inner_text("#operation")
    check_all_views(it)


def test_what_savings_change_and_what_travels(browser: Any, zygote: Zygote, tmp_path: Path) -> None:
    run, it = page_of(zygote, browser, tmp_path, AWAY, 2)
    it.open("grid")
    held: dict[str, list[float]] = {}
    for zero in range(4):
        it.select("Shown at", str(zero))
        held[str(zero)] = [size(text) for text in re.findall(r"[\d.,]+ k?B", it.page.inner_text("#held"))]
    it.open("memory")
    rows = {(row[0], row[1].removesuffix(" (this run)")): row for row in it.rows("savings")}
    own = {key for key, row in rows.items() if row[1].endswith("(this run)")}
    assert own == {("zero", "3"), ("recompute", "full"), ("offload", "optimizer+params")}
    # A rank's masters and moments, of what it wrote: 12 bytes for each element of its share.
    n = sum(owned(run, "exp_avg", name).get(0, 0) for name in manifest(run)["tensors"]["exp_avg"])
    before, away, all_away = (rows["offload", value] for value in ("none", "optimizer", "optimizer+params"))
    # fp32 weights are the masters while they are on the device.
    assert size(before[4]) == pytest.approx(8 * n, rel=0.02)
    assert (size(away[4]), size(away[6])) == (0, pytest.approx(12 * n, rel=0.02))
    assert size(before[2]) - size(all_away[2]) == pytest.approx(size(all_away[6]) - size(away[6]), rel=0.02)
    assert size(before[7]) > size(away[7]) > size(all_away[7])
    inputs = rows["offload", "activations"]
    assert size(inputs[5]) < size(before[5])
    assert size(inputs[6]) > 0
    # ZeRO needs other options than these with some values, which its row says.
    assert {key for key, row in rows.items() if len(row) == 3} == {("zero", "0"), ("zero", "1"), ("zero", "2")}
    # Gradients of the share down, its weights up; of 4 micro-batches of 16 tokens the inputs of all blocks.
    travel = {row[0]: [size(text) for text in row[1:]] for row in it.rows("travel")}
    assert travel["optimizer"] == [pytest.approx(4 * n, rel=0.02)] * 2
    assert travel["activations"] == [pytest.approx(4 * 4 * 16 * 32 * 4, rel=0.005)] * 2
    assert held["3"][0] == pytest.approx(4 * n, rel=0.02)
    check_all_views(it)


@pytest.mark.root
def test_a_run_that_has_lost_a_host(browser: Any, hosts: Hosts, tmp_path: Path) -> None:
    """Under --elastic: the layout is that of the newest size, and a curve says how many ranks a step had."""
    run, html = tmp_path / "hit/run", tmp_path / "run.html"
    # A vocabulary without padding, which belongs to a rank and is written nowhere.
    flags = ["--vocab-size", "128", "--zero", "1", "--elastic"]
    jobs = hosts.begin(tmp_path / "hit", flags, 0, waits_at(4, tmp_path / "hit"), count=4)
    jobs[0].wait_for(0, "step 3/")
    hosts.power_off(1)
    jobs[0].wait_for(0, "back to step ")
    (tmp_path / "hit/go on").touch()
    assert [left.code for left in guarded_hosts.end(jobs)] == [0, -signal.SIGKILL, 0, 0]
    ranks = {line["step"]: line["ranks"] for line in metrics(run) if "event" not in line}
    assert set(ranks.values()) == {4, 3}
    main([str(run), "--html", str(html)])
    it = Seen(browser, html.as_uri())
    assert "3 ranks" in it.page.inner_text("header")
    it.select("Another curve", "ranks")
    assert {step: it.value("ranks", step) for step in ranks} == ranks
    it.page.click("summary >> nth=0")
    (row,) = [row for row in it.rows("events") if row[2] == "N resize"]
    assert {"from 4", "to 3", "reserve 0"} <= set(row[4].split(", "))
    it.open("grid")
    assert it.page.locator("[data-rank]").count() == 3
    # Before, each of four had a place of its own; the list says which steps they did.
    option = it.page.locator("label", has_text="Ranks of the run").locator("option[value='4']").text_content()
    told = {
        n for a, b in re.findall(r"(\d+)(?:–(\d+))?", option.partition(": ")[2]) for n in range(int(a), int(b or a) + 1)
    }
    assert told == {step for step, count in ranks.items() if count == 4}
    it.select("Ranks of the run", "4")
    it.page.wait_for_function("() => document.querySelectorAll('[data-rank]').length === 4")
    it.page.click('[data-rank="3"]')
    groups = {row[0]: re.findall(r"\d", row[2]) for row in it.rows("groups")}
    assert groups["dp"] == ["0", "1", "2", "3"]
    it.select("Ranks of the run", "3")
    it.page.wait_for_function("() => document.querySelectorAll('[data-rank]').length === 3")
    # What each of the three owns is what it wrote: shares of a size that need not divide the parameters.
    for rank in range(3):
        it.page.click(f'[data-rank="{rank}"]')
        for row in it.rows("params"):
            assert elements(row[5]) == owned(run, "exp_avg", row[0]).get(rank, 0), (rank, row[0])
    check_all_views(it)
