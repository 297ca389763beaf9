"""Fixtures for all tests."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import shlex
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from megalite.core.base.log import logger
from megalite.runtime.places import store
from tests.ranks import reserve_port, tmpfs
from tests.stores import S3, BreakingProxy, environment, secrets_in, start_s3
from tests.workers import WorkerPool

# Modules that tests import fail as tests do: with the values that they compared.
pytest.register_assert_rewrite(
    *(f"tests.{room}" for room in ("composer", "faults", "golden", "gpu", "parity", "scale", "soak", "spmd", "unit"))
)

# Before torch is imported. Several tests run at a time: on tiny tensors OpenMP threads spin for each other and cost ten
# times the processor time of one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Of the processes that tests start; those of xdist find it there already.
_path, _site = os.environ.get("PYTHONPATH", ""), str(Path(__file__).with_name("site"))
if _site not in _path.split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_site, _path)))

HUNG_S = 600
"""Far beyond the slowest test (80 s on two busy cores). One that hangs fails alone, and does not hold up the others."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked full: the rest of every grid")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked full, unless it is asked for or named; mix files that wait with those that compute."""
    if not (config.getoption("--full") or config.getoption("-m") or any("::" in a for a in config.args)):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("full")])
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    items[:] = _mixed(items)


def _mixed(items: list[pytest.Item]) -> list[pytest.Item]:
    """Put other files behind each one of faults/: all at a time they leave processors idle, and last they end late."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    waiting = [tests for path, tests in files.items() if "faults" in path.parts]
    others = [tests for path, tests in files.items() if "faults" not in path.parts]
    share = len(others) // (2 * len(waiting)) if waiting else 0
    order = [file for i, tests in enumerate(waiting) for file in (tests, *others[i * share : (i + 1) * share])]
    return [test for file in [*order, *others[len(waiting) * share :]] for test in file]


def pytest_collection_finish() -> None:
    """Keep what imports and the collection have made out of garbage collections, which would look at each object.

    And let there be few of them: with Python's thresholds they take a sixth of the time of a step of fake tensors, and
    more than half of that of parsing sources.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print for each failure the command that repeats it alone, in the environment that it failed in.

    Seeds are constants of the tests, and hypothesis draws the same examples in each run: the command says all.
    """
    again = os.environ.get("REPEAT", "bash tests/run.sh --full")
    failed = {report.nodeid for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, [])}
    for name in sorted(failed):
        terminalreporter.write_line(f"repeat: {again} -n 0 {shlex.quote(name)}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, Any, Any]:
    def fail(*_: object) -> None:
        pytest.fail(f"hung: not done after {HUNG_S} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, HUNG_S)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """A command called in the test's process sets the logger up; its handler writes to a stream that pytest closes."""
    handlers, level = list(logger.handlers), logger.level
    # pytest attaches its handlers also to loggers that do not propagate; kept here, they would see each record twice.
    logger.propagate = True
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = True


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    with tmpfs(tmp_path / "disk", "size=2m") as disk:
        yield disk


@pytest.fixture
def few_files() -> Iterator[None]:
    """Let this process open some 240 files beside those that it has open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Results of workers hold a file each: after a long run there may be hundreds.
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 240, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Persistent gloo workers, shared by the whole run."""
    workers = WorkerPool()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def zygote() -> Iterator[Any]:
    """Starts ranks of pretrain_gpt.py quickly."""
    from tests.faults.zygote import Zygote

    made = Zygote()
    yield made
    made.close()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """A server that speaks S3."""
    for module in ("moto", "s3fs"):
        pytest.importorskip(module, reason=f"{module} is not installed")
    server = start_s3(tmp_path_factory.mktemp("s3") / "moto.log")
    yield server
    server.close()


@pytest.fixture
def s3(s3_server: S3, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[S3]:
    """That server, to which the environment leads; no file or log that the test leaves holds a secret."""
    with leading_to(s3_server.port):
        yield s3_server
    said = "\n".join(record.getMessage() for when in ("setup", "call") for record in caplog.get_records(when))
    assert secrets_in(said.encode()) == []
    # In which folders may still vanish: a process that is ended removes its own a moment later.
    left = (Path(folder, name) for folder, _, names in os.walk(tmp_path) for name in names)
    assert [path for path in (s3_server.log, *left) if secrets_in(path)] == []


@pytest.fixture
def proxy(s3: S3) -> Iterator[BreakingProxy]:
    """Stands before that server, and breaks what a test asks for."""
    made = BreakingProxy(s3.port)
    with leading_to(made.port):
        yield made
    made.close()


@pytest.fixture
def gcs_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[BreakingProxy]:
    """Stands before an emulator of Google's store."""
    why = "gcsfs and gcp-storage-emulator are not installed (.ci/peers.sh tests with them)"
    pytest.importorskip("gcsfs", reason=why)
    emulator = pytest.importorskip("gcp_storage_emulator.server", reason=why)
    port = reserve_port()
    server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    server.start()
    made = BreakingProxy(port)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{made.port}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(store, "_FIRST_PAUSE_S", 0.002)
    _forget_clients()
    yield made
    _forget_clients()
    made.close()
    server.stop()


@contextlib.contextmanager
def leading_to(port: int) -> Iterator[None]:
    """An environment that leads to a port, and clients of S3 that have read it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(port).items():
            patch.setenv(name, value)
        _forget_clients()
        yield
    _forget_clients()


def _forget_clients() -> None:
    store._open.cache_clear()
    store._outage_of.cache_clear()
