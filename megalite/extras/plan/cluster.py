"""Description of a cluster: data sheet of its GPU, size of an NVLink domain, network, and fitted constants.

`Cluster.parse("h100:64")` needs no GPU; `h100:64,nvlink=200` or a YAML file describes a cluster of one's own.
Nothing here is measured by this project: rates are from data sheets, constants are fitted to published runs
(docs/plan.md). `read_calibration` replaces both by measurements of one machine.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megalite.core.base.errors import UserError, require
from megalite.core.base.hardware import DEVICES, Device
from megalite.core.options.names import suggest
from megalite.runtime.options.cli import read_mapping

_SHORT = {"a100": "a100-80g"}
_UNITS = {"peak": 1e12, "memory": 1e9, "hbm": 1e9, "nvlink": 1e9, "network": 1e9, "domain": 1, "host": 1}
"""Figures of a cluster that a description may give -> their unit; all but `host` are fields of `Device`."""


@dataclass(frozen=True)
class Constants:
    """What no data sheet gives, fitted once to published runs and frozen (docs/plan.md).

    Attributes:
        gemm_depth: reduction length at which a matrix product reaches half its rate.
        memory: fraction of `Device.hbm` that elementwise kernels reach.
        attention: fraction of `Device.peak` that fused attention reaches, forward and backward.
        nvlink, network: fractions of the links' rates that collectives reach.
        overlap_tp: fraction of tensor-parallel traffic that overlap hides.
        eager: factor on elementwise time when nothing is fused.
        latency: seconds per collective, times 1 + 0.15 log2(ranks).
        jitter: relative growth of a step per log2(hosts).
        step: exposed seconds per step: the norm's sum over all ranks, kernel launches, logging.
        window: fraction of a backward pass that can hide traffic over dp.
        host: exposed host time per block and forward pass, in seconds (0: kernels are queued ahead).
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
                "correct the calibration file, or write it again with megalite plan calibrate",
            )


FITTED = Constants()
"""Constants that benchmarks/plan/fit.py fitted to the published runs beside it."""


