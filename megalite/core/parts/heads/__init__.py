"""Heads: every package here with a `HEAD` is one, by its name."""
