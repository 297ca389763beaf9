"""A mistake in what was asked: one `error:` line with value, rule and remedy; exit 2; every rank gone after
the first."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megalite.extras.prepare.token_writer import IndexedDatasetWriter
from tests.faults.zygote import Left, Zygote
from tests.ranks import ROOT

TINY = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-heads", "4", "--seq-len", "16", "--device", "cpu"),
    *("--global-batch-size", "4", "--train-steps", "2"),
]


def run(zygote: Zygote, folder: Path, arguments: list[str], world: int = 1) -> list[Left]:
    """Run ranks that are to end together."""
    job = zygote.start([*TINY, *arguments], world, folder)
    zygote.until(job.ended)
    return job.end()


def errors_of(ranks: list[Left]) -> list[tuple[int, str]]:
    """(rank, line) of each error line."""
    return [(i, line) for i, rank in enumerate(ranks) for line in rank.err.splitlines() if "error:" in line]


def assert_refused(zygote: Zygote, folder: Path, arguments: list[str], *words: str, world: int = 1) -> None:
    ranks = run(zygote, folder, arguments, world)
    assert [rank.code for rank in ranks] == [2] * world, ranks
    # Nothing started these ranks together: where they have not met yet, each says its line.
    (speaker, error), *others = errors_of(ranks)
    assert speaker == 0
    assert all(line == f"[rank {rank}] {error}" for rank, line in others)
    assert len(others) in (0, world - 1)
    assert error.count("; ") >= 1, "value: rule; remedy"
    for word in words:
        assert word in error
    assert "Traceback" not in "".join(rank.err for rank in ranks)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ids 0 to 99 in documents of 50 tokens, described as made by another tokenizer."""
    prefix = tmp_path_factory.mktemp("data") / "text"
    with IndexedDatasetWriter(prefix, np.dtype(np.uint16)) as writer:
        for i in range(40):
            writer.add_documents((np.arange(50) + 50 * i) % 100, [50])
        writer.finalize({"tokenizer_sha256": "0" * 64, "vocab_size": 100, "tokenizer_kind": "bytes"})
    return prefix


def copy_of(prefix: Path, folder: Path) -> Path:
    for end in (".bin", ".idx"):
        (folder / f"text{end}").write_bytes(Path(f"{prefix}{end}").read_bytes())
    return folder / "text"


def test_world_that_tp_and_pp_do_not_divide(zygote: Zygote, tmp_path: Path) -> None:
    arguments = ["--tp", "2", "--pp", "2", "--mock-data", "--run-dir", str(tmp_path)]
    for asked in ([], ["--dry-run"]):
        assert_refused(
            zygote,
            tmp_path,
            [*arguments, *asked],
            "--tp 2 --pp 2 on 3 ranks",
            "multiple of tp x pp = 4",
            "start",
            world=3,
        )


# What happens in a rank before anything else does, by the rank that is slow to start. Rank 0: it starts when rank 1
# waits for it to speak, as long as it takes. Rank 1: it does not start at all.
SLOW = {
    "0": """
import os, pathlib, time
waits, sleep = pathlib.Path(__file__).with_name("waits"), time.sleep

def wait_for_rank_0(seconds):
    if seconds > 5:
        waits.touch()
        seconds = 600
    sleep(seconds)

if os.environ.get("RANK") == "1":
    time.sleep = wait_for_rank_0
while os.environ.get("RANK") == "0" and not waits.exists():
    sleep(0.05)
""",
    "1": """
import os, time
if os.environ.get("RANK") == "1":
    time.sleep(600)
""",
}


@pytest.mark.full
@pytest.mark.parametrize("slow", SLOW)
def test_torchrun_ends_no_rank_before_it_was_told(tmp_path: Path, slow: str) -> None:
    """torchrun ends all ranks as soon as one has left, and rank 0, who tells, may be the last to start."""
    (tmp_path / "sitecustomize.py").write_text(SLOW[slow])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(ROOT / "pretrain_gpt.py"), *TINY, "--mock-data", "--hiden-size", "64"],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    told = [line for line in done.stderr.splitlines() if "error: --hiden-size" in line]
    assert told == ["error: --hiden-size 64: is an unknown flag; did you mean --hidden-size?"]


def test_world_size_without_a_launcher(tmp_path: Path) -> None:
    environment = {**os.environ, "WORLD_SIZE": "2"}
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *TINY, "--mock-data", "--run-dir", str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.startswith("error: WORLD_SIZE 2: requires RANK and MASTER_ADDR and MASTER_PORT, which")


def test_a_run_dir_that_cannot_be_made(zygote: Zygote, tmp_path: Path) -> None:
    arguments = ["--mock-data", "--run-dir", "/proc/nowhere"]
    assert_refused(zygote, tmp_path, arguments, "--run-dir /proc/nowhere")


def test_truncated_files(zygote: Zygote, data: Path, tmp_path: Path) -> None:
    prefix = copy_of(data, tmp_path)
    os.truncate(f"{prefix}.bin", 1000)
    arguments = ["--data", str(prefix), "--vocab-size", "100", "--run-dir", str(tmp_path / "run")]
    assert_refused(zygote, tmp_path, arguments, f"{prefix}.bin", "1000")
    prefix = copy_of(data, tmp_path)
    os.truncate(f"{prefix}.idx", 200)
    assert_refused(zygote, tmp_path, arguments, f"{prefix}.idx", "200")


