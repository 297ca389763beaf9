"""A part from outside brings its options: one file, and they are flags, text in --help, and keys of config.yaml."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

PART = '''
from dataclasses import dataclass

from megalite.core.base.errors import in_range, require
from megalite.core.options.part import PartRules


@dataclass(frozen=True)
class MeanOptions:
    mean_of_past_freq: int = 0
    """Every n-th layer is the mean of the past; 0: none."""
    mean_of_past_width: int | None = None
    """With --mean-of-past-freq: width of the mean. Default: --hidden-size."""


class MeanRules(PartRules):
    options, after = MeanOptions, "v_head_dim"

    def derived(self, m):
        given = m.mean_of_past_freq and m.mean_of_past_width is None
        return {"mean_of_past_width": m.hidden_size} if given else {}

    def check_model(self, m):
        in_range(m, "mean_of_past_freq", 0, 100)
        given = f"--mean-of-past-width {m.mean_of_past_width}"
        require(m.mean_of_past_freq or m.mean_of_past_width is None, given, "there is no mean", "drop it")


PART = MeanRules()
'''

SCRIPT = """
import dataclasses, json, sys
from megalite.core.base.errors import UserError
from megalite.core.options.model import ModelConfig
from megalite.runtime.options import cli
from megalite.runtime.options.fields import help_texts

model = cli.parse(sys.argv[1:]).config.model
try:
    refused = ModelConfig(mean_of_past_width=8)
except UserError as e:
    refused = str(e)
text = help_texts(ModelConfig)["mean_of_past_freq"]
again = ModelConfig.from_dict(json.loads(json.dumps(dataclasses.asdict(model))))
print(json.dumps([dataclasses.asdict(model), refused, text, again == model]))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a megalite that has a further part."""
    folder = tmp_path_factory.mktemp("own")
    shutil.copytree(ROOT / "megalite", folder / "megalite", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "megalite/core/parts/options/mean_of_past.py").write_text(PART)
    return folder


def run(folder: Path, *arguments: str) -> str:
    """Run Python on that package alone. -S: an editable installation would find the checkout."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    command = (sys.executable, "-S", *arguments)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_file_adds_options(package: Path) -> None:
    model, refused, text, again = json.loads(
        run(package, "-c", SCRIPT, "--mean-of-past-freq", "2", "--vocab-size", "64").splitlines()[-1]
    )
    # After the delta nets, which follow the same option and come before in the alphabet.
    names = list(model)
    at = names.index("linear_conv_kernel_dim")
    assert names[at + 1 : at + 4] == ["mean_of_past_freq", "mean_of_past_width", "ffn_hidden_size"]
    assert (model["mean_of_past_freq"], model["mean_of_past_width"]) == (2, 256)
    assert refused == "--mean-of-past-width 8: there is no mean; drop it"
    assert text == "Every n-th layer is the mean of the past; 0: none."
    assert again
    assert "--mean-of-past-width" in run(package, "-m", "megalite", "train", "--help", "all")


def test_a_part_may_be_imported_before_the_model() -> None:
    """The class of all options imports every part, so a part that imported it would miss its own options."""
    script = (
        "import importlib, sys; importlib.import_module(sys.argv[1]); "
        "from megalite.core.options.model import ModelConfig; print(*ModelConfig.__dataclass_fields__)"
    )
    modules = sorted(path.stem for path in (ROOT / "megalite/core/parts/options").glob("[a-z]*.py"))
    expected = run(ROOT, "-c", script, "megalite.core.options.model")
    assert len(modules) >= 9
    for module in modules:
        assert run(ROOT, "-c", script, f"megalite.core.parts.options.{module}") == expected, module
