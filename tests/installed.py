"""megalite as users have it: installed from its wheel, without the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.ranks import ROOT

FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "constraints.txt", "pretrain_gpt.py")
Installed = Callable[..., "subprocess.CompletedProcess[str]"]


def install(tmp: Path) -> Installed:
    """Run programs of an environment that has megalite from its wheel, in an empty folder.

    The packages that megalite depends on are those of the environment that runs the tests.
    """
    for name in ("csrc", "megalite"):
        shutil.copytree(ROOT / name, tmp / "source" / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, tmp / "source")
    # Native kernels have tests of their own.
    environment = {**os.environ, "MEGALITE_CUDA": "0", "CXX": "/no/compiler"}
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(tmp), str(tmp / "source")]
    subprocess.run([*pip, *build], env=environment, check=True)
    (wheel,) = tmp.glob("megalite-*.whl")
    venv.create(tmp / "env", with_pip=False)
    python = tmp / "env" / "bin" / "python"
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)], check=True)
    (site,) = (tmp / "env" / "lib").glob("python*/site-packages")
    # As lines of plain folders, whose own .pth files, with the checkout in them, are not read.
    shared = [path for path in sys.path if Path(path).name == "site-packages"]
    (site / "shared.pth").write_text("".join(f"{path}\n" for path in shared))
    shutil.copy(ROOT / "tests" / "site" / "sitecustomize.py", site)
    # The program of the environment that has torch would start that environment's Python.
    torchrun = python.with_name("torchrun")
    torchrun.write_text(f'#!/bin/sh\nexec "{python}" -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    (tmp / "work").mkdir()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment["PATH"] = f"{python.parent}{os.pathsep}{environment['PATH']}"

    def run(program: str, *words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        place: dict[str, Any] = {"cwd": folder or tmp / "work", "env": environment, "timeout": 500}
        # The environment's own, as its PATH finds it.
        command = [shutil.which(program, path=environment["PATH"]) or program, *words]
        return subprocess.run(command, capture_output=True, text=True, **place)

    places = "import megalite, pretrain_gpt, sys; print(megalite.__file__, pretrain_gpt.__file__, *sys.path)"
    printed = run("python", "-c", places)
    assert printed.returncode == 0, printed.stderr
    package, script, *path = printed.stdout.split()
    assert (Path(package), Path(script)) == (site / "megalite/__init__.py", site / "pretrain_gpt.py")
    assert str(ROOT) not in path
    return run
