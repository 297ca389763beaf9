"""Generate text with a model, token by token."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from megalite.core.mesh.seeding import derive
from megalite.extras.inference.cache import Cache
from megalite.extras.inference.load import Model


@dataclass(frozen=True)
class Sampling:
    """How a text is drawn; see `generate`."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float


def generate(
    model: Model,
    prompt: list[int],
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    top_p: float = 1.0,
    stop_id: int | None = None,
) -> list[int]:
    """Continue a prompt.

    Args:
        model: model from `load_model`.
        prompt: token ids, at least one.
        max_new_tokens: maximum number of tokens to add.
        temperature: 0 always takes the most likely token.
        top_k: sample among the k most likely tokens; 0: all.
        seed: seed of the samples; the same seed gives the same text.
        top_p: sample among the most likely tokens that together have this probability (nucleus sampling, Holtzman et
            al. 2020); after top_k.
        stop_id: token that ends the text; not returned.

    Returns:
        The new token ids.
    """
    stops = () if stop_id is None else (stop_id,)
    return list(new_tokens(model, prompt, Sampling(max_new_tokens, temperature, top_k, top_p), seed, stops))


@torch.no_grad()
def new_tokens(
    model: Model, prompt: list[int], sampling: Sampling, seed: int, stop_ids: Collection[int]
) -> Iterator[int]:
    """Yield the new token ids one by one, without the one of `stop_ids` that ends the text. See `generate`."""
    device, most = next(model.stage.parameters()).device, model.cfg.positions
    ids = list(prompt)
    generator = torch.Generator(device).manual_seed(derive(seed, "generate") >> 65)
    cache = Cache.of(model, min(len(ids) + sampling.max_new_tokens, most)) if len(ids) <= most else None
    for _ in range(sampling.max_new_tokens):
        if cache is not None and len(ids) <= most:
            logits = cache.logits(ids[cache.length :])
        else:
            # The window slides once the text is longer than the model's positions; every token is recomputed.
            logits = model.logits(torch.tensor([ids[-most:]], device=device))[0, -1]
        logits = logits[: model.words].float()
        new = int(choose_token(logits, sampling.temperature, sampling.top_k, sampling.top_p, generator))
        if new in stop_ids:
            return
        ids.append(new)
        yield new


def choose_token(
    logits_V: torch.Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator
) -> torch.Tensor:
    """Choose the next token, 0-dim, from fp32 logits, which are overwritten. For the arguments see `generate`."""
    if temperature == 0:
        return logits_V.argmax()
    if 0 < top_k < logits_V.numel():
        logits_V[logits_V < logits_V.topk(top_k).values[-1]] = -math.inf
    probabilities, ids = (logits_V / temperature).softmax(0).sort(descending=True, stable=True)
    # The one that reaches top_p is kept.
    probabilities[probabilities.cumsum(0) - probabilities >= top_p] = 0.0
    return ids[torch.multinomial(probabilities, 1, generator=generator)][0]
