"""Codecs of gradients (`--compress`), each found by its file. `--help` reads them: torch is imported in functions."""
