"""Chat templates: rendering one in a sandbox, and which characters of the result are answers.

A template comes from a downloaded folder: it is run by jinja2's sandbox, which lets it reach neither attributes nor
modules of Python, in a limited time and memory. The environment is that of transformers (`trim_blocks`,
`lstrip_blocks`, `raise_exception`, `tojson`, `strftime_now`, `{% generation %}`), so that the same template gives the
same text.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import resource
import signal
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from megalite.core.base.errors import UserError
from megalite.runtime.data.chats.named_templates import MARK, fitting_names, read_named
from megalite.runtime.data.chats.omissions import find_omission, find_omitted_content
from megalite.runtime.data.tokenizer import Span

TIME_LIMIT_S = 10.0
"""For all renderings of one conversation."""
_MEMORY_LIMIT = 1 << 30
"""Bytes that a rendering may take; a conversation has far fewer characters."""

# From the end of Unicode's private use area, which no text uses.
_OPEN, _CLOSE = "\U0010ff00", "\U0010ff01"
STAND_INS = range(0x10FF02, 0x10FFFE)
"""Characters that may stand for others until a rendered conversation is encoded."""
RESERVED = re.compile("[\U0010ff00-\U0010fffd]")
"""Characters that neither conversations nor templates may contain."""
_MAX_REPEATED = 1_000_000


_NEXT_HEADER = "writes the header of the next turn after it, whether or not one follows"


class TemplateFailure(Exception):
    """A template does not render a conversation, or its answers cannot be located in the result."""


class _Unclear(TemplateFailure):
    """The answer of a turn, counted from 0, cannot be located."""

    def __init__(self, turn: int, problem: str) -> None:
        rule = f"which tokens of turn {turn + 1} (assistant) are its answer is unclear"
        super().__init__(f"{rule}: the template {problem}")


@dataclass(frozen=True)
class ChatTemplate:
    """A template as text, which every worker process compiles for itself.

    Attributes:
        source: the template.
        served: the template for inference: that of checkpoints and exports.
        where: its file, for messages.
        tokens: names that it may use (`eos_token`) -> control words that they stand for.
        now: what `strftime_now` reports, the same in every process.
    """

    source: str
    served: str
    where: str
    tokens: dict[str, str]
    now: datetime

    @property
    def identity(self) -> str:
        """Hash of all that the text of a conversation depends on."""
        inputs = json.dumps([self.source, self.tokens, self.now.isoformat()], sort_keys=True)
        return hashlib.sha256(inputs.encode()).hexdigest()


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}`: what is between them is an answer."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


class _Sandbox(ImmutableSandboxedEnvironment):
    """An environment without powers and repetitions that could fill the memory in one operation."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("powers are not allowed")
        for value, times in ((left, right), (right, left)):
            if hasattr(value, "__len__") and len(value) * times > _MAX_REPEATED:
                raise SecurityError(f"{times} times a value of length {len(value)} is too much")
        return super().call_binop(context, operator, left, right)


def _environment(now: datetime) -> jinja2.Environment:
    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, **more)

    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = now.strftime
    return environment


class _Timeout(Exception):
    pass


@contextmanager
def _limits() -> Iterator[None]:
    """Limit the processor time, and on Linux the memory, that this process may take."""

    def stop(*_: Any) -> NoReturn:
        raise _Timeout

    previous_handler = signal.signal(signal.SIGPROF, stop)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(OSError):
        mapped = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
        limits = [n for n in (mapped + _MEMORY_LIMIT, soft, hard) if n != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, previous_handler)


