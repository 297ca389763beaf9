"""Losses of pairs of answers: every module here with a mapping `PREFERENCES` of them by name."""
