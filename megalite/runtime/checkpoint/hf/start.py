"""Starting a run straight from a Hugging Face folder, in any layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megalite.core.base.errors import UserError, require
from megalite.core.base.log import logger, warn_on_rank_0
from megalite.core.mesh.agree import agree
from megalite.core.mesh.context import ParallelContext
from megalite.core.options.model import ModelConfig
from megalite.core.sharding import StateTensor
from megalite.runtime.base.permitted import permitted
from megalite.runtime.checkpoint.hf.config import TRAINING_ONLY
from megalite.runtime.checkpoint.hf.source import HFSource
from megalite.runtime.checkpoint.new_head import NEW_HEAD, gets_new_head, taken_over, tensors_only_in
from megalite.runtime.places.downloads import bring_tree


@permitted()
def hf_model_config(folder: str | Path, cache_dir: str = "") -> ModelConfig:
    """Return the model of a Hugging Face folder, after checking its files; seq_len is its number of positions.

    Args:
        folder: a path, or a URL of a store: then the folder is downloaded.
        cache_dir: where to.

    Raises:
        UserError: see `HFSource`; the folder cannot be downloaded.
    """
    return HFSource(bring_tree(str(folder), cache_dir)).config


def load_hf(folder: str | Path, cfg: ModelConfig, states: Sequence[StateTensor], ctx: ParallelContext) -> HFSource:
    """Fill the masters of all ranks from a Hugging Face folder; moments become zero. Every rank calls this.

    Each rank reads only the slices that it holds.

    Args:
        folder: config.json and safetensors.
        cfg: the run's model; its sequence length and dropout may differ from the folder's. If it is one of rewards and
            the folder's is not, its head stays as it is.
        states: what this rank holds; filled in place.
        ctx: this rank's axes.

    Returns:
        The folder; `warn_of_modules` has been called on rank 0.

    Raises:
        UserError: see `HFSource`; or the run's model differs. Raised on every rank.
    """
    source = agree(ctx, lambda: _open(folder, cfg, ctx))
    if (positions := source.config.positions) < cfg.seq_len:
        warn_on_rank_0(f"--seq-len {cfg.seq_len} is more than the {positions} positions of the model in {folder}")

    def fill() -> None:
        tensors = {spec.name: (spec, packing) for spec, packing in source.tensors()}
        new = tensors_only_in(cfg, source.config) if gets_new_head(source.config, cfg) else set[str]()
        for state in (state for state in states if state.name not in new):
            flat = state.flat.detach().zero_()
            for box in state.slices if state.role == "master" else ():
                source.read(*tensors[state.name], box.offset, flat[box.at : box.at + box.numel].view(box.shape))

    agree(ctx, fill)
    return source


def _open(folder: str | Path, cfg: ModelConfig, ctx: ParallelContext) -> HFSource:
    source = HFSource(folder)
    if ctx.rank == 0:
        source.warn_of_modules(cfg.mtp_num_layers)
    given, held = f"--mtp-num-layers {cfg.mtp_num_layers}", source.config.mtp_num_layers
    require(cfg.mtp_num_layers <= held, given, f"{folder} holds {held} such modules", "lower it, or drop it")
    if gets_new_head(source.config, cfg) and ctx.rank == 0:
        logger.info(NEW_HEAD)
    differences = [
        f"{name} {getattr(cfg, name)!r} here, {value!r} there"
        for name, value in vars(taken_over(source.config, cfg)).items()
        if name not in (*TRAINING_ONLY, "max_position_embeddings", "mtp_num_layers") and getattr(cfg, name) != value
    ]
    if cfg.position_kind.limited and cfg.positions != source.config.positions:
        differences.append(f"max_position_embeddings {cfg.positions} here, {source.config.positions} there")
    if differences:
        rule = f"its model differs from the run's: {'; '.join(differences)}"
        raise UserError(f"--init-from-hf {folder}", rule, "remove the model options: they come from the directory")
    return source
