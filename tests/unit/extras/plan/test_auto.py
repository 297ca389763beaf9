"""`--layout auto` on devices that are stubs of the one function that reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.core.base.errors import UserError
from megalite.extras.compat.dialect import DIALECT
from megalite.extras.launch.layout_check import check_layout
from megalite.extras.plan import device
from megalite.extras.plan.auto import Choice, choose_layout
from megalite.extras.plan.memory.ranks import memory_per_rank
from megalite.extras.plan.report import flags
from megalite.runtime.options import cli
from megalite.runtime.options.fields import LAYOUT

LLAMA_7B = "--num-layers 32 --hidden-size 4096 --num-heads 32 --ffn-hidden-size 11008 --vocab-size 32000"
MODELS = {
    "1b": ["--preset", "llama-3.2-1b", "--seq-len", "4096"],
    "7b": [*LLAMA_7B.split(), "--seq-len", "4096"],
    "70b": ["--preset", "llama-3-70b", "--seq-len", "4096"],
}
BATCH = ["--global-batch-size", "256", "--precision", "bf16", "--layout", "auto"]
GPUS = {16: ("Tesla V100-SXM2-16GB", 80), 24: ("NVIDIA GeForce RTX 4090", 128)}
GPUS |= {80: ("NVIDIA H100 80GB HBM3", 132), 141: ("NVIDIA H200", 132)}


def stub(monkeypatch: pytest.MonkeyPatch, gigabytes: int, host_gigabytes: float = 250) -> None:
    name, units = GPUS[gigabytes]
    seen = device.DetectedDevice(name, gigabytes * 10**9, int(host_gigabytes * 1e9), units)
    monkeypatch.setattr(device, "read_device", lambda kind: seen)


def choose(words: list[str], world: int = 8) -> Choice:
    parsed = cli.parse(words, dialect=DIALECT)
    assert parsed.layout is not None
    return choose_layout(parsed.config, world, parsed.layout)


@pytest.mark.parametrize(("gigabytes", "model"), [(16, "1b"), (24, "7b"), (80, "7b"), (141, "7b")])
def test_the_choice_fits_by_the_plan_of_the_dry_run(
    gigabytes: int, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(monkeypatch, gigabytes)
    choice = choose(MODELS[model] + BATCH)
    worst = max(rank.total for rank in memory_per_rank(choice.cfg, choice.best.grid))
    assert worst == choice.best.worst.total <= 0.9 * gigabytes * 1e9
    if gigabytes >= 80:  # as the states alone say: 52.5 of 80 GB
        assert choice.best.options == {**choice.best.options, "zero": 1, "tp": 1, "pp": 1, "recompute": "none"}
    # The flags that it prints make the same run, without a search.
    *_, last = choice.report()
    words = last.split(": ")[1].split()
    assert words == flags(choice.best.options)
    again = cli.parse([*MODELS[model], *BATCH[:4], *words])
    assert again.layout is None
    assert again.config == choice.cfg
    if gigabytes == 80:
        assert choose(MODELS[model] + BATCH) == choice


@pytest.mark.full
def test_a_model_that_does_not_fit_is_offloaded_or_refused_with_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch, 80)
    choice = choose(MODELS["70b"] + BATCH)
    assert choice.cfg.train.offload == "optimizer"
    assert choice.best.worst.total <= 0.9 * 80e9
    # 12 bytes for each parameter of an eighth of the model, and pinned buffers.
    assert max(rank.host for rank in choice.best.ranks) == pytest.approx(12 * 70.55e9 / 8, rel=0.03)
    stub(monkeypatch, 80, host_gigabytes=100)
    with pytest.raises(UserError) as refused:
        choose([*MODELS["70b"], *BATCH, "--tp", "8"])
    assert "no layout fits" in str(refused.value)
    assert "bytes of host memory per rank, of 90,000,000,000" in str(refused.value)
    stub(monkeypatch, 24)
    with pytest.raises(UserError, match=r"no layout fits: the smallest needs [\d,]+ bytes per rank, of 21,600,000,000"):
        choose([*MODELS["70b"], *BATCH, "--tp", "8"])


def test_flags_hold_and_files_give_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stub(monkeypatch, 80)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("parallel: {tp: 8, zero: 3, zero_keep: backward}\ntrain: {micro_batch_size: 16}\n")
    free = choose([*MODELS["7b"], *BATCH, "--config", str(recipe)]).cfg
    assert (free.parallel.tp, free.parallel.zero_keep, free.train.micro_batch_size) == (1, "none", 1)
    words = ["--tensor-model-parallel-size", "4", "--recompute", "full", "--strategy", "auto"]
    held = choose([*MODELS["7b"], *BATCH[:4], *words]).best.options
    assert (held["tp"], held["recompute"]) == (4, "full")
    assert set(held) == set(LAYOUT)
    with pytest.raises(UserError, match="--tp 3"):
        choose([*MODELS["7b"], *BATCH, "--tp", "3"])
    with pytest.raises(UserError, match="--layout auto: requires the size of the vocabulary"):
        choose(BATCH)


def test_a_launcher_checks_what_does_not_depend_on_the_device() -> None:
    words = ["pretrain_gpt.py", *MODELS["7b"], *BATCH]
    check_layout([*words, "--global-batch-size", "12"], 8)
    with pytest.raises(UserError, match="8 ranks"):
        check_layout([*words, "--tp", "16"], 8)


def test_rates_of_a_machine_come_from_its_name_or_its_calibration(tmp_path: Path) -> None:
    from megalite.extras.plan.cluster import FITTED, write_calibration

    seen = device.DetectedDevice("NVIDIA A100-SXM4-40GB", 42 * 10**9, 10**11, 108)
    cluster, source = device.machine(seen, 16)
    assert (cluster.device.name, cluster.domain, source) == ("a100-40g", 8, "rates of a100-40g")
    half = device.machine(device.DetectedDevice("NVIDIA Mystery", 10**10, 10**11, 54), 1)[0].device
    assert (half.peak, half.memory) == (156e12, 10**10)
    path = tmp_path / "here.json"
    write_calibration(path, cluster.device, FITTED, date="today")
    measured, source = device.machine(device.DetectedDevice("cpu", 10**9, 10**9), 2, str(path))
    assert (measured.device.peak, measured.device.memory, measured.domain) == (312e12, 10**9, 2)
    assert source == f"rates of {path}"


def test_the_cpu_of_this_host_is_read() -> None:
    seen = device.read_device("cpu")
    assert seen.on_cpu
    assert seen.memory == seen.host_memory > 10**8
