"""The machine at hand as a described cluster: what this rank's device is, and the rates to expect of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megalite.dist.context import local_world_size
from megalite.errors import LocalUserError
from megalite.log import env_int
from megalite.plan.cluster import DEVICES, FITTED, Cluster, Constants, Device, read_calibration

# In a process of its own: `pick_device` sets variables that CUDA reads when it starts in a process.
_READ_CUDA = """import json, sys, torch
p = torch.cuda.get_device_properties(int(sys.argv[1]))
print(json.dumps([p.name, p.total_memory, p.multi_processor_count]))"""
_PATIENCE_S = 120
# A CPU whose rates nobody has measured: one core, its share of memory, and gloo on one host.
_CPU = Device("cpu", 60e9, 60e9, 0.8, 8e9, 1e9, 1e9, 8e9, units=1, tile=8, host_link=4e9, host_bandwidth=8e9)
_ON_CPU = replace(FITTED, memory=1.0, attention=0.3, step=0.0, host=2e-4)


@dataclass(frozen=True)
class Seen:
    """What this rank finds.

    Attributes:
        name: of the GPU, or "cpu".
        memory: bytes of the GPU, or this rank's share of the host's.
        host_memory: this rank's share of the host's.
        units: multiprocessors of the GPU; 0 for a CPU.
    """

    name: str
    memory: int
    host_memory: int
    units: int = 0

    @property
    def on_cpu(self) -> bool:
        """Whether this is no GPU."""
        return self.units == 0


def read_device(kind: str) -> Seen:
    """Read name and memory of this rank's device, without starting CUDA in this process.

    The figures are those of the hardware, not of what is free at the moment: ranks must agree on them.

    Args:
        kind: as `--device`.

    Raises:
        LocalUserError: there is no such device, or it gives no answer.
    """
    share = _host_memory() // local_world_size()
    count = 0 if kind == "cpu" else torch.cuda.device_count()
    if count == 0:
        if kind == "cuda":
            raise LocalUserError(
                "--device cuda", "requires a CUDA device and a CUDA build of torch", "use --device cpu"
            )
        return Seen("cpu", share, share)
    index = min(env_int("LOCAL_RANK", 0), count - 1)
    command = [sys.executable, "-c", _READ_CUDA, str(index)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=True)
    except (subprocess.SubprocessError, OSError) as e:
        why = (getattr(e, "stderr", "") or str(e)).strip().splitlines()[-1]
        raise LocalUserError(f"GPU {index}", f"cannot be read: {why}", "see nvidia-smi, or use --device cpu") from None
    name, memory, units = json.loads(done.stdout)
    return Seen(name, memory, share, units)


def device_in_use(device: torch.device) -> Seen:
    """Describe the device that this process already uses, but for the host's memory."""
    if device.type == "cpu":
        return Seen("cpu", 1, 1)
    found = torch.cuda.get_device_properties(device)
    return Seen(found.name, found.total_memory, 1, found.multi_processor_count)


def _host_memory() -> int:
    """Bytes of the host's memory, or what its control group allows."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(installed, int(text)) if text.isdecimal() else installed


def rates_known(seen: Seen) -> bool:
    """Whether there are rates of this very device, so that times can be predicted without a calibration."""
    return _listed(seen) is not None


def machine(seen: Seen, world: int, calibration: str | None = None) -> tuple[Cluster, str]:
    """Describe `world` ranks on devices like this one.

    Args:
        calibration: file of `tools/plan.py calibrate`.

    Returns:
        The cluster, and where its rates come from.

    Raises:
        UserError: the calibration cannot be read.
    """
    if calibration is not None:
        device, constants = read_calibration(Path(calibration))
        source = f"rates of {calibration}"
    else:
        device, constants, source = _known(seen)
    # The memory is that of this machine, wherever the rates are from.
    device = replace(device, memory=seen.memory, host_memory=seen.host_memory)
    near = env_int("LOCAL_WORLD_SIZE", 0) or (world if seen.on_cpu else device.domain)
    return Cluster(device, world, min(near, world), device.network, constants), source


def _known(seen: Seen) -> tuple[Device, Constants, str]:
    """Find rates by the name of the device."""
    if seen.on_cpu:
        return _CPU, _ON_CPU, "rough rates of a CPU core; measure them with tools/plan.py calibrate"
    name = _listed(seen)
    if name is not None:
        return DEVICES[name], FITTED, f"rates of {name}"
    like = DEVICES["a100-80g"]
    scale = seen.units / like.units
    # Links as of PCIe: whether there is anything faster is not known.
    device = replace(like, name=seen.name, peak=like.peak * scale, fp32=like.fp32 * scale, hbm=like.hbm * scale,
                     nvlink=25e9, units=seen.units)  # fmt: skip
    return (
        device,
        FITTED,
        f"rates of an A100 scaled to {seen.units} multiprocessors; tools/plan.py calibrate has better",
    )


def _listed(seen: Seen) -> str | None:
    """Name of a GPU in the table of data sheets."""
    if re.search(r"\bA100\b", seen.name):
        return "a100-40g" if seen.memory < 60e9 else "a100-80g"
    names = ("H200", "H100", "B200")
    return next((name.lower() for name in names if re.search(rf"\b{name}\b", seen.name)), None)
