"""What a part says of its options: which it has, what follows from others, and what fits together."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, ClassVar, Generic, TypeVar

from megalite.core.base.table import Table

Model = TypeVar("Model")
Step = TypeVar("Step")


class Part(Generic[Step]):
    """What may have options of its own. All parts are asked for their checks, whether a run has them or not.

    Attributes:
        options: frozen dataclass with the part's options, which the config of their group inherits, each with a default
            and with its help text as a string under it; None: it has none. It needs no methods of dataclasses, which
            take time to make.
        after: option of that group that they follow in --help and in config.yaml.
        about: a few words on it, for a part that an option names: --help shows them with its name.
    """

    about: ClassVar[str] = ""
    options: ClassVar[type | None] = None
    after: ClassVar[str] = ""

    def check(self, cfg: Step) -> None:
        """Check the options of a step (`StepConfig`).

        Raises:
            UserError: they do not fit together.
        """


class PartRules(Part[Step], Generic[Model, Step]):
    """A part of a model; an option of a part that is off is refused by its part. `ModelConfig` has its options."""

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


class OptimPart(Part[Any]):
    """A part of the optimizer, or of its rates. `OptimConfig` has its options."""

    def check_optim(self, cfg: Any) -> None:
        """Check its options among those of the optimizer (`OptimConfig`).

        Raises:
            UserError: one is out of range, or they do not fit together.
        """


def options_of(parts: Iterable[Part[Any]]) -> type:
    """Return a class that has the options of all parts, for the config of their group to inherit, given by name."""
    classes = tuple(part.options for part in parts if part.options is not None)
    for option in (option for each in classes for option in fields(each)):
        option.kw_only = True  # by position they would come first, and change with the parts that there are
    return type("OptionsOfParts", classes, {})


def put_in_order(config: Any, own: type, parts: Iterable[Part[Any]]) -> None:
    """Order the fields of a dataclass as --help and config.yaml list them: where dataclasses would put those of parts
    first, each follows the option that its part names.

    Args:
        config: the dataclass, which inherits the options of the parts.
        own: class that declares the other options, in order.
    """
    following: dict[str, list[str]] = defaultdict(list)
    for part in parts:
        names = list(inspect.get_annotations(part.options)) if part.options else []
        for before, name in zip((part.after, *names), names):
            following[before].append(name)

    def with_following(name: str) -> Iterator[str]:
        yield name
        for after in following[name]:
            yield from with_following(after)

    fields = config.__dataclass_fields__
    ordered = [name for first in inspect.get_annotations(own) for name in with_following(first)]
    assert len(ordered) == len(fields), "a part's options follow an option that does not exist"
    config.__dataclass_fields__ = {name: fields[name] for name in ordered}


def missing(options: object, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of the options that are not given."""
    return {name: value for name, value in defaults.items() if getattr(options, name) is None}


PARTS: Table[PartRules[Any, Any]] = Table("megalite.core.parts.options", "PART")
"""Name -> rules."""
