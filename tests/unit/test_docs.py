"""The user's pages say what is so: links, flags, commands and figures are checked against the code."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from megalite.core.base.errors import UserError
from megalite.core.mesh.grid import Grid
from megalite.core.parts.schedules.choose import USUAL_COSTS, Request, choose_schedule, simulate_all
from megalite.core.pipeline.schedule import build_schedule
from megalite.extras.command import COMMANDS
from megalite.extras.compat.dialect import DIALECT
from megalite.extras.compat.refusals import MEGATRON, TRAINER, find_refusal
from megalite.extras.compat.table import all_patterns
from megalite.extras.compat.trainer import FLAGS
from megalite.extras.plan.report import dry_run_report
from megalite.runtime.options import cli
from megalite.runtime.options.fields import TYPES

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("README*.md"), ROOT / "SECURITY.md", *(ROOT / "docs").glob("*.md")])
SCRIPTS = (
    "examples/*.py",
    "benchmarks/**/*.py",
    "*.py",
    "examples/*.sh",
    "tests/*.sh",
    "megalite/extras/launch/*.sbatch",
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
CODE = re.compile(r"`([^`\n]+)`")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def bash_blocks() -> list[tuple[str, str]]:
    return [(name(page), text) for page in PAGES for kind, text in FENCE.findall(page.read_text()) if kind == "bash"]


def commands() -> list[tuple[str, str]]:
    """(page, command) of every line of a bash block, continued lines joined, comments left out."""
    lines = [(page, line) for page, text in bash_blocks() for line in text.replace("\\\n", " ").splitlines()]
    return [(page, re.sub(r"(^|\s)#.*", "", line).strip()) for page, line in lines if line.strip()]


# ------------------------------------------------------------------------------------------------------------ links


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text()
    assert [p.name for p in (ROOT / "docs").glob("*.md") if p.name != "README.md" and f"]({p.name})" not in index] == []


def test_named_tests_exist() -> None:
    """Tables that prove what they say by tests name each by its function."""
    found = {
        t for f in (ROOT / "tests").rglob("test_*.py") for t in re.findall(r"^def (test_\w+)", f.read_text(), re.M)
    }
    named = {t for page in PAGES for t in re.findall(r"`(test_\w+)`", page.read_text())}
    assert len(named) > 50
    assert not named - found


def test_pictures_are_small_and_shown() -> None:
    shown = "".join(page.read_text() for page in PAGES)
    pictures = list((ROOT / "docs/images").iterdir())
    assert pictures
    for picture in pictures:
        assert picture.stat().st_size < 100_000, picture
        assert f"images/{picture.name})" in shown, f"{picture} is on no page"


# ------------------------------------------------------------------------------------------------- flags and commands


@cache
def trainer_flags() -> set[str]:
    """Flags of pretrain_gpt.py, ours and theirs (those refused by name as well: pages say that they are refused)."""
    options = [*TYPES, *DIALECT.start.__dataclass_fields__, *(f"no_{option}" for option in TYPES)]
    refused = all_patterns([*MEGATRON, *TRAINER])
    theirs = [*DIALECT.renamed, *DIALECT.switches, *DIALECT.computed, *FLAGS, *refused]
    return {"--help", *(f"--{option.replace('_', '-')}" for option in options), *(f"--{flag}" for flag in theirs)}


@cache
def flags_in_source(path: Path) -> set[str]:
    """Flags written out in a program, and in the modules of megalite that it imports by name."""
    text = path.read_text()
    modules = re.findall(r"^ *from (megalite[\w.]*) import", text, re.M)
    sources = [ROOT / (m.replace(".", "/") + ".py") for m in modules if not m.endswith("errors")]
    texts = [text, *(s.read_text() for s in sources if s.exists())]
    return {flag for t in texts for flag in re.findall(r"--[a-z][\w-]*", t)}


def file_of(command: str) -> Path:
    """The module of a `megalite` command."""
    module, _, _ = COMMANDS[command].place.partition(":")
    return ROOT / "megalite/extras" / f"{module.replace('.', '/')}.py"


@cache
def other_flags() -> set[str]:
    """Flags of the scripts and tools, and of those programs of others that the pages call."""
    files = [path for pattern in SCRIPTS for path in ROOT.glob(pattern)]
    files += [path for room in ("extras/launch", "data", "ops") for path in (ROOT / "megalite" / room).glob("*.py")]
    files += [
        *(file_of(command) for command in COMMANDS),
        *(ROOT / f"tests/{part}/__main__.py" for part in ("golden", "soak")),
    ]
    theirs = {"--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--standalone"}
    # docker, pyxis, apptainer
    theirs |= {"--build-arg", "--gpus", "--ipc", "--shm-size", "--ulimit", "--cap-add", "--device", "--network", "--rm"}
    theirs |= {"--container-image", "--container-mounts", "--container-workdir", "--nv", "--bind"}
    theirs |= {"--local-dir", "--logdir", "--capture-range", "--capture-range-end"}  # hf, tensorboard, nsys
    return theirs.union(*(flags_in_source(path) for path in files))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_flags_exist(page: Path) -> None:
    known = trainer_flags() | other_flags()
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*(?![\w*-])", page.read_text()))
    unknown = [flag.replace("_", "-") for flag in named if flag.replace("_", "-") not in known]
    assert sorted(flag for flag in unknown if not find_refusal(flag[2:], [])) == []


def program_of(words: list[str]) -> tuple[str, Path, list[str]] | None:
    """The program of ours that a command runs: its name, its file, and the words after it."""
    for i, word in enumerate(words):
        if word == "megalite" and i + 1 < len(words):
            return words[i + 1], file_of(words[i + 1]), words[i + 2 :]
        if word.endswith((".py", ".sh")) and not word.startswith("-") and "=" not in word:
            return word, ROOT / word, words[i + 1 :]
    return None


@pytest.mark.parametrize(("page", "command"), commands())
def test_commands_name_programs_and_flags_that_exist(page: str, command: str) -> None:
    program = program_of(command.split())
    if program is None:
        return
    name, path, own = program
    assert path.exists(), f"{page}: {command}"
    named = {word.partition("=")[0] for word in own if word.startswith("--") and word != "--"}
    known = set() if name == "pretrain_gpt.py" else flags_in_source(path)
    if name in ("pretrain_gpt.py", "train", "plan", "estimate"):
        known = known | trainer_flags()
    if "--" not in own:
        assert named <= known, f"{page}: {command}: {named - known}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_programs_named_in_the_text_exist(page: Path) -> None:
    text = page.read_text()
    named = re.findall(
        r"(?:python|bash|torchrun [^`\n]*?) ((?:tools|examples|tests|benchmarks)/[\w./-]+|\w+\.py)", text
    )
    modules = re.findall(r"python -m (megalite[\w.]*)", text)
    named_commands = re.findall(r"(?:^ {4}|`|-m )megalite ([a-z][\w-]*)", text, re.M)
    places = [ROOT / m.replace(".", "/") for m in modules]
    assert [n for n in named if not (ROOT / n).exists()] == []
    assert [command for command in named_commands if command not in COMMANDS] == []
    assert [p for p in places if not p.with_suffix(".py").exists() and not (p / "__main__.py").exists()] == []


@pytest.mark.parametrize(("page", "text"), bash_blocks())
def test_bash_blocks_are_bash(page: str, text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert done.returncode == 0, f"{page}: {done.stderr}"


@pytest.mark.parametrize(("page", "command"), [c for c in commands() if "pretrain_gpt.py" in c[1] and "…" not in c[1]])
def test_training_commands_are_accepted(page: str, command: str) -> None:
    """As they stand; a launcher's words before the program are left out."""
    cli.parse(shlex.split(command.partition("pretrain_gpt.py")[2]), dialect=DIALECT)


