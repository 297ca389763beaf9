"""What autograd saves where ranks share samples: a fourth on four ranks, in every variant, as the plan says."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalite.core.batch import ForwardPass, MicroBatch
from megalite.core.options.choices import BlockKind
from megalite.core.parts.context.heads import _Kept
from megalite.extras.plan.memory.activations import block_activations
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.workers import WorkerPool

SEQ = 128
# (--cp-comm, key heads): heads for two of four ranks, where tokens are exchanged for heads among two neighbors only;
# copies of key heads.
VARIANTS = (("gather", 4), ("ring", 4), ("a2a", 4), ("a2a", 2), ("a2a+gather", 2), ("a2a+ring", 1))


def config(layers: int, cp: int, comm: str, kv_heads: int = 4, **options: Any) -> Config:
    heads = {"num_heads": 2 if "+" in comm else 8, "num_kv_heads": kv_heads}
    model = jobs.llama(layers, hidden_size=64, seq_len=SEQ, ffn_hidden_size=176, **heads, **options)
    return jobs.make_config(model, {"cp": cp, "cp_comm": comm, "device": "cpu"}, micro_batch_size=1)


class Made(TorchDispatchMode):
    """Remembers the memory of every operator's results for as long as it lives, whoever keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out) * (not func.is_view):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self.storages[storage.data_ptr()] = weakref.ref(storage)
        return out

    def live(self) -> int:
        return sum(storage.nbytes() for ref in self.storages.values() if (storage := ref()) is not None)


def saved(rank: int, cfgs: Sequence[Config], world: int) -> list[int]:
    """By config: bytes that the training loss of the stage keeps, weights left out."""
    out = []
    for cfg in cfgs:
        engine = jobs.start(rank, cfg, world)
        engine.optimizer.wait_weights()
        (stage,) = engine.stages.values()
        tokens = torch.arange(SEQ).remainder(jobs.VOCAB)[:, None]
        batch = MicroBatch.of_samples(tokens, tokens).shared(world, rank)
        kept = []
        for _ in range(3):
            with Made() as made:
                fwd = ForwardPass(1, 0, training=True, samples=range(1), positions=batch.positions)
                loss = stage(batch.tokens_SB, batch, fwd)
                kept.append(made.live())
            del loss
        # A thread of gloo may hold a message a moment longer than the wait for it.
        out.append(min(kept))
    return out


@pytest.mark.parametrize("comm", ["gather", "ring", "a2a"])
def test_dropout_of_attention_keeps_no_more(pool: WorkerPool, comm: str) -> None:
    cfgs = [config(n, 4, comm, attention_dropout=0.1) for n in (2, 4)]
    assert block_activations(cfgs[0], BlockKind()) == block_activations(config(2, 4, comm), BlockKind())
    for less, more in pool.run(4, saved, cfgs, 4):
        assert more - less == pytest.approx(2 * block_activations(cfgs[0], BlockKind()), rel=0.02)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_block_saves_a_fourth(pool: WorkerPool, variant: tuple[str, int]) -> None:
    """Two blocks more, so that embedding, output layer and tables of positions do not count."""
    few, many = saved(0, [config(n, 1, *variant) for n in (2, 4)], 1)
    cfgs = [config(n, 4, *variant) for n in (2, 4)]
    for less, more in pool.run(4, saved, cfgs, 4):
        assert more - less == pytest.approx((many - few) / 4, rel=0.01)
        assert more - less == pytest.approx(2 * block_activations(cfgs[0], BlockKind()), rel=0.02)


def test_a_part_of_a_larger_storage_is_kept() -> None:
    """Flash attention may return one: it pads head sizes, and saves what it padded."""
    dense, padded = torch.arange(32.0).view(4, 8), torch.arange(40.0).view(4, 10)
    kept = _Kept()
    slots = [kept.keep(x) for x in (dense.t(), padded)]
    kept.leave_out(dense, padded[:, :8])
    assert slots[1] == [padded]
    kept.put_back(dense.clone(), padded[:, :8].clone())
    assert torch.equal(kept.get(slots[0]), dense.t())
    assert kept.get(slots[1]) is padded
