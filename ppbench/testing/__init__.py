"""Conformance batteries for authors of defenses and attacks: `check_defense(MyDefense)`, `check_attack(MyAttack)`.

Each checks every property and raises one AssertionError that names all that fail. The class under test need not be
installed. Names are loaded on first use, so that importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppbench.testing.attacks import ATTACK_PROPERTIES, check_attack
    from ppbench.testing.defenses import DEFENSE_PROPERTIES, check_defense
    from ppbench.testing.small_federation import PropertyResult

__all__ = ["ATTACK_PROPERTIES", "DEFENSE_PROPERTIES", "PropertyResult", "check_attack", "check_defense"]

_HOME = {
    "ATTACK_PROPERTIES": "ppbench.testing.attacks",
    "check_attack": "ppbench.testing.attacks",
    "DEFENSE_PROPERTIES": "ppbench.testing.defenses",
    "check_defense": "ppbench.testing.defenses",
    "PropertyResult": "ppbench.testing.small_federation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ppbench.testing' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)
