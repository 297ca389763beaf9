"""Pretrain a GPT or Llama-type model: `torchrun --nproc-per-node 8 pretrain_gpt.py --tp 2 --pp 4 --preset llama-3-8b …`

Read it from top to bottom: parse the options, start the run on this rank, train.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from megalite.extras.compat.dialect import DIALECT
from megalite.extras.compat.help import show_help_if_asked
from megalite.runtime.base.collector import importing
from megalite.runtime.options import cli
from megalite.runtime.recover.member import (
    GuardedRank,
    become_guard,
    become_guard_if_asked,
    find_companion,
    spare_ranks,
)

if __name__ == "__main__":
    show_help_if_asked(sys.argv[1:], dialect=DIALECT)  # before torch is imported, which takes a second
    become_guard_if_asked(sys.argv[1:])

with importing():  # a fifth of the start would go into looking for garbage among what is imported
    from megalite.api import start
    from megalite.core.base.log import env_int, env_rank
    from megalite.core.mesh.grid import Grid
    from megalite.core.mesh.rendezvous import world_size
    from megalite.extras.plan.auto import settle_layout
    from megalite.extras.plan.forecast import Forecast
    from megalite.extras.plan.lost_hosts import lost_hosts_table
    from megalite.extras.plan.report import dry_run_report
    from megalite.extras.tasks.in_loop import identity_of_tasks
    from megalite.extras.tool import show
    from megalite.runtime.checkpoint.hf.start import hf_model_config
    from megalite.runtime.data import Samples
    from megalite.runtime.loop.loop import StepCallback, fit
    from megalite.runtime.recover.rehearse import rehearse
    from megalite.runtime.recover.restore import find_hub, folder_of_hubs, identify
    from megalite.runtime.start.exit import leaving_together
    from megalite.runtime.start.inputs import with_vocab_size


def main(
    train_data: Samples | None = None, valid_data: Samples | None = None, callbacks: Sequence[StepCallback] = ()
) -> None:
    """Train as the command line says; your own script can pass data and callbacks (see docs/extending.md)."""
    show_help_if_asked(sys.argv[1:], dialect=DIALECT)
    companion = find_companion()
    world = world_size(otherwise=0)
    if world and not isinstance(companion, GuardedRank):  # where there is a guard, it has left out who waits in reserve
        world = max(1, world - spare_ranks(sys.argv[1:]))
    parsed = cli.parse(read_model=hf_model_config, world=world or None, dialect=DIALECT)
    if parsed.config.run.recover != "none" and not (parsed.print_config or parsed.dry_run):
        if not isinstance(companion, GuardedRank):
            become_guard(parsed.config.run.spare_ranks)
        who = partial(identify, parsed.config, train_data, valid_data, identity_of_tasks)
        folder = folder_of_hubs(parsed.config)
        prepare = partial(rehearse, parsed.config)
        companion.wait_for_turn(partial(find_hub, folder), prepare, who, parsed.config.run.elastic, folder)
    cfg = settle_layout(parsed)
    if parsed.print_config or parsed.dry_run:
        # Printing does not require the ranks to be started.
        with cli.in_words_given(parsed.theirs):
            grid = Grid.from_config(cfg.parallel, world or parsed.world)
        if env_rank() == 0 and parsed.print_config:
            show(cli.to_yaml(cfg))
        elif env_rank() == 0:
            cfg = with_vocab_size(cfg)
            host = parsed.ranks_per_host or env_int("LOCAL_WORLD_SIZE", grid.world)
            lost = lost_hosts_table(cfg, grid, parsed.lost, host) if parsed.lost else []
            show("\n".join([dry_run_report(cfg, grid), *lost]))
        return
    with cli.in_words_given(parsed.theirs), start(cfg, train_data, valid_data) as run:
        fit(run, [Forecast(run), *callbacks])


if __name__ == "__main__":
    with leaving_together():
        main()
