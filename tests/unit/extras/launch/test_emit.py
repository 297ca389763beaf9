from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megalite.core.base.errors import UserError
from megalite.extras.launch import command
from megalite.extras.launch.emit import BatchJob, KubernetesOptions, SlurmOptions, kubernetes_manifest, slurm_script

NASTY = 'it\'s $HOME $(id) "x"'


def job(**changes: object) -> BatchJob:
    values: dict = {
        "script": ("pretrain_gpt.py", "--tp", "8", "--run-dir", NASTY),
        "nodes": 4,
        "slots": 8,
        "name": "train",
        "workdir": "/work dir",
        "python": "python",
        "env": {"NCCL_DEBUG": "WARN", "X": NASTY},
        **changes,
    }
    return BatchJob(**values)


def validate(manifest: str) -> list[dict]:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    documents = list(yaml.safe_load_all(manifest))
    for document in documents:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    return documents


def test_the_manifest_is_valid_and_complete() -> None:
    options = KubernetesOptions(claim="runs", resources={"rdma/hca": "1"}, ipc_lock=True, host_network=True, secret="k")
    service, indexed = validate(
        kubernetes_manifest(job(max_restarts=3, image="registry/image:1", cpus=64, memory="1Ti"), options)
    )
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": indexed["metadata"]["name"]}
    spec = indexed["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    # A failed attempt costs a pod of every node: a limit for all pods together would have to count in nodes.
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (3, 0)
    assert "backoffLimit" not in spec
    assert spec["podFailurePolicy"]["rules"][0] == {
        "action": "FailJob",
        "onExitCodes": {"containerName": "train", "operator": "In", "values": [2]},
    }
    assert spec["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] == [75]
    pod = spec["template"]["spec"]
    assert {"name": "MEGALITE_UNFINISHED_EXIT_CODE", "value": "75"} in pod["containers"][0]["env"]
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    words = shlex.split(container["command"][2])
    assert pod["terminationGracePeriodSeconds"] > int(words[words.index("--shutdown-timeout") + 1])
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "cpu": 64, "memory": "1Ti", "rdma/hca": "1"}
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert container["envFrom"] == [{"secretRef": {"name": "k"}}]
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    assert {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}} in pod["volumes"]
    assert [m["mountPath"] for m in container["volumeMounts"]] == ["/dev/shm", "/work dir/runs"]
    assert {"name": "NCCL_DEBUG", "value": "WARN"} in container["env"]


@pytest.mark.parametrize("how", [("--spare-ranks", "8"), ("--elastic",)], ids=" ".join)
def test_a_job_that_goes_on_without_hosts_outlives_its_pods(how: tuple[str, ...]) -> None:
    """Fields of batch/v1 that are stable since Kubernetes 1.33."""
    flags = ("pretrain_gpt.py", "--recover", "host", *how)
    _, indexed = validate(kubernetes_manifest(job(script=flags, image="i", env={"MEGALITE_RESERVE_WAIT": "60"})))
    spec = indexed["spec"]
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    rules = spec["podFailurePolicy"]["rules"]
    assert [rule["onExitCodes"]["values"] for rule in rules[:2]] == [[2], [75, 137]]
    assert rules[2] == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert {"name": "MEGALITE_RESERVE_WAIT", "value": "60"} in spec["template"]["spec"]["containers"][0]["env"]
    _, plain = validate(kubernetes_manifest(job(image="i")))
    assert "successPolicy" not in plain["spec"]


def test_a_plain_manifest_asks_for_nothing_special() -> None:
    _, indexed = validate(kubernetes_manifest(job(image="i")))
    assert not {"hostNetwork", "dnsPolicy"} & set(indexed["spec"]["template"]["spec"])
    (container,) = indexed["spec"]["template"]["spec"]["containers"]
    assert not {"securityContext", "envFrom"} & set(container)


def expanded(text: str) -> str:
    """What kubelet makes of commands and values, no variable being defined.

    Source: k8s.io/kubernetes, third_party/forked/golang/expansion: "$$" is "$", an undefined $(NAME) stays.
    """
    return re.sub(r"\$\$", "$", text)


# YAML and shells hold no NUL, and no lone surrogates.
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
HARD = NASTY + "\n#SBATCH --x\n$$(X) $$ \\ \x7f\x85\u2028\U0001f600 {{name}}"


def printed(script: str, env: dict[str, str]) -> list[str]:
    """The words that the shell would run, by a program that prints them with NULs between."""
    show = script.replace("exec python", "exec printf '%s\\0'", 1)
    ran = subprocess.run(["bash", "-c", show], capture_output=True, check=True, env=env)
    return ran.stdout.decode().split("\0")[:-1]


