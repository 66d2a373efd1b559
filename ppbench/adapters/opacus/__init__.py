"""Opacus: differentially private training in a client: `opacus:stock/NAME`, `opacus:MODULE:OBJECT`.

OBJECT is your function `(model, optimizer, loader, **parameters) -> (engine, model, optimizer, loader)`: it makes them
private as your own code does, with a `PrivacyEngine`. Its parameters, with defaults, are the defense's; the first
number among them is the axis of its trade-off. It is called for every round of every client, and for every probe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ppbench.adapters.framework import Framework
from ppbench.base.registry import ADDRESS

if TYPE_CHECKING:
    from ppbench.federation.contract import Defense

STOCK_NAMES: Mapping[str, tuple[str, ...]] = {
    "dp_sgd": ("PrivacyEngine", "DPOptimizer"),
    "dp_sgd_per_layer": ("DPPerLayerOptimizer",),
    "dp_sgd_adaptive": ("AdaClipDPOptimizer",),
}
"""Defenses that ship with Opacus: our names, which records keep, each with Opacus's own names."""
FRAMEWORK = Framework("Opacus", "opacus", "opacus", (1, 4), (1, 6), STOCK_NAMES)


def defense(argument: str, name: str) -> type[Defense]:
    """Opacus's private training in a client: opacus:stock/NAME, opacus:MODULE:OBJECT of yours.

    Raises UsageError: Opacus is not installed, or too old, or there is no such mechanism.
    """
    with FRAMEWORK.importing(name):
        from ppbench.adapters.opacus import mechanism

    if shipped := FRAMEWORK.shipped(argument, "mechanism", mechanism.OPACUS_STOCK):
        return shipped
    if not ADDRESS.fullmatch(argument):
        raise FRAMEWORK.no_name(argument, "stock/NAME, or MODULE:OBJECT of yours")
    return mechanism.defense(argument, name)
