"""Load an exported model with Hugging Face transformers, as any user would, and generate text.

python examples/generate_with_transformers.py runs/quickstart/hf --prompt "def "
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of the export")
    parser.add_argument("--prompt", default="def ", help="text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=80, help="tokens to generate")
    args = parser.parse_args()
    torch.manual_seed(0)
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    tokens = tokenizer(args.prompt, return_tensors="pt")
    options = {"do_sample": True, "temperature": 0.8, "top_k": 50, "pad_token_id": tokenizer.eos_token_id}
    out = model.generate(**tokens, max_new_tokens=args.max_new_tokens, **options)
    print(tokenizer.decode(out[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
