"""Real text and a tokenizer trained on it, made once; and rules tried on examples without a deadline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from examples.corpus import python_corpus
from megalite.extras.prepare.train_tokenizer import train_tokenizer
from tests.installed import Installed, install

# How long an example takes says more about the machine's other work than about the rule. And every run has the same
# examples: a new one that fails would stop a change that has nothing to do with it. `pytest tests/unit/FILE
# --hypothesis-profile default` draws others.
settings.register_profile(
    "any machine",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JSON lines of about 1 MB of real source and prose."""
    out = tmp_path_factory.mktemp("corpus") / "stdlib.jsonl"
    python_corpus(out, max_mb=1.0)
    return out


@pytest.fixture(scope="session")
def corpus_texts(corpus: Path) -> list[str]:
    return [json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").split("\n") if line]


@pytest.fixture(scope="session")
def tokenizer_dir(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([str(corpus)], 1200, out)
    return out


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Run a program of an environment that has megalite from its wheel."""
    return install(tmp_path_factory.mktemp("installed"))
