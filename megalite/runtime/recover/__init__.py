"""Recovery: a run outlives the death of its processes and, with `--recover host`, the loss of its hosts.

guard: a rank's process that starts trainers, keeps copies and never computes
trainer: the process that trains as the rank
standby: a process of the rank that has imported everything, and waits for its turn
companion: the guard as its trainer sees it, or nobody
hub: the part of rank 0's guard that decides for all; every guard has one connection to it
reserve guard: a guard without a rank, which takes over that of a lost guard
keeper: the part of a guard that keeps copies of another host's ranks
buddy: the guard on another host whose keeper has a rank's copies
copy: a rank's state after a step, in memory
slot: the memory of one copy
round: what lies between two recoveries; the first has number 0
layout: which rank has what place; with `--elastic` a round may have another one, whose number is that round's
lender: the guard of whose copies a rank of another layout brings parts
turn: a guard's word that the standby is the trainer of a round
"""
