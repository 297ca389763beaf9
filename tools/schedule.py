#!/usr/bin/env python3
"""Bubble, peak in flight, messages and a picture of a pipeline schedule: `schedule.py --help`."""

from megalite.errors import run_tool
from megalite.pipeline.report import main

if __name__ == "__main__":
    run_tool(main)
