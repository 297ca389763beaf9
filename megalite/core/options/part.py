"""What a part says of its options: defaults that follow from others, and what fits together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from megalite.core.base.table import Table

Model = TypeVar("Model")
Step = TypeVar("Step")


class PartOptions(Generic[Model, Step]):
    """The rules of one part. All parts are asked, whether a model has them or not: an option of a part that is off is
    refused by its part.
    """

    def defaults(self, m: Model) -> Mapping[str, int]:
        """Return options of a model that are derived where they are not given (`ModelConfig`)."""
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


PARTS: Table[PartOptions[Any, Any]] = Table("megalite.core.parts.options", "OPTIONS")
"""Name -> rules."""
