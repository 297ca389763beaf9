from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megalite.core.base.errors import UserError
from megalite.runtime.checkpoint.hf.start import hf_model_config
from megalite.runtime.options import cli
from megalite.runtime.options.run import Config
from megalite.runtime.start.inputs import open_data, resolve_vocabulary
from megalite.runtime.start.resume import check_folders

OPENERS: dict[str, Callable[[Config], object]] = {
    "--run-dir": check_folders,
    "--resume": check_folders,
    "--tokenizer": resolve_vocabulary,
    "--data": lambda cfg: open_data(cfg, None),
    "--init-from-hf": lambda cfg: hf_model_config(str(cfg.run.init_from_hf)),
}


def options(flag: str, folder: Path) -> Config:
    given = [flag, str(folder / "theirs")]
    mine = [] if flag == "--run-dir" else ["--run-dir", str(folder / "mine")]
    samples = [] if flag == "--data" else ["--mock-data"]
    model = [] if flag == "--init-from-hf" else ["--vocab-size", "64"]
    return cli.parse([*given, *mine, *samples, *model]).config


@pytest.mark.parametrize("flag", OPENERS)
def test_a_folder_that_may_not_be_entered_is_a_user_error(tmp_path: Path, flag: str) -> None:
    """Usually it is another user's, of mode 700."""
    cfg = options(flag, tmp_path)
    (tmp_path / "theirs").mkdir(mode=0)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)  # root may enter every folder
        with pytest.raises(UserError, match="Permission denied"):
            OPENERS[flag](cfg)
    finally:
        os.seteuid(user)
