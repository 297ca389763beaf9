"""Run folders that tests of the page make up."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

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
    return run
