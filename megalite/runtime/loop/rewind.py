"""After a loss spike, return to the last checkpoint and skip the samples that led to the spike."""

from __future__ import annotations

from pathlib import Path

from megalite.core.mesh.collectives import gather_texts
from megalite.runtime.checkpoint.load import verify_together
from megalite.runtime.loop.run import Run, open_loader
from megalite.runtime.loop.spike import SpikeDetector
from megalite.runtime.start.exit import DivergenceError
from megalite.runtime.start.resume import Source, resume

# Rewinds to the same checkpoint, each followed by other samples.
_MAX_REWINDS = 3


def rewind(run: Run) -> Path | None:
    """Restore the last checkpoint, and continue the data after the last consumed sample.

    Everything here depends on losses and checkpoints only, so a run that is killed and resumed does the same again.

    Returns:
        The checkpoint; None if this run has none yet, and nothing was changed.

    Raises:
        DivergenceError: the loss spiked again after every earlier rewind to this checkpoint.
    """
    run.checkpointer.finish()
    source = _last_commit(run)
    if source is None:
        return None
    run.rewinds[source.name] = run.rewinds.get(source.name, 0) + 1
    if run.rewinds[source.name] > _MAX_REWINDS:
        raise DivergenceError(
            f"the loss spiked again after {_MAX_REWINDS} rewinds to {source} with other samples; lower --lr, or raise "
            "--spike-threshold"
        )
    sizes, position = run.engine.cfg.train.batches, run.consumed_samples
    run.engine.optimizer.wait_weights()
    verified = verify_together(source, run.engine.ctx, run.engine.optimizer.states())
    saved = resume(run.engine, Source(verified), run.meta)
    run.step = int(saved["step"])
    run.saved = [(step, path) for step, path in run.saved if step <= run.step]
    run.sample_offset = position - sizes.samples(run.step)
    run.spikes = SpikeDetector(run.spikes.threshold, saved.get("loss_history", ()))
    run.loader.close()
    following = sizes.following(run.step)
    run.loader = open_loader(run.engine, run.datasets.train, following, run.consumed_samples)
    return source


def _last_commit(run: Run) -> Path | None:
    """Find the newest checkpoint of this run's own history, as rank 0 sees it: after a failed save, the one before it.

    Irregular saves (of a run that was asked to stop) do not count while there are regular ones: an interrupted run must
    rewind as far as an uninterrupted one.
    """
    ctx, every = run.engine.ctx, run.engine.cfg.run.save_every
    committed = [(step, path) for step, path in run.saved if (path / "COMMIT").exists()] if ctx.rank == 0 else []
    regular = [(step, path) for step, path in committed if every and step % every == 0]
    newest = [str(path) for _, path in (regular or committed)[-1:]]
    name = gather_texts("".join(newest), ctx.world, ctx.device)[0]
    return Path(name) if name else None
