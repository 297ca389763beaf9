"""`megalite launch`: the command line of the launcher."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megalite.core.base.errors import UserError, in_range, require
from megalite.core.base.log import logger, setup_logging
from megalite.extras.launch.agent import HEARTBEAT_TIMEOUT_S, KILL_GRACE_S, TERM_GRACE_S
from megalite.extras.launch.emit_options import EMIT_ONLY, add_options, emit, refuse
from megalite.extras.launch.hosts import (
    Host,
    LaunchSpec,
    check_equal_slots,
    filter_hosts,
    host_command,
    launch_environment,
    parse_hostfile,
)
from megalite.extras.launch.preflight import PROBE_TIMEOUT_S, require_green, run_preflight
from megalite.extras.launch.runner import Outcome, Runner
from megalite.extras.tool import ToolParser
from megalite.runtime.recover.member import goes_on_with_fewer, survives_hosts

# A host whose end was not observed has stopped on its own after this long (see agent.py).
FENCED_AFTER_S = HEARTBEAT_TIMEOUT_S + TERM_GRACE_S + KILL_GRACE_S
_USER_ERROR_CODE = 2
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)

_DESCRIPTION = """Start torchrun on every host of a hostfile over ssh, and stop all hosts together.

  megalite launch --hostfile hostfile -- pretrain_gpt.py --tp 8 --pp 4 --config recipe.yaml
  megalite launch --hostfile hostfile --include node1:0,1@node2:0,1 -- pretrain_gpt.py ...
  megalite launch --emit slurm --nodes 4 --slots 8 -- pretrain_gpt.py ... > job.sbatch
  megalite launch --emit k8s --nodes 4 --slots 8 --image IMAGE -- pretrain_gpt.py ... > job.yaml

The training script and its flags follow "--". On SIGTERM or Ctrl-C the ranks save and stop (twice: stop at once); on
SIGUSR1 every rank prints its stacks. Exit code: 0, 2 for a user error, else that of the first host that failed."""


def _parser() -> argparse.ArgumentParser:
    parser = ToolParser(
        prog="megalite launch", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    both = parser.add_argument_group("in both modes")
    both.add_argument(
        "--env", action="append", default=[], metavar="K=V", help="set a variable on every host; repeatable"
    )
    both.add_argument(
        "--max-restarts", type=int, default=0, metavar="N", help="restart all hosts after a failure, up to N times (0)"
    )
    both.add_argument("--python", metavar="PATH", help="the hosts' Python (this one; in images: python)")
    both.add_argument("--dir", metavar="DIR", help="the checkout on the hosts (this directory; in images: /workspace)")
    both.add_argument("--no-preflight", action="store_true", help="skip the checks (hosts; --emit: flags and layout)")
    ssh = parser.add_argument_group("over ssh")
    ssh.add_argument("--hostfile", type=Path, metavar="FILE", help="see hostfile.example (./hostfile)")
    ssh.add_argument("--include", metavar="HOSTS", help="use only these: node1:0,1@node2")
    ssh.add_argument("--exclude", metavar="HOSTS", help="use all except these: node3@node4:7")
    ssh.add_argument("--master-addr", metavar="NAME", help="name or address of rank 0's host (the first host)")
    ssh.add_argument("--master-port", type=int, metavar="P", help="its port for the rendezvous (29500); also k8s")
    ssh.add_argument("--ssh-config", metavar="FILE", help="ssh's -F")
    ssh.add_argument("--log-dir", metavar="DIR", help="torchrun's files per rank (runs/launch/TIME)")
    ssh.add_argument(
        "--preflight-timeout", type=float, metavar="S", help=f"seconds a host may take to answer ({PROBE_TIMEOUT_S:g})"
    )
    ssh.add_argument("--print-only", action="store_true", help="print the exact ssh commands, run nothing")
    add_options(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Parse, then emit, print or run. Raises UserError."""
    words = list(argv)
    flags, script = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    named = next((word for word in words if word.endswith(".py")), "pretrain_gpt.py")
    require("--" in words or named not in words, named, "no -- before it", f"write -- {named} ...: the rest is its own")
    args = _parser().parse_args(flags)
    setup_logging(rank=0)
    usage = "megalite launch [flags] -- pretrain_gpt.py [its flags]"
    require(bool(script), "no training command", "it follows '--'", usage)
    in_range(args, "max_restarts", 0, 10**6)
    in_range(args, "preflight_timeout", 0, 10**6, above=True)
    port = args.master_port
    require(port is None or 0 < port < 65536, f"--master-port {port}", "must be 1 to 65535", "remove it for 29500")
    env = _parse_env(args.env)
    if args.emit:
        sys.stdout.write(emit(args, tuple(script), env))
        return 0
    refuse(args, EMIT_ONLY, "goes with --emit only")
    hosts = filter_hosts(parse_hostfile(args.hostfile or Path("hostfile")), args.include, args.exclude)
    spec = _spec(args, tuple(script), env, hosts)
    if args.print_only:
        check_equal_slots(hosts)
        for rank in range(len(hosts)):
            print(shlex.join(host_command(spec, hosts, rank)))
        return 0
    if args.no_preflight:
        refuse(args, "preflight_timeout", "does not go with --no-preflight")
        return _run(spec, hosts, args.max_restarts, None)
    return _run(spec, hosts, args.max_restarts, args.preflight_timeout or PROBE_TIMEOUT_S)


