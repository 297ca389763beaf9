"""Which chat template writes the conversations: a named one, a file, or the one in the tokenizer's folder."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from megalite.core.base.errors import UserError
from megalite.runtime.base.untrusted import MAX_TEMPLATE, BadFile, read_regular
from megalite.runtime.data.chats.named_templates import NAMED, read_named, served_form
from megalite.runtime.data.chats.template import ChatTemplate
from megalite.runtime.data.tokenizer import Tokenizer
from megalite.runtime.data.tokenizer_files import read_json


def find_template(option: str | None, tokenizer: Tokenizer, now: datetime | None = None) -> ChatTemplate:
    """Return the template of `--chat-template`, else of the tokenizer's folder.

    In the folder `chat_template.jinja` comes first, then `chat_template` of tokenizer_config.json: a text, or a list
    of named ones, of which `default` is taken. It is not compiled here, see `Renderer`.

    Args:
        option: a name of `NAMED`, or a file; None: the template of the tokenizer's folder.
        tokenizer: the tokenizer.
        now: see `ChatTemplate`; None: the time of the call.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    folder = Path(tokenizer.path).parent
    config = read_json(folder / "tokenizer_config.json") if tokenizer.kind != "bytes" else {}
    if option is not None and option in NAMED:
        where, source = f"--chat-template {option}", _named(option, tokenizer)
    elif option is not None:
        where = f"--chat-template {option}"
        source = _read_text(Path(option), where)
    elif tokenizer.kind != "bytes" and (folder / "chat_template.jinja").exists():
        where = str(folder / "chat_template.jinja")
        source = _read_text(Path(where), where)
    else:
        where, source = str(folder / "tokenizer_config.json"), _from_config(config, tokenizer)
    return make_template(source, served_form(source, option), where, tokenizer, config, now)


def make_template(
    source: str,
    served: str,
    where: str,
    tokenizer: Tokenizer,
    config: dict[str, Any],
    now: datetime | None = None,
) -> ChatTemplate:
    """Make a template of its text.

    Args:
        source, served, where: see `ChatTemplate`.
        tokenizer: names its beginning and end of text.
        config: contents of tokenizer_config.json, which may name more tokens.
        now: see `find_template`.

    Raises:
        UserError: it is too long.
    """
    names: dict[int | None, str] = {id_: word for word, id_ in tokenizer.control_tokens.items()}
    special = {"eos_token": names.get(tokenizer.eos_id), "bos_token": names.get(tokenizer.bos_id)}
    tokens = special | {name: _content(value) for name, value in config.items() if name.endswith("_token")}
    if len(source.encode()) > MAX_TEMPLATE:
        raise UserError(where, f"is a template of more than {MAX_TEMPLATE} bytes", "give a shorter one")
    named = {name: word for name, word in tokens.items() if word}
    return ChatTemplate(source, served, where, named, now or datetime.now())


def _named(name: str, tokenizer: Tokenizer) -> str:
    given, remedy = f"--chat-template {name}", "give a template that fits the tokenizer: another name, or a file"
    source = read_named(name)
    for word in NAMED[name]:
        if len(tokenizer.encode_template(word)[0]) != 1:
            raise UserError(given, f"tokenizer {tokenizer.path} has no control token {word}", remedy)
    if "eos_token" in source and tokenizer.eos_id is None:
        raise UserError(given, f"tokenizer {tokenizer.path} has no known end-of-text token", remedy)
    return source


def _read_text(path: Path, where: str) -> str:
    remedy = f"give a file with a jinja template, or one of {', '.join(NAMED)}"
    try:
        return read_regular(path, MAX_TEMPLATE).decode()
    except (BadFile, OSError) as e:
        rule = f"cannot be read ({e.strerror})" if isinstance(e, OSError) else str(e)
        raise UserError(where, rule, remedy) from None
    except UnicodeDecodeError as e:
        raise UserError(where, f"is not UTF-8 text ({e})", remedy) from None


def _content(entry: Any) -> str | None:
    """Return a special token of tokenizer_config.json, which is a text or an object."""
    word = entry.get("content") if isinstance(entry, dict) else entry
    return word if isinstance(word, str) else None


def _from_config(config: dict[str, Any], tokenizer: Tokenizer) -> str:
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {e.get("name"): e.get("template") for e in template if isinstance(e, dict)}
        template = named.get("default")
        if template is None:
            rule = f"its chat templates are {', '.join(map(str, named)) or 'none'}, and none is named default"
            raise UserError(f"tokenizer {tokenizer.path}", rule, "write the one to use to a file: --chat-template FILE")
    if not isinstance(template, str):
        rule = "has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)"
        raise UserError(
            f"tokenizer {tokenizer.path}", rule, f"give --chat-template with a file, or one of {', '.join(NAMED)}"
        )
    return template
