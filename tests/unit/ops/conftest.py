"""Which backend the contract is tested with: torch in the ordinary run, others in subprocesses with these variables."""

from __future__ import annotations

import os

import pytest
import torch

from megalite.core.ops import Ops, resolve

BACKEND = os.environ.get("MEGALITE_TEST_BACKEND", "torch")

collect_ignore = ["test_registered.py"] if BACKEND == "torch" else []


@pytest.fixture(scope="session")
def backend() -> str:
    """MEGALITE_TEST_BACKEND: what `resolve` is given ("torch", "triton", "cpp", "cuda,lamb=torch")."""
    return BACKEND


@pytest.fixture(scope="session")
def device() -> str:
    """MEGALITE_TEST_DEVICE: cpu or cuda."""
    return os.environ.get("MEGALITE_TEST_DEVICE", "cpu")


@pytest.fixture(scope="session")
def ops(backend: str, device: str) -> Ops:
    return resolve(backend, device, torch.float32)


@pytest.fixture(scope="session", autouse=True)
def native_libraries() -> None:
    """MEGALITE_TEST_NATIVE: folder of libraries built for the test, in place of the installed ones."""
    if folder := os.environ.get("MEGALITE_TEST_NATIVE"):
        from megalite.core.parts import kernels

        kernels.__path__.insert(0, folder)
