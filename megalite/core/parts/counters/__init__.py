"""What parts count in a step: every module here with a `COUNTER`, the function that makes one of an engine."""