# ---------------------------------------------------------------------------------------------------------- figures


def marked(page: str, mark: str) -> list[tuple[str, str]]:
    """(words of the mark, what follows it up to an empty line or the end of a fence)."""
    text = (ROOT / "docs" / page).read_text()
    found = re.findall(rf"<!-- {mark}(.*?) -->\n(?:```\n(.*?)\n```|((?:\|[^\n]*\n)+))", text, re.S)
    assert found, f"{page} has no {mark}"
    return [(words.strip(), fenced or table) for words, fenced, table in found]


def rows(table: str) -> Iterator[list[str]]:
    """Cells of a Markdown table's body."""
    for line in table.splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def report(world: int, flags: str) -> str:
    config = cli.parse(flags.split(), dialect=DIALECT).config
    return dry_run_report(config, Grid.from_config(config.parallel, world))


def test_dry_run_on_the_page_is_the_tools() -> None:
    for words, shown in marked("layout.md", "dry-run"):
        world, flags = words.split(": ")
        assert report(int(world), flags) == shown


def test_memory_tables() -> None:
    for words, table in [*marked("layout.md", "table"), *marked("plan.md", "table")]:
        world, common = words.split(": ")
        for flags, memory, schedule, bubble in rows(table):
            said = report(int(world), f"{common} {flags.strip('`')}")
            found = re.search(r"most memory: (\S+ \w+)", said)
            assert found is not None, flags
            assert found[1] == f"{memory} GiB", flags
            assert f"{schedule}, bubble {bubble.replace(' %', '%')} of" in said, flags


