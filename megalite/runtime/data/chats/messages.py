"""Records as messages: the forms that people have, JSON that tables hold as text, and turns that are not learned."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, NamedTuple

from megalite.runtime.base.untrusted import require_shallow

_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function_call": "assistant"}
"""ShareGPT's names; user, assistant, system and tool are used as well."""

_LEARNED = ("weight", "loss_weight", "loss", "train", "training", "masked")
"""Keys of messages that say whether a turn is learned: OpenAI's, Mistral's and Together's, then those of trainers."""

_INSTRUCTIONS = (("input", "output"), ("context", "response"))
"""What goes below an instruction, and its answer: Alpaca's names, Dolly's."""

KEYS = (
    *("messages", "conversations", "prompt", "completion", "instruction", "input", "output", "context", "response"),
    *("history", "system", "tools", "functions", "text"),
)
"""Keys of records that are read, unless another one is named."""

Message = dict[str, Any]


class BadConversation(Exception):
    """A record is not a conversation; the message says why."""


class Arguments(dict[str, Any]):
    """Arguments of a call, for templates that write them as JSON or walk through them.

    Attributes:
        text: the same as text, for templates that write them as they are.
        given_as_text: whether the record has that text.
    """

    def __init__(self, value: dict[str, Any], text: str | None = None) -> None:
        super().__init__(value)
        self.text = json.dumps(value, ensure_ascii=False) if text is None else text
        self.given_as_text = text is not None

    def __str__(self) -> str:
        raise TypeError("it writes the arguments of a call as they are, and they are an object")

    def __radd__(self, text: str) -> str:
        return text + str(self)

    def mapped(self, function: Callable[[Any], Any]) -> Arguments:
        """Return it with a function of JSON values applied to both forms."""
        return Arguments(function(dict(self)), function(self.text))


def messages_of(record: dict[str, Any], key: str | None = None) -> list[Message]:
    """Return the messages of a record, each with a role and, as a text or None, a content; without null keys.

    The arguments of calls are `Arguments`. Turns of the assistant that are not to be learned have the weight 0.

    Args:
        key: key of the messages, by default `messages` or `conversations`.

    Raises:
        BadConversation: the record has no known form.
    """
    turns = next((record[name] for name in ([key] if key else ["messages", "conversations"]) if name in record), None)
    if turns is None and key is None and "prompt" in record and "completion" in record:
        turns = []
        for name, role in (("prompt", "user"), ("completion", "assistant")):
            content = record[name]
            turns += content if isinstance(content, list) else [{"role": role, "content": content}]
    if turns is None and key is None and "instruction" in record:
        names = next((names for names in _INSTRUCTIONS if names[1] in record), None)
        turns = names and _instruction(record, *names)
    if turns is None:
        forms = "messages, nor conversations, nor prompt and completion, nor instruction and an answer, nor text"
        raise BadConversation(f"the record has {f'no {key} (--key)' if key else f'neither {forms}'}")
    turns = _from_json(turns)
    if not isinstance(turns, list) or not turns:
        raise BadConversation("the messages must be a list that is not empty")
    messages = [_message(number, _from_json(turn)) for number, turn in enumerate(turns, 1)]
    if messages[0]["role"] != "system" and isinstance(record.get("system"), str) and record["system"]:
        messages.insert(0, {"role": "system", "content": record["system"]})
    return messages


def is_conversation(keys: Container[str]) -> bool:
    """Whether a record with these keys has one of the forms that `messages_of` reads."""
    if "messages" in keys or "conversations" in keys or ("prompt" in keys and "completion" in keys):
        return True
    return "instruction" in keys and any(answer in keys for _, answer in _INSTRUCTIONS)


def tools_of(record: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools of a record, or its `functions` in their place; None for none.

    Raises:
        BadConversation: they are not a list of objects.
    """
    tools = _objects(record.get("tools"), "tools")
    tools = tools or [{"type": "function", "function": f} for f in _objects(record.get("functions"), "functions")]
    return [_with_parameters(tool) for tool in tools] or None


class Form(NamedTuple):
    """Messages in a form that templates need.

    Attributes:
        messages: the messages.
        as_text: whether the arguments of their calls are text, else objects.
        filled: whether empty content (null), which calls have, is an empty text.
    """

    messages: list[Message]
    as_text: bool
    filled: bool


def forms_of(messages: list[Message]) -> Iterator[Form]:
    """Yield messages in all forms, the preferred one first."""
    filled = [{**message, "content": message["content"] or ""} for message in messages]
    for turns in [messages, filled][: 1 + (filled != messages)]:
        yield Form(turns, False, turns is filled)
        if arguments_of(turns):
            yield Form(_with_text_arguments(turns), True, turns is filled)


def _with_text_arguments(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose calls have their arguments as text."""

    def text_of(value: Any) -> Any:
        if isinstance(value, Arguments):
            return value.text
        return {name: text_of(item) for name, item in value.items()} if isinstance(value, dict) else value

    return [{**m, "tool_calls": [text_of(c) for c in m["tool_calls"]]} if "tool_calls" in m else m for m in messages]


def arguments_of(messages: Sequence[Message]) -> list[Arguments]:
    """List the arguments of all calls."""
    found = []
    for call in (call for message in messages for call in message.get("tool_calls", ())):
        inner = call
        while "function" in inner:
            inner = inner["function"]
        found.append(inner["arguments"])
    return found


def _from_json(value: Any) -> Any:
    """Return what a text holds as JSON; the value itself if it is no such text."""
    if not isinstance(value, str):
        return value
    try:
        held = json.loads(value)
        require_shallow(held)
        json.dumps(held, ensure_ascii=False).encode()  # fails for half of a surrogate pair
    except (ValueError, RecursionError):
        return value
    return held


def _objects(value: Any, name: str) -> list[dict[str, Any]]:
    """Return a list of objects, which tables hold as text: all of it, or each."""
    value = _from_json(value)
    if value is None or (isinstance(value, str) and not value.strip()):
        return []
    entries = [_from_json(entry) for entry in value] if isinstance(value, list) else [value]
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in entries):
        raise BadConversation(f"{name} must be a list of objects, or a text with such a list as JSON")
    return entries


