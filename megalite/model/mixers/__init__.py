"""The mixers by name; one file describes each."""

from megalite.model.kinds import Mixer
from megalite.model.mixers.delta_net import DeltaNet
from megalite.model.mixers.gqa import GroupedQueryAttention
from megalite.model.mixers.mla import LatentAttention

MIXERS: dict[str, Mixer] = {"gqa": GroupedQueryAttention(), "mla": LatentAttention(), "delta_net": DeltaNet()}
"""Name (`BlockKind.mixer`) -> mixer."""
