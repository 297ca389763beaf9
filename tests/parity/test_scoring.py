"""Scores and next logits of rows of any length in any layout equal those of one whole model."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megalite.core.base.errors import UserError
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.extras.convert.hf import import_hf
from megalite.extras.inference.command import lm_eval_parser
from megalite.extras.inference.lm_eval import join, run_tasks
from megalite.extras.inference.load import find_weights, load_model
from megalite.extras.inference.score import Scorer, scoring_config
from megalite.extras.tasks.writing import Request
from megalite.runtime.data.tokenizer import ByteTokenizer
from tests.ranks import reserve_port
from tests.unit.checkpoint import hf_models
from tests.workers import WorkerPool

pytest.importorskip("transformers")
CPU = torch.device("cpu")
# Fewer than fit into a pass, of odd lengths; the last one is as long as the model's positions.
LENGTHS = (5, 2, 19, 11, 33)


def rows() -> list[list[int]]:
    draws = np.random.default_rng(5)
    return [draws.integers(0, 90, n).tolist() for n in LENGTHS]


class Letters(ByteTokenizer):
    """A letter for each id of a small model; none ends a text."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(0x4E00 + i) for i in ids)


def scored(
    rank: int, path: str, tp: int, pp: int, world: int
) -> tuple[list[tuple[float, bool]], np.ndarray, list[str], list[int]] | None:
    """Score all but the first id of each row, the last row's last two only; then the logits after the first rows, texts
    that continue these, and how many tokens this rank's stage has read for them.
    """
    ctx = ParallelContext.create(Grid.of(world, tp=tp, pp=pp), CPU)
    weights = find_weights(Path(path))
    scorer = Scorer(scoring_config(weights, world, tp, pp, rows=4, max_length=32), ctx, weights)
    if rank > 0:
        scorer.serve()
        return None
    given = [(ids, 2 if i == len(LENGTHS) - 1 else len(ids) - 1) for i, ids in enumerate(rows())]
    found = [
        pair for i in range(0, len(given), scorer.max_rows) for pair in scorer.score(given[i : i + scorer.max_rows])
    ]
    logits = scorer.next_logits(rows()[:3])
    read = []
    scorer._stage.register_forward_pre_hook(lambda _, args: read.append(args[0].shape[0] * args[0].shape[1]))
    texts = scorer.write([Request(ids, 6) for ids in rows()[:3]], Letters())
    scorer.close()
    return found, logits.numpy(), texts, read


