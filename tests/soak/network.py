"""Two network namespaces with a cable between them, which can be pulled."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable

from tests.faults.zygote import ROOT
from tests.soak.attempt import END_S, Attempt


class Network:
    """Two hosts, as far as their network is concerned. Needs root."""

    def __init__(self) -> None:
        self.names = [f"soak{os.getpid()}{side}" for side in "ab"]

    @staticmethod
    @functools.cache
    def possible() -> bool:
        """Whether this user may make namespaces."""
        name = f"soak{os.getpid()}t"
        if shutil.which("ip") is None or subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
            return False
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
        return True

    def __enter__(self) -> Network:
        a, b = self.names
        for name in self.names:
            _ip("netns", "add", name)
        _ip("link", "add", "cable0", "netns", a, "type", "veth", "peer", "name", "cable0", "netns", b)
        for number, name in enumerate(self.names, 1):
            _ip("-n", name, "addr", "add", f"10.78.0.{number}/24", "dev", "cable0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "cable0", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def run(self, attempt: Attempt, words: list[str], reached: Callable[[], bool], cut_s: float | None) -> bool:
        """Run two ranks, one in each; cut them off from each other, for a while or for good (None).

        Returns:
            Whether they still lived then.
        """
        env = {"MASTER_ADDR": "10.78.0.1", "GLOO_SOCKET_IFNAME": "cable0", "TP_SOCKET_IFNAME": "cable0"}
        script = [sys.executable, str(ROOT / "pretrain_gpt.py"), *words]
        attempt.start_each([["ip", "netns", "exec", name, *script] for name in self.names], env)
        if hit := reached():
            _ip("-n", self.names[1], "link", "set", "cable0", "down")
            if cut_s is not None:
                time.sleep(cut_s)
                _ip("-n", self.names[1], "link", "set", "cable0", "up")
        attempt.wait(END_S)
        return hit


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
