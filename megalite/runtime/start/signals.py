"""What signals do: SIGTERM and SIGINT end a run after its step and a save, SIGUSR1 tells what a rank does and holds."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from types import FrameType

import torch

from megalite.core.base.log import logger
from megalite.core.mesh.rendezvous import under_torchrun
from megalite.runtime.base.child import signal_when_parent_dies
from megalite.runtime.loop.run import Run
from megalite.runtime.record.step_record import peak_memory
from megalite.runtime.recover.member import Companion, GuardedRank
from megalite.runtime.recover.messages import Ready


def print_stacks() -> None:
    """Print the stacks of this process on SIGUSR1, and at a crash in native code or while reading a mapped file.

    After SIGUSR1 comes a line on memory, as soon as the main thread is back from native code.
    """
    faulthandler.enable(file=2)
    signal.signal(signal.SIGUSR1, lambda *_: print(_memory(), file=sys.stderr, flush=True))
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True, chain=True)


def _memory() -> str:
    parts = [f"{peak_memory(torch.device('cpu')) / 2**30:.2f} GiB of the host at most"]
    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        held = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
        now, peak, reserved = (bytes / 2**30 for bytes in held)
        parts.append(f"GPU: {now:.2f} GiB allocated (at most {peak:.2f}), {reserved:.2f} reserved")
        parts.append(f"{free / 2**30:.2f} of {total / 2**30:.2f} free")
    return f"memory of process {os.getpid()}: {', '.join(parts)}"


def stop_with_torchrun(companion: Companion) -> None:
    """Get SIGTERM when torchrun is killed: it leaves its ranks running, and nobody could restart them."""
    if under_torchrun() and not isinstance(companion, GuardedRank):
        signal_when_parent_dies(signal.SIGTERM)


def stop_on_signals(run: Run) -> None:
    """Until the run is closed, let SIGTERM and SIGINT ask for a stop after the step; a second Ctrl-C ends at once."""

    def stop(number: int, _frame: FrameType | None) -> None:
        if run.stop_asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        run.stop_asked = True
        logger.info(f"{signal.Signals(number).name}: saving after this step, then exiting")

    for number in (signal.SIGTERM, signal.SIGINT):
        run.exit_stack.callback(signal.signal, number, signal.signal(number, stop) or signal.SIG_DFL)
    run.companion.say(Ready())
