"""Conversations for tests, in all forms."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]


def words(rng: random.Random) -> str:
    return "".join(rng.choice("abc é") for _ in range(rng.randint(1, 30))) + "."


def conversations(seed: int, count: int) -> list[Record]:
    """In all forms, some of several turns, some of answers that are not learned; plain text among them."""
    rng, out = random.Random(seed), []
    for number in range(count):
        question, answer = words(rng), words(rng)
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}] * rng.randint(1, 3)
        forms: list[Record] = [
            {"messages": turns, "id": number},
            {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]},
            {"messages": [*turns[:2], turns[0], {**turns[1], "weight": 0}], "system": words(rng)},
            {"prompt": question, "completion": answer},
            {"instruction": question, "input": words(rng), "output": answer},
            {"text": answer},
        ]
        out.append(forms[number % len(forms)])
    return out


def lines(records: Sequence[Record]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)
