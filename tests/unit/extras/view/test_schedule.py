"""The drawing of a schedule, its trace, and the command over it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megalite.core.base.errors import UserError
from megalite.core.options.parallel import SCHEDULES
from megalite.core.parts.schedules.simulate import simulate
from megalite.core.pipeline.schedule import Costs, build_schedule
from megalite.extras.view.schedule import main, text_timeline
from megalite.extras.view.timeline import draw_figure, perfetto_trace

ROOT = Path(__file__).parents[4]


def test_text_timeline():
    text = text_timeline(simulate(build_schedule("1f1b", 2, 1, 3)))
    assert text.splitlines() == [
        "       t = 0",
        "rank 0 F0-F1-......B0----F2-B1----...B2----",
        "rank 1 ...F0-B0----F1-B1----F2-B2----......",
    ]


def test_text_timeline_names_chunks_and_wraps_without_losing_a_column():
    simulation = simulate(build_schedule("zb-v", 2, 2, 3))
    wide = text_timeline(simulation, width=1000).splitlines()
    assert wide[1].startswith("rank 0 F0a-F1a-F2a-F0b-I0b-")
    panels = [panel.splitlines() for panel in text_timeline(simulation, width=40).split("\n\n")]
    assert len(panels) > 1
    assert all(len(line) <= 40 for panel in panels for line in panel)
    for row in (1, 2):
        assert "".join(panel[row].removeprefix(f"rank {row - 1} ") for panel in panels) == wide[row][7:]


def test_perfetto_trace_holds_every_op_and_both_ends_of_every_transfer():
    simulation = simulate(build_schedule("interleaved", 2, 2, 4), Costs(transfer=0.5))
    trace = json.loads(json.dumps(perfetto_trace(simulation)))["traceEvents"]
    compute = [e for e in trace if e["ph"] == "X" and e["tid"] == 0]
    assert len(compute) == 2 * 2 * 4 * 2
    assert sum(e["dur"] for e in compute if e["pid"] == 0) == pytest.approx(simulation.busy[0] * 1000)
    for track in (1, 2):
        assert len([e for e in trace if e["ph"] == "X" and e["tid"] == track]) == sum(simulation.messages)
    begins = {e["id"]: e for e in trace if e["ph"] == "s"}
    ends = {e["id"]: e for e in trace if e["ph"] == "f"}
    assert len(begins) == sum(simulation.messages)
    assert all(ends[number]["pid"] == 1 - e["pid"] for number, e in begins.items())


def test_summary_on_the_terminal(capsys):
    main(["--schedule", "1f1b", "--pp", "4", "--num-microbatches", "8"])
    out = capsys.readouterr().out
    assert "step 33, ideal 24: bubble 37.50% of ideal" in out
    assert [line.split() for line in out.splitlines()[5:9]] == [
        ["0", "9", "4", "0", "1", "8"],
        ["1", "9", "3", "0", "2", "16"],
        ["2", "9", "2", "0", "2", "16"],
        ["3", "9", "1", "0", "2", "8"],
    ]
    assert "rank 3 .........F0-B0----" in out


def test_json(capsys):
    main(["--schedule", "zb-v", "--pp", "2", "--vp", "2", "-m", "4", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["makespan"] == 25
    assert report["bubble_over_ideal"] == pytest.approx(1 / 24)
    assert report["peak_act_chunks"] == [4, 4]
    assert report["peak_in_flight"] == [2, 2]
    assert report["msgs_sent"] == [8, 8]
    assert report["order_sha"] == "ba5a15d002ef4d7b"
    assert report["programs"][0][:3] == ["F0.0", "SF0.0@1", "F1.0"]


def test_compare_lists_all_that_can_run(capsys):
    main(["--schedule", "compare", "--pp", "4", "--vp", "2", "-m", "8"])
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines[1:]]
    assert names == [name for name, schedule in SCHEDULES.items() if schedule.vp in (None, 2)]
    assert lines[1 + names.index("zb-v")].split() == ["zb-v", "51", "6.25%", "4", "32"]


def test_auto_keeps_within_memory(capsys):
    main(["--schedule", "auto", "--pp", "4", "-m", "8", "--max-activations", "4"])
    assert capsys.readouterr().out.startswith("zb-h1:")


def test_pictures(tmp_path, capsys):
    png, svg, trace = tmp_path / "a.png", tmp_path / "a.svg", tmp_path / "a.json"
    command = ["--schedule", "zb-v", "--pp", "2", "--vp", "2", "-m", "3", "--transfer", "0.2"]
    main([*command, "--png", str(png), "--perfetto", str(trace)])
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert json.loads(trace.read_text())["traceEvents"]
    main([*command, "--png", str(svg)])
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")


def test_figure_draws_every_op_and_transfer_once():
    simulations = [
        simulate(build_schedule("zb-v", 2, 2, 3), Costs(transfer=0.2)),
        simulate(build_schedule("1f1b", 3, 1, 4)),
    ]
    panels = draw_figure(simulations).axes
    assert [len(axes.collections) for axes in panels] == [2 * 2 * 3 * 3, 3 * 4 * 2]
    assert [len(axes.lines) for axes in panels] == [sum(simulations[0].messages), 0]  # transfers of no length: none
    bars = [box.get_paths()[0].get_extents() for box in panels[1].collections]
    drawn = sorted((round(b.x0), round(b.x1), round((b.y0 + b.y1) / 2)) for b in bars)
    assert drawn == sorted((e.start, e.finish, e.rank) for e in simulations[1].compute)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--transfer", "-1"], ["--transfer -1.0", "0 or more"]),
        (["--forward", "nan"], ["--forward nan"]),
        (["--forward", "0", "--input-grad", "0", "--weight-grad", "0"], ["above 0"]),
        (["--jitter", "1"], ["--jitter 1.0", "below 1"]),
        (["--stage-scale", "1", "2"], ["--stage-scale 1.0 2.0", "pp * vp = 3"]),
        (["--stage-scale", "1", "nan", "1"], ["--stage-scale 1.0 nan 1.0"]),
        (["--max-activations", "4"], ["--max-activations 4", "--schedule auto"]),
        (["--vp", "2"], ["1f1b with vp 2"]),
        (["--vp", "1000000000"], ["--vp 1000000000", "more than 1000000"]),
        (["--png", "picture.xyz"], ["picture.xyz", ".svg"]),
        (["--perfetto", "no/such/place.json"], ["no/such/place.json", "cannot be written"]),
        (["--png", "no/such/place.png"], ["no/such/place.png", "cannot be written"]),
    ],
)
def test_mistakes(extra, words, capsys):
    with pytest.raises(UserError) as caught:
        main(["--schedule", "1f1b", "--pp", "3", "-m", "4", *extra])
    for word in words:
        assert word in str(caught.value)


def test_auto_and_compare_take_no_group_size():
    with pytest.raises(UserError, match="--group-size 4"):
        main(["--schedule", "auto", "--pp", "4", "--vp", "2", "-m", "8", "--group-size", "4"])
    with pytest.raises(UserError, match="one schedule"):
        main(["--schedule", "compare", "--pp", "2", "-m", "4", "--perfetto", "trace.json"])


def test_the_command_refuses_in_one_line_and_needs_no_torch():
    code = (
        "import runpy, sys\n"
        "sys.path[0] = 'tools'  # as where the file itself is run\n"
        "sys.argv = ['schedule.py', '--schedule', 'interleaved', '--pp', '4', '--vp', '2', '-m', '7']\n"
        "try: runpy.run_path('tools/schedule.py', run_name='__main__')\n"
        "finally: assert not {'torch', 'matplotlib'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "error: 7 micro-batches with schedule interleaved, pp 4 and groups of 4 (remainder 3): requires"
    )
