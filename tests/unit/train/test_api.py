"""`import megalite` in a notebook's process and over ranks: the command line's figures, and nothing left behind."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megalite
from megalite.core.base.log import RankFile
from megalite.core.rows import Rows
from megalite.extras.view.metrics import read_metrics
from megalite.runtime.base.child import children
from megalite.runtime.options import cli
from tests.ranks import ROOT
from tests.unit.train.tiny_run import SIZES, Mine
from tests.workers import WorkerPool


def train(rank: int, run_dir: str, options: dict[str, Any]) -> Any:
    """Two steps of a loop, left and taken up again, with a hook; (loss, gradient norm) by step and who was called."""

    import torch

    import megalite

    before = children(os.getpid())
    called: list[str] = []
    figures = []
    cfg = megalite.configure(**{**SIZES, **options, "run_dir": run_dir})
    with megalite.start(cfg, train_data=Mine()) as run:
        for name, module in run.modules.items():
            module.register_forward_hook(lambda *_, name=name: called.append(name))
        for step in megalite.steps(run):
            figures.append((step["loss"], step["grad_norm"]))
            if run.step == 2:
                break
        megalite.fit(run, [lambda run, step: figures.append((step["loss"], step["grad_norm"]))])
        busy = children(os.getpid())
    files = [h for h in megalite.runtime.loop.loop.logger.handlers if isinstance(h, RankFile)]
    assert set(before) < set(busy)
    # Others may have ended meanwhile.
    assert set(children(os.getpid())) <= set(before)
    assert not files
    assert torch.distributed.is_initialized() == (run.engine.ctx.world.size > 1)
    return figures, sorted(set(called))


@pytest.mark.full
def test_the_same_in_a_layout_as_in_one_process(pool: WorkerPool, tmp_path: Path) -> None:
    alone, modules = train(0, str(tmp_path / "one"), {})
    assert len(alone) == 3
    assert {"layers.0", "layers.1.mlp.down_proj", "lm_head", "embed_tokens"} <= set(modules)
    ranks = pool.run(4, train, str(tmp_path / "four"), {"tp": 2, "pp": 2})
    for figures, _ in ranks:
        np.testing.assert_allclose(figures, alone, rtol=1e-5)
    assert {name for _, called in ranks for name in called} == set(modules)


def left_early(rank: int, run_dir: str) -> None:
    """A step after which rank 0 closes the run, and its connections, while rank 1 has yet to gather new weights."""
    import torch.distributed as dist

    import megalite
    from megalite.core.mesh import collectives

    all_gather = collectives.all_gather

    def late(*args: Any) -> Any:
        time.sleep(0.5)
        return all_gather(*args)

    cfg = megalite.configure(**{**SIZES, "zero": 1, "run_dir": run_dir})
    with pytest.MonkeyPatch.context() as patch, megalite.start(cfg, train_data=Mine()) as run:
        patch.setattr(collectives, "all_gather", late if rank else all_gather)
        next(megalite.steps(run))
    dist.destroy_process_group()


def test_a_run_that_is_left_early_ends_on_all_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, left_early, str(tmp_path))


@pytest.mark.full
def test_the_command_line_runs_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its options, its figures to the bit, and its run resumed."""
    import pretrain_gpt

    options = {**SIZES, "mock_data": True, "shuffle": False, "data": None, "lr": 1e-3}
    words = [w for name, v in SIZES.items() for w in (f"--{name.replace('_', '-')}", str(v))]
    words += ["--mock-data", "--no-shuffle", "--lr", "0.001", "--run-dir", str(tmp_path / "line")]
    assert megalite.configure(**options, run_dir=tmp_path / "line") == cli.parse(words).config
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words])
    pretrain_gpt.main()
    with megalite.start(megalite.configure(**options, run_dir=tmp_path / "api")) as run:
        mine = [step["loss"] for step in megalite.steps(run)]
    assert mine == [step["loss"] for step in read_metrics(tmp_path / "line")[0]]
    longer = megalite.configure(**{**options, "train_steps": 4}, run_dir=tmp_path / "line")
    with megalite.start(longer) as run:
        assert [step["step"] for step in megalite.steps(run)] == [4]


