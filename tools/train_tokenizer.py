#!/usr/bin/env python3
"""The same as `megalite tokenizer`, in a checkout."""

from megalite.__main__ import run

if __name__ == "__main__":
    run("tokenizer")
