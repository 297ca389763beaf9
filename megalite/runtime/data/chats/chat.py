"""Conversations as training data: the text of a chat template, and which of its tokens are learned.

A record is `{"messages": [{"role", "content"}]}` (also under `conversations`), ShareGPT's
`{"conversations": [{"from", "value"}]}`, `{"prompt", "completion"}`, texts or lists of messages, Alpaca's
`{"instruction", "input", "output"}`, or Dolly's `{"instruction", "context", "response"}`: see `messages`. `{"text"}` is
plain text, all of which is learned.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.runtime.base.untrusted import require_shallow
from megalite.runtime.data.chats.messages import (
    Arguments,
    BadConversation,
    Form,
    Message,
    arguments_of,
    forms_of,
    messages_of,
    tools_of,
)
from megalite.runtime.data.chats.template import RESERVED, STAND_INS, ChatTemplate, Renderer, TemplateFailure
from megalite.runtime.data.documents import EXCERPT_CHARS, BadRecord, Chunk
from megalite.runtime.data.encode import EncodedChunk
from megalite.runtime.data.tokenizer import Span, Tokenizer, any_of
from megalite.runtime.data.tokens import token_dtype

OTHER = 0
ANSWER = 1
LAST_ANSWER = 2
"""Bytes of `PREFIX.mask.bin`, one per token: not learned; of an answer; of the last answer of its conversation."""

_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|end_of_turn|>", "<|return|>", "</s>")

_MARKER = re.compile(r"<.+>|\[.+\]", re.DOTALL)
_ROLE = re.compile(r"</?(user|assistant|system|human|bot|model|tool)>", re.IGNORECASE)

_KNOWN_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id"}
"""Keys of messages that are used, or that many templates do without."""

_FORMS = {"messages", "conversations", "prompt", "completion", "instruction", "output", "response"}


def turn_ends(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the control tokens that end a turn, with their ids."""
    controls = tokenizer.control_tokens.items()
    return {word: id_ for word, id_ in controls if word in _TURN_ENDS or id_ == tokenizer.eos_id}


def template_words(tokenizer: Tokenizer, source: str) -> list[str]:
    """Return the tokens that a template of this source begins and ends turns with: control tokens, and others it names.

    Not pairs that content has too, such as `<think>` and `</think>`, unless they are named after a role.
    """

    def is_pair(word: str) -> bool:
        twin = f"<{word[2:]}" if word.startswith("</") else f"</{word[1:]}"
        return twin in source or twin in tokenizer.other_tokens

    others = [word for word in tokenizer.other_tokens if word in source and _MARKER.fullmatch(word)]
    return [*tokenizer.control_tokens, *(word for word in others if _ROLE.fullmatch(word) or not is_pair(word))]


class ControlWords:
    """Hide the names of control tokens in the strings of a conversation, so that they stay text.

    Their first characters are replaced by stand-ins until the text is encoded, and so is the beginning of a name at the
    end of a string, which the text after it could complete.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.words = words = template_words(tokenizer, template.source)
        first = sorted({word[0] for word in words})
        self.stand_ins = {chr(code): char for code, char in zip(STAND_INS, first)}
        self._stand_in_of = {char: stand_in for stand_in, char in self.stand_ins.items()}
        beginnings = {word[:n] for word in words for n in range(1, len(word))}
        self._names = re.compile(rf"{any_of(words)}|(?:{any_of(beginnings)})(?=\s*\Z)")
        self._split_at = re.compile(f"({any_of(self.stand_ins)})")

    def hide(self, value: Any) -> Any:
        """Return a value of JSON with the control words in all its strings hidden."""
        if isinstance(value, str):
            hidden, count = self._names.subn(lambda m: self._stand_in_of[m[0][0]] + m[0][1:], value)
            # The result may still hold a shorter name, or one that began inside another.
            return self.hide(hidden) if count else hidden
        if isinstance(value, Arguments):
            return value.mapped(self.hide)
        if isinstance(value, dict):
            return {self.hide(name): self.hide(item) for name, item in value.items()}
        return [self.hide(item) for item in value] if isinstance(value, list) else value

    def encode(self, tokenizer: Tokenizer, text: str) -> tuple[list[int], list[Span]]:
        """Encode a template's text with hidden words in it: ids, and the characters that each covers."""
        ids: list[int] = []
        spans: list[Span] = []
        at = 0
        for piece in self._split_at.split(text):
            if piece in self.stand_ins:
                piece_ids = tokenizer.encode(self.stand_ins[piece])
                piece_spans = [(0, 1)] * len(piece_ids)
            else:
                piece_ids, piece_spans = tokenizer.encode_template(piece) if piece else ([], [])
            ids += piece_ids
            spans += [(at + first, at + end) for first, end in piece_spans]
            at += len(piece)
        return ids, spans


