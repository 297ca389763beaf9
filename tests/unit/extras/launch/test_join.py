"""`megalite join`: what it refuses before a rank is started."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from megalite.core.base.errors import UserError
from megalite.extras.launch import local
from megalite.extras.launch.join import main
from megalite.runtime.recover.main import JOINS
from megalite.runtime.recover.succession import FOLDER, Offer, make_offer
from tests.ranks import reserve_port

TOLD = {"nproc": 1, "nnodes": 2, "master_addr": "127.0.0.1", "run_id": "x", "directory": "/", "command": ["p.py"]}


def test_a_file_that_does_not_say_how(tmp_path: Path) -> None:
    for text in ("[1]", "{}", json.dumps({**TOLD, "master_port": "1"})):
        (tmp_path / "join.json").write_text(text)
        with pytest.raises(UserError, match=r"join.json does not say how"):
            main([str(tmp_path)])


def test_a_run_whose_first_host_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another host has its place: the ranks meet in a store of their own, and are of the launcher's world."""
    started: list[local.LocalRanks] = []

    def run(ranks: local.LocalRanks) -> int:
        started.append(ranks)
        return 7

    monkeypatch.setattr(local.LocalRanks, "run", run)
    monkeypatch.setenv(JOINS, "")
    monkeypatch.chdir(tmp_path)
    command = ["p.py", "--recover", "host", "--elastic", "--run-dir", str(tmp_path)]
    told = {**TOLD, "nproc": 4, "master_port": reserve_port(), "command": command}
    (tmp_path / "join.json").write_text(json.dumps(told))
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert make_offer(str(tmp_path / FOLDER), 1, Offer("127.0.0.1", server.getsockname()[1], "secret"))
        assert main([str(tmp_path)]) == 7
        config = started[0].config
        assert (config.min_nodes, config.nproc_per_node, config.rdzv_backend) == (1, 4, "c10d")
        assert os.environ[JOINS] == "8"
    # Where nobody answers, that was another attempt: the hosts of this one meet as ever.
    again = local.LocalRanks(local.Place(4, 2, 1, "127.0.0.1", 29500), command)
    assert (again.config.min_nodes, again.config.rdzv_backend) == (2, "static")


def test_a_run_that_has_ended(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (tmp_path / "join.json").write_text(json.dumps({**TOLD, "master_port": port}))
    with pytest.raises(UserError, match=f"the run's first host does not answer at 127.0.0.1:{port}"):
        main([str(tmp_path)])
