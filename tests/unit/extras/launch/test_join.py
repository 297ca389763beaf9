"""`megalite join`: what it refuses before a rank is started."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from megalite.core.base.errors import UserError
from megalite.extras.launch.join import main

TOLD = {"nproc": 1, "nnodes": 2, "master_addr": "127.0.0.1", "run_id": "x", "directory": "/", "command": ["p.py"]}


def test_a_file_that_does_not_say_how(tmp_path: Path) -> None:
    for text in ("[1]", "{}", json.dumps({**TOLD, "master_port": "1"})):
        (tmp_path / "join.json").write_text(text)
        with pytest.raises(UserError, match=r"join.json does not say how"):
            main([str(tmp_path)])


def test_a_run_that_has_ended(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (tmp_path / "join.json").write_text(json.dumps({**TOLD, "master_port": port}))
    with pytest.raises(UserError, match=f"the run's first host does not answer at 127.0.0.1:{port}"):
        main([str(tmp_path)])
