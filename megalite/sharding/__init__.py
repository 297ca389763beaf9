"""How a parameter is sharded (`shard`, without torch), and the local tensor with its gradient (`parameter`)."""

from megalite.sharding.shard import Layout, ParamSpec, Shard, StateTensor, count_parameters

__all__ = ["Layout", "ParamSpec", "Shard", "StateTensor", "count_parameters"]
