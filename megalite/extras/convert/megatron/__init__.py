"""Megatron-LM checkpoints, read without executing their pickles: tensor by tensor, one process, no GPU."""
