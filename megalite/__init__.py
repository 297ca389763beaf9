"""megalite: 3D-parallel pretraining of GPT and Llama-type models; the same loss in any layout.

From Python: `configure` options, `start` a run, and train it with `fit` or step by step with `steps` (docs/api.md).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megalite.api import configure, start
    from megalite.core.base.errors import UserError
    from megalite.core.rows import Rows
    from megalite.extras.inference.generate import generate
    from megalite.extras.inference.load import load_model
    from megalite.extras.notebook.ranks import run_ranks
    from megalite.runtime.loop.evaluate import evaluate
    from megalite.runtime.loop.loop import fit, steps
    from megalite.runtime.loop.run import save

# It notes this process's parent: a launcher may die while torch is being imported, which takes seconds.
import_module("megalite.runtime.base.child")

__version__ = "0.1.0"
__all__ = [
    "Rows",
    "UserError",
    "configure",
    "evaluate",
    "fit",
    "generate",
    "load_model",
    "run_ranks",
    "save",
    "start",
    "steps",
]

_PLACES = {
    **dict.fromkeys(("configure", "start"), "megalite.api"),
    "Rows": "megalite.core.rows",
    "UserError": "megalite.core.base.errors",
    "generate": "megalite.extras.inference.generate",
    "load_model": "megalite.extras.inference.load",
    "evaluate": "megalite.runtime.loop.evaluate",
    **dict.fromkeys(("fit", "steps"), "megalite.runtime.loop.loop"),
    "run_ranks": "megalite.extras.notebook.ranks",
    "save": "megalite.runtime.loop.run",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import megalite` itself takes no time, and works without torch."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_PLACES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
