"""Loss and perplexity of a model in one process, on token files, conversations and text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megalite.core.base.errors import UserError
from megalite.core.rows import IGNORE
from megalite.extras.inference.load import Model
from megalite.runtime.data import IndexedDataset, LossMask, PackedDataset, Rows, mask_path
from megalite.runtime.data.documents import BadRecord, expand_inputs, parse, read_chunks
from megalite.runtime.data.tokenizer import Tokenizer


def evaluate_data(model: Model, prefix: str, limit: int) -> dict[str, Any]:
    """Evaluate a model on up to `limit` tokens of a data set; returns the figures that `megalite evaluate` prints."""
    if mask_path(prefix).exists():
        (loss, count), answers = chat_loss(model, prefix, limit)
        return _result(prefix, model.step, count, loss, answers=answers)
    loss, count = mean_loss(model, tokens_of(prefix, limit))
    return _result(prefix, model.step, count, loss)


def evaluate_text(model: Model, path: str, key: str, limit: int) -> dict[str, Any]:
    """Evaluate a model on up to `limit` tokens of text files, like `evaluate_data`."""
    assert model.tokenizer is not None
    ids, num_bytes = encode_text(model.tokenizer, expand_inputs([path], "--text"), key, limit)
    loss, count = mean_loss(model, ids)
    return _result(path, model.step, count, loss, num_bytes)


def together(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the results of several sources, weighted by their tokens."""
    loss, count = _mean([(r["loss"], r["tokens"]) for r in results])
    answers = _mean([(r["answer_loss"], r["answer_tokens"]) for r in results if "answer_loss" in r])
    return _result("all", results[0]["step"], count, loss, sum(r.get("bytes", 0) for r in results), answers)


def _mean(parts: list[tuple[float, int]]) -> tuple[float, int]:
    """Combine means over numbers of tokens."""
    count = sum(n for _, n in parts)
    return sum(mean * n for mean, n in parts) / max(count, 1), count


def _result(
    source: str, step: int | None, count: int, loss: float, num_bytes: int = 0, answers: tuple[float, int] = (0.0, 0)
) -> dict[str, Any]:
    result = {"source": source, "step": step, "tokens": count, "loss": loss}
    if answers[1]:
        result |= {"answer_tokens": answers[1], "answer_loss": answers[0]}
    if num_bytes:
        result |= {"bytes": num_bytes, "bits_per_byte": loss * count / num_bytes / math.log(2)}
    return result | {"perplexity": math.exp(loss)}


@torch.no_grad()
def mean_loss(model: Model, ids: np.ndarray, batch: int = 8) -> tuple[float, int]:
    """Compute the mean next-token cross-entropy over a stream of ids, in windows of the training length.

    Windows do not overlap: each token after the first is predicted once, from its own window.

    Returns:
        (mean loss, number of predicted tokens)
    """
    device, seq = next(model.stage.parameters()).device, model.cfg.seq_len
    if len(ids) < 2:
        raise UserError(f"{len(ids)} tokens", "an evaluation predicts each token from those before it", "use more text")
    if int(ids.max()) >= model.cfg.vocab:
        rule = f"must be below the model's vocabulary of {model.cfg.vocab}"
        raise UserError(f"token id {int(ids.max())}", rule, "use the tokenizer that the model was trained with")
    total, count = 0.0, len(ids) - 1
    whole = count // seq
    windows = [ids[i * seq : i * seq + seq + 1] for i in range(whole)]
    groups = [np.stack(windows[i : i + batch]) for i in range(0, whole, batch)]
    if count > whole * seq:
        groups.append(ids[None, whole * seq :])
    for group in groups:
        tokens = torch.from_numpy(group.astype(np.int64)).to(device)
        logits = model.logits(tokens[:, :-1]).float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        total += loss.item()
    return total / count, count


@torch.no_grad()
def chat_loss(model: Model, prefix: str, limit: int, batch: int = 8) -> tuple[tuple[float, int], tuple[float, int]]:
    """Compute the mean cross-entropy over the tokens of separate conversations, and over those of their answers.

    Conversations longer than the training length are truncated, as in training.

    Args:
        prefix: prefix of data with a `PREFIX.mask.bin`.
        limit: number of tokens after which to stop.

    Returns:
        (mean loss, number of predicted tokens) of all tokens, and of the answers.
    """
    device, indexed = next(model.stage.parameters()).device, IndexedDataset(prefix)
    answers, size = LossMask(indexed, "answers"), model.cfg.seq_len
    everything = LossMask(indexed, "all")
    data = PackedDataset(indexed, size, everything, shuffle=False, vocab_size=model.cfg.vocab, split="all")
    sums, counts = np.zeros(2), np.zeros(2, np.int64)
    for first in range(0, len(data), batch):
        packs = range(first, min(first + batch, len(data)))
        rows = Rows.stack([data.sample(i) for i in packs])
        marked = [np.concatenate([answers.of(d)[1 : data.places[d] + 1] for d in data.documents_at(i)]) for i in packs]
        of_answers = np.stack([np.pad(marks, (0, size - len(marks))) for marks in marked])
        tokens, starts, targets = (torch.from_numpy(x).to(device) for x in (rows.inputs, rows.starts, rows.targets))
        logits = model.logits(tokens, starts).float().flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="none")
        losses = loss.cpu().double().numpy().reshape(rows.targets.shape)
        for i, counted in enumerate((rows.targets >= 0, of_answers)):
            sums[i] += losses[counted].sum()
            counts[i] += counted.sum()
        if counts[0] >= limit:
            break
    (loss, answer_loss), (tokens, answer_tokens) = (sums / np.maximum(counts, 1)).tolist(), counts.tolist()
    return (loss, tokens), (answer_loss, answer_tokens)


def encode_text(tokenizer: Tokenizer, paths: Sequence[Path], key: str, limit: int) -> tuple[np.ndarray, int]:
    """Encode the documents of text files, separated by the end-of-text id, up to `limit` ids.

    Returns:
        (ids [at most limit], number of bytes of the UTF-8 text that they encode)
    """
    ids: list[int] = []
    num_bytes = 0
    for text in (text for path in paths for chunk in read_chunks(path, key) for text in parse(chunk, key)):
        if isinstance(text, BadRecord):
            raise text.error(skippable=False)
        if ids and tokenizer.eos_id is not None:
            ids.append(tokenizer.eos_id)
        document = tokenizer.encode(text)
        cut = document[: max(limit - len(ids), 0)]
        num_bytes += len((text if len(cut) == len(document) else tokenizer.decode(cut)).encode())
        ids += cut
        if len(ids) >= limit:
            break
    return np.array(ids[:limit], dtype=np.int64), num_bytes


def tokens_of(prefix: str, limit: int) -> np.ndarray:
    """Read the first `limit` tokens of a data set, documents concatenated."""
    data = IndexedDataset(prefix)
    return data.tokens(0, min(limit, data.num_tokens)).astype(np.int64)
