"""ppbench: how much private data does a federated-learning defense really let leak?

The public API is `evaluate` (train, attack, score, record), `Defense` (what a defense author subclasses) and
`Attack` (what an attack author subclasses). Names are loaded on first use, so that `import ppbench` stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ppbench.base.version import __version__

if TYPE_CHECKING:
    from ppbench.adversary.attack import Attack, Challenge, Guess
    from ppbench.federation.contract import Defense
    from ppbench.federation.evidence import Evidence
    from ppbench.federation.view import View
    from ppbench.run.evaluation import evaluate


__all__ = ["Attack", "Challenge", "Defense", "Evidence", "Guess", "View", "__version__", "evaluate"]

_HOME = {
    "Attack": "ppbench.adversary.attack",
    "Challenge": "ppbench.adversary.attack",
    "Guess": "ppbench.adversary.attack",
    "Evidence": "ppbench.federation.evidence",
    "View": "ppbench.federation.view",
    "Defense": "ppbench.federation.contract",
    "evaluate": "ppbench.run.evaluation",  # not evaluate.py: a submodule of that name would hide the function
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ppbench' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)
