"""The page of a real run in a real browser: every view, its figures beside the run's files, and no request."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megalite.extras.view.page.collect import collect
from megalite.extras.view.page.command import main
from megalite.extras.view.page.embed import page as make_page
from megalite.extras.view.page.serve import Server
from tests.faults.harness import codes, events, metrics
from tests.faults.zygote import Zygote
from tests.unit.checkpoint import differences
from tests.unit.extras.view.browser import VIEWS, Seen, elements, manifest, needs_chromium, owned, size
from tests.unit.extras.view.browser import browser as browser
from tests.unit.extras.view.runs import hostile_run, write

pytestmark = needs_chromium

# tp 2, pp 2, dp 2, and experts over ep 2.
FLAGS = """
    --arch llama --num-layers 4 --hidden-size 32 --num-heads 4 --num-kv-heads 2 --ffn-hidden-size 64 --vocab-size 256
    --seq-len 16 --num-experts 8 --moe-topk 2 --moe-ffn-size 32 --moe-aux-loss-coeff 0.01 --mock-data --device cpu
    --tp 2 --pp 2 --ep 2 --zero 1 --micro-batch-size 1 --global-batch-size 8 --train-steps 6 --lr 1e-3
    --eval-every 2 --save-every 2 --keep-best 1 --record-schedule 3:6
"""

# Of further layouts, on four ranks: what ZeRO 2 and 3 cut besides, and a pipeline in the shape of a V.
DENSE = """
    --arch llama --num-layers 4 --hidden-size 32 --num-heads 4 --vocab-size 256 --seq-len 16 --mock-data --device cpu
    --micro-batch-size 1 --global-batch-size 8 --train-steps 6 --lr 1e-3 --save-every 6
