"""The least draw that fails as a draw does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from megalite.runtime.options.fields import GROUP_OF
from tests.composer.draws import Draw

_AXES = ("dp", "tp", "pp", "cp", "ep")
_OF_AXIS = {
    "tp": ("sequence_parallel", "tp_chunks", "etp"),
    "pp": ("vp", "schedule", "pipeline_layout"),
    "cp": ("cp_comm",),
    "ep": ("moe_dispatch", "etp"),
}


def shrink(draw: Draw, fails: Callable[[Draw], bool], seconds: float) -> Draw:
    """Leave out one feature at a time, as long as the rest still fails; stop after some seconds.

    Args:
        draw: a draw that fails.
        fails: whether another one fails in the same way.
        seconds: time for all tries together.
    """
    end = time.monotonic() + seconds
    tried: list[Draw] = [draw]
    smaller = True
    while smaller:
        smaller = False
        for other in _less(draw):
            if time.monotonic() > end:
                return draw
            if other in tried:
                continue
            tried.append(other)
            if fails(other):
                draw, smaller = other, True
                break
    return draw


def _less(draw: Draw) -> Iterator[Draw]:
    """Yield draws with one feature less, those first that spare the most."""
    yield from (_without(draw, key) for key in ("export", "resume") if key in draw)
    if draw.get("data", "mock") != "mock":
        source = draw["data"].split()
        of_files = ("document_mask", "loss_on", "loss_per", "long_documents")
        yield {**_without(draw, *of_files), "data": "mock"}
        yield from ({**draw, "data": " ".join(w for w in source if w != word)} for word in source[1:])
        if source[0] in ("blend", "chats"):
            yield {**draw, "data": "files"}
    yield from (_without(draw, *keys) for keys in _parts(draw))
    for axis in _AXES:
        if draw.get(axis, 1) > 1:
            yield _without(draw, axis, *_OF_AXIS.get(axis, ()))
            if draw[axis] == 4:
                yield {**draw, axis: 2}
    if "resume" in draw:
        yield from ({**draw, "resume": _without(draw["resume"], key)} for key in draw["resume"])
    yield from (_without(draw, *keys) for keys in _GROUPS if any(key in draw for key in keys[1:]))
    yield from (_without(draw, key) for key in draw if key not in (*_AXES, "data", "seed"))
    if draw.get("num_layers", 2) > 2:
        yield {**draw, "num_layers": draw["num_layers"] - 1}


def _parts(draw: Draw) -> Iterator[list[str]]:
    """Yield all options of the model, of its experts, of training, and so on, then the halves of each."""
    parts: dict[str, list[str]] = {}
    for key in draw:
        if key not in (*_AXES, "data", "seed") and key in GROUP_OF:
            part = "experts" if key.startswith("moe_") or key == "num_experts" else GROUP_OF[key]
            parts.setdefault(part, []).append(key)
    yield from parts.values()
    for keys in parts.values():
        if len(keys) > 3:
            yield from (keys[: len(keys) // 2], keys[len(keys) // 2 :])


# Options that go together.
_GROUPS = (
    ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    (
        *("linear_attention_freq", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
        *("linear_value_head_dim", "linear_conv_kernel_dim", "norm_eps"),
    ),
    ("window", "window_pattern", "rope_theta_local"),
    ("no_rope_freq", "attention_temperature", "attention_temperature_floor"),
    ("moe_router_num_groups", "moe_router_group_topk"),
    ("moe_router_score_function", "moe_router_enable_expert_bias"),
    ("zero", "zero_whole_below", "zero_group", "zero_keep", "zero_reduce", "debug_zero"),
)


def _without(draw: Draw, *keys: str) -> Draw:
    return {key: value for key, value in draw.items() if key not in keys}
