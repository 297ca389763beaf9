"""Twelve conversations as people have them, in the chat templates of the field: text and learned tokens, or an error.

The text is that of transformers' `apply_chat_template` of the messages as they should be, and what is learned is found
in it by an expression per template. The templates of the table in `tests/data` were written anew. TRL's package has
published ones, and twins with its own marks of answers: `.ci/peers.sh` tests with them.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from copy import deepcopy
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from megalite.runtime.data.chats.chat import ChatEncoder
from megalite.runtime.data.chats.messages import BadConversation
from megalite.runtime.data.chats.named_templates import MARK, NAMED, read_named
from megalite.runtime.data.chats.template import ChatTemplate, TemplateFailure
from megalite.runtime.data.tokenizer import Tokenizer, load_tokenizer
from tests.unit.extras.prepare.chats import chat, control, save_bytes

chat_utils = pytest.importorskip("transformers.utils.chat_template_utils")
TABLE: dict[str, dict[str, Any]] = yaml.safe_load(Path("tests/data/chat_templates.yaml").read_text(encoding="utf-8"))
TABLE.pop("refusals")
TOKENS = {"bos_token": "<B>", "eos_token": "<E>"}
NOW = datetime(2026, 2, 3, 4, 5)
_CONTROL = re.compile(
    r"<\|[\w ./]+\|>|<｜[\w▁]+｜>|\[/?[A-Z_]{3,}\]|<(?:start|end)_of_\w+>|\[\|endofturn\|\]|<\w*\|\w*>"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "rain",
        "description": "Millimeters of rain.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string", "description": "Where."}}},
    },
}


class Conversation(NamedTuple):
    """A record as people have it, and what it means.

    Attributes:
        record: the record.
        messages, tools: what a template is given.
        unlearned: numbers of the answers, from 0, that are not learned.
    """

    record: dict[str, Any]
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    unlearned: tuple[int, ...] = ()


def calling(*towns: str, text: bool = False, content: str | None = "") -> dict[str, Any]:
    calls = [
        {"id": f"call{town:_<5}", "type": "function", "function": {"name": "rain", "arguments": {"town": town}}}
        for town in towns
    ]
    for call in calls if text else []:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])  # type: ignore[index]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(town: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call{town:_<5}", "name": "rain", "content": content}


def as_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose calls have their arguments as JSON in a text, as services write them."""
    messages = deepcopy(messages)
    for call in (call for message in messages for call in message.get("tool_calls", ())):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return messages


def conversations(words: tuple[str, ...]) -> dict[str, Conversation]:
    """Return the twelve; `words` are the control tokens of a template."""
    plain = chat(("user", "Quid?"), ("assistant", "Alpha one."), ("user", "Ubi?"), ("assistant", "Beta two."))
    question, answer, more, last = plain
    system = chat(("system", "Be brief."))
    called = [question, calling("Wels"), result("Wels", "7 mm"), answer]
    function = {"name": "rain", "arguments": '{"town": "Wels"}'}
    old = [question, {"role": "assistant", "content": None, "function_call": function}]
    old += [{"role": "function", "name": "rain", "content": "7 mm"}, answer]
    new = deepcopy(called)
    new[1]["content"] = None
    del new[1]["tool_calls"][0]["id"], new[2]["tool_call_id"]
    thinking = [question, {**answer, "reasoning_content": "Gamma."}, more, {**last, "reasoning_content": "Delta."}]
    nulls = dict.fromkeys(("name", "tool_calls", "function_call", "reasoning_content", "weight", "tool_call_id"))
    attacked = [*chat(("user", f"Quid? {' '.join(words)}")), *plain[1:]]
    long = [*system, question, calling("Wels", "Graz"), result("Wels", "7 mm"), result("Graz", "9 mm"), answer, more]
    long += [calling("Linz"), result("Linz", "5 mm"), last]
    several = [*plain[:2], *chat(("assistant", "Epsilon three.")), *plain[2:]]
    empty = [question, {**answer, "content": ""}, more, last]
    return {
        "plain": Conversation({"messages": plain}, plain),
        "system": Conversation({"messages": [*system, *plain]}, [*system, *plain]),
        "tools": Conversation({"messages": called, "tools": json.dumps([TOOL])}, called, [TOOL]),
        "calls": Conversation({"messages": as_text(called)}, called),
        "weight": Conversation({"messages": [question, {**answer, "weight": 0}, more, last]}, plain, unlearned=(0,)),
        "function_call": Conversation({"messages": old, "functions": [TOOL["function"]]}, new, [TOOL]),
        "reasoning": Conversation({"messages": thinking}, thinking),
        "nulls": Conversation({"messages": [{**nulls, **turn} for turn in plain], "tools": None}, plain),
        "empty": Conversation({"messages": empty}, empty),
        "special": Conversation({"messages": attacked}, attacked),
        "two answers": Conversation({"messages": several}, several),
        "results": Conversation({"messages": as_text(long), "tools": [TOOL]}, long, [TOOL]),
    }


NAMES = tuple(conversations(()))


class Written(NamedTuple):
    text: str
    learned: str
    rest: str


def split(text: str, spans: Iterable[tuple[int, int]]) -> Written:
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    pieces = [text[first:end] for first, end in zip(edges, edges[1:])]
    return Written(text, "".join(pieces[1::2]), "".join(pieces[::2]))


