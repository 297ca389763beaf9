"""Track memory, kernels and FLOPs of a program that runs on fake CUDA tensors."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalite.core.pipeline.observe import Observer
from megalite.core.pipeline.schedule import Op
from megalite.extras.estimate.record import Event, Kernel

_ATEN = torch.ops.aten
# torch's allocator rounds up to this many bytes.
_BLOCK = 512
# Operators that allocate or reinterpret memory without launching a kernel.
_NO_KERNEL = {
    _ATEN.detach.default,
    _ATEN.empty.memory_format,
    _ATEN.empty_like.default,
    _ATEN.empty_strided.default,
    _ATEN.new_empty.default,
    _ATEN.new_empty_strided.default,
    _ATEN.lift_fresh.default,
    _ATEN.set_.source_Storage,
    _ATEN._unsafe_view.default,
}
# Positions of the two matrices among the arguments.
_PRODUCTS = {
    _ATEN.mm: (0, 1),
    _ATEN.bmm: (0, 1),
    _ATEN._scaled_mm: (0, 1),
    _ATEN._grouped_mm: (0, 1),
    _ATEN.addmm: (1, 2),
    _ATEN.baddbmm: (1, 2),
}
_ATTENTION = {
    _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_efficient_attention,
    _ATEN._scaled_dot_product_flash_attention_backward,
    _ATEN._scaled_dot_product_efficient_attention_backward,
}
# FlashAttention with windows and pieces (core/ops/bands.py), and for varying lengths (torch.nn.attention.varlen).
_FLASH = (
    "aten::_flash_attention_forward",
    "aten::_flash_attention_backward",
    "torch_attn::_varlen_attn",
    "torch_attn::_varlen_attn_backward",
)
# Rows of the products in Triton's kernels, and what each element of a row is multiplied by.
_GROUPED: dict[str, Callable[..., tuple[torch.Tensor, int]]] = {
    "megalite::triton_grouped_product": lambda x, w, sizes, transposed: (x, w.shape[1 if transposed else 2]),
    "megalite::triton_grouped_wgrad_": lambda main_grad, dy, x, *rest: (dy, x.shape[1]),
    "megalite::triton_delta_states": lambda written, reads, *rest: (written, 2 * reads.shape[-1]),
    "megalite::triton_delta_states_backward": lambda dstates, dnew, dlast, reads, *rest: (reads, 2 * dlast.shape[-1]),
}
# What a pipeline operation leaves in memory, by its kind.
_KEPT = {"F": "activations", "I": "deferred weight gradients", "RF": "messages", "RB": "messages"}


@dataclass
class Peak:
    """Peak memory.

    Attributes:
        nbytes: bytes at the peak.
        during: pipeline operation, or part of the step, in which it occurs.
        holders: (what holds memory, torch operator that made it) -> bytes.
    """

    nbytes: int = 0
    during: str = ""
    holders: Counter[tuple[str, str]] = field(default_factory=Counter)


class Tracker(TorchDispatchMode, Observer):
    """Tracks every torch operator inside it, in all threads of the autograd engine, and the pipeline's operations.

    Args:
        log: list that kernels are appended to.

    Attributes:
        live: bytes of CUDA memory in use.
        peak: peak memory since `start`.
        timeline: (pipeline operation, bytes before it, peak bytes during it) of each operation, in order.
        spans: (kind, begin and end in the log) of each pipeline operation.
        held: holder -> bytes before each of them.
        syncs: number of times the host had to wait for the device, by cause.
    """

    def __init__(self, log: list[Event]) -> None:
        super().__init__()
        self.log = log
        self.live = 0
        self.peak = Peak()
        self.timeline: list[tuple[str, int, int]] = []
        self.spans: list[tuple[str, int, int]] = []
        self.held: list[dict[str, int]] = []
        self.syncs: Counter[str] = Counter()
        self._output: set[tuple[int, int]] = set()
        self._blocks: dict[int, list[Any]] = {}  # storage -> [bytes, holder, torch operator, weak reference]
        self._held: Counter[tuple[str, str]] = Counter()
        self._new: list[int] = []
        self._risen = False  # whether the holders of the peak are still to be recorded
        self._during = "setup"
        self._before = self._most = self._begun = 0

    def start(self, during: str) -> None:
        """Measure the peak from here on."""
        self.peak = Peak()
        self._risen = False
        self._during = during
        self._rise()

    def finish(self) -> Peak:
        """Return the peak since `start`."""
        self._settle()
        return self.peak

    def label(self, holder: str, tensors: Iterable[torch.Tensor]) -> None:
        """Name the holder of the memory of some tensors."""
        for x in tensors:
            block = self._blocks.get(x.untyped_storage()._cdata)
            if block is not None:
                self._relabel(block, holder)

    def mark_output(self, flat: torch.Tensor, start: int) -> None:
        """Record where the output layer's weight, or its gradient, begins in a bucket, to recognize its products.

        FLOPs alone do not tell: other layers have products of the same size, and a loss's last chunk is smaller.
        """
        self._output.add((flat.untyped_storage()._cdata, start))

    def label_rest(self, holder: str) -> None:
        """Name the holder of all memory that has none yet."""
        self._end_phase(holder)

    def begin(self, op: Op) -> None:
        """Begin a pipeline operation."""
        self._end_phase("other")
        self._during = str(op)
        self._before = self._most = self.live
        by_holder: Counter[str] = Counter()
        for (holder, _), nbytes in self._held.items():
            by_holder[holder] += nbytes
        self.held.append(dict(+by_holder))
        self._begun = len(self.log)

    def end(self, op: Op) -> None:
        """Name the holder of what the operation leaves in memory, and add it to the timeline."""
        self._end_phase(_KEPT.get(op.kind, "gradients of activations"))
        self.timeline.append((str(op), self._before, self._most))
        self.spans.append((op.kind, self._begun, len(self.log)))
        self._during = "between operations"

    def finished(self) -> None:
        """Track the rest of the step."""
        self._during = "after the pipeline"

    def _end_phase(self, holder: str) -> None:
        self._settle()
        for key in self._new:
            block = self._blocks.get(key)
            if block is not None and block[1] == "workspace":
                self._relabel(block, holder)
        self._new.clear()

    def _relabel(self, block: list[Any], holder: str) -> None:
        self._held[block[1], block[2]] -= block[0]
        block[1] = holder
        self._held[block[1], block[2]] += block[0]

    def _settle(self) -> None:
        """Record the holders of a peak before memory changes in any other way than by rising."""
        if self._risen:
            self.peak.holders = +self._held
            self._risen = False

    def _rise(self) -> None:
        self._most = max(self._most, self.live)
        if self.live > self.peak.nbytes:
            self.peak.nbytes = self.live
            self.peak.during = self._during
            self._risen = True

    def _resize(self, key: int, nbytes: int) -> None:
        block = self._blocks[key]
        nbytes = -(-nbytes // _BLOCK) * _BLOCK
        if nbytes < block[0]:
            self._settle()
        self.live += nbytes - block[0]
        self._held[block[1], block[2]] += nbytes - block[0]
        block[0] = nbytes
        self._rise()

    def _free(self, key: int) -> None:
        self._resize(key, 0)
        del self._blocks[key]

    def see(self, x: Any, made_by: str) -> None:
        """Track the memory of a tensor."""
        if not isinstance(x, torch.Tensor) or x.device.type != "cuda":
            return
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._blocks:
            self._blocks[key] = [0, "workspace", made_by, weakref.ref(storage, lambda _: self._free(key))]
            self._new.append(key)
            self._resize(key, storage.nbytes())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Track a storage whose size has changed."""
        if storage._cdata in self._blocks:
            self._resize(storage._cdata, storage.nbytes())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args)
        if func is _ATEN._local_scalar_dense.default and args[0].device.type == "cuda":
            self.syncs["item"] += 1
            return torch.ones((), dtype=args[0].dtype).tolist()
        if func in (_ATEN.addmm.dtype_out, _ATEN.mm.dtype_out):
            out = kwargs["out"]  # one kernel on a GPU; torch's decomposition of it would make copies
        else:
            out = func(*args, **kwargs)
        name = func.name().partition(".")[0]
        results = tree_leaves(out)
        self._count(func, name, args, kwargs, results)
        for x in results:
            self.see(x, name)
        return out

    def _count(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]) -> None:
        if not launches(func):
            return
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        outputs = [x for x in results if isinstance(x, torch.Tensor)]
        if not any(x.device.type == "cuda" for x in (*tensors, *outputs)):
            return
        if func is _ATEN._to_copy.default and outputs[0].device.type == "cpu":
            self.syncs["copy to the host"] += 1
        if func is _ATEN._to_copy.default and tensors[0].device.type == "cpu" and not kwargs.get("non_blocking"):
            self.syncs["copy to the GPU"] += 1
        read, written = operands(func, arguments(func, args, kwargs), outputs)
        nbytes, flops = sum(x.nbytes for x in (*read, *written)), _flops(func, args, kwargs)
        output = flops > 0 and any((x.untyped_storage()._cdata, x.storage_offset()) in self._output for x in tensors)
        self.log.append(Kernel(name, flops, nbytes, output))


