"""Output that nobody reads, with real pipes and terminals."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pty
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.core.base.console import write_or_drop
from megalite.core.base.log import logger, setup_logging


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """(read end, write end), both closed afterwards."""
    ends = os.pipe()
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):
            os.close(end)


def fill(descriptor: int) -> int:
    """Write to a pipe or terminal until it takes no more, and leave it as it was; return the bytes."""
    flags, count = fcntl.fcntl(descriptor, fcntl.F_GETFL), 0
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            count += os.write(descriptor, b"x" * 512)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return count


def test_a_full_pipe_does_not_block(pipe: tuple[int, int]) -> None:
    read, write = pipe
    full = fill(write)
    assert not write_or_drop(write, b"lost\n")
    # Nobody else who has this pipe may be surprised by writes that fail.
    assert not fcntl.fcntl(write, fcntl.F_GETFL) & os.O_NONBLOCK
    assert len(os.read(read, full)) == full
    assert write_or_drop(write, b"read\n")
    assert os.read(read, 100) == b"read\n"


def test_long_output_is_whole_lines_as_far_as_it_goes(pipe: tuple[int, int]) -> None:
    read, write = pipe
    lines = b"".join(b"%06d\n" % i for i in range(20_000))
    assert not write_or_drop(write, lines)
    got = os.read(read, len(lines))
    assert lines.startswith(got)
    assert got.endswith(b"\n")
    assert len(got) > 50_000


def test_a_file_is_written_where_it_is(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        file.write(b"a\n")
        file.flush()
        assert write_or_drop(file.fileno(), b"b\n" * 5000)
        file.write(b"c\n")
    assert (tmp_path / "log").read_bytes() == b"a\n" + b"b\n" * 5000 + b"c\n"


def test_a_paused_terminal() -> None:
    """Ctrl-S."""
    master, slave = pty.openpty()
    assert write_or_drop(slave, b"one\n")
    termios.tcflow(slave, termios.TCOOFF)
    assert not write_or_drop(slave, b"two\n")
    termios.tcflow(slave, termios.TCOON)
    assert write_or_drop(slave, b"three\n")
    seen = b""
    while not seen.endswith(b"three\r\n"):
        seen += os.read(master, 100)
    assert seen == b"one\r\nthree\r\n"
    os.close(master)
    os.close(slave)


def test_the_log_counts_what_nobody_read(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = pipe
    full = fill(write)
    with os.fdopen(os.dup(write), "w") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        setup_logging(rank=0)
        for i in range(3):
            logger.info(f"line {i}")
        os.read(read, full)
        logger.log(logging.WARNING, "again")
        assert os.read(read, 100) == b"(3 lines dropped while nobody read this output)\nagain\n"
