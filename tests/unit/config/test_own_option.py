"""Parts from outside bring their options: one file, and they are flags, text in --help, and keys of config.yaml."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from megalite.core.options.names import description_of
from megalite.runtime.options.fields import GROUPS, help_texts

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

DECAY = '''
from dataclasses import dataclass

from megalite.core.base.errors import in_range
from megalite.core.options.part import OptimPart


@dataclass(frozen=True)
class PowerOptions:
    decay_power: float = 2.0
    """power: exponent of what is left of the decay."""


class Power(OptimPart):
    options, after = PowerOptions, "lr_decay_steps"

    def __call__(self, step, cfg, end):
        left = max(0.0, (end - step) / (end - cfg.warmup_steps))
        return cfg.min_lr + (cfg.lr - cfg.min_lr) * left**cfg.decay_power

    def check_optim(self, cfg):
        in_range(cfg, "decay_power", 0, 10, above=True)


DECAY = Power()
'''

RULE = '''
from dataclasses import dataclass
from typing import Literal

from megalite.core.base.errors import require
from megalite.core.options.update_rule import UpdateRule


@dataclass(frozen=True)
class SignumOptions:
    signum_zero: Literal["stay", "move"] = "stay"
    """signum: what weights without a gradient do."""


class Signum(UpdateRule):
    about = "one bit of each momentum"
    states = ("sign_momentum",)
    options = SignumOptions

    def update(self, share, cfg): ...

    def check(self, cfg):
        given = f"--signum-zero {cfg.optim.signum_zero} with --zero {cfg.parallel.zero}"
        require(cfg.optim.signum_zero == "stay" or cfg.parallel.zero < 3, given, "moves padding", "drop one")


RULE = Signum()
'''

POSITION = '''
from dataclasses import dataclass

from megalite.core.base.errors import in_range
from megalite.core.options.choices import Position


@dataclass(frozen=True)
class SineOptions:
    sine_base: float = 10000.0
    """With --position sine: longest wavelength."""


class Sine(Position):
    added = True
    options = SineOptions

    def check_model(self, m):
        in_range(m, "sine_base", 1, 1e9)


POSITION = Sine()
'''

FILES = {
    "options/mean_of_past.py": PART,
    "decays/power.py": DECAY,
    "update/signum.py": RULE,
    "positions/sine.py": POSITION,
}

OPTIM = """
import dataclasses, json, sys
from megalite.core.base.errors import UserError
from megalite.core.options.lr import learning_rate
from megalite.core.options.model import ModelConfig
from megalite.core.options.optim import OptimConfig
from megalite.runtime.options import cli

cfg = cli.parse(sys.argv[1:]).config
def refused(make):
    try:
        make()
    except UserError as e:
        return str(e)
print(json.dumps([
    cli.to_yaml(cfg).split("optim:")[1],
    learning_rate(5, cfg.optim, 10),
    refused(lambda: OptimConfig(decay_power=11.0)),
    refused(lambda: cli.parse(["--vocab-size", "64", "--signum-zero", "move", "--zero", "3"])),
    refused(lambda: ModelConfig(sine_base=0.5)),
    refused(lambda: cli.parse(["--vocab-size", "64", "--position", "sine", "--mtp-num-layers", "1"])),
    cfg.model.sine_base,
]))
"""

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
    """Return a folder with a megalite that has further parts."""
    folder = tmp_path_factory.mktemp("own")
    shutil.copytree(ROOT / "megalite", folder / "megalite", ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in FILES.items():
        (folder / "megalite/core/parts" / name).write_text(text)
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


def test_one_file_of_a_table_brings_its_own(package: Path) -> None:
    """A decay, an update rule and a kind of positions: the part with its option, its range, and what it goes with."""
    chosen = ("--lr-decay", "power", "--decay-power", "3", "--optimizer", "signum", "--signum-zero", "move")
    more = ("--lr", "0.8", "--vocab-size", "64", "--position", "sine", "--sine-base", "100")
    found = json.loads(run(package, "-c", OPTIM, *chosen, *more).splitlines()[-1])
    text, rate, *errors, base = found
    names = [line.split(":")[0].strip() for line in text.splitlines()]
    assert names[names.index("lr_decay_steps") + 1] == "decay_power"
    assert names[names.index("eps") + 1 : names.index("eps") + 3] == ["muon_ns", "muon_momentum"]
    assert names[names.index("ademamix_warmup") + 1] == "signum_zero"
    assert (rate, base) == (pytest.approx(0.1), 100)
    assert errors == [
        "--decay-power 11.0: must be more than 0 and below 10; use a value in that range",
        "--signum-zero move with --zero 3: moves padding; drop one",
        "--sine-base 0.5: must be at least 1 and below 1000000000.0; use a value in that range",
        "--mtp-num-layers 1 with --position sine: embeddings of further tokens have no positions added to them; "
        "use --position rope",
    ]
    shown = run(package, "-m", "megalite", "train", "--help", "all")
    assert all(words in shown for words in ("--decay-power X", "--signum-zero {stay,move}", "--sine-base X"))
    assert "sgd (momentum --beta1), signum (one bit of each momentum). [adamw]" in " ".join(shown.split())


def test_an_entry_made_before_the_config_brings_its_own(tmp_path: Path) -> None:
    """As `mine.py` of docs/extending.md makes it, without a file in megalite."""
    mine = tmp_path / "mine.py"
    mine.write_text(
        RULE
        + """
from megalite.core.options.update_rule import RULES
RULES["signum"] = RULE
from megalite.core.options.optim import OptimConfig
from megalite.runtime.options import cli
from megalite.runtime.options.fields import help_texts

words = ["--vocab-size", "64", "--optimizer", "signum", "--signum-zero", "move"]
print(cli.parse(words).config.optim.signum_zero, help_texts(OptimConfig)["signum_zero"])
"""
    )
    assert run(ROOT, str(mine)) == "move signum: what weights without a gradient do.\n"


def test_help_lists_no_table_by_hand() -> None:
    """A sentence that names two entries beside {each} would not name the next one."""
    listed = 0
    for cls in GROUPS.values():
        texts = help_texts(cls)
        for option, hint in get_type_hints(cls, include_extras=True).items():
            if mark := description_of(hint):
                listed += mark.each in texts[option]
                left = texts[option].replace(mark.each, "")
                assert len(set(re.findall(r"[\w-]+", left)) & {*mark.table}) < 2, f"--{option}: {left}"
                # Other tests register parts of their own, of which they say nothing.
                own = [name for name, entry in mark.table.items() if entry.__module__.startswith("megalite.")]
                assert all(f"{name} (" in mark.each for name in own) == (mark.each in texts[option]), option
    assert listed == 5


def test_a_part_may_be_imported_before_the_model() -> None:
    """The class of all options imports every part, so a part that imported it would miss its own options."""
    script = (
        "import importlib, sys; importlib.import_module(sys.argv[1]); "
        "from megalite.core.options.step import StepConfig; "
        "c = StepConfig(); print(*c.model.__dataclass_fields__, *c.optim.__dataclass_fields__)"
    )
    parts = ROOT / "megalite/core/parts"
    modules = [f"options.{path.stem}" for path in sorted((parts / "options").glob("[a-z]*.py"))]
    modules += ["decays.published", "update.muon", "positions.rope"]
    expected = run(ROOT, "-c", script, "megalite.core.options.model")
    assert len(modules) >= 11
    for module in modules:
        assert run(ROOT, "-c", script, f"megalite.core.parts.{module}") == expected, module
