"""The search, through `megalite plan`: what it lists fits as --dry-run counts, and what it prints runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megalite.core.base.errors import UserError
from megalite.core.base.hardware import DEVICES
from megalite.core.mesh.grid import Grid
from megalite.extras.plan.cluster import FITTED, Cluster, write_calibration
from megalite.extras.plan.command import main
from megalite.extras.plan.memory.ranks import memory_per_rank
from megalite.extras.plan.search import pick, search
from megalite.runtime.options import cli
from megalite.runtime.options.fields import LAYOUT
from tests.ranks import ROOT

BIG = "--preset llama-3-70b --global-batch-size 1024 --seq-len 8192"


def _printed(capsys: pytest.CaptureFixture[str], words: str) -> Any:
    assert main(words.split()) == 0
    text = capsys.readouterr().out
    return json.loads(text) if "--json" in words else text


def test_search_lists_what_fits_first_and_why_the_rest_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    found = _printed(capsys, f"{BIG} --cluster h100:64 --micro-batch-size 1 --tp 4 --json")
    assert [f["fits"] for f in found] == sorted((f["fits"] for f in found), reverse=True)
    fits = [f for f in found if f["fits"]]
    assert [f["step_time_s"] for f in fits] == sorted(f["step_time_s"] for f in fits)
    assert all(f["mem_gb"] <= 0.9 * 85.0 and f["why_not"] is None for f in fits)
    assert all(set(LAYOUT) < set(f) and f["tp"] == 4 and f["micro_batch_size"] == 1 for f in found)
    causes = {f["why_not"].split(":")[0] for f in found if not f["fits"]}
    assert {"states", "activations"} <= causes
    # The change that an explanation names is a layout of the list, and fits.
    by_options = {tuple(f[name] for name in LAYOUT): f for f in found}
    changed = [f for f in found if f["why_not"] and "fits with --recompute full (" in f["why_not"]]
    for f in changed[:20]:
        assert by_options[tuple({**f, "recompute": "full"}[name] for name in LAYOUT)]["fits"]
    assert changed


def test_ranks_that_share_samples_are_left_to_them(capsys: pytest.CaptureFixture[str]) -> None:
    """A search keeps `--cp`: other axes divide the ranks that it leaves."""
    found = _printed(capsys, "--preset llama-3-8b --cluster h100:8 --cp 2 --seq-len 8192 --global-batch-size 16 --json")
    assert {f["dp"] * f["tp"] * f["pp"] for f in found} == {4}


def test_the_pick_runs_as_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Its command line and its YAML make the same run, with the memory that --dry-run prints."""
    flags = "--preset llama-3-8b --global-batch-size 256 --cluster h100:16 --micro-batch-size 1 --zero 1"
    text = _printed(capsys, f"{flags} --png {tmp_path / 'bars.png'}")
    (marked,) = re.findall(r"^ *\d*\* *([\d.]+) ", text, re.M)
    assert f"* picked, the simplest within 3% of the fastest: {marked} s per step" in text
    command = text.partition("torchrun ")[2].splitlines()[0]
    assert command.startswith("--nnodes 2 --nproc-per-node 8 pretrain_gpt.py ")
    words = command.partition("pretrain_gpt.py ")[2].split()
    cfg = cli.parse(words).config
    recipe = tmp_path / "pick.yaml"
    recipe.write_text(text.partition("(--config):\n")[2])
    common = "--preset llama-3-8b --global-batch-size 256 --precision bf16"
    assert cli.parse([*common.split(), "--config", str(recipe)]).config == cfg
    found = _printed(capsys, f"{flags} --json")
    (same,) = (f for f in found if all(f[n] == getattr(cfg.parallel, n, getattr(cfg.train, n, None)) for n in LAYOUT))
    ranks = memory_per_rank(cfg, Grid.from_config(cfg.parallel, 16))
    assert same["mem_gb"] == max(rank.total for rank in ranks) / 1e9
    assert (tmp_path / "bars.png").stat().st_size > 10_000


def test_how_long_and_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--preset llama-3-8b --cluster h100:16 --micro-batch-size 1 --zero 1 --tp 2"
    text = _printed(capsys, f"{flags} --global-batch-size 256 --tokens 0.5T --price 2.5")
    step = float(re.findall(r"within 3% of the fastest: ([\d.]+) s per step", text)[0])
    pace, days, hours, cost = (
        float(n.replace(",", ""))
        for n in re.findall(
            r"^# ([\d,]+) tokens/s: 5e\+11 tokens take (.*) days, (.*) GPU hours, (.*) at 2.5 per", text, re.M
        )[0]
    )
    assert pace == pytest.approx(256 * 8192 / step, rel=1e-3)
    assert days == pytest.approx(5e11 / pace / 86400, abs=0.1)
    assert (hours, cost) == (pytest.approx(days * 24 * 16, rel=2e-3), pytest.approx(hours * 2.5, abs=3))
    assert "3.9% mean error on published runs of other stacks" in text.splitlines()[-1]
    assert "--global-batch-size is not given" not in text
    assert "note: --global-batch-size is not given; 8 samples" in _printed(capsys, f"{flags} --pp 2")
    for words, rule in (("--price 2", "requires the length"), ("--tokens much", "must be a number of tokens")):
        with pytest.raises(UserError, match=rule):
            main(f"{flags} --pp 2 {words}".split())