"""
LAYOUTS = {
    "zero2-zb-v": "--pp 2 --vp 2 --schedule zb-v --zero 2 --record-schedule 3:6",
    "zero3-tp2": "--tp 2 --zero 3 --zero-whole-below 500",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    zygote = Zygote()
    try:
        left = zygote.start([*FLAGS.split(), "--run-dir", str(folder / "run")], 8, folder).end(600)
    finally:
        zygote.close()
    assert codes(left) == [0] * 8, left[0].err
    return folder / "run"


@pytest.fixture(scope="module")
def html(run: Path) -> Path:
    main([str(run), "--html", str(run.parent / "run.html")])
    return run.parent / "run.html"


@pytest.fixture
def seen(browser: Any, html: Path) -> Iterator[Seen]:
    it = Seen(browser, html.as_uri(), viewport={"width": 1200, "height": 900})
    yield it
    assert it.said == []
    assert it.asked == [html.as_uri()]
    it.context.close()


def test_a_newcomer_s_ten_questions_are_answered(seen: Seen, run: Path) -> None:
    lines = metrics(run)
    steps = {line["step"]: line for line in lines if "event" not in line}

    # 1. What was the loss at step 3, and what did the evaluation after step 4 say?
    seen.curve("loss")
    assert seen.value("loss", 3) == pytest.approx(steps[3]["loss"], rel=1e-6)
    (evaluated,) = [event["loss"] for event in events(run, "eval") if event["step"] == 4]
    assert seen.value("loss", 4, 1) == pytest.approx(evaluated, rel=1e-9)

    # 2. Which ranks are in rank 5's groups? tp is fastest, then dp, then pp.
    seen.open("grid")
    seen.page.click('[data-rank="5"]')
    groups = {row[0]: re.findall(r"\d", row[2]) for row in seen.rows("groups")}
    assert groups == {"pp": ["1", "5"], "dp": ["5", "7"], "cp": ["5"], "tp": ["4", "5"], "edp": ["5"], "ep": ["5", "7"]}

    # 3. Which layers does pipeline rank 1 have? Those that its ranks wrote.
    wrote = {
        int(name.split(".")[1])
        for name, entry in manifest(run)["tensors"]["exp_avg"].items()
        if name.startswith("layers.") and any(box[0] >= 4 for box in entry["boxes"])
    }
    (row,) = [row for row in seen.rows("stages") if row[0] == "1"]
    assert row[2:] == [", ".join(map(str, sorted(wrote))), "4–7"] == ["2, 3", "4–7"]

    # 4. What does rank 2 own of the optimizer state of layer 0's qkv_proj?
    seen.page.click('[data-rank="2"]')
    (row,) = [row for row in seen.rows("params") if row[0] == "layers.0.self_attn.qkv_proj.weight"]
    assert elements(row[5]) == owned(run, "exp_avg", "layers.0.self_attn.qkv_proj.weight").get(2, 0)

    # 5. Which ranks hold layer 3's expert 5?
    seen.open("experts")
    seen.select("Layer", "3")
    (row,) = [row for row in seen.rows("load") if row[0] == "5"]
    boxes = manifest(run)["tensors"]["exp_avg"]["layers.3.mlp.experts.down_proj.weight"]["boxes"]
    holders = sorted({file for file, _, offset, shape in boxes if offset[0] <= 5 < offset[0] + shape[0]})
    assert row[3] == ", ".join(map(str, holders)) == "6, 7"

    # 6. How many tokens did it get in the last step, and how uneven was the layer?
    told = json.loads((run / "experts.jsonl").read_text().splitlines()[-1])
    tokens = told["tokens"][told["layers"].index(3)]
    assert (row[1], row[2]) == (str(tokens[5]), f"{tokens[5] * 8 / sum(tokens):.3f}")
    loads = [max(layer) * 8 / sum(layer) for layer in told["tokens"]]
    assert max(loads) == pytest.approx(steps[6]["expert_load"])

    # 7. How many bytes of gradients does a rank send per step, and over which axes?
    seen.open("messages")
    assert f"({steps[6]['grad_bytes_sent']:,} bytes)" in seen.page.inner_text("#measured-sent")
    assert {"dp", "tp", "ep", "pp"} <= {row[0] for row in seen.rows("messages")}
    sent = {row[0]: int(row[2].replace(",", "")) for row in seen.rows("sent")}
    # Activations of a step: 4 micro-batches of 16 tokens of 32 floats, cut over tp.
    assert sent["pp"] == 4 * 16 * 32 * 4 // 2

    # 8. What waits for what in the bubble?
    seen.open("schedule")
    recorded = json.loads((run / "schedule/pipeline_rank_1.jsonl").read_text().splitlines()[1])
    step = int(re.search(r"step (\d+)", seen.page.inner_text("main"))[1])  # type: ignore[index]
    for line in (run / "schedule/pipeline_rank_1.jsonl").read_text().splitlines()[1:]:
        recorded = json.loads(line) if json.loads(line)["step"] == step else recorded
    _, begun, ready, _ = next(op for op in recorded["ops"] if op[0] == "F0.1")
    (row,) = [row for row in seen.rows("ops-measured") if row[:2] == ["pp1", "F0"]]
    assert float(row[4].replace(",", "")) == pytest.approx(1e3 * (ready - begun), rel=1e-4, abs=1e-3)
    assert row[5] == "F0 (pp0)"

    # 9. Which checkpoint is best, and how long did training wait for its save?
    seen.open("checkpoints")
    best = min(events(run, "eval"), key=lambda event: event["loss"])["step"]
    assert [row[0] for row in seen.rows("folders") if row[7] == "best"] == [f"step_{best:08d}"]
    (saved,) = [event for event in events(run, "saved") if event["step"] == best]
    (row,) = [row for row in seen.rows("saves") if row[1] == str(best)]
    shown, unit = row[4].split()
    assert float(shown) * {"s": 1, "ms": 1e-3}[unit] == pytest.approx(saved["pause_s"], rel=0.01)
    size = sum(file.stat().st_size for file in (run / f"checkpoints/step_{best:08d}").iterdir())
    assert saved["bytes"] == size

    # 10. Would it fit on one GPU?
    seen.open("why")
    assert "One GPU can hold it" in seen.page.inner_text("#verdict")
    assert len(seen.rows("plan")) == 11
    seen.open("memory")
    assert "at most, during" in seen.page.inner_text("#peak")


def test_what_each_rank_owns_is_what_it_wrote(seen: Seen, run: Path) -> None:
    seen.open("grid")
    draw = random.Random(43)
    names = list(manifest(run)["tensors"]["exp_avg"])
    for rank in range(8):
        seen.page.click(f'[data-rank="{rank}"]')
        rows = {row[0]: row[5] for row in seen.rows("params")}
        for name in draw.sample(names, 12):
            count = elements(rows.get(name, "none"))
            expected = owned(run, "exp_avg", name).get(rank, 0)
            replicated = "norm" in name or "router" in name
            # Of what tp does not cut, the first of its ranks writes.
            assert count == expected or (replicated and rank % 2 and expected == 0), (rank, name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_of_other_layouts(browser: Any, zygote: Zygote, tmp_path: Path, layout: str) -> None:
    run, out = tmp_path / "run", tmp_path / "run.html"
    flags = [*DENSE.split(), *LAYOUTS[layout].split(), "--run-dir", str(run)]
    assert codes(zygote.start(flags, 4, tmp_path).end()) == [0] * 4
    main([str(run), "--html", str(out)])
    it = Seen(browser, out.as_uri())
    it.open("grid")
    tensors = manifest(run)["tensors"]["exp_avg"]
    for rank in range(4):
        it.page.click(f'[data-rank="{rank}"]')
        rows = it.rows("params")
        # The first of tp's ranks writes what tp does not cut.
        shared = {row[0] for row in rows if "norm" in row[0] and "tp" in layout and rank % 2}
        expected = {name: owned(run, "exp_avg", name).get(rank, 0) for name in tensors}
        assert {row[0]: elements(row[5]) for row in rows if row[0] not in shared} == {
            row[0]: expected[row[0]] for row in rows if row[0] not in shared
        }
        for name, whole, _, weights, grads, share, _ in rows:
            own, all_of_it = 4 * elements(share), 4 * math.prod(map(int, whole.split(" × ")))
            if layout == "zero2-zb-v":
                assert (size(weights), size(grads)) == pytest.approx((all_of_it, own), rel=0.005), name
            elif "norm" not in name:
                assert (size(weights), size(grads)) == pytest.approx((own, own), rel=0.005), name
    if layout == "zero2-zb-v":
        assert [row[1:] for row in it.rows("stages")] == [["0, 3", "0, 3", "0, 1"], ["1, 2", "1, 2", "2, 3"]]
        it.open("schedule")
        step = int(re.search(r"step (\d+)", it.page.inner_text("main"))[1])  # type: ignore[index]
        for rank in range(2):
            lines = (run / f"schedule/pipeline_rank_{rank}.jsonl").read_text().splitlines()[1:]
            (ops,) = [line["ops"] for line in map(json.loads, lines) if line["step"] == step]
            waits = [1e3 * (ready - begun) for name, begun, ready, _ in ops if name[0] in "FBIW"]
            # Forward, gradient of the input and of the weights of four micro-batches in two stages.
            assert len(waits) == 4 * 2 * 3
            shown = [float(row[4].replace(",", "")) for row in it.rows("ops-measured") if row[0] == f"pp{rank}"]
            assert shown == pytest.approx(waits, rel=1e-3, abs=2e-3)
    else:
        held = []
        for zero in range(4):
            it.select("Shown at", str(zero))
            held.append([size(text) for text in re.findall(r"[\d.,]+ k?B", it.page.inner_text("#held"))])
        # fp32 weights are the masters: 4 bytes each of weights and gradients, 8 of moments; dp 2, and norms whole.
        n = held[0][0] / 4
        sums = [(4, 4, 8), (4, 4, 4), (4, 2, 4), (2, 2, 4)]
        assert held == [pytest.approx([k * n for k in each], rel=0.02) for each in sums]
    for view in VIEWS:
        it.open(view)
        assert not {"undefined", "NaN", "[object"} & set(re.split(r"\s", it.page.inner_text("main")))
    assert (it.said, it.asked) == ([], [out.as_uri()])
    it.context.close()


def test_every_view_opens_by_keyboard_in_both_languages_on_a_phone_in_the_dark(browser: Any, html: Path) -> None:
    for locale, scheme, word in (("zh-CN", "dark", "曲线"), ("en-US", "light", "Curves")):
        it = Seen(browser, html.as_uri(), viewport={"width": 390, "height": 800}, locale=locale, color_scheme=scheme)
        assert it.page.inner_text("#tab-curves") == word
        it.page.focus("#tab-curves")
        for view in VIEWS:
            it.page.wait_for_function("name => window.megalite.view() === name", arg=view)
            assert it.page.evaluate("document.documentElement.scrollWidth") == 390, view
            assert "undefined" not in it.page.inner_text("main")
            assert "[object" not in it.page.inner_text("main")
            assert it.page.evaluate(CONTRAST) >= 4.5, view
            it.page.keyboard.press("ArrowRight")
        it.page.wait_for_function("() => window.megalite.view() === 'curves'")
        it.curve("loss")
        it.page.focus(".chart")
        it.page.keyboard.press("Home")
        it.page.wait_for_function("() => document.querySelector('.spoken').textContent.startsWith('loss, step 1:')")
        it.page.keyboard.press("+")
        assert it.curve("loss")["x"] == [1, 2.25]
        it.page.keyboard.press("0")
        assert it.curve("loss")["x"] == [1, 6]
        assert it.said == []
        it.context.close()


# The lowest contrast of a text with the nearest color behind it.
CONTRAST = """() => {
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const light = (c) => parse(c).slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (n) => {
    for (; n; n = n.parentElement) {
      const c = parse(getComputedStyle(n).backgroundColor);
      if (c.length < 4 || c[3] > 0) return getComputedStyle(n).backgroundColor;
    }
    return "rgb(255, 255, 255)";
  };
  const walker = document.createTreeWalker(document.getElementById("frame"), NodeFilter.SHOW_TEXT);
  let least = 21;
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.offsetParent || node.closest(".skip, .key, option")) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(behind(node))];
    least = Math.min(least, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
  }
  return least;
}"""


def test_pictures_have_what_they_say(seen: Seen, run: Path) -> None:
    seen.open("schedule")
    # Four micro-batches, forward and backward, on two pipeline ranks; measured and planned.
    seen.page.wait_for_function("() => window.megalite.drawn('schedule').lanes.every(n => n === 16)")
    seen.page.get_by_role("button", name="zoom in").click()
    assert seen.page.evaluate("window.megalite.drawn('schedule').lanes.every(n => n < 16)")
    canvas = seen.page.locator("canvas").first
    canvas.focus()
    seen.page.keyboard.press("ArrowDown")
    assert re.match(r"pp1, F0: forward, micro-batch 0, stage 1", seen.page.inner_text("#operation"))
    for view in ("schedule", "memory", "experts"):
        seen.open(view)
        seen.page.wait_for_function(
            """() => { const c = document.querySelector("main canvas"); if (!c.width) return false;
            const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data; const colors = new Set();
            for (let i = 0; i < d.length; i += 4) colors.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]);
            return colors.size > 3; }"""
        )


def test_every_collective_is_played_to_its_end(seen: Seen) -> None:
    """With the bytes of this run: of a whole tensor, each message of a ring or an exchange carries a rank's part."""
    seen.open("messages")
    options = seen.page.locator("label", has_text="Operation").locator("option").all_text_contents()
    told = {f"{row[0]}: {row[1]}": row for row in seen.rows("messages")}
    kinds = set()
    for number, option in enumerate(options):
        seen.select("Operation", str(number))
        _, kind, ranks, calls, whole, *_ = told[option]
        n = int(ranks)
        said = re.search(r"Step 0 of (\d+): each message carries ([\d.,]+ \w+)\.", seen.page.inner_text("#collective"))
        assert said is not None
        parts = int(calls) * (1 if kind == "send" else n)
        assert size(said[2]) == pytest.approx(size(whole) / parts, rel=0.01)
        for _ in range(int(said[1])):
            seen.page.get_by_role("button", name="step", exact=True).click()
        script = "b => [...b.querySelectorAll('tbody tr')].map(r => [...r.cells].slice(1).map(c => c.textContent))"
        cells = seen.page.eval_on_selector("#collective", script)
        done = [[cell in ("✓", f"{n}/{n}") for cell in row] for row in cells]
        if kind == "reduce_scatter":
            # Each rank has the whole sum of one piece, each of another.
            assert sorted(row.index(True) for row in done) == list(range(n))
            assert sum(map(sum, done)) == n
        else:
            assert all(map(all, done)), (option, cells)
        assert int(said[1]) == {"all_reduce": 2 * (n - 1), "send": 1}.get(kind, n - 1)
        kinds.add(kind)
    assert kinds == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"}


