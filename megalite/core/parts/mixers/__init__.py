"""The mixers by name; one file describes each."""

from megalite.core.model.kinds import Mixer
from megalite.core.parts.mixers.delta_net import DeltaNet
from megalite.core.parts.mixers.gqa import GroupedQueryAttention
from megalite.core.parts.mixers.mla import LatentAttention

MIXERS: dict[str, Mixer] = {"gqa": GroupedQueryAttention(), "mla": LatentAttention(), "delta_net": DeltaNet()}
"""Name (`BlockKind.mixer`) -> mixer."""
