"""Checkpoints in Google's store, as far as an emulator shows: gcsfs and gcp-storage-emulator, where both are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.runtime.checkpoint import local_copies
from megalite.runtime.places.store import Store
from megalite.runtime.places.store_place import StorePlace
from tests.stores import BreakingProxy, Fault
from tests.unit.checkpoint.parts import make_part, remote_manifest, upload_parts


@pytest.mark.parametrize("kind", ["503", "cut-request"])
def test_a_checkpoint_arrives_and_comes_back(gcs_proxy: BreakingProxy, tmp_path: Path, kind: str) -> None:
    """Past a fault in its upload, which gcsfs repeats of itself, and one in its download."""
    url = "gs://bucket/runs/a/checkpoints"
    part = make_part(tmp_path, url, 1)
    gcs_proxy.faults = [Fault("(POST|PUT) .*upload", kind, 1), Fault("GET .*safetensors", kind, 1)]
    assert upload_parts(url, part)[0]["error"] == ""
    store = Store(url)
    name = StorePlace(store).committed()[0]
    entry = remote_manifest(copy := local_copies.fetch(store, name, tmp_path / "fetched")).files[0]
    local_copies.bring(copy, entry.name, entry.size, entry.crc32)
    assert (copy / entry.name).read_bytes() == (tmp_path / "step_1_rank_00000.safetensors").read_bytes()
    assert [fault.happened for fault in gcs_proxy.faults] == [1, 1]
