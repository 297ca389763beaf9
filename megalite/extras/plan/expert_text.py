"""What plans say of experts."""

from __future__ import annotations

from megalite.config.expert_parallel import choose_dispatch
from megalite.config.run import Config
from megalite.mesh.grid import Grid
from megalite.model.ffn.routed import experts_tp, imbalance


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
        ("experts", f"{m.num_experts} in {layers} of {m.num_layers} layers, {m.moe_topk} per token, width "
         f"{m.expert_ffn_size}{shared}"),
        ("", f"ep {p.ep}: {m.num_experts // p.ep} experts of each layer per rank{cut}, their states over {own} ranks"),
    ]  # fmt: skip
    if p.ep > 1:
        dispatch, why = choose_dispatch(m, p)
        rows += [("", f"--moe-dispatch {p.moe_dispatch}: {dispatch} ({why})")] * (p.moe_dispatch == "auto")
        rows += [("", f"memory and time allow for {imbalance(p):g} times the mean of tokens on the busiest rank")]
    return rows
