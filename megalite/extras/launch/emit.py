"""Batch scripts for schedulers that start the hosts themselves: Slurm, and Kubernetes without custom resources."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalite.core.base.errors import UserError, require
from megalite.runtime.recover.member import goes_on_with_fewer, spare_ranks, survives_hosts

# Slurm: between the signal and the end of the allocation. Kubernetes: until ranks that still save are killed.
NOTICE_S = 120
# Kubernetes kills the pod this much later, so that the end of the ranks is still logged.
_MARGIN_S = 30
# sysexits.h: a temporary failure, try again.
_UNFINISHED = 75
# Kubernetes: a container that was killed, or lost its run; seconds that the others then wait for it to come back.
_LOST, _RESERVE_WAIT_S = 137, 900
# Of a Slurm job with ranks in reserve, which may lose nodes, and tasks on them.
_OUTCOME = "export OUTCOME=$PWD/.outcome-$SLURM_JOB_ID"
_WHOSE = (
    "# The first node's exit code is that of the run: others may be lost before its end.",
    "# The run's exit code is that of a node that is there at the end; but Slurm itself needs the first.",
)
# Slurm ends no other task for one that failed. Not from that task: in a container it has no Slurm client.
_END_MISTAKEN = (
    "# The other tasks would be left to wait for one that made a mistake.",
    "while kill -0 $step 2>/dev/null; do",
    '  if [ -s "$MISTAKE" ]; then scancel "$SLURM_JOB_ID.$(cat "$MISTAKE")"; break; fi',
    "  sleep 1",
    "done &",
)
_TAKE_OUTCOME = ('if [ -e "$OUTCOME" ]; then code=$(cat "$OUTCOME"); rm -f "$OUTCOME"; fi',)
_OPTION, _SHORT = re.compile("--[a-z]|-[A-Za-z]"), {"-N": "--nodes", "-n": "--ntasks"}
_KUBERNETES_NAME = re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?")


@dataclass(frozen=True)
class BatchJob:
    """Settings that both schedulers need.

    Attributes:
        script: training script and its flags.
        nodes: number of hosts, those with ranks in reserve among them.
        slots: ranks per node, and GPUs per node unless `cpu`.
        name: name of the job.
        workdir: folder of the checkout on the hosts.
        python: Python interpreter on the hosts.
        max_restarts: number of restarts after failures.
        cpu: whether the ranks run on CPUs.
        env: environment variables of the ranks.
        image: container image; None: no container (Slurm only).
        cpus: cores per node; None: the scheduler's default.
        memory: memory per node, in the scheduler's notation; None: the scheduler's default.
    """

    script: tuple[str, ...]
    nodes: int
    slots: int
    name: str
    workdir: str
    python: str
    max_restarts: int = 0
    cpu: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    image: str | None = None
    cpus: int | None = None
    memory: str | None = None

    def variables(self) -> dict[str, str]:
        """Return the environment of the job."""
        # To a scheduler, 0 means that all steps are done.
        unfinished = {"MEGALITE_UNFINISHED_EXIT_CODE": str(_UNFINISHED)}
        return {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **self.env, **unfinished}

    @property
    def reserves(self) -> bool:
        """Whether the run goes on without a lost host."""
        return survives_hosts(self.script)

    def gpus(self) -> list[int]:
        """Return the number of GPUs per node; an empty list on CPU."""
        return [] if self.cpu else [self.slots]


@dataclass(frozen=True)
class SlurmOptions:
    """Options of Slurm only. `mounts`: SRC:DST[:FLAGS] of the container; `directives`: further #SBATCH lines."""

    time_limit: str | None = None
    partition: str | None = None
    account: str | None = None
    mounts: tuple[str, ...] = ()
    directives: tuple[str, ...] = ()


@dataclass(frozen=True)
class KubernetesOptions:
    """Options of Kubernetes only.

    Attributes:
        claim: PersistentVolumeClaim (ReadWriteMany) for data and checkpoints, mounted at WORKDIR/runs.
        resources: further resources per pod, such as RDMA devices.
        ipc_lock: whether the container may lock memory, as RDMA requires.
        host_network: whether to use the node's network instead of the pod's.
        secret: Secret whose keys become environment variables.
        port: port of the rendezvous.
    """

    claim: str | None = None
    resources: Mapping[str, str] = field(default_factory=dict)
    ipc_lock: bool = False
    host_network: bool = False
    secret: str | None = None
    port: int = 29500


def _train(job: BatchJob, nnodes: str, node_rank: str, addr: str, port: str) -> str:
    """Write `megalite train` as a shell line, in which only shell variables among the four arguments are expanded.

    Unlike torchrun it exits with 2 for a user error, after which no scheduler should retry.
    """
    flags = {"--nnodes": nnodes, "--nproc-per-node": job.slots, "--node-rank": node_rank, "--master-addr": addr}
    flags |= {"--master-port": port, "--shutdown-timeout": NOTICE_S}
    words = [job.python, "-m", "megalite", "train", *(str(word) for pair in flags.items() for word in pair)]
    variables = {v for v in (nnodes, node_rank, addr, port) if v.startswith("$")}
    quoted = [f'"{word}"' if word in variables else shlex.quote(word) for word in words]
    return "exec " + " ".join([*quoted, *map(shlex.quote, job.script)])


