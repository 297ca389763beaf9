#!/usr/bin/env python3
"""Tokens per second of the texts of --eval-tasks, with the cache and without, on this machine.

    python benchmarks/task_texts.py [--texts 8] [--context 64] [--tokens 16]

Random weights of a Llama of 57M parameters in fp32, one process. Both ways write the same greedy texts in turns, three
times; figures are medians of processor time of one thread: on a shared machine, wall time says little. JSON goes to
standard output.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time

import torch

import megalite
from megalite.core.scoring import Scores, rows_of_rank, score_rows
from megalite.extras.tasks.writing import CachedTexts, Reader, Request, WholeTexts, write_texts
from megalite.runtime.data.scored import pack_scored, scored_rows

SEQ = 512
SHAPE = {"num_layers": 8, "hidden_size": 512, "num_heads": 8, "num_kv_heads": 4, "ffn_hidden_size": 1408}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    batch = {"micro_batch_size": 1, "global_batch_size": 1, "train_steps": 1, "eval_steps": 0}
    data = {"mock_data": True, "vocab_size": 32000, "seq_len": SEQ, "device": "cpu", "run_dir": tempfile.mkdtemp()}
    with megalite.start(megalite.configure(**SHAPE, **batch, **data)) as run:
        engine = run.engine

        def score(documents: list[tuple[list[int], int]]) -> Scores | None:
            rows, owners = scored_rows(documents, rows_of_rank(engine, pack_scored(documents, SEQ), 1), SEQ)
            return score_rows(engine, rows, owners, len(documents), 1)

        contexts = [[(7 * i + j * j) % 32000 for j in range(args.context)] for i in range(args.texts)]
        requests = [Request(ids, args.tokens) for ids in contexts]
        readers: list[Reader] = [WholeTexts(score), CachedTexts(engine, engine.cfg, lambda: True)]
        seconds: list[list[float]] = [[], []]
        for _ in range(3):
            for times, reader in zip(seconds, readers):
                started = time.process_time()
                write_texts(requests, None, engine.ctx, reader)
                times.append(time.process_time() - started)
    without, cached = (args.texts * args.tokens / statistics.median(times) for times in seconds)
    machine = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__, **vars(args)}
    figures = {"without_tokens_per_s": without, "with_tokens_per_s": cached, "ratio": cached / without}
    print(json.dumps({**machine, **figures}))


if __name__ == "__main__":
    main()
