"""Described clusters: a GPU by its data sheet, how many share NVLink, the network between hosts, and frozen constants.

`Cluster.parse("h100:64")` needs no GPU. Nothing here is measured by this project: rates are data sheets', constants are
 fitted to published runs (docs/plan.md). `read_calibration` replaces both by what one machine measured.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megalite.config.names import suggest
from megalite.errors import UserError, require


@dataclass(frozen=True)
class Device:
    """One GPU (or CPU process): dense bf16 FLOP/s, bytes and bytes/s.

    Attributes:
        peak: dense bf16 FLOP/s.
        fp32: FLOP/s of fp32 matrix products.
        gemm: fraction of `peak` that a large matrix product reaches; fitted per architecture.
        hbm: bytes/s of its memory.
        nvlink: bytes/s to a peer of the same domain, one direction.
        network: usual bytes/s of its network card, one direction.
        memory: bytes.
        units: streaming multiprocessors, over which the tiles of a matrix product are dealt.
        tile: rows and columns of such a tile.
        domain: GPUs that share NVLink.
        host_link: bytes/s to the host's memory, one direction.
        host_memory: bytes of host memory per GPU, as in the vendor's own servers.
        host_bandwidth: bytes/s of host memory per GPU.
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

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            require(
                f.name == "name" or (isinstance(value, int | float) and 0 < value < math.inf),
                f"device {self.name}: {f.name} {value}",
                "must be a number above 0",
                "correct the calibration file, or write it again with plan.py calibrate",
            )


_H100 = Device("h100", 989e12, 67e12, 0.66, 3.35e12, 450e9, 50e9, 85.0e9, 132, host_link=55e9)
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("a100-40g", 312e12, 19.5e12, 0.80, 1.555e12, 300e9, 25e9, 42.3e9, 108, host_memory=125e9),
        Device("a100-80g", 312e12, 19.5e12, 0.80, 2.04e12, 300e9, 25e9, 85.1e9, 108),
        _H100,
        # torchtitan's: 96 GB and 500 W, so that long matrix products run at four fifths of the clock.
        replace(_H100, name="h100-500w", peak=0.8 * 989e12, hbm=2.4e12, memory=102e9),
        replace(_H100, name="h200", hbm=4.8e12, memory=150e9),
        Device("b200", 2250e12, 80e12, 0.445, 8e12, 900e9, 50e9, 191e9, 148, host_link=55e9, host_memory=500e9),
    )
}
"""Data sheets, and the fitted fraction of peak. Names are those of `--cluster`."""
_SHORT = {"a100": "a100-80g"}


@dataclass(frozen=True)
class Constants:
    """What no data sheet has, fitted once to published runs and frozen; units in the comments of docs/plan.md.

    Attributes:
        gemm_depth: reduction length at which a matrix product reaches half its rate.
        memory: fraction of `Device.hbm` that elementwise kernels reach.
        attention: fraction of `Device.peak` that fused attention reaches, forward and backward.
        nvlink, network: fractions of the links' rates that collectives reach.
        overlap_tp: fraction of tensor-parallel traffic that overlap hides.
        eager: factor on elementwise time when nothing is fused.
        latency: seconds per collective, times 1 + 0.15 log2 of its ranks.
        jitter: growth of a step with log2 of the hosts.
        step: seconds per step of what nothing hides: the norm's sum over all ranks, the host's launches, logging.
        window: fraction of a backward pass behind which traffic over dp can hide.
        host: seconds of host time per block and forward pass, beside the device's (0: kernels are queued ahead).
    """

    gemm_depth: float = 200.0
    memory: float = 0.70
    attention: float = 0.45
    nvlink: float = 0.70
    network: float = 0.80
    overlap_tp: float = 0.70
    eager: float = 2.0
    latency: float = 15e-6
    jitter: float = 0.004
    step: float = 0.015
    window: float = 0.8
    host: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(
                isinstance(value, int | float) and 0 <= value < math.inf,
                f"constant {name} {value!r}",
                "must be a number, at least 0",
                "correct the calibration file, or write it again with plan.py calibrate",
            )


FITTED = Constants()
"""Frozen: fitted to the published runs in tests/data/plan_reference.json."""


