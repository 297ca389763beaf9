"""Activation checkpointing modes (`--recompute`): files with `MODE`, found by name."""
