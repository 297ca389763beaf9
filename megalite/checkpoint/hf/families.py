"""The families that can be read and written."""

from megalite.checkpoint.hf import gpt2, gpt_neox, llama, mistral, olmo2, phi3, qwen2, qwen3
from megalite.checkpoint.hf.arch import Arch

ARCHS: dict[str, Arch] = {
    module.ARCH.model_type: module.ARCH for module in (llama, mistral, qwen2, qwen3, gpt2, gpt_neox, olmo2, phi3)
}
