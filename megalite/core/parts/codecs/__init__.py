"""Codecs of gradients (`--compress`), each found by its file or folder; a folder describes itself without torch."""
