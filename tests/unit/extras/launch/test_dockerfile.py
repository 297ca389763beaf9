"""The Dockerfile: built where Docker runs, else checked for what can be checked without."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
KNOWN = {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "CMD"}


def instructions() -> list[tuple[str, str]]:
    """(instruction, the rest of its line), continued lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in text.splitlines() if line.strip()]


def test_every_instruction_is_sound() -> None:
    found = instructions()
    assert {name for name, _ in found} <= KNOWN
    assert [name for name, _ in found[:2]] == ["ARG", "FROM"]
    for name, rest in found:
        if name == "RUN":
            assert subprocess.run(["sh", "-n", "-c", rest]).returncode == 0, rest
        if name == "CMD":
            # A list: the program itself is the first process, and gets the signals.
            assert isinstance(json.loads(rest), list)
    (workdir,) = [rest for name, rest in found if name == "WORKDIR"]
    assert workdir == "/workspace", "the default --dir in images"


def test_what_it_copies_is_there_and_what_is_built_is_not() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    sources = [source for name, rest in instructions() if name == "COPY" for source in rest.split()[:-1]]
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not any(fnmatch.fnmatch(source, pattern) for pattern in ignored), source
    # Libraries of this machine would hide those that the image builds.
    assert {"**/*.so", ".git", ".venv", "runs"} <= set(ignored)


@pytest.mark.slow
def test_it_builds() -> None:
    if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("needs a running Docker")
    command = ["docker", "build", "--quiet", "."]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    image = built.stdout.strip()
    try:
        train = "megalite train --nproc 2 --mock-data --vocab-size 64 --device cpu --train-steps 1 --run-dir /tmp/run"
        ran = subprocess.run(["docker", "run", "--rm", image, *train.split()], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
    finally:
        subprocess.run(["docker", "image", "rm", "--force", image], capture_output=True)
