"""What a part says of its options: which it has, what follows from others, and what fits together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from megalite.core.base.table import Table

Model = TypeVar("Model")
Step = TypeVar("Step")


class PartRules(Generic[Model, Step]):
    """The rules of one part. All parts are asked, whether a model has them or not: an option of a part that is off is
    refused by its part.

    Attributes:
        options: frozen dataclass with the part's options of a model, which `ModelConfig` inherits, each with a default
            and with its help text as a string under it; None: it has none. It needs no methods of dataclasses, which
            take time to make.
        after: option of a model that they follow in --help and in config.yaml.
    """

    options: type | None = None
    after = ""

    def derived(self, m: Model) -> Mapping[str, Any]:
        """Return options of a model (`ModelConfig`) to set: derived ones that are not given, and other spellings.

        Asked twice, before and after the model derives its own sizes.

        Raises:
            UserError: a value cannot be read.
        """
        return {}

    def check_model(self, m: Model) -> None:
        """Check the options of a model (`ModelConfig`).

        Raises:
            UserError: they do not fit together.
        """

    def check(self, cfg: Step) -> None:
        """Check the options of a step (`StepConfig`).

        Raises:
            UserError: they do not fit together.
        """


def missing(options: object, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of the options that are not given."""
    return {name: value for name, value in defaults.items() if getattr(options, name) is None}


PARTS: Table[PartRules[Any, Any]] = Table("megalite.core.parts.options", "PART")
"""Name -> rules."""
