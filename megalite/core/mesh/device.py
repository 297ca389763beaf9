"""This rank's device, and what CUDA reads when it starts."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

import torch

from megalite.core.base.errors import LocalUserError
from megalite.core.base.log import env_int, logger
from megalite.core.mesh.rendezvous import under_torchrun


def pick_device(name: str, tp: int = 1, zero: int = 1, offload: str = "none", copies: bool = False) -> torch.device:
    """Choose this rank's device: `auto` takes CUDA where available, one GPU per local rank.

    Args:
        name: auto, cpu or cuda.
        tp, zero, offload, copies: see `wants_one_queue`.
    """
    local_rank = env_int("LOCAL_RANK", 0)
    if name != "cpu":
        _set_up_cuda(tp, zero, offload, copies)
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


def _set_up_cuda(tp: int, zero: int, offload: str, copies: bool) -> None:
    """Set the environment variables that CUDA reads when it starts; those that the user has set stay."""
    if wants_one_queue(tp, zero, offload, copies):
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


def wants_one_queue(tp: int, zero: int, offload: str = "none", copies: bool = False) -> bool:
    """Whether a GPU up to Hopper is to have one hardware queue (`CUDA_DEVICE_MAX_CONNECTIONS=1`).

    Args:
        tp, zero, offload: of the run.
        copies: whether copies of the state go to the host beside its steps.
    """
    # It would delay the gathers of ZeRO-3 until the computation before them is done; and where activations or copies
    # of the state go to the host, a copy that waits for the one before it would delay the computation after it.
    return tp > 1 and zero < 3 and offload != "activations" and not copies


def lock_pages(memory: torch.Tensor, device: torch.device, what: str) -> bool:
    """Page-lock memory that torch has not allocated, so that copies to and from a GPU run at full speed beside kernels.

    Args:
        memory: 1-D, on the host, from the beginning of a page.
        device: the GPU.
        what: the memory is for, in the log.

    Returns:
        Whether it is locked; if not, copies work all the same, and the log says why.
    """
    cuda = torch.cuda.cudart()
    status = cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if status == cuda.cudaError.success:
        return True
    logger.warning(f"{memory.nbytes:,} bytes for {what} cannot be page-locked ({status}): copies will be slower")
    # CUDA keeps the error, and would report it for the next kernel.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
    return False


def unlock_pages(memory: torch.Tensor) -> None:
    """Undo `lock_pages`."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def gpu_capability() -> int | None:
    """Get the major compute capability of this host's first GPU without starting CUDA; None where the driver has none.

    The driver's management library answers that; torch would start CUDA.
    """
    major, minor = ctypes.c_int(), ctypes.c_int()
    with _driver() as (library, devices):
        for device in devices[:1]:
            if library.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)) == 0:
                return major.value
    return None


def spare_gpu_memory() -> int | None:
    """Get the bytes that another process can have on each GPU of this host, without starting CUDA; None: no driver.

    What a GPU keeps for those that are there, a twentieth, is not counted, and 0 where they let no other one in.
    """
    spare = []
    with _driver() as (library, devices):
        for device in devices:
            mode, sizes = ctypes.c_int(), (ctypes.c_ulonglong * 3)()  # all, free, in use
            failed = library.nvmlDeviceGetComputeMode(device, ctypes.byref(mode))
            failed = failed or library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(sizes))
            spare.append(0 if failed or mode.value else max(0, sizes[1] - sizes[0] // 20))
    return min(spare, default=None)


@contextlib.contextmanager
def _driver() -> Iterator[tuple[ctypes.CDLL, list[ctypes.c_void_p]]]:
    """Open the driver's management library; yields it and the host's GPUs, none without a driver."""
    library, count = ctypes.CDLL(None), ctypes.c_uint()
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        opened = library.nvmlInit_v2() == 0
    except OSError:
        opened = False
    devices = []
    try:
        if opened and library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0:
            for i in range(count.value):
                device = ctypes.c_void_p()
                if library.nvmlDeviceGetHandleByIndex_v2(i, ctypes.byref(device)) == 0:
                    devices.append(device)
        yield library, devices
    finally:
        if opened:
            library.nvmlShutdown()


def only_deterministic_kernels() -> None:
    """Apply `--deterministic`. Call it before the process group exists: NCCL reads it once, at start-up."""
    torch.use_deterministic_algorithms(True)
    # Filling every new tensor with NaN finds bugs, but costs another pass over memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
