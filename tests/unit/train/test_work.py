"""What a run computes once and not per step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megalite.core.mesh.context import ParallelContext
from megalite.core.model import parameters, specs
from megalite.core.options.model import ModelConfig
from megalite.core.sharding import ParamSpec
from megalite.runtime.loop.loop import fit
from megalite.runtime.options import cli
from megalite.runtime.start.start import open_run

RUN = [
    *["--device", "cpu", "--mock-data", "--num-layers", "2", "--hidden-size", "16", "--num-heads", "2"],
    *["--seq-len", "8", "--vocab-size", "31", "--global-batch-size", "2", "--watchdog-timeout", "0"],
]


def test_the_parameter_table_is_built_once_in_20_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def vocabulary(cfg: ModelConfig, name: str, **options: Any) -> ParamSpec:
        if name == "embed_tokens.weight":
            built.append(name)
        return real(cfg, name, **options)

    real = specs.vocabulary
    monkeypatch.setattr(parameters, "vocabulary", vocabulary)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # pytest keeps its own handlers
    # A table that another test has built would count as none.
    flags = ["--init-std", "0.0201", "--train-steps", "20", "--eval-every", "7", "--save-every", "9"]
    cfg = cli.parse([*RUN, *flags, "--run-dir", str(tmp_path)]).config
    with open_run(cfg, ParallelContext.single()) as run:
        fit(run)
    assert run.step == 20
    assert len(built) == 1


def test_the_parameter_table_cannot_be_changed() -> None:
    table = parameters.param_map(cli.parse(RUN).config.model)
    with pytest.raises(TypeError):
        table["extra"] = table["lm_head.weight"]  # type: ignore[index]
