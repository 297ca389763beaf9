"""What a rank is doing, read from the stacks that its faulthandler prints. Standard library only."""

from __future__ import annotations

import re

# Where Python code is that compiles kernels, in the first step.
_COMPILERS = ("/triton/compiler/", "/torch/_inductor/", "/torch/_dynamo/")


def is_complete(stacks: str) -> bool:
    """Whether a faulthandler dump is complete: the main thread comes last, with its outermost frame or "..." for it."""
    return stacks.endswith((" in <module>\n", " in _run_module_as_main\n", "\n  ...\n"))


def main_thread(stacks: str) -> list[str]:
    """Get the main thread's frames from a faulthandler dump, innermost first: "path, line N in function"."""
    threads = [
        re.findall(r'^  File "(.+)", (line \d+ in .+)$', block, re.MULTILINE)
        for block in re.split(r"^(?=Thread |Current thread |Stack )", stacks, flags=re.MULTILINE)
    ]
    threads = [frames for frames in threads if frames]
    for frames in threads:
        if frames[-1][1].endswith("in <module>"):
            return [f"{path}, {line}" for path, line in frames]
    return [f"{path}, {line}" for path, line in threads[-1]] if threads else []


def is_waiting(stacks: str, cuda: bool = False) -> bool:
    """Whether the main thread waits for other ranks: in a collective, or for a GPU that does.

    A host runs ahead of its GPU until the queue of launches is full, and then blocks in whatever launches next: on CUDA
    that is any place in a training step but a compiler.
    """
    paths = [frame.rpartition(", ")[0] for frame in main_thread(stacks)]
    if not paths:
        return False
    if "/megalite/core/mesh/" in paths[0] or "/torch/distributed/" in paths[0]:
        return True
    compiles = any(part in path for path in paths for part in _COMPILERS)
    return cuda and not compiles and any(path.endswith("megalite/core/step.py") for path in paths)
