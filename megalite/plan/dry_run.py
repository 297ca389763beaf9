"""`--dry-run`: one page that describes a run before it starts."""

from __future__ import annotations

from megalite.config.run import Config
from megalite.dist.grid import Grid
from megalite.errors import UserError
from megalite.model.parameters import param_map
from megalite.model.partition import head_cost, layer_split
from megalite.pipeline.choose import schedule_of
from megalite.pipeline.schedule import Costs, Placement
from megalite.pipeline.simulate import simulate
from megalite.plan.flops import flops_per_token
from megalite.plan.memory import RankMemory, memory_per_rank, vocab_rows
from megalite.sharding import count_parameters


def dry_run_report(cfg: Config, topology: Grid) -> str:
    """Describe a run on one page: layout, layers of each stage, parameters, memory of each rank, FLOPs.

    Raises:
        UserError: no vocabulary size, a batch that does not divide, or a schedule that cannot run it.
    """
    m, p, t = cfg.model, cfg.parallel, cfg.train
    if m.vocab_size is None:
        raise UserError("--dry-run", "requires the vocabulary size", "give --vocab-size, --tokenizer or --data")
    schedule = schedule_of(cfg, topology["dp"])
    layers = layer_split(m, schedule.placement.num_stages)
    scale = tuple(len(r) + (head_cost(m) if i == len(layers) - 1 else 0.0) for i, r in enumerate(layers))
    bubble = simulate(schedule, Costs(stage_scale=scale)).bubble
    ranks = memory_per_rank(cfg, topology)
    worst = max(range(len(ranks)), key=lambda r: ranks[r].total)
    flops = flops_per_token(m)
    per_step = t.global_batch_size * m.seq_len
    sequence = ", sequence parallel" if cfg.sequence_parallel else ""
    padded = vocab_rows(cfg) * p.tp
    holders = f"rank {topology.rank(pp=worst)}" + (
        " and its dp and tp peers" if topology["dp"] * topology["tp"] > 1 else ""
    )
    rows = [
        ("model", f"{m.arch}: {m.num_layers} layers, hidden {m.hidden_size}, {m.num_heads} heads "
         f"({m.kv_heads} key/value), MLP {m.ffn_size}, sequence {m.seq_len}"),
        ("vocabulary", f"{m.vocab:,}, padded to {padded:,}"),
        ("parameters", f"{count_parameters(param_map(m)):,}"),
        ("layout", f"{topology.world} ranks = dp {topology['dp']} x pp {p.pp} x tp {p.tp}{sequence}; vp {p.vp}, "
         f"ZeRO-{p.zero}, {t.precision}, recompute {t.recompute}"),
        ("batch", f"{t.global_batch_size} samples = {per_step:,} tokens per step; {schedule.num_microbatches} "
         f"micro-batch{'es' * (schedule.num_microbatches > 1)} of {t.micro_batch_size} per dp rank"),
        *([("", f"ramp: {t.batches.summary}; all figures are of the largest")] if t.batch_size_schedule else []),
        ("schedule", f"{schedule.name}, bubble {bubble:.1%} of the busiest rank's compute"),
        ("FLOPs", f"{flops.causal:.4g} per token (causal attention), {flops.full:.4g} (full attention)"),
        ("", f"forward and backward; matrices {flops.matrices:.3g}, attention {flops.causal_attention:.3g} causal, "
         f"output layer {flops.head:.3g}; {flops.causal * per_step:.4g} per step"),
        *([("peak rate", cfg.peak_rate)] if cfg.peak_rate else []),
    ]  # fmt: skip
    head = "\n".join(f"{name:<12}{text}" for name, text in rows)
    unit = "GiB" if ranks[worst].total >= 2**30 else "MiB"
    where = "on disk" if t.offload_dir is not None else "in host memory"
    host = max(rank.host for rank in ranks)
    offloaded = "" if t.offload == "none" else f"offloaded: at most {_in(unit, host)} {unit} per rank, {where}\n"
    return f"{head}\n\n{_table(ranks, worst, unit, schedule.placement, layers)}\n\n" + (
        f"most memory: {_in(unit, ranks[worst].total)} {unit} on {holders}\n{offloaded}"
        "not counted: the allocator's slack, the device's context, communication buffers, workspace of single kernels"
    )


def _table(ranks: list[RankMemory], worst: int, unit: str, placement: Placement, layers: list[range]) -> str:
    """Format one line per pipeline rank; * marks the one with the most memory."""
    temporary = ("temporary",) if any(rank.temporary for rank in ranks) else ()
    columns = ("weights", "main_grad", "optimizer", "activations", "logits", *temporary, "total")
    where = [" + ".join(_span(layers[s]) for s in placement.stages_of(rank)) for rank in range(len(ranks))]
    width = max(len("layers"), *(len(text) for text in where))
    title = f"{'pp rank':<9}{'layers':<{width}}{'parameters':>16}" + "".join(f"{c:>12}" for c in columns)
    lines = [f"{title}  ({unit})"]
    for rank, memory in enumerate(ranks):
        cells = "".join(f"{_in(unit, getattr(memory, c)):>12}" for c in columns)
        name = f"{rank}{' *' if rank == worst else ''}"
        lines.append(f"{name:<9}{where[rank]:<{width}}{memory.parameters:>16,}{cells}")
    return "\n".join(lines)


def _span(layers: range) -> str:
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"


def _in(unit: str, size: int) -> str:
    return f"{size / {'MiB': 2**20, 'GiB': 2**30}[unit]:.2f}"
