"""Diagnose a cluster or a run: checks under torchrun, memory that does not fit."""