def _run(spec: LaunchSpec, hosts: Sequence[Host], max_restarts: int, preflight_s: float | None) -> int:
    """Run attempts until one succeeds or is stopped by the user. `preflight_s`: seconds per host; None: skip it."""
    outcome = _attempt(spec, hosts, preflight_s)
    for restart in range(1, max_restarts + 1):
        if outcome.code == 0 or outcome.asked_to_stop:
            break
        if outcome.culprit is not None and outcome.culprit.code == _USER_ERROR_CODE:
            logger.error(f"launch: not restarted: rank {outcome.culprit.rank} reports a user error")
            break
        if outcome.unseen:
            names = ", ".join(outcome.unseen)
            logger.warning(f"launch: waiting {FENCED_AFTER_S:g} s until {names} must have stopped on their own")
            time.sleep(FENCED_AFTER_S)
        logger.warning(f"launch: restart {restart} of {max_restarts}: all hosts again")
        try:
            outcome = _attempt(spec, hosts, preflight_s)
        except UserError as e:
            logger.error(f"launch: not restarted: {e}")
            break
    return outcome.code


def _attempt(spec: LaunchSpec, hosts: Sequence[Host], preflight_s: float | None) -> Outcome:
    if preflight_s is not None:
        hosts, report = run_preflight(spec, hosts, preflight_s)
        require_green(report)
    slots = check_equal_slots(hosts)
    logger.info(f"launch: {len(hosts)} hosts x {slots} ranks, logs in {spec.log_dir} on each host")
    commands = [host_command(spec, hosts, rank) for rank in range(len(hosts))]
    survives, returns = survives_hosts(spec.script), goes_on_with_fewer(spec.script)
    return Runner([host.name for host in hosts], commands, spec.log_dir, survives, returns).run()


def _parse_env(items: Sequence[str]) -> dict[str, str]:
    env = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UserError(f"--env {item}", "is not K=V", "for example --env NCCL_SOCKET_IFNAME==eth0")
        if name == "CUDA_VISIBLE_DEVICES":
            raise UserError(f"--env {item}", "the slots decide that", "use --include HOST:ID,ID")
        if _SECRET.search(name):
            logger.warning("launch: --env %s is visible in the process list of every host; a file is safer", name)
        env[name] = value
    return env


def _spec(args: argparse.Namespace, script: tuple[str, ...], env: dict[str, str], hosts: Sequence[Host]) -> LaunchSpec:
    here = os.getcwd()
    workdir = args.dir or here
    rule = "must be absolute and the same on every host"
    require(os.path.isabs(workdir), f"--dir {workdir}", rule, f"--dir /path/{workdir}")
    python = args.python or sys.executable
    if "/" in python:
        python = os.path.join(workdir, python)
    agent = Path(__file__).with_name("agent.py").resolve()
    if agent.is_relative_to(here):  # then it is also in the hosts' checkout, wherever that is
        agent = workdir / agent.relative_to(here)
    return LaunchSpec(
        script=script,
        workdir=workdir,
        python=python,
        master_addr=args.master_addr or hosts[0].name,
        master_port=29500 if args.master_port is None else args.master_port,
        log_dir=args.log_dir or time.strftime("runs/launch/%Y%m%d-%H%M%S"),
        env=launch_environment(os.environ, env),
        ssh_config=args.ssh_config,
        agent=str(agent),
    )
