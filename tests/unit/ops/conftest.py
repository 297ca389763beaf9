"""Which backend `test_backends.py` tests: torch in the ordinary run, others in subprocesses with these variables."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def backend() -> str:
    """MEGALITE_TEST_BACKEND: what `resolve` is given ("torch", "triton", "cpp", "cuda,lamb=torch")."""
    return os.environ.get("MEGALITE_TEST_BACKEND", "torch")


@pytest.fixture(scope="session")
def device() -> str:
    """MEGALITE_TEST_DEVICE: cpu or cuda."""
    return os.environ.get("MEGALITE_TEST_DEVICE", "cpu")


@pytest.fixture(scope="session", autouse=True)
def native_libraries() -> None:
    """MEGALITE_TEST_NATIVE: folder of libraries built for the test, in place of the installed ones."""
    if folder := os.environ.get("MEGALITE_TEST_NATIVE"):
        import megalite.ops

        megalite.ops.__path__.insert(0, folder)