@settings(max_examples=15)
@given(word=TEXT, value=TEXT, workdir=TEXT)
@example(word=HARD, value=HARD, workdir=HARD)
def test_any_value_arrives_in_the_pods(word: str, value: str, workdir: str) -> None:
    text = kubernetes_manifest(
        job(script=("train.py", "--run-dir", word), env={"X": value}, workdir=f"/{workdir}", image=word or "i")
    )
    _, indexed = yaml.safe_load_all(text)
    (container,) = indexed["spec"]["template"]["spec"]["containers"]
    assert (container["workingDir"], container["image"]) == (f"/{workdir}", word or "i")
    assert {"name": "X", "value": value} in [{**e, "value": expanded(e["value"])} for e in container["env"]]
    assert container["command"][:2] == ["sh", "-c"]
    words = printed(expanded(container["command"][2]), {"JOB_COMPLETION_INDEX": "3"})
    assert words[words.index("--node-rank") + 1] == "3"
    assert words[words.index("--nnodes") + 1] == "4"
    assert words[words.index("--master-addr") + 1] == "train-0.train"
    assert words[-3:] == ["train.py", "--run-dir", word]


def test_cpu_jobs_ask_for_no_gpu() -> None:
    assert "nvidia" not in kubernetes_manifest(job(cpu=True, image="i"))
    assert "gpus" not in slurm_script(job(cpu=True))


def test_bad_name() -> None:
    with pytest.raises(UserError, match="DNS label"):
        kubernetes_manifest(job(name="My_Job", image="i"))


# Stand-ins for Slurm's programs, so that the script itself runs: srun is one node, whose index is 2.
SLURM = {
    "scontrol": 'printf "n1\\nn2\\n"',
    "srun": 'echo x >> "$PLACE/attempts"; printf "%s\\0" "$@" > "$PLACE/given"\n'
    'while [ "$1" != bash ]; do shift; done\n'
    'SLURM_NNODES=4 SLURM_NODEID=2 exec "$@"',
    # The hosts' Python: what it is given, what it finds in its environment, and an exit code of our choice.
    "python": 'printf "%s\\0" "$@" > "$PLACE/words"; printf "%s" "$X" > "$PLACE/x"; pwd > "$PLACE/pwd"; exit "$CODE"',
}


def slurm_place(place: Path, code: int, programs: dict[str, str]) -> tuple[Path, dict[str, str]]:
    """Make the stand-ins: (where the script may be written, its environment)."""
    for name, body in programs.items():
        (place / name).write_text(f"#!/bin/bash\n{body}\n")
        (place / name).chmod(0o755)
    (place / "attempts").write_text("")
    env = {"PATH": f"{place}:/usr/bin:/bin", "PLACE": str(place), "CODE": str(code)}
    env |= {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7"}
    return place / "job.sbatch", env


def run_slurm(text: str, place: Path, code: int) -> tuple[int, list[str]]:
    """Run a batch script as a node would: (exit code, the words of its Python)."""
    _, env = slurm_place(place, code, SLURM)
    ran = subprocess.run(["bash"], input=text.encode(), env=env, capture_output=True)
    return ran.returncode, (place / "words").read_bytes().decode().split("\0")[:-1]


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(word=TEXT, value=TEXT)
@example(word=HARD, value=HARD)
def test_any_value_arrives_through_slurm(tmp_path: Path, word: str, value: str) -> None:
    workdir = tmp_path / "it's $HOME\n#SBATCH --x"
    workdir.mkdir(exist_ok=True)
    text = slurm_script(job(script=("train.py", "--run-dir", word), env={"X": value}, workdir=str(workdir)))
    # sbatch reads directives up to the first line of the script proper.
    head = text[: text.index("set -eu")]
    assert [line for line in head.splitlines() if not line.startswith("#SBATCH ")] == ["#!/bin/bash"]
    code, words = run_slurm(text, tmp_path, code=0)
    assert code == 0
    assert words[:3] == ["-m", "megalite", "train"]
    flags = dict(zip(words[3:-3:2], words[4:-3:2]))
    assert (flags["--nnodes"], flags["--node-rank"], flags["--master-addr"]) == ("4", "2", "n1")
    assert flags["--master-port"] == "20007"
    assert words[-3:] == ["train.py", "--run-dir", word]
    assert (tmp_path / "x").read_bytes().decode() == value
    assert (tmp_path / "pwd").read_text() == f"{workdir}\n"


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"name": "a\nid"}, {}),
        ({"memory": "1G\rid"}, {}),
        ({}, {"time_limit": "1\nid"}),
        ({}, {"partition": "p\x85id"}),
        ({}, {"account": "a\u2028id"}),
        ({}, {"directives": ("constraint=x\nid",)}),
    ],
)
def test_no_value_leaves_its_directive(changes: dict, options: dict) -> None:
    with pytest.raises(UserError, match="must be one line"):
        slurm_script(job(**changes), SlurmOptions(**options))


