"""Learning rates after the warm-up (`--lr-decay`): files with `DECAY`, found by name."""
