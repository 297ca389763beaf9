"""torchrun for a run with ranks in reserve, which goes on without a lost host; started as a module."""

from __future__ import annotations

import logging
import signal
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher import api

# Guards end together: those of other hosts are as good as gone.
_EXIT_WAIT_S = 10.0


class ReserveAgent(LocalElasticAgent):
    """torch elastic's agent of a host that others replace when it is lost.

    Two things differ. At the end of the run it does not wait five minutes for that of a lost host. And when one of its
    ranks is killed, it kills the others: told to stop, they would have the whole run save and end.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "exit_barrier_timeout": _EXIT_WAIT_S})

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started = super()._start_workers(worker_group)
        ranks: Any = self._pcontext
        close = ranks.close

        def close_as_one(death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
            codes = [handler.proc.poll() or 0 for handler in ranks.subprocess_handlers.values()]
            # A rank that gets SIGTERM or SIGINT before it handles them was asked to stop, as the others were.
            lost = any(code < 0 and -code not in (signal.SIGTERM, signal.SIGINT) for code in codes)
            close(death_sig or (signal.SIGKILL if lost else None), timeout)

        ranks.close = close_as_one
        return started


def silence() -> None:
    """Keep torch elastic from logging, such as a traceback where a lost host does not come to the end of the run."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


if __name__ == "__main__":
    silence()
    api.LocalElasticAgent = ReserveAgent  # type: ignore[misc]
    run.main()
