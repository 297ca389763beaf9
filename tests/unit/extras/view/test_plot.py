"""`megalite plot`: what is in the picture, and its errors."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megalite.core.base.errors import UserError
from megalite.extras.view.command import plot as main
from megalite.extras.view.runs import draw, load_runs

TOOL = Path(__file__).parents[4] / "tools" / "plot.py"


def write_run(folder: Path, losses: list[float | None], extra: tuple[str, ...] = ()) -> Path:
    folder.mkdir(parents=True)
    lines = []
    for step, loss in enumerate(losses, start=1):
        record = {"step": step, "loss": loss, "grad_norm": 1.0, "lr": 0.5 / step, "step_time_s": 30.0}
        lines.append(json.dumps({**record, "consumed_tokens": 1000 * step}))
    (folder / "metrics.jsonl").write_text("\n".join([*lines, *extra]) + "\n")
    return folder


def heights(line: Any) -> list[float]:
    return list(line.get_ydata())


def curves(figure: Any, panel: int) -> dict[str, tuple[list[float], list[float]]]:
    """Points of a panel's lines by label."""
    lines = figure.axes[panel].get_lines()
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in lines}


def test_losses_and_evaluations_of_several_runs(tmp_path: Path) -> None:
    evals = ('{"event": "eval", "step": 2, "loss": 9.0}', '{"event": "eval", "step": 2, "loss": 2.5}', '{"event": "x"}')
    first = write_run(tmp_path / "a", [4.0, 3.0, 2.0], evals)
    second = write_run(tmp_path / "b", [5.0, 4.0])
    figure = draw(load_runs([first, second], "step"), "step")
    loss = curves(figure, 0)
    assert loss == {
        "a": ([1.0, 2.0, 3.0], [4.0, 3.0, 2.0]),
        "a, evaluation": ([2.0], [2.5]),
        "b": ([1.0, 2.0], [5.0, 4.0]),
    }
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "loss",
        "learning rate",
        "gradient norm before clipping",
    ]
    assert [heights(line)[0] for line in figure.axes[1].get_lines()] == [0.5, 0.5]
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["a", "a, evaluation", "b"]


def test_metrics_of_tasks_have_panels(tmp_path: Path) -> None:
    """Without their standard errors; a run that has none stays out."""
    tasks = [{"piqa/acc": 0.5 + step / 10, "piqa/acc_stderr": 9.0, "wiki/word_perplexity": 7.0} for step in (1, 3)]
    lines = [json.dumps({"event": "eval_tasks", "step": 2 * i + 1, **told}) for i, told in enumerate(tasks)]
    first, second = write_run(tmp_path / "a", [4.0, 3.0, 2.0], tuple(lines)), write_run(tmp_path / "b", [5.0])
    figure = draw(load_runs([first, second], "step"), "step")
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[3:] == ["tasks: share of right answers", "tasks: perplexity"]
    assert curves(figure, 3) == {"a, piqa/acc": ([1.0, 3.0], [0.6, 0.8])}
    assert curves(figure, 4) == {"a, wiki/word_perplexity": ([1.0, 3.0], [7.0, 7.0])}


def test_a_step_run_again_counts_with_its_last_line(tmp_path: Path) -> None:
    again = json.dumps({"step": 2, "loss": 8.0, "grad_norm": 1.0, "lr": 1.0})
    figure = draw(load_runs([write_run(tmp_path / "a", [4.0, 3.0, 2.0], (again,))], "step"), "step")
    assert curves(figure, 0)["a"][1] == [4.0, 8.0, 2.0]


@pytest.mark.parametrize(
    ("x", "places", "label"),
    [("tokens", [1000.0, 2000.0], "tokens"), ("time", [30.0, 60.0], "time in training steps (seconds)")],
)
def test_other_axes(tmp_path: Path, x: str, places: list[float], label: str) -> None:
    figure = draw(load_runs([write_run(tmp_path / "a", [4.0, 3.0])], x), x)
    assert curves(figure, 0)["a"][0] == pytest.approx(places)
    assert figure.axes[0].get_xlabel() == label


def test_long_runs_get_a_median_that_does_not_lag(tmp_path: Path) -> None:
    losses: list[float | None] = [10 - step / 100 for step in range(400)]
    losses[100], losses[200] = 1000.0, None  # a spike, and a loss that was not finite
    figure = draw(load_runs([write_run(tmp_path / "a", losses)], "step"), "step")
    pale, median = figure.axes[0].get_lines()
    assert math.isnan(heights(pale)[200])
    assert heights(pale)[100] == 1000.0
    assert heights(median) == pytest.approx([10 - step / 100 for step in range(400)], abs=0.011)


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / part / "run", [1.0]) for part in ("x", "y")]
    assert [run.name for run in load_runs(folders, "step")] == [str(folder) for folder in folders]


def test_the_tool_writes_a_picture_and_leaves_out_a_broken_line(tmp_path: Path) -> None:
    deep, huge = "[" * 100_000 + "]" * 100_000, "1" + "0" * 400
    broken = (f'{{"step": 3, "loss": {deep}}}', f'{{"step": {huge}, "loss": 1.0}}', f'{{"step": 3, "loss": {huge}}}')
    run = write_run(tmp_path / "a", [4.0, 3.0], (*broken, '{"step": 3, "lo'))
    out = tmp_path / "pictures" / "loss.png"
    done = subprocess.run([sys.executable, TOOL, run, "--out", out], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"wrote {out}\n")
    for line in range(3, 7):
        assert f"metrics.jsonl line {line} is broken and skipped" in done.stderr
    assert out.read_bytes().startswith(b"\x89PNG")
    assert out.stat().st_size > 20_000


def test_runs_without_steps_or_what_the_axis_needs(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").touch()
    with pytest.raises(UserError, match=r"empty: metrics\.jsonl in it has no step; wait"):
        load_runs([empty], "step")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    with pytest.raises(UserError, match=r"--x tokens: .* has steps without consumed_tokens; use --x step"):
        load_runs([bare], "tokens")
    assert load_runs([bare], "step")[0].xs("step") == [1.0]


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    run = str(write_run(tmp_path / "a", [4.0]))
    with pytest.raises(UserError, match=r"--out .*f\.docx: .*use a name that ends in \.png"):
        main([run, "--out", str(tmp_path / "f.docx")])
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        main([run, "--out", str(tmp_path / "file" / "f.png")])