def test_token_id_beyond_the_vocabulary(zygote: Zygote, data: Path, tmp_path: Path) -> None:
    # Without its description nothing but the ids themselves can tell; the error may come from any rank's samples.
    prefix = copy_of(data, tmp_path)
    arguments = ["--data", str(prefix), "--vocab-size", "90", "--run-dir", str(tmp_path / "run")]
    ranks = run(zygote, tmp_path, arguments, 2)
    assert {rank.code for rank in ranks} == {2}
    ((_, error),) = errors_of(ranks)
    assert str(prefix) in error
    assert "90" in error


def test_token_id_beyond_the_vocabulary_in_evaluation_data(zygote: Zygote, tmp_path: Path) -> None:
    # Evaluation reads in order: of its first batch of four samples the third is rank 1's, who must be heard.
    folder = tmp_path / "valid"
    with IndexedDatasetWriter(folder, np.dtype(np.uint16)) as writer:
        writer.add_documents(np.where(np.arange(200) == 40, 95, np.arange(200) % 90), [200])
        writer.finalize({"tokenizer_sha256": "0" * 64, "vocab_size": 90, "tokenizer_kind": "bytes"})
    with IndexedDatasetWriter(tmp_path / "train", np.dtype(np.uint16)) as writer:
        writer.add_documents(np.arange(400) % 90, [400])
        writer.finalize({"tokenizer_sha256": "0" * 64, "vocab_size": 90, "tokenizer_kind": "bytes"})
    arguments = ["--data", str(tmp_path / "train"), "--valid-data", str(folder), "--vocab-size", "90"]
    ranks = run(zygote, tmp_path, [*arguments, "--eval-every", "1", "--run-dir", str(tmp_path / "run")], 2)
    assert {rank.code for rank in ranks} == {2}
    ((_, error),) = errors_of(ranks)
    assert str(folder) in error
    assert "90" in error


def test_description_of_a_larger_vocabulary(zygote: Zygote, data: Path, tmp_path: Path) -> None:
    assert_refused(
        zygote,
        tmp_path,
        ["--data", str(data), "--vocab-size", "90", "--run-dir", str(tmp_path)],
        "--vocab-size 90",
        "100",
    )


def test_tokenizer_that_did_not_make_the_data(zygote: Zygote, data: Path, tmp_path: Path) -> None:
    description = json.loads(Path(f"{data}.json").read_text())
    arguments = ["--data", str(data), "--tokenizer", "bytes", "--run-dir", str(tmp_path)]
    assert_refused(zygote, tmp_path, arguments, "--tokenizer bytes", "SHA-256", description["tokenizer_sha256"])


def test_port_in_use(zygote: Zygote, tmp_path: Path) -> None:
    arguments = [*TINY, "--mock-data", "--run-dir", str(tmp_path)]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        # Rank 1 alone would wait for a server; rank 0 must find out and end.
        job = zygote.start(arguments, 2, tmp_path, env={"MASTER_PORT": str(port)})
        zygote.until(job.ended)
        os.kill(job.pid(1), signal.SIGKILL)
        rank0, _ = job.end()
    assert rank0.code == 2
    (line,) = (line for line in rank0.err.splitlines() if "error:" in line)
    assert f"MASTER_PORT {port}" in line
    assert "--master-port" in line


def test_a_megatron_script_runs_after_reading_one_message(zygote: Zygote, tmp_path: Path) -> None:
    """87 flags as published: drop those that the message lists one by one, and ignore those without effect."""
    script = (ROOT / "tests/data/megatron_llama3_8b.sh").read_text().split("8 pretrain_gpt.py \\\n")[1]
    flags = [["--" + f.split()[0], *f.split()[1:]] for f in script.replace("\\\n", " ").split("--")[1:]]
    assert len({name for name, *_ in flags}) == 87
    (left,) = zygote.start([word for flag in flags for word in flag], 1, tmp_path).end()
    assert left.code == 2
    assert [line for line in left.err.splitlines() if "error: " in line] == left.err.splitlines()[:1]
    listed = {line.split()[0].rstrip(":") for line in left.err.splitlines()[1:] if line.startswith("  --")}
    assert listed == {
        *("--fp8-format", "--fp8-amax-history-len", "--fp8-amax-compute-algo", "--fp8-param-gather", "--profile"),
        "--save-retain-interval",
    }
    kept = [word for flag in flags if flag[0] not in listed for word in flag]
    small = """--num-layers 2 --hidden-size 64 --ffn-hidden-size 64 --num-attention-heads 8 --kv-channels 8
        --seq-length 32 --max-position-embeddings 32 --vocab-size 96 --global-batch-size 4 --train-samples 9
        --lr-decay-samples 8 --lr-warmup-samples 4 --eval-interval 2 --eval-iters 1 --device cpu
        --ignore-megatron-flags"""
    folder = ["--save", str(tmp_path / "run"), "--load", str(tmp_path / "run")]
    (left,) = zygote.start([*kept, *small.split(), *folder], 1, tmp_path).end()
    assert left.code == 0, left.err
    assert "--tensorboard-dir tensorboard_logs/llama3_8b_fp8: events are written to" in left.err
    assert "--use-mcore-models, --attention-backend, --cross-entropy-loss-fusion, " in left.err
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps if "event" not in step] == [1, 2]
    assert len(list((tmp_path / "run/checkpoints").glob("step_*"))) == 1
