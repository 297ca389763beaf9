"""Checkpoints in Google's store, as far as an emulator shows: gcsfs and gcp-storage-emulator, where both are there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.runtime.checkpoint import local_copies
from megalite.runtime.places import store as store_module
from megalite.runtime.places.store import MissingObject, Store, StoreError
from megalite.runtime.places.store_place import StorePlace
from tests.ranks import reserve_port
from tests.stores import BreakingProxy, Fault
from tests.unit.checkpoint.parts import make_part, remote_manifest, upload_parts


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[BreakingProxy]:
    """Stands before the emulator."""
    why = "gcsfs and gcp-storage-emulator are not installed (.ci/peers.sh tests with them)"
    pytest.importorskip("gcsfs", reason=why)
    emulator = pytest.importorskip("gcp_storage_emulator.server", reason=why)
    port = reserve_port()
    server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    server.start()
    made = BreakingProxy(port)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{made.port}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(store_module, "_FIRST_PAUSE_S", 0.002)
    store_module._open.cache_clear()
    yield made
    store_module._open.cache_clear()
    made.close()
    server.stop()


@pytest.mark.parametrize("kind", ["503", "cut-request"])
def test_a_checkpoint_arrives_and_comes_back(proxy: BreakingProxy, tmp_path: Path, kind: str) -> None:
    """Past a fault in its upload, which gcsfs repeats of itself, and one in its download."""
    url = "gs://bucket/runs/a/checkpoints"
    part = make_part(tmp_path, url, 1)
    proxy.faults = [Fault("(POST|PUT) .*upload", kind, 1), Fault("GET .*safetensors", kind, 1)]
    assert upload_parts(url, part)[0]["error"] == ""
    store = Store(url)
    name = StorePlace(store).committed()[0]
    entry = remote_manifest(copy := local_copies.fetch(store, name, tmp_path / "fetched")).files[0]
    local_copies.bring(copy, entry.name, entry.size, entry.crc32)
    assert (copy / entry.name).read_bytes() == (tmp_path / "step_1_rank_00000.safetensors").read_bytes()
    assert [fault.happened for fault in proxy.faults] == [1, 1]
    size, stamp = store.stamp("latest")
    store.write("latest", b"x" * size)
    assert store.stamp("latest") != (size, stamp)
    with pytest.raises(MissingObject):
        store.read(f"{name}/nothing")
    assert store.names("nothing") == {}


def test_a_forbidden_bucket(proxy: BreakingProxy) -> None:
    proxy.faults = [Fault("bucket", "403")]
    with pytest.raises(StoreError, match="gs://bucket/x/a: "):
        Store("gs://bucket/x").write("a", b"1")