def weighted(weight: float) -> Any:
    """Rows of which token 5 has this weight."""
    at = np.arange(8)
    return megalite.Rows(at, at, weights=np.where(at == 5, weight, 1.0))


BAD_SAMPLES = [
    (lambda i: list(range(8)), {}, r"sample 0 of .* of shape \[8\].*seq_len \+ 1 = 9"),
    (lambda i: np.ones(9), {}, "of float64.*integers"),
    (lambda i: weighted(-1.0), {}, "weight -1 in sample 0 of Bad: .* token 5, is a number from 0 to 1e\\+10"),
    (lambda i: weighted(1e300), {}, "weight inf in sample 0 of Bad"),
    (lambda i: weighted(2e10), {}, "weight 2e\\+10 in sample 0 of Bad"),
    (lambda i: [31] * 9, {}, "token id 31 .*below --vocab-size 31"),
    (lambda i: [1] * 9, {"mock_data": True}, "--mock-data with train_data"),
    (lambda i: [1] * 9, {"stage": "dpo"}, "stage dpo with train_data: learns from pairs of answers"),
    (lambda i: [1] * 9, {"vocab_size": None}, "no vocab_size"),
    (lambda i: [1] * 9, {"eval_every": 1}, "--eval-every 1 with no valid_data"),
]


@pytest.mark.parametrize(("sample", "options", "words"), BAD_SAMPLES)
def test_mistakes_in_data_of_ones_own(sample: Any, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    mine = type("Bad", (), {"__len__": lambda self: 3, "sample": lambda self, i: sample(i)})()
    with pytest.raises(megalite.UserError, match=words):
        megalite.start(megalite.configure(**{**SIZES, **options}, run_dir=tmp_path), train_data=mine)


class Weighted:
    """Rows that all targets of sample `at` weigh `weight`, in the others 1."""

    def __init__(self, weight: float, at: int) -> None:
        self.weight, self.at = weight, at

    def __len__(self) -> int:
        return 8

    def sample(self, i: int) -> megalite.Rows:
        ids = (np.arange(9) * (i + 1)) % 31
        weights = np.full(8, self.weight if self.at in (i, -1) else 1.0)
        return megalite.Rows(ids[:-1], ids[1:], weights=weights)


@pytest.mark.parametrize(
    ("weight", "at", "words"),
    [
        # The gradient norm was -5.59, and nobody said so.
        (-1.0, 5, "weight -1 in sample 5 of Weighted: .* token 0,"),
        (math.nan, 5, "weight nan in sample 5 of Weighted"),
        # The gradient norm was 0.0139 or 0 where it is 0.68, and nothing was clipped.
        (1e-30, -1, r"samples 0 to 1 \(step 1\): have targets that weigh 1.6e-29 together, less than 1.6e-09"),
        (0.0, -1, r"samples 0 to 1 \(step 1\): contain no target"),
    ],
)
def test_weights_that_cannot_be_trained_on(weight: float, at: int, words: str, tmp_path: Path) -> None:
    options = {**SIZES, "global_batch_size": 2, "micro_batch_size": 2, "train_steps": 4, "shuffle": False}
    with megalite.start(megalite.configure(**options, run_dir=tmp_path), train_data=Weighted(weight, at)) as run:
        with pytest.raises(megalite.UserError, match=words):
            megalite.fit(run)
        assert run.step == (0 if at == -1 else 2)


@pytest.mark.full
def test_small_weights_are_as_good_as_large_ones(tmp_path: Path) -> None:
    norms = []
    for weight in (1e-9, 1.0, 1e9):
        options = {**SIZES, "train_steps": 2, "run_dir": tmp_path / str(weight)}
        with megalite.start(megalite.configure(**options), train_data=Weighted(weight, -1)) as run:
            norms.append([step["grad_norm"] for step in megalite.steps(run)])
    np.testing.assert_allclose(norms, [norms[1]] * 3, rtol=1e-5)


def test_options_are_those_of_the_command_line() -> None:
    with pytest.raises(megalite.UserError, match="--tensor-parallel 2: is an unknown flag"):
        megalite.configure(tensor_parallel=2)
    with pytest.raises(megalite.UserError, match="dry_run=True"):
        megalite.configure(dry_run=True)
    assert megalite.configure(tensor_model_parallel_size=2, num_heads=4).parallel.tp == 2
    assert megalite.configure(rope_scaling={"factor": 4.0}).model.rope_scaling.factor == 4.0  # type: ignore[union-attr]


OFF = (
    *("gradient_checkpointing", "bf16", "fp16", "torch_compile", "load_best_model_at_end", "do_train", "fsdp"),
    *("swiglu", "use_distributed_optimizer", "no_load_optim", "print_config", "ignore_megatron_flags"),
)


def test_switches_of_other_tools_may_be_off() -> None:
    """False is what they are without, also for what is taken from their tool's defaults."""
    options: dict[str, Any] = {"vocab_size": 90, "mock_data": True}
    plain = megalite.configure(**options)
    for name in OFF:
        assert megalite.configure(**options, **{name: False}) == plain, name
    assert megalite.configure(**options, resume_from_checkpoint=False).run.resume == "never"
    assert megalite.configure(**options, resume_from_checkpoint=True).run.resume == "latest"
    assert megalite.configure(**options, gradient_checkpointing=True).train.recompute == "full"
    assert megalite.configure(**options, fsdp=True).parallel.zero == 3


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("nonsense", "--nonsense False: is an unknown flag"),
        ("ignore_data_skip", "--ignore-data-skip False: is a name of the Hugging Face Trainer"),
        ("recompute", "--recompute False: must be one of none, selective, full"),
    ],
)
def test_false_of_what_is_no_switch(option: str, says: str) -> None:
    with pytest.raises(megalite.UserError, match=re.escape(says)):
        megalite.configure(vocab_size=90, mock_data=True, **{option: False})


