"""What the planner prints: the page of `--dry-run`, the result of a search, and every term of one layout."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

from megalite.core.base.errors import UserError
from megalite.core.mesh.grid import Grid
from megalite.core.model.flops import flops_per_token
from megalite.core.model.kinds import MIXERS
from megalite.core.model.parameters import describe_parameters, param_map
from megalite.core.model.partition import blocks_by_kind, stage_layers
from megalite.core.model.saved import element_size, tokens
from megalite.core.options.update_rule import RULES
from megalite.core.parts.ffn.experts import experts_tp, imbalance
from megalite.core.parts.options.context_parallel import choose_comm
from megalite.core.parts.options.expert_options import choose_dispatch
from megalite.core.parts.schedules.choose import name_of, schedule_of
from megalite.core.parts.schedules.steady import paired
from megalite.core.pipeline.schedule import Placement
from megalite.extras.plan.cluster import Cluster
from megalite.extras.plan.lost_hosts import simulate_stages
from megalite.extras.plan.memory.ranks import RankMemory, memory_per_rank
from megalite.extras.plan.memory.stages import span, vocab_rows
from megalite.extras.plan.recovery import recovery_rows
from megalite.extras.plan.search import SAME_TIME, SHARE, Candidate, Changes, pick
from megalite.extras.plan.time.context import Context, messages
from megalite.extras.plan.time.step import StepTime, model_flops, step_time
from megalite.runtime.options.fields import GROUP_OF
from megalite.runtime.options.run import Config


def mfu(layout: Candidate, cluster: Cluster) -> float:
    """Compute the share of the dense bf16 peak that the model's FLOPs (causal attention) reach."""
    return model_flops(layout.cfg) / (layout.time.total * cluster.gpus * cluster.device.peak)


def as_json(candidates: Sequence[Candidate], cluster: Cluster) -> list[dict[str, Any]]:
    """Return the options and predictions of layouts, in their order."""
    changes = Changes(list(candidates))
    return [
        {
            **f.options,
            "dp": f.grid["dp"],
            "step_time_s": f.time.total,
            "tokens_per_s": f.cfg.train.global_batch_size * f.cfg.model.seq_len / f.time.total,
            "mem_gb": f.worst.total / 1e9,
            "host_gb": max(rank.host for rank in f.ranks) / 1e9,
            "mfu": mfu(f, cluster),
            "fits": f.fits,
            "why_not": why_not(f, changes),
        }
        for f in candidates
    ]


def search_text(candidates: list[Candidate], cluster: Cluster, asked: Sequence[str], top: int = 10) -> str:
    """Format a search: what does not fit and why, the best layouts, and the pick as a command line and as YAML.

    Args:
        asked: the flags of the run that was planned.
    """
    cfg = candidates[0].cfg
    fits = [f for f in candidates if f.fits]
    changes = Changes(candidates)
    m, device = cfg.model, cluster.device
    lines = [
        f"{describe_parameters(m)} on {cluster.gpus} x {device.name} ({cluster.domain} linked "
        f"at {device.nvlink / 1e9:g} GB/s, network {cluster.network / 1e9:g} GB/s each); "
        f"{cfg.train.global_batch_size:,} samples of {m.seq_len:,} tokens, {cfg.train.precision}",
        *imbalance_text(candidates[0].cfg),
        f"{len(candidates):,} layouts, {len(fits):,} fit into {candidates[0].limit / 1e9:.1f} GB "
        f"({SHARE:.0%} of the device)",
    ]
    causes = Counter(f.cause for f in candidates if not f.fits)
    for cause, count in causes.most_common():
        failing = [f for f in candidates if f.cause == cause]
        example = next((f for f in failing if changes.cheapest(f) is not None), failing[0])
        lines += [f"  {count:,} do not fit because of their {cause}, for example: {' '.join(describe(example))}"]
        lines += [f"    {why_not(example, changes)}"]
    best = pick(candidates)
    if best is None:
        return "\n".join([*lines, "nothing fits: use more GPUs, a smaller model or --seq-len"])
    lines += [
        "",
        *_search_table(fits, best, cluster, top),
        "",
        f"* picked, the simplest within {SAME_TIME - 1:.0%} of the fastest: {best.time.total:.4g} s per step, "
        f"{best.worst.total / 1e9:.1f} GB",
    ]
    lines += pairs_text(best, cluster)
    return "\n".join([*lines, f"  {command(best, cluster, asked)}", "or as YAML (--config):", to_yaml(best).rstrip()])


