"""What the planner says of `--save-code`: two saves of one host, one coded, written out in seconds."""

from __future__ import annotations

import re

import pytest

from megalite.extras.plan.command import main
from megalite.extras.plan.saves import CODING, LEFT


@pytest.mark.parametrize(("gpus", "ranks"), [(64, 8), (4, 4)])
def test_coded_saves_are_shorter_below_the_speed_that_it_says(
    capsys: pytest.CaptureFixture[str], gpus: int, ranks: int
) -> None:
    flags = ["--preset", "llama-3-8b", "--global-batch-size", "64", "--tp", "4", "--cluster", f"h100:{gpus}"]
    main(["explain", *flags])
    assert "--save-code" not in capsys.readouterr().out
    main(["explain", *flags, "--save-every", "500"])
    said = re.search(r"the (\d+) ranks of a host write or upload less than ([\d.]+) GB/s", capsys.readouterr().out)
    assert said is not None
    assert int(said[1]) == ranks
    size, speed = 10e9, float(said[2]) * 1e9
    for factor, shorter in ((0.9, True), (1.1, False)):
        plain = ranks * size / (factor * speed)
        coded = size / CODING + LEFT * ranks * size / (factor * speed)
        assert (coded < plain) == shorter
