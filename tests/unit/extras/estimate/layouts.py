"""Layouts of every kind for checks without processes, and a router by which tokens choose all experts in turn."""

from __future__ import annotations

from typing import Any

import torch

from megalite.core.options.compression import CODECS
from megalite.core.parts.ffn.experts.routing import Router
from tests.codecs import specs_of
from tests.parity import jobs
from tests.parity.layouts import LAYOUTS, MODELS, VARIANTS

SP_OFF = {"sequence_parallel": False}
CUT = {"tp": 2, "pp": 2}
WHOLE_3 = {"zero": 3, "zero_whole_below": 0}
FEW = {"global_batch_size": 4}

# As in the parity grid: (world, layers, layout, training options); for Llama and for GPT-2 with tied embeddings.
MORE: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "zero0": (8, 4, {**CUT, "zero": 0}, {}),
    "zero2": (8, 4, {**CUT, "zero": 2}, {}),
    "zero2-step": (8, 4, {**CUT, "zero": 2, "zero_reduce": "step"}, {}),
    "zero3": (8, 4, {**CUT, **WHOLE_3}, {}),
    "zero3-small-whole": (8, 4, {**CUT, "zero": 3, "zero_whole_below": 4000}, {}),
    "zero3-backward": (8, 4, {**CUT, **WHOLE_3, "zero_keep": "backward"}, {}),
    "zero3-keep-step": (8, 4, {**CUT, **WHOLE_3, "zero_keep": "step"}, {}),
    "zero3-zb-h1": (8, 4, {**CUT, **WHOLE_3, "schedule": "zb-h1"}, {}),
    "zero3-zb-v": (8, 4, {**CUT, **WHOLE_3, "vp": 2, "schedule": "zb-v"}, {}),
    "zero3-vp2": (8, 4, {**CUT, **WHOLE_3, "vp": 2}, {}),
    "zero3-groups": (16, 4, {**CUT, **WHOLE_3, "zero_group": "2"}, {"global_batch_size": 16}),
    "zero2-groups": (8, 4, {"tp": 2, "zero": 2, "zero_group": "2"}, {}),
    "one-bucket": (8, 4, {**CUT, "bucket_size": 2**39}, {}),
    "no-overlap": (
        8,
        4,
        {**CUT, "overlap_grad_reduce": False, "overlap_param_gather": False, "overlap_tp_reduce": False},
        {},
    ),
    "no-sp-zb-h1": (8, 4, {**CUT, **SP_OFF, "schedule": "zb-h1"}, {}),
    "tp4-no-sp": (8, 4, {"tp": 4, **SP_OFF}, {}),
    "recompute-full": (8, 4, CUT, {"recompute": "full"}),
    "recompute-selective": (8, 4, {**CUT, "schedule": "zb-h1"}, {"recompute": "selective"}),
    "loss-chunk": (8, 4, CUT, {"loss_chunk": 5}),
    "smoothing": (8, 4, CUT, {"label_smoothing": 0.1}),
    "bf16": (8, 4, CUT, {"precision": "bf16", "grad_reduce_dtype": "bf16"}),
    **{name: (8, 4, CUT, {"compress": specs_of(name)[0]}) for name in CODECS},
    "gpipe": (8, 4, {**CUT, "schedule": "gpipe"}, {}),
    "naive": (8, 4, {**CUT, "schedule": "naive"}, {}),
    "eager": (8, 4, {"tp": 2, "pp": 4, "schedule": "1f1b-eager"}, {}),
    "pp3": (6, 6, {"pp": 3, "schedule": "zb-h1"}, {}),
    "pp4-vp3": (4, 12, {"pp": 4, "vp": 3}, {}),
    # Replicas with two, three and three micro-batches.
    "uneven-zero3": (3, 4, WHOLE_3, {}),
    "uneven-zb-h1": (6, 4, {"pp": 2, "schedule": "zb-h1", "zero": 2}, {}),
    "uneven-vp2": (6, 4, {"pp": 2, "vp": 2, "schedule": "interleaved"}, {}),
}
LARGE: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "64-interleaved": (64, 8, {"tp": 4, "pp": 4, "vp": 2}, {"global_batch_size": 16}),
    "64-zb-v-zero3": (64, 16, {"tp": 2, "pp": 8, "vp": 2, "schedule": "zb-v", **WHOLE_3}, {"global_batch_size": 32}),
}
# (world, layers, layout, training options, model): a rank of a group holds the head and the tail of every sample.
SHARED: dict[str, tuple[int, int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "cp2-gather-zb-v": (8, 4, {**CUT, "cp": 2, "cp_comm": "gather", "vp": 2, "schedule": "zb-v"}, {}, {}),
    "cp2-ring-zero3": (8, 4, {"tp": 2, "cp": 2, "cp_comm": "ring", **WHOLE_3}, {"recompute": "selective", **FEW}, {}),
    "cp4-a2a-zero2": (
        8,
        4,
        {"cp": 4, "cp_comm": "a2a", "zero": 2, "zero_group": "2"},
        {"recompute": "full", **FEW},
        {},
    ),
    "cp8-a2a+ring": (8, 2, {"cp": 8, "cp_comm": "a2a+ring"}, {}, {"num_heads": 4, "num_kv_heads": 4}),
    "cp8-a2a+gather": (16, 2, {"cp": 8, "tp": 2, "cp_comm": "a2a+gather"}, FEW, {"seq_len": 32}),
}
SHARED_MORE: dict[str, tuple[int, int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "64-cp16": (64, 2, {**CUT, "cp": 16, "cp_comm": "ring", "schedule": "zb-h1"}, FEW, {"seq_len": 64}),
    "32-cp32-a2a+ring": (32, 1, {"cp": 32, "cp_comm": "a2a+ring"}, {"recompute": "selective", **FEW}, {"seq_len": 64}),
    "64-cp32-a2a+gather": (64, 2, {"pp": 2, "cp": 32, "cp_comm": "a2a+gather"}, FEW, {"seq_len": 64}),
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "moe_topk": 2, "moe_ffn_size": 24, "moe_aux_loss_coeff": 0.01}
SPARSE: dict[str, tuple[int, int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "ep2-zb-v": (8, 4, {**CUT, "ep": 2, "vp": 2, "schedule": "zb-v"}, {}, EXPERTS),
    "mtp-zero3": (8, 4, {**CUT, **WHOLE_3}, {}, {"mtp_num_layers": 2}),
}
SPARSE_MORE: dict[str, tuple[int, int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "uneven-ep3": (6, 4, {"pp": 2, "ep": 3}, {}, {**EXPERTS, "num_experts": 6, "moe_topk": 3}),
    "ep4-whole-zero3": (8, 4, {"tp": 2, "ep": 4, "etp": "1", **WHOLE_3}, {"recompute": "full"}, EXPERTS),
    "mtp-cp2-zb-v": (8, 4, {**CUT, "cp": 2, "vp": 2, "schedule": "zb-v"}, {}, {"mtp_num_layers": 1}),
    "ep2-cp2-zero2": (8, 4, {"tp": 2, "cp": 2, "ep": 2, "zero": 2}, FEW, EXPERTS),
    "64-ep64": (64, 2, {"ep": 64}, {"global_batch_size": 64}, {**EXPERTS, "num_experts": 64, "seq_len": 32}),
    "64-ep16-whole": (
        64,
        4,
        {"tp": 4, "pp": 2, "ep": 16, "etp": "1", "schedule": "zb-h1"},
        {},
        {**EXPERTS, "num_experts": 16, "seq_len": 32},
    ),
}
ALL = {
    **{
        f"{name}-{model}": (MODELS[model], *layout, *([{}] if len(layout) == 3 else []))
        for name, layout in (LAYOUTS | MORE).items()
        for model in ("llama", "gpt2")
    },
    **{name: (MODELS["gpt2"], *layout) for name, layout in LARGE.items()},
    **{
        name: (lambda layers, options=options: jobs.llama(layers, **options), 8, 4, CUT, {})
        for name, options in VARIANTS.items()
    },
    **{
        name: (lambda layers, options=options: jobs.llama(layers, **options), *layout)
        for name, (*layout, options) in (SHARED | SHARED_MORE | SPARSE | SPARSE_MORE).items()
    },
}


def in_turn(self: Router, x: torch.Tensor, logits_of: Any = Router.forward) -> torch.Tensor:
    """Logits by which tokens choose all experts in turn: each gets as many rows from every rank."""
    first = torch.arange(len(x))[:, None] * self.k
    places = (torch.arange(self.num_experts) - first) % self.num_experts
    # Weights that nobody has initialized may be NaN.
    return 0 * logits_of(self, x).nan_to_num(0, 0, 0) - places.float()
