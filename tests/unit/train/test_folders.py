from __future__ import annotations

import os
from pathlib import Path

import pytest

from megalite.core.base.errors import UserError
from megalite.runtime.options import cli
from megalite.runtime.start.resume import check_folders


@pytest.mark.parametrize("flags", [["--run-dir", "theirs"], ["--run-dir", "mine", "--resume", "theirs"]])
def test_a_folder_that_may_not_be_entered_is_a_user_error(tmp_path: Path, flags: list[str]) -> None:
    (tmp_path / "theirs").mkdir(mode=0)
    words = [str(tmp_path / word) if word in ("theirs", "mine") else word for word in flags]
    cfg = cli.parse(["--mock-data", "--vocab-size", "64", *words]).config
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)  # root may enter every folder
        with pytest.raises(UserError, match="Permission denied"):
            check_folders(cfg)
    finally:
        os.seteuid(user)
