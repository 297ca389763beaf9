"""Memory, kernels and FLOPs of what runs on fake CUDA tensors."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalite.estimate.record import Event, Ran
from megalite.pipeline.observe import Observer
from megalite.pipeline.schedule import Op

_ATEN = torch.ops.aten
# torch's allocator rounds up to so many bytes.
_BLOCK = 512
# These make or reinterpret memory, and launch nothing.
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
# Places of the two matrices.
_PRODUCTS = {
    _ATEN.mm: (0, 1),
    _ATEN.bmm: (0, 1),
    _ATEN._scaled_mm: (0, 1),
    _ATEN.addmm: (1, 2),
    _ATEN.baddbmm: (1, 2),
}
_ATTENTION = {
    _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_efficient_attention,
    _ATEN._scaled_dot_product_flash_attention_backward,
    _ATEN._scaled_dot_product_efficient_attention_backward,
}
# What is kept from an operation of the pipeline, by its kind.
_KEPT = {"F": "activations", "I": "deferred weight gradients", "RF": "messages", "RB": "messages"}


@dataclass
class Peak:
    """The moment of the greatest memory.

    Attributes:
        nbytes: then.
        during: the pipeline operation, or the part of the step.
        holders: bytes by what holds them, and by the operation of torch that made it.
    """

    nbytes: int = 0
    during: str = ""
    holders: Counter[tuple[str, str]] = field(default_factory=Counter)


class Tracker(TorchDispatchMode, Observer):
    """Follows every operation inside it, in all threads of the autograd engine; and a pipeline's operations.

    Args:
        log: kernels are added to it.

    Attributes:
        live: bytes of CUDA memory now.
        peak: since `start`.
        timeline: (pipeline operation, bytes before it, most during it) of each, in order.
        spans: (its kind, where it begins and ends in the log) of each.
        syncs: how often the host had to wait for the device, by operation of torch.
    """

    def __init__(self, log: list[Event]) -> None:
        super().__init__()
        self.log = log
        self.live = 0
        self.peak = Peak()
        self.timeline: list[tuple[str, int, int]] = []
        self.spans: list[tuple[str, int, int]] = []
        self.syncs: Counter[str] = Counter()
        self._output: set[tuple[int, int]] = set()
        self._blocks: dict[int, list[Any]] = {}  # storage -> [bytes, holder, torch's operation, weak reference]
        self._held: Counter[tuple[str, str]] = Counter()
        self._new: list[int] = []
        self._risen = False  # to a peak whose holders are not written down yet
        self._during = "setup"
        self._before = self._most = self._begun = 0

    def start(self, during: str) -> None:
        """Measure the peak from here on."""
        self.peak, self._risen, self._during = Peak(), False, during
        self._rise()

    def finish(self) -> Peak:
        """Return the peak since `start`."""
        self._settle()
        return self.peak

    def label(self, holder: str, tensors: Iterable[torch.Tensor]) -> None:
        """Name what holds the memory of some tensors."""
        for x in tensors:
            block = self._blocks.get(x.untyped_storage()._cdata)
            if block is not None:
                self._relabel(block, holder)

    def mark_output(self, flat: torch.Tensor, start: int) -> None:
        """Note where the output layer's weight, or its gradient, begins in a bucket: products with it are that layer's.

        Their FLOPs would not do: other layers have products of the same size, and the last chunk of a loss is smaller.
        """
        self._output.add((flat.untyped_storage()._cdata, start))

    def label_rest(self, holder: str) -> None:
        """Name what holds all memory that has no name yet."""
        self._end_phase(holder)

    def begin(self, op: Op) -> None:
        """Follow a pipeline operation."""
        self._end_phase("other")
        self._during = str(op)
        self._before = self._most = self.live
        self._begun = len(self.log)

    def end(self, op: Op) -> None:
        """Name what the operation leaves behind, and add a line to the timeline."""
        self._end_phase(_KEPT.get(op.kind, "gradients of activations"))
        self.timeline.append((str(op), self._before, self._most))
        self.spans.append((op.kind, self._begun, len(self.log)))
        self._during = "between operations"

    def finished(self) -> None:
        """Follow the rest of the step."""
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
        """Write down what holds memory at a peak, before anything changes that does not raise it."""
        if self._risen:
            self.peak.holders = +self._held
            self._risen = False

    def _rise(self) -> None:
        self._most = max(self._most, self.live)
        if self.live > self.peak.nbytes:
            self.peak.nbytes, self.peak.during, self._risen = self.live, self._during, True

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
        """Follow the memory of a tensor."""
        if not isinstance(x, torch.Tensor) or x.device.type != "cuda":
            return
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._blocks:
            self._blocks[key] = [0, "workspace", made_by, weakref.ref(storage, lambda _: self._free(key))]
            self._new.append(key)
            self._resize(key, storage.nbytes())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Follow a storage that has another size now."""
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
            out = kwargs["out"]  # one kernel on a GPU; torch's own description of it makes copies
        else:
            out = func(*args, **kwargs)
        name = func.name().partition(".")[0]
        results = tree_leaves(out)
        self._count(func, name, args, kwargs, results)
        for x in results:
            self.see(x, name)
        return out

    def _count(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]) -> None:
        if func.is_view or func in _NO_KERNEL:
            return
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        made = [x for x in results if isinstance(x, torch.Tensor)]
        if not any(x.device.type == "cuda" for x in (*tensors, *made)):
            return
        if func is _ATEN._to_copy.default and made[0].device.type == "cpu":
            self.syncs["copy to the host"] += 1
        given = {argument.name: argument for argument in func._schema.arguments}
        values = dict(zip(given, args)) | kwargs
        changed = tree_leaves([x for key, x in values.items() if (info := given[key].alias_info) and info.is_write])
        written = {id(x): x for x in (*made, *changed) if isinstance(x, torch.Tensor)}
        read = [x for x in tree_leaves(values | {"out": None}) if isinstance(x, torch.Tensor)]
        nbytes, flops = sum(x.nbytes for x in (*read, *written.values())), _flops(func, args, kwargs)
        output = flops > 0 and any((x.untyped_storage()._cdata, x.storage_offset()) in self._output for x in tensors)
        self.log.append(Ran(name, flops, nbytes, output))


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Count the FLOPs of matrix products, and of attention, of which a causal kernel does half."""
    packet = func.overloadpacket
    if packet in _PRODUCTS:
        left, right = (args[place] for place in _PRODUCTS[packet])
        return 2 * left.numel() * right.shape[-1]
    if packet not in _ATTENTION:
        return 0
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args)} | kwargs
    q, k, v = given["query"], given["key"], given["value"]
    # Backward computes the scores again, and four products beside.
    width = q.shape[-1] + v.shape[-1]
    if "backward" in packet.__name__:
        width = 3 * q.shape[-1] + 2 * v.shape[-1]
    flops = 2 * q.shape[:-1].numel() * k.shape[-2] * width
    return flops // 2 if given.get("is_causal") else flops