@dataclass(frozen=True)
class Cluster:
    """Equal devices: `gpus` in all, `domain` share NVLink, and `network` bytes/s, one direction, join each to all."""

    device: Device
    gpus: int
    domain: int
    network: float
    constants: Constants = field(default=FITTED)

    def __post_init__(self) -> None:
        given = f"--cluster {self.device.name}:{self.gpus}"
        for name in ("gpus", "domain", "network"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"{given}, {name} {value}", "must be above 0", "correct the number")

    @classmethod
    def parse(cls, text: str, device: Device | None = None, constants: Constants = FITTED) -> Cluster:
        """Read `NAME:GPUS[,domain=N][,network=GBPS]`: `h100:64`, or `b200:288,domain=72,network=100`.

        Args:
            text: the description; network is in 1e9 bytes/s per GPU, one direction.
            device: stands for the name `machine` (see `read_calibration`).

        Raises:
            UserError: unknown device or option, or numbers out of range.
        """
        head, *options = text.split(",")
        name, _, number = head.partition(":")
        known = DEVICES if device is None else {**DEVICES, "machine": device}
        name = _SHORT.get(name.lower(), name.lower())
        if name == "machine" and device is None:
            rule = "machine is what plan.py calibrate has measured, and no measurements are given"
            raise UserError(f"--cluster {text}", rule, "add --calibration FILE")
        if name not in known:
            raise UserError(f"--cluster {text}", f"must start with one of {', '.join(known)}", suggest(name, known))
        chosen = known[name]
        values: dict[str, float] = {"domain": chosen.domain, "network": chosen.network / 1e9}
        for option in options:
            key, _, value = option.partition("=")
            if key not in values:
                raise UserError(f"--cluster {text}", f"{key} is not one of {', '.join(values)}", "write domain=8")
            values[key] = _number(text, value)
        gpus, domain = _whole(text, number), int(values["domain"])
        require(
            gpus <= domain or gpus % max(domain, 1) == 0,
            f"--cluster {text}",
            f"must be whole NVLink domains of {domain}",
            f"use {gpus // max(domain, 1) * domain} GPUs, or give domain=N",
        )
        return cls(chosen, gpus, domain, values["network"] * 1e9, constants)

    @property
    def hosts(self) -> int:
        """Number of NVLink domains."""
        return -(-self.gpus // self.domain)

    def with_gpus(self, gpus: int) -> Cluster:
        """Return the same cluster with another number of GPUs."""
        return replace(self, gpus=gpus)


def _number(text: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    rule = f"{value!r} is not a number" if value else "a number is missing"
    require(math.isfinite(number), f"--cluster {text}", rule, "write it as h100:64,network=50")
    return number


def _whole(text: str, value: str) -> int:
    number = _number(text, value)
    require(number == int(number) >= 1, f"--cluster {text}", "needs a number of GPUs after the colon", "write h100:64")
    return int(number)


def write_calibration(path: Path, device: Device, constants: Constants, **about: Any) -> None:
    """Write what one machine measured, for `read_calibration`; `about` is recorded beside it (date, versions).

    Raises:
        UserError: the file cannot be written.
    """
    tree = {"device": dataclasses.asdict(device), "constants": dataclasses.asdict(constants), "about": about}
    try:
        path.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    except OSError as e:
        raise UserError(f"{path}", f"cannot be written ({e.strerror})", "choose a path you can write to") from None


def read_calibration(path: Path) -> tuple[Device, Constants]:
    """Read a device and constants that `write_calibration` wrote.

    Raises:
        UserError: the file is missing, or is not a calibration.
    """
    given, remedy = f"--calibration {path}", "write it with plan.py calibrate"
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UserError(given, e.strerror or str(e), remedy) from None
    except (ValueError, RecursionError):
        raise UserError(given, "is not JSON", remedy) from None
    parts = []
    for kind in (Device, Constants):
        name = "device" if kind is Device else "constants"
        part = tree.get(name) if isinstance(tree, dict) else None
        if not isinstance(part, dict):
            raise UserError(given, f"is not a calibration: it has no {name}", remedy)
        wanted = {f.name for f in dataclasses.fields(kind)}
        if odd := sorted(wanted ^ part.keys()):
            rule = f"{name}: {'no' if odd[0] in wanted else 'an unknown'} {odd[0]}"
            raise UserError(given, f"is not a calibration of this version: {rule}", remedy)
        parts.append(part)
    return Device(**parts[0]), Constants(**parts[1])
