"""Codecs of gradients (`--compress`), one file each with `CODEC`, found by name."""
