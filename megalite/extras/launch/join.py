"""`megalite join`: a host that was not in the launch of a run with `--elastic` waits in reserve, or lets it grow."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megalite.core.base.errors import UserError
from megalite.extras.plan.cluster import read_tree
from megalite.extras.tool import ToolParser
from megalite.runtime.recover.succession import has_moved

_CONNECT_S = 30.0

_DESCRIPTION = """Join a run with --elastic from a host that was not in its launch.

RUN_DIR is the run's folder, on a disk that this host shares. As many ranks are started as the run's other hosts have,
by the command and in the directory of these. They wait in reserve until the run has lost ranks, then train in their
place; the run never has more ranks than at its start. SIGTERM has them leave after a step."""


def main(argv: Sequence[str]) -> int:
    """Start this host's ranks as the run's folder says; returns their exit code."""
    parser = ToolParser(prog="megalite join", description=_DESCRIPTION)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="folder of the run")
    run = Path(parser.parse_args(list(argv)).run_dir)
    told = _read(run)
    # Imports torch.
    from megalite.extras.launch.local import LocalRanks, Place

    os.chdir(told["directory"])
    nodes = told["nnodes"]
    # The last host may be there too: the rendezvous tells this one its place, which a rank in reserve does not take.
    place = Place(told["nproc"], nodes, nodes - 1, told["master_addr"], told["master_port"], told["run_id"])
    return LocalRanks(place, told["command"]).run()


def _read(run: Path) -> dict[str, Any]:
    """Read how the run is joined, and see that it is there.

    Raises:
        UserError: it cannot be joined.
    """
    file, given = run / "join.json", f"megalite join {run}"
    remedy = "name the folder of a run with --recover host --elastic that torchrun or megalite has started"
    told = read_tree(file, given, remedy)
    kinds = {"nproc": int, "nnodes": int, "master_addr": str, "master_port": int, "run_id": str, "directory": str}
    if not all(isinstance(told.get(name), kind) for name, kind in {**kinds, "command": list}.items()):
        raise UserError(given, f"{file.name} does not say how", remedy)
    if has_moved(str(run)):
        return told
    address = told["master_addr"], told["master_port"]
    try:
        socket.create_connection(address, timeout=_CONNECT_S).close()
    except OSError as e:
        rule = f"the run's first host does not answer at {address[0]}:{address[1]} ({e.strerror or e})"
        raise UserError(given, rule, "start the run again, or open that port to this host") from None
    return told
