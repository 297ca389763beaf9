"""What is wrong, from figures: clusters larger than a test can start."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.core.mesh.grid import Grid
from megalite.extras.diagnose.cluster import groups_by_rank
from megalite.extras.diagnose.measure import AxisReading, HostFacts, LinkReading, burn
from megalite.extras.diagnose.verdict import Problem, RankReport, find_problems, groups_of
from megalite.extras.launch.probe import adapters, network_speed


def cluster(world: int, per_host: int, tp: int = 8) -> list[RankReport]:
    """H100 hosts with 8 x 400 Gb/s; tp groups inside a host, dp groups over all hosts."""
    reports = []
    for rank in range(world):
        facts = HostFacts(f"node{rank // per_host}", {"torch": "2.13.0"}, ("cuda", "H100"), {}, 450e9, 400e9, per_host)
        own_tp = tuple(range(rank // tp * tp, rank // tp * tp + tp))
        own_dp = tuple(range(rank % tp, world, tp))
        axes = [AxisReading("tp", own_tp, (), 2e-5, 350e9), AxisReading("dp", own_dp, (), 4e-5, 42e9)]
        reports.append(RankReport(facts, tuple(axes[: 2 if world > tp else 1]), (), 1e-3, 0.0))
    return reports


def change(reports: list[RankReport], rank: int, **fields: Any) -> None:
    reports[rank] = dataclasses.replace(reports[rank], **fields)


def found(reports: list[RankReport]) -> list[tuple[str, tuple[int, ...], tuple[str, ...]]]:
    return [(p.check, p.ranks, p.hosts) for p in find_problems(reports)]


def test_a_thousand_ranks_without_fault() -> None:
    reports = cluster(1024, 8)
    assert find_problems(reports) == []
    groups = groups_of(reports)
    assert len(groups) == 128 + 8
    assert {(g.axis, g.expected_bps) for g in groups} == {("tp", 450e9), ("dp", 50e9)}


@pytest.mark.parametrize(
    ("wrong_at", "named"),
    [
        # Its share arrives wrong everywhere: it left its rank wrong.
        (dict.fromkeys(range(8, 16), (11,)), 11),
        # One rank sees several shares wrong: it is its own view that is wrong.
        ({13: (8, 9, 13)}, 13),
        ({13: tuple(range(8, 16))}, 13),
    ],
)
def test_who_is_at_fault_for_a_wrong_sum(wrong_at: dict[int, tuple[int, ...]], named: int) -> None:
    reports = cluster(32, 8)
    for rank, wrong in wrong_at.items():
        tp, dp = reports[rank].axes
        change(reports, rank, axes=(dataclasses.replace(tp, wrong=wrong), dp))
    assert found(reports) == [("all-reduce", (named,), ("node1",))]


def test_one_slow_gpu_one_slow_host_and_one_slow_network() -> None:
    reports = cluster(64, 8)
    change(reports, 17, compute_s=1.4e-3)
    for rank in range(40, 48):  # NVLink fell back to PCIe on node5
        change(
            reports, rank, axes=(dataclasses.replace(reports[rank].axes[0], bandwidth_bps=25e9), reports[rank].axes[1])
        )
    problems = find_problems(reports)
    assert [(p.check, p.ranks) for p in problems] == [("speed", (17,)), ("bandwidth", tuple(range(40, 48)))]
    assert "6% of the 450 GB/s" in problems[1].text

    # All groups are alike slow: only what the adapters should give can tell.
    everywhere = [
        dataclasses.replace(r, axes=(r.axes[0], dataclasses.replace(r.axes[1], bandwidth_bps=10e9)))
        for r in cluster(64, 8)
    ]
    assert len(find_problems(everywhere)) == 8
    assert all("20% of the 50 GB/s" in p.text for p in find_problems(everywhere))
    unknown = [dataclasses.replace(r, facts=dataclasses.replace(r.facts, network_bps=None)) for r in everywhere]
    assert find_problems(unknown) == []


def test_the_limit_of_a_slow_rank() -> None:
    reports = cluster(8, 8)
    change(reports, 3, compute_s=1.29e-3)
    assert find_problems(reports) == []
    change(reports, 3, compute_s=1.31e-3)
    assert found(reports) == [("speed", (3,), ("node0",))]
    assert find_problems(reports, slow_factor=2.0) == []


def test_versions_clocks_links_and_folders() -> None:
    reports = cluster(32, 8)
    change(reports, 9, facts=dataclasses.replace(reports[9].facts, versions={"torch": "2.12.0"}))
    change(reports, 2, clock_s=-2.5)
    for rank in range(32):
        change(reports, rank, unseen=tuple(range(24, 32)) if rank < 24 else tuple(range(24)))
    links = [LinkReading("pp", r, r + 8, True, 40e9) for r in range(24)]
    links[20] = dataclasses.replace(links[20], bandwidth_bps=20e9)
    links[7] = dataclasses.replace(links[7], right=False)
    for link in links:
        change(reports, link.receiver, links=(link,))
    assert found(reports) == [
        ("versions", (9,), ("node1",)),
        ("p2p", (7, 15), ("node0", "node1")),
        ("p2p", (20, 28), ("node2", "node3")),
        ("clock", (2,), ("node0",)),
        ("run dir", tuple(range(24, 32)), ("node3",)),
    ]


def test_reports_travel_unchanged() -> None:
    report = cluster(8, 8)[3]
    full = dataclasses.replace(
        report, links=(LinkReading("pp", 0, 3, True, 1e9),), unseen=(1, 2), burn=burn(torch.device("cpu"), 0.0, 64)
    )
    groups = groups_by_rank(Grid.of(8, tp=8))[3]
    assert RankReport.from_json(report.to_json(), groups) == report
    assert RankReport.from_json(full.to_json(), groups) == full


def test_reports_do_not_grow_with_the_ranks() -> None:
    """Every rank reads all of them: 2 GB for 8,192 ranks when each listed the ranks of its groups."""
    few, many = cluster(16, 8), cluster(1024, 8)
    assert len(many[3].to_json()) == len(few[3].to_json())
    groups = groups_by_rank(Grid.of(1024, tp=8))
    for rank in (0, 515, 1023):
        assert RankReport.from_json(many[rank].to_json(), groups[rank]) == many[rank]
    # Ranks of a group share one list.
    assert len({id(ranks) for own in groups for ranks in own.values()}) == 1 + 128 + 8 + 1024


def test_the_burn_is_exact_in_every_type_and_sees_one_flipped_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    sound = [burn(cpu, 0.02, 256, dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64)]
    assert {b.wrong for b in sound} == {0}
    assert len({b.checksum for b in sound}) == 1
    assert min(b.products for b in sound) >= 11
    real, calls = torch.mm, [0]

    def broken(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        out = real(a, b)
        if calls[0] == 9:
            out[200, 17] += 1
        return out

    monkeypatch.setattr(torch, "mm", broken)
    flipped = burn(cpu, 0.02, 256)
    assert flipped.wrong == 1
    calls[0] = 8  # the first result, which all others are held against
    heat = burn(cpu, 0.0, 256)
    assert heat.wrong == 1
    reports = [dataclasses.replace(r, burn=sound[0]) for r in cluster(8, 8)]
    change(reports, 6, burn=heat)
    assert [(p.check, p.ranks) for p in find_problems(reports)] == [("burn", (6,))]


def test_adapters_of_a_host(tmp_path: Path) -> None:
    for name, state, rate in (
        ("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)"),
        ("mlx5_1", "4: ACTIVE", "200 Gb/sec (4X HDR)"),
        ("mlx5_2", "1: DOWN", "10 Gb/sec (4X SDR)"),
    ):
        port = tmp_path / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
        (port / "rate").write_text(rate + "\n")
    root = str(tmp_path)
    assert network_speed(root) == 75e9
    assert len(adapters(root)) == 3
    assert adapters(root)[2] == "mlx5_2 port 1: 1: DOWN, 10 Gb/sec (4X SDR)"
    assert network_speed(f"{root}/none") is None


def test_a_problem_reads_as_data() -> None:
    assert dataclasses.asdict(Problem("p2p", (1,), ("a",), "x")) == {
        "check": "p2p",
        "ranks": (1,),
        "hosts": ("a",),
        "text": "x",
    }
