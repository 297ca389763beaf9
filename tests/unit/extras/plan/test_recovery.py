"""What `--recover` takes, against figures computed by hand from 12 bytes a parameter; and time lost to failures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megalite.core.base.errors import UserError
from megalite.core.build import build_engine
from megalite.core.mesh.grid import Grid
from megalite.extras.plan.cluster import Cluster
from megalite.extras.plan.command import main
from megalite.extras.plan.memory.ranks import memory_per_rank
from megalite.extras.plan.recovery import copy_seconds, effective, fewer, traffic, waits_for
from megalite.extras.plan.report import dry_run_report
from megalite.extras.plan.search import search
from megalite.runtime.options import cli
from megalite.runtime.options.run import Config
from tests.unit.extras.plan.counted import rank_context
from tests.unit.extras.plan.models import config

# Of a host with 8 GPUs and one link of 12.5 GB/s. Each of 72 bytes (six copies of master and two moments) a parameter,
# times 8 / GPUs; 12 bytes over 55 GB/s a GPU; 12 bytes times 8 over the host's link.
BY_HAND = [
    ("--preset llama-3-8b", 16, 288, 0.109, 3.8),
    ("--preset llama-3-70b --tp 8", 128, 315, 0.119, 4.2),
    ("--preset llama-3.1-405b --tp 8 --pp 16", 8192, 28, 0.0108, 0.38),
]


def _config(flags: str, world: int) -> tuple[Config, Grid]:
    words = [*flags.split(), "--global-batch-size", "8192", "--micro-batch-size", "1", "--zero", "1"]
    cfg = cli.parse([*words, "--precision", "bf16", "--recover", "host"]).config
    return cfg, Grid.from_config(cfg.parallel, world)


@pytest.mark.parametrize(("flags", "gpus", "host_gb", "near", "far"), BY_HAND)
def test_memory_and_traffic_of_published_models(flags: str, gpus: int, host_gb: float, near: float, far: float) -> None:
    """Round numbers of parameters, evenly cut."""
    cfg, grid = _config(flags, gpus)
    ranks = memory_per_rank(cfg, grid)
    # The last stage has the output layer too: the mean is that of an even cut.
    copies = sum(rank.copies for rank in ranks) / len(ranks)
    assert copies * 8 / 1e9 == pytest.approx(host_gb, rel=0.03)
    cluster = Cluster.parse(f"h100:{gpus},network=1.5625")
    seconds = copy_seconds(copies / 6, cluster)
    assert seconds[0] == pytest.approx(near, rel=0.05)
    assert seconds[1] == pytest.approx(far, rel=0.05)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("zero", "compress"), [(0, "none"), (1, "none"), (0, "topk:0.1")])
def test_a_copy_is_what_a_rank_holds(zero: int, precision: str, compress: str) -> None:
    """Also of weights that are their own masters, and of what a codec has left to send."""
    cfg, grid = config(parallel={"zero": zero}, precision=precision, compress=compress), Grid.of(2)
    cfg = replace(cfg, run=replace(cfg.run, recover="process"))
    flats = [state.flat for state in build_engine(cfg, rank_context(grid, 1)).optimizer.states()]
    held = sum(flat.numel() * flat.element_size() for flat in flats)
    planned = memory_per_rank(cfg, grid)[0]
    assert planned.copies == pytest.approx(3 * held, rel=0.02)
    assert planned.host == planned.copies
    size, three = (f"{count * held / 2**20:.2f} MiB" for count in (1, 3))
    said = (
        f"recovery    process: after each step a copy of {size} per rank to the host's memory; {three} per rank for 3 "
    )
    assert said in dry_run_report(cfg, grid)
    assert memory_per_rank(replace(cfg, run=replace(cfg.run, recover="none")), grid)[0].host == 0


@pytest.mark.parametrize(
    ("every", "step", "said"),
    [(1, 2.0, "steps wait: use --recover-every 2"), (2, 2.0, "no step waits for it"), (1, 4.0, "no step waits for it")],
)
def test_copies_that_take_longer_than_steps(every: int, step: float, said: str) -> None:
    """6.02 GB over 8 ranks' 12.5 GB/s are 3.85 s; a GPU copies them to the host in 0.11 s, beside the next step."""
    cfg, grid = _config("--preset llama-3-8b", 16)
    cfg = replace(cfg, run=replace(cfg.run, recover_every=every))
    cluster = Cluster.parse("h100:16,network=1.5625")
    (line,) = traffic(cfg, memory_per_rank(cfg, grid), cluster, step)
    assert line == (
        "--recover host: at most 289.1 GB of host memory for the copies of 8 ranks; one takes 0.11 s to the host, for "
        f"which each step waits 0 s; it takes 3.9 s to another one: {said}"
    )
    assert waits_for(0.11, cluster, 0.1) == pytest.approx(0.01)
    cpu = replace(cluster, device=replace(cluster.device, name="cpu"))
    assert waits_for(0.11, cpu, 1.0) == 0.11  # which makes the copy itself


