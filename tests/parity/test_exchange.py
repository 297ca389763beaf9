"""Replicas that compute each other's samples come to each other's gradients, bit for bit, in every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megalite.runtime.options.run import Config
from tests.parity.jobs import SEQ, VOCAB, batches, llama, make_config, start
from tests.workers import WorkerPool

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
EXPERTS = {**DROPOUT, "num_experts": 4, "moe_topk": 2, "moe_aux_loss_coeff": 0.1}
SPLIT = {"zero": 3, "zero_whole_below": 0}


class Documents:
    """Fixed samples; every third one has two documents, targets that do not count, and weights."""

    def __init__(self) -> None:
        self.samples = batches(2).reshape(-1, SEQ + 1)

    def __len__(self) -> int:
        return len(self.samples)

    def sample(self, i: int) -> Any:
        from megalite.runtime.data import Rows

        if i % 3:
            return self.samples[i]
        at = np.arange(SEQ)
        targets = np.where(at < 3, -1, self.samples[i][1:])
        return Rows(
            self.samples[i][:-1], targets, np.where(at < 5, 0, 5), np.where(at < 9, 1.0, 0.5).astype(np.float32)
        )


class Pairs:
    """The same samples as a dataset of pairs, one a sample."""

    seq_len, has_documents = SEQ, True

    def __init__(self) -> None:
        self.tokens = batches(2).reshape(-1, SEQ + 1)[:, 1:]

    def sample(self, position: int) -> Any:
        from megalite.runtime.data import Rows

        at, tokens = np.arange(SEQ), self.tokens[position]
        owners = np.select([at == 4, at == SEQ - 1], [0, 1], -1)
        targets, weights = np.where(owners < 0, -1, tokens), (owners == 0).astype(np.float32)
        return Rows(tokens, targets, np.where(at < 5, 0, 5), weights, at < 0, owners)


def exchanged(rank: int, cfg: Config, world: int, fault: tuple[int, str] | None) -> Any:
    """The suspects and the obstacle of an exchange after an update; `fault`: whose hardware adds what is wrong."""
    import torch

    from megalite.core.step import train_step
    from megalite.runtime.data import OwnDataset
    from megalite.runtime.loop.run import open_loader
    from megalite.runtime.recover.bit_sums import sums_of_bits
    from megalite.runtime.recover.exchange import exchange
    from megalite.runtime.recover.local_gradients import LocalGradients

    def state() -> list[int]:
        return sums_of_bits([state.flat for state in engine.optimizer.states()]).tolist()

    engine = start(rank, cfg, world)
    of_pairs = cfg.train.stage == "reward"
    dataset: Any = Pairs() if of_pairs else OwnDataset(Documents(), SEQ, VOCAB, shuffle=False)
    gradients = LocalGradients(engine)
    with open_loader(engine, dataset, cfg.train.global_batch_size) as loader:
        assert not train_step(engine, loader.next_batch(), 1).skipped
        if fault is not None and fault[0] == rank:
            module = next(iter(next(iter(engine.stages.values())).layers.values()))
            if fault[1] == "activation":
                module.register_forward_hook(lambda module, inputs, out: out * 1.5)
            else:
                param = next(module.parameters())

                def wrong(after: Any = param.after_grad) -> None:
                    param.main_grad.view(-1)[:1].add_(torch.nan if fault[1] == "nan" else 1.0)
                    after()

                param.after_grad = wrong
        batch = loader.next_batch()
        gradients.start(closely=True)
        second = train_step(engine, batch, 2, loss_limit=0.0)
        before = state(), engine.scaler.scalars(), engine.optimizer.scalars()
        found = exchange(engine, loader.read_share, batch, 2, second.loss_scale, gradients)
        assert (state(), engine.scaler.scalars(), engine.optimizer.scalars()) == before
        assert loader.consumed_samples == 2 * cfg.train.global_batch_size
        if of_pairs:
            # The next step counts its own samples alone.
            figures = train_step(engine, batch, 2, loss_limit=0.0).figures
            assert figures == second.figures
            assert figures["rewards"]["pairs"] == cfg.train.global_batch_size
    return found.suspects, found.obstacle


# Layout, model, training options, faults and suspects, on four ranks. A fault in an activation reaches a whole replica.
REWARDS: Any = ({"zero": 1}, {}, {"stage": "reward"}, [])
STRONG: Any = ({"pp": 2, "schedule": "interleaved", "vp": 2}, DROPOUT, {}, [((1, "wrong"), [[0], [1]])])
TWO_REPLICAS: list[Any] = [
    ({"tp": 2}, DROPOUT, {}, [((3, "nan"), [[3]]), ((0, "activation"), [[0, 1], [2, 3]])]),
    ({"zero": 2, "cp": 2}, DROPOUT, {}, [((3, "nan"), [[3]])]),
    ({"ep": 2, "zero": 1}, EXPERTS, {}, [((1, "nan"), [[1]]), ((2, "activation"), [[0, 1], [2, 3]])]),
    ({"ep": 2, "tp": 2, "etp": "1", "zero": 2}, EXPERTS, {}, [((2, "nan"), [[2]])]),
    ({"pp": 2, "schedule": "zb-h1"}, {**DROPOUT, "mtp_num_layers": 1}, {}, []),
]
FOUR_REPLICAS = [
    ({"zero": 2}, {}, {"fp8": "rowwise", "fp8_emulate": True, "precision": "bf16"}, []),
    ({**SPLIT}, DROPOUT, {}, [((0, "wrong"), [[0]]), ((3, "activation"), [[3]])]),
    # Shares of one, two, one and two micro-batches.
    ({"zero": 2}, DROPOUT, {"global_batch_size": 6}, [((0, "wrong"), [[0]]), ((3, "activation"), [[3]])]),
    ({**SPLIT, "zero_group": "2"}, {}, {"precision": "bf16", "offload": "optimizer"}, [((1, "wrong"), [[1]])]),
    ({"zero": 1}, DROPOUT, {"micro_batch_size": 2, "compress": "powersgd:2"}, [((2, "wrong"), [[2]])]),
]


@pytest.mark.parametrize(
    "rows",
    [[STRONG], [REWARDS], pytest.param(TWO_REPLICAS + FOUR_REPLICAS, marks=pytest.mark.full)],
    ids=["strong", "rewards", "grid"],
)
def test_replicas_agree_and_faults_are_named(pool: WorkerPool, rows: list[Any]) -> None:
    for parallel, model, train, faults in rows:
        cfg = make_config(llama(4 if "vp" in parallel else 2, **model), parallel, **train)
        for fault, suspects in [(None, []), *faults]:
            for found in pool.run(4, exchanged, cfg, 4, fault):
                assert found == (suspects, ""), (parallel, model, train, fault)