def best_layouts(candidates: Sequence[Candidate], top: int) -> list[Candidate]:
    """Return the fastest layouts that fit; of those that differ in vp alone, only the fastest."""
    best: dict[str, Candidate] = {}
    for layout in candidates:
        if layout.fits and len(best) < top:
            best.setdefault(str({**layout.options, "vp": None}), layout)
    return list(best.values())


def _search_table(fits: Sequence[Candidate], best: Candidate, cluster: Cluster, top: int) -> list[str]:
    """List the fastest layouts and mark the one that is picked, which comes last if it is slower than these."""
    shown = {str(place): f for place, f in enumerate(best_layouts(fits, top), 1)}
    if all(f is not best for f in shown.values()):
        shown[""] = best
    rows = [f"{'':>4}{'step, s':>10}{'MFU':>7}{'GB':>7}  layout"]
    for place, f in shown.items():
        mark, words = "*" if f is best else " ", " ".join(describe(f))
        rows += [f"{place:>3}{mark}{f.time.total:>10.4g}{mfu(f, cluster):>7.1%}{f.worst.total / 1e9:>7.1f}  {words}"]
    return rows


def describe(layout: Candidate) -> list[str]:
    """Describe a layout in a few words; options at their defaults are left out."""
    o = layout.options
    words = [f"dp {layout.grid['dp']}", *[f"cp {o['cp']}"] * (o["cp"] > 1), f"tp {o['tp']}", f"pp {o['pp']}"]
    words += [f"ep {o['ep']}"] * (o["ep"] > 1) + ["whole experts"] * (o["etp"] == "1")
    words += [f"vp {o['vp']}"] * (o["vp"] > 1) + [str(o["schedule"])] * (o["pp"] > 1 or o["moe_overlap"])
    words += [f"micro-batch {o['micro_batch_size']}", f"zero {o['zero']}"]
    words += [f"group {o['zero_group']}"] * (o["zero_group"] != "full")
    words += [f"recompute {o['recompute']}"] * (o["recompute"] != "none")
    return words + [f"offload {o['offload']}"] * (o["offload"] != "none")


def flags(options: Mapping[str, Any], than: Mapping[str, Any] | None = None) -> list[str]:
    """Write options as words of a command line: all that a run may need, or those that differ from `than`."""
    words: list[str] = []
    for name, value in options.items():
        if value == ({"moe_overlap": False} if than is None else than).get(name):
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return words


def why_not(layout: Candidate, changes: Changes) -> str | None:
    """Explain why a layout does not fit, and which single change makes it fit; None if it fits."""
    cause = layout.cause
    worst = layout.worst
    unit = 1e9
    if cause is None:
        return None
    if cause == "host memory":
        host = max(rank.host for rank in layout.ranks)
        text = f"host memory: {host / unit:.1f} GB per rank of {layout.host_limit / unit:.1f}"
    else:
        states = worst.total - worst.activations - worst.logits
        text = (
            f"{cause}: {worst.total / unit:.1f} GB of {layout.limit / unit:.1f} (states {states / unit:.1f}, "
            f"activations {worst.activations / unit:.1f}, logits {worst.logits / unit:.1f})"
        )
    change = changes.cheapest(layout)
    if change is None:
        return f"{text}; no single change makes it fit"
    slower = change.time.total / layout.time.total - 1
    return f"{text}; fits with {' '.join(flags(change.options, than=layout.options))} ({slower:+.0%} time)"


def why_second(layout: Candidate, best: Candidate) -> str:
    """Explain why a layout that fits was not chosen."""
    ratio = layout.time.total / best.time.total
    if ratio >= SAME_TIME:
        return f"{ratio - 1:.1%} slower"
    changed = flags(best.options, than=layout.options)
    pace = f"{abs(ratio - 1):.1%} {'slower' if ratio >= 1 else 'faster'}"
    return f"{pace}, and within {SAME_TIME - 1:.0%} the simpler layout is taken ({' '.join(changed)})"


