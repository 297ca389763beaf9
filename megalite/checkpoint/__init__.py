"""Checkpoints: safetensors shards, a manifest of slices and checksums, atomic commits; any layout loads them."""
