"""Preflight: the probe itself run for real without a network, and every red cell with its cure."""

from __future__ import annotations

import copy
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import megalite
from megalite.core.base.errors import UserError
from megalite.extras.launch import preflight, probe
from megalite.extras.launch.hosts import Host, LaunchSpec
from megalite.extras.launch.preflight import Answer, check_hosts, require_green, script_inputs, table, wants_cpu

PACKAGE = Path(megalite.__file__).parent


@pytest.fixture
def ask(tmp_path: Path) -> dict:
    (tmp_path / "train.py").write_text("pass")
    for end in (".bin", ".idx"):
        (tmp_path / f"corpus{end}").write_bytes(b"x" * 7)
    return {
        "python": sys.executable,
        "dir": str(tmp_path),
        "package": str(PACKAGE),
        "files": ["train.py", "no.yaml"],
        "data": ["corpus", "nothing"],
        "master": "localhost",
        "port": None,
    }


def probe_host(ssh: list[str], ask: dict, timeout_s: float = 300.0) -> Answer:
    return preflight.probe_host(ssh, ask, timeout_s)


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The time given to a host is over when this file appears, however long that takes."""
    made = tmp_path / "mark"

    class UntilMark(subprocess.Popen):
        def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:
            while timeout is not None:
                try:
                    return super().communicate(input, 0.05)
                except subprocess.TimeoutExpired:
                    input = None  # given once
                    if made.exists():
                        raise
            return super().communicate(input)

    monkeypatch.setattr(subprocess, "Popen", UntilMark)
    return made


# In place of ssh: a shell that gets the same command line and the same standard input.
LOCAL = ["sh", "-c", 'eval "$0"']


def test_the_probe_answers(ask: dict) -> None:
    before = time.time()
    with socket.create_server(("", 0)) as taken:
        answer = probe_host(LOCAL, {**ask, "port": taken.getsockname()[1]})
    most = time.time() - before
    assert answer.facts is not None, answer.error
    facts = answer.facts
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["versions"]["torch"].startswith("2.")
    assert facts["port"] is False
    assert facts["master"] is True
    assert facts["files"]["no.yaml"] is None
    assert facts["data"] == {"corpus": [7, 7], "nothing": None}
    assert facts["dir"] is True
    assert facts["disk"] > 0
    assert facts["code"] == probe.digest([str(p) for p in PACKAGE.rglob("*.py")], str(PACKAGE))
    # The time of a file is that of the kernel's last tick.
    assert -most <= answer.clock_s <= 0.01
    elsewhere = probe_host(LOCAL, {**ask, "package": "/no"}).facts
    assert elsewhere is not None
    assert elsewhere["code"] is None


def test_a_shell_that_is_slow_to_end_is_no_wrong_clock(ask: dict) -> None:
    """What the host's clock shows is compared with when it came, not with when the connection was closed."""
    answer = probe_host(["sh", "-c", 'eval "$0"; sleep 5'], ask)
    assert answer.facts is not None, answer.error
    assert answer.clock_s > -5


