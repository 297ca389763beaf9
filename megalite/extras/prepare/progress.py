"""Progress of preprocessing: a bar on a terminal, elsewhere a log line now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm

from megalite.core.base.log import logger

LOG_EVERY_S = 30.0


class Progress:
    """Show the fraction of the input that is encoded.

    Args:
        total: bytes of all input files on disk.
    """

    def __init__(self, total: int) -> None:
        self.total, self.start = total, time.monotonic()
        self._bar = tqdm(total=total, unit="B", unit_scale=True, desc="tokenizing", disable=not sys.stderr.isatty())
        self._read, self._next_line = 0, self.start + LOG_EVERY_S

    def update(self, read: int, documents: int, tokens: int) -> None:
        """Report that the first `read` bytes of the input are encoded, with the documents and tokens so far."""
        self._bar.set_postfix_str(f"{tokens / 1e6:.1f}M tokens", refresh=False)
        self._bar.update(max(read - self._read, 0))
        self._read = max(read, self._read)
        now = time.monotonic()
        if self._bar.disable and now >= self._next_line:
            self._next_line = now + LOG_EVERY_S
            fraction = self._read / max(self.total, 1)
            eta = f", about {(now - self.start) * (1 / fraction - 1) / 60:.0f} min left" if fraction > 0.01 else ""
            logger.info(f"tokenizing: {fraction:.1%} of the input, {documents} documents, {tokens} tokens{eta}")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._bar.close()
