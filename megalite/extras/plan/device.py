"""The machine at hand as a `Cluster`: this rank's device, and the rates to expect of it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megalite.core.base.errors import LocalUserError
from megalite.core.base.hardware import DEVICES, Device, find_gpu
from megalite.core.base.host_memory import installed_memory
from megalite.core.base.log import env_int
from megalite.core.mesh.rendezvous import local_world_size
from megalite.extras.plan.cluster import FITTED, Cluster, Constants, read_calibration

# In a separate process: `pick_device` sets variables that CUDA reads when it starts in a process.
_READ_CUDA = """import json, sys, torch
p = torch.cuda.get_device_properties(int(sys.argv[1]))
print(json.dumps([p.name, p.total_memory, p.multi_processor_count]))"""
_PATIENCE_S = 120
# A CPU without a calibration: one core, its share of memory, and gloo on one host.
_CPU = Device("cpu", 60e9, 60e9, 0.8, 8e9, 1e9, 1e9, 8e9, units=1, tile=8, host_link=4e9, host_bandwidth=8e9)
_ON_CPU = replace(FITTED, memory=1.0, attention=0.3, step=0.0, host=2e-4)


@dataclass(frozen=True)
class DetectedDevice:
    """The device of this rank, and its share of the host's memory.

    Attributes:
        name: name of the GPU, or "cpu".
        memory: bytes of the GPU's memory, or this rank's share of the host's.
        host_memory: this rank's share of the host's memory, in bytes.
        units: number of the GPU's multiprocessors; 0 for a CPU.
    """

    name: str
    memory: int
    host_memory: int
    units: int = 0

    @property
    def on_cpu(self) -> bool:
        """Whether this is a CPU."""
        return self.units == 0


def read_device(kind: str) -> DetectedDevice:
    """Read name and memory of this rank's device, without starting CUDA in this process.

    The memory is the installed one, not what is free at the moment: ranks must agree on it.

    Args:
        kind: value of `--device`.

    Raises:
        LocalUserError: there is no such device, or it does not respond.
    """
    share = installed_memory() // local_world_size()
    count = 0 if kind == "cpu" else torch.cuda.device_count()
    if count == 0:
        if kind == "cuda":
            raise LocalUserError(
                "--device cuda", "requires a CUDA device and a CUDA build of torch", "use --device cpu"
            )
        return DetectedDevice("cpu", share, share)
    index = min(env_int("LOCAL_RANK", 0), count - 1)
    command = [sys.executable, "-c", _READ_CUDA, str(index)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=True)
    except (subprocess.SubprocessError, OSError) as e:
        why = (getattr(e, "stderr", "") or str(e)).strip().splitlines()[-1]
        raise LocalUserError(f"GPU {index}", f"cannot be read: {why}", "see nvidia-smi, or use --device cpu") from None
    name, memory, units = json.loads(done.stdout)
    return DetectedDevice(name, memory, share, units)


def device_in_use(device: torch.device) -> DetectedDevice:
    """Describe the device that this process already uses, without the host's memory."""
    if device.type == "cpu":
        return DetectedDevice("cpu", 1, 1)
    properties = torch.cuda.get_device_properties(device)
    return DetectedDevice(properties.name, properties.total_memory, 1, properties.multi_processor_count)


def rates_known(detected: DetectedDevice) -> bool:
    """Whether the rates of this device are known, so that times can be predicted without a calibration."""
    return find_gpu(detected.name, detected.memory) is not None


def machine(detected: DetectedDevice, world: int, calibration: str | None = None) -> tuple[Cluster, str]:
    """Describe a cluster of `world` ranks on devices like this one.

    Args:
        calibration: file of `megalite plan calibrate`.

    Returns:
        The cluster, and where its rates come from.

    Raises:
        UserError: the calibration cannot be read.
    """
    if calibration is not None:
        device, constants = read_calibration(Path(calibration))
        source = f"rates of {calibration}"
    else:
        device, constants, source = _known(detected)
    # The memory is this machine's, wherever the rates come from.
    device = replace(device, memory=detected.memory, host_memory=detected.host_memory)
    near = env_int("LOCAL_WORLD_SIZE", 0) or (world if detected.on_cpu else device.domain)
    return Cluster(device, world, min(near, world), device.network, constants), source


def _known(detected: DetectedDevice) -> tuple[Device, Constants, str]:
    """Find rates by the name of the device."""
    if detected.on_cpu:
        return _CPU, _ON_CPU, "rough rates of a CPU core; measure them with megalite plan calibrate"
    gpu = find_gpu(detected.name, detected.memory)
    if gpu is not None:
        return gpu.device, FITTED, f"rates of {gpu.device.name}"
    a100 = DEVICES["a100-80g"]
    scale = detected.units / a100.units
    # PCIe links, since nothing faster is known of.
    device = replace(
        a100,
        name=detected.name,
        peak=a100.peak * scale,
        fp32=a100.fp32 * scale,
        hbm=a100.hbm * scale,
        nvlink=25e9,
        units=detected.units,
    )
    return (
        device,
        FITTED,
        f"rates of an A100 scaled to {detected.units} multiprocessors; megalite plan calibrate gives better ones",
    )
