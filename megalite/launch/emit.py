"""Batch scripts for schedulers that start the hosts themselves: Slurm, and Kubernetes without custom resources."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalite.errors import require
from megalite.launch.hosts import torchrun_command

# Between the signal and the end of the allocation; must be longer than a save.
_NOTICE_S = 120
_PORT = 29500
_KUBERNETES_NAME = re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?")


@dataclass(frozen=True)
class BatchJob:
    """Settings that both schedulers need. `slots` are ranks per node, and GPUs per node unless `cpu`."""

    script: tuple[str, ...]
    nodes: int
    slots: int
    name: str
    workdir: str
    python: str
    max_restarts: int = 0
    cpu: bool = False
    env: Mapping[str, str] = field(default_factory=dict)

    def variables(self) -> dict[str, str]:
        """Return the environment of the job."""
        return {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **self.env}

    def gpus(self) -> list[int]:
        """Return the number of GPUs per node; an empty list on CPU."""
        return [] if self.cpu else [self.slots]


def _torchrun(job: BatchJob, nnodes: str, node_rank: str, addr: str, port: str) -> str:
    """torchrun as a shell line: shell variables among the four are expanded by the shell, nothing else is."""
    flags = {"--nnodes": nnodes, "--nproc-per-node": job.slots, "--node-rank": node_rank, "--master-addr": addr}
    # Longer than a save; torchrun's own 30 s would kill ranks that are writing.
    flags |= {"--master-port": port, "--shutdown-timeout": _NOTICE_S}
    words = torchrun_command(job.python, flags, job.script)
    variables = {v for v in (nnodes, node_rank, addr, port) if v.startswith("$")}
    return "exec " + " ".join(f'"{word}"' if word in variables else shlex.quote(word) for word in words)


def _fill(template: str, values: Mapping[str, Any]) -> str:
    """Fill the {{name}}s of a template; a list repeats its line, once per element."""
    lines = []
    for line in Path(__file__).with_name(template).read_text(encoding="utf-8").splitlines(keepends=True):
        parts = re.split(r"{{(\w+)}}", line)
        names = parts[1::2]
        several = next((name for name in names if isinstance(values[name], list)), None)
        for element in values[several] if several else [None]:
            parts[1::2] = [str(element if name == several else values[name]) for name in names]
            lines.append("".join(parts))
    return "".join(lines)


def slurm_script(job: BatchJob, time_limit: str | None = None) -> str:
    """Write an sbatch script: one task, one torchrun, per node."""
    command = _torchrun(job, "$SLURM_NNODES", "$SLURM_NODEID", "$MASTER_ADDR", "$MASTER_PORT")
    values = {
        "name": shlex.quote(job.name),
        "nodes": job.nodes,
        "gpus": job.gpus(),
        "time_limit": [] if time_limit is None else [shlex.quote(time_limit)],
        "notice": _NOTICE_S,
        "workdir": shlex.quote(job.workdir),
        "env": [f"{k}={shlex.quote(v)}" for k, v in job.variables().items()],
        "max_restarts": job.max_restarts,
        "command": shlex.quote(command),
    }
    return _fill("slurm.sbatch", values)


def kubernetes_manifest(job: BatchJob, image: str, claim: str | None = None) -> str:
    """Write a headless Service and an Indexed Job as YAML: pod i is node i, pod 0 the master.

    `claim`: a PersistentVolumeClaim (ReadWriteMany) for data and checkpoints, mounted at WORKDIR/runs.
    """
    remedy = "use lower-case letters, digits and '-', 52 at most"
    require(bool(_KUBERNETES_NAME.fullmatch(job.name)), f"--name {job.name}", "is not a DNS label", remedy)
    command = _torchrun(job, str(job.nodes), "$JOB_COMPLETION_INDEX", f"{job.name}-0.{job.name}", str(_PORT))
    claimed = [] if claim is None else [claim]
    values = {
        "name": _yaml(job.name),
        "port": _PORT,
        "nodes": job.nodes,
        "backoff": job.max_restarts * job.nodes,
        "notice": _NOTICE_S,
        "image": _yaml(image),
        "workdir": _yaml(job.workdir),
        # Kubernetes expands $(NAME) in commands itself; "$$(" keeps it as it is.
        "command": _yaml(command.replace("$(", "$$(")),
        "env": [_yaml({"name": k, "value": v}) for k, v in job.variables().items()],
        "gpus": job.gpus(),
        "runs": [_yaml(f"{job.workdir.rstrip('/')}/runs") for _ in claimed],
        "claim": [_yaml(c) for c in claimed],
    }
    return _fill("kubernetes.yaml", values)


def _yaml(value: object) -> str:
    """A YAML scalar or mapping on one line: JSON is YAML."""
    return json.dumps(value, ensure_ascii=False)
