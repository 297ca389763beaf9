"""Pretrain a GPT or Llama-type model: `torchrun --nproc-per-node 8 pretrain_gpt.py --tp 2 --pp 4 --preset llama-3-8b …`

Reads top to bottom: what was asked, where this rank sits, what to train, train it.
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
from megalite.log import env_rank
from megalite.plan.dry_run import dry_run_report
from megalite.train.exit import leaving_together
from megalite.train.inputs import described
from megalite.train.loop import fit
from megalite.train.run import open_run


def main() -> None:
    asked = cli.parse(read_model=hf_model_config)
    cfg, tp, pp = asked.config, asked.config.parallel.tp, asked.config.parallel.pp
    # What is only said, not run, may be asked without starting the ranks.
    topology = Grid.of(world_size(otherwise=tp * pp if asked.print_config or asked.dry_run else 1), tp, pp)
    if asked.print_config or asked.dry_run:
        if env_rank() == 0:
            print(cli.to_yaml(cfg) if asked.print_config else dry_run_report(described(cfg), topology))
        return
    device = pick_device(cfg.parallel.device, tp)
    if cfg.train.deterministic:
        only_deterministic_kernels()
    init_process_group(device)
    with diagnosing_memory(cfg, topology, device, env_rank()) as known:
        run = open_run(cfg, ParallelContext.create(topology, device))
        known.cfg = run.engine.cfg
        try:
            fit(run)
        finally:
            run.close()


if __name__ == "__main__":
    with leaving_together():
        main()
