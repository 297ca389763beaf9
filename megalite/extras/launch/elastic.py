"""torchrun for a run with ranks in reserve, which goes on without a lost host; started as a module.

Two things differ. At the end of the run an agent does not wait five minutes for that of a lost host. And it is killed
with what has started it: told to stop, as torchrun is otherwise, its ranks would have the whole run save and end.
"""

from __future__ import annotations

import signal
from functools import partial

from torch.distributed import run
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher import api

from megalite.base.child import signal_when_parent_dies

# Guards end together: those of other hosts are as good as gone.
EXIT_WAIT_S = 10.0


if __name__ == "__main__":
    signal_when_parent_dies(signal.SIGKILL)
    api.LocalElasticAgent = partial(LocalElasticAgent, exit_barrier_timeout=EXIT_WAIT_S)  # type: ignore[assignment,misc]
    run.main()