@dataclass(frozen=True)
class Cluster:
    """A cluster of equal devices.

    Attributes:
        device: data sheet of a device.
        gpus: number of devices.
        domain: number of devices that share NVLink.
        network: bytes/s of each device's network link, one direction.
        constants: constants of the time model.
        host: number of devices of a host.
    """

    device: Device
    gpus: int
    domain: int
    network: float
    constants: Constants = field(default=FITTED)
    host: int = 8

    def __post_init__(self) -> None:
        given = f"--cluster {self.device.name}:{self.gpus}"
        for name in ("gpus", "domain", "network", "host"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"{given}, {name} {value}", "must be above 0", "correct the number")

    @classmethod
    def parse(cls, text: str, device: Device | None = None, constants: Constants = FITTED) -> Cluster:
        """Read `NAME:GPUS[,KEY=NUMBER…]`, such as `h100:64,nvlink=200`, or a YAML file `FILE.yaml[:GPUS][,…]`.

        The keys are those of `_UNITS`: peak in TFLOP/s (dense bf16), memory in GB, hbm, nvlink and network in GB/s (one
        direction), domain and host in GPUs. A file has the same keys, `base` (the name of a device) and `gpus`.

        Args:
            text: the description.
            device: stands for the name `machine` (see `read_calibration`).

        Raises:
            UserError: unknown device or key, or numbers out of range.
        """
        given, known = f"--cluster {text}", DEVICES if device is None else {**DEVICES, "machine": device}
        head, *options = text.split(",")
        name, _, number = head.partition(":")
        values: dict[str, Any] = {key: value for key, _, value in (option.partition("=") for option in options)}
        title = None
        if name.endswith((".yaml", ".yml")):
            title = Path(name).stem
            values = {**read_mapping(Path(name), given), **values}
            name, gpus = str(values.pop("base", None)), values.pop("gpus", "")
            number = number or str(gpus)
        name = _SHORT.get(name.lower(), name.lower())
        if name == "machine" and device is None:
            rule = "machine stands for the results of megalite plan calibrate, and no measurements are given"
            raise UserError(given, rule, "add --calibration FILE")
        if name not in known:
            where = "must start with" if title is None else f"has base {name}, but base must be"
            raise UserError(given, f"{where} one of {', '.join(known)}", _other_device(name, known))
        rates: dict[str, Any] = {"host": 8}
        for key, value in values.items():
            if key not in _UNITS:
                raise UserError(given, f"{key} is not one of {', '.join(_UNITS)}", suggest(str(key), _UNITS))
            rates[key] = (_whole if _UNITS[key] == 1 else _number)(given, str(value)) * _UNITS[key]
            require(rates[key] > 0, f"{given}, {key} {value}", "must be above 0", "correct the number")
        gpus, host = _whole(given, number), rates.pop("host")
        domain = rates.pop("domain", known[name].domain)
        sheet = replace(known[name], domain=domain, name=title or name, **rates)
        require(
            gpus <= domain or gpus % sheet.domain == 0,
            given,
            f"must be whole NVLink domains of {domain}",
            f"use {gpus // sheet.domain * domain} GPUs, or give domain=N",
        )
        return cls(sheet, gpus, domain, sheet.network, constants, host)

    @property
    def hosts(self) -> int:
        """Number of NVLink domains."""
        return -(-self.gpus // self.domain)

    def with_gpus(self, gpus: int) -> Cluster:
        """Return the same cluster with another number of GPUs."""
        return replace(self, gpus=gpus)


def _other_device(name: str, known: Mapping[str, Device]) -> str:
    """Return the remedy for a device that is not listed."""
    remedy = suggest(name, known)
    own = "or take the nearest and give your figures: h100:64,nvlink=200,memory=80, or in a YAML file (docs/plan.md)"
    return own.removeprefix("or ") if remedy == "see --help" else f"{remedy} {own}"


def _number(given: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    rule = f"{value!r} is not a number" if value else "a number is missing"
    require(math.isfinite(number), given, rule, "write it as h100:64,network=50")
    return number


def _whole(given: str, value: str) -> int:
    number = _number(given, value)
    require(number == int(number) >= 1, given, f"{value} is not a whole number of GPUs", "write h100:64")
    return int(number)


def write_calibration(path: Path, device: Device, constants: Constants, **about: Any) -> None:
    """Write the measurements of one machine for `read_calibration`; `about` is recorded with them (date, versions).

    Raises:
        UserError: a rate is not a positive number, or the file cannot be written.
    """
    _check_rates(device)
    tree = {"device": dataclasses.asdict(device), "constants": dataclasses.asdict(constants), "about": about}
    try:
        path.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    except OSError as e:
        raise UserError(f"{path}", f"cannot be written ({e.strerror})", "choose a path you can write to") from None


def read_tree(path: Path, given: str, remedy: str) -> dict[str, Any]:
    """Read a JSON file whose content is an object, or else take it as an empty one.

    Raises:
        UserError: the file is missing or not JSON; `given` and `remedy` are those of the message.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UserError(given, e.strerror or str(e), remedy) from None
    except (ValueError, RecursionError):
        raise UserError(given, "is not JSON", remedy) from None
    return tree if isinstance(tree, dict) else {}


def read_calibration(path: Path) -> tuple[Device, Constants]:
    """Read a device and constants that `write_calibration` wrote.

    Raises:
        UserError: the file is missing, or is not a calibration.
    """
    given, remedy = f"--calibration {path}", "write it with megalite plan calibrate"
    tree, parts = read_tree(path, given, remedy), []
    for kind in (Device, Constants):
        name = "device" if kind is Device else "constants"
        part = tree.get(name)
        if not isinstance(part, dict):
            raise UserError(given, f"is not a calibration: it has no {name}", remedy)
        names = {f.name for f in dataclasses.fields(kind)}
        if odd := sorted(names ^ part.keys()):
            rule = f"{name}: {'no' if odd[0] in names else 'an unknown'} {odd[0]}"
            raise UserError(given, f"is not a calibration of this version: {rule}", remedy)
        parts.append(part)
    device = Device(**parts[0])
    _check_rates(device)
    return device, Constants(**parts[1])


def _check_rates(device: Device) -> None:
    for name, value in vars(device).items():
        # Not every chip has FP8 products.
        known = isinstance(value, int | float) and (0 < value < math.inf or (name == "fp8" and value == 0))
        require(
            name == "name" or known,
            f"device {device.name}: {name} {value}",
            "must be a number above 0",
            "correct the calibration file, or write it again with megalite plan calibrate",
        )