def test_time_that_is_progress() -> None:
    """A failure every 2.8 hours, steps of 30 s: 10 s and a step are lost; or 60 s and half of 15 minutes."""
    cfg, _ = _config("--preset llama-3-8b", 16)
    recovers, restarts = effective(cfg, 30.0, 2.8 * 3600)
    assert (recovers, restarts) == (pytest.approx(0.996, abs=5e-4), pytest.approx(0.95, abs=1e-3))
    often = replace(cfg, run=replace(cfg.run, save_every=10, recover_every=4))
    assert effective(often, 30.0, 1000.0) == (pytest.approx(0.87), pytest.approx(0.79))
    assert effective(cfg, 30.0, 30.0) == (0.0, 0.0)
    # Steps of 9 s that wait 1 s: 20 s of 1000 are lost, and a tenth of the rest; then 18 s a copy.
    assert effective(cfg, 9.0, 1000.0, waited=1.0)[0] == pytest.approx(0.98 * 0.9)
    assert effective(cfg, 9.0, 1000.0, waited=1.0, far=18.0)[0] == pytest.approx(0.972 * 0.5)


def test_the_planner_says_both(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--preset", "llama-3-8b", "--tp", "2", "--global-batch-size", "1024", "--cluster", "h100:16"]
    flags += ["--recover", "host", "--mtbf", "2.8"]
    assert main(["explain", *flags]) == 0
    text = capsys.readouterr().out
    assert "\n--recover host: at most 289.1 GB of host memory" in text
    assert "\na failure every 2.8 hours: 9" in text
    assert "s each, and copies), 94.9% with restarts" in text
    for command in ("explain", "search"):
        with pytest.raises(UserError, match="--mtbf -1.0: must be above 0"):
            main([command, *flags, "--mtbf", "-1", "--json"])
        with pytest.raises(UserError, match="--recover host: needs ranks on several hosts"):
            main([command, *flags, "--cluster", "h100:8"])
    for command in ("explain", "search"):
        assert main([command, *flags, "--pp", "1", "--micro-batch-size", "1", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        figures = (told if command == "explain" else told[0])["recovery"]
        assert figures["host_bytes_at_most"] > 289e9
        assert figures["copy_s"] == pytest.approx(0.11, rel=0.05)
        assert 0.5 < figures["progress_with_copies"] < 0.999


def test_a_run_with_fewer_hosts_counts() -> None:
    """Of 16 replicas with 8 micro-batches each, 14 are left: ten passes; with four stages 11 and 13, for a sixth."""
    cfg, grid = _config("--preset llama-3-8b", 16)
    cluster, small = Cluster.parse("h100:16"), replace(cfg.train, global_batch_size=128)
    assert fewer(replace(cfg, train=small), grid, replace(cluster, host=2), 3600.0) == (14, pytest.approx(8 / 10))
    cfg, grid = _config("--preset llama-3-8b --pp 4", 64)
    cfg = replace(cfg, train=small)
    assert fewer(cfg, grid, cluster, 6 * 3600.0) == (14, pytest.approx(1 - 1 / 6 * (1 - 11 / 13)))
    assert fewer(cfg, Grid.from_config(cfg.parallel, 8), cluster, 7200.0) == (0, 0.5)


def test_a_search_leaves_room_for_copies() -> None:
    """Six copies of 12 bytes a parameter on one GPU are more than its share of host memory."""
    flags = ["--preset", "llama-3.2-3b", "--global-batch-size", "8", "--micro-batch-size", "1", "--seq-len", "1024"]
    parsed = cli.parse([*flags, "--precision", "bf16", "--recover", "host", "--tp", "1", "--pp", "1", "--zero", "0"])
    fixed = {"tp", "pp", "zero", "micro_batch_size"}
    plain = replace(parsed.config, run=replace(parsed.config.run, recover="none"))
    cluster = Cluster.parse("a100-40g:8")
    assert any(f.fits for f in search(plain, cluster, fixed))
    assert {f.cause for f in search(parsed.config, cluster, fixed) if f.worst.total <= f.limit} == {"host memory"}