class Renderer:
    """Render conversations. For the main thread of a process only: the time limit is a signal.

    Raises:
        UserError: the template does not compile.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self.template, self.marked = template, MARK.search(template.source) is not None
        self._named: dict[str, Renderer] = {}
        if RESERVED.search(template.source):
            raise UserError(template.where, "has characters U+10FF00 to U+10FFFD", "remove them")
        try:
            with _limits():
                self._compiled = _environment(template.now).from_string(template.source)
        except (jinja2.TemplateError, RecursionError, MemoryError, _Timeout) as e:
            rule, remedy = f"does not compile ({e!s:.300})", "correct it, or give --chat-template"
            raise UserError(f"chat template {template.where}", rule, remedy) from e

    def answers(
        self, messages: Sequence[dict[str, Any]], tools: Any, unlearned: Collection[int] = ()
    ) -> tuple[str, list[Span]]:
        """Render a conversation; return the text and its answers, in order, as (first, end) characters.

        Answers are what the template marks. In a template without marks, the answer of a turn is what the conversation
        up to its end adds to the conversation before it and the header of an answer (`add_generation_prompt`).

        Args:
            messages, tools: the conversation.
            unlearned: turns whose answers are left out.

        Raises:
            TemplateFailure: the template fails, is too slow, or its answers cannot be located.
        """
        try:
            with self._guarded():
                if omission := find_omission(self._render, messages, tools):
                    raise TemplateFailure(omission)
                locate = self._by_marks if self.marked else self._by_turns
                text, spans = locate(messages, tools, unlearned)
                if omission := find_omitted_content(self._unmarked, messages, tools, text):
                    raise TemplateFailure(omission)
                return text, spans
        except _Unclear as e:
            raise TemplateFailure(f"{e}; {self._marked_template(messages, tools)}") from None

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            with _limits():
                yield
        except _Timeout:
            raise TemplateFailure(f"the chat template takes more than {TIME_LIMIT_S:g} s") from None
        except MemoryError:
            raise TemplateFailure(f"the chat template takes more than {_MEMORY_LIMIT >> 20} MiB") from None
        except TemplateFailure:
            raise
        except Exception as e:  # the template may do anything that Python can do with a list of messages
            raise TemplateFailure(f"the chat template fails ({type(e).__name__}: {e!s:.300})") from e

    def _render(self, messages: Sequence[dict[str, Any]], tools: Any, header: bool = False) -> str:
        return self._compiled.render(
            **self.template.tokens, messages=list(messages), tools=tools, documents=None, add_generation_prompt=header
        )

    def _unmarked(self, messages: Sequence[dict[str, Any]], tools: Any) -> str:
        return re.sub(f"[{_OPEN}{_CLOSE}]", "", self._render(messages, tools))

    def _by_marks(
        self, messages: Sequence[dict[str, Any]], tools: Any, unlearned: Collection[int]
    ) -> tuple[str, list[Span]]:
        text, spans = self._marks(messages, tools)
        for turn in sorted(unlearned, reverse=True):
            answered = any(message["role"] == "assistant" for message in messages[:turn])
            before = self._marks(messages[:turn], tools)[1] if answered else []
            text_to, to = self._marks(messages[: turn + 1], tools)
            # Those of later turns may be gone from `spans`.
            end = to[-1][1] if to else 0
            if (to, before) != (spans[: len(to)], to[: len(before)]) or text[:end] != text_to[:end]:
                raise _Unclear(turn, "writes this turn differently with and without what follows it")
            spans[len(before) : len(to)] = []
        return text, [(first, end) for first, end in spans if end > first]

    def _marks(self, messages: Sequence[dict[str, Any]], tools: Any) -> tuple[str, list[Span]]:
        text, spans = "", []
        opened: int | None = None
        for piece in re.split(f"([{_OPEN}{_CLOSE}])", self._render(messages, tools)):
            if (piece == _OPEN and opened is not None) or (piece == _CLOSE and opened is None):
                raise TemplateFailure("the chat template has one {% generation %} inside another")
            if piece == _OPEN:
                opened = len(text)
            elif piece == _CLOSE:
                assert opened is not None
                spans.append((opened, len(text)))
                opened = None
            else:
                text += piece
        return text, spans

    def _by_turns(
        self, messages: Sequence[dict[str, Any]], tools: Any, unlearned: Collection[int]
    ) -> tuple[str, list[Span]]:
        text, spans = self._render(messages, tools), []
        for turn, message in enumerate(messages):
            if message["role"] != "assistant" or turn in unlearned:
                continue
            before = self._render(messages[:turn], tools)
            prompt = self._render(messages[:turn], tools, header=True)
            after = self._render(messages[: turn + 1], tools)
            header = prompt.removeprefix(before).strip()
            if not (text.startswith(after) and after.startswith(prompt)):
                raise _Unclear(turn, "writes this turn differently with and without what follows it")
            if header and after[len(prompt) :].rstrip().endswith(header):
                raise _Unclear(turn, _NEXT_HEADER)
            if prompt == before and (problem := self._problem_without_prompt(messages[:turn], tools, before)):
                raise _Unclear(turn, problem)
            spans.append((len(prompt), len(after)))
        return text, spans

    def _problem_without_prompt(self, messages: Sequence[dict[str, Any]], tools: Any, before: str) -> str | None:
        """Say what is learned beside an answer by a template that `add_generation_prompt` does not change.

        Such a template has no header of answers (Llama 2, Mistral), or always writes that of the next turn. An answer
        that nothing can be mistaken for shows which.
        """
        probe = {"role": "assistant", "content": _OPEN}
        alone = self._render([*messages, probe], tools)
        followed = self._render([*messages, probe, {"role": "user", "content": _CLOSE}], tools)
        if not alone.startswith(before) or _OPEN not in alone or _OPEN not in followed:
            return "does not write a plain answer in this place"
        # What comes before the answer may move, as Mistral's tools do, to the last turn of the user.
        if not followed.partition(_OPEN)[2].startswith(alone.partition(_OPEN)[2]):
            return _NEXT_HEADER
        if alone[len(before) : alone.index(_OPEN)].strip():
            return "writes a header for this turn, but not with add_generation_prompt"
        return None

    def _marked_template(self, messages: Sequence[dict[str, Any]], tools: Any) -> str:
        """Advise a named template that renders this conversation, or a file."""
        if self.marked:
            return "give another template: --chat-template FILE"
        marks = "a template with marks, {% generation %}"
        for name in fitting_names(self.template.source):
            if name not in self._named:
                self._named[name] = Renderer(replace(self.template, source=read_named(name), where=name))
            with contextlib.suppress(TemplateFailure):
                self._named[name].answers(messages, tools)
                return f"--chat-template {name} gives {marks}"
        return f"give {marks}: --chat-template FILE"

    def prompt(self, messages: Sequence[dict[str, Any]]) -> str:
        """Render a conversation up to the header of the next answer.

        Raises:
            TemplateFailure: the template fails or is too slow.
        """
        with self._guarded():
            return self._render(messages, None, header=True)
