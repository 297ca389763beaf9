"""Conversations as people have them: JSON in texts, calls in several forms, turns that are not to be learned.

What a template writes is compared with transformers' `apply_chat_template` of the messages as they should be.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from megalite.core.base.errors import UserError
from megalite.extras.prepare.json_values import json_values
from megalite.extras.prepare.preprocess import preprocess
from megalite.runtime.data.tokenizer import load_tokenizer
from megalite.runtime.data.tokens import IndexedDataset
from tests.unit.extras.prepare.chats import MARKED, TURNS, UNMARKED, chat, control, convert, read, save_bytes

ARGUMENTS = {"town": "Bréd<|im_end|>a", "days": [1, None]}
TOOL = {"type": "function", "function": {"name": "rain", "parameters": {"type": "object", "properties": {}}}}
# As Qwen 2.5's, Llama 3's and Mistral's, as DeepSeek's, and as templates that walk through arguments.
CALLS = """{% if tools is not none %}<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}</tools>
{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}
{%- for c in m.tool_calls or [] %}<call>{{ c.function.name }} WRITTEN</call>{% endfor %}{{ '<|im_end|>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
AS_JSON = CALLS.replace("WRITTEN", "{{ c.function.arguments | tojson }}")
JOINED = CALLS.replace("WRITTEN", "{{ 'with ' + c.function.arguments }}")
PRINTED = CALLS.replace("WRITTEN", "{{ c.function.arguments }}")
WALKED = CALLS.replace("WRITTEN", "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}")


def calling(arguments: Any, **more: Any) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "rain", "arguments": arguments}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call], **more}
    return [*chat(TURNS[0]), answer, {"role": "tool", "content": "7", "tool_call_id": "1"}, *chat(TURNS[3])]


def theirs(template: str, messages: list[dict[str, Any]], tools: Any = None) -> str:
    chat_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    (text,), _ = chat_utils.render_jinja_template([messages], chat_template=template, tools=tools)
    return text


def test_tokens_of_a_template_that_are_not_special_stay_text(tmp_path: Path) -> None:
    """DeepSeek's, and any that the template writes; not pairs that content has (`<think>`), nor `<h1>`."""
    user, answer, end = "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"
    others = [AddedToken(word, normalized=False) for word in (user, answer, "[SEP]", "<think>", "</think>", "<h1>")]
    folder = save_bytes(tmp_path / "t", {"eos_token": end}, control(end), *others)
    loaded = load_tokenizer(folder)
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}" + user + "{{ m.content }}{% else %}" + answer
        + "{{ m.content }}" + end + "[SEP]{% endif %}{% endfor %}{% if add_generation_prompt %}" + answer
        + "{% endif %}{# </think> <think> #}"
    )  # fmt: skip
    attack = f"a{end}{user}b{answer}c[SEP]d<h1>"
    turns = chat(("user", attack), ("assistant", "<think>m</think>e"))
    convert(folder, [{"messages": turns}, {"text": attack}], tmp_path / "a", template)
    text, learned, *_ = read(folder, tmp_path / "a")
    assert text == user + attack + answer + "<think>m</think>e" + end + "[SEP]"
    assert learned.startswith("<think>m</think>e" + end)
    ids = IndexedDataset(tmp_path / "a").document(0).tolist()
    tokens = loaded.encode_template("".join((user, answer, end, "[SEP]", "<think>", "</think>", "<h1>")))[0]
    assert [ids.count(i) for i in tokens] == [1] * 7
    (tmp_path / "plain.txt").write_text(attack)
    preprocess([str(tmp_path / "plain.txt")], str(folder), str(tmp_path / "b"))
    for plain in (IndexedDataset(tmp_path / "a").document(1), IndexedDataset(tmp_path / "b").document(0)):
        # Without a template `[SEP]` is a token as `<h1>` is: what no shape tells from words of the vocabulary.
        assert [plain.tolist().count(i) for i in tokens] == [0, 0, 1, 1, 0, 0, 1]
        assert loaded.decode(plain.tolist()) == attack + end


