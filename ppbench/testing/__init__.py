"""Conformance batteries for authors of defenses and attacks: `check_defense` and `check_attack`.

    from ppbench.testing import check_defense

    def test_my_defense():
        check_defense(MyDefense)

Each asks every property of its battery and raises one AssertionError that names all that fail. Nothing under test need
be installed. Names are loaded on first use, so that importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppbench.testing.attacks import ATTACK_PROPERTIES, check_attack
    from ppbench.testing.defenses import DEFENSE_PROPERTIES, check_defense
    from ppbench.testing.findings import Finding

__all__ = ["ATTACK_PROPERTIES", "DEFENSE_PROPERTIES", "Finding", "check_attack", "check_defense"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ppbench.testing' has no attribute '{name}'")
    home = next((home for home in ("attack", "defense") if home in name.lower()), "finding")
    return getattr(import_module(f"ppbench.testing.{home}s"), name)
