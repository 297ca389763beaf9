"""Batch sizes by step, against a loop over the steps of a run."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import megalite
from megalite.core.base.errors import UserError
from megalite.core.mesh.grid import Grid
from megalite.core.options.batch_sizes import BatchSizes
from megalite.core.parts.schedules.choose import name_of, names_of
from megalite.extras.plan.report import dry_run_report
from megalite.extras.view.metrics import read_metrics
from megalite.runtime.options.cli import parse, to_yaml
from megalite.runtime.options.fields import with_options
from megalite.runtime.options.run import Config


def config(words: str) -> Config:
    return parse(words.split("|")).config


def test_sizes_samples_and_steps_agree_with_a_loop() -> None:
    for text in ("0:8", "0:4 1:8", "0:3 5:10 6:2 9:7"):
        sizes, taken = BatchSizes.read(text), [0]
        for step in range(1, 15):
            last = [size for start, size in sizes.phases if start < step][-1]
            assert sizes.size(step) == last
            taken.append(taken[-1] + last)
        assert [sizes.samples(step) for step in range(15)] == taken
        assert [sizes.steps(n) for n in range(taken[-1])] == [
            max(step for step, used in enumerate(taken) if used <= n) for n in range(taken[-1])
        ]
        assert list(islice(sizes.following(4), 3)) == [sizes.size(step) for step in (5, 6, 7)]
        assert BatchSizes.read(str(sizes)) == sizes


def test_thresholds_in_samples() -> None:
    # 25 steps of 16 reach 400 samples, 25 of 32 reach 1,200.
    sizes = BatchSizes.by_samples([(0, 16), (400, 32), (1200, 64)])
    assert str(sizes) == "0:16 25:32 50:64"
    assert [sizes.size(step) for step in (25, 26, 50, 51)] == [16, 32, 32, 64]
    # What takes more samples than whole steps have takes one more.
    assert [sizes.steps_to(n) for n in (0, 400, 401, 1200, 1264, 1265)] == [0, 25, 26, 50, 51, 52]
    for step, text in ((0, "0:8 30:4"), (25, "0:16 25:8 30:4"), (40, "0:16 25:32 40:4"), (30, "0:16 25:32 30:4")):
        later = "0:8 30:4" if step < 30 else "0:2 29:4"
        assert str(sizes.from_then_on(step, BatchSizes.read(later))) == text
    assert str(sizes.from_then_on(60, BatchSizes.read("0:64"))) == str(sizes)
    # A threshold within a step acts after it, and one step may pass several.
    assert str(BatchSizes.by_samples([(0, 16), (3, 20), (5, 24), (33, 28)])) == "0:16 1:24 2:28"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("0:16,400:32", "must be STEP:SIZE pairs of whole numbers; write it as '0:16 400:32'"),
        ("", "must begin with the batch size of step 0"),
        ("0:16 8:32 8:64", "must list steps in increasing order, each once"),
        ("0:16 8:0", "must have sizes from 1 to 9999999"),
    ],
)
def test_what_cannot_be_read_is_refused(words: str, error: str) -> None:
    with pytest.raises(UserError) as caught:
        parse([f"--batch-size-schedule={words}"])
    assert str(caught.value).startswith(f"--batch-size-schedule {words}".strip())
    assert error in str(caught.value)


def test_the_largest_is_the_global_batch_size() -> None:
    cfg = config("--batch-size-schedule|0:4 2:8 6:2")
    assert cfg.train.global_batch_size == 8
    assert parse(["--global-batch-size=8", "--batch-size-schedule=0:4 2:8 6:2"]).config == cfg


def test_it_survives_a_file(tmp_path: Path) -> None:
    cfg = config("--batch-size-schedule|0:4 2:8")
    (tmp_path / "c.yaml").write_text(to_yaml(cfg))
    assert config(f"--config|{tmp_path}/c.yaml") == cfg


def test_every_size_must_be_shared_out_and_run() -> None:
    cfg = config("--batch-size-schedule|0:4 2:6 6:8|--micro-batch-size|2")
    assert cfg.microbatch_counts(1) == [2, 3, 4]
    assert cfg.microbatch_counts(2) == [1, 2]  # three micro-batches are one and two
    with pytest.raises(UserError, match=r"0:4 2:6 6:8: 4: must give each of 3 data-parallel ranks a micro-batch"):
        cfg.num_microbatches(3)
    with pytest.raises(UserError, match=r"0:4 2:6 6:7: 7: must be divisible by micro-batch size 2; use 8, or change"):
        with_options(cfg, {"batch_size_schedule": "0:4 2:6 6:7", "global_batch_size": 7}).num_microbatches(1)
    # Interleaved runs groups of pp: 3 micro-batches cannot, and auto takes what runs all sizes.
    for ask in (name_of, names_of):
        with pytest.raises(UserError, match="3 micro-batches with schedule interleaved"):
            ask(with_options(cfg, {"pp": 2, "vp": 2, "schedule": "interleaved"}), 1)
    odd = with_options(cfg, {"pp": 2, "vp": 3, "num_layers": 6, "batch_size_schedule": "0:6 2:8"})
    assert name_of(with_options(odd, {"batch_size_schedule": None}), 1) == "interleaved"
    assert "interleaved" not in names_of(with_options(odd, {"vp": 2}), 1)
    with pytest.raises(UserError, match="3 micro-batches with schedule interleaved"):
        name_of(odd, 1)


def test_the_passes_of_the_largest_batch_are_not_the_most() -> None:
    """Where shares are uneven, interleaved makes them a multiple of pp."""
    cfg = config("--batch-size-schedule|0:5 2:6|--global-batch-size|6|--pp|2|--vp|2|--num-layers|4")
    assert cfg.microbatch_counts(2) == [3, 4]
    assert (cfg.passes(5, 2), cfg.num_microbatches(2)) == (4, 3)


def test_dry_run_shows_the_ramp() -> None:
    cfg = config("--batch-size-schedule|0:4 2:8|--vocab-size|96|--preset|tiny")
    page = dry_run_report(cfg, Grid.of(2))
    assert "8 samples = 1,024 tokens per step; 4 micro-batches of 1 per dp rank\n" in page
    assert "ramp: 4 samples, 8 from step 3 on; all figures are of the largest\n" in page
    many = BatchSizes.read(" ".join(f"{i}:{i + 8}" for i in range(100)))
    assert many.summary == "8 samples, 9 from step 2 on, 10 from step 3 on, ... (100 sizes), 107 from step 100 on"


MODEL: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "seq_len": 8,
    "vocab_size": 31,
    "device": "cpu",
    "mock_data": True,
    "micro_batch_size": 4,
    "warmup_steps": 2,
    "lr_decay_steps": 4,
}


def trained(folder: Path, **options: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    cfg = megalite.configure(**MODEL, lr=1e-2, run_dir=folder, **options)
    with megalite.start(cfg) as run:
        megalite.fit(run)
    return read_metrics(folder)


@pytest.mark.full
def test_rates_count_steps_or_samples_and_evaluation_does_not_change(tmp_path: Path) -> None:
    ramp = {"batch_size_schedule": "0:4 2:8 3:16", "train_steps": 5, "eval_steps": 1, "eval_every": 2}
    steps, events = trained(tmp_path / "steps", **ramp)
    assert [step["global_batch_size"] for step in steps] == [4, 4, 8, 16, 16]
    assert [step["consumed_samples"] for step in steps] == [4, 8, 16, 32, 48]
    assert [step["consumed_tokens"] for step in steps] == [8 * step["consumed_samples"] for step in steps]
    assert [step["lr"] for step in steps] == pytest.approx([5e-3, 1e-2, 5e-3, 0, 0], abs=1e-9)
    # A warmup of 2 full batches is 32 samples; at 48 half of the cosine to 64 is over.
    by_samples, _ = trained(tmp_path / "samples", **ramp, lr_by="samples", weight_decay=0.3, start_weight_decay=0.0)
    assert [step["lr"] for step in by_samples] == pytest.approx([1.25e-3, 2.5e-3, 5e-3, 1e-2, 5e-3])
    assert [step["weight_decay"] for step in by_samples] == pytest.approx([0.025, 0.05, 0.1, 0.2, 0.3])
    log = (tmp_path / "steps" / "logs" / "rank_0.log").read_text()
    for line in (
        "--batch-size-schedule: 4 samples, 8 from step 3 on, 16 from step 4 on",
        "global batch size 8 -> 16 from step 4 on",
        "; 1 to 4 micro-batches of 4 per dp rank",
    ):
        assert line in log
    log = (tmp_path / "samples" / "logs" / "rank_0.log").read_text()
    assert "warm-up of 32 samples: 4 steps\n" in log
    # The first steps are those of a run with the first size, and so is the evaluation of 16 samples.
    same, others = trained(tmp_path / "constant", global_batch_size=4, train_steps=2, eval_steps=4, eval_every=2)
    assert [step["loss"] for step in steps[:2]] == pytest.approx([step["loss"] for step in same], rel=1e-6)
    first, last = ([e["loss"] for e in found if e["event"] == "eval"][0] for found in (events, others))
    assert first == pytest.approx(last, rel=1e-6)