def _fill(template: str, values: Mapping[str, Any]) -> str:
    """Fill the {{name}}s of a template; a line with a list is repeated for each element."""
    lines = []
    for line in Path(__file__).with_name(template).read_text(encoding="utf-8").splitlines(keepends=True):
        parts = re.split(r"{{(\w+)}}", line)
        names = parts[1::2]
        several = next((name for name in names if isinstance(values[name], list)), None)
        for element in values[several] if several else [None]:
            parts[1::2] = [str(element if name == several else values[name]) for name in names]
            lines.append("".join(parts))
    return "".join(lines)


def _line_if_set(value: object) -> list[object]:
    """Return a list of the value, empty for None: its line appears in the template once or not at all."""
    return [] if value is None else [value]


def _directive(flag: str, value: object) -> list[str]:
    """Quote the value of a #SBATCH line for sbatch, which ends it at the first line break even inside quotes."""
    if value is None:
        return []
    text = str(value)
    rule = "must be one line of printable characters: sbatch takes what follows a line break as the script"
    require(text.isprintable() and text.strip() != "", f"{flag} {text!r}", rule, "remove the line break")
    return [shlex.quote(text)]


def slurm_script(job: BatchJob, options: SlurmOptions | None = None) -> str:
    """Write an sbatch script: one task, one `megalite train`, per node; in a container through Pyxis.

    Raises:
        UserError: a value that a #SBATCH line cannot hold.
    """
    options = options or SlurmOptions()
    values = {
        "name": _directive("--name", job.name)[0],
        "nodes": job.nodes,
        "gpus": job.gpus(),
        "time_limit": _directive("--time-limit", options.time_limit),
        "partition": _directive("--partition", options.partition),
        "account": _directive("--account", options.account),
        "cpus": _line_if_set(job.cpus),
        "memory": _directive("--memory", job.memory),
        "directives": [_extra_directive(text, job) for text in options.directives],
        "notice": NOTICE_S,
        "workdir": shlex.quote(job.workdir),
        "env": [f"{k}={shlex.quote(v)}" for k, v in job.variables().items()],
        "max_restarts": job.max_restarts,
        "unfinished": _UNFINISHED,
        "no_kill": ["--no-kill"] if job.reserves else [],
        "bad_exit": "--kill-on-bad-exit=0 --no-kill" if job.reserves else "--kill-on-bad-exit=1",
        "outcome": [_WHOSE[goes_on_with_fewer(job.script)], _OUTCOME] if job.reserves else [],
        "end_mistaken": list(_END_MISTAKEN) if job.reserves else [],
        "take_outcome": list(_TAKE_OUTCOME) if job.reserves else [],
        "container": "".join(f"{shlex.quote(word)} " for word in _pyxis(job, options.mounts)),
        "command": shlex.quote(_slurm_task(job)),
    }
    return _fill("slurm.sbatch", values)


def _extra_directive(text: str, job: BatchJob) -> str:
    """Return what follows #SBATCH: given with it or without, and with or without leading dashes; else unchanged.

    Raises:
        UserError: it is no option, or changes what the script relies on.
    """
    _directive("--directive", text)
    given, line = f"--directive {text!r}", text.strip().removeprefix("#SBATCH").strip()
    if not line.startswith("-"):
        line = f"{'-' if re.match(r'[A-Za-z]( |$)', line) else '--'}{line}"
    try:
        words = shlex.split(line, comments=True)
    except ValueError as e:
        raise UserError(given, f"cannot be read ({e})", "quote the value as a shell does") from None
    require(_OPTION.match(line) is not None, given, "is no option of sbatch", "write it as --directive constraint=h100")
    fixed = _fixed(job)
    for word, following in zip(words, [*words[1:], ""]):
        name, equals, value = word.partition("=")
        if re.match("-[A-Za-z]", word):
            name, equals, value = word[:2], word[2:], word[2:]
        name = _SHORT.get(name, name).removeprefix("--") if word.startswith("-") else ""
        if name in fixed:
            wanted, why, remedy = fixed[name]
            value = value if equals else following
            require(re.fullmatch(wanted, value) is not None, given, f"sets --{name}, {why}", remedy)
    return line


def _fixed(job: BatchJob) -> dict[str, tuple[str, str, str]]:
    """What the script relies on: option of sbatch -> (pattern of the values that change nothing, why, remedy)."""
    one = "and the script starts one task on every node"
    gpus = "([a-z0-9_-]+:)?" + str(job.slots)
    return {
        "nodes": (str(job.nodes), "which --nodes gives", "give --nodes N instead"),
        "ntasks": (str(job.nodes), one, "remove it: --slots gives the ranks of a node"),
        "ntasks-per-node": ("1", one, "remove it: --slots gives the ranks of a node"),
        "gpus-per-node": (gpus, "which --slots gives", "give --slots N instead"),
        "signal": (f"B:TERM@{NOTICE_S}", "by which the run saves before the time limit", "remove it"),
        "no-requeue": ("(?!)", "and the script queues the job again until the last step", "remove it"),
        "export": (
            "ALL(,.*)?",
            "and the ranks read variables that the script exports",
            "give --env NAME=VALUE instead",
        ),
    }


