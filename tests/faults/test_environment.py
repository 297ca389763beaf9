"""Variables that a launcher sets, set wrongly: one line, exit 2, and no rank that waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.harness import PAIRED
from tests.faults.zygote import Zygote


@pytest.mark.parametrize(
    ("env", "line"),
    [
        ({"WORLD_SIZE": "abc"}, "error: WORLD_SIZE 'abc': must be an integer from 1 to "),
        ({"WORLD_SIZE": "0"}, "error: WORLD_SIZE '0': must be an integer from 1 to "),
        ({"RANK": "x"}, "error: RANK 'x': must be an integer from 0 to "),
        ({"RANK": "9" * 5000}, "error: RANK '999"),
        ({"LOCAL_RANK": "x"}, "error: LOCAL_RANK 'x': must be an integer from 0 to "),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "[rank 2] error: RANK '2': must be an integer from 0 to 1; "),
        ({"WORLD_SIZE": "2", "MASTER_PORT": "99999"}, "error: MASTER_PORT '99999': must be an integer from 1 to 6"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "no.such.invalid"}, "error: MASTER_ADDR 'no.such.invalid': does not res"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "a" * 70}, f"error: MASTER_ADDR '{'a' * 70}': does not resolve on "),
    ],
)
def test_one_line_and_2(zygote: Zygote, tmp_path: Path, env: dict[str, str], line: str) -> None:
    (left,) = zygote.start([*PAIRED, "--run-dir", str(tmp_path / "run")], 1, tmp_path, env=env).end()
    assert left.code == 2
    assert left.err.startswith(line), left.err
    assert left.err.count("\n") == 1
    assert not (tmp_path / "run").exists()
