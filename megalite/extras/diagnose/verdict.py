"""Find what is wrong, and where, in the measurements of all ranks, without processes or devices."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any

from megalite.extras.diagnose.measure import AxisReading, Burn, HostFacts, LinkReading
from megalite.extras.launch.probe import MAX_CLOCK_SKEW_S

# A GPU and its links run at a steady speed; processes on a CPU share it with other programs.
SLOW_FACTOR = {"cuda": 1.3, "cpu": 5.0}
# Below this share of its nominal bandwidth, something is wrong with a link; a good one reaches about 0.8.
LEAST_OF_LINK = 0.5

# (check, ranks, text)
_Finding = tuple[str, Sequence[int], str]


@dataclass(frozen=True)
class RankReport:
    """Everything one rank measured.

    Attributes:
        facts: facts about its host.
        axes, links: readings of the groups that it belongs to.
        compute_s: time of a matrix product, the same on all ranks.
        clock_s: its clock minus rank 0's.
        unseen: ranks whose files in the run directory it did not see; None if that was not checked.
        cannot_write: reason why it could not write its own file.
        burn: result of `burn`; None if it was skipped.
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
        """Write the report as a JSON object, without the ranks of its groups: every rank reads the reports of all."""
        axes = tuple(dataclasses.replace(a, ranks=()) for a in self.axes)
        return json.dumps(dataclasses.asdict(dataclasses.replace(self, axes=axes)))

    @classmethod
    def from_json(cls, text: str, groups: Mapping[str, tuple[int, ...]]) -> RankReport:
        """Read what `to_json` wrote; `groups`: the ranks of the rank's group on each axis."""
        d = _tuples(json.loads(text))
        d["facts"] = HostFacts(**d["facts"])
        d["axes"] = tuple(AxisReading(**{**a, "ranks": groups[a["axis"]]}) for a in d["axes"])
        d["links"] = tuple(LinkReading(**link) for link in d["links"])
        d["burn"] = d["burn"] and Burn(**d["burn"])
        return cls(**d)