@pytest.mark.parametrize(("node", "of_node", "code"), [(0, 0, 0), (0, 75, 75), (1, 0, 9)])
def test_a_slurm_job_with_reserves_ends_as_its_first_node(tmp_path: Path, node: int, of_node: int, code: int) -> None:
    """srun's code is that of a task that was lost on the way; without its first node there is no other."""
    text = slurm_script(job(script=("t.py", "--recover", "host", "--spare-ranks", "8"), workdir=str(tmp_path)))
    assert "--no-kill" in directives(text)
    assert "srun --kill-on-bad-exit=0 --no-kill " in text
    srun = f'while [ "$1" != bash ]; do shift; done; SLURM_NNODES=4 SLURM_NODEID={node} "$@"; exit 9'
    script, env = slurm_place(tmp_path, of_node, SLURM | {"srun": srun})
    script.write_text(text)
    assert subprocess.run(["bash", script], env=env).returncode == code
    assert not list(tmp_path.glob(".outcome*"))


@pytest.mark.parametrize(("code", "attempts"), [(0, 1), (1, 3), (2, 1)])
def test_slurm_repeats_failures_but_no_mistakes(tmp_path: Path, code: int, attempts: int) -> None:
    text = slurm_script(job(max_restarts=2, workdir=str(tmp_path)))
    assert run_slurm(text, tmp_path, code)[0] == code
    assert len((tmp_path / "attempts").read_text().split()) == attempts
    assert not list(tmp_path.glob(".mistake*"))


@pytest.mark.parametrize(
    ("code", "told", "requeued"), [(75, True, True), (75, False, False), (0, True, False), (143, True, False)]
)
def test_a_slurm_job_that_saved_before_its_last_step_queues_again(
    tmp_path: Path, code: int, told: bool, requeued: bool
) -> None:
    """Where it was told to stop (the time limit), its ranks ended with the code of an unfinished run.

    Where nobody had told it, because recoveries were used up, the job used to end; another attempt goes on from there.
    """
    wait = 'touch "$PLACE/running"; while [ ! -e "$PLACE/told" ]; do sleep 0.05; done; ' if told else ""
    programs = {
        **SLURM,
        "python": wait + 'exit "$([ "$MEGALITE_UNFINISHED_EXIT_CODE" = 75 ] && echo "$CODE")"',
        "srun": 'echo $$ > "$PLACE/step"; ' + SLURM["srun"],
        # The step may end before the script goes on, which then used to end with the code of the signal.
        "scancel": 'touch "$PLACE/told"; while kill -0 "$(cat "$PLACE/step")" 2>/dev/null; do sleep 0.05; done',
        "scontrol": SLURM["scontrol"] + '; echo "$@" >> "$PLACE/scontrol_words"',
    }
    text = slurm_script(job(max_restarts=2, workdir=str(tmp_path)))
    script, env = slurm_place(tmp_path, code, programs)
    script.write_text(text)
    with subprocess.Popen(["bash", script], env=env, stderr=subprocess.PIPE, text=True) as ran:
        if told:
            while not (tmp_path / "running").exists():
                assert ran.poll() is None
            ran.send_signal(signal.SIGTERM)
        _, said = ran.communicate(timeout=120)
    assert ran.returncode == code
    assert ("requeue 7" in (tmp_path / "scontrol_words").read_text().splitlines()) == requeued
    assert ("queued again" in said) == requeued
    assert len((tmp_path / "attempts").read_text().split()) == (1 if told else 3)
    assert not list(tmp_path.glob(".unfinished*"))


