"""How a rank leaves: 0 done, 2 a mistake in what was asked, 1 anything else; one message, never a hang."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch.distributed as dist

from megalite.checkpoint.save import SaveError
from megalite.dist.agree import agree
from megalite.dist.collectives import gather_texts
from megalite.dist.context import ParallelContext, launched_together, shutdown
from megalite.errors import LocalUserError, UserError
from megalite.log import env_rank, logger, setup_logging

# Longer than a busy machine takes to start Python and torch, and well below the 30 s in which all ranks must be gone.
_PATIENCE_S = 15.0


class Diverged(FloatingPointError):
    """Training cannot go on by itself; every rank raises it alike."""


class PeerFailed(RuntimeError):
    """Another rank failed, and tells of it itself."""


def raise_together(ctx: ParallelContext, problem: Exception | None) -> NoReturn:
    """Fail on every rank because of what went wrong on some; every rank calls it.

    Args:
        problem: what went wrong here; None on the other ranks.

    Raises:
        UserError, SaveError: where that is the problem of some rank; alike on every rank.
        Exception: `problem` itself on its rank, `PeerFailed` on the others.
    """
    agree(ctx, lambda: _reraise(problem if isinstance(problem, UserError) else None))
    unsaved = gather_texts(str(problem) if isinstance(problem, SaveError) else "", ctx.world, ctx.device)
    if any(unsaved):
        raise SaveError(next(filter(None, unsaved)))
    _reraise(problem)
    raise PeerFailed("another rank cannot go on")


def _reraise(problem: Exception | None) -> None:
    if problem is not None:
        raise problem


@contextmanager
def leaving_together() -> Iterator[None]:
    """Run a rank's whole life inside; the process ends here. SIGUSR1 prints its stacks, whatever it is busy with.

    Errors that every rank sees alike (the command line, the topology, anything agreed on) are told by rank 0 alone.
    """
    setup_logging()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    rank = env_rank()
    try:
        yield
    except UserError as e:
        if not isinstance(e, LocalUserError):
            _let_rank_0_speak(rank, 2)
        logger.error(f"error: {e}")
        _leave(2)
    except KeyboardInterrupt:
        # One more must not cut the message short.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if rank == 0:
            print("interrupted: left at once, nothing more was saved", file=sys.stderr, flush=True)
        _leave(130)
    except SystemExit:
        raise
    except (SaveError, Diverged) as e:
        # Every rank raises these alike, and where in the program says nothing.
        _let_rank_0_speak(rank, 1)
        logger.error(f"{type(e).__name__}: {e}")
        _leave(1)
    except BaseException as e:
        if isinstance(e, PeerFailed) or _lost_peer(e):
            text = "lost a peer and leaves: another rank failed first"
        else:
            text = traceback.format_exc()
        # One write: ranks share a terminal or a pipe, and print makes two where Python is told not to buffer.
        sys.stderr.write("".join(f"[rank {rank}] {line}\n" for line in text.splitlines()))
        _leave(1)
    shutdown()


def _let_rank_0_speak(rank: int, code: int) -> None:
    """Leave without a word, but not before rank 0: a launcher that sees one rank leave ends the others, and rank 0 may
    be slower. Returns on rank 0, and where rank 0 has said nothing for `_PATIENCE_S`.
    """
    if rank == 0:
        return
    if not launched_together():
        _leave(code)
    signal.signal(signal.SIGTERM, lambda *_: _leave(code))
    time.sleep(_PATIENCE_S)


def _leave(code: int) -> None:
    """End this process now: destroying groups could wait for peers that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _lost_peer(e: BaseException) -> bool:
    """Whether a collective failed because a peer went away."""
    text = str(e)
    signs = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "Socket closed",
        "NCCL error: remote",
    )
    return isinstance(e, (RuntimeError, dist.DistError)) and any(sign in text for sign in signs)
