"""Options of parts: every module here has a `PART`, a `PartRules`, with the dataclass of its options of a model.

Data without torch. `ModelConfig` inherits all these dataclasses; modules here import it for type checkers alone.
"""
