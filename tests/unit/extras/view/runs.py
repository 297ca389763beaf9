"""Run folders that tests of the page make up."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megalite.core.parts.schedules.simulate import simulate
from megalite.core.pipeline.order import together
from megalite.core.pipeline.schedule import Costs, build_schedule

HOSTILE = [
    "</script><script>window.pwned=1</script>",
    "<!--<script>",
    '"><img src=x onerror=window.pwned=1>',
    "\u2028 \u202egnirts",
    "\ud800",
    "](javascript:window.pwned=1)",
    "__proto__",
    "constructor",
    "a" * 100_000,
]


def write(run_dir: Path, lines: list[Any]) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (run_dir / "metrics.jsonl").write_text("".join(f"{text}\n" for text in texts))
    return run_dir


def hostile_run(folder: Path) -> Path:
    lines: list[Any] = [{"event": "start", "step": 0, "ranks": 1}]
    for i, text in enumerate(HOSTILE):
        lines.append({"step": i + 1, "loss": 2.0 - i / 8, text: float(i), "consumed_tokens": 2**30 + i})
        lines.append({"event": text, "step": i + 1, text: text, "nested": {"a": [text]}})
    lines += ['{"step": 10, "loss": NaN, "lr": 1e999}', '{"step": 11, "loss": 18446744073709551616}', "not json", "[]"]
    lines += [
        "[" * 100_000,
        "",
        '{"step": 9223372036854775808, "loss": 1}',
        '{"step": -1}',
        '{"event": 3, "step": "x"}',
        '{"event": "save", "step": 11, "time": "x"}',
        '{"event": "save", "step": 11, "time": 1e300}',
    ]
    run = write(folder / "run <b>&\u202e", lines)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 12, "lo')
    (run / "config.yaml").write_text("model: <script>")
    os.mkfifo(run / "experts.jsonl")
    (run / "schedule").mkdir()
    os.mkfifo(run / "schedule" / "pipeline_rank_0.jsonl")
    for name, content in {
        "step_00000001": "{",
        "step_00000002": "",
        "step_00000003": '{"step": "<b>", "files": 3}',
    }.items():
        (run / "checkpoints" / name).mkdir(parents=True)
        (run / "checkpoints" / name / "manifest.json").write_text(content)
    (run / "checkpoints/step_00000004").symlink_to("step_00000004")
    (run / "checkpoints/step_00000005").mkdir()
    os.mkfifo(run / "checkpoints/step_00000005/manifest.json")
    (run / "logs").symlink_to("logs")
    return run


def record_schedule(run: Path, name: str, vp: int, costs: Costs) -> float:
    """Write what `--record-schedule` would, had the plan come true: of a pair the backward pass takes no time.

    Returns:
        Milliseconds that the step takes.
    """
    schedule = build_schedule(name, 2, vp, 8)
    plan = simulate(schedule, costs)
    times = {str(event.op): (event.start, event.finish) for event in (*plan.compute, *plan.transfers)}
    (run / "schedule").mkdir(parents=True)
    for rank, program in enumerate(schedule.programs):
        rows: list[list[Any]] = []
        free = 0.0
        for op, *beside in together(program):
            ready, done = times.get(str(op), (0.0, 0.0))
            if beside:
                done = times[str(beside[0])][1]
            begun, free = (free, done) if op.is_compute else (ready, free)
            rows.append([str(op), begun / 1e3, ready / 1e3, done / 1e3])
            rows += [[str(other), done / 1e3, done / 1e3, done / 1e3] for other in beside]
        head = {"schedule": name, "pp": 2, "vp": vp, "num_microbatches": 8, "pipeline_rank": rank, "device": "cpu"}
        lines = [head, {"step": 3, "ops": rows}]
        (run / f"schedule/pipeline_rank_{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return plan.makespan
