from __future__ import annotations

import json
import string
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.core.base.errors import UserError
from megalite.extras.launch.hosts import (
    Host,
    LaunchSpec,
    check_equal_slots,
    filter_hosts,
    host_command,
    parse_hostfile,
)

NAMES = st.from_regex(r"[a-z0-9_][a-z0-9_.-]{0,12}", fullmatch=True)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "hostfile"
    path.write_text(text)
    return path


def test_every_form_of_a_line(tmp_path: Path) -> None:
    # Pages that people copy from write a space as U+00A0.
    text = "# cluster\n\nnode1\xa0slots=2\t# the master\n  node2:3\nnode-3.example.org#none\nnode4 \tslots=1\r\n"
    assert parse_hostfile(write(tmp_path, text)) == [
        Host("node1", (0, 1)),
        Host("node2", (0, 1, 2)),
        Host("node-3.example.org", None),
        Host("node4", (0,)),
    ]


def test_a_hostfile_of_open_mpi(tmp_path: Path) -> None:
    text = "\ufeffnode1 slots=2 max_slots=2\nnode2 max_slots=9 slots=3\nnode3:1 max-slots=4  # its own\n"
    assert [(h.name, len(h.slots or ())) for h in parse_hostfile(write(tmp_path, text))] == [
        ("node1", 2),
        ("node2", 3),
        ("node3", 1),
    ]


def test_the_example_parses() -> None:
    hosts = parse_hostfile(Path(__file__).parents[4] / "hostfile.example")
    assert [(h.name, len(h.slots or ())) for h in hosts] == [("node1", 8), ("node2", 8)]


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ("a:2\nb:2\na slots=1\n", 3, "a is already on line 1"),
        ("a slots=0\n", 1, "slots 0 must be at least 1"),
        ("a:-1\n", 1, "slots -1 must be at least 1"),
        ("a slots=999999999\n", 1, "slots 999999999 must be at most 1024"),
        (f"a:{'9' * 5000}\n", 1, "must be at most 1024"),
        ("\na slots=two\n", 2, "slots 'two' is not a whole number"),
        ("a:\n", 1, "slots '' is not a whole number"),
        ("a:2 slots=2\n", 1, "unknown word 'slots=2'"),
        ("a slots=2 gpu\n", 1, "unknown word 'gpu'"),
        ("me@a:2\n", 1, "'me@a:2' is not a host name"),
        ("fe80::1\n", 1, "'fe80::1' is not a host name"),
        ("-oProxyCommand=x\n", 1, "is not a host name"),
        ("a slots=8 max_slots=4\n", 1, "max_slots '4' is not a number of at least slots 8; correct or remove it"),
        ("a slots=8 max_slots=\n", 1, "max_slots '' is not a number"),
        ("a max_slots=4\n", 1, "max_slots goes with slots; write slots=N before it"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, text: str, line: int, told: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError) as e:
        parse_hostfile(path)
    assert str(e.value).startswith(f"{path}:{line}: ")
    assert told in str(e.value)


def test_empty_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="names no host"):
        parse_hostfile(write(tmp_path, "# nothing\n"))
    with pytest.raises(UserError, match=r"No such file.*copy hostfile\.example"):
        parse_hostfile(tmp_path / "nope")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not a text file"):
        parse_hostfile(tmp_path / "binary")


@given(st.dictionaries(NAMES, st.none() | st.integers(1, 9), min_size=1, max_size=6), st.booleans())
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, hosts: dict, colon: bool) -> None:
    sep = ":" if colon else " slots="
    text = "".join(f"{name}\n" if n is None else f"{name}{sep}{n}  # {n}\n" for name, n in hosts.items())
    path = write(tmp_path_factory.mktemp("hostfile"), text)
    assert parse_hostfile(path) == [Host(k, None if n is None else tuple(range(n))) for k, n in hosts.items()]


THREE = [Host("n1", (0, 1)), Host("n2", (0, 1)), Host("n3", None)]


def test_filters_keep_the_hostfiles_order() -> None:
    assert filter_hosts(THREE, None, None) == THREE
    assert filter_hosts(THREE, "n3@n1:1", None) == [Host("n1", (1,)), Host("n3", None)]
    assert filter_hosts(THREE, None, "n2:0@n3") == [Host("n1", (0, 1)), Host("n2", (1,))]
    assert filter_hosts(THREE, None, "n2:0,1@n3") == [Host("n1", (0, 1))]


@pytest.mark.parametrize(
    ("include", "exclude", "told"),
    [
        ("n1", "n2", "only one of them"),
        ("n9", None, "--include n9: n9 is not in the hostfile"),
        (None, "n9", "--exclude n9: n9 is not in the hostfile"),
        ("n1:2", None, "n1 has no slot 2; it has 0 to 1"),
        (None, "n1:0,5", "n1 has no slot 5"),
        ("n3:0", None, "n3 has no slot count in the hostfile; write 'n3 slots=N'"),
        (None, "n1@n2@n3", "leaves no host"),
        ("n1@n1", None, "n1 is named twice"),
        ("n1:0,0", None, "slot named twice"),
        ("n1:a", None, "'n1:a' is not HOST or HOST:ID,ID"),
        ("", None, "is not HOST"),
        ("n1@", None, "is not HOST"),
    ],
)
def test_filter_errors(include: str | None, exclude: str | None, told: str) -> None:
    with pytest.raises(UserError) as e:
        filter_hosts(THREE, include, exclude)
    assert told in str(e.value)


def test_slot_counts_must_be_equal_and_known() -> None:
    assert check_equal_slots([Host("a", (0, 1)), Host("b", (4, 7))]) == 2
    with pytest.raises(UserError, match=r"1: b; 2: a, c.*straddle"):
        check_equal_slots([Host("a", (0, 1)), Host("b", (0,)), Host("c", (0, 1))])
    with pytest.raises(UserError, match="host a: its slot count is unknown"):
        check_equal_slots([Host("a", None)])


# What a remote shell, torchrun's parser or its templates could take for their own.
WORDS = [
    "a b",
    " a",
    "",
    "--",
    "--n",
    "--log",
    "--r=1",
    "--tee",
    "-m",
    "$$",
    "${local_rank}",
    "$rank",
    "*",
    "~",
    "!",
    "\\",
    "\n",
]


@pytest.mark.parametrize("script", [["my $$ script ${rank}.py"], ["-m", "my.module"]])
def test_words_and_variables_arrive_unchanged(tmp_path: Path, script: list[str]) -> None:
    from torch.distributed.run import config_from_args, parse_args

    said = tmp_path / "agent.py"
    said.write_text("import json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n")
    env = {f"WORD_{i}": word for i, word in enumerate([*WORDS, "a='b \"c\"' é中"])}
    for words in (WORDS, WORDS[::-1], *([word] for word in WORDS)):
        spec = LaunchSpec(
            (*script, *words), str(tmp_path), sys.executable, "node1", 29500, "my logs", env, None, str(said)
        )
        remote = host_command(spec, [Host("node1", (0,))], 0)[-1]
        done = subprocess.run(["sh", "-c", remote], capture_output=True, text=True, check=True)
        command, variables = json.loads(done.stdout)
        assert {name: variables[name] for name in env} == env
        _, python, arguments = config_from_args(parse_args(command[command.index("torch.distributed.run") + 1 :]))
        assert python == sys.executable
        # As torch.distributed.elastic.agent.server.api's macros do it.
        arrived = [string.Template(word).safe_substitute(local_rank="0", rank="0") for word in arguments]
        assert arrived == ["-u", *script, *words]
