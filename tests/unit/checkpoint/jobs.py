"""What the checkpoint tests run on every rank, and a reader of checkpoints that shares nothing with the library's."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from megalite.runtime.checkpoint.load import load_checkpoint, verify_together
from megalite.runtime.checkpoint.save import Checkpointer
from megalite.runtime.options.run import Config
from tests.parity.jobs import run_steps, start


def layout(tp: int = 1, pp: int = 1, vp: int = 1, dp: int = 1, zero: int = 1) -> tuple[dict[str, Any], int]:
    """Options of `ParallelConfig`, and the world they need."""
    return {"tp": tp, "pp": pp, "vp": vp, "zero": zero}, tp * pp * dp


def whole_tensors(path: Path) -> dict[str, np.ndarray]:
    """Every logical tensor of a checkpoint, put together by the safetensors library from what the manifest says."""
    manifest = json.loads((path / "manifest.json").read_text())
    shards = [safe_open(path / f["name"], "np") for f in manifest["files"]]
    whole = {}
    for kind, tensors in manifest["tensors"].items():
        for name, tensor in tensors.items():
            full = np.full(tensor["shape"], np.nan, np.float32)
            for file, _, offset, shape in tensor["boxes"]:
                part = shards[file].get_tensor(f"{kind}.{name}.{'_'.join(map(str, offset))}")
                assert list(part.shape) == shape
                full[tuple(slice(o, o + n) for o, n in zip(offset, shape))] = part
            whole[f"{kind} {name}"] = full
    return whole


def assert_same(a: str, b: str) -> None:
    """Two checkpoints hold the same tensors to the bit."""
    one, other = whole_tensors(Path(a)), whole_tensors(Path(b))
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        np.testing.assert_array_equal(tensor, other[key], err_msg=key)
        assert not np.isnan(tensor).any(), key


def train_and_save(rank: int, cfg: Config, world: int, root: str, steps: int, more: int = 1) -> dict[str, Any]:
    """Train, save, and go on for `more` steps."""
    engine = start(rank, cfg, world)
    before = run_steps(engine, steps)
    checkpointer = Checkpointer(root, engine.ctx)
    path = checkpointer.save(steps, engine.optimizer.states(), {"scalars": engine.optimizer.scalars()})
    checkpointer.close()
    return {"path": str(path), "before": before, "after": run_steps(engine, more, steps + 1)}


def load_and_save(rank: int, cfg: Config, world: int, path: str, root: str, more: int = 0) -> dict[str, Any]:
    """Load into another layout, save what was loaded, go on for `more` steps; counts what was really read."""
    engine = start(rank, cfg, world)
    states = engine.optimizer.states()
    for state in states:
        state.flat.detach().fill_(float("nan"))
    checkpoint = verify_together(Path(path), engine.ctx, states)
    read, preadv = [0], os.preadv

    def counting(*args: Any) -> int:
        count = preadv(*args)
        read[0] += count
        return count

    os.preadv = counting
    try:
        meta, stats = load_checkpoint(checkpoint, states, engine.ctx)
    finally:
        os.preadv = preadv
    engine.optimizer.load_scalars(meta["scalars"])
    engine.optimizer.finish_load()
    checkpointer = Checkpointer(root, engine.ctx)
    step = int(Path(path).name.split("_")[1])
    saved = checkpointer.save(step, engine.optimizer.states(), meta)
    checkpointer.close()
    after = run_steps(engine, more, step + 1)
    return {
        "path": str(saved),
        "after": after,
        "needed": sum(4 * int(np.prod(piece.shape)) for state in states for piece in state.slices),
        "read": read[0],
        "loaded": stats.loaded,
    }


def verified_share(rank: int, world: int, path: str) -> int:
    """Bytes that this rank read to check a checkpoint."""
    from megalite.core.mesh.context import ParallelContext
    from megalite.core.mesh.grid import Grid

    ctx = ParallelContext.create(Grid.of(world), torch.device("cpu"))
    return verify_together(Path(path), ctx).stats.verified


def hf_job(rank: int, cfg: Config, world: int, folder: str, root: str) -> np.ndarray | None:
    """Start from a Hugging Face folder, save, and compute logits [batch, seq, vocabulary] on the last stage."""
    import torch.distributed as dist

    from megalite.core.batch import ForwardPass, MicroBatch
    from megalite.core.mesh.collectives import start_all_gather
    from megalite.runtime.checkpoint.hf.start import load_hf
    from tests.unit.checkpoint.hf_models import tokens

    engine = start(rank, cfg, world)
    ctx = engine.ctx
    load_hf(folder, cfg.model, engine.optimizer.states(), ctx)
    engine.optimizer.finish_load()
    checkpointer = Checkpointer(root, ctx)
    checkpointer.save(0, engine.optimizer.states(), {"config": {"model": dataclasses.asdict(cfg.model)}})
    checkpointer.close()
    (stage,) = engine.stages.values()
    seq, batch = tokens().shape[::-1]
    x = tokens().t().contiguous()
    microbatch = MicroBatch.of_samples(x, None)
    with torch.no_grad():
        if not stage.first:
            rows = seq // ctx.tp.size if cfg.sequence_parallel else seq
            x = torch.empty(rows, batch, cfg.model.hidden_size)
            dist.recv(x, ctx.pp.ranks[ctx.pp.rank - 1])
        y = stage(x, microbatch, ForwardPass(0, 0, training=False))
        if not stage.last:
            dist.send(y.contiguous(), ctx.pp.ranks[ctx.pp.rank + 1])
            return None
        logits_VSB, work = start_all_gather(y.movedim(-1, 0), ctx.tp)
        work.wait()
        return logits_VSB[: cfg.model.vocab].permute(2, 1, 0).numpy()


def bytes_of_tensors(rank: int, cfg: Config, world: int, folder: str, names: list[str]) -> int:
    """Start from a Hugging Face folder of one file; count the bytes of these tensors that this rank reads."""
    from megalite.runtime.checkpoint.hf.start import load_hf

    engine = start(rank, cfg, world)
    data = (Path(folder) / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header, read, preadv = json.loads(data[8:begin]), [0], os.preadv

    def counting(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        count = preadv(fd, buffers, offset, flags)
        for first, end in (header[name]["data_offsets"] for name in names):
            read[0] += max(0, min(begin + end, offset + count) - max(begin + first, offset))
        return count

    os.preadv = counting
    try:
        load_hf(folder, cfg.model, engine.optimizer.states(), engine.ctx)
    finally:
        os.preadv = preadv
    return read[0]


def bit_flip(rank: int, cfg: Config, world: int, victim: int, name: str) -> str:
    """Flip one bit of a weight or a routing bias on one rank; what `check_replicas` says of it ("" = nothing)."""
    from megalite.runtime.checkpoint.check_replicas import check_replicas
    from megalite.runtime.checkpoint.save import SaveError

    engine = start(rank, cfg, world)
    params = {p.shard.spec.name: p for stage in engine.stages.values() for p in stage.parameters()}
    params |= {state.name: state.flat for state in engine.optimizer.beside}
    check_replicas(engine.optimizer.copies(), engine.ctx)
    if rank == victim:
        bits = params[name].detach().view(torch.int32 if params[name].dtype == torch.float32 else torch.int16)
        bits.view(-1)[5] ^= 1 << 9
    try:
        check_replicas(engine.optimizer.copies(), engine.ctx)
    except SaveError as e:
        return str(e)
    return ""