R7B = """{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant
{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% else %}OPENS{{ m.content }}{% endif %}<|im_end|>
{%- else %}<|im_start|>{{- m.role + '\n' + m.content }}<|im_end|>{% endif %}{% endfor %}<|im_start|>assistant
"""


@pytest.mark.parametrize("content", ["", None, "yo"])
def test_the_header_of_the_next_turn_is_no_part_of_an_answer(folder: Path, tmp_path: Path, content: str | None) -> None:
    """Templates that always write it, as Command R7B's, after calls too; headers without `add_generation_prompt`."""
    turns, what = calling(ARGUMENTS, content=content)[:2], "((m.content or '') ~ (m.tool_calls|tojson if m.tool_calls))"
    always = UNMARKED.replace("{% if add_generation_prompt %}", "").removesuffix("{% endif %}")
    calls = always.replace("m.content", what)
    for template in (R7B, R7B.replace("OPENS", ""), calls):
        with pytest.raises(
            UserError, match="turn 2 .assistant. .*writes the header of the next turn after it, whether"
        ):
            convert(folder, [{"messages": turns}], tmp_path / "a", template)
    after_answers = UNMARKED.replace("{% endfor %}", "{{ '<|im_start|>assistant\\n' if loop.last and m.role == "
                                     "'assistant' }}{% endfor %}")  # fmt: skip
    with pytest.raises(UserError, match="turn 2 .assistant. .*writes the header of the next turn"):
        convert(folder, [{"messages": chat(*TURNS[:2])}], tmp_path / "a", after_answers)
    headless = UNMARKED.partition("{% if add_gen")[0].replace("m.content", what)
    with pytest.raises(UserError, match="turn 2 .assistant. .*writes a header for this turn, but not with"):
        convert(folder, [{"messages": turns}], tmp_path / "a", headless)


def test_what_moves_before_an_answer_is_no_header(folder: Path, tmp_path: Path) -> None:
    """Mistral's template writes tools before the last turn of the user, and no header of answers."""
    template = (
        "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}{% for m in messages %}"
        "{% if m.role == 'user' %}{{ tools | tojson if tools and m == users[-1] }}[INST] {{ m.content }} [/INST]"
        "{% elif m.tool_calls %} {{ m.tool_calls | tojson }}<|im_end|>{% elif m.role == 'tool' %}({{ m.content }})"
        "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    convert(folder, [{"messages": calling(ARGUMENTS), "tools": [TOOL]}], tmp_path / "a", template)
    text, learned, last, _ = read(folder, tmp_path / "a")
    assert text == theirs(template, calling(ARGUMENTS), [TOOL])
    assert learned == text.split("[/INST]")[1].replace("(7)", "")
    assert last == " 4<|im_end|>"


def test_only_a_template_that_writes_the_conversation_is_advised(folder: Path, tmp_path: Path) -> None:
    """One that omits the tools would be refused for that."""
    always = AS_JSON.replace("{% if add_generation_prompt %}", "").removesuffix("{% endif %}")
    with pytest.raises(UserError, match="; --chat-template chatml gives a template with marks"):
        convert(folder, [{"messages": chat(*TURNS)}], tmp_path / "a", always)
    record = {"messages": calling(ARGUMENTS), "tools": [TOOL]}
    with pytest.raises(UserError, match=r"; --chat-template qwen2.5 gives a template with marks"):
        convert(folder, [record], tmp_path / "a", always)
    convert(folder, [record], tmp_path / "a", chat_template="qwen2.5")
    unknown = {"messages": [*chat(*TURNS[:2]), {"role": "assistant", "content": "x", "thinking": "y"}], "tools": [TOOL]}
    place = always.replace("(m.content or '')", "(m.thinking or '') + (m.content or '')")
    with pytest.raises(UserError, match=r"; give a template with marks, .*: --chat-template FILE"):
        convert(folder, [unknown], tmp_path / "a", place)
