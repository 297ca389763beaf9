"""What a chat template omits from a conversation, and a model then never learns: content, tools, calls and thoughts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jinja2

Render = Callable[[Sequence[dict[str, Any]], Any], str]

# Names of what an answer was thought out with.
_THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thought", "tool_plan")

_REMEDY = "use a template that writes them (--chat-template)"
# What templates raise about messages that they do not expect.
_FAILURES = (jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError)


def find_omission(render: Render, messages: Sequence[dict[str, Any]], tools: Any) -> str | None:
    """Name the tools, calls or thoughts that a template omits, or a turn whose empty content it writes as "None".

    Something is omitted if the template also accepts the conversation without it, and writes the same text.

    Args:
        render: (messages, tools) to text.
        messages: the turns of a conversation.
        tools: descriptions of tools; None or empty for none.

    Returns:
        What is missing and what to change; None if nothing is.
    """
    calls = [turn for turn, message in enumerate(messages) if message.get("tool_calls")]
    empty = [turn for turn, message in enumerate(messages) if message["content"] is None]
    thoughts = [(turn, name) for turn, message in enumerate(messages) for name in _THOUGHTS if message.get(name)]
    if not (tools or calls or empty or thoughts):
        return None
    text = render(messages, tools)
    if tools and _without(render, messages, None) == text:
        return f"the chat template omits the tools of the conversation: {_REMEDY}"
    for turn in calls:
        given = messages[turn]["tool_calls"]
        bare = {name: value for name, value in messages[turn].items() if name != "tool_calls"}
        if _without(render, [*messages[:turn], bare, *messages[turn + 1 :]], tools) == text:
            return f"the chat template omits the tool_calls of turn {turn + 1}: {_REMEDY}"
        for number in range(len(given) if len(given) > 1 else 0):
            others = {**bare, "tool_calls": given[:number] + given[number + 1 :]}
            if _without(render, [*messages[:turn], others, *messages[turn + 1 :]], tools) == text:
                return f"the chat template omits call {number + 1} of the {len(given)} of turn {turn + 1}: {_REMEDY}"
    bare_calls = [_without_arguments(message) for message in messages]
    if bare_calls != list(messages) and _without(render, bare_calls, tools) == text:
        return f"the chat template omits the arguments of the calls of turn {calls[0] + 1}: {_REMEDY}"
    for turn, name in thoughts:
        # A template may leave out those of earlier turns, as long as it has a place for those of the last one.
        bare = {key: value for key, value in messages[turn].items() if key != name}
        to = _without(render, messages[: turn + 1], tools)
        if to is not None and _without(render, [*messages[:turn], bare], tools) == to:
            return f"the chat template omits the {name} of turn {turn + 1}: {_REMEDY}, or remove this key"
    for turn in empty:
        written = {**messages[turn], "content": ""}
        other = _without(render, [*messages[:turn], written, *messages[turn + 1 :]], tools)
        if other is not None and other.count("None") < text.count("None"):
            return f'the chat template writes the empty content (null) of turn {turn + 1} as "None": {_REMEDY}'
    return None


def find_omitted_content(render: Render, messages: Sequence[dict[str, Any]], tools: Any, text: str) -> str | None:
    """Name a turn whose content a template omits, as templates of vision models do with all that is no list of parts.

    Args:
        render, messages, tools: see `find_omission`.
        text: what the template writes of the conversation.

    Returns:
        What is missing and what to change; None if nothing is.
    """
    at = 0
    for turn, message in enumerate(messages):
        content = (message["content"] or "").strip()
        found = text.find(content, at)
        at = at if found < 0 else found + len(content)
        # One that is not there as it is may be elsewhere, or in another form: that shows without it.
        bare = {**message, "content": ""}
        if found < 0 and _without(render, [*messages[:turn], bare, *messages[turn + 1 :]], tools) == text:
            return f"the chat template omits the content of turn {turn + 1} ({message['role']}): {_REMEDY}"
    return None


def _without_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_bare(call) for call in message["tool_calls"]]}


def _bare(call: Any) -> Any:
    """Return a call with arguments that are empty, but of the same type."""
    if not isinstance(call, dict):
        return call
    if "function" in call:
        return {**call, "function": _bare(call["function"])}
    return {**call, "arguments": "{}" if isinstance(call.get("arguments"), str) else {}}


def _without(render: Render, messages: Sequence[dict[str, Any]], tools: Any) -> str | None:
    try:
        return render(messages, tools)
    except _FAILURES:
        return None