def test_a_step_takes_arrays_and_tensors(tmp_path: Path) -> None:
    from megalite.core.step import eval_step

    with megalite.start(megalite.configure(**SIZES, mock_data=True, run_dir=tmp_path)) as run:
        ids = np.arange(36).reshape(4, 9) % 31
        first = [eval_step(run.engine, batch) for batch in (ids, ids.astype(np.int32), torch.from_numpy(ids))]
        assert len(set(first)) == 1
        for batch in (ids[:3], ids[:, :8], ids.astype(float), torch.ones(4, 9)):
            with pytest.raises(megalite.UserError, match=r"must be token ids .* = \[4, 9\]"):
                eval_step(run.engine, batch)
        for weight in (-1.0, np.nan):
            rows = dataclasses.replace(Rows.of(ids), weights=np.full((4, 8), weight, np.float32))
            with pytest.raises(megalite.UserError, match=r"the weight of a target"):
                eval_step(run.engine, rows)


def test_a_run_imports_nothing_that_it_does_not_use() -> None:
    """To start and for a step: the compiler and Triton took 1.7 of 3.5 s of processor time, then sympy 0.3 of 2.

    Collections leave out what the script imports.
    """
    unused = {"torch._dynamo", "torch._inductor", "triton", "sympy", "matplotlib", "jinja2"}
    code = (
        "import gc, sys, pretrain_gpt\nprint(gc.isenabled(), gc.get_freeze_count() > 100_000)\n"
        "from megalite.runtime.recover.rehearse import rehearse\nrehearse()\n"
        f"print(sorted({unused} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout == "True True\n[]\n"


def test_importing_costs_nothing() -> None:
    code = "import sys, megalite; print(sorted({'torch', 'numpy', 'yaml'} & set(sys.modules)), dir(megalite)[-3:])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "[] ['start', 'steps']\n" or said.startswith("[] ")
    assert all(callable(getattr(megalite, name)) for name in megalite.__all__)
