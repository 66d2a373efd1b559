"""ppbench: how much private data does a federated-learning defense really let leak?

The public API is `evaluate` (train, attack, score, record), `Defense` (what a defense author subclasses), `Attack`
(what an attack author subclasses), `load` (results as a pandas table) and `plot` (figures of it). In programs of your
own: `invert` (an attack on a gradient), `load_defense`, `load_attack`, `federate` (your network and data under a
defense) and `probe` (what its server sees). Names are loaded on first use, so that `import ppbench` stays light.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ppbench.base.version import __version__  # `base.installation` recognizes this file by this line

# Before torch is imported: `import torch` would run whatever installed packages declare as its devices.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
# Before torch allocates: huge pages cause a 512th of the page faults, which are dear in a virtual machine.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
if _names := os.environ.get("PPBENCH_CLOSED"):  # a worker of a run with isolated attacks, see `base.startup_code`
    from ppbench.base.startup_code import close_packages

    close_packages(_names.split())

if TYPE_CHECKING:
    from ppbench import plot
    from ppbench.adversary.attack import Attack, Challenge, Guess
    from ppbench.federation.contract import Defense
    from ppbench.federation.evidence import Evidence
    from ppbench.federation.view import View
    from ppbench.ledger.transcript import load_transcript
    from ppbench.report.page.finished_model import AuditedModel
    from ppbench.report.tidy import load
    from ppbench.run.evaluation import evaluate
    from ppbench.run.inversion_result import Inverted
    from ppbench.run.invert import invert
    from ppbench.run.loop import federate, load_attack, load_defense, probe
    from ppbench.run.model_audit import audit

__all__ = [
    "Attack",
    "AuditedModel",
    "Challenge",
    "Defense",
    "Evidence",
    "Guess",
    "Inverted",
    "View",
    "__version__",
    "audit",
    "evaluate",
    "federate",
    "invert",
    "load",
    "load_attack",
    "load_defense",
    "load_transcript",
    "plot",
    "probe",
]

_HOME = {
    "Attack": "ppbench.adversary.attack",
    "Challenge": "ppbench.adversary.attack",
    "Guess": "ppbench.adversary.attack",
    "Evidence": "ppbench.federation.evidence",
    "View": "ppbench.federation.view",
    "Defense": "ppbench.federation.contract",
    # Not evaluate.py and load.py: submodules of these names would hide the functions.
    "evaluate": "ppbench.run.evaluation",
    "load": "ppbench.report.tidy",
    "load_transcript": "ppbench.ledger.transcript",
    "Inverted": "ppbench.run.inversion_result",
    "invert": "ppbench.run.invert",
    "AuditedModel": "ppbench.report.page.finished_model",
    "audit": "ppbench.run.model_audit",
    "federate": "ppbench.run.loop",
    "load_attack": "ppbench.run.loop",
    "load_defense": "ppbench.run.loop",
    "probe": "ppbench.run.loop",
}


def __getattr__(name: str) -> Any:
    if name == "plot":
        return import_module("ppbench.plot")
    if name not in _HOME:
        raise AttributeError(f"module 'ppbench' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)