def _with_parameters(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a description of a tool with its parameters as an object."""
    parsed: dict[str, Any] = {name: _from_json(tool[name]) for name in ("function", "parameters") if name in tool}
    if isinstance(parsed.get("function"), dict):
        parsed["function"] = _with_parameters(parsed["function"])
    return {**tool, **parsed}


def _instruction(record: dict[str, Any], given: str, answer: str) -> list[Message]:
    """Return the turns of a record with an instruction; `history`, pairs of earlier turns, is LLaMA-Factory's."""
    history = record.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise BadConversation("history must be a list of pairs [instruction, answer]")
    question = record["instruction"]
    if isinstance(question, str) and isinstance(record.get(given), str) and record[given]:
        question = f"{question}\n{record[given]}" if question else record[given]
    pairs = [*history, (question, record[answer])]
    return [{"role": role, "content": content} for pair in pairs for role, content in zip(("user", "assistant"), pair)]


def _message(turn: int, message: Any) -> Message:
    if not isinstance(message, dict):
        raise BadConversation(f"turn {turn} must be an object, it is {type(message).__name__}")
    message = {name: value for name, value in message.items() if value is not None}
    if "from" in message and "role" not in message:
        message = _sharegpt(turn, message)
    if not isinstance(message.get("role"), str):
        raise BadConversation(f"turn {turn} must have a role")
    if message["role"] == "function":
        message["role"] = "tool"
    calls = _objects(message.pop("tool_calls", None), f"the tool_calls of turn {turn}")
    function_call = message.pop("function_call", None)
    if not calls and function_call:
        (function,) = _objects([function_call], f"the function_call of turn {turn}")
        calls = [{"type": "function", "function": function}]
    if calls:
        message["tool_calls"] = [_call(turn, call) for call in calls]
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) and not (content is None and calls):
        raise BadConversation(f"the content of turn {turn} must be text, it is {type(content).__name__}")
    learned = _is_learned(turn, message)
    rest = {name: value for name, value in message.items() if name not in _LEARNED}
    return {**rest, "content": content, **({} if learned else {"weight": 0})}


def _sharegpt(turn: int, message: Message) -> Message:
    role = _ROLES.get(str(message["from"]), message["from"])
    if role not in ("user", "assistant", "system", "tool"):
        known = ", ".join([*_ROLES, "user", "assistant", "system", "tool"])
        raise BadConversation(f"turn {turn} is from {message['from']!r:.40}, and must be from one of {known}")
    value = message.get("value")
    more = {name: value for name, value in message.items() if name not in ("from", "value")}
    if message["from"] == "function_call":
        held = _from_json(value)
        calls = _objects(held if isinstance(held, list) else [held], f"the value of turn {turn} (function_call)")
        return {**more, "role": role, "content": "", "tool_calls": calls}
    return {**more, "role": role, **({} if value is None else {"content": value})}


def _call(turn: int, call: dict[str, Any]) -> dict[str, Any]:
    """Return a call without null keys, and with its arguments as `Arguments`."""
    call = {name: value for name, value in call.items() if value is not None}
    if "function" in call:
        (function,) = _objects([call["function"]], f"the calls of turn {turn}")
        return {**call, "function": _call(turn, function)}
    given = call.get("arguments", "")
    text = given if isinstance(given, str) and given.strip() else None
    arguments = _from_json(given) if text else given or {}
    if not isinstance(arguments, dict):
        rule = f"the arguments of a call in turn {turn} must be a JSON object, or a text with one"
        raise BadConversation(f"{rule}, they are {given!r:.40}")
    return {**call, "arguments": Arguments(arguments, text)}


def _is_learned(turn: int, message: Message) -> bool:
    """Return whether an answer is learned, as keys of its message say in the formats of several services."""
    learned = True
    for name in _LEARNED:
        if (value := message.get(name)) is None:
            continue
        if message["role"] == "assistant" and value not in (0, 1):
            rule = f"turn {turn} has the {name} {value!r:.40}"
            raise BadConversation(f"{rule}, and answers are learned with weight 1, or with 0 not at all")
        if message["role"] != "assistant" and "weight" not in name and bool(value) != (name == "masked"):
            rule = f"turn {turn} ({message['role']}) is to be learned ({name}: {value!r:.40})"
            raise BadConversation(f"{rule}, and only turns of the assistant are")
        learned = learned and bool(value) != (name == "masked")
    if part := next((name for name in ("train_detail", "training_detail") if message.get(name)), None):
        raise BadConversation(f"turn {turn} has {part}, and an answer is learned as a whole or not at all")
    return learned or message["role"] != "assistant"
