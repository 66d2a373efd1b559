"""NVFlare: filters of clients' task results as defenses: `nvflare:stock/NAME`, `nvflare:MODULE:OBJECT`.

OBJECT is your function `(**parameters) -> [filters]`: it returns the `Filter`s or `DXOFilter`s of a client's task
results, in order. Its parameters, with defaults, are the defense's; the first number among them is the axis of its
trade-off. Filters are made anew whenever they are needed, and their state between rounds is restored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ppbench.adapters.framework import Framework
from ppbench.base.registry import ADDRESS

if TYPE_CHECKING:
    from ppbench.federation.contract import Defense

STOCK_NAMES: Mapping[str, tuple[str, ...]] = {
    "fedavg": ("FedAvg", "ScatterAndGather"),
    "percentile_privacy": ("PercentilePrivacy",),
    "svt_privacy": ("SVTPrivacy",),
    "exclude_vars": ("ExcludeVars",),
    "he_partial": ("HEModelEncryptor",),
}
"""Defenses that ship with NVFlare: our names, which records keep, each with NVFlare's own names."""
FRAMEWORK = Framework("NVFlare", "nvflare", "nvflare", (2, 3), (2, 9), STOCK_NAMES)


def defense(argument: str, name: str) -> type[Defense]:
    """NVFlare's filters of task results: nvflare:stock/NAME, nvflare:MODULE:OBJECT of yours.

    Raises UsageError: NVFlare is not installed, or too old, or there is no such filter.
    """
    with FRAMEWORK.importing(name):
        from ppbench.adapters.nvflare import defenses

    if shipped := FRAMEWORK.shipped(argument, "filter", defenses.NVFLARE_STOCK):
        return shipped
    if not ADDRESS.fullmatch(argument):
        raise FRAMEWORK.no_name(argument, "stock/NAME, or MODULE:OBJECT of yours")
    return defenses.defense(argument, name)
