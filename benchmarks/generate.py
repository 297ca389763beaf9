#!/usr/bin/env python3
"""Tokens per second of `megalite generate`, with its cache and without, on this machine.

    python benchmarks/generate.py [--hidden 512] [--layers 8] [--prompt 64] [--tokens 64 256] [--device cpu]

Random weights of a Llama in fp32. Both ways write the same greedy text in turns, three times; seconds are medians, on a
CPU of processor time of one thread: on a shared machine, wall time says little. JSON goes to standard output.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from typing import Any
from unittest import mock

import torch

from megalite.core.build import build_stages, resolve_ops
from megalite.core.mesh.context import ParallelContext
from megalite.core.options.model import ModelConfig
from megalite.core.options.parallel import ParallelConfig
from megalite.core.parts.schedules.choose import schedule_of
from megalite.extras.inference.cache import Cache
from megalite.extras.inference.generate import Sampling, new_tokens
from megalite.extras.inference.load import Model
from megalite.runtime.options.run import Config


def model_of(args: argparse.Namespace) -> Model:
    shape = ModelConfig.from_arch(
        "llama",
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_heads=args.hidden // 64,
        num_kv_heads=max(1, args.hidden // 128),
        vocab_size=32000,
        seq_len=args.prompt + max(args.tokens),
    )
    cfg, ctx = Config(model=shape, parallel=ParallelConfig(zero=0)), ParallelContext.single(torch.device(args.device))
    ops = resolve_ops(cfg, ctx)
    (stage,) = build_stages(cfg, ctx, schedule_of(cfg, 1).placement, torch.float32, ops).values()
    torch.manual_seed(0)
    for parameter in stage.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.02)
    return Model(shape, stage.eval(), None, None)


def seconds(model: Model, prompt: list[int], tokens: int, cached: bool) -> tuple[float, list[int]]:
    clock = time.process_time if model.stage.head.weight.device.type == "cpu" else time.perf_counter
    started = clock()
    with mock.patch.object(Cache, "of", Cache.of if cached else lambda model, capacity: None):
        text = list(new_tokens(model, prompt, Sampling(tokens, 0.0, 0, 1.0), 0, ()))
    return clock() - started, text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, prompt = model_of(args), list(range(1, args.prompt + 1))
    rows: list[dict[str, Any]] = []
    for tokens in args.tokens:
        both = [[seconds(model, prompt, tokens, cached) for cached in (False, True)] for _ in range(3)]
        same = all(without[1] == with_cache[1] for without, with_cache in both)
        before, after = (statistics.median(pair[i][0] for pair in both) for i in (0, 1))
        figures = {"without_tokens_per_s": tokens / before, "with_tokens_per_s": tokens / after}
        rows.append({"tokens": tokens, **figures, "ratio": before / after, "same_text": same})
    size = sum(parameter.numel() for parameter in model.stage.parameters())
    machine = {"machine": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    print(json.dumps({**machine, "torch": torch.__version__, "parameters": size, "prompt": args.prompt, "rows": rows}))


if __name__ == "__main__":
    main()
