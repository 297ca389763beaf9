"""Pictures of `megalite plan`: memory and time of layouts as stacked bars, and scaling curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megalite.extras.plan.cluster import Cluster
from megalite.extras.plan.search import Candidate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MEMORY = ("weights", "main_grad", "optimizer", "temporary", "activations", "logits")
_LEAST = 0.005  # of the longest step: smaller terms are not drawn


def draw_search(layouts: Sequence[Candidate], cluster: Cluster) -> Figure:
    """Draw a bar per layout: memory of the worst rank on the left, seconds by cause on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 1.6 + 0.45 * max(len(layouts), 1)), layout="constrained")
    memory, time = figure.subplots(1, 2, sharey=True)
    names = [_name(layout) for layout in layouts]
    parts = {part: [getattr(layout.worst, part) / 1e9 for layout in layouts] for part in _MEMORY}
    _bars(memory, names, {part: sizes for part, sizes in parts.items() if any(sizes)})
    memory.axvline(cluster.device.memory / 1e9, color="black", linestyle="--", label=f"{cluster.device.name}")
    memory.set_xlabel("GB on the worst rank")
    longest = max((layout.time.total for layout in layouts), default=0.0)
    terms = {
        name: [layout.time.terms[name] for layout in layouts] for name in (layouts[0].time.terms if layouts else ())
    }
    _bars(time, names, {name: values for name, values in terms.items() if max(values) >= _LEAST * longest})
    time.set_xlabel("seconds per step")
    for axes in (memory, time):
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=5, fontsize=8, frameon=False)
    memory.invert_yaxis()
    return figure


def draw_sweep(points: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw tokens per second and MFU over the number of GPUs, one line each for strong and weak scaling."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for mode, marker in (("strong", "o"), ("weak", "s")):
        chosen = [p for p in points if p["mode"] == mode]
        gpus = [p["gpus"] for p in chosen]
        left.loglog(gpus, [p["tokens_per_s"] for p in chosen], marker=marker, label=mode)
        right.semilogx(gpus, [100 * p["mfu"] for p in chosen], marker=marker, label=mode)
    ideal = points[0]["tokens_per_s"] / points[0]["gpus"]
    ends = sorted({p["gpus"] for p in points})
    left.loglog(ends, [ideal * n for n in ends], color="gray", linestyle=":", label="linear")
    left.set_ylabel("tokens per second")
    right.set_ylabel("MFU, %")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xlabel("GPUs")
        axes.set_xticks(ends, [str(n) for n in ends])
        axes.minorticks_off()
        axes.legend()
    return figure


def _bars(axes: Any, names: Sequence[str], parts: Mapping[str, Sequence[float]]) -> None:
    left = [0.0] * len(names)
    for part, sizes in parts.items():
        axes.barh(names, sizes, left=left, label=part)
        left = [a + b for a, b in zip(left, sizes)]


def _name(layout: Candidate) -> str:
    o = layout.options
    words = [f"dp {layout.grid['dp']} tp {o['tp']} pp {o['pp']} vp {o['vp']}", f"b {o['micro_batch_size']}"]
    words += [f"zero {o['zero']}" + ("" if o["zero_group"] == "full" else f"/{o['zero_group']}")]
    words += [str(o["schedule"])] * (o["pp"] > 1) + [f"recompute {o['recompute']}"] * (o["recompute"] != "none")
    return ", ".join(words + [str(o["offload"])] * (o["offload"] != "none"))
