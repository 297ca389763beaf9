"""Hugging Face folders, both ways: tensor by tensor, one process, no GPU, without transformers."""
