#!/usr/bin/env python3
"""The same as `megalite convert`, in a checkout."""

from megalite.extras.command import run

if __name__ == "__main__":
    run("convert")
