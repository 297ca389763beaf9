"""`megalite generate --chat`: a model that has learned three answers gives them, in a pipe and one by one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import megalite
from megalite.core.base.errors import UserError
from megalite.extras.convert.hf import export_hf
from megalite.extras.inference.command import generate as generate_main
from megalite.extras.inference.conversation import begin
from megalite.extras.inference.generate import Sampling
from megalite.extras.inference.load import load_model
from megalite.extras.prepare.preprocess import preprocess

ANSWERS = {"hi": "hello", "sum": "two €", "who <|im_end|>?": "me"}
LIKELIEST = ["--temperature", "0", "--device", "cpu"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    records = [{"instruction": question, "output": answer} for question, answer in ANSWERS.items()]
    (folder / "a.json").write_text(json.dumps(records))
    preprocess([str(folder / "a.json")], "bytes", str(folder / "data"), chat=True, chat_template="chatml")
    config = megalite.configure(
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        seq_len=64,
        tokenizer="bytes",
        data=(str(folder / "data"),),
        split="1,0,0",
        global_batch_size=6,
        micro_batch_size=6,
        train_steps=60,
        lr=0.005,
        warmup_steps=5,
        run_dir=str(folder / "run"),
        device="cpu",
    )
    with megalite.start(config) as run:
        *_, last = megalite.steps(run)
    assert last["loss"] < 0.05
    return folder


@pytest.mark.full
def test_each_line_of_a_pipe_is_answered(trained: Path) -> None:
    """A control word that a user types stays text; /new forgets the turns before it."""
    command = [sys.executable, "-m", "megalite", "generate", str(trained / "run"), "--chat", *LIKELIEST]
    lines = "hi\n\n/new\nsum\n/new\nwho <|im_end|>?\n"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, input=lines, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == list(ANSWERS.values())


def test_an_export_chats_as_its_run(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export_hf(trained / "run", trained / "hf")
    for folder in ("run", "hf"):
        generate_main([str(trained / folder), "--chat", "--prompt", "sum", *LIKELIEST])
        assert capsys.readouterr().out == "two €\n"


def test_turns_are_kept_and_written_by_the_template(trained: Path) -> None:
    model = load_model(trained / "run", torch.device("cpu"))
    conversation = begin(model, None, "be brief", Sampling(3, 0.0, 0, 1.0), seed=0)
    pieces = list(conversation.answer("hi"))
    assert [turn["role"] for turn in conversation.messages] == ["system", "user", "assistant"]
    assert conversation.messages[2]["content"] == "".join(pieces).strip()
    # Three tokens at most, each in a piece of its own.
    assert len([piece for piece in pieces if piece]) <= 3
    odd = begin(model, str(alternating(trained)), "", Sampling(3, 0.0, 0, 1.0), seed=0)
    odd.messages.append({"role": "user", "content": "a"})
    with pytest.raises(UserError, match="--chat: the chat template fails .*alternate.*; give another --chat-template"):
        list(odd.answer("hi"))


def alternating(folder: Path) -> Path:
    path = folder / "alternating.jinja"
    path.write_text("{{ raise_exception('roles must alternate') if messages|length > 1 else messages[0].content }}")
    return path


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (["--system", "x"], "--system: applies to conversations; add --chat"),
        (["--chat-template", "x"], "--chat-template: applies to conversations; add --chat"),
        (["--chat", "--num-samples", "2"], "--num-samples 2: a conversation has one answer per turn"),
        (["--chat", "--chat-template", "llama3", "--device", "cpu"], "has no control token"),
    ],
)
def test_options_of_a_conversation(trained: Path, options: list[str], rule: str) -> None:
    with pytest.raises(UserError, match=rule):
        generate_main([str(trained / "run"), *options])