def test_the_probe_runs_where_nothing_is_installed(ask: dict) -> None:
    answer = probe_host(LOCAL, {**ask, "python": "/no/such/python", "master": "no-such-host.invalid"})
    assert answer.facts is not None, answer.error
    assert answer.facts["python"] is None
    assert answer.facts["master"] is False
    source = Path(probe.__file__).read_text()
    bare = [sys.executable, "-I", "-S", "-", "{}"]
    ran = subprocess.run(bare, input=source.split("if __name__")[0], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_a_slow_nvidia_smi_is_a_slow_host(
    ask: dict, tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waited for as long as preflight does; then the line says slow, not that Python is missing there."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\nsleep 1\nfor i in 0 1 2 3 4 5 6 7; do echo "GPU $i: NVIDIA H200"; done\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    patient = probe_host(LOCAL, ask)
    assert patient.facts is not None, patient.error
    assert patient.facts["gpus"] == 8
    tool.write_text(f"#!/bin/sh\ntouch '{mark}'\nsleep 600\n")
    answer = probe_host(LOCAL, ask, timeout_s=5.0)
    assert answer == Answer(None, error="no answer within 5 s", slow=True)
    report = check_hosts(SPEC, HOSTS[:1], [answer])
    assert [(host, wrong) for host, wrong, _ in report.problems] == [("n1", "no answer within 5 s")]
    assert "--preflight-timeout" in report.problems[0][2]


def test_login_noise_silence_and_refusal(ask: dict) -> None:
    noisy = probe_host(["sh", "-c", 'echo "Welcome!"; echo; eval "$0"'], ask)
    assert noisy.facts is not None
    refused = probe_host(["sh", "-c", "echo 'Permission denied\n(publickey).' >&2; exit 255"], ask)
    assert refused == Answer(None, error="Permission denied (publickey).")
    silent = Answer(None, error="no answer within 0.5 s")
    assert probe_host(["sh", "-c", "sleep 600"], ask, timeout_s=0.5) == silent
    assert probe_host(["sh", "-c", "exit 3"], ask) == Answer(None, error="exit code 3", reached=True)


def test_a_host_that_hangs_once_python_runs(ask: dict, mark: Path) -> None:
    hangs = f"echo '{probe.MARKER}'; touch '{mark}'; sleep 600"
    assert probe_host(["sh", "-c", hangs], ask) == Answer(None, error="no answer within 300 s", slow=True)


FACTS = {
    "host": "h",
    "python": "3.11.7",
    "versions": {"torch": "2.13.0", "nccl": "2.27.5"},
    "dir": True,
    "code": "abc",
    "files": {"train.py": "f00"},
    "data": {"corpus": [7, 7]},
    "gpus": 8,
    "shm": 2**33,
    "disk": 2**40,
    "master": True,
    "port": True,
    "env": {},
}
SPEC = LaunchSpec(
    ("train.py", "--data", "corpus"), "/job", "/env/bin/python", "n1", 29500, "logs", agent="/job/m/e/l/a.py"
)
HOSTS = [Host(f"n{i}", tuple(range(8))) for i in (1, 2, 3)]


def answers(changed: dict | None = None, clock_s: float = 0.0, which: int = 1) -> list[Answer]:
    made = [Answer(copy.deepcopy(FACTS)) for _ in HOSTS]
    made[which] = Answer({**copy.deepcopy(FACTS), **(changed or {})}, clock_s)
    return made


def test_all_green() -> None:
    report = check_hosts(SPEC, HOSTS, answers())
    assert (report.problems, report.notes) == ([], [])
    lines = table(report.rows).splitlines()
    assert lines[0].split() == list(preflight.COLUMNS)
    assert " ".join(lines[1].split()) == "n1 ok 3.11.7 2.13.0 2.27.5 abc 8 8.0 GiB 1024.0 GiB +0.0 s ok ok"
    assert len(lines) == 4
    require_green(report)


def test_a_report_is_linear_in_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What most hosts answer is found once, not once per host."""
    texts, dumps = [0], preflight.json.dumps

    def counted(value: object) -> str:
        texts[0] += 1
        return dumps(value)

    monkeypatch.setattr(preflight.json, "dumps", counted)
    counts = []
    for size in (64, 256):
        hosts, texts[0] = [Host(f"n{i}", tuple(range(8))) for i in range(size)], 0
        assert check_hosts(SPEC, hosts, [Answer(copy.deepcopy(FACTS)) for _ in hosts]).problems == []
        counts.append(texts[0])
    assert counts[1] == 4 * counts[0] <= 40 * 64


@pytest.mark.parametrize(
    ("changed", "wrong", "cure"),
    [
        ({"python": None}, "/env/bin/python does not exist", "--python PATH"),
        ({"python": "3.10.1"}, "Python 3.10.1, others have 3.11.7", "--exclude n2"),
        ({"versions": {"torch": "2.12.0", "nccl": "2.27.5"}}, "torch 2.12.0, others have 2.13.0", "the same"),
        ({"versions": {"torch": "2.13.0"}}, "nccl None, others have 2.27.5", "the same"),
        ({"versions": {"nccl": "2.27.5"}}, "torch is not installed for /env/bin/python", "the same"),
        ({"dir": False}, "directory /job does not exist", "--dir"),
        ({"code": None}, "no megalite in /job/m", "the same place"),
        ({"code": "old"}, "its megalite is another version", "the same"),
        ({"files": {"train.py": None}}, "no train.py in /job", "copy it there"),
        ({"files": {"train.py": "bad"}}, "its train.py is not the others'", "the same"),
        ({"gpus": 7}, "7 GPUs, the hostfile needs device 7", "lower slots="),
        ({"gpus": 0}, "0 GPUs, the hostfile needs device 7", "nvidia-smi"),
        ({"shm": 2**26}, "/dev/shm has 0.1 GiB, NCCL needs 0.5 GiB", "--shm-size"),
        ({"disk": 2**20}, "0.0 GiB free in /job", "free some space"),
        ({"data": {"corpus": None}}, "corpus.bin or .idx is missing", "mount the data"),
        ({"data": {"corpus": [6, 7]}}, "corpus has [6, 7] bytes, others [7, 7]", "read the same"),
        ({"master": False}, "cannot resolve n1", "--master-addr"),
    ],
)
def test_a_red_cell_names_host_and_cure(changed: dict, wrong: str, cure: str) -> None:
    report = check_hosts(SPEC, HOSTS, answers(changed))
    assert [host for host, *_ in report.problems] == ["n2"]
    assert wrong in report.problems[0][1]
    assert cure in report.problems[0][2]
    assert sum(cell.endswith(" !") for row in report.rows for cell in row) == 1
    with pytest.raises(UserError, match=r"^preflight: host n2: "):
        require_green(report)


def test_clock_port_and_ssh() -> None:
    skewed = check_hosts(SPEC, HOSTS, answers(clock_s=-2.5))
    assert [(h, w) for h, w, _ in skewed.problems] == [("n2", "its clock is -2.5 s off")]
    assert check_hosts(SPEC, HOSTS, answers(clock_s=1.9)).problems == []
    # The launcher's own clock may be the wrong one: all hosts 60 s off is no skew between them.
    assert check_hosts(SPEC, HOSTS, [Answer(FACTS, 60.0)] * 3).problems == []
    busy = check_hosts(SPEC, HOSTS, answers({"port": False}, which=0))
    assert [(h, w) for h, w, _ in busy.problems] == [("n1", "port 29500 is in use")]
    gone = check_hosts(SPEC, HOSTS, [Answer(FACTS), Answer(None, error="refused"), Answer(FACTS)])
    assert gone.problems[0][:2] == ("n2", "ssh: refused")
    assert gone.rows[1] == ["n2", "no !"] + ["-"] * 10
    old = check_hosts(SPEC, HOSTS, [Answer(FACTS), Answer(None, error="SyntaxError", reached=True), Answer(FACTS)])
    assert old.rows[1][:3] == ["n2", "ok", "- !"]
    assert "neither /env/bin/python nor a python3 of 3.8 or later runs there: SyntaxError" in old.problems[0][1]
    slow = check_hosts(SPEC, HOSTS, [Answer(FACTS), Answer(None, error="no answer", slow=True), Answer(FACTS)])
    assert slow.rows[1][:2] == ["n2", "slow !"]
    assert "--preflight-timeout" in slow.problems[0][2]
    nobody = check_hosts(SPEC, HOSTS, [Answer(None, error="refused")] * 3)
    assert len(nobody.problems) == 3


def test_runs_on_cpu() -> None:
    none = [Answer({**FACTS, "gpus": 0, "shm": 2**20})] * 3
    report = check_hosts(SPEC, HOSTS, none)
    assert report.problems == []
    assert report.notes == ["no host has a GPU: the ranks will run on CPU"]
    on_cpu = LaunchSpec(("train.py", "--device", "cpu"), "/job", "python", "n1", 29500, "logs")
    assert check_hosts(on_cpu, [Host("n1", tuple(range(64)))], [Answer(FACTS)]).problems == []
    bare = check_hosts(SPEC, [Host("n1", None)], none[:1])
    assert bare.problems == [("n1", "has no GPU to count as slots", "write 'n1 slots=N' for N ranks on CPU")]


def test_variables_that_differ_are_told_unless_we_set_them() -> None:
    odd = answers({"env": {"NCCL_IB_HCA": "mlx5_0", "CUDA_VISIBLE_DEVICES": "1"}})
    assert check_hosts(SPEC, HOSTS, odd).notes == [
        "NCCL_IB_HCA differs between hosts (unset, 'mlx5_0'); set it for all with --env NCCL_IB_HCA=..."
    ]
    ours = LaunchSpec(SPEC.script, "/job", "p", "n1", 29500, "logs", env={"NCCL_IB_HCA": "mlx5_1"})
    assert check_hosts(ours, HOSTS, odd).notes == []


def test_inputs_of_the_training_command() -> None:
    command = "pretrain_gpt.py --tp 2 --config a.yaml --data 0.7 A 0.3 B/c --valid-data=V --config=b.yaml --data-path D"
    assert script_inputs(command.split()) == (["pretrain_gpt.py", "a.yaml", "b.yaml"], ["A", "B/c", "V", "D"])
    assert script_inputs(["t.py"]) == (["t.py"], [])
    assert script_inputs(["-m", "pretrain_gpt", "--config", "a.yaml", "--data", "A"]) == (["a.yaml"], ["A"])
    assert [wants_cpu(s.split()) for s in ("t.py --device cpu", "t.py --device=cpu", "t.py cpu --device cuda")] == [
        True,
        True,
        False,
    ]
