"""How a parameter is sharded (`shard`, without torch), the local tensor with its gradient (`parameter`), its state."""

from megalite.core.sharding.shard import Layout, ParamSpec, Shard, count_parameters
from megalite.core.sharding.state_tensor import StateTensor

__all__ = ["Layout", "ParamSpec", "Shard", "StateTensor", "count_parameters"]