def test_a_search_starts_without_torch() -> None:
    """Half of the time of a small search would go into importing it."""
    words = ["--preset", "gpt2-124m", "--cluster", "h100:1", "--global-batch-size", "8", "--json"]
    script = (
        f"import sys; from megalite.extras.plan.command import main; main({words}); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)[0]["fits"]


def test_zero_2_is_left_to_what_fits_with_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    text = _printed(capsys, "--preset llama-3-70b --cluster h100:64 --global-batch-size 1024 --tp 4 --pp 4")
    assert "--zero 2" not in text.partition("torchrun")[2]


def test_terms_add_up_and_sweeps_scale(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    layout = "--tp 8 --pp 4 --vp 4 --schedule interleaved --recompute full"
    one = _printed(capsys, f"explain {BIG} {layout} --cluster h100:64 --json")
    assert sum(one["terms"].values()) == pytest.approx(one["step_time_s"])
    assert one["terms"]["recompute"] > 0 < one["terms"]["bubble"]
    assert len(one["memory"]) == 4
    text = _printed(capsys, f"explain {BIG} {layout} --cluster h100:64")
    printed = {
        line.split()[0]: float(line.split()[1]) for line in text.splitlines() if re.search(r" s +[\d.]+%$", line)
    }
    assert printed == pytest.approx(one["terms"], rel=1e-3)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "parallel: {tp: 8, pp: 4, vp: 4, schedule: interleaved}\ntrain: {recompute: full, precision: bf16}\n"
    )
    assert _printed(capsys, f"explain {BIG} --config {recipe} --cluster h100:64 --json") == one
    small = "--preset llama-3.2-1b --global-batch-size 512 --cluster h100:8 --zero 1 --pp 1 --recompute none"
    points = _printed(capsys, f"sweep {small} --gpus 8..64 --json --png {tmp_path / 'curves.png'}")
    strong, weak = ([p for p in points if p["mode"] == mode] for mode in ("strong", "weak"))
    assert [p["gpus"] for p in strong] == [p["gpus"] for p in weak] == [8, 16, 32, 64]
    assert [p["global_batch_size"] for p in weak] == [512, 1024, 2048, 4096]
    # A fixed batch loses efficiency as it spreads; a batch that grows keeps it.
    assert strong[-1]["mfu"] < strong[0]["mfu"]
    assert weak[-1]["mfu"] > 0.9 * weak[0]["mfu"]
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (f"{BIG} --cluster h100:8,nvlnk=2", "nvlnk is not one of peak, memory, hbm, nvlink, .*; did you mean nvlink"),
        (f"{BIG} --cluster nowhere.yaml", "--cluster nowhere.yaml: No such file or directory"),
        (f"{BIG} --cluster h100:many", "'many' is not a number"),
        (f"{BIG} --cluster h100:7,domain=x", "'x' is not a number"),
        (
            "--preset llama-3-8b --cluster h100:7 --pp 1 --global-batch-size 6",
            "no tp, cp, pp and micro-batch",
        ),
        (f"sweep {BIG} --cluster h100:8 --gpus 8", "must be FROM..TO"),
        ("guess", "megalite plan guess: must be one of search, explain, sweep"),
        (
            f"{BIG} --cluster",
            "megalite plan search: argument --cluster: expected one argument; see megalite plan search --help",
        ),
        (f"{BIG} --cluster machine:8", "no measurements are given; add --calibration FILE"),
        (f"{BIG} --cluster h100:8 --layout fast", "--layout fast: must be auto;"),
    ],
)
def test_mistakes_are_one_line(words: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected.replace("..", r"\.\.")):
        main(words.split())


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("not json", "is not JSON;"),
        ('[{"step": 1}]', "has no list of rows;"),
        ('{"rows": [{"id": "mine", "gpu": "h100"}]}', "its row 'mine' has no 'model';"),
        ('{"rows": [3]}', "a row without id is of another form;"),
    ],
)
def test_what_is_no_file_of_published_runs(text: str, rule: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        main(["check", "--reference", str(path)])
    assert f"--reference {path}: {rule} give published runs as in" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda tree: [1], "is not a calibration: it has no device;"),
        (lambda tree: {**tree, "constants": None}, "is not a calibration: it has no constants;"),
        (lambda tree: {**tree, "device": {"name": "x"}}, "of this version: device: no domain;"),
        (lambda tree: {**tree, "constants": {**tree["constants"], "speed": 1}}, "constants: an unknown speed;"),
        (lambda tree: {**tree, "constants": {**tree["constants"], "step": -1}}, "constant step -1: must be a number"),
    ],
)
def test_what_is_no_calibration(change: Callable[[Any], Any], rule: str, tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    write_calibration(path, DEVICES["h100"], FITTED)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(UserError) as caught:
        main(["explain", *BIG.split(), "--cluster", "machine:8", "--calibration", str(path)])
    assert rule in str(caught.value)


@pytest.mark.parametrize(
    ("cluster", "rule"),
    [
        ("h100:inf", "'inf' is not a number"),
        ("h100:8,domain=nan", "'nan' is not a number"),
        ("h100:12", "must be whole NVLink domains of 8"),
        ("h100:8,domain=0", "0 is not a whole number of GPUs"),
        ("h100:8,memory=-1", "must be above 0"),
    ],
)
def test_clusters_that_cannot_be(cluster: str, rule: str) -> None:
    with pytest.raises(UserError) as caught:
        Cluster.parse(cluster)
    assert rule in str(caught.value)


def test_a_cluster_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sheet = DEVICES["h800"]
    assert (sheet.peak, sheet.nvlink) == (989e12, 200e9)  # an H100 with 400 GB/s of NVLink, both directions
    file = tmp_path / "ours.yaml"
    file.write_text("base: h100\ngpus: 64\nnvlink: 200  # GB/s, one direction\n")
    layout = f"explain {BIG} --tp 8 --pp 4 --recompute full --json --cluster"
    times = [_printed(capsys, f"{layout} {name}") for name in ("h800:64", "h100:64,nvlink=200", str(file))]
    assert times[0] == times[1] == times[2] != _printed(capsys, f"{layout} h100:64")
    pairs = Cluster.parse(f"{file}:16,memory=48,domain=2,host=4")
    assert (pairs.gpus, pairs.domain, pairs.host, pairs.device.memory) == (16, 2, 4, 48e9)
    assert (pairs.device.name, pairs.device.nvlink, pairs.device.peak) == ("ours", 200e9, 989e12)


def test_hosts_are_larger_than_pairs_that_share_nvlink(capsys: pytest.CaptureFixture[str]) -> None:
    text = _printed(capsys, "--preset llama-3.2-1b --global-batch-size 64 --cluster l40s:32,domain=2")
    assert "torchrun --nnodes 4 --nproc-per-node 8 " in text


def test_sharding_over_dp_counts_as_simpler_than_a_pipeline() -> None:
    cfg = cli.parse(["--preset", "llama-3-8b", "--global-batch-size", "512", "--precision", "bf16"]).config
    best = pick(search(cfg, Cluster.parse("h100:64"), {"micro_batch_size", "recompute"}))
    assert best is not None
    assert (best.grid["dp"], best.options["zero"]) == (64, 3)


def test_a_batch_that_divides_badly_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--preset llama-3-8b --seq-len 4096 --cluster h100:64 --micro-batch-size 1 --recompute none"
    text = _printed(capsys, f"{flags} --global-batch-size 260")
    assert re.search(r"# note: 260 samples divide badly over 64 GPUs: with 256, \d+% more tokens/s", text)
    assert "divide badly" not in _printed(capsys, f"{flags} --global-batch-size 256")


def test_a_batch_that_no_number_of_replicas_divides_is_shared_unevenly() -> None:
    """Eight samples on seven GPUs: two passes, where one replica of a pipeline of seven would have eight."""
    cfg = cli.parse(["--preset", "llama-3.2-1b", "--global-batch-size", "8", "--precision", "bf16"]).config
    best = pick(search(cfg, Cluster.parse("h100:7"), {"micro_batch_size"}))
    assert best is not None
    assert (best.grid["dp"], best.cfg.num_microbatches(7)) == (7, 2)


def test_a_pipeline_layout_by_hand_is_in_both_forms_of_the_pick(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--preset llama-3.2-1b --global-batch-size 64 --cluster h100:8 --pp 2 --vp 1 --pipeline-layout 9,7 --zero 1"
    text = _printed(capsys, flags)
    assert "--pipeline-layout 9,7 " in text
    assert "\n  pipeline_layout: 9,7\n" in text


def test_what_was_assumed_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """A lead who gives no batch size gets a pick for 8 samples; a100 may mean 40 or 80 GB."""
    text = _printed(capsys, "--preset llama-3-8b --cluster a100:8 --tp 8 --micro-batch-size 1")
    note, machine, *_ = text.splitlines()
    assert "--global-batch-size is not given; 8 samples per step" in note
    assert "8 x a100-80g" in machine
