"""The optimizers: every module of this package with a `RULE` is one, under the module's name.

Like families and schedules, rules are data without torch: tensors and kernels are arguments of each call. What stores,
shards and saves the state and plans its memory (`core.optim`, checkpoints, the planner) depends on no single rule.
"""