@pytest.mark.parametrize(
    ("case", "tp", "pp", "world"),
    [
        ("llama", 1, 1, 1),
        ("llama", 2, 2, 4),
        ("gpt2", 1, 2, 4),
        ("gemma2", 2, 1, 2),
        pytest.param("qwen2_moe", 2, 2, 4, marks=pytest.mark.full),
        pytest.param("gpt_oss", 2, 2, 4, marks=pytest.mark.full),
        pytest.param("llama4", 2, 2, 4, marks=pytest.mark.full),
        pytest.param("qwen3_next", 2, 2, 4, marks=pytest.mark.full),
    ],
)
def test_scores_in_a_layout(pool: WorkerPool, tmp_path: Path, case: str, tp: int, pp: int, world: int) -> None:
    hf_models.make_model(case, tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "ckpt")
    found, logits, texts, read = pool.run(world, scored, str(tmp_path / "ckpt"), tp, pp, world)[0]
    model = load_model(tmp_path / "ckpt", CPU)
    for i, (ids, (total, likeliest)) in enumerate(zip(rows(), found)):
        logprobs = model.logits(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
        n = 2 if i == len(LENGTHS) - 1 else len(ids) - 1
        ends = torch.tensor(ids[-n:])
        assert total == pytest.approx(logprobs[-n:].gather(1, ends[:, None]).sum().item(), abs=2e-4)
        assert likeliest == bool((logprobs[-n:].argmax(1) == ends).all())
    for ids, row in zip(rows(), logits):
        np.testing.assert_allclose(row, model.logits(torch.tensor([ids]))[0, -1], atol=5e-5)
    for ids, text in zip(rows(), texts):
        whole = [*ids]
        for _ in range(6):
            whole.append(int(model.logits(torch.tensor([whole]))[0, -1].argmax()))
        assert text == Letters().decode(whole[len(ids) :])
    if case == "llama":
        assert read[-5:] == [read[-1]] * 5, "each token of a text is read once"
        assert read[-1] < 6


def test_the_likeliest_continuation_is_found_likeliest(pool: WorkerPool, tmp_path: Path) -> None:
    hf_models.make_model("llama", tmp_path / "hf")
    model, ids = load_model(tmp_path / "hf", CPU), [5, 17, 3]
    for _ in range(4):
        ids.append(int(model.logits(torch.tensor([ids]))[0, -1].argmax()))
    path = str(tmp_path / "hf")
    results = pool.run(2, continued, path, [(ids, 4), ([*ids[:-1], (ids[-1] + 1) % 90], 4)])
    assert [hit for _, hit in results[0]] == [True, False]


def continued(rank: int, path: str, given: list[tuple[list[int], int]]) -> list[tuple[float, bool]] | None:
    ctx, weights = ParallelContext.create(Grid.of(2, tp=2), CPU), find_weights(Path(path))
    scorer = Scorer(scoring_config(weights, 2, tp=2), ctx, weights)
    if rank > 0:
        scorer.serve()
        return None
    found = scorer.score(given)
    scorer.close()
    return found


def test_a_layout_that_does_not_fit(tmp_path: Path) -> None:
    hf_models.make_model("gpt2", tmp_path / "hf")
    weights = find_weights(tmp_path / "hf")
    with pytest.raises(UserError, match="3 ranks with --tp 2 --pp 1: must be a multiple of tp x pp = 2"):
        scoring_config(weights, 3, tp=2)
    with pytest.raises(UserError, match="--max-length 64: must be at most 32"):
        scoring_config(weights, 1, max_length=64)
    # Not given: 32 tokens are rounded up to 33.
    with pytest.raises(UserError, match="--tp 3: 32 tokens are padded to 33, .* at most 32"):
        scoring_config(weights, 3, tp=3)


def test_a_mistake_within_a_request_does_not_look_like_one_between_two(tmp_path: Path) -> None:
    """After it the other ranks wait inside the request: they cannot be asked to end."""
    hf_models.make_model("llama", tmp_path / "hf")
    weights = find_weights(tmp_path / "hf")
    scorer = Scorer(scoring_config(weights, 1), ParallelContext.single(), weights)

    def refuse(*_: object) -> None:
        raise UserError("a hook", "does not like this", "remove it")

    scorer._stage.register_forward_pre_hook(refuse)
    with pytest.raises(RuntimeError, match="a hook: does not like this"):
        scorer.score([([1, 2, 3], 2)])


def joined(rank: int, port: int) -> list[float]:
    """Join as a process that `megalite lm-eval` runs in, and return the groups' time limits in seconds."""
    dist.barrier()  # the other may still be connecting
    dist.destroy_process_group()
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(place)
    try:
        ctx = join(CPU, 2, tp=2, pp=1)
    finally:
        for name in place:
            del os.environ[name]
    groups = [axis.group for axis in (ctx.world, ctx.tp)]
    return [group._get_backend(CPU).options._timeout.total_seconds() for group in groups if group is not None]


def test_ranks_wait_for_rank_0_for_a_day(pool: WorkerPool) -> None:
    """It downloads data and computes metrics between two requests."""
    assert pool.run(2, joined, reserve_port()) == [[86400.0, 86400.0]] * 2


def test_lm_harness_checks_before_it_reads_weights(tmp_path: Path) -> None:
    hf_models.make_model("gpt2", tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "ckpt")
    for file in (tmp_path / "ckpt").rglob("*.safetensors"):
        file.unlink()

    def run(words: list[str]) -> None:
        run_tasks(lm_eval_parser().parse_args(words))

    arguments = [str(tmp_path / "ckpt"), "--tokenizer", "bytes", "--tasks", "any", "--device", "cpu"]
    with pytest.raises(UserError, match=r"--json .*: is in a folder that does not exist"):
        run([*arguments, "--json", str(tmp_path / "none" / "found.json")])
    with pytest.raises(UserError, match="tokenizer bytes with ids up to 257: .* vocabulary of 90"):
        run(arguments)
    manifest, commit = tmp_path / "ckpt" / "manifest.json", tmp_path / "ckpt" / "COMMIT"
    before = manifest.read_bytes()
    content = json.loads(before)
    content["meta"]["tokenizer_sha256"] = "0" * 64
    manifest.write_text(json.dumps(content))
    old, new = (hashlib.sha256(data).hexdigest() for data in (before, manifest.read_bytes()))
    commit.write_text(commit.read_text().replace(old, new))
    with pytest.raises(UserError, match="tokenizer bytes of SHA-256 .*: the model was trained with the one of .* 0000"):
        run(arguments)
