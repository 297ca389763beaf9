"""Continue training an exported model with TRL: a few steps of SFT, then of DPO, on built-in conversations.

    megalite convert export --checkpoint runs/run --out model
    accelerate launch examples/train_with_trl.py --model model --out aligned

Replace the two lists with your data; docs/alignment.md has the rest. Requires `pip install trl`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

# Used where the export has no chat template of its own.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def turn(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def answers() -> Dataset:
    """Prompts with their answers; TRL learns the answers only."""
    pairs = [("1+1?", "2"), ("2+2?", "4"), ("3+3?", "6"), ("4+4?", "8")]
    return Dataset.from_list([{"prompt": turn("user", p), "completion": turn("assistant", c)} for p, c in pairs])


def preferences() -> Dataset:
    """Prompts with a better and a worse answer."""
    rows = [("1+1?", "2", "3"), ("2+2?", "4", "5"), ("3+3?", "6", "7"), ("4+4?", "8", "9")]
    return Dataset.from_list(
        [
            {"prompt": turn("user", p), "chosen": turn("assistant", good), "rejected": turn("assistant", bad)}
            for p, good, bad in rows
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of megalite convert export")
    parser.add_argument("--out", required=True, help="folder for the two trained models, sft and dpo")
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.chat_template = tokenizer.chat_template or CHATML
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    options: dict[str, Any] = {
        "max_steps": args.steps,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": False,
    }
    sft, dpo = (str(Path(args.out, name)) for name in ("sft", "dpo"))
    trainer = SFTTrainer(
        args.model, SFTConfig(output_dir=sft, **options), train_dataset=answers(), processing_class=tokenizer
    )
    trainer.train()
    trainer.save_model(sft)
    trainer.accelerator.wait_for_everyone()
    trainer = DPOTrainer(
        sft, args=DPOConfig(output_dir=dpo, **options), train_dataset=preferences(), processing_class=tokenizer
    )
    trainer.train()
    trainer.save_model(dpo)


if __name__ == "__main__":
    main()
