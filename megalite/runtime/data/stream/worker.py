"""A process that tokenizes pieces: it reads orders from a pipe until the pipe is closed."""

from __future__ import annotations

import contextlib
import time
from multiprocessing.connection import Connection

from megalite.core.base.errors import UserError
from megalite.runtime.data.stream.pieces import make
from megalite.runtime.data.tokenizer import load_tokenizer


def main(descriptor: int, tokenizer: str) -> None:
    """Answer each (recipe, piece, part, wait) with the line that says why it cannot be tokenized ("" if it can), the
    tokens made (None: another process makes them), and the seconds that took.
    """
    pipe = Connection(descriptor)
    model = load_tokenizer(tokenizer)
    with contextlib.suppress(EOFError, OSError):
        while True:
            order = pipe.recv()
            began = time.monotonic()
            try:
                tokens = make(order[0], model, *order[1:])
                pipe.send(("", tokens, time.monotonic() - began))
            except UserError as e:
                pipe.send((str(e), 0, 0.0))
