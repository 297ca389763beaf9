"""Pairs of answers to one prompt as training data: each record becomes two conversations, the preferred one first.

A record is `{"prompt", "chosen", "rejected"}`, texts or lists of messages, or `{"chosen", "rejected"}`, two
conversations whose prompt is the turns that they have in common. Only what follows the prompt is learned.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from megalite.extras.prepare.chat import ChatEncoder, EncodedRecord
from megalite.extras.prepare.messages import BadConversation


class PairEncoder(ChatEncoder):
    """Encode the pairs of a chunk."""

    def documents(self, line: bytes) -> list[EncodedRecord]:
        try:
            record = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as e:
            raise BadConversation(f"does not parse as JSON ({e})") from e
        prompt, answers = _parts_of(record)
        rest = {name: value for name, value in record.items() if name in ("system", "tools", "functions")}
        pair = [self.encode(json.dumps({**rest, "messages": [*prompt, *answer]}).encode()) for answer in answers]
        if np.array_equal(pair[0].ids, pair[1].ids):
            raise BadConversation("chosen and rejected are the same, so nothing to prefer")
        return pair


def _parts_of(record: Any) -> tuple[list[Any], list[list[Any]]]:
    """Return the prompt's messages, of which nothing is learned, and those of the two answers."""
    if not isinstance(record, dict) or not {"chosen", "rejected"} <= record.keys():
        raise BadConversation("the record has no chosen and rejected")
    answers = [_messages(record[name], name, "assistant") for name in ("chosen", "rejected")]
    if record.get("prompt") is not None:
        prompt = _messages(record["prompt"], "prompt", "user")
        if all(answer[: len(prompt)] == prompt for answer in answers):
            # Data sets with both a prompt and whole conversations.
            answers = [answer[len(prompt) :] for answer in answers]
    else:
        same = [a == b for a, b in zip(*answers)]
        common = same.index(False) if False in same else len(same)
        prompt, answers = answers[0][:common], [answer[common:] for answer in answers]
        if not prompt:
            raise BadConversation("chosen and rejected have no turn in common, and there is no prompt")
    if not all(answers):
        raise BadConversation("chosen or rejected has no turn after the prompt")
    return [_unlearned(message) for message in prompt], answers


def _messages(value: Any, name: str, role: str) -> list[Any]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise BadConversation(f"{name} must be a text, or a list of messages that is not empty")
    return value


def _unlearned(message: Any) -> Any:
    is_answer = isinstance(message, dict) and message.get("role", message.get("from")) in ("assistant", "gpt")
    return {**message, "weight": 0} if is_answer else message
