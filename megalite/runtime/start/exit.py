"""How a rank exits: 0 done, 2 user mistake, 1 any other failure; one message, never a hang."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

import torch.distributed as dist

from megalite.core.base.console import write_or_drop
from megalite.core.base.errors import LocalUserError, UserError
from megalite.core.base.log import env_rank, logger, setup_logging, unfinished_code
from megalite.core.base.redact import mask, mask_tracebacks
from megalite.core.mesh.agree import agree
from megalite.core.mesh.collectives import gather_texts
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.rendezvous import launched_together, shutdown
from megalite.runtime.checkpoint.save import SaveError
from megalite.runtime.recover.member import Companion, find_companion
from megalite.runtime.start.signals import print_stacks, stop_with_torchrun
from megalite.runtime.watch.heartbeat import say_goodbye
from megalite.runtime.watch.peers import FailureWatch

# Longer than a busy machine takes to start Python and torch, well below the 30 s within which all ranks must exit.
_PATIENCE_S = 15.0
# A terminal that is paused for longer misses the last message.
_READER_PATIENCE_S = 2.0


class DivergenceError(FloatingPointError):
    """Training cannot continue without a change; every rank raises it."""


class PeerError(RuntimeError):
    """Another rank failed, and reports it itself."""


def raise_together(ctx: ParallelContext, failure: Exception | None) -> NoReturn:
    """Fail on every rank because of a failure on some; every rank calls it.

    Args:
        failure: what went wrong on this rank, if anything.

    Raises:
        UserError, SaveError: the failure of some rank; the same on every rank.
        Exception: otherwise `failure` itself on its rank, `PeerError` on the others.
    """
    agree(ctx, lambda: _reraise(failure if isinstance(failure, UserError) else None))
    unsaved = gather_texts(str(failure) if isinstance(failure, SaveError) else "", ctx.world, ctx.device)
    if any(unsaved):
        raise SaveError(next(filter(None, unsaved)))
    _reraise(failure)
    raise PeerError("another rank failed")


def _reraise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


def leave_unfinished(ctx: ParallelContext, otherwise: int = 0) -> None:
    """Exit with the launcher's code for an unfinished run, if it set one: 0 tells a scheduler that all steps are done.

    Every rank calls it, after its last save: a launcher that sees one rank fail kills the others.

    Args:
        ctx: this rank's axes.
        otherwise: the code if the launcher set none.
    """
    if code := unfinished_code() or otherwise:
        gather_texts("", ctx.world, ctx.device)
        raise SystemExit(code)


@contextmanager
def leaving_together() -> Iterator[None]:
    """Wrap the whole life of a rank: exit with the right code and one message. SIGUSR1 prints its stacks at any time.

    Errors that every rank raises (command line, layout, anything agreed on) are reported by rank 0 alone.
    """
    try:
        setup_logging(env_rank())
        companion = find_companion()
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        _exit(2)
    print_stacks()
    mask_tracebacks()
    stop_with_torchrun(companion)
    watch = FailureWatch(partial(_leave_after, companion))
    try:
        yield
    except UserError as e:
        if isinstance(e, LocalUserError):
            if companion.round:
                # The same command has met the others before: failing to do so again follows from another death.
                companion.lost_a_peer()
        else:
            watch.disarm()
            _exit_after_rank_0(2)
        for line in f"error: {e}".splitlines():
            logger.error(line)
        _exit(2)
    except KeyboardInterrupt:
        # A second Ctrl-C must not cut the message short.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if env_rank() == 0:
            print("interrupted: exiting immediately, nothing more was saved", file=sys.stderr, flush=True)
        _exit(130)
    except SystemExit:
        _end_threads(watch, companion)
        raise
    except (SaveError, DivergenceError) as e:
        # Every rank raises these, and a traceback would add nothing.
        _exit_after_rank_0(1)
        logger.error(f"{type(e).__name__}: {e}")
        _exit(1)
    except BaseException as e:
        _report_failure(e, watch, companion)
        _exit(1)
    _end_threads(watch, companion)


def _end_threads(watch: FailureWatch, companion: Companion) -> None:
    companion.leaving()
    watch.close()
    shutdown()


def _report_failure(e: BaseException, watch: FailureWatch, companion: Companion) -> None:
    """Print the error that is being handled, and inform the other ranks unless one of them was first."""
    if _lost_peer(e) or isinstance(e, dist.DistError):
        companion.lost_a_peer()
    elif isinstance(e, RuntimeError):
        # It may follow from a death that nobody knows of yet.
        companion.may_be_killed()
    if isinstance(e, PeerError):
        _print_last("exiting: another rank failed first")
    elif _lost_peer(e):
        # Where all ranks print this and none anything else, it was the network.
        _print_last("exiting: another rank failed first, or the network between them")
    else:
        _print_last(traceback.format_exc())
        watch.announce(env_rank())


def _leave_after(companion: Companion, reason: str) -> None:
    """End a rank that still waits for one that has failed."""
    companion.lost_a_peer()
    say_goodbye()
    _print_last(f"exiting: {reason}")
    _exit(1)


def _print_last(text: str) -> None:
    # Not who it was at its start: it may have taken over another rank.
    lines = "".join(f"[rank {env_rank()}] {line}\n" for line in mask(text).splitlines())
    sys.stderr.flush()
    with contextlib.suppress(OSError):
        write_or_drop(2, lines.encode(errors="backslashreplace"), _READER_PATIENCE_S)


def _exit_after_rank_0(code: int) -> None:
    """Exit silently, but not before rank 0: a launcher that sees one rank exit kills the others.

    Returns on rank 0, where rank 0 has not exited within `_PATIENCE_S`, and where ranks that were started by hand have
    not met yet: a mistake may be in the command of one of them.
    """
    if env_rank() == 0:
        return
    if not launched_together():
        if not dist.is_initialized():
            return
        _exit(code)
    signal.signal(signal.SIGTERM, lambda *_: _exit(code))
    time.sleep(_PATIENCE_S)


def _exit(code: int) -> None:
    """Exit immediately: destroying process groups could wait for peers that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _lost_peer(e: BaseException) -> bool:
    """Whether a collective failed because a peer exited."""
    text = str(e)
    phrases = (
        "Connection closed by peer",
        "Connection was likely closed",
        "Connection reset by peer",
        "Broken pipe",
        "Software caused connection abort",
        "Socket closed",
        "NCCL error: remote",
    )
    return isinstance(e, (RuntimeError, dist.DistError)) and any(phrase in text for phrase in phrases)
