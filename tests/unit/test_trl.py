"""An export keeps training elsewhere: TRL's SFTTrainer and DPOTrainer under `accelerate launch`, and back here."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import PYTHONPATH

REPOSITORY = Path(__file__).parents[2]
MISSING = [name for name in ("trl", "accelerate", "datasets") if importlib.util.find_spec(name) is None]

TINY = "--num-layers 1 --hidden-size 16 --num-heads 2 --ffn-hidden-size 32 --seq-len 32 --train-steps 1 --device cpu"


def run(folder: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.trl
@pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (pip install trl)")
def test_an_export_trains_in_trl_and_comes_back(tmp_path: Path) -> None:
    pretrain = [sys.executable, str(REPOSITORY / "pretrain_gpt.py"), *TINY.split()]
    (tmp_path / "a.txt").write_text("some text " * 100)
    prepare = [sys.executable, str(REPOSITORY / "tools" / "preprocess_data.py"), "--input", "a.txt", "--out", "a"]
    run(tmp_path, *prepare, "--tokenizer", "bytes")
    run(tmp_path, *pretrain, "--data", "a", "--split", "1,0,0", "--tokenizer", "bytes", "--run-dir", "run")
    convert = [sys.executable, str(REPOSITORY / "tools" / "convert_hf.py"), "export"]
    run(tmp_path, *convert, "--checkpoint", "run", "--out", "model")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    script = [str(REPOSITORY / "examples" / "train_with_trl.py"), "--model", "model", "--out", "out"]
    printed = run(tmp_path, *launch, *script)
    # DPO begins with two equal models: its first loss is ln 2.
    assert "'loss': '0.6931'" in printed or "'loss': 0.6931" in printed
    for name in ("sft", "dpo"):
        run(tmp_path, *pretrain, "--init-from-hf", f"out/{name}", "--mock-data", "--run-dir", f"run_{name}")
        last = json.loads((tmp_path / f"run_{name}" / "metrics.jsonl").read_text().splitlines()[1])
        assert last["step"] == 1
