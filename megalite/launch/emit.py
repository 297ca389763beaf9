"""Batch scripts for schedulers that start the hosts themselves: Slurm, and Kubernetes without custom resources."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from megalite.errors import UserError
from megalite.launch.commands import torchrun_command

# Between the signal and the end of the allocation; must be longer than a save.
_SLURM_NOTICE_S = 120
_KUBERNETES_NAME = re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?")


@dataclass(frozen=True)
class BatchJob:
    """What both schedulers need to know. `slots` are ranks per node, and GPUs per node unless `cpu`."""

    script: tuple[str, ...]
    nodes: int
    slots: int
    name: str
    workdir: str
    python: str
    max_restarts: int = 0
    cpu: bool = False
    env: Mapping[str, str] = field(default_factory=dict)


def _torchrun(job: BatchJob, nnodes: str, node_rank: str, addr: str, port: str) -> str:
    """torchrun as a shell line: the four (shell variables) are expanded by the shell, nothing else is."""
    words = torchrun_command(
        job.python,
        # Longer than a save; torchrun's own 30 s would kill ranks that are writing.
        ["--shutdown-timeout", str(_SLURM_NOTICE_S), *job.script],
        nnodes=nnodes,
        nproc=str(job.slots),
        node_rank=node_rank,
        addr=addr,
        port=port,
    )
    variables = {nnodes, node_rank, addr, port}
    return " ".join(f'"{word}"' if word in variables and word.startswith("$") else shlex.quote(word) for word in words)


def slurm_script(job: BatchJob, time_limit: str | None = None) -> str:
    """An sbatch script: one task, one torchrun, per node."""
    torchrun = "exec " + _torchrun(job, "$SLURM_NNODES", "$SLURM_NODEID", "$MASTER_ADDR", "$MASTER_PORT")
    directives = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        *([] if job.cpu else [f"--gpus-per-node={job.slots}"]),
        "--exclusive",
        *([] if time_limit is None else [f"--time={time_limit}"]),
        f"--signal=B:TERM@{_SLURM_NOTICE_S}",
        "--requeue",
        "--open-mode=append",
        "--output=slurm-%j.log",
    ]
    env = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **job.env}
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {shlex.quote(d)}" if " " in d else f"#SBATCH {d}" for d in directives),
            "set -eu",
            f"cd {shlex.quote(job.workdir)}",
            'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
            "MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))",
            "export MASTER_ADDR MASTER_PORT",
            *(f"export {k}={shlex.quote(v)}" for k, v in env.items()),
            "# Before the time limit this script gets SIGTERM and hands it on: the ranks save and leave. By hand:",
            "# scancel --batch --signal=TERM JOB. A requeued job goes on from the last commit.",
            "stop=0",
            "trap 'stop=1; scancel --signal=TERM \"$SLURM_JOB_ID\"' TERM",
            f"for attempt in $(seq 0 {job.max_restarts}); do",
            "  # Single quotes: $SLURM_NODEID is another one in every task.",
            f"  srun --kill-on-bad-exit=1 --cpu-bind=none --label bash -c {shlex.quote(torchrun)} &",
            "  code=0",
            "  wait $! || code=$?",
            "  # A trapped signal ends the first wait early.",
            "  while kill -0 $! 2>/dev/null; do code=0; wait $! || code=$?; done",
            '  if [ "$code" -eq 0 ] || [ "$stop" -eq 1 ]; then break; fi',
            '  echo "attempt $attempt ended with exit code $code" >&2',
            "done",
            'exit "$code"',
            "",
        ]
    )


def kubernetes_manifest(job: BatchJob, image: str, claim: str | None = None) -> str:
    """A headless Service and an Indexed Job as YAML: pod i is node i, pod 0 the master.

    `claim`: a PersistentVolumeClaim (ReadWriteMany) for data and checkpoints, mounted at WORKDIR/runs.
    """
    if not _KUBERNETES_NAME.fullmatch(job.name):
        raise UserError(
            f"--name {job.name}", "is not a DNS label", "use lower-case letters, digits and '-', 52 at most"
        )
    port = 29500
    command = "exec " + _torchrun(job, str(job.nodes), "$JOB_COMPLETION_INDEX", f"{job.name}-0.{job.name}", str(port))
    resources = {} if job.cpu else {"resources": {"limits": {"nvidia.com/gpu": job.slots}}}
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    # Without it /dev/shm has 64 MB, in which NCCL fails.
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if claim is not None:
        mounts.append({"name": "runs", "mountPath": f"{job.workdir.rstrip('/')}/runs"})
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": claim}})
    env = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **job.env}
    container = {
        "name": "train",
        "image": image,
        "workingDir": job.workdir,
        # Kubernetes expands $(NAME) in commands itself; "$$(" keeps it as it is.
        "command": ["sh", "-c", command.replace("$(", "$$(")],
        "env": [{"name": k, "value": v} for k, v in env.items()],
        "ports": [{"containerPort": port}],
        **resources,
        "volumeMounts": mounts,
    }
    pod = {
        "subdomain": job.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _SLURM_NOTICE_S,
        "containers": [container],
        "volumes": volumes,
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name},
        "spec": {
            "clusterIP": "None",
            # Ranks must find each other before any of them is ready.
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": job.name},
            "ports": [{"name": "rendezvous", "port": port}],
        },
    }
    indexed = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job.name},
        "spec": {
            "completionMode": "Indexed",
            "completions": job.nodes,
            "parallelism": job.nodes,
            # A failed rank takes a pod of every node with it.
            "backoffLimit": job.max_restarts * job.nodes,
            "template": {"spec": pod},
        },
    }
    return yaml.safe_dump_all([service, indexed], sort_keys=False, width=120)


def batch_size(nodes: int | None, slots: int | None) -> tuple[int, int]:
    """(nodes, slots) of the batch job from `--nodes` and `--slots`. Raises UserError when they are missing."""
    if nodes is None or slots is None:
        raise UserError(
            "--emit", "needs --nodes N and --slots RANKS_PER_NODE", "give both: the scheduler picks the hosts"
        )
    for flag, value in (("--nodes", nodes), ("--slots", slots)):
        if value < 1:
            raise UserError(f"{flag} {value}", "must be at least 1", f"give {flag} 1 or more")
    return nodes, slots
