"""Opacus: differentially private training in a client: `opacus:stock/NAME`, `opacus:MODULE:OBJECT`.

OBJECT is a function `(model, optimizer, loader, **parameters) -> (engine, model, optimizer, loader)` of yours: it makes
them private as your own code does, with a `PrivacyEngine`. Its parameters, with defaults, are the defense's; the first
that is a number is the axis of its trade-off. It is called anew for every round of every client, and for every probe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppbench.adapters.framework import Framework
from ppbench.base.errors import UsageError, shown
from ppbench.base.registry import ADDRESS

if TYPE_CHECKING:
    from ppbench.federation.contract import Defense

FRAMEWORK = Framework("Opacus", "opacus", "opacus", (1, 4), (1, 6))


def defense(argument: str, name: str) -> type[Defense]:
    """Opacus's private training in a client: opacus:stock/NAME, opacus:MODULE:OBJECT of yours.

    Raises UsageError: Opacus is not installed, or in another version than is known here, or there is no such mechanism.
    """
    FRAMEWORK.check_version(name)
    from ppbench.adapters.opacus import stock, yours

    if found := FRAMEWORK.shipped(argument, "mechanism", stock.STOCK):
        return found
    if not ADDRESS.fullmatch(argument):
        raise UsageError(f"{shown(argument)} is no name behind opacus:; give stock/NAME, or MODULE:OBJECT of yours.")
    return yours.defense(argument, name)