class Clock(datetime):
    """One for transformers and us: midnight may come between them."""

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return NOW


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_utils, "datetime", Clock)


def rendered(source: str, conversation: Conversation) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Yield what transformers writes of each form of a conversation that a template accepts, and what that marks.

    Forms are null content as given or empty, and arguments as objects or as text. One of which Python's own form of a
    value, or JSON in JSON, is written, is not accepted.
    """
    marked = MARK.search(source) is not None
    for turns in (conversation.messages, [{**t, "content": t["content"] or ""} for t in conversation.messages]):
        for messages in (turns, as_text(turns)):
            try:
                (text,), spans = chat_utils.render_jinja_template(
                    [messages],
                    chat_template=source,
                    tools=conversation.tools,
                    return_assistant_tokens_mask=marked,
                    **TOKENS,
                )
            except Exception:  # of any kind: the template decides
                continue
            if not any(wrong in text for wrong in ("{'town'", '"{\\"town', "None")):
                yield text, spans[0] if marked else []


def by_expression(answers: str, source: str, conversation: Conversation) -> Written | None:
    """Return what transformers writes, and the answers that an expression finds; None where the template fails."""
    for text, _ in rendered(source, conversation):
        found = [m.span(1) for m in re.finditer(answers, text, re.DOTALL)]
        return split(text, [span for n, span in enumerate(found) if n not in conversation.unlearned])
    return None


def ours(tokenizer: Tokenizer, encoder: ChatEncoder, record: dict[str, Any]) -> Written | str:
    """Return what is written and learned, or the error."""
    try:
        document = encoder.encode(json.dumps(record).encode())
    except (BadConversation, TemplateFailure) as e:
        return str(e)
    parts = (document.ids, document.ids[document.mask > 0], document.ids[document.mask == 0])
    return Written(*(tokenizer.decode(part.tolist()) for part in parts))


@cache
def words_of(source: str) -> tuple[str, ...]:
    return tuple(sorted({*_CONTROL.findall(source), *TOKENS.values()}))


def encoder_of(source: str, folder: Path) -> tuple[Tokenizer, ChatEncoder]:
    """Return a byte-level tokenizer with the control tokens of a template, and what encodes conversations with it."""
    tokenizer = load_tokenizer(save_bytes(folder, TOKENS, *map(control, words_of(source))))
    return tokenizer, ChatEncoder(tokenizer, ChatTemplate(source, source, "t", TOKENS, NOW), None)


@pytest.mark.parametrize("name", TABLE)
def test_text_and_answers_or_one_clear_refusal(tmp_path: Path, name: str) -> None:
    row = TABLE[name]
    source = read_named(name) if name in NAMED else row["template"]
    tokenizer, encoder = encoder_of(source, tmp_path / "t")
    refused = {}
    for what, conversation in conversations(words_of(source)).items():
        got = ours(tokenizer, encoder, conversation.record)
        if isinstance(got, str):
            refused[what] = got
        elif what != "special":
            assert got == by_expression(row["answers"], source, conversation), what
        else:  # what the user writes would be found as well
            harmless = by_expression(row["answers"], source, conversations(())["special"])
            assert harmless is not None
            assert (got.text, got.learned) == (next(rendered(source, conversation))[0], harmless.learned)
    expected = row.get("refused", {})
    assert refused.keys() == expected.keys()
    for what, rule in expected.items():
        assert rule in refused[what], what


TRL = Path(spec.origin).parent / "chat_templates" if (spec := importlib.util.find_spec("trl")) and spec.origin else None
PUBLISHED = sorted(TRL.glob("*.jinja")) if TRL else []


# Spaces after an answer, which are not learned here, and what a prompt ends in, which TRL marks in some templates.
_AROUND = re.compile(r"\s+|<\|start\|>assistant|<｜Assistant｜>|</?think>")


@pytest.mark.skipif(TRL is None, reason="TRL is not installed (.ci/peers.sh tests with it)")
def test_the_templates_that_trl_has_published(tmp_path: Path) -> None:
    """Answers are those that TRL marks. Refused is what loses something, is unclear, or fails in transformers, too."""
    checked = Counter[str]()
    for path in PUBLISHED:
        source, twin = path.read_text(encoding="utf-8"), path.with_stem(f"{path.stem}_training")
        marks = twin.read_text(encoding="utf-8") if twin.exists() else source
        tokenizer, encoder = encoder_of(source, tmp_path / path.stem)
        for what, conversation in conversations(words_of(source)).items():
            got, where = ours(tokenizer, encoder, conversation.record), f"{path.stem}: {what}"
            texts = [text for text, _ in rendered(source, conversation)]
            if isinstance(got, str):
                assert re.search("omits |its answer is unclear", got) or not texts, f"{where}: {got}"
                continue
            assert got.text in texts, where
            checked["text"] += 1
            for text, spans in rendered(marks, conversation):
                if text == got.text and MARK.search(marks) and not conversation.unlearned:
                    assert _AROUND.sub("", got.learned) == _AROUND.sub("", split(text, spans).learned), where
                    checked["answers"] += 1
    # TRL 1.16 has 72 templates: 546 texts and 411 answers.
    assert checked["text"] > 400
    assert checked["answers"] > 300