def command(layout: Candidate, cluster: Cluster, asked: Sequence[str]) -> str:
    """Write the command line that starts a layout on each host."""
    here = next(n for n in range(min(cluster.gpus, cluster.host), 0, -1) if cluster.gpus % n == 0)
    hosts = f"--nnodes {cluster.gpus // here} " if cluster.gpus > here else ""
    given = {word.split("=")[0] for word in asked}
    chosen = {name: value for name, value in layout.options.items() if "--" + name.replace("_", "-") not in given}
    return f"torchrun {hosts}--nproc-per-node {here} pretrain_gpt.py {shlex.join([*asked, *flags(chosen)])}"


def to_yaml(layout: Candidate) -> str:
    """Write the options of a layout as YAML for --config."""
    tree: dict[str, dict[str, Any]] = {}
    given = {name: getattr(layout.cfg.parallel, name) for name in ("cp_comm", "pipeline_layout")}
    given = {name: value for name, value in given.items() if value not in (None, "auto")}
    for name, value in {**layout.options, **given}.items():
        tree.setdefault(GROUP_OF[name], {})[name] = value
    return yaml.safe_dump(tree, sort_keys=False)


def explain_text(cfg: Config, grid: Grid, cluster: Cluster, time: StepTime) -> str:
    """Format every term of one layout: the page of --dry-run, then seconds by cause."""
    total = time.total
    share = model_flops(cfg) / (total * cluster.gpus * cluster.device.peak)
    lines = [dry_run_report(cfg, grid), "", f"predicted step on {cluster.gpus} x {cluster.device.name}: {total:.4g} s"]
    for name, seconds in sorted(time.terms.items(), key=lambda term: -term[1]):
        lines += [f"  {name:<12}{seconds:>12.4g} s{seconds / total:>8.1%}"]
    if time.ep and (other := other_overlap(cfg)) is not None and max(map(paired_share, (cfg, other), (grid, grid))):
        word = "without" if cfg.parallel.moe_overlap else "with"
        lines += [f"  {word} --moe-overlap, ep is {step_time(other, grid, cluster).ep:.4g} s"]
    tokens = cfg.train.global_batch_size * cfg.model.seq_len
    return "\n".join([*lines, f"{tokens / total:,.0f} tokens/s, MFU {share:.1%} (causal attention)"])


def dry_run_report(cfg: Config, grid: Grid) -> str:
    """Describe a run on one page: layout, layers of each stage, parameters, memory of each rank, FLOPs.

    Raises:
        UserError: no vocabulary size, a batch that does not divide, or a schedule that cannot run it.
    """
    m = cfg.model
    p = cfg.parallel
    t = cfg.train
    if m.vocab_size is None:
        raise UserError("--dry-run", "requires the vocabulary size", "give --vocab-size, --tokenizer or --data")
    schedule = schedule_of(cfg, grid["dp"])
    layers = stage_layers(cfg)
    bubble = simulate_stages(cfg, schedule).bubble
    ranks = memory_per_rank(cfg, grid)
    worst = max(range(len(ranks)), key=lambda r: ranks[r].total)
    flops = flops_per_token(m)
    per_step = t.global_batch_size * m.seq_len
    sequence = ", sequence parallel" if cfg.sequence_parallel else ""
    padded, shared = vocab_rows(cfg) * p.tp, f" x cp {p.cp}" * (p.cp > 1)
    peers = f" and its dp{', cp' * (p.cp > 1)} and tp peers" * (grid.world > p.pp)
    holders = f"rank {grid.rank(pp=worst)}{peers}"
    rows = [
        (
            "model",
            f"{m.arch}: {m.num_layers} layers, hidden {m.hidden_size}, {m.num_heads} heads "
            f"({m.kv_heads} key/value), MLP {m.ffn_size}, sequence {m.seq_len}",
        ),
        ("vocabulary", f"{m.vocab:,}, padded to {padded:,}"),
        ("parameters", describe_parameters(m).replace(" parameters", "")),
        (
            "layout",
            f"{grid.world} ranks = dp {grid['dp']} x pp {p.pp}{shared} x tp {p.tp}{sequence}; vp {p.vp}, "
            f"ZeRO-{p.zero}, {t.precision}, recompute {t.recompute}",
        ),
        *expert_rows(cfg, grid),
        (
            "batch",
            f"{t.global_batch_size} samples = {per_step:,} tokens per step; {schedule.num_microbatches} "
            f"micro-batch{'es' * (schedule.num_microbatches > 1)} of {t.micro_batch_size} per dp rank"
            f"{cfg.without_samples(grid['dp'])}",
        ),
        *([("", f"ramp: {t.batches.summary}; all figures are of the largest")] if t.batch_size_schedule else []),
        ("schedule", f"{schedule.name}, bubble {bubble:.1%} of the busiest rank's compute"),
        ("FLOPs", f"{flops.causal:.4g} per token (causal attention), {flops.full:.4g} (full attention)"),
        (
            "",
            f"forward and backward; matrices {flops.matrices:.3g}, attention {flops.causal_attention:.3g} causal, "
            f"output layer {flops.head:.3g}; {flops.causal * per_step:.4g} per step",
        ),
        *context_rows(cfg),
        *([("peak rate", cfg.peak_rate)] if cfg.peak_rate else []),
        *update_rows(cfg),
        *recovery_rows(cfg, ranks),
    ]
    head = "\n".join(f"{name:<12}{text}" for name, text in rows)
    unit = "GiB" if ranks[worst].total >= 2**30 else "MiB"
    where = "on disk" if t.offload_dir is not None else "in host memory"
    host = max(rank.host - rank.copies for rank in ranks)
    offloaded = "" if t.offload == "none" else f"offloaded: at most {_in(unit, host)} {unit} per rank, {where}\n"
    return f"{head}\n\n{_rank_table(ranks, worst, unit, schedule.placement, layers)}\n\n" + (
        f"most memory: {_in(unit, ranks[worst].total)} {unit} on {holders}\n{offloaded}"
        "not counted: the allocator's slack, the device's context, communication buffers, workspace of single kernels"
    )


