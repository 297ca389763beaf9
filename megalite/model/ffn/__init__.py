"""The feed-forward layers by name; one file describes each."""

from megalite.model.ffn.dense import DenseMLP
from megalite.model.ffn.routed import MoE
from megalite.model.kinds import FeedForward

FEED_FORWARDS: dict[str, FeedForward] = {"mlp": DenseMLP(), "moe": MoE()}
"""Name (`BlockKind.feed_forward`) -> feed-forward layer."""