class EncodedRecord(NamedTuple):
    """One document.

    Attributes:
        ids: [n].
        mask: bytes of `PREFIX.mask.bin`, [n].
        text_bytes: size of the text in UTF-8.
        plain: whether it is text without a template.
        notes: what of it is not as given, for the log.
    """

    ids: npt.NDArray[Any]
    mask: npt.NDArray[np.uint8]
    text_bytes: int
    plain: bool = False
    notes: tuple[str, ...] = ()


class ChatEncoder:
    """Encode the conversations of a chunk, each as a document that ends where its template ends."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, key: str | None) -> None:
        self.tokenizer = tokenizer
        self.key = key
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.renderer, self.words = Renderer(template), ControlWords(tokenizer, template)
        self._ends_in_control = re.compile(rf"(?:{any_of(self.words.words)})\Z")
        self._end_follows = re.compile(any_of(turn_ends(tokenizer)))

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        records: list[EncodedRecord] = []
        bad: list[BadRecord] = []
        for where, line in _lines(chunk):
            try:
                records += self.documents(line)
            except (BadConversation, TemplateFailure) as e:
                bad.append(BadRecord(where, str(e), line[: 4 * EXCERPT_CHARS].decode(errors="replace")[:EXCERPT_CHARS]))
        ids = np.concatenate([np.zeros(0, self.dtype), *(record.ids for record in records)])
        mask = np.concatenate([np.zeros(0, np.uint8), *(record.mask for record in records)])
        sizes, text_bytes = [len(record.ids) for record in records], sum(record.text_bytes for record in records)
        notes = Counter(note for record in records for note in record.notes)
        return EncodedChunk(ids, sizes, text_bytes, 0, bad, mask, sum(record.plain for record in records), notes)

    def documents(self, line: bytes) -> list[EncodedRecord]:
        """Encode a line's record: the documents that it becomes. Raises what `encode` does."""
        return [self.encode(line)]

    def encode(self, line: bytes) -> EncodedRecord:
        """Encode one record.

        Raises:
            BadConversation: the record has no known form.
            TemplateFailure: the template does not render it, or its answers cannot be located.
        """
        try:
            text = line.decode("utf-8-sig")
            record = json.loads(text)
            require_shallow(record)
            json.dumps(record, ensure_ascii=False).encode()  # fails for half of a surrogate pair
        except (ValueError, RecursionError) as e:
            raise BadConversation(f"does not parse as JSON ({e})") from e
        if not isinstance(record, dict):
            raise BadConversation("the record must be a JSON object")
        if self.key is None and "text" in record and not _FORMS & record.keys():
            return self._plain_text(record["text"])
        messages = messages_of(record, self.key)
        if not any(message["role"] == "assistant" for message in messages):
            raise BadConversation("the conversation has no assistant turn, so nothing to learn")
        unlearned = {turn for turn, message in enumerate(messages) if message.pop("weight", 1) == 0}
        if not any(m["role"] == "assistant" and turn not in unlearned for turn, m in enumerate(messages)):
            raise BadConversation("no answer of the conversation is to be learned: each has the weight 0")
        given = {"messages": messages, "tools": tools_of(record)}
        if RESERVED.search(json.dumps(given, ensure_ascii=False)):
            raise BadConversation("the conversation has characters U+10FF00 to U+10FFFD")
        rendered, answers, form = self._answers(**self.words.hide(given), unlearned=unlearned)
        if not answers:
            raise TemplateFailure("the chat template marks nothing in this conversation as an answer")
        ids, spans = self.words.encode(self.tokenizer, rendered)
        ends = [(first, self._end(rendered, first, end)) for first, end in answers]
        notes = [*self._notes(messages, unlearned, form)]
        if not all(self._ends_in_control.search(rendered, *answer) for answer in ends):
            notes.append("with an answer that no control token ends, so that the model does not learn to stop there")
        mask = self._mask(rendered, ends, spans)
        return EncodedRecord(np.array(ids, self.dtype), mask, len(rendered.encode()), notes=tuple(notes))

    def _answers(self, messages: list[Message], tools: Any, unlearned: set[int]) -> tuple[str, list[Span], Form]:
        """Render a conversation in the first form that the template accepts."""
        failures = []
        for form in forms_of(messages):
            try:
                return *self.renderer.answers(form.messages, tools, unlearned), form
            except TemplateFailure as e:
                failures.append((form, e))
        # What was found in a text says more than an error of the template, which the form may have caused.
        found = [e for _, e in failures if e.__cause__ is None]
        raise found[0] if found else next(e for form, e in reversed(failures) if not form.as_text)

    def _notes(self, messages: list[Message], unlearned: set[int], form: Form) -> Iterator[str]:
        if unlearned:
            yield "with answers that are not learned, as their weight is 0"
        answers = [m for turn, m in enumerate(messages) if m["role"] == "assistant" and turn not in unlearned]
        if any(not (m["content"] or "").strip() and "tool_calls" not in m for m in answers):
            yield "with an empty answer, of which the end is learned"
        if any(a.given_as_text != form.as_text for a in arguments_of(messages)):
            kind = "text" if form.as_text else "objects"
            yield f"with arguments of calls written as {kind}, as the template needs them"
        if form.filled:
            yield "with empty content (null) beside calls written as an empty text, as the template needs it"
        for name in sorted({name for message in messages for name in message} - _KNOWN_KEYS):
            if not re.search(rf"\b{re.escape(name)}\b", self.renderer.template.source):
                yield f"with {name!r:.40} in messages, which the template does not write"

    def _plain_text(self, text: Any) -> EncodedRecord:
        if not isinstance(text, str) or not text:
            raise BadConversation("the text must be a string that is not empty")
        if self.tokenizer.eos_id is None:
            raise BadConversation("the tokenizer has no known end-of-text token, and plain text must end with one")
        ids = np.array([*self.tokenizer.encode(text), self.tokenizer.eos_id], self.dtype)
        return EncodedRecord(ids, np.full(len(ids), LAST_ANSWER, np.uint8), len(text.encode()), plain=True)

    def _mask(self, text: str, answers: list[Span], spans: list[Span]) -> npt.NDArray[np.uint8]:
        chars = np.zeros(len(text) + 1, np.uint8)
        for first, end in answers:
            chars[first:end] = ANSWER if (first, end) != answers[-1] else LAST_ANSWER
        # A token across the edge of an answer belongs to it, as in transformers.
        bounds = np.array(spans, np.int64).reshape(-1, 2)
        return np.maximum(chars[bounds[:, 0]], chars[np.maximum(bounds[:, 1] - 1, bounds[:, 0])])

    def _end(self, text: str, first: int, end: int) -> int:
        """Return the end of an answer: after the control word that ends the turn, without the spaces after that.

        A template's marks may exclude that word, and a model that does not learn it never stops.
        """
        stripped = first + len(text[first:end].rstrip())
        if self._ends_in_control.search(text, first, stripped):
            return stripped
        follows = self._end_follows.match(text, end)
        return follows.end() if follows else end


def _lines(chunk: Chunk) -> Iterator[tuple[str, bytes]]:
    for number, line in enumerate(chunk.records, chunk.first):
        if line is not None and line.strip():
            yield f"{chunk.path} {chunk.unit} {number}", line