def test_bubble_table() -> None:
    ((_, table),) = marked("layout.md", "bubbles")
    for pp, vp, m, *shown, auto in rows(table):
        numbers, costs = (int(pp), int(vp), int(m)), USUAL_COSTS.per_chunk(int(vp))
        bubbles = {s.schedule.name: s.bubble for s in simulate_all(*numbers, costs)}
        if vp == "1":
            del bubbles["interleaved"]
        names = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
        assert [f"{bubbles[n]:.1%}".replace("%", " %") if n in bubbles else "–" for n in names] == shown, numbers
        assert choose_schedule(Request(*numbers[:2], (numbers[2],)), costs).name == auto, numbers


def test_programs_on_the_page() -> None:
    ((words, shown),) = marked("step.md", "programs")
    schedule, pp, vp, m = words.split()
    programs = build_schedule(schedule, int(pp), int(vp), int(m)).programs
    assert "\n".join(" ".join(map(str, program)) for program in programs) == shown


def test_places_in_the_code_that_the_step_names() -> None:
    """`function` or `Class.method` in the text of step.md is defined somewhere; no line numbers anywhere."""
    text = prose(ROOT / "docs/step.md")
    assert not re.search(r"\.py:\d+|#L\d+|\bline \d+", text)
    source = "\n".join(path.read_text() for path in (ROOT / "megalite").rglob("*.py"))
    named = {
        word for word in CODE.findall(text) if re.fullmatch(r"_?[A-Za-z]\w*(\.\w+)?", word) and "." not in word[-3:]
    }
    for word in named:
        last = word.rpartition(".")[2]
        assert re.search(rf"\b{last}\b", source), f"`{word}` is nowhere in megalite/"


def test_the_example_line_is_what_the_library_says() -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text()
    with pytest.raises(UserError) as caught:
        cli.parse(["--tp", "3"])
    assert f"    error: {caught.value}\n" in text


def test_this_file_reads_pages() -> None:
    """An empty list of pages or commands would pass every test above."""
    assert len(PAGES) >= 8
    assert len(commands()) >= 12
    assert sum(program_of(command.split()) is not None for _, command in commands()) >= 40
    assert sys.version_info >= (3, 10)
