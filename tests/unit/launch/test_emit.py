from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megalite.errors import UserError
from megalite.launch import cli
from megalite.launch.emit import BatchJob, kubernetes_manifest, slurm_script

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
    service, indexed = validate(kubernetes_manifest(job(max_restarts=2), "registry/image:1", claim="runs"))
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": indexed["metadata"]["name"]}
    spec = indexed["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    assert spec["backoffLimit"] == 8
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    assert {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}} in pod["volumes"]
    assert [m["mountPath"] for m in container["volumeMounts"]] == ["/dev/shm", "/work dir/runs"]
    assert {"name": "X", "value": NASTY} in container["env"]
    assert "$$(id)" in container["command"][2]


def test_the_pods_shell_sees_what_was_meant() -> None:
    (_, indexed) = validate(kubernetes_manifest(job(), "i"))
    command = indexed["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[:2] == ["sh", "-c"]
    # Kubernetes turns "$$(" into "$("; then a shell with the index in its environment runs it.
    script = command[2].replace("$$(", "$(").replace("exec python", "exec printf '%s\\n'", 1)
    ran = subprocess.run(
        ["sh", "-c", script], capture_output=True, text=True, check=True, env={"JOB_COMPLETION_INDEX": "3"}
    )
    words = ran.stdout.splitlines()
    assert words[words.index("--node-rank") + 1] == "3"
    assert words[words.index("--nnodes") + 1] == "4"
    assert words[words.index("--master-addr") + 1] == "train-0.train"
    assert words[-5:] == ["pretrain_gpt.py", "--tp", "8", "--run-dir", NASTY]


def test_a_misspelt_key_is_caught() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    _, indexed = yaml.safe_load_all(kubernetes_manifest(job(), "i"))
    indexed["spec"]["completionsMode"] = indexed["spec"].pop("completionMode")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(indexed, kubernetes_validate.latest_version(), strict=True)


def test_cpu_jobs_ask_for_no_gpu() -> None:
    assert "nvidia" not in kubernetes_manifest(job(cpu=True), "i")
    assert "gpus" not in slurm_script(job(cpu=True))


def test_bad_name() -> None:
    with pytest.raises(UserError, match="DNS label"):
        kubernetes_manifest(job(name="My_Job"), "i")


def test_the_slurm_script() -> None:
    text = slurm_script(job(max_restarts=1), time_limit="1-00:00:00")
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    directives = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    wanted = {"--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=8", "--signal=B:TERM@120", "--requeue"}
    assert wanted <= set(directives)
    assert "--time=1-00:00:00" in directives
    assert "for attempt in $(seq 0 1); do" in text
    (srun,) = [line for line in text.splitlines() if line.strip().startswith("srun ")]
    inner = shlex.split(srun)[shlex.split(srun).index("-c") + 1]
    script = inner.replace("exec python", "exec printf '%s\\n'", 1)
    env = {"SLURM_NNODES": "4", "SLURM_NODEID": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "20007"}
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env=env)
    words = ran.stdout.splitlines()
    assert words[words.index("--node-rank") + 1] == "2"
    assert words[words.index("--master-port") + 1] == "20007"
    assert words[-1] == NASTY


ROOT = Path(__file__).parents[3]
TRAIN = (
    "pretrain_gpt.py --preset llama-3-8b --tp 8 --data runs/data/corpus --tokenizer runs/data/tokenizer"
    " --save-every 500"
)


@pytest.mark.parametrize(
    ("file", "flags"),
    [
        (
            "examples/slurm/torchrun.sbatch",
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
    assert cli.main([*flags.split(), "--", *TRAIN.split()]) == 0
    assert capsys.readouterr().out == (ROOT / file).read_text()


@pytest.mark.parametrize("file", ["slurm/torchrun.sbatch", "slurm/one_task_per_rank.sbatch", "multi_node/run.sh"])
def test_example_scripts_are_bash(file: str) -> None:
    assert subprocess.run(["bash", "-n", str(ROOT / "examples" / file)]).returncode == 0


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
