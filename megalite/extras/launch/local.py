"""The ranks of one host through torch elastic, as torchrun starts them, but with their own exit code at the end.

torchrun's exit code is 1 whatever its ranks return, it prints a report of about 50 lines below their message, and after
a signal it kills ranks that are still saving after 30 s. Here signals are forwarded to the ranks, and one line names
the rank that failed.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.launcher.api import LaunchConfig

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger, unfinished_code
from megalite.extras.launch.elastic import ReserveAgent, silence
from megalite.runtime.recover.main import JOINS
from megalite.runtime.recover.member import goes_on_with_fewer, run_dir, spare_ranks, survives_hosts
from megalite.runtime.recover.succession import has_moved

USER_ERROR_CODE = 2
# As a shell says of what SIGKILL has ended.
LOST_CODE = 128 + signal.SIGKILL
# In Kubernetes the first pod's name resolves only once it runs, and pulling its image may take long.
_NAME_PATIENCE_S = 900.0
# Until a signal's handler has run, unless the interpreter waits in torch; and until a host that is there answers.
_HANDLED_S, _ANSWER_S = 5.0, 10.0
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Place:
    """Place of this host's ranks in the run.

    Attributes:
        nproc: number of ranks on this host.
        nnodes: number of hosts.
        node_rank: index of this host.
        master_addr: name or address of host 0 for the others; None on a single host.
        master_port: port of host 0 for the rendezvous.
        run_id: name of the rendezvous on several hosts.
    """

    nproc: int
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int = 29500
    run_id: str = "megalite"


class _EarlySignal(BaseException):
    """A signal that arrived before there were ranks to forward it to."""


class LocalRanks:
    """One attempt: the ranks of this host from start to end.

    Where the run goes on although its first host was lost, these ranks join it, whatever their place was.

    Args:
        place: place of the ranks in the run.
        script: training script and its flags.
        patience_s: seconds from SIGTERM until ranks that still run are killed; None: no limit.

    Attributes:
        asked: signal that asked the ranks to stop; 0: none.
    """

    def __init__(self, place: Place, script: Sequence[str], patience_s: int | None = None) -> None:
        if goes_on_with_fewer(script) and (folder := run_dir(script)) and has_moved(folder):
            # The store of the first host is gone: these ranks have one of their own, and find the hub in the folder.
            os.environ[JOINS], place = str(place.nnodes * place.nproc), Place(place.nproc)
        self.asked = 0
        self.patience_s = patience_s
        self.master, self.port = place.master_addr, place.master_port
        self.reserves = survives_hosts(script)
        # Whether a host that is told to stop leaves, and whether the run goes on without a lost one, but the first.
        self.leaves, self.first = goes_on_with_fewer(script), place.node_rank == 0
        self.replaced = self.leaves or spare_ranks(script) > 0
        self.config = LaunchConfig(
            min_nodes=place.nnodes,
            max_nodes=place.nnodes,
            nproc_per_node=place.nproc,
            run_id=place.run_id if self.master else uuid.uuid4().hex,
            rdzv_backend="static" if self.master else "c10d",
            rdzv_endpoint=f"{self.master}:{place.master_port}" if self.master else "localhost:0",
            rdzv_configs={"rank": place.node_rank} if self.master else {},
            local_addr=None if self.master else "127.0.0.1",
        )
        # torch elastic substitutes ${local_rank} in arguments, and reads "$$" as "$".
        self.words = ["-u", *(word.replace("$", "$$") for word in script)]
        self.agent: LocalElasticAgent | None = None

    def run(self) -> int:
        """Start the ranks and wait for their end; print one line if they fail. Returns the exit code."""
        if self.config.nproc_per_node > 1:
            # As torchrun does: the ranks together would have more threads than there are cores.
            os.environ.setdefault("OMP_NUM_THREADS", "1")
        # Hides torch's host-name lookup warnings, one per rank and store.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        # Any other signal that it handles would make torch elastic kill the ranks.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
        try:
            with self._signals():
                if self.master:
                    wait_for_name(self.master, _NAME_PATIENCE_S)
                self.agent = self._agent()
                failures = self.agent.run().failures
        except SignalException as e:
            return 128 + e.sigval
        except _EarlySignal:
            print("interrupted: no rank has started", file=sys.stderr)
            return 128 + self.asked
        return self.unless_late(self._code(failures))

    def _agent(self) -> LocalElasticAgent:
        config = self.config
        static = config.rdzv_backend == "static"
        host, _, port = config.rdzv_endpoint.rpartition(":")
        rendezvous = RendezvousParameters(
            backend=config.rdzv_backend,
            endpoint=config.rdzv_endpoint,
            run_id=config.run_id,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            local_addr=config.local_addr,
            **config.rdzv_configs,
        )
        spec = WorkerSpec(
            role="train",
            local_world_size=config.nproc_per_node,
            entrypoint=sys.executable,
            args=tuple(self.words),
            rdzv_handler=get_rendezvous_handler(rendezvous),
            max_restarts=0,
            master_addr=host if static else None,
            master_port=int(port) if static else None,
            local_addr=config.local_addr,
            numa_options=config.numa_options,
        )
        silence()
        assert config.logs_specs is not None
        return (ReserveAgent if self.reserves else LocalElasticAgent)(spec, config.logs_specs)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        # nohup ignores SIGHUP, and a shell without job control SIGINT.
        handled = [s for s in _FORWARDED if signal.getsignal(s) != signal.SIG_IGN]
        before = {s: signal.signal(s, self._on_signal) for s in handled}
        before[signal.SIGALRM] = signal.signal(signal.SIGALRM, lambda *_: self._send(signal.SIGKILL))
        arrived, noted = socket.socketpair()
        noted.setblocking(False)
        signal.set_wakeup_fd(noted.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._end_if_stuck, args=(arrived,), daemon=True).start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(-1)
            noted.close()
            signal.alarm(0)
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _end_if_stuck(self, arrived: socket.socket) -> None:
        """End where a signal's handler cannot run, as torch waits for other hosts, and no rank has started."""
        with arrived:
            while numbers := arrived.recv(1):
                time.sleep(_HANDLED_S)
                if numbers[0] in _FORWARDED and not self.asked and not self._pids():
                    os.write(2, b"interrupted: no rank has started\n")
                    os._exit(128 + numbers[0])

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        """Ask the ranks to save and exit; a second Ctrl-C is forwarded and ends them at once.

        Where reserves replace this host, as one that is drained, its ranks work on until their time is over. If the
        whole run is to stop, the first host is told too. With --elastic the ranks leave in order.
        """
        first, self.asked = not self.asked, signum
        works_on = self.replaced and not self.leaves and not self.first and signum == signal.SIGTERM
        if first and self.patience_s and works_on and self.agent:
            signal.alarm(self.patience_s)
            return
        if not self._send(signal.SIGTERM if first else signal.Signals(signum)):
            raise _EarlySignal
        if first and signum != signal.SIGTERM:
            what = {signal.SIGINT: "Ctrl-C", signal.SIGHUP: "SIGHUP (its terminal was closed)"}[signal.Signals(signum)]
            # Not through a stream's buffer, which the signal may have interrupted.
            os.write(2, f"{what}: all ranks get SIGTERM, to save and exit; another Ctrl-C ends them at once\n".encode())
        if first and self.patience_s:
            signal.alarm(self.patience_s)

    def _pids(self) -> list[int]:
        workers = self.agent.get_worker_group().workers if self.agent else []
        return [worker.id for worker in workers if worker.id]

    def _send(self, signum: signal.Signals) -> int:
        """Send a signal to every rank; return how many have started."""
        for pid in (pids := self._pids()):
            # Each is a child that torch elastic has not reaped, or is gone.
            try:
                os.kill(pid, signum)
            except ProcessLookupError:
                continue
        return len(pids)

    def unless_late(self, code: int) -> int:
        """Return the code of a lost host in place of an error where the first host is gone, and this is another one.

        A pod that comes back when the run is done must not be taken for its failure; of that, the first one tells.
        """
        if not self.master or not self.replaced or self.first or code in (0, LOST_CODE, unfinished_code()):
            return code
        try:
            socket.create_connection((self.master, self.port), timeout=_ANSWER_S).close()
        except OSError:
            print("error: the first host is gone, with the run: this one counts as lost", file=sys.stderr)
            return LOST_CODE
        return code

    def _code(self, failures: Mapping[int, ProcessFailure]) -> int:
        """Return the exit code, after one line about ranks that did not report their end themselves."""
        codes = {rank: failure.exitcode for rank, failure in failures.items()}
        if not codes:
            return 0
        if self.asked and set(codes.values()) <= {-signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGINT}:
            # The ranks report an interruption themselves, except before they have begun.
            if -signal.SIGTERM in codes.values():
                print("interrupted before the first step: nothing was saved", file=sys.stderr)
            return 128 + self.asked
        for code in (USER_ERROR_CODE, unfinished_code()):
            if code in codes.values():
                return code
        # A rank that was killed first is the cause of the others' errors; torch elastic then sends these SIGTERM.
        rank = min(codes, key=lambda r: (codes[r] == -signal.SIGTERM, codes[r] >= 0))
        code = codes[rank]
        if code < 0:
            cause = f"was killed by {signal.Signals(-code).name}" + " (out of memory?)" * (-code == signal.SIGKILL)
        else:
            cause = f"ended with exit code {code}: see its message above"
        print(f"error: rank {rank} {cause}", file=sys.stderr)
        # Where others replace this host, a scheduler is to tell its loss from an error of the run.
        return LOST_CODE if self.replaced and code == -signal.SIGKILL else 1


def wait_for_name(host: str, patience_s: float) -> None:
    """Wait until a host name resolves.

    Raises:
        UserError: it does not within `patience_s` seconds.
    """
    deadline, waiting = time.monotonic() + patience_s, False
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as e:
            if time.monotonic() > deadline:
                rule = f"does not resolve on {socket.gethostname()} ({e.strerror})"
                raise UserError(f"--master-addr {host}", rule, "give host 0's name or address") from None
        if not waiting:
            logger.warning(f"waiting for {host}: it does not resolve yet")
        waiting = True
        time.sleep(1.0)
