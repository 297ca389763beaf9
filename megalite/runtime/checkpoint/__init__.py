"""Checkpoints: safetensors shards, a manifest of slices and checksums, atomic commits, loading into any layout."""
