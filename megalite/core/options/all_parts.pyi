from collections.abc import Iterator
from typing import Any

from megalite.core.options.part import OptimPart, PartRules
from megalite.core.parts.decays.published import WsdOptions
from megalite.core.parts.options.attention_options import AttentionOptions
from megalite.core.parts.options.delta_nets import DeltaNetOptions
from megalite.core.parts.options.expert_options import ExpertOptions
from megalite.core.parts.options.head_options import HeadOptions
from megalite.core.parts.options.latents import LatentOptions
from megalite.core.parts.options.multi_token import MultiTokenOptions
from megalite.core.parts.options.mup import MupOptions
from megalite.core.parts.options.narrow_embeddings import NarrowEmbeddingOptions
from megalite.core.parts.positions.learned import LearnedPositionOptions
from megalite.core.parts.positions.rope import RopeOptions
from megalite.core.parts.update.ademamix import AdEMAMixOptions
from megalite.core.parts.update.muon import MuonOptions

def model_parts() -> Iterator[PartRules[Any, Any]]: ...
def optim_parts() -> Iterator[OptimPart]: ...

class ModelParts(
    AttentionOptions,
    DeltaNetOptions,
    ExpertOptions,
    HeadOptions,
    LatentOptions,
    LearnedPositionOptions,
    MupOptions,
    MultiTokenOptions,
    NarrowEmbeddingOptions,
    RopeOptions,
): ...
class OptimParts(AdEMAMixOptions, MuonOptions, WsdOptions): ...