def _tuples(x: Any) -> Any:
    """Convert JSON's lists to tuples."""
    if isinstance(x, dict):
        return {k: _tuples(v) for k, v in x.items()}
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


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
        axis, ranks: name of the axis, and the group's global ranks.
        hosts: hosts that it spans, each once.
        wrong: contributor -> ranks of the group that received its contribution wrong.
        latency_s: longest latency of its ranks.
        bandwidth_bps: lowest bandwidth of its ranks.
        expected_bps: nominal bandwidth of its slowest link; None if unknown.
    """

    axis: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    wrong: dict[int, tuple[int, ...]]
    latency_s: float
    bandwidth_bps: float
    expected_bps: float | None


def groups_of(reports: Sequence[RankReport]) -> list[Group]:
    """Combine the readings of all ranks into one `Group` per group of every axis."""
    readings: dict[tuple[str, tuple[int, ...]], dict[int, AxisReading]] = {}
    for rank, report in enumerate(reports):
        for reading in report.axes:
            readings.setdefault((reading.axis, reading.ranks), {})[rank] = reading
    groups = []
    for (axis, ranks), seen in readings.items():
        wrong = {c: tuple(r for r in ranks if c in seen[r].wrong) for c in ranks}
        latency, bandwidth = max(r.latency_s for r in seen.values()), min(r.bandwidth_bps for r in seen.values())
        wrong = {c: who for c, who in wrong.items() if who}
        groups.append(Group(axis, ranks, _hosts(reports, ranks), wrong, latency, bandwidth, _expected(reports, ranks)))
    return groups


def _hosts(reports: Sequence[RankReport], ranks: Sequence[int]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(reports[r].facts.host for r in ranks))


def _expected(reports: Sequence[RankReport], ranks: Sequence[int]) -> float | None:
    """Return the NVLink bandwidth inside a host, or between hosts the group's share of the adapters'."""
    facts = [reports[r].facts for r in ranks]
    members = Counter(f.host for f in facts)
    if len(members) == 1:
        speeds = [f.nvlink_bps for f in facts]
    else:
        speeds = [f.network_bps and f.network_bps * members[f.host] / f.local_world for f in facts]
    known = [s for s in speeds if s]
    return min(known) if len(known) == len(speeds) else None


def find_problems(reports: Sequence[RankReport], slow_factor: float | None = None) -> list[Problem]:
    """Find what is wrong, most basic first.

    Args:
        reports: by rank.
        slow_factor: report what is this many times slower than the median of the others; default: by device.
    """
    factor = slow_factor or SLOW_FACTOR[reports[0].facts.device[0]]
    groups = groups_of(reports)
    findings = chain(
        _unequal_versions([r.facts for r in reports]),
        _wrong_sums(groups),
        _wrong_messages(reports),
        _wrong_burns(reports),
        _slow_ranks(reports, factor),
        _slow_groups(groups, factor),
        _slow_links(reports, factor),
        _clocks(reports),
        _not_shared(reports),
    )
    return [Problem(check, tuple(ranks), _hosts(reports, ranks), text) for check, ranks, text in findings]


def _unequal_versions(facts: Sequence[HostFacts]) -> Iterator[_Finding]:
    """Yield ranks whose versions or device differ from the majority's (from rank 0's if there is none)."""
    for key in sorted({key for f in facts for key in f.versions} | {"device"}):
        values = [f.versions.get(key, "none") if key != "device" else " ".join(f.device) for f in facts]
        usual, _ = Counter(values).most_common(1)[0]
        for value in sorted(set(values) - {usual}):
            ranks = [r for r, v in enumerate(values) if v == value]
            yield "versions", ranks, f"{key} is {value}, and {usual} on the others"


def _wrong_sums(groups: Sequence[Group]) -> Iterator[_Finding]:
    for g in groups:
        where = f"all-reduce over {g.axis} of ranks {_listed(g.ranks)}"
        # What most ranks receive wrong was sent wrong; otherwise the rank that receives it wrong is at fault.
        senders = [c for c, seen_by in g.wrong.items() if len(seen_by) > len(g.ranks) / 2]
        receivers = {r for c, seen_by in g.wrong.items() if c not in senders for r in seen_by}
        for c in senders:
            yield "all-reduce", [c], f"{where}: its contribution arrives wrong"
        for r in sorted(receivers):
            yield "all-reduce", [r], f"{where}: the sum is wrong there"


def _wrong_messages(reports: Sequence[RankReport]) -> Iterator[_Finding]:
    for link in chain.from_iterable(r.links for r in reports):
        if not link.right:
            ends = [link.sender, link.receiver]
            yield "p2p", ends, f"a message of {link.group} from rank {ends[0]} to rank {ends[1]} arrives wrong"


def _wrong_burns(reports: Sequence[RankReport]) -> Iterator[_Finding]:
    burns = {rank: r.burn for rank, r in enumerate(reports) if r.burn}
    usual = Counter(b.checksum for b in burns.values()).most_common(1)
    for rank, b in burns.items():
        if b.wrong or b.checksum != usual[0][0]:
            text = f"{b.wrong} of {b.products} matrix products wrong, checksum {b.checksum}"
            yield "burn", [rank], f"{text}, and {usual[0][0]} on the others"


def _outliers(costs: dict[int, float], factor: float) -> list[tuple[int, float]]:
    """List (key, cost / median cost of the other keys) of the keys whose ratio is above `factor`."""
    outliers = []
    for key, cost in costs.items():
        others = [c for k, c in costs.items() if k != key]
        if others and cost > factor * median(others):
            outliers.append((key, cost / median(others)))
    return outliers


def _slow_ranks(reports: Sequence[RankReport], factor: float) -> Iterator[_Finding]:
    times = {rank: r.compute_s for rank, r in enumerate(reports) if r.compute_s}
    for rank, ratio in _outliers(times, factor):
        yield "speed", [rank], f"a matrix product takes {times[rank] * 1e3:.3g} ms, {ratio:.1f} times the others'"


def _slow_groups(groups: Sequence[Group], factor: float) -> Iterator[_Finding]:
    slow: dict[int, str] = {}
    for axis, spans in sorted({(g.axis, len(g.hosts)) for g in groups}):
        costs = {i: 1 / g.bandwidth_bps for i, g in enumerate(groups) if (g.axis, len(g.hosts)) == (axis, spans)}
        slow |= {i: f"{ratio:.1f} times less than groups like it" for i, ratio in _outliers(costs, factor)}
    for i, g in enumerate(groups):
        if g.expected_bps and g.bandwidth_bps < LEAST_OF_LINK * g.expected_bps:
            share = g.bandwidth_bps / g.expected_bps
            slow[i] = f"{share:.0%} of the {_rate(g.expected_bps)} that its links should reach"
    for i, why in sorted(slow.items()):
        g = groups[i]
        text = f"{g.axis} group of ranks {_listed(g.ranks)}: {_rate(g.bandwidth_bps)}, {why}"
        yield "bandwidth", g.ranks, text


def _slow_links(reports: Sequence[RankReport], factor: float) -> Iterator[_Finding]:
    links = list(chain.from_iterable(r.links for r in reports))
    spans = [len(_hosts(reports, (link.sender, link.receiver))) for link in links]
    for span in (1, 2):
        costs = {i: 1 / link.bandwidth_bps for i, link in enumerate(links) if spans[i] == span}
        for i, ratio in _outliers(costs, factor):
            ends, rate = [links[i].sender, links[i].receiver], _rate(links[i].bandwidth_bps)
            text = f"{links[i].group} from rank {ends[0]} to rank {ends[1]}: {rate}"
            yield "p2p", ends, f"{text}, {ratio:.1f} times less than links like it"


def _clocks(reports: Sequence[RankReport]) -> Iterator[_Finding]:
    usual = median(r.clock_s for r in reports)
    for rank, r in enumerate(reports):
        if abs(off := r.clock_s - usual) > MAX_CLOCK_SKEW_S:
            yield "clock", [rank], f"{off:+.1f} s off the others' (limit {MAX_CLOCK_SKEW_S:g} s): run NTP"


def _not_shared(reports: Sequence[RankReport]) -> Iterator[_Finding]:
    for rank, r in enumerate(reports):
        if r.cannot_write:
            yield "run dir", [rank], f"not writable there: {r.cannot_write}"
    written = [rank for rank, r in enumerate(reports) if not r.cannot_write]
    # A folder local to one host is invisible to many: the ranks seen by the fewest are at fault.
    unseen_by = Counter(r for report in reports for r in report.unseen or () if r in written)
    worst = max(unseen_by.values(), default=0)
    if apart := sorted(r for r, count in unseen_by.items() if count == worst):
        yield "run dir", apart, "the run directory is not shared: what these ranks write is not visible to all others"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}, {ranks[1]}, … {ranks[-1]}"


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s"
