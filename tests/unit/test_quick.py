"""Which tests `bash tests/run.sh --quick` takes for a change."""

import pytest

from tests.quick import files_for


def test_files_for_a_module_are_those_that_import_it() -> None:
    chosen = files_for(["megalite/core/options/batch_sizes.py", "docs/data.md"])
    assert "tests/unit/test_batch_sizes.py" in chosen
    assert not [file for file in chosen if not file.startswith("tests/unit/")]


@pytest.mark.full
def test_a_test_that_changed_comes_first_and_a_helper_brings_its_users() -> None:
    chosen = files_for(["megalite/core/options/batch_sizes.py", "tests/parity/packed.py", "tests/unit/test_wall.py"])
    assert {"tests/parity/test_chunks.py", "tests/unit/test_wall.py"} <= {
        *chosen[: chosen.index("tests/unit/test_batch_sizes.py")]
    }
    assert files_for(["README.md"]) == []
