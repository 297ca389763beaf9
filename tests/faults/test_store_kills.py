"""Two hosts that share no disk, data and checkpoints in a store: killed at random, they end as a run on local disks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.store_hosts import kill_to_the_end
from tests.faults.zygote import Zygote
from tests.stores import S3


@pytest.mark.full
@pytest.mark.root
@pytest.mark.slow
def test_three_kills_on_two_networks(s3: S3, zygote: Zygote, tmp_path: Path) -> None:
    """`python -m tests.soak.stores` kills on and on, and breaks requests as well."""
    assert len(kill_to_the_end(s3, zygote, tmp_path, random.Random(30), 3)) == 3
