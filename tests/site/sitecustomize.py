"""Where it is on the path, torch is imported without the garbage collector: in two thirds of the time.

pretrain_gpt.py and the commands do so by themselves; torchrun, scripts of tests and notebooks do not.
"""

from __future__ import annotations

import gc
import sys

TYPE_CHECKING = False  # typing takes longer to import than all else here
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class TorchFinder:
    """Find torch as those behind it do, once; the collector never looks at what its import makes."""

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(cls)
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_quietly(module: ModuleType) -> None:
                was = gc.isenabled()
                gc.disable()
                try:
                    execute(module)
                finally:
                    gc.freeze()
                    if was:
                        gc.enable()

            spec.loader.exec_module = execute_quietly  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, TorchFinder)
