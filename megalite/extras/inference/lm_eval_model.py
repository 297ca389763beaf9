"""A megalite model behind the interface of EleutherAI's lm-eval (`megalite lm-eval`). Requires lm-eval."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from megalite.core.base.errors import require
from megalite.core.mesh.seeding import derive
from megalite.extras.inference.generate import choose_token
from megalite.extras.inference.score import Scorer
from megalite.extras.tasks.writing import Request
from megalite.runtime.data.tokenizer import Tokenizer

_MAX_GEN_TOKS = 256
"""Default of lm-eval's HFLM, for tasks that do not set it."""
_GREEDY = {"do_sample": False, "temperature": 0.0, "top_k": 0, "top_p": 1.0}


class HarnessLM(TemplateLM):
    """Answers lm-eval's requests on rank 0; through `scorer` all ranks take part.

    Contexts that are too long are truncated on the left; contexts and continuations are separated as in lm-eval's HFLM.

    Args:
        scorer: model in the layout of the ranks.
        tokenizer: its tokenizer, with an end of text, and for `bos` with a beginning.
        max_length: maximum number of tokens that the model sees.
        bos: whether every context begins with the tokenizer's beginning of text. If not, an empty context is the end of
            the previous text, as in training.
        seed: seed of sampled text.
    """

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer, max_length: int, bos: bool = False, seed: int = 0) -> None:
        super().__init__()
        self.scorer = scorer
        self.max_length = max_length
        self.bos = bos
        self._text = tokenizer
        start = tokenizer.bos_id if bos else tokenizer.eos_id
        assert start is not None
        assert tokenizer.eos_id is not None
        self._start, self._eos = start, tokenizer.eos_id
        device = scorer.ctx.device
        self._generator = torch.Generator(device).manual_seed(derive(seed, "generate") >> 65)

    @property
    def eot_token_id(self) -> int:
        return self._eos

    @property
    def prefix_token_id(self) -> int:
        return self._start

    @property
    def tokenizer_name(self) -> str:
        return self._text.sha256

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the ids of a text, after the beginning of text if contexts have one."""
        ids = self._text.encode(string)
        return [self._start, *ids] if self.bos and add_special_tokens is not False else ids

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Score the second list of ids of each request after the first."""
        rows = []
        for _, context, continuation in requests:
            n = len(continuation)
            rule = f"must have 1 to {self.max_length} tokens (--max-length)"
            require(0 < n <= self.max_length, f"a continuation of {n} tokens", rule, "leave the task out")
            # A context of spaces only is empty: they were moved to the continuation.
            rows.append((((context or [self._start]) + continuation)[-self.max_length - 1 :], n))
        return self._in_batches(rows, lambda row: len(row[0]), self.scorer.score, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts, each token once, in windows with as much context as fits."""
        owners, windows = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                context, continuation = make_disjoint_window(window)
                owners.append(number)
                windows.append((None, context, continuation))
        totals = [0.0] * len(requests)
        for number, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm)):
            totals[number] += logprob
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue contexts until a stop text, the end of text, or the number of tokens that the task allows."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        texts = [""] * len(requests)
        for options, numbers in groups.items():
            until, most, choose = self._options(json.loads(options))
            contexts = [self.tok_encode(requests[n].args[0])[-(self.max_length - most) :] for n in numbers]
            answer = partial(self._write, until=until, most=most)
            if choose is not None:
                answer = partial(self._continue, until=until, most=most, choose=choose)
            for number, text in zip(numbers, self._in_batches(contexts, len, answer, disable_tqdm)):
                texts[number] = text
        return texts

    def _options(self, settings: dict[str, Any]) -> tuple[list[str], int, Callable[[torch.Tensor], int] | None]:
        """Read a task's generation options: stop texts, most new tokens, and how a token is drawn (None: greedy)."""
        until, options = settings.pop("until", None) or [], dict(_GREEDY)
        names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
        limits = [settings.pop(name) for name in names if name in settings]
        most = int(limits[0]) if limits else _MAX_GEN_TOKS
        unknown = sorted(set(settings) - set(options))
        rule = f"is not among {', '.join([*options, 'until', names[0]])}"
        require(not unknown, f"generation options {', '.join(unknown)} of the task", rule, "leave the task out")
        rule = f"leave no room for a context in {self.max_length} tokens"
        require(most < self.max_length, f"{most} new tokens", rule, "raise --max-length, or set max_gen_toks lower")
        options |= settings
        greedy = not options["do_sample"] if "do_sample" in settings else options["temperature"] == 0
        temperature = float(options["temperature"]) or 1.0

        def choose(logits_V: torch.Tensor) -> int:
            top_k, top_p = int(options["top_k"] or 0), float(options["top_p"])
            return int(choose_token(logits_V, temperature, top_k, top_p, self._generator))

        return [until] if isinstance(until, str) else until, most, None if greedy else choose

    def _write(self, contexts: Sequence[list[int]], until: list[str], most: int) -> list[str]:
        """Continue a batch greedily."""
        stops = tuple(filter(None, until))
        return self.scorer.write([Request(ids or [self._start], most, stops) for ids in contexts], self._text)

    def _continue(
        self, contexts: Sequence[list[int]], until: list[str], most: int, choose: Callable[[torch.Tensor], int]
    ) -> list[str]:
        """Continue a batch by drawing tokens; each is computed from the whole text before it."""
        new: list[list[int]] = [[] for _ in contexts]
        unfinished = list(range(len(contexts)))
        for _ in range(most):
            if not unfinished:
                break
            logits_BV = self.scorer.next_logits([(contexts[i] or [self._start]) + new[i] for i in unfinished])
            for i, logits_V in zip(tuple(unfinished), logits_BV):
                new[i].append(choose(logits_V[: self._text.vocab_size]))
                if new[i][-1] == self._eos or any(stop in self._text.decode(new[i]) for stop in until if stop):
                    unfinished.remove(i)
        texts = [self._text.decode(ids[:-1] if ids[-1:] == [self._eos] else ids) for ids in new]
        for stop in filter(None, until):
            texts = [text.split(stop)[0] for text in texts]
        return texts

    def _in_batches(
        self, rows: list[Any], size: Callable[[Any], int], answer: Callable[[list[Any]], list[Any]], quiet: bool
    ) -> list[Any]:
        """Answer rows of similar length together, the longest first, and return the answers in the rows' order."""
        order = sorted(range(len(rows)), key=lambda i: -size(rows[i]))
        answers: list[Any] = [None] * len(rows)
        with tqdm(total=len(rows), disable=quiet or None) as bar:
            for first in range(0, len(rows), self.scorer.max_rows):
                numbers = order[first : first + self.scorer.max_rows]
                for number, result in zip(numbers, answer([rows[i] for i in numbers])):
                    answers[number] = result
                bar.update(len(numbers))
        return answers
