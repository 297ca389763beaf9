"""Earlier versions of megalite, out of the repository's history, refuse in one line what they cannot read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT
from tests.unit.checkpoint.differences import save

# The commits before manifests had version 2 (coded shards) and 3 (differences).
BEFORE = {2: "2bfb4db0c75b", 3: "96766e2000c7"}


@pytest.mark.full
@pytest.mark.parametrize("version", BEFORE)
def test_they_refuse_newer_manifests(tmp_path: Path, version: int) -> None:
    archive = subprocess.run(["git", "archive", BEFORE[version], "megalite"], cwd=ROOT, capture_output=True)
    if archive.returncode:
        pytest.skip(f"the history has no commit {BEFORE[version]}")
    subprocess.run(["tar", "-x", "-C", tmp_path], input=archive.stdout, check=True)
    save(tmp_path / "saved", [1, 2], 2)
    # The first is whole and coded, the second a difference of it.
    for number in (1, 2):
        command = [sys.executable, "-m", "megalite", "inspect", f"saved/model_0000000{number}"]
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        if number + 1 < version:
            assert done.returncode == 0, done.stderr
        else:
            assert done.returncode == 2
            (line,) = done.stderr.splitlines()
            assert f"has format version {number + 1}, not 1" in line
