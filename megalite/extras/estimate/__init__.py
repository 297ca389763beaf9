"""Runs one rank of any world without its peers, and without a GPU: what it would hold, run and send."""
