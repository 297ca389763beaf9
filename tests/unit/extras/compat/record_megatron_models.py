"""Record what command lines of Megatron-LM train: `python -m tests.unit.extras.compat.record_megatron_models`.

Needs megatron-core 0.16.1 (pip install --no-deps megatron-core==0.16.1), and writes `tests/data/megatron_models.npz`,
which `test_megatron_models.py` compares with. Each command line has the flags of a public script, at a small size. What
it leaves out is filled in here as Megatron-LM's own code does, by hand: flags and defaults of
megatron/training/arguments.py (branch core_r0.16.0), its validate_args and core_transformer_config_from_args, and
gpt_builders.py. The layers are megatron-core's own, on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shlex
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.unit.extras.compat.megatron_recording import FILE, STEP, Recording, write

# isort: off
from tests.unit.extras.convert.megatron_writer import OnCPU  # first: it changes what megatron-core imports
from megatron.core import parallel_state as ps
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
# isort: on

_RUN = """--seq-length 16 --vocab-size 32 --make-vocab-size-divisible-by 32 --micro-batch-size 2 --global-batch-size 2
    --attention-dropout 0 --hidden-dropout 0"""
_LLAMA = """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights"""
_GROUPS = "--group-query-attention --num-query-groups 2"
_DEEPSEEK = f"""--hidden-size 16 --num-attention-heads 4 --ffn-hidden-size 24 --max-position-embeddings 16
    {_LLAMA} --norm-epsilon 1e-6 --num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 8
    --moe-shared-expert-intermediate-size 12 --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias --moe-router-num-groups 4 --moe-router-group-topk 2
    --moe-router-topk-scaling-factor 2.5 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2
    --moe-router-dtype fp32"""
SCRIPTS = {
    # examples/gpt3: nothing but sizes.
    "gpt": """--num-layers 2 --hidden-size 24 --num-attention-heads 4 --max-position-embeddings 20""",
    # examples/llama, of the first Llama: the width of the MLP is left to the defaults.
    "llama": f"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 16 {_LLAMA}",
    "llama_groups": f"""--num-layers 2 --hidden-size 24 --num-attention-heads 4 --kv-channels 8
        --max-position-embeddings 16 {_LLAMA} {_GROUPS} --rotary-percent 0.5 --add-qkv-bias""",
    # examples/mixtral.
    "mixtral": f"""--num-layers 2 --hidden-size 16 --num-attention-heads 4 --ffn-hidden-size 20
        --max-position-embeddings 16 {_LLAMA} {_GROUPS} --no-position-embedding --rotary-base 1000000
        --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2""",
    # A mixture, and no word about what its layers are like: GELU is exact here, as it has no bias to be fused with.
    "experts": """--num-layers 2 --hidden-size 16 --num-attention-heads 4 --ffn-hidden-size 20
        --max-position-embeddings 16 --disable-bias-linear --num-experts 4 --moe-router-topk 2
        --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3""",
    # DeepSeek-V3, without latents and with them.
    "deepseek": f"--num-layers 3 --moe-layer-freq ([0]*1+[1]*2) {_DEEPSEEK}",
    "latents": f"""--num-layers 2 --moe-layer-freq ([0]*1+[1]*1) {_DEEPSEEK} --multi-latent-attention --qk-layernorm
        --q-lora-rank 12 --kv-lora-rank 8 --qk-head-dim 4 --qk-pos-emb-head-dim 4 --v-head-dim 6""",
}
"""The command lines, with `_RUN` after each."""


# ------------------------------------------------------------------------------------- megatron/training/arguments.py


def arguments(argv: list[str]) -> argparse.Namespace:
    """Parse a command line: the flags that the scripts above have, and those whose defaults they rely on."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add = parser.add_argument
    # _add_network_size_args; those that it makes of TransformerConfig's fields have the defaults of these.
    add("--num-layers", type=int)
    add("--hidden-size", type=int)
    add("--num-attention-heads", type=int)
    add("--ffn-hidden-size", type=int, default=None)  # validate_args
    add("--kv-channels", type=int, default=None)  # validate_args
    add("--group-query-attention", action="store_true")
    add("--num-query-groups", type=int, default=1)  # argparse_meta of the field
    add("--max-position-embeddings", type=int, default=None)  # required by validate_args
    add("--position-embedding-type", default="learned_absolute")
    add("--no-position-embedding", action="store_false", dest="add_position_embedding")  # only an error without rope
    add("--rotary-base", type=int, default=10000)
    add("--rotary-percent", type=float, default=1.0)
    add("--normalization", default="LayerNorm")
    add("--norm-epsilon", type=float, default=1e-5, dest="layernorm_epsilon")
    add("--swiglu", action="store_true")
    add("--disable-bias-linear", action="store_false", dest="add_bias_linear")
    add("--add-qkv-bias", action="store_true")
    add("--qk-layernorm", action="store_true")
    add("--untie-embeddings-and-output-weights", action="store_true")
    add("--make-vocab-size-divisible-by", type=int, default=128)
    add("--attention-dropout", type=float, default=0.1)
    add("--hidden-dropout", type=float, default=0.1)
    # _add_training_args
    add("--no-bias-gelu-fusion", action="store_false", dest="bias_gelu_fusion")
    add("--no-bias-swiglu-fusion", action="store_false", dest="bias_swiglu_fusion")
    add("--seq-length", type=int)
    add("--micro-batch-size", type=int)
    add("--global-batch-size", type=int)
    add("--vocab-size", type=int)  # of the tokenizer, the end of a document included
    # _add_moe_args, and fields of TransformerConfig
    add("--num-experts", type=int, default=None)
    add("--moe-ffn-hidden-size", type=int, default=None)  # validate_args
    add("--moe-layer-freq", type=_frequency, default=1)
    add("--moe-router-topk", type=int, default=2)
    add("--moe-router-score-function", default="softmax")
    add("--moe-router-pre-softmax", action="store_true")
    add("--moe-router-topk-scaling-factor", type=float, default=None)
    add("--moe-router-num-groups", type=int, default=None)
    add("--moe-router-group-topk", type=int, default=None)
    add("--moe-router-enable-expert-bias", action="store_true")
    add("--moe-router-dtype", default=None)
    # Lists of one there; megatron-core takes a string and a number as well.
    add("--moe-router-load-balancing-type", default="aux_loss")
    add("--moe-aux-loss-coeff", type=float, default=0.0)
    add("--moe-z-loss-coeff", type=float, default=None)
    add("--moe-shared-expert-intermediate-size", type=int, default=None)
    add("--moe-token-dispatcher-type", default="allgather")
    # _add_mla_args, whose defaults are not those of MLATransformerConfig
    add("--multi-latent-attention", action="store_true")
    add("--q-lora-rank", type=int, default=None)
    add("--kv-lora-rank", type=int, default=32)
    add("--qk-head-dim", type=int, default=128)
    add("--qk-pos-emb-head-dim", type=int, default=64)
    add("--v-head-dim", type=int, default=128)
    add("--rotary-scaling-factor", type=float, default=1.0)
    add("--mscale", type=float, default=1.0)
    add("--mscale-all-dim", type=float, default=0.0)
    return _validated(parser.parse_args(argv))


