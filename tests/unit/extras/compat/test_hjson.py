"""Files in Hjson: what its page describes, and random ones as the hjson package, DeepSpeed's reader, reads them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from megalite.extras.compat.hjson import read_hjson

ALL = r"""
# from a page
train_batch_size: 32  // without quotes, commas, braces
'zero_optimization': { /* of
   all kinds */ stage: 2, overlap_comm: true
  "reduce_bucket_size": 5e8,
}
wandb: {
  enabled: false # off
  project: a # b, {c}  
  team: 'it''s'
  "group": "a\"b\u00e9\\",
  note:
    '''
    first
      second # no comment
    '''
  one: '''line'''
}
betas: [0.8
  0.9, // last comma
]
nothing: null
scale: -0.5e-3
word: 12 apples
"""  # noqa: W291


def test_what_the_page_of_hjson_describes() -> None:
    text = ALL.replace("'it''s'", r"'it\'s'")
    assert read_hjson(text) == {
        "train_batch_size": 32,
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8},
        "wandb": {
            "enabled": False,
            "project": "a # b, {c}",
            "team": "it's",
            "group": 'a"bé\\',
            "note": "first\n  second # no comment",
            "one": "line",
        },
        "betas": [0.8, 0.9],
        "nothing": None,
        "scale": -0.0005,
        "word": "12 apples",
    }
    assert read_hjson(text.replace("\n", "\r\n")) == read_hjson(text)
    assert read_hjson("{ a: Infinity, b: -Infinity }") == {"a": float("inf"), "b": -float("inf")}


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("{a: 1", "line 1: a key is missing"),
        ("{\na 1}", "line 2: a colon is missing after the key a"),
        ("{a: }", "line 1: a value is missing"),
        ("{a: 1}\n}", "line 2: the end of the text is missing"),
        ("a: 1\na: 2", "a is given twice"),
        ("a: 'x", "a quote is not closed"),
        ("a:\n'''\nx", "line 2: ''' is not closed"),
        ("{a: 1, # x", "a key is missing"),
        ("/* x", "a colon is missing after the key /"),
        ("a: " + "[" * 70, "is nested in more than 64 levels"),
        ("", "^$"),
    ],
)
def test_what_is_no_hjson(text: str, rule: str) -> None:
    if not text:
        assert read_hjson(text) == {}
        return
    with pytest.raises(ValueError, match=rule):
        read_hjson(text)


class Writer:
    """Writes a tree as a person might, differently each time."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw

    def tree(self, depth: int = 0) -> Any:
        kind = (
            self.draw.choice(["object", "list"])
            if depth == 0
            else self.draw.choice(["object", "list", "text", "number", "word"])
        )
        if depth > 3 or kind in ("text", "number", "word"):
            texts = ["a b", 'say "x"', "it's", "back\\slash", "# no", "// no", "/* no */", "a,b", "é🙂", "", "x\ny\n z"]
            numbers = [0, 1, -3, 0.5, 2e-5, 500000000, 1.5e3]
            values: dict[str, list[Any]] = {"text": texts, "number": numbers, "word": [True, False, None]}
            return self.draw.choice(values[kind if kind in values else "word"])
        count = self.draw.randrange(4)
        if kind == "list":
            return [self.tree(depth + 1) for _ in range(count)]
        return {
            self.draw.choice(["a", "lr", "stage-2", "é", "with space", "n"]) + str(i): self.tree(depth + 1)
            for i in range(count)
        }

    def gap(self) -> str:
        return self.draw.choice(["", " ", "\n", "\n  ", " # c, { ' \"\n", " // c }\n", " /* c ] */ ", "\t"])

    def text(self, value: Any) -> str:
        """Return a value, and what must end it."""
        pick = self.draw.random()
        if isinstance(value, dict):
            return (
                "{"
                + "".join(
                    self.gap()
                    + self.key(k)
                    + self.draw.choice(["", " ", "\n"])
                    + ":"
                    + self.gap()
                    + self.text(v)
                    + self.end()
                    for k, v in value.items()
                )
                + self.gap()
                + "}"
            )
        if isinstance(value, list):
            return "[" + "".join(self.gap() + self.text(v) + self.end() for v in value) + self.gap() + "]"
        if not isinstance(value, str):
            return json.dumps(value)
        plain = value and value == value.strip() and "\n" not in value and value[0] not in "{}[],:'\"#/"
        if plain and pick < 0.4 and value not in ("true", "false", "null"):
            return value + "\n"
        if pick < 0.6 and "'''" not in value and not value.endswith("\n") and value == value.strip() and value:
            return "\n    '''\n" + "\n".join("    " + line for line in value.split("\n")) + "\n    '''"
        if pick < 0.8:
            return "'" + json.dumps(value, ensure_ascii=False)[1:-1].replace('\\"', '"').replace("'", "\\'") + "'"
        return json.dumps(value, ensure_ascii=self.draw.random() < 0.5)

    def key(self, key: str) -> str:
        quoted = " " in key or self.draw.random() < 0.5
        return json.dumps(key, ensure_ascii=False) if quoted else key

    def end(self) -> str:
        return self.draw.choice([",", "\n", " \n", ",\n", " # c\n", ", // c\n"])


def drawn(seed: int) -> tuple[Any, str]:
    writer = Writer(random.Random(seed))
    value = writer.tree()
    return value, writer.gap() + writer.text(value) + writer.gap()


def test_random_files_are_what_was_written() -> None:
    for seed in range(300):
        value, text = drawn(seed)
        assert read_hjson(text) == value, f"seed {seed}: {text}"


def test_random_files_are_read_as_the_hjson_package_does() -> None:
    hjson = pytest.importorskip("hjson", reason="hjson is not installed (.ci/peers.sh tests with it)")
    for seed in range(1000):
        _, text = drawn(seed)
        assert read_hjson(text) == hjson.loads(text), f"seed {seed}: {text}"
    assert read_hjson(ALL.replace("'it''s'", r"'it\'s'")) == hjson.loads(ALL.replace("'it''s'", r"'it\'s'"))
