"""Opacus: differentially private training in a client: `opacus:stock/NAME`, `opacus:MODULE:OBJECT`.

OBJECT is a function `(model, optimizer, loader, **parameters) -> (engine, model, optimizer, loader)` of yours: it makes
them private as your own code does, with a `PrivacyEngine`. Its parameters, with defaults, are the defense's; the first
that is a number is the axis of its trade-off. It is called anew for every round of every client, and for every probe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ppbench.adapters.framework import Framework
from ppbench.base.registry import ADDRESS

if TYPE_CHECKING:
    from ppbench.federation.contract import Defense

STOCK_NAMES: Mapping[str, tuple[str, ...]] = {
    "dp_sgd": (
        "PrivacyEngine",
        "DPOptimizer",
    ),
    "dp_sgd_per_layer": ("DPPerLayerOptimizer",),
    "dp_sgd_adaptive": ("AdaClipDPOptimizer",),
}
"""What ships with Opacus, by our names, each with Opacus's own for it; records keep ours."""
FRAMEWORK = Framework("Opacus", "opacus", "opacus", (1, 4), (1, 6), STOCK_NAMES)


def defense(argument: str, name: str) -> type[Defense]:
    """Opacus's private training in a client: opacus:stock/NAME, opacus:MODULE:OBJECT of yours.

    Raises UsageError: Opacus is not installed, or too old, or there is no such mechanism.
    """
    with FRAMEWORK.importing(name):
        from ppbench.adapters.opacus import stock, yours

    if found := FRAMEWORK.shipped(argument, "mechanism", stock.STOCK):
        return found
    if not ADDRESS.fullmatch(argument):
        raise FRAMEWORK.no_name(argument, "stock/NAME, or MODULE:OBJECT of yours")
    return yours.defense(argument, name)