def _frequency(text: str) -> int | list[int]:
    """Read N or a Python list, as moe_freq_type; the scripts above are the only ones that it is called with."""
    return eval(text, {"__builtins__": {}}) if "[" in text else int(text)  # type: ignore[no-any-return]


def _validated(args: argparse.Namespace) -> argparse.Namespace:
    """Fill in what follows from other flags, as validate_args, and the vocabulary, as tokenizers do."""
    if args.ffn_hidden_size is None:
        gated = int((4 * args.hidden_size * 2 / 3) / 64) * 64
        args.ffn_hidden_size = gated if args.swiglu else 4 * args.hidden_size
    if args.kv_channels is None:
        args.kv_channels = args.hidden_size // args.num_attention_heads
    assert args.max_position_embeddings >= args.seq_length
    if not args.add_bias_linear:
        args.bias_gelu_fusion = False
    if args.add_bias_linear:
        args.add_qkv_bias = True
    if args.num_experts is not None and args.moe_ffn_hidden_size is None:
        args.moe_ffn_hidden_size = args.ffn_hidden_size
    multiple = args.make_vocab_size_divisible_by
    args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple
    return args


def config(args: argparse.Namespace) -> TransformerConfig:
    """Make the configuration of the layers, as core_transformer_config_from_args."""
    kind = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    options = {f.name: getattr(args, f.name) for f in dataclasses.fields(kind) if hasattr(args, f.name)}
    options["num_moe_experts"] = args.num_experts
    if args.swiglu:
        options |= {"activation_func": torch.nn.functional.silu, "gated_linear_unit": True}
        options["bias_activation_fusion"] = args.bias_swiglu_fusion
    else:
        options["bias_activation_fusion"] = args.bias_gelu_fusion
    options["num_query_groups"] = args.num_query_groups if args.group_query_attention else None
    # Kernels of GPUs, which change no number: they are on by default there.
    kernels = dict.fromkeys(("persist_layer_norm", "apply_rope_fusion", "masked_softmax_fusion"), False)
    return kind(**options, **kernels, use_cpu_initialization=True)


class LatentDotProduct(DotProductAttention):
    """megatron-core's own dot product, with values of another size than keys, as only TransformerEngine's has there."""

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


