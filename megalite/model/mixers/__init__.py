"""The mixers by name; one file describes each."""

from megalite.model.kinds import Mixer
from megalite.model.mixers.gqa import GroupedQueryAttention

MIXERS: dict[str, Mixer] = {"gqa": GroupedQueryAttention()}
"""Name (`BlockKind.mixer`) -> mixer."""
