"""The first hour of seven people, as scripts that run with the installed wheel in an empty folder."""

from __future__ import annotations

import re
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


@pytest.mark.full
def test_their_file_is_our_run(installed: Installed, tmp_path: Path) -> None:
    """The commands of the page, from top to bottom, print what it shows."""
    page = (ROOT / "docs" / "their_file.md").read_text()
    commands, shown = (re.findall(rf"^```{sort}\n(.*?)^```$", page, re.M | re.S) for sort in ("bash", "text"))
    (tmp_path / "page.sh").write_text("set -euo pipefail\n" + "".join(commands))
    done = installed("bash", "page.sh", folder=tmp_path)
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-3000:]
    for line in "".join(shown).splitlines():
        assert f"\n{line}" in printed, line
    assert (tmp_path / "out" / "config.json").exists()


def test_every_script_is_run() -> None:
    assert {path.stem for path in SCRIPTS.iterdir()} == {*PEOPLE}
