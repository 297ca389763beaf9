#!/usr/bin/env python3
"""The same as `megalite view`, in a checkout."""

from megalite.extras.command import run

if __name__ == "__main__":
    run("view")
