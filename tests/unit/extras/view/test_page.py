"""The page of a run: its figures beside metrics.jsonl, and that nothing in a run's folder breaks out of it."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import tracemalloc
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.core.base.errors import UserError
from megalite.core.mesh.grid import Grid
from megalite.core.pipeline.schedule import Costs
from megalite.extras.compat.dialect import DIALECT
from megalite.extras.view.metrics import read_metrics
from megalite.extras.view.page.collect import _PROCESSOR_S, collect
from megalite.extras.view.page.command import main
from megalite.extras.view.page.embed import page, script_parts, to_json
from megalite.extras.view.page.placement import collect_grid
from megalite.extras.view.page.predict import PARTS
from megalite.extras.view.page.serve import Server
from megalite.runtime.options import cli
from tests.unit.checkpoint import differences
from tests.unit.extras.view.runs import HOSTILE, hostile_run, record_schedule, write

FOLDER = Path(__file__).parents[4] / "megalite/extras/view/page"


def collected(*runs: Path, most: int | None = None) -> dict[str, Any]:
    return collect([(run.name, run) for run in runs], "now", most, None, estimate=False)


def column(curves: dict[str, Any], name: str) -> Any:
    entry = curves["series"][name]
    return np.frombuffer(base64.b64decode(entry["data"]), "<f8" if entry["wide"] else "<f4")


def steps_of(curves: dict[str, Any]) -> list[int]:
    return [int(x) for x in np.frombuffer(base64.b64decode(curves["x"]), "<f8")]


def test_curves_are_those_of_metrics_jsonl_whatever_was_done_again(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"event": "start", "step": 0}]
    lines += [
        {"step": s, "loss": 5 / s, "lr": 1e-3, "consumed_tokens": 2**33 + s, "time": 1e9 + s} for s in range(1, 9)
    ]
    lines += [{"event": "eval", "step": 8, "loss": 9.0}, {"event": "resume", "step": 4}]
    lines += [{"step": s, "loss": 7 / s, "lr": None, "consumed_tokens": 2**33 + s} for s in (5, 6, 6)]
    run = write(tmp_path / "run", lines)
    curves = collected(run)["runs"][0]["curves"]
    steps, events = read_metrics(run)
    assert steps_of(curves) == [s["step"] for s in steps] == [1, 2, 3, 4, 5, 6]
    assert column(curves, "loss") == pytest.approx([s["loss"] for s in steps], rel=1e-6)
    # float32 would not tell these numbers apart.
    assert column(curves, "consumed_tokens").tolist() == [s["consumed_tokens"] for s in steps]
    assert np.isnan(column(curves, "lr")).tolist() == [False] * 4 + [True] * 2
    assert curves["events"] == events
    assert (curves["per_bucket"], curves["broken"]) == (1, 0)


def test_of_many_steps_no_extreme_is_lost_and_the_newest_are_all_there(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    values = rng.normal(size=30_000)
    lines = [{"step": s + 1, "loss": v, "consumed_tokens": 64 * s + 64} for s, v in enumerate(values.tolist())]
    run = write(tmp_path / "run", lines)
    curves = collected(run, most=1_000)["runs"][0]["curves"]
    xs, loss = steps_of(curves), column(curves, "loss")
    assert len(xs) == len(loss) == curves["points"] <= 1_000
    assert xs == sorted(set(xs))
    # On the axis of tokens too: two points in one place would be one.
    assert column(curves, "consumed_tokens").tolist() == [64 * x for x in xs]
    assert (loss.min(), loss.max()) == (np.float32(values.min()), np.float32(values.max()))
    per, whole = curves["per_bucket"], 30_000 - 500
    assert xs[-500:] == list(range(whole + 1, 30_001))
    assert loss[-500:].tolist() == values[-500:].astype(np.float32).tolist()
    for start in range(0, whole, per):
        bucket = values[start : min(start + per, whole)].astype(np.float32)
        drawn = loss[[i for i, x in enumerate(xs) if start < x <= min(start + per, whole)]]
        assert (bucket.min(), bucket.max()) == (drawn.min(), drawn.max())


def test_a_page_of_many_fields_and_events_is_no_larger_than_3_mb(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    values = rng.normal(size=(8_000, 90))
    values[4_321, 50] = 1e9
    lines: list[Any] = []
    for step, row in enumerate(values.tolist(), start=1):
        lines.append({"step": step, "time": 1e9 + step, **{f"layers.{i}.load": x for i, x in enumerate(row)}})
        lines.append({"event": "spike", "step": step, "said": "<&>" * 70})
    lines += [{"event": "note", "step": 8_000, "said": ["y" * 1_000] * 999}, {"event": "save", "step": 8_000}]
    data = collected(write(tmp_path / "run", lines))
    assert 2_500_000 < len(page(data, "run")) < 3_000_000
    curves = data["runs"][0]["curves"]
    for i in (0, 50, 89):
        drawn = column(curves, f"layers.{i}.load")
        assert (drawn.min(), drawn.max()) == (np.float32(values[:, i].min()), np.float32(values[:, i].max()))
    assert [event["event"] for event in curves["events"][-2:]] == ["spike", "save"]
    assert len(curves["events"]) + curves["events_left_out"] == 8_002
    assert not curves["fields_left_out"]


def test_fields_that_only_one_line_has_take_no_memory(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 2.0, f"x{step}": 1.0, "y" * 10_000: 1.0} for step in range(1, 3_001)]
    run = write(tmp_path / "run", lines)
    tracemalloc.start()
    curves = collected(run)["runs"][0]["curves"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20
    assert (curves["steps"], curves["fields_left_out"], "loss" in curves["series"]) == (3_000, True, True)
    assert len(curves["series"]) == 500
    assert np.nanmax(column(curves, "x7")) == 1


def test_a_hostile_folder_is_text_and_blanks_no_other_view(tmp_path: Path) -> None:
    run = hostile_run(tmp_path)
    data = collected(run)
    parts = data["runs"][0]
    # The half line at the end waits for its rest.
    assert (parts["curves"]["steps"], parts["curves"]["broken"]) == (10, 4)
    assert steps_of(parts["curves"])[-1] == 10
    assert "not a regular file" in parts["experts"]["problem"]
    assert "problem" in parts["layout"]
    assert [("problem" in folder) for folder in parts["checkpoints"]["folders"]] == [True] * 4
    html = page(data, run.name)
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    assert block is not None
    assert not set("<>&") & set(block[1])
    assert block[1].isascii()
    shown = json.loads(block[1])["runs"][0]
    assert shown["name"] == run.name
    assert {event["event"] for event in shown["curves"]["events"]} >= set(HOSTILE[:8])
    assert html.count("</script>") == 3
    assert "pwned=1</script>" not in html
    assert len(html) < 300_000


def test_a_config_that_asks_for_anything_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_PROCESSOR_S, "predict", 5)
    # Which of 10^13 ranks' divisors could be --ep would take hours.
    run = write(tmp_path / "run", [{"event": "start", "step": 0, "ranks": 10**13}, {"step": 1, "loss": 1.0}])
    flags = "--num-layers 1 --hidden-size 32 --num-heads 2 --vocab-size 64 --seq-len 8 --mock-data --device cpu"
    experts = "--num-experts 6 --moe-topk 2 --ep 3 --micro-batch-size 1 --global-batch-size 6 --lr 1e-3 --train-steps 1"
    config = cli.parse([*flags.split(), *experts.split()], world=3, dialect=DIALECT).config
    (run / "config.yaml").write_text(cli.to_yaml(config))
    parts = collected(run)["runs"][0]
    assert parts["curves"]["steps"] == 1
    assert {parts[name]["problem"] for name in PARTS} == {"left out: it takes too much processor time"}
    (run / "config.yaml").unlink()
    os.mkfifo(run / "config.yaml")
    assert "not a regular file" in collected(run)["runs"][0]["layout"]["problem"]


def test_every_rank_finds_its_boxes_where_experts_are_cut_otherwise() -> None:
    flags = "--num-layers 2 --hidden-size 32 --num-heads 2 --vocab-size 64 --seq-len 8 --mock-data --device cpu"
    flags += " --num-experts 8 --moe-topk 2 --tp 2 --pp 2"
    flags += " --micro-batch-size 1 --global-batch-size 8 --train-steps 1 --lr 1e-3"
    for layout in ("--ep 4 --etp 1", "--ep 2 --etp 1", "--ep 2", "--ep 1"):
        cfg = cli.parse([*flags.split(), *layout.split()], world=8, dialect=DIALECT).config
        told = collect_grid(cfg, Grid.from_config(cfg.parallel, 8))
        for param in told["params"]:
            # As `boxesOf` of grid.js.
            axes = dict.fromkeys(axis for axis, _ in param["cut"])
            keys = [",".join(str(place.get(axis, 0)) for axis in axes) for place in told["ranks"]]
            held = [
                sum(math.prod(shape) for _, shape in param["boxes"][key])
                for key, place in zip(keys, told["ranks"])
                if place["pp"] in param["pp"]
            ]
            copies = {"--ep 4 --etp 1": 1, "--ep 2 --etp 1": 2, "--ep 2": 1, "--ep 1": 2}[layout]
            if ".experts." in param["name"]:
                assert sum(held) == copies * math.prod(param["shape"]), (layout, param["name"])


@pytest.mark.parametrize("zero", [2, 3])
def test_a_pipeline_in_the_shape_of_a_v_under_zero(zero: int) -> None:
    flags = "--num-layers 4 --hidden-size 32 --num-heads 2 --vocab-size 64 --seq-len 8 --mock-data --device cpu"
    flags += " --pp 2 --vp 2 --schedule zb-v --micro-batch-size 1 --global-batch-size 8 --train-steps 1 --lr 1e-3"
    cfg = cli.parse([*flags.split(), "--zero", str(zero)], world=4, dialect=DIALECT).config
    told = collect_grid(cfg, Grid.from_config(cfg.parallel, 4))
    assert (told["schedule"], told["zero"]) == ("zb-v", zero)
    assert told["stages"] == [{"stages": [0, 3], "layers": [0, 3]}, {"stages": [1, 2], "layers": [1, 2]}]
    for param in told["params"]:
        layer = re.search(r"layers\.(\d)", param["name"])
        assert param["pp"] == [int(layer is not None and layer[1] in "12")], param["name"]


MAKE = """
from pathlib import Path
from megalite.extras.view.page.collect import collect
from megalite.extras.view.page.embed import page
print(page(collect([("run", Path("run"))], "now", None, None, estimate=True), "run"))
"""


@pytest.mark.full
def test_a_copy_of_a_run_has_the_same_page_in_another_process(tmp_path: Path) -> None:
    flags = "--num-layers 2 --hidden-size 32 --num-heads 2 --vocab-size 64 --seq-len 8 --mock-data --device cpu --tp 2"
    flags += " --num-experts 4 --ep 2 --micro-batch-size 1 --global-batch-size 4 --train-steps 1 --lr 1e-3"
    config = cli.parse(flags.split(), world=4, dialect=DIALECT).config
    run = write(tmp_path / "a/run", [{"event": "start", "step": 0, "ranks": 4}, {"step": 1, "loss": 1.0, "lr": 1e-3}])
    (run / "config.yaml").write_text(cli.to_yaml(config))
    differences.save(run / "checkpoints", [1, 2], 2)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    pages = []
    for folder, seed in (("a", "1"), ("b", "2")):
        env = os.environ | {"PYTHONHASHSEED": seed}
        pages.append(subprocess.check_output([sys.executable, "-c", MAKE], env=env, cwd=tmp_path / folder))
    assert b'"buckets":{"' in pages[0]
    assert pages[0] == pages[1]


def test_only_the_page_s_own_script_may_run(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [{"step": 1, "loss": 1.0}])
    html = page(collected(run), "run")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    assert html.index("Content-Security-Policy") < html.index("<style") < html.index("<script")
    rules = dict(rule.split(" ", 1) for rule in policy[1].split("; "))
    hashes = ["sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in blocks(html)]
    assert rules == {
        "default-src": "'none'",
        "script-src": f"'{hashes[1]}' '{hashes[2]}'",
        "style-src": f"'{hashes[0]}'",
        "img-src": "data: blob:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert page(collected(run), "run") == html
    live = re.search(r'Content-Security-Policy" content="([^"]*)"', page(collected(run), "run", live=True))
    assert live is not None
    assert live[1] == policy[1] + "; connect-src 'self'"


def blocks(html: str) -> list[str]:
    """The style, the library and the script, as a browser reads them."""
    return re.findall(r"<(?:style|script)>(.*?)</(?:style|script)>", html, re.S)


def test_the_script_makes_no_markup_and_the_library_is_what_was_released() -> None:
    for name, text in script_parts():
        found = re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b\(|new Function|'style'", text
        )
        assert found is None, f"{name}: {found}"
    lines = (FOLDER / "vendor/SHA256SUMS").read_text().splitlines()
    sums = {name: digest for digest, name in map(str.split, lines)}
    assert sums.keys() == {p.name for p in (FOLDER / "vendor").iterdir()} - {"SHA256SUMS"}
    for name, expected in sums.items():
        assert hashlib.sha256((FOLDER / "vendor" / name).read_bytes()).hexdigest() == expected
    assert b"</script" not in (FOLDER / "vendor/uPlot.iife.min.js").read_bytes()


def test_every_text_has_its_translation() -> None:
    texts = dict(script_parts())
    words = dict(re.findall(r'^  \["(.*)", "(.*)"\],$', texts.pop("words"), re.M))
    code = "\n".join(texts.values())
    used = set(re.findall(r'\bt\("([^"]*)"', code))
    assert used - words.keys() == set()
    # Texts that are looked up by a variable stand in a table of the code.
    assert [text for text in words.keys() - used if f'"{text}"' not in code and f" {text}" not in code] == []
    for english, chinese in words.items():
        assert sorted(re.findall(r"\{\w+\}", english)) == sorted(re.findall(r"\{\w+\}", chinese))


def test_no_credential_leaves_and_no_path_with_hide_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET_KEY", "s3cr3t-value-123")
    run = write(tmp_path / "run", [{"event": "save", "step": 1, "checkpoint": f"{tmp_path}/run/checkpoints/step_1"}])
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"event": "note", "step": 1, "said": "s3cr3t-value-123 at https://me:pw12345@host/x"}) + "\n"
        )
    data = collected(run)
    assert str(tmp_path) in to_json(data)
    hidden = page(data, "run", hide="…/")
    assert str(tmp_path) not in hidden
    assert "step_1" in hidden
    for text in (f"PREFIX:{tmp_path}/a", f"file://{tmp_path}/a", f"'{tmp_path}/a'"):
        assert str(tmp_path) not in to_json(text, "…/")
    for folder in ("/home/bob o'neil/my files", "/home/bob o'neil"):
        assert to_json(f"{folder}/tok.model", "…/") == '"\\u2026/tok.model"'
    assert "bob" not in to_json("路径/home/bob/x", "…/")
    assert "is damaged, see" in to_json("/home/bob/a is damaged, see /home/bob/b", "…/")
    assert "https://host/x/y/z" in to_json("https://host/x/y/z", "…/")
    # Runs of one name are told apart by their paths, also in the title.
    assert str(tmp_path) not in page(data, f"{tmp_path}/a/run, {tmp_path}/b/run", hide="…/")
    with serving(run, hide="…/") as server:
        told = ask(f"{server.url}data?run=0&file={data['runs'][0]['live']['file']}&after=0")[1]
        assert "step_1" in told
        assert str(tmp_path) not in told
    for secret in ("s3cr3t-value-123", "pw12345"):
        assert secret not in to_json(data)
        assert secret not in hidden


def test_a_difference_names_its_base_and_the_folder_that_this_is(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [{"step": 1, "loss": 2.0}])
    differences.save(run / "checkpoints", [1, 2, 3, 4], 3)

    def bases() -> list[Any]:
        (made,) = collected(run)["runs"]
        return [(f["name"][-1], f.get("base"), f.get("base_folder")) for f in made["checkpoints"]["folders"]]

    first = "model_00000001"
    assert bases() == [("1", None, None), ("2", first, first), ("3", first, first), ("4", None, None)]
    (run / "checkpoints" / first).rename(run / "checkpoints" / f"aside_1_{first}")
    shutil.copytree(run / "checkpoints/model_00000004", run / "checkpoints" / first)
    assert ("2", first, f"aside_1_{first}") in bases()
    shutil.rmtree(run / "checkpoints" / f"aside_1_{first}")
    assert ("2", first, None) in bases()


def test_each_source_that_is_missing_leaves_the_other_views(tmp_path: Path) -> None:
    """And its own view says what writes it."""
    flags = "--num-layers 2 --hidden-size 32 --num-heads 2 --vocab-size 64 --seq-len 8 --mock-data --device cpu --pp 2"
    flags += " --num-experts 4 --micro-batch-size 1 --global-batch-size 4 --train-steps 1 --lr 1e-3"
    config = cli.parse(flags.split(), world=2, dialect=DIALECT).config
    run = write(tmp_path / "run", [{"event": "start", "step": 0, "ranks": 2}, {"step": 1, "loss": 1.0}])
    (run / "config.yaml").write_text(cli.to_yaml(config))
    (run / "experts.jsonl").write_text('{"step": 1, "layers": [0, 1], "tokens": [[4, 4, 4, 4], [4, 4, 4, 4]]}\n')
    differences.save(run / "checkpoints", [1, 2], 2)
    record_schedule(run, "1f1b", 1, Costs())
    (whole,) = collected(run)["runs"]
    predicted = ("layout", "grid", "schedule", "memory", "plan")
    assert not [name for name in ("curves", "experts", "checkpoints", *predicted) if "problem" in whole[name]]
    assert whole["schedule"]["measured"] is not None
    sources = {"metrics.jsonl": ("curves", "live"), "config.yaml": (*predicted, "step"), "schedule": ("schedule",)}
    sources |= {"experts.jsonl": ("experts",), "checkpoints": ("checkpoints",)}
    for source, views in sources.items():
        (run / source).rename(tmp_path / source)
        (run / "logs").mkdir()
        for rank in range(2):
            (run / f"logs/rank_{rank}.log").touch()
        (made,) = collected(run)["runs"]
        assert {name for name in whole if made.get(name) != whole[name]} == set(views), source
        told = made[views[0]]
        assert told.get("remedy") or told.get("problem") or "--record-schedule" in told["missing"], source
        shutil.rmtree(run / "logs")
        (tmp_path / source).rename(run / source)


def test_the_page_is_made_whatever_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "run", tmp_path / "page.html"
    run.mkdir()
    with pytest.raises(UserError, match=r"has neither metrics\.jsonl nor config\.yaml"):
        main([str(run), "--html", str(out)])
    (run / "metrics.jsonl").write_text("")
    main([str(run), "--html", str(out), "--no-estimate"])
    assert f"wrote {out}" in capsys.readouterr().out
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".html"] == ["run"]
    with pytest.raises(UserError, match="needs --html F or --serve; give one"):
        main([str(run)])
    with pytest.raises(UserError, match="there is no folder"):
        main([str(run), "--html", str(tmp_path / "no" / "page.html")])
    out.unlink()
    out.mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        main([str(run), "--html", str(out), "--no-estimate"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["page.html", "run"]
    with pytest.raises(UserError, match="h99"):
        main([str(run), "--html", str(out), "--cluster", "h99:8"])
    for nothing in ("", ".", "/"):
        with pytest.raises(UserError, match="names no file"):
            main([str(run), "--html", nothing])
    with pytest.raises(UserError, match="must be a port"):
        main([str(run), "--serve", "70000"])


@contextmanager
def serving(run: Path, hide: str | None = None) -> Iterator[Server]:
    server = Server([run], lambda: "the page", 0, hide)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ask(url: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method, headers=headers), timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, ""


def test_the_server_answers_this_host_s_browsers_and_nobody_else(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [{"step": 1, "loss": 1.0}])
    with serving(run) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert ask(server.url) == (200, "the page")
        root = server.url.removesuffix(server.path)
        for path in ("/", "/data?run=0&after=0", "/metrics.jsonl", server.path + "../metrics.jsonl", server.path + "x"):
            assert ask(root + path)[0] == 404
        for query in ("", "run=1&after=0", "run=-1&after=0", "run=0&after=-1", "run=x&after=0", "run=0"):
            assert ask(f"{server.url}data?{query}")[0] == 404
        assert ask(server.url, Host="evil.example:80")[0] == 403
        assert ask(server.url, method="POST")[0] == 501


def test_the_server_tells_each_new_line_once(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [{"step": 1, "loss": 1.0}])
    path = run / "metrics.jsonl"
    live = collected(run)["runs"][0]["live"]
    assert live == {"file": str(path.stat().st_ino), "offset": path.stat().st_size}
    with serving(run) as server:

        def new(offset: int, file: str = live["file"]) -> dict[str, Any]:
            told: dict[str, Any] = json.loads(ask(f"{server.url}data?run=0&file={file}&after={offset}")[1])
            return told

        assert new(live["offset"]) == {"offset": live["offset"], "lines": []}
        with path.open("a") as file:
            file.write('{"step": 2, "loss": 0.5}\nbroken\n{"step": 3, "lo')
        told = new(live["offset"])
        assert told["lines"] == [{"step": 2, "loss": 0.5}]
        with path.open("a") as file:
            file.write('ss": null, "nonfinite": {"loss": "</script>"}}\n')
        assert new(told["offset"])["lines"] == [{"step": 3, "loss": None, "nonfinite": {"loss": "</script>"}}]
        assert new(10**9) == {"again": True}
        path.rename(run / "old")
        write(run, [{"step": 1, "loss": 2.0}])
        assert new(live["offset"]) == {"again": True}