def context_rows(cfg: Config) -> list[tuple[str, str]]:
    """Say how each kind of mixer reaches the tokens of other ranks, and what it sends; nothing without cp."""
    m = cfg.model
    p = cfg.parallel
    rows = list[tuple[str, str]]()
    comm, why = choose_comm(m, p, cfg.data.within_documents)
    for kind in {kind.mixer: kind for kind in blocks_by_kind(m)}.values() if p.cp > 1 else ():
        passes = messages(m, kind, Context.of(cfg), p.tp, tokens(cfg), element_size(cfg))
        forward, backward = (_in("MiB", round(sum(message.sent for message in each))) for each in passes)
        how = "delta nets pass states" if MIXERS[kind.mixer].passes_states else f"{comm} ({why})"
        sent = f"a rank sends {forward} MiB forward, {backward} backward per block and micro-batch"
        rows.append(("" if rows else "context", f"{how}; {sent}"))
    return rows


def _rank_table(ranks: list[RankMemory], worst: int, unit: str, placement: Placement, layers: list[range]) -> str:
    """Format one line per pipeline rank; * marks the one with the most memory."""
    temporary = ("temporary",) if any(rank.temporary for rank in ranks) else ()
    columns = ("weights", "main_grad", "optimizer", "activations", "logits", *temporary, "total")
    where = [" + ".join(span(layers[s]) for s in placement.stages_of(rank)) for rank in range(len(ranks))]
    width = max(len("layers"), *(len(text) for text in where))
    title = f"{'pp rank':<9}{'layers':<{width}}{'parameters':>16}" + "".join(f"{c:>12}" for c in columns)
    lines = [f"{title}  ({unit})"]
    for rank, memory in enumerate(ranks):
        cells = "".join(f"{_in(unit, getattr(memory, c)):>12}" for c in columns)
        name = f"{rank}{' *' if rank == worst else ''}"
        lines.append(f"{name:<9}{where[rank]:<{width}}{memory.parameters:>16,}{cells}")
    return "\n".join(lines)


def _in(unit: str, size: int) -> str:
    return f"{size / {'MiB': 2**20, 'GiB': 2**30}[unit]:.2f}"


def imbalance_text(cfg: Config) -> list[str]:
    """Return the line of a search on the imbalance that it plans for; none without experts."""
    if cfg.model.num_experts is None:
        return []
    return [f"experts: the busiest rank of ep is given {cfg.parallel.moe_memory_factor:g} times the mean of tokens"]


