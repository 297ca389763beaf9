"""From what all ranks measured to what is wrong, and where: no processes, no devices."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from megalite.diagnose.burn import Burn
from megalite.diagnose.host import HostFacts
from megalite.diagnose.links import AxisReading, LinkReading

MAX_CLOCK_SKEW_S = 2.0
# A GPU and its links keep their pace; processes on a CPU share it with whatever else runs.
SLOW_FACTOR = {"cuda": 1.3, "cpu": 5.0}
# Below this share of what a link should give, something is wrong with it; a good one reaches some 0.8.
LEAST_OF_LINK = 0.5


@dataclass(frozen=True)
class RankReport:
    """Everything one rank measured.

    Attributes:
        facts: of its host.
        axes, links: of the groups that it is in.
        compute_s: time of a matrix product, the same on all ranks.
        clock_s: its clock minus rank 0's.
        unseen: ranks whose file in the run directory it did not see; None where that was not asked for.
        cannot_write: why it could not write its own.
        burn: None where it was left out.
    """

    facts: HostFacts
    axes: tuple[AxisReading, ...] = ()
    links: tuple[LinkReading, ...] = ()
    compute_s: float = 0.0
    clock_s: float = 0.0
    unseen: tuple[int, ...] | None = None
    cannot_write: str = ""
    burn: Burn | None = None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankReport:
        d = json.loads(text)
        facts = HostFacts(**{**d.pop("facts"), "device": tuple(json.loads(text)["facts"]["device"])})
        axes = tuple(
            AxisReading(**{**a, "ranks": tuple(a["ranks"]), "wrong": tuple(a["wrong"])}) for a in d.pop("axes")
        )
        links = tuple(LinkReading(**link) for link in d.pop("links"))
        unseen, heat = d.pop("unseen"), d.pop("burn")
        return cls(
            facts,
            axes,
            links,
            unseen=None if unseen is None else tuple(unseen),
            burn=None if heat is None else Burn(**heat),
            **d,
        )


@dataclass(frozen=True)
class Problem:
    """Something that is wrong, and the ranks and hosts where it is."""

    check: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Group:
    """One group of an axis.

    Attributes:
        axis, ranks: which.
        hosts: that it spans, without repetition.
        wrong: contributor -> ranks of the group that saw its share wrong.
        latency_s: the longest of its ranks.
        bandwidth_bps: the lowest of its ranks.
        expected_bps: what its slowest link should give; None where that is not known.
    """

    axis: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    wrong: dict[int, tuple[int, ...]]
    latency_s: float
    bandwidth_bps: float
    expected_bps: float | None


def groups_of(reports: Sequence[RankReport]) -> list[Group]:
    """Every group of every axis, from the readings of its ranks."""
    readings: dict[tuple[str, tuple[int, ...]], dict[int, AxisReading]] = {}
    for rank, report in enumerate(reports):
        for reading in report.axes:
            readings.setdefault((reading.axis, reading.ranks), {})[rank] = reading
    groups = []
    for (axis, ranks), seen in readings.items():
        wrong = {c: tuple(r for r in ranks if c in seen[r].wrong) for c in ranks}
        groups.append(
            Group(
                axis,
                ranks,
                _hosts(reports, ranks),
                {c: who for c, who in wrong.items() if who},
                max(r.latency_s for r in seen.values()),
                min(r.bandwidth_bps for r in seen.values()),
                _expected(reports, ranks),
            )
        )
    return groups


def _hosts(reports: Sequence[RankReport], ranks: Sequence[int]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(reports[r].facts.host for r in ranks))


def _expected(reports: Sequence[RankReport], ranks: Sequence[int]) -> float | None:
    """NVLink inside a host; between hosts the adapters' share of the group's ranks, as all groups talk at once."""
    members = Counter(reports[r].facts.host for r in ranks)
    facts = [reports[r].facts for r in ranks]
    if len(members) == 1:
        speeds = [f.nvlink_bps for f in facts]
    else:
        speeds = [f.network_bps and f.network_bps * members[f.host] / f.local_world for f in facts]
    known = [s for s in speeds if s]
    return min(known) if len(known) == len(speeds) else None


def judge(reports: Sequence[RankReport], slow_factor: float | None = None) -> list[Problem]:
    """What is wrong, most basic first.

    Args:
        reports: by rank.
        slow_factor: so many times slower than the median of the others is a problem; default: by device.
    """
    factor = slow_factor or SLOW_FACTOR[reports[0].facts.device[0]]
    groups = groups_of(reports)
    return [
        *unequal_versions([r.facts for r in reports]),
        *_wrong_sums(reports, groups),
        *_wrong_messages(reports),
        *_wrong_burns(reports),
        *_slow_ranks(reports, factor),
        *_slow_groups(reports, groups, factor),
        *_slow_links(reports, factor),
        *_clocks(reports),
        *_not_shared(reports),
    ]


def unequal_versions(facts: Sequence[HostFacts]) -> list[Problem]:
    """Ranks whose versions or device differ from the majority's (from rank 0's where there is none)."""
    problems = []
    for key in sorted({key for f in facts for key in f.versions} | {"device"}):
        values = [f.versions.get(key, "none") if key != "device" else " ".join(f.device) for f in facts]
        usual, _ = Counter(values).most_common(1)[0]
        for value in sorted(set(values) - {usual}):
            ranks = tuple(r for r, v in enumerate(values) if v == value)
            hosts = tuple(dict.fromkeys(facts[r].host for r in ranks))
            problems.append(Problem("versions", ranks, hosts, f"{key} is {value}, and {usual} on the others"))
    return problems


def _at(reports: Sequence[RankReport], check: str, ranks: Sequence[int], text: str) -> Problem:
    return Problem(check, tuple(ranks), _hosts(reports, ranks), text)


def _wrong_sums(reports: Sequence[RankReport], groups: Sequence[Group]) -> list[Problem]:
    problems = []
    for g in groups:
        where = f"all-reduce over {g.axis} of ranks {_listed(g.ranks)}"
        # A share that most see wrong left its rank wrong; otherwise the rank that sees it is the odd one.
        senders = [c for c, seen_by in g.wrong.items() if len(seen_by) > len(g.ranks) / 2]
        receivers = {r for c, seen_by in g.wrong.items() if c not in senders for r in seen_by}
        problems += [_at(reports, "all-reduce", [c], f"{where}: its share arrives wrong") for c in senders]
        problems += [_at(reports, "all-reduce", [r], f"{where}: the sum is wrong there") for r in sorted(receivers)]
    return problems


def _wrong_messages(reports: Sequence[RankReport]) -> list[Problem]:
    return [
        _at(
            reports,
            "p2p",
            [link.sender, link.receiver],
            f"a message of {link.group} from rank {link.sender} to rank {link.receiver} arrives wrong",
        )
        for report in reports
        for link in report.links
        if not link.right
    ]


def _wrong_burns(reports: Sequence[RankReport]) -> list[Problem]:
    sums = [r.burn.checksum for r in reports if r.burn]
    usual = Counter(sums).most_common(1)[0][0] if sums else 0
    problems = []
    for rank, report in enumerate(reports):
        b = report.burn
        if b and (b.wrong or b.checksum != usual):
            text = f"{b.wrong} of {b.products} matrix products wrong, checksum {b.checksum}, {usual} on the others"
            problems.append(_at(reports, "burn", [rank], text))
    return problems


def _slow_ranks(reports: Sequence[RankReport], factor: float) -> list[Problem]:
    times = {rank: r.compute_s for rank, r in enumerate(reports) if r.compute_s}
    return [
        _at(
            reports,
            "speed",
            [rank],
            f"a matrix product takes {times[rank] * 1e3:.3g} ms, {ratio:.1f} times the others'",
        )
        for rank, ratio in _outliers(times, factor)
    ]


def _outliers(costs: dict[int, float], factor: float) -> list[tuple[int, float]]:
    """(key, cost / median cost of the other keys) of those above `factor`."""
    found = []
    for key, cost in costs.items():
        others = [c for k, c in costs.items() if k != key]
        if others and cost > factor * median(others):
            found.append((key, cost / median(others)))
    return found


def _slow_groups(reports: Sequence[RankReport], groups: Sequence[Group], factor: float) -> list[Problem]:
    slow: dict[int, str] = {}
    for i, g in enumerate(groups):
        if g.expected_bps and g.bandwidth_bps < LEAST_OF_LINK * g.expected_bps:
            share = g.bandwidth_bps / g.expected_bps
            slow[i] = f"{_rate(g.bandwidth_bps)}, {share:.0%} of the {_rate(g.expected_bps)} that its links should give"
    alike = {(g.axis, len(g.hosts)) for g in groups}
    for axis, spans in sorted(alike):
        costs = {i: 1 / g.bandwidth_bps for i, g in enumerate(groups) if (g.axis, len(g.hosts)) == (axis, spans)}
        for i, ratio in _outliers(costs, factor):
            slow.setdefault(i, f"{_rate(groups[i].bandwidth_bps)}, {ratio:.1f} times less than its like")
    return [
        _at(reports, "bandwidth", g.ranks, f"{g.axis} group of ranks {_listed(g.ranks)}: {slow[i]}")
        for i, g in enumerate(groups)
        if i in slow
    ]


def _slow_links(reports: Sequence[RankReport], factor: float) -> list[Problem]:
    links = [link for report in reports for link in report.links]

    def costs(kind: Callable[[LinkReading], bool]) -> dict[int, float]:
        return {i: 1 / link.bandwidth_bps for i, link in enumerate(links) if kind(link)}

    def inside(link: LinkReading) -> bool:
        return len(_hosts(reports, (link.sender, link.receiver))) == 1

    slow = [*_outliers(costs(inside), factor), *_outliers(costs(lambda link: not inside(link)), factor)]
    return [
        _at(
            reports,
            "p2p",
            [links[i].sender, links[i].receiver],
            f"{links[i].group} from rank {links[i].sender} to rank {links[i].receiver}: "
            f"{_rate(links[i].bandwidth_bps)}, {ratio:.1f} times less than its like",
        )
        for i, ratio in slow
    ]


def _clocks(reports: Sequence[RankReport]) -> list[Problem]:
    usual = median(r.clock_s for r in reports)
    return [
        _at(
            reports,
            "clock",
            [rank],
            f"{r.clock_s - usual:+.1f} s off the others' (limit {MAX_CLOCK_SKEW_S:g} s): run NTP",
        )
        for rank, r in enumerate(reports)
        if abs(r.clock_s - usual) > MAX_CLOCK_SKEW_S
    ]


def _not_shared(reports: Sequence[RankReport]) -> list[Problem]:
    problems = []
    for rank, r in enumerate(reports):
        if r.cannot_write:
            problems.append(_at(reports, "run dir", [rank], f"cannot be written there: {r.cannot_write}"))
    written = [rank for rank, r in enumerate(reports) if not r.cannot_write]
    # With a folder of its own on a host, many do not see it: it is the one seen by the fewest.
    unseen_by = Counter(r for report in reports for r in report.unseen or () if r in written)
    worst = max(unseen_by.values(), default=0)
    apart = sorted(r for r, count in unseen_by.items() if count == worst)
    if apart:
        text = "the run directory is not shared: what these ranks write is not seen by all others"
        problems.append(_at(reports, "run dir", apart, text))
    return problems


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}, {ranks[1]}, … {ranks[-1]}"


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s"
