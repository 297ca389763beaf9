"""Network namespaces, which stand for hosts."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from torch.distributed import TCPStore


@contextlib.contextmanager
def networks(count: int) -> Iterator[tuple[str, list[str]]]:
    """Network namespaces on one bridge; the bridge's address, and the names of the namespaces."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2 (network namespaces)")
    pid = os.getpid()
    net, bridge, names = f"10.{64 + pid % 64}.{pid // 64 % 256}", f"mlb{pid}", [f"mls{pid}{i}" for i in range(count)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    with ExitStack() as undo:
        ip("link", "add", bridge, "type", "bridge")
        undo.callback(ip, "link", "del", bridge)
        ip("addr", "add", f"{net}.254/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for i, name in enumerate(names):
            ip("netns", "add", name)
            undo.callback(ip, "netns", "del", name)
            ip("link", "add", f"{name}c", "type", "veth", "peer", "name", "eth0", "netns", name)
            # The kernel takes its time to end the namespace; the next networks of this process have the same names.
            undo.callback(ip, "link", "del", f"{name}c")
            ip("link", "set", f"{name}c", "master", bridge, "up")
            ip("-n", name, "addr", "add", f"{net}.{i + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")
        yield f"{net}.254", names


def store_in(name: str, address: str, port: int) -> TCPStore:
    """A store of this process in which the ranks of a namespace meet, as in their launcher's."""
    servers: list[socket.socket] = []

    def listen() -> None:
        # For this thread alone, which ends.
        with open(f"/run/netns/{name}") as there:
            assert ctypes.CDLL(None).setns(there.fileno(), 0) == 0
        servers.append(socket.create_server((address, port)))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=servers[0].detach())


def pids_in(name: str) -> list[int]:
    """The processes in a namespace."""
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True)
    return list(map(int, listed.stdout.split()))