def build(args: argparse.Namespace) -> GPTModel:
    """Build the model as gpt_builders.py, of megatron-core's own layers instead of TransformerEngine's."""
    cfg = config(args)
    if args.num_experts:
        spec = get_gpt_decoder_block_spec(cfg, use_transformer_engine=False, normalization=args.normalization)
        if args.multi_latent_attention:
            for layer in spec.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = LatentDotProduct
    else:
        spec = get_gpt_layer_local_spec(
            args.num_experts, False, args.qk_layernorm, args.multi_latent_attention, normalization=args.normalization
        )
    return GPTModel(
        cfg,
        spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
    )


# --------------------------------------------------------------------------------------------------------- recording


def fill(model: GPTModel, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """Give every parameter and bias of a router values that matter, multiples of 1 / STEP; return them all."""
    held = dict(model.named_parameters())
    held |= {name: buffer for name, buffer in model.named_buffers() if name.endswith("expert_bias")}
    for name, tensor in held.items():
        shape = tuple(tensor.shape)
        if name.endswith("norm.weight"):
            center, std = 1.0, 0.3
        elif len(shape) == 1:
            center, std = 0.0, 0.1 if name.endswith("expert_bias") else 0.3
        elif "embedding" in name:
            center, std = 0.0, 0.5
        else:
            center, std = 0.0, (2.0 if ".router." in name else 1.2) / shape[1] ** 0.5
        codes = np.rint((center + std * rng.standard_normal(shape)) * STEP).clip(-127, 127)
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(codes.astype(np.float32) / STEP))
    return held


@contextlib.contextmanager
def no_near_ties() -> Iterator[None]:
    """Assert that no choice of an expert is so close that rounding could turn it."""
    gaps = []
    routing = TopKRouter.routing

    def noted(self: TopKRouter, logits: torch.Tensor, *rest: Any, **options: Any) -> Any:
        scores = logits.detach().flatten(0, 1).sigmoid()  # falls where a softmax does
        scores = scores if self.expert_bias is None else scores + self.expert_bias
        ordered = scores.sort(-1).values
        gaps.append((ordered[:, 1:] - ordered[:, :-1]).min().item())
        if (groups := self.config.moe_router_num_groups) is not None:
            count = self.topk // self.config.moe_router_group_topk
            of_groups = scores.unflatten(-1, (groups, -1)).topk(count).values.sum(-1).sort(-1).values
            gaps.append((of_groups[:, 1:] - of_groups[:, :-1]).min().item())
        return routing(self, logits, *rest, **options)

    TopKRouter.routing = noted
    try:
        yield
    finally:
        TopKRouter.routing = routing
    assert min(gaps, default=1.0) > 1e-5, min(gaps)


def record(argv: list[str], seed: int) -> Recording:
    """Run a command line's model forward and backward once."""
    args = arguments(argv)
    rng = np.random.default_rng(seed)
    model = build(args)
    held = fill(model, rng)
    tokens = torch.from_numpy(rng.integers(0, args.vocab_size, (args.global_batch_size, args.seq_length + 1)))
    positions = torch.arange(args.seq_length).expand(len(tokens), -1)
    causal = torch.ones(1, 1, args.seq_length, args.seq_length).triu(1).bool()
    with no_near_ties():
        # As loss_func in pretrain_gpt.py: the sum over all targets, divided by their number.
        loss = model(tokens[:, :-1], positions, causal, labels=tokens[:, 1:]).mean()
    loss.backward()
    parameters = dict(model.named_parameters())
    gradients = {name: parameter.grad.numpy() for name, parameter in parameters.items()}
    assert not (dead := [name for name, grad in gradients.items() if not grad.any()]), dead
    weights = {name: tensor.detach().numpy() for name, tensor in held.items()}
    return Recording(argv, tokens.numpy(), loss.item(), weights, gradients)


def main() -> None:
    """Record all scripts."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        ps.initialize_model_parallel()
        # Dropout is off, so that its random numbers matter to nobody.
        CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
        # 0.16.1 is wrong about TransformerEngine in these files where it is absent.
        moe_utils.te_general_gemm, multi_latent_attention.HAVE_TE = None, False
        with OnCPU():
            lines = {name: shlex.split(f"{script} {_RUN}") for name, script in SCRIPTS.items()}
            recordings = {name: record(argv, seed) for seed, (name, argv) in enumerate(lines.items())}
        dist.destroy_process_group()
    write(recordings)
    for name, one in recordings.items():
        count = sum(weight.size for weight in one.weights.values())
        print(f"{name}: {len(one.weights)} tensors, {count} numbers, loss {one.loss:.6f}")
    print(f"{FILE}: {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