def test_the_plan_says_its_bubble_and_its_critical_path(seen: Seen) -> None:
    seen.open("schedule")
    rows = [(row[0], float(row[2]), float(row[3]), row[6]) for row in seen.rows("ops-planned")]
    critical = [(begin, end) for _, begin, end, on_path in rows if on_path == "yes"]
    last = max(end for _, _, end, _ in rows)
    # A chain from the beginning to the end: each operation follows another at once, or after one message.
    assert (min(critical)[0], max(end for _, end in critical)) == (0, last)
    gaps = [begin - max((end for _, end in critical if end < begin + 1e-3), default=0) for begin, _ in critical]
    message = max(gaps)
    assert 0 < message < 0.1 * last
    assert all(min(gap, message - gap) == pytest.approx(0, abs=1e-2) for gap in gaps), gaps
    idle = [last - sum(end - begin for lane, begin, end, _ in rows if lane == f"pp{rank}") for rank in range(2)]
    bubble = min(idle) / (last - min(idle))
    assert re.search(rf"bubble {100 * bubble:.3g}", seen.page.inner_text("main")), seen.page.inner_text("main")


def test_two_runs_lie_over_each_other(browser: Any, run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    lines = [{"event": "start", "step": 0}, *({"step": s, "loss": float(s)} for s in (2, 5, 9, 12))]
    lines += [{"event": "eval_tasks", "step": s, "piqa/acc": s / 20, "piqa/acc_stderr": 0.1} for s in (5, 12)]
    lines += [{"event": "resume", "step": 9}, {"step": 10, "loss": -1.0}]
    lines += [{"event": "eval_tasks", "step": 10, "piqa/acc": 0.75, "piqa/acc_stderr": 0.1}]
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "both.html"
    main([str(run), str(other), "--html", str(out), "--no-estimate"])
    it = Seen(browser, out.as_uri())
    assert it.curve("loss")["runs"] == ["run", "run evaluation", "other"]
    assert it.curve("loss")["x"] == [1, 10]
    assert [it.value("loss", x, 2) for x in (2, 5, 9, 10)] == [2, 5, 9, -1]
    first = next(line["loss"] for line in metrics(run) if line.get("step") == 2 and "event" not in line)
    assert it.value("loss", 2) == pytest.approx(first, rel=1e-6)
    # A chart for each metric of a task; that of step 12 is of an attempt that was given up.
    assert it.curve("piqa/acc")["runs"] == ["other evaluation"]
    assert it.curve("piqa/acc")["points"] == 2
    assert [it.value("piqa/acc", step) for step in (5, 10)] == [0.25, 0.75]
    it.select("Run of all views", "1")
    it.open("memory")
    assert "could not be made" in it.page.inner_text("main")
    assert it.said == []
    it.context.close()


NEAR = """([from, to]) => { const out = [];
const loss = window.megalite.drawn('curves').find(c => c.name === 'loss');
for (let x = from; x <= to; x++) { const y = loss.valueAt(x, 0); if (typeof y === 'number') out.push(y); }
return out; }"""


def test_a_hundred_thousand_steps_with_every_event(browser: Any, tmp_path: Path) -> None:
    steps, out = 100_000, tmp_path / "page.html"
    kinds = ["save", "resume", "recovery", "spike", "rewind", "straggler", "resize", "replay", "nonfinite"]
    draw = random.Random(7)
    lines: list[dict[str, Any]] = [{"event": "start", "step": 0}]
    for step in range(1, steps + 1):
        size = 64 if step <= 60_000 else 128
        figures = {
            "grad_norm": 1 + draw.random(),
            "lr": 1e-3,
            "tokens_per_s": 9e5,
            "memory_gib": 61.0,
            "data_wait_s": 0.0,
        }
        loss = 90.0 if step == 54_321 else 5 / step**0.1 + draw.random()
        lines.append({"step": step, "loss": loss, "time": 1.7e9 + step, "global_batch_size": size, **figures})
        if step % 10_000 == 0:
            # A rewind or a resume leaves what came before it as it is: none goes back here.
            lines.append({"event": kinds[step // 10_000 - 1] if step < steps else "save", "step": step})
    run = write(tmp_path / "run", lines)
    main([str(run), "--html", str(out), "--no-estimate"])
    assert out.stat().st_size < 3_000_000
    it = Seen(browser, out.as_uri())
    shown = it.curve("loss")
    assert (shown["x"], shown["points"] <= 20_000) == ([1, steps], True)
    # The peak stands at a step of its bucket.
    near = it.page.evaluate(NEAR, [54_321 - 44, 54_321 + 44])
    assert max(near) == 90
    it.page.focus(".chart")
    it.page.keyboard.press("Home")
    it.page.keyboard.press("+")
    it.page.wait_for_function("() => window.megalite.drawn('curves')[0].x[1] < 100000")
    # Each kind has a line in the table, and a box that hides its marks.
    it.page.click("summary >> nth=0")
    assert {row[2].split()[-1] for row in it.rows("events")} == {*kinds, "start", "batch_size"}
    boxes = it.page.locator("label:has(input[type=checkbox])").all_text_contents()
    assert {box.split()[-1] for box in boxes} == {*kinds, "batch_size", "logarithmic"}
    assert it.said == []
    it.context.close()


def test_one_step_is_seen_and_lines_without_a_time_have_no_place_on_its_axis(browser: Any, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    # Steps 1 and 2 are of a version that wrote no time; of a save that tells nothing, the folder is shown.
    lines = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}]
    lines += [{"step": s, "loss": 1.0, "time": 1.7e9 + 3600 * s} for s in (3, 5)]
    run = write(tmp_path / "run", [*lines, {"event": "saved", "step": 5, "checkpoint": "c/step_5", "bytes": "x"}])
    main([str(run), "--html", str(out), "--no-estimate"])
    it = Seen(browser, out.as_uri())
    it.select("Axis", "time")
    assert it.curve("loss")["x"] == [0, 2]
    it.open("checkpoints")
    assert it.rows("saves") == [["step_5", "5", "–", "–", "–", "no"]]
    assert it.said == []
    it.context.close()
    main([str(write(tmp_path / "one", lines[:1])), "--html", str(out), "--no-estimate"])
    it = Seen(browser, out.as_uri())
    it.curve("loss")
    it.page.wait_for_function(
        """() => { const c = document.querySelector("canvas"), r = getComputedStyle(document.documentElement);
        const wanted = parseInt(r.getPropertyValue("--run-0").trim().slice(1), 16);
        const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
        for (let i = 0; i < d.length; i += 4) if ((d[i] << 16 | d[i + 1] << 8 | d[i + 2]) === wanted) return true;
        return false; }"""
    )
    it.context.close()


def test_a_hostile_folder_runs_nothing(browser: Any, tmp_path: Path) -> None:
    run, out = hostile_run(tmp_path), tmp_path / "page.html"
    main([str(run), "--html", str(out), "--no-estimate"])
    it = Seen(browser, out.as_uri())
    for view in VIEWS:
        it.open(view)
        assert it.page.evaluate("typeof window.pwned") == "undefined"
        assert it.page.inner_text("main")
    it.open("curves")
    for name in it.page.eval_on_selector_all("main select option", "os => os.map(o => o.value)"):
        if name not in ("", "step", "tokens", "time"):
            it.select("Another curve", name)
    it.page.click("summary >> nth=0")
    shown = it.page.inner_text("#events")
    assert "</script><script>window.pwned=1</script>" in shown
    assert "\\u202egnirts" in shown
    assert "\u202e" not in it.page.inner_text("body")
    assert (it.said, len(it.asked)) == ([], 1)
    it.context.close()
    # What the policy is for: markup that got in after all would not run.
    planted = out.read_text().replace(
        "<noscript>", "<script>window.pwned=1</script><img src=x onerror=pwned=1><noscript>"
    )
    out.write_text(planted)
    it = Seen(browser, out.as_uri())
    assert it.page.evaluate("typeof window.pwned") == "undefined"
    assert any("Content Security Policy" in text for text in it.said)
    it.context.close()


def test_a_served_page_follows_the_run(browser: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    path = run / "metrics.jsonl"
    path.write_text('{"event": "start", "step": 0}\n{"step": 1, "loss": 1.0}\n')

    def make() -> str:
        return make_page(collect([("run", run)], "now", 20_000, None, estimate=False), "run", live=True)

    server = Server([run], make, 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        it = Seen(browser, server.url)
        with path.open("a") as file:
            file.writelines(f'{{"step": {s}, "loss": {1 / s}}}\n' for s in range(2, 102))
            file.write('{"step": 102, ')
        it.page.wait_for_function("() => document.querySelector('.status').textContent.includes('101')")
        assert it.curve("loss")["points"] == 101
        assert it.value("loss", 77) == pytest.approx(1 / 77)
        # Steps made again after a rewind: their last lines count, and the page, with what was chosen on it, stays.
        it.page.evaluate("window.kept = true")
        with path.open("a") as file:
            file.write('"loss": 0}\n{"event": "rewind", "step": 102}\n{"step": 60, "loss": 8}\n{"st')
        it.page.wait_for_function("() => document.querySelector('.status').textContent.includes('60')")
        assert (it.value("loss", 60), it.value("loss", 59), it.value("loss", 102)) == (8, pytest.approx(1 / 59), 0)
        assert it.page.evaluate("window.kept")
        # Another start: the page is made anew.
        with path.open("a") as file:
            file.write('ep": 61, "loss": 7}\n{"event": "resume", "step": 50}\n{"step": 51, "loss": 9}\n')
        it.page.wait_for_function("() => (window.megalite.drawn('curves') || [{}])[0].points === 51")
        assert it.value("loss", 51) == 9
        # A new run in the same folder.
        (run / "new").write_text('{"event": "start", "step": 0}\n{"step": 1, "loss": 4.0}\n')
        (run / "new").rename(path)
        it.page.wait_for_function("() => (window.megalite.drawn('curves') || [{}])[0].points === 1")
        assert all(url.startswith(server.url) for url in it.asked)
        assert it.said == []
        it.context.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_differences_stand_below_their_base(browser: Any, tmp_path: Path) -> None:
    run, out = write(tmp_path / "run", [{"step": 1, "loss": 1.0}]), tmp_path / "page.html"
    differences.save(run / "checkpoints", [1, 2, 3, 4, 5], 3)
    shutil.rmtree(run / "checkpoints/model_00000004")
    main([str(run), "--html", str(out), "--no-estimate"])
    it = Seen(browser, out.as_uri())
    it.open("checkpoints")
    rows = it.rows("folders")
    first, alone = "model_00000001", "its base model_00000004 is missing"
    assert [row[0] for row in rows] == [first, "└ model_00000002", "└ model_00000003", "model_00000005"]
    assert rows[0][7].startswith("with 2 differences: ")
    assert [row[7] for row in rows[1:]] == ["", "", alone]
    assert it.said == []
    it.context.close()
