"""The first hour of seven people, as scripts that run with the installed wheel in an empty folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.installed import Installed
from tests.ranks import ROOT

SCRIPTS = ROOT / "tests" / "newcomers"
PEOPLE = ("lead", "student", "researcher", "data", "hugging_face", "megatron", "deepspeed")


@pytest.mark.full
@pytest.mark.parametrize("who", PEOPLE)
def test_a_first_hour(installed: Installed, tmp_path: Path, who: str) -> None:
    if who == "hugging_face":
        pytest.importorskip("transformers")
    done = installed("bash", "-x", str(SCRIPTS / f"{who}.sh"), folder=tmp_path)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def test_every_script_is_run() -> None:
    assert {path.stem for path in SCRIPTS.iterdir()} == {*PEOPLE}
