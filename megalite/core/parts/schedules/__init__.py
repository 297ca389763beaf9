"""Schedules by name, in pure Python: the order of a pipeline's operations, and the learning rate of each step."""
