"""`megalite generate --chat`: a conversation with a model, in the terminal or through a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalite.core.base.errors import UserError, printable
from megalite.extras.inference.generate import Sampling, new_tokens
from megalite.extras.inference.load import Model
from megalite.runtime.data.chats.chat import ControlWords, turn_ends
from megalite.runtime.data.chats.find_template import find_template, make_template
from megalite.runtime.data.chats.template import ChatTemplate, Renderer, TemplateFailure
from megalite.runtime.data.tokenizer import Tokenizer
from megalite.runtime.data.tokenizer_files import read_json

_HELP = "A line is a turn. /new begins a new conversation, Ctrl-D ends."


@dataclass
class Conversation:
    """The turns so far, and the model that answers.

    Attributes:
        model, tokenizer: what answers.
        template: how turns are written.
        sampling: how answers are drawn.
        seed: seed of the next answer.
        messages: the turns.
    """

    model: Model
    tokenizer: Tokenizer
    template: ChatTemplate
    sampling: Sampling
    seed: int
    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._renderer, self._words = Renderer(self.template), ControlWords(self.tokenizer, self.template)
        ends = {*turn_ends(self.tokenizer).values(), self.tokenizer.eos_id}
        self._ends = {end for end in ends if end is not None}

    def answer(self, text: str) -> Iterator[str]:
        """Add a turn of the user; yield the answer in pieces, and add it.

        Raises:
            UserError: the template does not write the conversation, or the model does not know its tokens.
        """
        self.messages.append({"role": "user", "content": text})
        try:
            rendered = self._renderer.prompt(self._words.hide(self.messages))
        except TemplateFailure as e:
            raise UserError("--chat", str(e), "give another --chat-template") from None
        prompt = self._words.encode(self.tokenizer, rendered)[0]
        if max(prompt) >= self.model.cfg.vocab:
            rule = f"a token id {max(prompt)} is outside the model's vocabulary of {self.model.cfg.vocab}"
            raise UserError("--chat", rule, "use the tokenizer that the model was trained with")
        ids: list[int] = []
        written = ""
        for new in new_tokens(self.model, prompt, self.sampling, self.seed, self._ends):
            ids.append(new)
            decoded = self.tokenizer.decode(ids)
            # A character may take several tokens.
            if not decoded.endswith("\ufffd"):
                yield decoded[len(written) :]
                written = decoded
        whole = self.tokenizer.decode(ids)
        yield whole[len(written) :]
        self.messages.append({"role": "assistant", "content": whole.strip()})
        self.seed += 1


def begin(model: Model, option: str | None, system: str | None, sampling: Sampling, seed: int) -> Conversation:
    """Begin a conversation.

    Args:
        model: model with a tokenizer.
        option: `--chat-template`; by default that of the training, else the one in the tokenizer's folder.
        system: text of a system turn.
        sampling, seed: how answers are drawn.
    """
    tokenizer = model.tokenizer
    assert tokenizer is not None
    if option is None and model.chat_template is not None:
        config = read_json(Path(tokenizer.path).with_name("tokenizer_config.json")) if tokenizer.kind != "bytes" else {}
        template = make_template(model.chat_template, model.chat_template, "of the checkpoint", tokenizer, config)
    else:
        template = find_template(option, tokenizer)
    messages = [{"role": "system", "content": system}] if system else []
    return Conversation(model, tokenizer, template, sampling, seed, messages)


def talk(conversation: Conversation, prompt: str) -> None:
    """Answer the prompt, if there is one; else the lines of standard input, until it ends."""
    system = list(conversation.messages)
    for line in [prompt] if prompt else _lines():
        if line.strip() == "/new":
            conversation.messages = list(system)
            continue
        for piece in conversation.answer(line):
            print(printable(piece, keep="\n\r\t"), end="", flush=True)
        print(flush=True)


def _lines() -> Iterator[str]:
    """Yield the lines of a terminal, with a prompt and editing, or of a pipe."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin if line.strip())
        return
    import readline  # noqa: F401  (input() then edits lines and remembers them)

    print(_HELP, file=sys.stderr)
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return
        if line.strip():
            yield line
