"""This rank's device, and what CUDA reads when it starts."""

from __future__ import annotations

import ctypes
import os

import torch

from megalite.core.base.errors import LocalUserError
from megalite.core.base.log import env_int
from megalite.core.mesh.rendezvous import under_torchrun


def pick_device(name: str, tp: int = 1, zero: int = 1, offload: str = "none") -> torch.device:
    """Choose this rank's device: `auto` takes CUDA where available, one GPU per local rank."""
    local_rank = env_int("LOCAL_RANK", 0)
    if name != "cpu":
        _set_up_cuda(tp, zero, offload)
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        rule = "requires a CUDA device and a CUDA build of torch"
        raise LocalUserError("--device cuda", rule, "use --device cpu")
    if torch.cuda.device_count() == 1 and not under_torchrun():
        # One GPU per task (srun --gpus-per-task=1): each rank sees its own as number 0.
        local_rank = 0
    if local_rank >= torch.cuda.device_count():
        raise LocalUserError(
            f"local rank {local_rank}",
            f"requires its own GPU, and this host has {torch.cuda.device_count()}",
            "start fewer processes per node, or use --device cpu",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _set_up_cuda(tp: int, zero: int, offload: str) -> None:
    """Set the environment variables that CUDA reads when it starts; those that the user has set stay."""
    if wants_one_queue(tp, zero, offload):
        # Up to Hopper. One hardware queue: a collective that was launched first also starts before the matrix product
        # it overlaps with.
        if (gpu_capability() or 0) < 10:
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        else:
            os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    # Parameters are made one by one and then moved into buckets, activations come in many sizes: segments that can
    # grow leave no holes of memory that is reserved and cannot be used.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def wants_one_queue(tp: int, zero: int, offload: str = "none") -> bool:
    """Whether a GPU up to Hopper is to have one hardware queue (`CUDA_DEVICE_MAX_CONNECTIONS=1`)."""
    # It would delay the gathers of ZeRO-3 until the computation before them is done; and where activations are copied
    # to and from the host, a copy that waits for the one before it would delay the computation after it.
    return tp > 1 and zero < 3 and offload != "activations"


def gpu_capability() -> int | None:
    """Get the major compute capability of this host's first GPU without starting CUDA; None where the driver has none.

    The driver's management library answers that; torch would start CUDA.
    """
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    device = ctypes.c_void_p()
    major = ctypes.c_int()
    minor = ctypes.c_int()
    if library.nvmlInit_v2():
        return None
    try:
        failed = library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device))
        failed = failed or library.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
    finally:
        library.nvmlShutdown()
    return None if failed else major.value


def only_deterministic_kernels() -> None:
    """Apply `--deterministic`. Call it before the process group exists: NCCL reads it once, at start-up."""
    torch.use_deterministic_algorithms(True)
    # Filling every new tensor with NaN finds bugs, but costs another pass over memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
