from megalite.core.parts.options.attention_options import AttentionOptions
from megalite.core.parts.options.delta_nets import DeltaNetOptions
from megalite.core.parts.options.expert_options import ExpertOptions
from megalite.core.parts.options.latents import LatentOptions
from megalite.core.parts.options.learned_positions import LearnedPositionOptions
from megalite.core.parts.options.multi_token import MultiTokenOptions
from megalite.core.parts.options.mup import MupOptions
from megalite.core.parts.options.narrow_embeddings import NarrowEmbeddingOptions
from megalite.core.parts.options.rope_options import RopeOptions

class AllParts(
    AttentionOptions,
    DeltaNetOptions,
    ExpertOptions,
    LatentOptions,
    LearnedPositionOptions,
    MupOptions,
    MultiTokenOptions,
    NarrowEmbeddingOptions,
    RopeOptions,
): ...
