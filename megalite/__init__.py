"""megalite: 3D-parallel pretraining of GPT and Llama-type models; the same loss in any layout."""

__version__ = "0.1.0"
