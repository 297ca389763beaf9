"""Pairs of answers to one prompt as training data: each record becomes two conversations, the preferred one first.

A record is `{"prompt", "chosen", "rejected"}`, texts or lists of messages, or `{"chosen", "rejected"}`, two
conversations whose prompt is the turns that they have in common; so it is where there is a prompt besides. Only what
follows the prompt is learned.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from megalite.runtime.data.chats.chat import ChatEncoder, EncodedRecord
from megalite.runtime.data.chats.messages import BadConversation, messages_of

_SAME = "chosen and rejected are the same, so nothing to prefer"


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
            raise BadConversation(_SAME)
        if record.get("margin") is not None:  # which TRL subtracts in the loss of a reward model
            pair[0] = pair[0]._replace(notes=(*pair[0].notes, "with a margin, which is not used"))
        return pair


def _parts_of(record: Any) -> tuple[list[Any], list[list[Any]]]:
    """Return the prompt's messages, of which nothing is learned, and those of the two answers."""
    if not isinstance(record, dict) or not {"chosen", "rejected"} <= record.keys():
        raise BadConversation("the record has no chosen and rejected")
    answers = [_messages(record[name], name, "assistant") for name in ("chosen", "rejected")]
    if answers[0] == answers[1]:
        raise BadConversation(_SAME)
    same = [a == b for a, b in zip(*answers)]
    common = same.index(False) if False in same else len(same)
    prompt, answers = answers[0][:common], [answer[common:] for answer in answers]
    if record.get("prompt") is not None:
        given = _messages(record["prompt"], "prompt", "user")
        # Data sets with both a prompt and whole conversations name the first turns, or the last one before the answer.
        if given not in (prompt[: len(given)], prompt[-len(given) :]):
            if prompt and _roles(given)[-1] == "user" and _roles(prompt)[0] != "assistant":
                raise BadConversation("prompt is neither first nor last of the turns that chosen and rejected share")
            prompt = given + prompt
    if not prompt:
        raise BadConversation("chosen and rejected have no turn in common, and there is no prompt")
    if not all(answers):
        raise BadConversation("chosen or rejected has no turn after the prompt")
    roles = [_roles([*prompt, *answer]) for answer in answers]
    if any(found[len(prompt)] != "assistant" for found in roles):
        raise BadConversation("chosen or rejected goes on, after what they share, with a turn that is no answer")
    return [_unlearned(*turn) for turn in zip(prompt, roles[0])], answers


def _messages(value: Any, name: str, role: str) -> list[Any]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise BadConversation(f"{name} must be a text, or a list of messages that is not empty")
    return value


def _roles(turns: list[Any]) -> list[str]:
    return [message["role"] for message in messages_of({"messages": turns})]


def _unlearned(turn: Any, role: str) -> Any:
    # A table may hold a turn as text.
    return {**(json.loads(turn) if isinstance(turn, str) else turn), "weight": 0} if role == "assistant" else turn