def expert_rows(cfg: Config, grid: Grid) -> list[tuple[str, str]]:
    """List the lines of `--dry-run` on experts: their sizes, ranks, and the imbalance that is planned for."""
    m, p = cfg.model, cfg.parallel
    if m.num_experts is None:
        return []
    layers = sum(map(m.is_moe, range(m.num_layers)))
    shared = f", shared {m.moe_shared_ffn_size}" * (m.moe_shared_ffn_size > 0)
    own = grid.batch_ranks if grid.experts is None else grid.experts.batch_ranks
    cut = f", each over {experts_tp(p)} ranks of tp" * (experts_tp(p) > 1)
    rows = [
        (
            "experts",
            f"{m.num_experts} in {layers} of {m.num_layers} layers, {m.moe_topk} per token, width "
            f"{m.expert_ffn_size}{shared}",
        ),
        ("", f"ep {p.ep}: {m.num_experts // p.ep} experts of each layer per rank{cut}, their states over {own} ranks"),
    ]
    if p.ep > 1:
        dispatch, why = choose_dispatch(m, p)
        rows += [("", overlap_text(cfg, grid))]
        rows += [("", f"--moe-dispatch {p.moe_dispatch}: {dispatch} ({why})")] * (p.moe_dispatch == "auto")
        rows += [("", f"memory and time allow for {imbalance(p):g} times the mean of tokens on the busiest rank")]
    return rows


def other_overlap(cfg: Config) -> Config | None:
    """Return the config with `--moe-overlap` turned round, and a schedule that fits; None where it cannot run."""
    p = cfg.parallel
    try:
        return replace(cfg, parallel=replace(p, moe_overlap=not p.moe_overlap, schedule="auto"))
    except UserError:
        return None


def pairs_text(best: Candidate, cluster: Cluster) -> list[str]:
    """Say how long the picked layout would take with a schedule without pairs, if it has them."""
    plain = other_overlap(best.cfg) if best.cfg.parallel.moe_overlap else None
    if plain is None:
        return []
    slower = step_time(plain, best.grid, cluster)
    saved = f"the exchange of tokens takes {best.time.ep:.3g} s of it, and {slower.ep:.3g} s without --moe-overlap"
    return [f"  {saved}: {slower.total:.4g} s per step"]


def paired_share(cfg: Config, grid: Grid) -> float:
    """Return the share of its passes that a rank runs beside another, on the rank with the least; 0 if it cannot."""
    p, dp = cfg.parallel, grid["dp"]
    try:
        return min(paired(name_of(cfg, dp), p.pp, p.vp, cfg.num_microbatches(dp)))
    except UserError:
        return 0.0


def overlap_text(cfg: Config, grid: Grid) -> str:
    """Say how many of the exchanges of tokens travel while another micro-batch computes, or would."""
    share, other = paired_share(cfg, grid), other_overlap(cfg)
    if cfg.parallel.moe_overlap:
        return f"{share:.0%} of the exchanges of tokens travel while another micro-batch computes (--moe-overlap)"
    would = 0.0 if other is None else paired_share(other, grid)
    return "computation waits for every exchange of tokens" + f", with --moe-overlap for {1 - would:.0%}" * (would > 0)


def update_rows(cfg: Config) -> list[tuple[str, str]]:
    """List which parameters each update rule updates, where there are several: ("muon", "5,242,880 parameters: …").

    Then types of the states that are not fp32.
    """
    numel: Counter[str] = Counter()
    names: dict[str, dict[str, None]] = {}
    for spec in param_map(cfg.model).values():
        if spec.tied_to is None:
            rule, matrices = cfg.optim.rule_of(spec.matrix), math.prod(spec.shape[:-2])
            matrices *= sum(len(turns) or 1 for turns in spec.turns_of_parts)
            numel[rule] += spec.numel
            apart = f" ({matrices} matrices)" if spec.matrix and matrices > 1 else ""
            width = spec.width ** (RULES[rule].width_power or 0.0)
            apart += f" (learning rate / {width:g}, weight decay x {width:g})" if width != 1.0 else ""
            names.setdefault(rule, {})[re.sub(r"\.\d+\.", ".*.", spec.name) + apart] = None
    dtypes = cfg.optim.master_dtype, cfg.optim.moments_dtype
    rounded = f"masters {dtypes[0]}, moments {dtypes[1]}; bf16 is rounded stochastically"
    types = [("states", rounded)] * ("bf16" in dtypes)
    if len(names) == 1 and cfg.model.mup_base_width is None:
        return types
    return [*((rule, f"{numel[rule]:,} parameters: {', '.join(listed)}") for rule, listed in names.items()), *types]
