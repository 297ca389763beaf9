"""The feed-forward layers by name; one file describes each."""

from megalite.core.model.kinds import FeedForward
from megalite.core.parts.ffn.dense import DenseMLP
from megalite.core.parts.ffn.routed import MoE

FEED_FORWARDS: dict[str, FeedForward] = {"mlp": DenseMLP(), "moe": MoE()}
"""Name (`BlockKind.feed_forward`) -> feed-forward layer."""
