"""What signals do: SIGTERM and SIGINT end a run after its step and a save, SIGUSR1 prints the stacks of a rank."""

from __future__ import annotations

import faulthandler
import signal
from types import FrameType

from megalite.core.base.log import logger
from megalite.core.mesh.rendezvous import under_torchrun
from megalite.runtime.base.child import signal_when_parent_dies
from megalite.runtime.loop.run import Run
from megalite.runtime.recover.member import Companion, GuardedRank
from megalite.runtime.recover.messages import Ready


def print_stacks() -> None:
    """Print the stacks of this process on SIGUSR1, and at a crash in native code or while reading a mapped file."""
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True, chain=False)


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
