"""`--help`: a short list, a full one, metavars that say what a value is, and no import of torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.core.parts.families import PRESETS
from megalite.extras.compat.dialect import DIALECT
from megalite.extras.compat.help import COMMON, COMPATIBILITY, METAVARS, help_text, show_help_if_asked
from megalite.runtime.options.dialect import PLAIN, Dialect
from megalite.runtime.options.fields import GROUP_OF, TYPES, StartOptions

ROOT = Path(__file__).resolve().parents[4]


def sections(text: str) -> dict[str, dict[str, str]]:
    """Heading -> {option: what is printed after its flag, as one line}."""
    found: dict[str, dict[str, str]] = {}
    for title, body in re.findall(r"^(\w+):\n(.*?)(?=^\w+:$|\Z)", text, re.M | re.S):
        entries = re.findall(r"^  --(?:\[no-\])?([\w-]+)(.*?)(?=^  --|\Z)", body, re.M | re.S)
        found[title] = {flag.replace("-", "_"): " ".join(rest.split()) for flag, rest in entries}
    return found


@pytest.mark.parametrize("dialect", [PLAIN, DIALECT])
def test_all_of_the_help_explains_every_option_once(dialect: Dialect) -> None:
    text = help_text("pretrain_gpt.py", dialect, everything=True)
    shown = sections(text)
    names = [name for options in shown.values() for name in options]
    assert sorted(names) == sorted([*GROUP_OF, *dialect.start.__dataclass_fields__])
    for options in shown.values():
        for name, line in options.items():
            assert len(line.split()) >= 4, f"--{name} has no explanation"
    assert {*shown["compatibility"]} == {*COMPATIBILITY.split()} & {*names}
    assert all(preset in text for preset in PRESETS)
    assert shown["train"]["precision"].startswith("{fp32,bf16,fp16} ")
    assert shown["train"]["precision"].endswith(" [fp32]")


def test_the_help_shows_the_common_options(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--tp", "2", "--help"], ["-h"]):
        with pytest.raises(SystemExit) as caught:
            show_help_if_asked(words, dialect=DIALECT)
        assert caught.value.code == 0
        shown = sections(capsys.readouterr().out)
        assert {group: {*options} for group, options in shown.items()} == {g: {*n.split()} for g, n in COMMON.items()}
    assert 40 <= sum(map(len, shown.values())) <= 50
    with pytest.raises(SystemExit):
        show_help_if_asked(["--help", "all"])
    assert len(sections(capsys.readouterr().out)["run"]) > 20


def test_tables_name_options_in_their_groups() -> None:
    start = {*DIALECT.start.__dataclass_fields__}
    for group, names in COMMON.items():
        assert all(GROUP_OF.get(name, "start") == group for name in names.split())
    tables = [*COMMON.values(), COMPATIBILITY, *METAVARS.values()]
    assert {*" ".join(tables).split()} <= {*TYPES, *start}
    assert not {*" ".join(COMMON.values()).split()} & {*COMPATIBILITY.split()}
    assert {*StartOptions.__dataclass_fields__} < start


def test_the_help_of_the_script_needs_no_torch() -> None:
    code = "import runpy, sys; sys.modules.update(torch=None, numpy=None); sys.argv = ['', '--help', 'all']; "
    code += "runpy.run_path('pretrain_gpt.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "tp" in sections(done.stdout)["parallel"]
