"""What a chat template omits from a conversation: tools and calls that the model then never learns about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jinja2

Render = Callable[[Sequence[dict[str, Any]], Any], str]

_REMEDY = "use a template that writes them (--chat-template)"
# What templates raise about messages that they do not expect.
_FAILURES = (jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError)


def find_omission(render: Render, messages: Sequence[dict[str, Any]], tools: Any) -> str | None:
    """Name the tools or calls that a template omits from its text, or a turn whose empty content it writes as "None".

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
    if not (tools or calls or empty):
        return None
    text = render(messages, tools)
    if tools and _without(render, messages, None) == text:
        return f"the chat template omits the tools of the conversation: {_REMEDY}"
    for turn in calls:
        bare = {name: value for name, value in messages[turn].items() if name != "tool_calls"}
        if _without(render, [*messages[:turn], bare, *messages[turn + 1 :]], tools) == text:
            return f"the chat template omits the tool_calls of turn {turn + 1}: {_REMEDY}"
    for turn in empty:
        written = {**messages[turn], "content": ""}
        other = _without(render, [*messages[:turn], written, *messages[turn + 1 :]], tools)
        if other is not None and other.count("None") < text.count("None"):
            return f'the chat template writes the empty content (null) of turn {turn + 1} as "None": {_REMEDY}'
    return None


def _without(render: Render, messages: Sequence[dict[str, Any]], tools: Any) -> str | None:
    try:
        return render(messages, tools)
    except _FAILURES:
        return None
