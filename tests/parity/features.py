"""A table of features: each a subclass of `Feature` in a test file of its own, and six tests that all of them have.

A column that a feature leaves empty has no test. Files stay apart, since tests run by file on several processors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import pytest

from megalite.core.base.errors import UserError
from megalite.core.options.model import ModelConfig
from megalite.core.options.parallel import ParallelConfig
from megalite.core.options.recompute import MODES
from megalite.runtime.options.run import Config
from tests.parity import jobs, packed
from tests.parity.harness import (
    ROUNDS_NO_WORSE,
    Grid,
    Row,
    Shape,
    assert_same_bits,
    check,
    check_compiled,
    check_mistake,
    config_of,
    fixed,
    on_ranks,
    rounding,
    trained,
)
from tests.parity.models import shallow
from tests.workers import WorkerPool

Refused = tuple[Callable[..., ModelConfig], dict[str, Any], dict[str, Any], str]
"""What makes a model of options, options of it, those of the layout and of training, words of the error."""


class Feature:
    """A feature in the parity tests.

    Attributes:
        strong: rows of layouts, by the ranks that they share: enough to find what is wrong.
        grid: what --full adds: paths through the code that no strong row takes.
        packed: rows of documents, each compared with the document alone.
        recomputed: rows whose bits no mode of recomputation changes, nor its masks of dropout.
        planted: by the name of a mistake: a row that shows it.
        rounded: models, their half precision, and layouts of four ranks that round no worse than one process.
        rounded_on: their training options, among them "data".
        compiled: rows whose blocks are compiled.
        kinds_of_blocks: how many kinds of blocks their models have.
        refused: what does not fit.
        whole_depth: train all layers, also where no pipeline cuts them.
        always: by column, how many rows the short suite has: all of `strong` and `refused`, else none or what is said.
    """

    strong: ClassVar[Grid] = {}
    grid: ClassVar[Grid] = {}
    packed: ClassVar[Grid] = {}
    recomputed: ClassVar[Grid] = {}
    planted: ClassVar[Mapping[str, tuple[Shape, Row]]] = {}
    rounded: ClassVar[Sequence[tuple[ModelConfig, str, list[dict[str, Any]]]]] = ()
    rounded_on: ClassVar[Mapping[str, Any]] = {}
    compiled: ClassVar[Sequence[tuple[Shape, Row]]] = ()
    kinds_of_blocks: ClassVar[int] = 1
    refused: ClassVar[Sequence[Refused]] = ()
    whole_depth: ClassVar[bool] = False
    always: ClassVar[dict[str, int]] = {"packed": 1, "recomputed": 1, "planted": 1}

    @staticmethod
    def mistakes(rank: int, cfg: Config) -> dict[str, tuple[Any, str, Any]]:
        """(object, attribute, wrong value) of each mistake, on a rank."""
        raise NotImplementedError

    def __init_subclass__(cls) -> None:
        for column, test in TESTS.items():
            if not getattr(cls, column):
                setattr(cls, test, None)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make a test of each row."""
        name = metafunc.function.__name__
        for column in (column for column, test in TESTS.items() if test == name):
            table = getattr(self, column)
            rows = [*table.items()] if isinstance(table, Mapping) else [*table]
            whole = len(rows) if column in ("strong", "refused") else self.always.get(column, 0)
            params = [
                pytest.param(row, id=name_of(row), marks=() if i < whole else pytest.mark.full)
                for i, row in enumerate(rows)
            ]
            more = self.grid.items() if column == "strong" else ()
            params += [pytest.param(row, id=f"{name_of(row)}-more", marks=pytest.mark.full) for row in more]
            metafunc.parametrize("row", params)

    def shallow(self, shape: Shape, row: Row) -> Row:
        """A row with no more layers than show each kind of them: most of what a step costs."""
        model, zero, layout, train = row
        if self.whole_depth or {**dict(shape[1]), **layout}.get("pp", 1) > 1:
            return row
        return shallow(model), zero, layout, train

    def test_same_gradients(self, pool: WorkerPool, row: tuple[Shape, list[Row]], tmp_path: Path) -> None:
        """Losses, norms and every gradient of two steps, those of one process."""
        shape, rows = row
        check(pool, shape, [in_folder(self.shallow(shape, of_model), tmp_path) for of_model in rows])

    def test_packed_documents(self, pool: WorkerPool, row: tuple[Shape, list[Row]]) -> None:
        shape, rows = row
        packed.check(pool, shape[0], [config_of(shape, self.shallow(shape, of_model)) for of_model in rows])

    def test_recomputation_changes_not_a_bit(self, pool: WorkerPool, row: tuple[Shape, list[Row]]) -> None:
        """What is computed again has the same masks of dropout and choices of experts."""
        shape, rows = row
        for model, zero, layout, train in (self.shallow(shape, of_model) for of_model in rows):
            cfgs = [config_of(shape, (model, zero, layout, {**train, "recompute": mode})) for mode in MODES]
            assert_same_bits(on_ranks(pool, shape[0], trained, cfgs, shape[0]))

    def test_planted_faults_show(self, pool: WorkerPool, row: tuple[str, tuple[Shape, Row]]) -> None:
        mistake, (shape, of_model) = row
        *_, train = of_model
        cfg = config_of(shape, self.shallow(shape, of_model))
        check_mistake(pool, self.mistakes, mistake, shape[0], cfg, train.get("data", fixed))

    def test_half_precision_rounds_no_worse(
        self, pool: WorkerPool, row: tuple[ModelConfig, str, list[dict[str, Any]]]
    ) -> None:
        model, precision, layouts = row
        for layout in layouts:
            train = tuple(self.rounded_on.items())
            assert 0 < rounding(pool, shallow(model), precision, layout, train=train) < ROUNDS_NO_WORSE, layout

    def test_compiled_blocks(self, pool: WorkerPool, row: tuple[Shape, Row]) -> None:
        """One layer of a kind per stage shows as much as four."""
        data = row[1][3].get("data", fixed)
        check_compiled(pool, row[0][0], config_of(*row), self.kinds_of_blocks, data)

    def test_what_does_not_fit_is_refused(self, row: Refused) -> None:
        make, model, more, words = row
        parallel = {field.name for field in fields(ParallelConfig)} & more.keys()
        with pytest.raises(UserError, match=words):
            jobs.make_config(
                make(**model),
                {name: more[name] for name in parallel},
                **{name: value for name, value in more.items() if name not in parallel},
            )


TESTS = {
    "strong": "test_same_gradients",
    "packed": "test_packed_documents",
    "recomputed": "test_recomputation_changes_not_a_bit",
    "planted": "test_planted_faults_show",
    "rounded": "test_half_precision_rounds_no_worse",
    "compiled": "test_compiled_blocks",
    "refused": "test_what_does_not_fit_is_refused",
}
"""By column, its test; `grid` is more of `strong`."""


def name_of(row: Any) -> str | None:
    """Axes and world of a shape, the name of a mistake, the words of an error."""
    words = [part for part in row if isinstance(part, str)]
    if words:
        return words[-1]
    (shape, *_), *_ = [part for part in row if isinstance(part, tuple)], ()
    world, layout = shape
    return "-".join([*(f"{axis}{size}" for axis, size in layout), f"of{world}"])


def in_folder(row: Row, folder: Path) -> Row:
    """A row with a folder of the test where its training options ask for one."""
    model, zero, layout, train = row
    return model, zero, layout, {**train, "offload_dir": str(folder)} if "offload_dir" in train else train
