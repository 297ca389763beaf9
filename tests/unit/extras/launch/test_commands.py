"""Quoting is judged by a real shell: what the remote shell would run is what was meant."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megalite.core.base.errors import UserError
from megalite.extras.launch import command
from megalite.extras.launch.hosts import RANK_MARK, Host, LaunchSpec, host_command, launch_environment

SLURM = ["--emit", "slurm", "--nodes", "1", "--slots", "2"]
RESERVES = ["--recover", "host", "--spare-ranks"]
SHOW = "import json, os, sys; print(json.dumps([os.getcwd(), dict(os.environ), sys.argv[1:]]))"
# ssh hands the command to a shell as text: no NUL, and no lone surrogates.
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)


def spec(tmp_path: Path, **changes: object) -> LaunchSpec:
    values: dict = {
        "script": ("train.py",),
        "workdir": str(tmp_path),
        "python": sys.executable,
        "master_addr": "n1",
        "master_port": 29500,
        "log_dir": "logs",
        "agent": str(tmp_path / "show.py"),
        **changes,
    }
    return LaunchSpec(**values)


@settings(max_examples=12, deadline=None)
@given(word=TEXT, value=TEXT)
@example(word='it\'s "$HOME" `id` $(id) \\ * ; #', value="a b\n'c' ${PATH}")
def test_script_and_environment_arrive_unchanged(
    tmp_path_factory: pytest.TempPathFactory, word: str, value: str
) -> None:
    folder = tmp_path_factory.mktemp("a dir's place")
    (folder / "show.py").write_text(SHOW)
    what = spec(folder, script=("train.py", "--run-dir", word), env={"A": value, "MARK": RANK_MARK})
    command = host_command(what, [Host("n1", (0, 1)), Host("n2", (3, 5))], 1)
    assert command[-2] == "n2"
    ran = subprocess.run(["sh", "-c", command[-1]], capture_output=True, text=True, check=True, env={})
    directory, env, argv = json.loads(ran.stdout)
    assert directory == str(folder)
    assert (env["A"], env["MARK"], env["CUDA_VISIBLE_DEVICES"]) == (value, RANK_MARK, "3,5")
    assert argv[:3] == [sys.executable, "-m", "torch.distributed.run"]
    # torchrun reads "$$" as "$".
    assert argv[-3:] == ["train.py", "--run-dir", word.replace("$", "$$")]
    flags = dict(zip(argv[3:-3:2], argv[4:-3:2]))
    assert flags == {
        "--nnodes": "2",
        "--nproc-per-node": "2",
        "--node-rank": "1",
        "--master-addr": "n1",
        "--master-port": "29500",
        "--log-dir": "logs/n2",
        "--tee": "3",
    }


def test_environment_order_and_no_secrets() -> None:
    own = {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "4", "WANDB_API_KEY": "s3cret", "HOME": "/h", "GLOO_X": "1"}
    env = launch_environment(own, {"NCCL_DEBUG": "INFO", "FOO": "bar"})
    assert env["NCCL_DEBUG"] == "INFO"
    assert env["OMP_NUM_THREADS"] == "4"
    assert env["GLOO_X"] == "1"
    assert env["FOO"] == "bar"
    assert env["PYTHONUNBUFFERED"] == "1"
    assert not {"WANDB_API_KEY", "HOME"} & set(env)
    assert launch_environment({}, {})["OMP_NUM_THREADS"] == "1"


def test_print_only_prints_what_would_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"PATH": "/nowhere"})  # nothing could be run
    (tmp_path / "hosts").write_text("n1:2\nn2:2\n")
    flags = ["--hostfile", str(tmp_path / "hosts"), "--print-only", "--dir", "/job", "--python", ".venv/bin/python"]
    flags += ["--master-port", "1234", "--log-dir", "L", "--ssh-config", "c f", "--env", "X=a b"]
    assert command.main([*flags, "--", "pretrain_gpt.py", "--tp", "2"]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 2
    ssh = ["ssh", "-F", "c f", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
    ssh += ["-o", "ServerAliveInterval=3", "-o", "ServerAliveCountMax=3", "-o", "ControlPath=none"]
    for rank, line in enumerate(lines):
        assert line[:-1] == [*ssh, f"n{rank + 1}"]
        remote = shlex.split(line[-1])
        assert remote[:5] == ["cd", "/job", "&&", "exec", "env"]
        assert "X=a b" in remote
        assert remote[remote.index("--node-rank") + 1] == str(rank)
        assert remote[remote.index("--master-addr") + 1] == "n1"
        assert remote[remote.index("-m") - 1] == "/job/.venv/bin/python"
        assert remote[-3:] == ["pretrain_gpt.py", "--tp", "2"]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--print-only", "--"], "no training command"),
        (["--max-restarts", "-1", "--", "t.py"], "--max-restarts -1"),
        (["--hostfile", "HOSTS", "t.py", "--preset", "tiny"], "t.py: no -- before it; write -- t.py"),
        (["--hsotfile", "HOSTS", "--", "t.py"], "/hosts; did you mean --hostfile?"),
        (["--qqq", "--", "t.py"], "unrecognized arguments: --qqq; see megalite launch --help"),
        (["--env", "NOPE", "--", "t.py"], "--env NOPE: is not K=V"),
        (["--env", "1A=2", "--", "t.py"], "is not K=V"),
        (["--env", "CUDA_VISIBLE_DEVICES=1", "--", "t.py"], "use --include HOST:ID,ID"),
        (["--master-port", "99999", "--", "t.py"], "--master-port 99999: must be 1 to 65535"),
        (["--nodes", "2", "--", "t.py"], "--nodes: goes with --emit only"),
        (["--emit", "slurm", "--hostfile", "h", "--", "t.py"], "--hostfile: does not go with --emit slurm"),
        (["--emit", "slurm", "--", "t.py"], "needs --nodes N and --slots"),
        (["--emit", "slurm", "--nodes", "0", "--slots", "1", "--", "t.py"], "--nodes 0: must be at least 1"),
        ([*SLURM, "--claim", "c", "--", "t.py"], "--claim: goes with --emit k8s only"),
        ([*SLURM, "--mount", "/a:/b", "--", "t.py"], "--mount: is for a container"),
        ([*SLURM, "--image", "i", "--mount", "/a", "--", "t.py"], "--mount /a: must be SRC:DST"),
        ([*SLURM, "--", "pretrain_gpt.py", "--tp", "3"], "--num-heads 4: must be divisible by --tp 3"),
        ([*SLURM, "--", "pretrain_gpt.py", "--tp", "4"], "--tp 4 --pp 1 on 2 ranks: "),
        ([*SLURM, "--", "dir/pretrain_gpt.py", "--global-batch-size", "1"], "--global-batch-size 1: must give "),
        ([*SLURM, "--", "pretrain_gpt.py", "--lear", "3"], "--lear 3: "),
        ([*SLURM, "--", "pretrain_gpt.py", "--config", "/no/such"], "--no-preflight skips this check"),
        ([*SLURM, "--", "pretrain_gpt.py", "--init-from-hf", "/no/such"], "/no/such/config.json cannot be read"),
        ([*SLURM, "--", "t.py", "\udcff"], "is not UTF-8 text"),
        (["--emit", "k8s", *SLURM[2:], "--image", "i", "--resource", "x", "--", "t.py"], "--resource x: is not NAME=N"),
        (["--emit", "k8s", *SLURM[2:], "--image", "i", "--mount", "a:b", "--", "t.py"], "--mount: goes with --emit sl"),
        (["--emit", "k8s", "--nodes", "1", "--slots", "1", "--", "t.py"], "needs --image"),
        ([*SLURM, "--", "pretrain_gpt.py", "--spare-ranks", "2"], "--spare-ranks 2: leaves none of 2 ranks to train"),
        ([*SLURM, "--", "pretrain_gpt.py", "--tp", "2", *RESERVES, "1"], "--tp 2 --pp 1 on 1 rank: "),
        (["--hostfile", "HOSTS", "--dir", "here", "--", "t.py"], "--dir here: must be absolute"),
        (["--hostfile", "HOSTS", "--print-only", "--", "t.py"], "host n2: its slot count is unknown"),
        (["--hostfile", "HOSTS", "--preflight-timeout", "0", "--", "t.py"], "--preflight-timeout 0.0: must be"),
        (["--hostfile", "HOSTS", "--preflight-timeout", "9", "--no-preflight", "--", "t.py"], "--no-preflight"),
        (["--hostfile", "HOSTS", "--no-preflight", "--", "t.py"], "host n2: its slot count is unknown"),
    ],
)
def test_mistakes_on_the_command_line(tmp_path: Path, argv: list[str], told: str) -> None:
    (tmp_path / "hosts").write_text("n1:2\nn2\n")
    with pytest.raises(UserError) as e:
        command.main([str(tmp_path / "hosts") if word == "HOSTS" else word for word in argv])
    assert told in str(e.value)


def test_the_tool_says_it_in_one_line() -> None:
    tool = Path(__file__).parents[4] / "tools" / "launch.py"
    ran = subprocess.run(
        [sys.executable, str(tool), "--hostfile", "/no/such", "--", "t.py"], capture_output=True, text=True
    )
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert ran.stderr.startswith("error: --hostfile /no/such: ")
