"""Commands in the words of the Hugging Face Trainer, beside transformers' own reading of them."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.core.base.errors import UserError
from megalite.core.options.rates import rates_at
from megalite.extras.compat.dialect import DIALECT
from megalite.extras.compat.trainer import RENAMED, SWITCHES, TRAINED
from megalite.runtime.options import cli
from megalite.runtime.options.fields import GROUP_OF

parse = partial(cli.parse, dialect=DIALECT)
SCRIPT = (
    "--per_device_train_batch_size 2 --gradient_accumulation_steps 4 --learning_rate 1e-4 --max_steps 40 "
    "--warmup_ratio 0.11 --adam_epsilon 1e-7 --max_grad_norm 0.5 --save_steps 7 --logging_steps 3 --output_dir out"
)


def values(argv: str, world: int | None = None) -> dict[str, Any]:
    c = parse([*argv.split(), "--mock-data"], world=world).config
    return {name: getattr(getattr(c, group), name) for name, group in GROUP_OF.items()}


@pytest.mark.parametrize("scheduler", ["linear", "cosine", "constant_with_warmup"])
def test_a_script_trains_as_it_does_there(scheduler: str) -> None:
    """The numbers that TrainingArguments makes of the same words, and the rates of its scheduler, one step on."""
    transformers = pytest.importorskip("transformers")
    flags = f"{SCRIPT} --lr_scheduler_type {scheduler}"
    there = transformers.TrainingArguments
    # Transformers 5 reads a ratio as --warmup_steps. (The object itself cannot be made without Accelerate.)
    words = flags.replace("--warmup_ratio", "--warmup_steps").split()
    theirs = transformers.HfArgumentParser(there).parse_args(words)
    ours = values(flags)
    assert ours["global_batch_size"] == theirs.per_device_train_batch_size * theirs.gradient_accumulation_steps
    assert ours["train_steps"] == theirs.max_steps
    assert ours["warmup_steps"] == there.get_warmup_steps(theirs, theirs.max_steps) == 5
    for name, named in {
        "lr": "learning_rate",
        "weight_decay": "weight_decay",
        "beta1": "adam_beta1",
        "beta2": "adam_beta2",
        "eps": "adam_epsilon",
        "clip_grad": "max_grad_norm",
        "save_every": "save_steps",
        "log_every": "logging_steps",
        "label_smoothing": "label_smoothing_factor",
    }.items():
        assert ours[name] == getattr(theirs, named), name
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=theirs.learning_rate)
    schedule = transformers.get_scheduler(theirs.lr_scheduler_type, optimizer, ours["warmup_steps"], theirs.max_steps)
    c = parse([*flags.split(), "--mock-data"]).config
    for step in range(1, theirs.max_steps):
        optimizer.step()
        schedule.step()
        assert rates_at(c.optim, c.train, step).lr == pytest.approx(schedule.get_last_lr()[0], rel=1e-12, abs=1e-18)


@pytest.mark.parametrize(
    ("argv", "world", "expected"),
    [
        ("--per-device-train-batch-size 4", 1, {"global_batch_size": 4, **TRAINED}),
        ("--per-device-train-batch-size 4", 8, {"global_batch_size": 32}),
        ("--per-device-train-batch-size 4 --gradient-accumulation-steps 3 --tp 2", 8, {"global_batch_size": 48}),
        ("--per-device-train-batch-size 4 --global-batch-size 64", 8, {"global_batch_size": 64, "micro_batch_size": 4}),
        ("--max-steps 9 --bf16 True --gradient-checkpointing True", 1, {"precision": "bf16", "recompute": "full"}),
        ("--max-steps 9 --bf16 False --torch-compile false", 1, {"precision": "fp32", "compile": False}),
        ("--max-steps 9 --lr 1e-3 --weight-decay 0.1", 1, {"lr": 1e-3, "weight_decay": 0.1, "beta2": 0.999}),
        ("--optim adamw_torch_fused", 1, {"optimizer": "adamw"}),
        ("--max-steps 9 --resume-from-checkpoint True", 1, {"resume": "latest"}),
        ("--fsdp full_shard auto_wrap", 1, {"zero": 3, "zero_keep": "none"}),
        ("--fsdp shard_grad_op", 1, {"zero": 3, "zero_keep": "backward"}),
        ("--fsdp full_shard offload", 1, {"zero": 3, "offload": "optimizer+params"}),
        ("--max-steps 9 --gradient-accumulation-steps 3 --rampup-batch-size 2 2 8 --global-batch-size 4", 1, None),
        (
            "--per-device-train-batch-size 2 --rampup-batch-size 2 2 8 --global-batch-size 4",
            2,
            {"global_batch_size": 4},
        ),
        ("--per-device-train-batch-size 2 --layout auto", 8, {"global_batch_size": 8}),
        ("--gradient-checkpointing --warmup-ratio 0.1", 1, TRAINED),
        # In the words of both, Megatron-LM's hold.
        ("--num-attention-heads 4 --learning-rate 1e-4", 1, {"lr": 1e-4, "weight_decay": 0.01, "position": "learned"}),
        ("--lr_scheduler_type inverse_sqrt --warmup_steps 5", 1, {"lr_decay": "inverse-square-root"}),
        ("--lr 1e-3", 1, {"lr": 1e-3, "weight_decay": 0.1, "beta2": 0.95}),
        (
            "--load_best_model_at_end True --metric_for_best_model eval_loss --greater_is_better False --eval-every 5 "
            "--save_steps 5 --save_total_limit 3",
            1,
            {"keep_best": 1, "keep_last": 3},
        ),
        ("--load_best_model_at_end False --save_steps 5", 1, {"keep_best": 0}),
        ("--max_steps -1 --train-steps 7 --save_total_limit 2", 1, {"train_steps": 7, "keep_last": 2}),
    ],
)
def test_what_their_words_become(argv: str, world: int, expected: dict[str, Any] | None) -> None:
    if expected is None:
        with pytest.raises(UserError, match="conflicts with it|must be the largest"):
            values(argv, world)
        return
    ours = values(argv, world)
    assert {name: ours[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--max-steps 9 --eval-steps 500", "--eval-steps 500: is an interval in the Trainer's words"),
        ("--fsdp full_shard shard_grad_op", "--fsdp full_shard shard_grad_op: must be one of full_shard, "),
        ("--gradient-accumulation-steps 0", "--gradient-accumulation-steps 0: must be at least 1"),
        ("--warmup-ratio 2", "--warmup-ratio 2: must be between 0 and 1"),
        ("--max-steps 9 --optim sgd", "--optim sgd: has no momentum in the Trainer"),
        ("--lr_scheduler_type constant --warmup_steps 5", "has no warm-up in the Trainer"),
        ("--lr_scheduler_type inverse_sqrt", "falls over 10,000 steps in the Trainer"),
        ("--gradient-accumulation-steps 4 --layout auto", "follows from the layout that is chosen"),
        ("--eval_steps 5 --max_steps 9 --report_to wandb", "2 flags: must be changed"),
        ("--load_best_model_at_end --save_steps 5", "--load-best-model-at-end: is --keep-best 1 here"),
        ("--metric_for_best_model bleu", "the best checkpoint is the one of the lowest validation loss"),
        ("--save_total_limit 1", "--save-total-limit 1: must be at least 2"),
        ("--optim galore_adamw", "--optim galore_adamw: must be one of"),
        ("--num-train-epochs 3", "give --train-steps, which is epochs x samples"),
    ],
)
def test_what_cannot_be_meant_is_refused(argv: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        values(argv)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "flags"),
    [
        ("--config", "train:\n  global_batch_size: 256\n", ""),
        ("--deepspeed-config", '{"train_batch_size": 256}', ""),
        ("--deepspeed-config", '{"gradient_accumulation_steps": 16}', "--micro-batch-size 2"),
    ],
)
def test_a_batch_of_a_file_is_not_replaced(tmp_path: Path, name: str, text: str, flags: str) -> None:
    (tmp_path / "file").write_text(text)
    expected = values(f"{flags} {name} {tmp_path / 'file'}", 8)["global_batch_size"]
    words = f"--per-device-train-batch-size 2 {name} {tmp_path / 'file'}"
    assert values(words, 8)["global_batch_size"] == expected == 256


def test_every_name_is_an_option_of_theirs() -> None:
    """Names of TrainingArguments, of its former versions, of TRL's configurations or of the examples."""
    transformers = pytest.importorskip("transformers")
    known = {name.replace("_", "-") for name in transformers.TrainingArguments.__dataclass_fields__}
    known |= {"per-gpu-train-batch-size", "block-size", "max-seq-length", "max-length", "model-max-length"}
    known |= {"model-name-or-path", "model-name", "tokenizer-name", "warmup-ratio"}
    assert set(itertools.chain(RENAMED, SWITCHES)) <= known