def test_the_slurm_script(tmp_path: Path) -> None:
    options = SlurmOptions(
        time_limit="1-00:00:00",
        partition="gpu",
        account="lab a",
        mounts=("/data:/data:ro",),
        directives=("--constraint=h100", "mail-type=END"),
    )
    text = slurm_script(
        job(image="nvcr.io#nvidia/pytorch:25.01", cpus=96, memory="500G", workdir=str(tmp_path)), options
    )
    wanted = {"--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=8", "--signal=B:TERM@120", "--requeue"}
    wanted |= {"--time=1-00:00:00", "--partition=gpu", "--account='lab a'", "--cpus-per-task=96", "--mem=500G"}
    assert wanted | {"--constraint=h100", "--mail-type=END"} <= set(directives(text))
    run_slurm(text, tmp_path, 0)
    srun = (tmp_path / "given").read_text().split("\0")
    assert "--container-image=nvcr.io#nvidia/pytorch:25.01" in srun
    assert f"--container-mounts={tmp_path}:{tmp_path},/data:/data:ro" in srun
    assert f"--container-workdir={tmp_path}" in srun


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("#SBATCH --constraint=h100", "--constraint=h100"),
        ("  #SBATCH   -C 'h100|h200' ", "-C 'h100|h200'"),
        ("#SBATCH mail-type=END  # told by mail", "--mail-type=END  # told by mail"),
        ("C h100", "-C h100"),
        ("--gpus-per-node=h100:8", "--gpus-per-node=h100:8"),
        ("nodes=4", "--nodes=4"),
        (
            "-N4 -n 4 --ntasks-per-node 1 --requeue --export=ALL,A=1",
            "-N4 -n 4 --ntasks-per-node 1 --requeue --export=ALL,A=1",
        ),
        ("comment='signal=B:USR1@60'", "--comment='signal=B:USR1@60'"),
        ("comment=-N", "--comment=-N"),
    ],
)
def test_a_directive_as_it_stands_in_a_script(text: str, line: str) -> None:
    assert line in directives(slurm_script(job(), SlurmOptions(directives=(text,))))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nodes=8", "--directive 'nodes=8': sets --nodes, which --nodes gives; give --nodes N instead"),
        ("--nodes 2-4", "sets --nodes,"),
        ("-N8", "sets --nodes,"),
        ("#SBATCH -N 8", "sets --nodes,"),
        ("constraint=h100 -n 32", "sets --ntasks, and the script starts one task on every node; remove it: --slots"),
        ("ntasks-per-node=8", "sets --ntasks-per-node,"),
        ("gpus-per-node=4", "sets --gpus-per-node, which --slots gives; give --slots N instead"),
        ("no-requeue", "sets --no-requeue, and the script queues the job again"),
        ("export=NONE", "sets --export, and the ranks read variables that the script exports; give --env"),
        ("##SBATCH --x", "is no option of sbatch; write it as --directive constraint=h100"),
        ("#SBATCH", "is no option of sbatch"),
        ("comment='x", "cannot be read (No closing quotation); quote the value as a shell does"),
    ],
)
def test_a_directive_that_breaks_the_script_is_refused(text: str, told: str) -> None:
    with pytest.raises(UserError) as caught:
        slurm_script(job(), SlurmOptions(directives=(text,)))
    assert told in str(caught.value)


ROOT = Path(__file__).parents[4]
TRAIN = (
    "pretrain_gpt.py --preset llama-3-8b --tp 8 --data runs/data/corpus --tokenizer runs/data/tokenizer"
    " --save-every 500"
)


@pytest.mark.parametrize(
    ("file", "flags"),
    [
        (
            "examples/slurm/one_task_per_node.sbatch",
            "--emit slurm --nodes 4 --slots 8 --dir /shared/megalite --python .venv/bin/python"
            " --time-limit 1-00:00:00 --max-restarts 2",
        ),
        (
            "examples/k8s/job.yaml",
            "--emit k8s --nodes 4 --slots 8 --image registry.example.org/megalite:0.1.0 --claim megalite-runs"
            " --env NCCL_DEBUG=WARN",
        ),
    ],
)
def test_the_examples_are_what_the_tool_emits(file: str, flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*flags.split(), "--", *TRAIN.split()]) == 0
    assert capsys.readouterr().out == (ROOT / file).read_text()


def test_the_example_of_a_task_per_rank_is_bash() -> None:
    assert subprocess.run(["bash", "-n", str(ROOT / "examples/slurm/one_task_per_rank.sbatch")]).returncode == 0


def test_the_multi_node_example(tmp_path: Path) -> None:
    hostfile = ROOT / "hostfile.example"
    ran = subprocess.run(
        ["bash", "examples/multi_node/run.sh", str(hostfile), "--data", "my data"],
        cwd=ROOT,
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "DRY": "1", "INTERFACE": "eth0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(ran.stdout.splitlines()) == 2
    remote = shlex.split(shlex.split(ran.stdout.splitlines()[1])[-1])
    assert {"NCCL_SOCKET_IFNAME==eth0", "GLOO_SOCKET_IFNAME=eth0"} <= set(remote)
    assert remote[-2:] == ["--data", "my data"]


@pytest.mark.parametrize("words", [[], ["--help"], ["absent"]])
def test_the_multi_node_example_without_a_hostfile_says_how(words: list[str]) -> None:
    ran = subprocess.run(["bash", "examples/multi_node/run.sh", *words], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 2
    assert "bash examples/multi_node/run.sh hostfile" in ran.stderr
    assert "line " not in ran.stderr
