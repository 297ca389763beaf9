"""The runs whose bits are recorded: layouts, precisions, ZeRO, schedules, and one or more of every part."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

from tests.golden.doors import call

_BASE = (
    "--num-layers 4 --hidden-size 32 --num-heads 8 --num-kv-heads 4 --ffn-hidden-size 48 --seq-len 16 --device cpu "
    "--global-batch-size 8 --train-steps 4 --lr 1e-2 --warmup-steps 2 --vocab-divisible-by 8 --bucket-size 5000 "
    "--zero-whole-below 0"
)
BASE = _BASE.split()
_MOCK = "--mock-data --vocab-size 90"
_LAYOUTS = {
    "one": (1, ""),
    "dp2": (2, ""),
    "tp2": (2, "--tp 2"),
    "pp2": (2, "--pp 2"),
    "pp2-vp2": (2, "--pp 2 --vp 2"),
    "cp2": (2, "--cp 2"),
    "dp4": (4, ""),
    "dp2-tp2": (4, "--tp 2"),
    "dp2-pp2": (4, "--pp 2"),
    "tp2-pp2": (4, "--tp 2 --pp 2"),
    "cp2-tp2": (4, "--cp 2 --tp 2"),
    "dp2-tp2-pp2": (8, "--tp 2 --pp 2"),
}
_SCHEDULES = {
    "naive": "",
    "gpipe": "",
    "1f1b": "",
    "1f1b-eager": "",
    "interleaved": "--vp 2",
    "zb-h1": "",
    "zb-v": "--vp 2",
}
_EXPERTS = "--num-experts 4 --moe-ffn-size 16 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 1e-3"
_GROUPS = (
    "--arch deepseek_v3 --num-experts 8 --moe-topk 2 --moe-ffn-size 16 --moe-shared-ffn-size 16 "
    "--moe-router-num-groups 2 --moe-router-group-topk 1"
)
_LATENTS = (
    "--num-kv-heads 8 --kv-lora-rank 16 --q-lora-rank 24 --qk-nope-head-dim 8 --qk-rope-head-dim 4 --v-head-dim 8"
)
_DELTA = (
    "--linear-attention-freq 2 --linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 8 "
    "--linear-value-head-dim 8 --attention-output-gate"
)
_FP8 = (
    "--hidden-size 256 --num-heads 2 --num-kv-heads 2 --ffn-hidden-size 256 --seq-len 128 --num-layers 2 --fp8-emulate"
)
_DOCUMENTS = "--data documents --tokenizer bytes --seq-len 64 --document-mask"
_CHATS = "--data chats --tokenizer bytes --seq-len 64"
_CP = "--cp 4 --seq-len 32"

# name -> (ranks, flags)
_PARTS: dict[str, tuple[int, str]] = {
    # ZeRO in detail
    "zero2-group2": (4, "--zero 2 --zero-group 2"),
    "zero3-group2": (4, "--zero 3 --zero-group 2"),
    "zero3-backward": (2, "--zero 3 --zero-keep backward"),
    "zero3-step": (2, "--zero 3 --zero-keep step --zero-reduce step"),
    "zero2-step": (2, "--zero 2 --zero-reduce step"),
    "zero3-whole": (2, "--zero 3 --zero-whole-below 1000"),
    "zero2-zb-v": (4, "--zero 2 --pp 2 --vp 2 --schedule zb-v"),
    "zero3-interleaved": (4, "--zero 3 --pp 2 --vp 2"),
    "no-overlap": (2, "--no-overlap-grad-reduce --no-overlap-param-gather"),
    # tensor parallelism
    "no-sequence-parallel": (2, "--tp 2 --no-sequence-parallel"),
    "no-overlap-tp": (2, "--tp 2 --no-overlap-tp-reduce"),
    "tp-chunks": (2, "--tp 2 --tp-chunks 2"),
    "pipeline-layout": (2, "--pp 2 --pipeline-layout 1,3"),
    "tied-pp2": (2, "--pp 2 --tie-embeddings"),
    "gpt2-tp2": (2, "--arch gpt2 --num-kv-heads 8 --tp 2"),
    # long samples
    **{f"cp4-{way}": (4, f"{_CP} --cp-comm {way}") for way in ("gather", "a2a", "ring")},
    # Two heads: tokens are exchanged for them among two neighbors.
    **{
        f"cp4-a2a-{way}": (4, f"{_CP} --cp-comm a2a+{way} --num-heads 2 --num-kv-heads 2") for way in ("gather", "ring")
    },
    "cp2-ring-tp2": (4, "--cp 2 --cp-comm ring --tp 2"),
    "cp2-a2a-dropout": (2, "--cp 2 --cp-comm a2a --attention-dropout 0.1"),
    "cp2-window": (2, "--cp 2 --window 5 --window-pattern 2"),
    # data
    "documents": (1, _DOCUMENTS),
    "documents-cp2": (2, f"{_DOCUMENTS} --cp 2 --cp-comm gather"),
    "documents-ring": (2, f"{_DOCUMENTS} --cp 2 --cp-comm ring"),
    "documents-delta": (1, f"{_DOCUMENTS} {_DELTA}"),
    "blend": (2, "--data 0.7 documents 0.3 chats --tokenizer bytes --seq-len 64 --loss-on all --no-shuffle"),
    "chats": (1, _CHATS),
    "chats-sample": (2, f"{_CHATS} --loss-per sample --long-documents drop"),
    "chats-last": (1, f"{_CHATS} --loss-on last"),
    "eval": (2, "--data documents --tokenizer bytes --split 80,20,0 --eval-every 2 --eval-steps 2"),
    # experts
    "experts": (1, _EXPERTS),
    "experts-ep2": (2, f"{_EXPERTS} --ep 2"),
    "experts-ep4": (4, f"{_EXPERTS} --ep 4"),
    "experts-allgather": (2, f"{_EXPERTS} --ep 2 --moe-dispatch allgather"),
    "experts-tp2": (2, f"{_EXPERTS} --tp 2"),
    "experts-etp1": (4, f"{_EXPERTS} --tp 2 --ep 4 --etp 1"),
    "experts-pp2": (4, f"{_EXPERTS} --pp 2 --ep 2 --moe-dense-layers 0"),
    "experts-cp2": (2, f"{_EXPERTS} --cp 2 --ep 2"),
    "experts-zero3": (2, f"{_EXPERTS} --ep 2 --zero 3"),
    "experts-zero2-dp4": (4, f"{_EXPERTS} --ep 2 --zero 2"),
    "experts-shared": (1, f"{_EXPERTS} --moe-shared-ffn-size 16 --moe-shared-gate --no-moe-renormalize"),
    "experts-sequence": (1, f"{_EXPERTS} --moe-router-load-balancing-type seq_aux_loss --micro-batch-size 2"),
    "experts-full": (2, f"{_EXPERTS} --ep 2 --recompute full --precision bf16"),
    "experts-groups": (2, f"{_GROUPS} {_LATENTS} --ep 2"),
    "experts-groups-pp2": (2, f"{_GROUPS} {_LATENTS} --pp 2"),
    "experts-muon": (2, f"{_EXPERTS} --ep 2 --optimizer muon"),
    "experts-fp8": (1, f"{_FP8} --num-experts 2 --moe-ffn-size 128 --fp8 blockwise --precision bf16"),
    # mixers
    "latents": (1, _LATENTS),
    "latents-tp2": (2, f"{_LATENTS} --tp 2"),
    "latents-cp2": (2, f"{_LATENTS} --cp 2"),
    "latents-bf16": (2, f"{_LATENTS} --precision bf16 --recompute selective"),
    "sinks": (1, "--attention-sinks --window 5 --window-pattern 2"),
    "sinks-tp2": (2, "--attention-sinks --tp 2"),
    "sinks-cp2": (2, "--attention-sinks --cp 2"),
    "delta": (1, _DELTA),
    "delta-tp2": (2, f"{_DELTA} --tp 2"),
    "delta-cp2": (2, f"{_DELTA} --cp 2"),
    "delta-pp2": (2, f"{_DELTA} --pp 2 --precision bf16"),
    "delta-zero3": (2, f"{_DELTA} --zero 3 --recompute full"),
    "windows": (1, "--window 5"),
    "chunks": (
        1,
        "--arch llama4_text --attention-chunk-size 8 --num-experts 2 --moe-ffn-size 16 --moe-shared-ffn-size 16",
    ),
    "chunks-cp2": (2, "--attention-chunk-size 8 --no-rope-freq 2 --attention-temperature 0.1 --cp 2"),
    "gemma2": (1, "--arch gemma2 --window 5 --head-dim 8 --query-pre-attn-scalar 6"),
    "gemma3-tp2": (2, "--arch gemma3_text --window 5 --window-pattern 3 --head-dim 8 --tp 2"),
    "rope": (1, "--rope-scaling '{factor: 8.0, original_max_position_embeddings: 8}' --rope-fraction 0.5"),
    "yarn": (1, "--rope-scaling '{rope_type: yarn, factor: 4.0, original_max_position_embeddings: 8}'"),
    "parallel-residual": (2, "--parallel-residual --norm layernorm --qkv-bias --o-bias --mlp-bias --tp 2"),
    "qk-norm": (2, "--qk-norm full --norm-position post --tp 2"),
    # further tokens
    "mtp": (1, "--mtp-num-layers 2"),
    "mtp-tp2": (2, "--mtp-num-layers 1 --tp 2"),
    "mtp-pp2": (2, "--mtp-num-layers 1 --pp 2"),
    "mtp-zb-h1": (2, "--mtp-num-layers 1 --pp 2 --schedule zb-h1 --zero 0"),
    "mtp-experts": (2, f"{_EXPERTS} --mtp-num-layers 1 --ep 2 --tie-embeddings"),
    # FP8
    **{f"fp8-{r}": (1, f"{_FP8} --fp8 {r} --precision bf16") for r in ("blockwise", "rowwise", "tensorwise", "mxfp8")},
    "fp8-tp2": (2, f"{_FP8} --fp8 blockwise --precision bf16 --tp 2"),
    "fp8-zero3": (2, f"{_FP8} --fp8 blockwise --precision bf16 --zero 3"),
    "fp8-keep": (1, f"{_FP8} --num-layers 3 --fp8-keep-bf16 1 --fp8 tensorwise --precision bf16"),
    "fp8-fp32": (1, f"{_FP8} --fp8 rowwise --recompute full"),
    # optimizers
    "muon": (1, "--optimizer muon --muon-ns fp32"),
    "muon-bf16": (1, "--optimizer muon"),
    "muon-tp2-pp2": (4, "--optimizer muon --muon-ns fp32 --tp 2 --pp 2"),
    **{f"muon-zero{zero}": (2, f"--optimizer muon --muon-ns fp32 --zero {zero}") for zero in (0, 1, 2, 3)},
    **{name: (1, f"--optimizer {name}") for name in ("lion", "ademamix", "lamb", "lars", "sgd")},
    **{f"{name}-dp2": (2, f"--optimizer {name} --zero 2") for name in ("lion", "ademamix", "lamb", "lars")},
    "ademamix-warmup": (1, "--optimizer ademamix --ademamix-warmup 3 --ademamix-beta3 0.99"),
    "bf16-states": (2, "--precision bf16 --moments-dtype bf16 --master-dtype bf16"),
    "bf16-moments-lion": (1, "--precision bf16 --moments-dtype bf16 --optimizer lion"),
    "mup": (1, "--mup-base-width 16"),
    "mup-muon": (1, "--mup-base-width 16 --optimizer muon"),
    # rates and batches
    "batches": (2, "--batch-size-schedule '0:4 2:8' --lr-by samples"),
    "decoupled": (2, "--decoupled-lr 1e-3 --start-weight-decay 0.01 --pp 2"),
    "wsd": (1, "--lr-decay wsd --wsd-decay-steps 2 --scale-lr sqrt --base-batch-size 4"),
    "warmup-log": (1, "--warmup-shape deepspeed-log --lr-decay linear"),
    # precision and memory
    "fp16-overflow": (2, "--precision fp16 --initial-loss-scale 1e12 --hysteresis 1"),
    "grad-bf16": (2, "--precision bf16 --grad-dtype bf16 --zero 2 --micro-batch-size 2"),
    "reduce-bf16": (2, "--grad-reduce-dtype bf16"),
    "loss-chunk": (1, "--loss-chunk 8 --z-loss 1e-3"),
    "label-smoothing": (2, "--label-smoothing 0.1 --tp 2"),
    "micro-batches": (2, "--micro-batch-size 2 --pp 2"),
    **{
        f"compress-{way}": (2, f"--compress {way}")
        for way in ("int8", "int8-stochastic", "topk:0.1", "threshold:0.5", "powersgd:2")
    },
    "compress-zero0": (4, "--compress int8 --zero 0 --tp 2"),
    "offload": (1, "--offload optimizer"),
    "offload-dir": (2, "--offload optimizer --offload-dir scratch --zero 2"),
    "offload-params": (2, "--offload optimizer+params --zero 3"),
    "offload-activations": (1, "--offload activations --recompute full"),
    "offload-muon": (1, "--offload optimizer --optimizer muon"),
    "torch-kernels": (2, "--ops torch --tp 2"),
    "recover": (2, "--recover process"),
}

# Two command lines in one run directory: the second resumes.
_RESUMED: dict[str, tuple[int, tuple[str, str]]] = {
    f"resume-{name}": (
        ranks,
        (f"{_MOCK} {first} --train-steps 2 --lr-decay-steps 4", f"{_MOCK} {then} --lr-decay-steps 4"),
    )
    for name, ranks, first, then in (
        ("one", 1, "", ""),
        ("tp2-to-pp2", 2, "--tp 2", "--pp 2"),
        ("zero1-to-zero3", 2, "--precision bf16", "--precision bf16 --zero 3"),
        ("fp16", 1, "--precision fp16 --loss-scale-window 3", "--precision fp16 --loss-scale-window 3"),
        ("experts", 2, f"{_GROUPS} {_LATENTS} --ep 2", f"{_GROUPS} {_LATENTS} --tp 2"),
        ("latents-mtp", 2, f"{_LATENTS} --mtp-num-layers 1 --pp 2", f"{_LATENTS} --mtp-num-layers 1 --tp 2"),
        ("delta", 2, f"{_DELTA} --tp 2", f"{_DELTA} --zero 3"),
        ("muon", 2, "--optimizer muon --zero 2", "--optimizer muon --tp 2"),
        ("bf16-states", 2, "--precision bf16 --moments-dtype bf16", "--precision bf16 --moments-dtype bf16 --tp 2"),
        ("compress", 2, "--compress powersgd:2", "--compress powersgd:2"),
    )
}

_GRID: dict[str, tuple[int, str]] = {
    **{
        f"{layout}-{precision}": (ranks, f"{flags} --precision {precision}")
        for (layout, (ranks, flags)), precision in itertools.product(_LAYOUTS.items(), ("fp32", "bf16", "fp16"))
    },
    **{
        f"{layout}-zero{zero}-{precision}": (
            _LAYOUTS[layout][0],
            f"{_LAYOUTS[layout][1]} --zero {zero} --precision {precision}",
        )
        for layout, zero, precision in itertools.product(
            ("dp2", "dp4", "dp2-tp2", "dp2-pp2", "cp2"), (0, 2, 3), ("fp32", "bf16")
        )
    },
    **{f"pp2-{name}": (2, f"--pp 2 --schedule {name} {flags}") for name, flags in _SCHEDULES.items()},
    **{
        f"{layout}-dropout-{recompute}": (
            _LAYOUTS[layout][0],
            f"{_LAYOUTS[layout][1]} --recompute {recompute} --hidden-dropout 0.1 --attention-dropout 0.1",
        )
        for layout, recompute in itertools.product(("one", "tp2", "pp2", "cp2"), ("none", "selective", "full"))
    },
}


def _with_data(flags: str) -> str:
    return flags if "--data" in flags else f"{_MOCK} {flags}"


RUNS: dict[str, tuple[int, tuple[str, ...]]] = {
    **{name: (ranks, (_with_data(flags),)) for name, (ranks, flags) in (_GRID | _PARTS).items()},
    **_RESUMED,
}
"""Name -> number of ranks, and command lines that are run one after another."""


def make_data(work: Path) -> None:
    """Write token files into a folder: `documents`, and `chats`, of which a part is learned."""
    words = random.Random(7)
    for name, learned in (("documents", False), ("chats", True)):
        texts = ["".join(words.choices("abcdefgh \n", k=words.randint(5, 90))) for _ in range(120)]
        (work / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        flags = f"--input {name}.jsonl --tokenizer bytes --out {name} --workers 1"
        done = call("megalite", "preprocess", *flags.split())
        assert done.codes == [0], done.err
        if learned:
            tokens = (work / f"{name}.bin").stat().st_size // 2
            (work / f"{name}.mask.bin").write_bytes(bytes(at // 7 % 2 for at in range(tokens)))
