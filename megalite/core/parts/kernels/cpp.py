"""The C++ kernels for CPU tensors (csrc/cpu), a Python module compiled at installation.

Each function has the signature of its schema in `native.KERNELS`, but returns None for an absent result. The module
(csrc/cpu/bindings.cpp) checks operands and allocates results. Contracts: the modules of the ops.
"""

from __future__ import annotations

import ctypes
import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megalite.core.base.log import logger

NAMES = (
    "adamw_",
    "l2_norm",
    "norm",
    "norm_backward",
    "glu",
    "glu_backward",
    "rope_",
    "rope",
    "rope_pack",
    "cross_entropy_stats",
    "cross_entropy_grad_",
)
# Kernels by name, filled by `use`.
KERNELS: dict[str, Callable[..., Any]] = {}


def use(schemas: Mapping[str, str]) -> None:
    """Load the module, and let it share torch's OpenMP runtime.

    Args:
        schemas: name -> schema of each kernel.

    Raises:
        ModuleNotFoundError: the module was not built.
        ImportError: it cannot be loaded, or its functions do not match the schemas.
    """
    module = importlib.import_module("megalite.core.parts.kernels._cpu_kernels")
    kernels = {}
    for name in NAMES:
        if (kernel := getattr(module, name, None)) is None:
            raise ImportError(f"it was built from older sources, without {name}")
        # pybind11 puts "name(x: torch.Tensor, eps: …) -> …" first; a schema is "(Tensor x, float eps) -> …".
        arguments = re.findall(r"(\w+): ", kernel.__doc__.partition(" -> ")[0])
        if arguments != re.findall(r" (\w+)[,)]", schemas[name].partition(" -> ")[0]):
            raise ImportError(f"it was built from older sources, with another {name}")
        kernels[name] = kernel
    KERNELS.update(kernels)
    try:
        # Through torch's own module: dlsym then searches the libraries it is linked to, whatever the runtime is called.
        runtime = ctypes.CDLL(torch._C.__file__)
        functions = [runtime[name] for name in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")]
    except (OSError, AttributeError) as e:
        logger.warning(f"the C++ kernels run on one thread: this torch has no OpenMP runtime to share ({e})")
        return
    module.use_threads(*(ctypes.cast(function, ctypes.c_void_p).value for function in functions))