def launches(func: Any) -> bool:
    """Whether an operator launches a kernel: it does more than make or reinterpret memory."""
    return not func.is_view and func not in _NO_KERNEL


def arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator by their names."""
    return {argument.name: value for argument, value in zip(func._schema.arguments, args)} | kwargs


def operands(
    func: Any, values: dict[str, Any], outputs: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that an operator reads, and those that it writes.

    Args:
        func: the operator.
        values: its arguments by their names.
        outputs: its results.
    """
    schema = {argument.name: argument for argument in func._schema.arguments}
    changed = tree_leaves([x for key, x in values.items() if (info := schema[key].alias_info) and info.is_write])
    written = {id(x): x for x in (*outputs, *changed) if isinstance(x, torch.Tensor)}
    read = [x for x in tree_leaves(values | {"out": None}) if isinstance(x, torch.Tensor)]
    return read, list(written.values())


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Count the FLOPs of matrix products and of attention, half of them if it is causal."""
    packet = func.overloadpacket
    if packet in _PRODUCTS:
        left, right = (args[place] for place in _PRODUCTS[packet])
        return 2 * left.numel() * right.shape[-1]
    if func.name() in _GROUPED:
        rows, width = _GROUPED[func.name()](*args)
        return 2 * rows.numel() * width
    if func.name() in _FLASH:
        return _flash_flops(arguments(func, args, kwargs))
    if packet not in _ATTENTION:
        return 0
    values = arguments(func, args, kwargs)
    q = values["query"]
    k = values["key"]
    v = values["value"]
    # Backward recomputes the scores and has four more products.
    width = q.shape[-1] + v.shape[-1]
    if "backward" in packet.__name__:
        width = 3 * q.shape[-1] + 2 * v.shape[-1]
    flops = 2 * q.shape[:-1].numel() * k.shape[-2] * width
    return flops // 2 if values.get("is_causal") else flops


def _flash_flops(values: dict[str, Any]) -> int:
    """Count the FLOPs of attention within a window, in pieces that are all as long as the longest one."""
    q = values["query"]
    v = values["value"]
    queries, keys = values["max_q"], values["max_k"]
    left, right = values.get("window_size") or (values["window_size_left"], values["window_size_right"])
    # Of the keys before the first query, and of the queries' own: windows count from the end.
    rows, before = np.arange(queries), keys - queries
    first = np.maximum(rows + before - left, 0) if left >= 0 else 0 * rows
    last = np.minimum(rows + before + right, keys - 1) if right >= 0 else 0 * rows + keys - 1
    pairs = int(np.maximum(last - first + 1, 0).sum())
    products = 3 * q.shape[-1] + 2 * v.shape[-1] if "grad_out" in values else q.shape[-1] + v.shape[-1]
    return 2 * q.shape[:-1].numel() // queries * pairs * products
