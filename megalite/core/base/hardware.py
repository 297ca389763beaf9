"""Data sheets of GPUs: a new GPU is one row of `GPUS`. Without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Device:
    """Rates of one GPU (or CPU process): FLOP/s, bytes and bytes/s.

    Attributes:
        name: name of `--cluster`.
        peak: dense bf16 FLOP/s (data sheets also give twice as much, with sparsity).
        fp32: FLOP/s of fp32 matrix products.
        gemm: fraction of `peak` that a large matrix product reaches; fitted per architecture.
        hbm: bytes/s of its memory.
        nvlink: bytes/s to a peer of the same domain, one direction (data sheets give the sum of both).
        network: usual bytes/s of its network card, one direction.
        memory: bytes of its memory.
        units: number of streaming multiprocessors, which share the tiles of a matrix product.
        domain: number of GPUs that share NVLink.
        host_link: bytes/s to the host's memory, one direction.
        host_memory: bytes of host memory per GPU, as in the vendor's own servers.
        host_bandwidth: bytes/s of host memory per GPU.
        tile: number of rows and columns of a tile.
        fp8: its FP8 peak over `peak`; 0 without such products.
    """

    name: str
    peak: float
    fp32: float
    gemm: float
    hbm: float
    nvlink: float
    network: float
    memory: float
    units: int
    domain: int = 8
    host_link: float = 25e9
    host_memory: float = 250e9
    host_bandwidth: float = 40e9
    tile: int = 128
    fp8: float = 2.0


@dataclass(frozen=True)
class Gpu:
    """A row of the table.

    Attributes:
        device: rates of the board with NVLink (SXM).
        word: word in the name that the driver gives ("NVIDIA H100 80GB HBM3"); "" if that name means another row.
        boards: (word, dense bf16 FLOP/s) of boards with the same chip but another peak.
    """

    device: Device
    word: str = ""
    boards: tuple[tuple[str, float], ...] = ()


_H100 = Device("h100", 989e12, 67e12, 0.66, 3.35e12, 450e9, 50e9, 85.0e9, 132, host_link=55e9)
GPUS = (
    Gpu(
        Device("a100-40g", 312e12, 19.5e12, 0.80, 1.555e12, 300e9, 25e9, 42.3e9, 108, host_memory=125e9, fp8=0), "A100"
    ),
    Gpu(Device("a100-80g", 312e12, 19.5e12, 0.80, 2.04e12, 300e9, 25e9, 85.1e9, 108, fp8=0), "A100"),
    Gpu(_H100, "H100", boards=(("PCIe", 756e12), ("NVL", 835e12))),
    # torchtitan's: 96 GB and 500 W, at which long matrix products run at four fifths of the clock.
    Gpu(replace(_H100, name="h100-500w", peak=0.8 * 989e12, hbm=2.4e12, memory=102e9)),
    Gpu(replace(_H100, name="h200", hbm=4.8e12, memory=150e9), "H200", boards=(("NVL", 835e12),)),
    Gpu(
        Device("b200", 2250e12, 80e12, 0.445, 8e12, 900e9, 50e9, 191e9, 148, host_link=55e9, host_memory=500e9), "B200"
    ),
    # From data sheets alone: no published run checks their share of peak, which is that of a chip like them.
    Gpu(Device("a800", 312e12, 19.5e12, 0.80, 2.04e12, 200e9, 25e9, 85.1e9, 108, fp8=0), "A800"),
    Gpu(replace(_H100, name="h800", nvlink=200e9), "H800"),
    Gpu(replace(_H100, name="h20", peak=148e12, fp32=44e12, gemm=0.80, hbm=4.0e12, memory=102e9, units=78), "H20"),
    # Eight on PCIe 4.0; the 4090 copies to its peers through host memory.
    Gpu(Device("l40s", 362e12, 91.6e12, 0.66, 0.864e12, 32e9, 12.5e9, 47.7e9, 142), "L40S"),
    Gpu(Device("rtx4090", 165.2e12, 82.6e12, 0.80, 1.008e12, 16e9, 3.1e9, 25.3e9, 128), "RTX 4090$"),
    # Infinity Fabric to seven peers. hipBLASLt reaches less of the peak than cuBLAS does on an H100.
    Gpu(Device("mi300x", 1307e12, 163e12, 0.43, 5.3e12, 448e9, 50e9, 206e9, 304, host_link=55e9), "MI300X"),
)
DEVICES: dict[str, Device] = {gpu.device.name: gpu.device for gpu in GPUS}


def find_gpu(name: str, memory: float = 0.0) -> Gpu | None:
    """Look up a GPU by the name that the driver gives; None if it is not listed, or is a part of a GPU (MIG).

    Args:
        memory: bytes of its memory, which decide between GPUs of the same name.
    """
    # Whole words: GH200 and GB200 are different chips from H200 and B200.
    rows = [gpu for gpu in GPUS if gpu.word and "MIG" not in name and re.search(rf"\b{gpu.word}\b", name)]
    return min(rows, key=lambda gpu: abs(gpu.device.memory - memory), default=None)


def peak_of_name(name: str) -> float | None:
    """Look up the dense bf16 peak of a GPU in FLOP/s; None if it is not listed."""
    gpu = find_gpu(name)
    if gpu is None:
        return None
    return next((peak for word, peak in gpu.boards if re.search(rf"\b{word}\b", name)), gpu.device.peak)


def nvlink_speed(name: str, matrix: str) -> float | None:
    """Look up the bandwidth of a GPU's NVLinks, one direction, in bytes per second; None if unknown.

    Args:
        matrix: output of `nvidia-smi topo -m`.
    """
    gpu = find_gpu(name) if re.search(r"\bNV\d+\b", matrix) else None
    return None if gpu is None else gpu.device.nvlink
