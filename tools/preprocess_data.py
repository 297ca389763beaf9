#!/usr/bin/env python3
"""The same as `megalite preprocess`, in a checkout."""

from megalite.extras.command import run

if __name__ == "__main__":
    run("preprocess")
