"""Ops behind one registry: `ops = resolve("auto", device, dtype)`, then `ops.rmsnorm(x, weight, eps)`, …

One module per op holds its contract, its torch reference and its backends. `python -m megalite.core.ops` lists every
op, the choice on this machine, and why.
"""

from megalite.core.ops.choose import Choice, Ops, resolve

__all__ = ["Choice", "Ops", "resolve"]
