"""A short soak with fixed seeds, and proof that it finds what it should. For hours: `python -m tests.soak`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megalite.core.base.errors import UserError
from megalite.runtime.checkpoint import manifest
from megalite.runtime.checkpoint.reader import ShardReader
from tests.faults.zygote import Zygote
from tests.rows import always_run
from tests.soak import chains, mutate
from tests.soak.attempt import END_S, Attempt
from tests.soak.disk import build_library
from tests.soak.faults import Fault, lose_unsynced
from tests.soak.fuzz import Failed, Fuzzer
from tests.soak.history import History
from tests.soak.network import Network
from tests.soak.readers import READERS, Reader
from tests.soak.runs import MODEL, Soak

SEED, CASES = "ci", 100


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = build_library(tmp_path_factory.mktemp("library"))
    if built is None:
        pytest.skip("disk faults need a C compiler")
    return built


@pytest.mark.parametrize("name", always_run(READERS, "tokens", "checkpoint", "manifest", "hf", "jsonl", "lock"))
def test_readers_read_or_refuse(name: str, tmp_path: Path) -> None:
    tally: Counter[str] = Counter()
    Fuzzer(name, tmp_path / name, SEED).run(range(CASES), tally)
    # Neither everything nor nothing: otherwise the damage is of one kind only.
    assert sum(tally.values()) == CASES
    assert tally[f"{name}: refused"] >= CASES // 10


@pytest.mark.full
@pytest.mark.parametrize(
    ("kinds", "number", "text"),
    [
        (("kill_rank", "sigterm"), 4, False),
        (("power_cut", "disk"), 3, False),
        (("kill_all", "kill_tokenizer"), 0, True),
    ],
)
def test_runs_survive(
    kinds: tuple[str, ...], number: int, text: bool, zygote: Zygote, library: Path, tmp_path: Path
) -> None:
    """Numbers of cases that take a few seconds."""
    tally: Counter[str] = Counter()
    Soak(tmp_path, SEED, tally, print, zygote, library, kinds, steps=16, text=text).case(number)
    assert tally["runs"] == 1
    assert tally["losses compared"] >= 16
    assert tally["checkpoints verified"] >= 1


@pytest.mark.full
@pytest.mark.root
def test_connections_cut_between_living_ranks_are_not_blamed_on_a_rank(tmp_path: Path) -> None:
    """As when a firewall forgets them: both ranks live, and neither has a failure of its own to report."""
    if not Network.possible() or shutil.which("ss") is None:
        pytest.skip("needs root, ip and ss")
    words = [*MODEL, "--run-dir", str(tmp_path / "run"), "--save-every", "0", "--train-steps", "1000000"]
    attempt = Attempt(tmp_path, 2, 0)

    def cut() -> bool:
        deadline = time.monotonic() + END_S
        while "step 3/" not in attempt.text():
            assert time.monotonic() < deadline, attempt.text()
            assert not attempt.ended(), attempt.text()
            time.sleep(0.05)
        subprocess.run(["ip", "netns", "exec", network.names[1], "ss", "-tK", "dst", "10.78.0.1"], capture_output=True)
        return False

    with Network() as network:
        network.run(attempt, words, cut, None)
    assert attempt.codes() == [1, 1]
    for rank in (0, 1):
        assert f"[rank {rank}] exiting: another rank failed first, or the network between them" in attempt.text()
    assert "Traceback" not in attempt.text()


# ------------------------------------------------------------------------------------------- what it finds when spoiled


def found(name: str, folder: Path, reader: Reader | None = None, first: int = 0) -> str:
    """The failure among cases from the first on."""
    with pytest.raises(Failed) as e:
        Fuzzer(name, folder / name, SEED, reader).run(range(first, first + 200), Counter())
    return str(e.value)


def test_a_reader_without_its_checksums_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardReader, "verify", lambda *_: None)
    assert "read as something else than was written" in found("checkpoint", tmp_path)


def test_a_reader_without_its_schema_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "check_meta", lambda meta, step: meta)
    assert "Error instead of UserError" in found("manifest", tmp_path, first=1100)


def _unpickle(folder: Path) -> None:
    import pickle

    data = (folder / "hostfile").read_bytes()
    try:
        pickle.loads(data)
    except Exception as e:
        raise UserError("hostfile", str(e), "") from None


def _write(folder: Path) -> None:
    (folder / "cache").write_text("")


def _allocate(folder: Path) -> None:
    bytearray(8 << 30)


def _wait(folder: Path) -> None:
    while True:
        pass


def _crash(folder: Path) -> None:
    os.abort()


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (_unpickle, "pickle.find_class"),
        (_write, "wrote "),
        (_allocate, "MemoryError instead"),
        (_wait, "more than 0 s of processor time"),
        (_crash, "died with -6"),
    ],
)
def test_a_reader_that_does_more_than_read_is_found(
    read: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.soak.fuzz.CPU_S", 0.3)
    called = []

    def only_in_a_case(folder: Path) -> None:
        # Once for what is expected of valid files.
        called.append(1)
        if len(called) > 1:
            read(folder)

    assert words in found("hostfile", tmp_path, Reader(READERS["hostfile"].make, only_in_a_case))


@pytest.mark.full
def test_a_save_that_does_not_flush_is_found(zygote: Zygote, library: Path, tmp_path: Path) -> None:
    """A power cut takes what was written and not flushed; only the shards of honest saves are left whole."""
    spoiled = tmp_path / "spoiled"
    spoiled.mkdir()
    (spoiled / "sitecustomize.py").write_text("import os\nos.fsync = lambda fd: None\n")
    for path, whole in (("", True), (str(spoiled), False)):
        place = tmp_path / f"whole_{whole}"
        place.mkdir()
        words = [*MODEL, "--run-dir", str(place / "run"), "--train-steps", "2", "--save-every", "1"]
        env = {"LD_PRELOAD": str(library), "SOAK_DISK_PATH": str(place), "SOAK_DISK_JOURNAL": str(place / "journal")}
        attempt = Attempt(place, 1, 0)
        attempt.fork(zygote, words, {**env, **({"PYTHONPATH": path} if path else {})})
        attempt.wait(END_S)
        assert attempt.codes() == [0]
        lose_unsynced(place / "run" / "checkpoints", place / "journal")
        if whole:
            History(place / "run").check()
        else:
            with pytest.raises(Failed, match="a committed checkpoint is damaged"):
                History(place / "run").check()


def test_a_lost_and_a_changed_checkpoint_are_found(tmp_path: Path) -> None:
    READERS["checkpoint"].make(tmp_path)
    root = tmp_path / "run" / "checkpoints"
    root.mkdir(parents=True)
    for step in (1, 2):
        shutil.copytree(tmp_path / "checkpoint", root / f"step_{step:08d}")
    history = History(tmp_path / "run")
    history.check()
    assert history.newest() == history.verified == 2
    shutil.rmtree(root / "step_00000001")
    with pytest.raises(Failed, match="was committed and is lost"):
        history.check()
    shutil.copytree(tmp_path / "checkpoint", root / "step_00000001")
    history.check()
    shard = next((root / "step_00000002").glob("*.safetensors"))
    shard.write_bytes(mutate.PICKLE)
    with pytest.raises(Failed, match="has changed since it was committed"):
        history.check()


@pytest.mark.full
def test_a_second_job_that_gets_in_is_found(zygote: Zygote, tmp_path: Path) -> None:
    """As if the lock were none: it is deleted while the first job uses the folder."""
    words = [*MODEL, "--run-dir", str(tmp_path / "run"), "--save-every", "0", "--train-steps", "100000"]
    attempt = Attempt(tmp_path, 1, 0)
    attempt.fork(zygote, words, {})
    fault = Fault("second_start", 1, 0.0, 0)
    assert fault._reached(attempt)
    try:
        fault._start_second(attempt, zygote, [*words, "--train-steps", "2"])
        (tmp_path / "run" / "checkpoints" / "lock").unlink()
        with pytest.raises(Failed, match="a second start was not refused"):
            fault._start_second(attempt, zygote, [*words, "--train-steps", "2"])
    finally:
        attempt.send(attempt.ranks, signal.SIGKILL)
        attempt.wait(END_S)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_differences_survive_kills(tmp_path: Path, ranks: int) -> None:
    """In a process of its own: it forks."""
    code = "import sys; from pathlib import Path; from collections import Counter; from tests.soak.chains import soak; "
    code += f"soak(Path(sys.argv[1]), sys.argv[2], 4, 'ci', tally := Counter(), {ranks}); "
    code += "assert tally['differences'] >= 4, tally"
    folder = str(tmp_path)
    subprocess.run([sys.executable, "-c", code, folder, f"file://{folder}/store"], check=True, timeout=600)


def test_a_soak_of_differences_finds_what_is_lost(tmp_path: Path) -> None:
    run = chains.Run(tmp_path, f"file://{tmp_path}/far", 1)
    run.root.mkdir(parents=True)
    run.said.write_text("saved model_00000001\n")
    with pytest.raises(AssertionError, match="model_00000001"):
        run.check(tmp_path / "copies", Counter())
