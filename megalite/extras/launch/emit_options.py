"""The options of `megalite launch --emit`, their checks, and the script or manifest that they make."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence

from megalite.core.base.errors import UserError, require
from megalite.core.options.model import ModelConfig
from megalite.extras.launch.emit import BatchJob, KubernetesOptions, SlurmOptions, kubernetes_manifest, slurm_script
from megalite.extras.launch.layout_check import check_layout
from megalite.extras.launch.preflight import wants_cpu
from megalite.runtime.base.untrusted import BadFile, read_json
from megalite.runtime.checkpoint.hf.config import read_config
from megalite.runtime.checkpoint.hf.text_part import text_config
from megalite.runtime.places.downloads import bring_tree

_BOTH = "nodes slots name image cpus memory"
_SLURM = "time_limit partition account mount directive"
_KUBERNETES = "claim resource ipc_lock host_network secret"
EMIT_ONLY = f"{_BOTH} {_SLURM} {_KUBERNETES}"
_MOST = 100_000
# master_port is for Kubernetes too; Slurm's script makes it from the job's number.
SSH_ONLY = "hostfile include exclude master_addr ssh_config log_dir preflight_timeout"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the option groups of --emit. All defaults are None, so that an option in the wrong place is detected."""
    emit = parser.add_argument_group("for a scheduler")
    emit.add_argument("--emit", choices=("slurm", "k8s"), help="print a batch script or manifest; run nothing")
    emit.add_argument("--nodes", type=int, metavar="N", help="number of nodes")
    emit.add_argument("--slots", type=int, metavar="S", help="ranks per node (= GPUs, unless --device cpu)")
    emit.add_argument("--name", help="name of the job (megalite)")
    emit.add_argument("--image", help="container image (slurm: through Pyxis)")
    emit.add_argument("--cpus", type=int, metavar="N", help="cores per node")
    emit.add_argument("--memory", metavar="SIZE", help="memory per node, as the scheduler writes it (slurm: --mem)")
    slurm = parser.add_argument_group("for Slurm")
    slurm.add_argument("--time-limit", metavar="T", help="--time, as D-HH:MM:SS (that of the partition)")
    slurm.add_argument("--partition", metavar="NAME", help="--partition (the cluster's)")
    slurm.add_argument("--account", metavar="NAME", help="--account (yours)")
    slurm.add_argument(
        "--mount", action="append", metavar="SRC:DST", help="with --image: mount this too (DIR always is); repeatable"
    )
    slurm.add_argument(
        "--directive", action="append", metavar="TEXT", help="another #SBATCH line: constraint=h100; repeatable"
    )
    k8s = parser.add_argument_group("for Kubernetes")
    k8s.add_argument("--claim", metavar="NAME", help="PersistentVolumeClaim (ReadWriteMany) mounted at DIR/runs")
    k8s.add_argument(
        "--resource", action="append", metavar="NAME=N", help="another limit of a pod, as rdma/hca=1; repeatable"
    )
    k8s.add_argument("--ipc-lock", action="store_true", default=None, help="add the capability IPC_LOCK, for RDMA")
    k8s.add_argument("--host-network", action="store_true", default=None, help="use the nodes' network")
    k8s.add_argument("--secret", metavar="NAME", help="a Secret whose keys become environment variables")


def refuse(args: argparse.Namespace, names: str, why: str) -> None:
    """Refuse options that have no effect here."""
    for name in names.split():
        require(getattr(args, name) is None, f"--{name.replace('_', '-')}", why, "remove it")


def emit(args: argparse.Namespace, script: tuple[str, ...], env: Mapping[str, str]) -> str:
    """Check the job and return its script or manifest. Raises UserError."""
    refuse(args, SSH_ONLY, f"does not go with --emit {args.emit}")
    rule, remedy = "needs --nodes N and --slots RANKS_PER_NODE", "add both: the scheduler picks the hosts"
    require(args.nodes is not None and args.slots is not None, "--emit", rule, remedy)
    for flag, value in (("--nodes", args.nodes), ("--slots", args.slots), ("--cpus", args.cpus)):
        ok = value is None or 1 <= value <= _MOST
        require(ok, f"{flag} {value}", f"must be at least 1 and at most {_MOST}", f"use {flag} 1 or more")
    slurm = args.emit == "slurm"
    if not args.no_preflight:
        _check_script(script, args.nodes * args.slots)
    job = BatchJob(
        script=script,
        nodes=args.nodes,
        slots=args.slots,
        name=args.name or "megalite",
        workdir=args.dir or (os.getcwd() if slurm else "/workspace"),
        python=args.python or ("python" if args.image else sys.executable),
        max_restarts=args.max_restarts,
        cpu=wants_cpu(script),
        env=env,
        image=args.image,
        cpus=args.cpus,
        memory=args.memory,
    )
    text = _slurm(args, job) if slurm else _kubernetes(args, job)
    try:
        text.encode()
    except UnicodeEncodeError as e:
        given = f"--emit {args.emit}: {text[e.start - 20 : e.end + 20]!r}"
        raise UserError(given, "is not UTF-8 text, as a script must be", "rename the file or value") from None
    return text


def _slurm(args: argparse.Namespace, job: BatchJob) -> str:
    refuse(args, f"{_KUBERNETES} master_port", "goes with --emit k8s only")
    mounts, directives = tuple(args.mount or ()), tuple(args.directive or ())
    return slurm_script(job, SlurmOptions(args.time_limit, args.partition, args.account, mounts, directives))


def _kubernetes(args: argparse.Namespace, job: BatchJob) -> str:
    refuse(args, _SLURM, "goes with --emit slurm only")
    remedy = "name an image that holds Python, torch and this checkout"
    require(args.image is not None, "--emit k8s", "needs --image", remedy)
    options = KubernetesOptions(
        claim=args.claim,
        resources=_resources(args.resource or ()),
        ipc_lock=bool(args.ipc_lock),
        host_network=bool(args.host_network),
        secret=args.secret,
        port=29500 if args.master_port is None else args.master_port,
    )
    return kubernetes_manifest(job, options)


def _resources(items: Sequence[str]) -> dict[str, str]:
    resources = {}
    for item in items:
        name, _, count = item.partition("=")
        ok = re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_./]*[A-Za-z0-9])?", name) and re.fullmatch(
            r"[0-9]+[A-Za-z]*", count
        )
        require(bool(ok), f"--resource {item}", "is not NAME=N", "for example --resource rdma/hca=1")
        resources[name] = count
    return resources


def _check_script(script: tuple[str, ...], world: int) -> None:
    """Check what the job's ranks would refuse after queueing. Files are read here, as by the ranks there."""
    try:
        check_layout(script, world, _read_model)
    except UserError as e:
        files = "; if a file is on the cluster only, --no-preflight skips this check"
        raise UserError.from_message(f"{e}{files if 'cannot' in str(e) or 'No such file' in str(e) else ''}") from None


def _read_model(folder: str, cache_dir: str) -> ModelConfig:
    """Read the model of a Hugging Face folder from its config.json alone, without torch."""
    path = bring_tree(f"{folder}/config.json", cache_dir)
    try:
        config = read_json(path, 4 << 20)
    except (OSError, BadFile) as e:
        raise UserError(f"--init-from-hf {folder}", f"{path} cannot be read ({e})", "give a model's folder") from None
    require(isinstance(config, dict), f"--init-from-hf {folder}", f"{path} holds no object", "give a model's folder")
    return read_config(text_config(config, str(path)), str(path))
