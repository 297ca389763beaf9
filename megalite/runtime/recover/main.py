"""How a guard's process begins. Standard library only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from megalite.core.base.errors import UserError, require
from megalite.core.base.log import env_int
from megalite.runtime.base.child import allow_many_files, signal_when_parent_dies
from megalite.runtime.recover.guard import Guard
from megalite.runtime.recover.processes import as_exit_code, die_first_without_memory

# Number of the launcher's ranks, where a host joins a run whose launcher it cannot ask.
JOINS = "MEGALITE_JOINS"


def join() -> None:
    """Have a rank of a host that joins be one of the run's launcher, the last one, whose place it does not take."""
    if joins := env_int(JOINS, 0):
        os.environ["WORLD_SIZE"], os.environ["RANK"] = str(joins), str(joins - 1)


def reserve(spares: int) -> bool:
    """Have the world be the launcher's without its last `spares` ranks; return whether this is one of those.

    Exits where the launcher does not say how many ranks there are, or has started too few.
    """
    if spares == 0:
        return False
    try:
        world, rank = env_int("WORLD_SIZE", 0) - spares, env_int("RANK", 0)
        rule = "needs more ranks than that, started by torchrun or megalite train"
        require(world > 0, f"--spare-ranks {spares}", rule, "start some that train")
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    os.environ["WORLD_SIZE"] = str(world)
    return rank >= world


def main(command: list[str], parent: int, spares: int) -> None:
    """Guard the rank that `command` starts.

    Args:
        command: program and arguments.
        parent: the launcher's process.
        spares: how many of the launcher's ranks wait in reserve.
    """

    def start(descriptor: int) -> int:
        # A session of its own: what a terminal or a launcher sends to the guard's group is passed on, once.
        env = {**os.environ, "MEGALITE_GUARD": str(descriptor)}
        process = subprocess.Popen(command, pass_fds=[descriptor], env=env, start_new_session=True)
        process.returncode = 0  # the guard waits for it: a later Popen must not
        die_first_without_memory(process.pid)
        return process.pid

    launched = "TORCHELASTIC_RUN_ID" in os.environ
    if launched:
        # As its ranks do themselves where they have no guard; with ranks in reserve it is a lost host, and no reason
        # for the run to save and end.
        number = signal.SIGKILL if spares else signal.SIGTERM
        signal_when_parent_dies(number)
        if os.getppid() != parent:
            sys.exit(as_exit_code(-number))
    join()
    allow_many_files()  # with --elastic, all ranks borrow from it at once
    Guard(start, parent if launched else 0, reserve(spares), spares).serve()
