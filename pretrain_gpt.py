"""Pretrain a GPT or Llama-type model: `torchrun --nproc-per-node 8 pretrain_gpt.py --tp 2 --pp 4 --preset llama-3-8b …`

Read it from top to bottom: parse the options, find this rank's place, build the run, train.
"""

from __future__ import annotations

from megalite.checkpoint.hf.start import hf_model_config
from megalite.config import cli
from megalite.diagnose.memory import diagnosing_memory
from megalite.dist.context import (
    ParallelContext,
    init_process_group,
    only_deterministic_kernels,
    pick_device,
    world_size,
)
from megalite.dist.grid import Grid
from megalite.errors import show
from megalite.log import env_rank
from megalite.plan.dry_run import dry_run_report
from megalite.train.exit import leaving_together
from megalite.train.inputs import with_vocab_size
from megalite.train.loop import fit
from megalite.train.run import open_run


def main() -> None:
    parsed = cli.parse(read_model=hf_model_config)
    cfg, tp, pp = parsed.config, parsed.config.parallel.tp, parsed.config.parallel.pp
    # Printing does not require the ranks to be started.
    grid = Grid.of(world_size(otherwise=tp * pp if parsed.print_config or parsed.dry_run else 1), tp, pp)
    if parsed.print_config or parsed.dry_run:
        if env_rank() == 0:
            show(cli.to_yaml(cfg) if parsed.print_config else dry_run_report(with_vocab_size(cfg), grid))
        return
    device = pick_device(cfg.parallel.device, tp, cfg.parallel.zero)
    if cfg.train.deterministic:
        only_deterministic_kernels()
    init_process_group(device)
    with diagnosing_memory(cfg, grid, device, env_rank()) as context:
        run = open_run(cfg, ParallelContext.create(grid, device))
        context.cfg = run.engine.cfg
        try:
            fit(run)
        finally:
            run.close()


if __name__ == "__main__":
    with leaving_together():
        main()