def _slurm_task(job: BatchJob) -> str:
    """Write the shell line of one node, which records how it ended: srun's exit code is that of the tasks it kills."""
    train = _train(job, "$SLURM_NNODES", "$SLURM_NODEID", "$MASTER_ADDR", "$MASTER_PORT")
    # scancel also signals this shell, which must outlive the ranks.
    record = (
        f'[ "$code" -ne 2 ] || echo "$SLURM_STEP_ID" > "$MISTAKE"; [ "$code" -ne {_UNFINISHED} ] || : > "$UNFINISHED"'
    )
    if job.reserves:
        other = f'"$code" -eq {_LOST}' if goes_on_with_fewer(job.script) else '"$SLURM_NODEID" -ne 0'
        record += f'; [ {other} ] || echo "$code" > "$OUTCOME"'
    return f'trap : TERM; ({train}); code=$?; {record}; exit "$code"'


def _pyxis(job: BatchJob, mounts: Sequence[str]) -> list[str]:
    """List srun's options for a container (https://github.com/NVIDIA/pyxis/wiki/Usage)."""
    if job.image is None:
        require(not mounts, "--mount", "is for a container", "add --image, or remove it")
        return []
    both = [f"{job.workdir}:{job.workdir}", *mounts]
    for mount in both:
        ok = 1 <= mount.count(":") <= 2 and "," not in mount
        require(ok, f"--mount {mount}", "must be SRC:DST or SRC:DST:FLAGS, without commas", "rename the folder")
    flags = {"image": job.image, "mounts": ",".join(both), "workdir": job.workdir}
    return [f"--container-{name}={value}" for name, value in flags.items()]


def kubernetes_manifest(job: BatchJob, options: KubernetesOptions | None = None) -> str:
    """Write a headless Service and an Indexed Job as YAML: pod i is node i, pod 0 the master.

    With ranks in reserve, or --elastic, a lost pod that is started again joins, and the Job is done when pod 0 is.

    Raises:
        UserError: a name that Kubernetes does not allow.
    """
    options = options or KubernetesOptions()
    remedy = "use lower-case letters, digits and '-', 52 at most"
    require(bool(_KUBERNETES_NAME.fullmatch(job.name)), f"--name {job.name}", "is not a DNS label", remedy)
    master, port = f"{job.name}-0.{job.name}", str(options.port)
    command = _train(job, str(job.nodes), "$JOB_COMPLETION_INDEX", master, port)
    limits: dict[str, object] = dict.fromkeys([] if job.cpu else ["nvidia.com/gpu"], job.slots)
    limits |= {k: v for k, v in (("cpu", job.cpus), ("memory", job.memory)) if v is not None}
    claims = _line_if_set(options.claim)
    replaced = spare_ranks(job.script) > 0 or goes_on_with_fewer(job.script)
    variables = ({"MEGALITE_RESERVE_WAIT": str(_RESERVE_WAIT_S)} if replaced else {}) | job.variables()
    values = {
        "name": _yaml(job.name),
        "port": port,
        "nodes": job.nodes,
        "restarts": job.max_restarts,
        "grace": NOTICE_S + _MARGIN_S,
        "image": _yaml(job.image),
        "workdir": _yaml(job.workdir),
        "command": _yaml(_unexpanded(command)),
        "env": [_yaml({"name": k, "value": _unexpanded(v)}) for k, v in variables.items()],
        "first": [_yaml("0")] if replaced else [],
        "repeated": f"{_UNFINISHED}, {_LOST}" if replaced else _UNFINISHED,
        "secret": [_yaml(name) for name in _line_if_set(options.secret)],
        "limits": [_yaml(every)] if (every := {**limits, **options.resources}) else [],
        "ipc_lock": ["IPC_LOCK"] if options.ipc_lock else [],
        "host_network": ["true"] if options.host_network else [],
        # Otherwise a pod on the node's network cannot resolve the cluster's names.
        "dns": ["ClusterFirstWithHostNet"] if options.host_network else [],
        "runs": [_yaml(f"{job.workdir.rstrip('/')}/runs") for _ in claims],
        "claim": [_yaml(claim) for claim in claims],
    }
    return _fill("kubernetes.yaml", values)


def _unexpanded(text: str) -> str:
    """Double every "$": Kubernetes expands $(NAME), and "$$" to "$", in commands and values of variables."""
    return text.replace("$", "$$")


def _yaml(value: object) -> str:
    """Write a YAML scalar or mapping on one line: as JSON, with the characters escaped that YAML does not allow."""
    return re.sub(r"[^ -~]", lambda match: f"\\U{ord(match[0]):08x}", json.dumps(value, ensure_ascii=False))
