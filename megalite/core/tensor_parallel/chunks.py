"""Products with sequence parallelism in chunks of the sequence: one is computed while another is on its way.

Each rank's part of the sequence is cut into n chunks. A collective of chunk i handles the i-th chunk of all ranks,
which are not neighbors in the full sequence: their product is a batch of T matrices that reads or writes every n-th
one, so that nothing is copied. One n-th of the collective stays in the open, and products of fewer rows may be slower.

Shapes: S sequence (s = S / T its part, T tensor-parallel size), B micro-batch, n chunks, I and O features of this rank.
"""

from __future__ import annotations

import torch

from megalite.core.mesh import collectives
from megalite.core.mesh.context import Axis
from megalite.core.ops import Ops


def gather_linear(x_sBI: torch.Tensor, weight_OI: torch.Tensor, tp: Axis, ops: Ops, num_chunks: int) -> torch.Tensor:
    """Multiply the gathered x with the weight, each chunk while the next one is gathered: y_SBO."""
    chunks = x_sBI.unflatten(0, (num_chunks, -1))
    rows, (width, features) = chunks.shape[1] * chunks.shape[2], weight_OI.shape
    # Not a view: what follows may change it in place.
    y = x_sBI.new_empty(tp.size * len(x_sBI), x_sBI.shape[1], width)
    out = y.view(tp.size, num_chunks, rows, width)
    following = collectives.start_all_gather(chunks[0], tp)
    for i in range(num_chunks):
        gathered, work = following
        if i + 1 < num_chunks:
            following = collectives.start_all_gather(chunks[i + 1], tp)
        work.wait()
        ops.linear(gathered.view(tp.size, rows, features), weight_OI, out=out[:, i])
    return y


def linear_scatter(x_SBI: torch.Tensor, weight_OI: torch.Tensor, tp: Axis, ops: Ops, num_chunks: int) -> torch.Tensor:
    """Multiply x with the weight and sum over tp, each chunk while the next one is multiplied: y_sBO."""
    chunks = x_SBI.contiguous().view(tp.size, num_chunks, -1, x_SBI.shape[2])
    y = x_SBI.new_empty(len(x_SBI) // tp.size, x_SBI.shape[1], len(weight_OI))
    out = y.view(num_chunks, -1, len(weight_OI))
    works = []
    for i in range(num_chunks):
        product = ops.linear(chunks[:, i], weight_OI, out=y.new_empty(tp.size, *out.shape[1:]))
        works.append(collectives.reduce_scatter(out[i], product.flatten(0, 1), tp))
    for work in works:
        work.wait()
    return y
