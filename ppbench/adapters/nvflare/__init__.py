"""NVFlare: filters of clients' task results as defenses: `nvflare:stock/NAME`, `nvflare:MODULE:OBJECT`.

OBJECT is a function `(**parameters) -> [filters]` of yours: it lists the `Filter`s or `DXOFilter`s of a client's task
results, in order. Its parameters, with defaults, are the defense's; the first that is a number is the axis of its
trade-off. Filters are made anew whenever they are needed; what they keep between rounds is put back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ppbench.adapters.framework import Framework
from ppbench.base.registry import ADDRESS

if TYPE_CHECKING:
    from ppbench.federation.contract import Defense

STOCK_NAMES: Mapping[str, tuple[str, ...]] = {
    "fedavg": (
        "FedAvg",
        "ScatterAndGather",
    ),
    "percentile_privacy": ("PercentilePrivacy",),
    "svt_privacy": ("SVTPrivacy",),
    "exclude_vars": ("ExcludeVars",),
    "he_partial": ("HEModelEncryptor",),
}
"""What ships with NVFlare, by our names, each with NVFlare's own for it; records keep ours."""
FRAMEWORK = Framework("NVFlare", "nvflare", "nvflare", (2, 3), (2, 9), STOCK_NAMES)


def defense(argument: str, name: str) -> type[Defense]:
    """NVFlare's filters of task results: nvflare:stock/NAME, nvflare:MODULE:OBJECT of yours.

    Raises UsageError: NVFlare is not installed, or too old, or there is no such filter.
    """
    with FRAMEWORK.importing(name):
        from ppbench.adapters.nvflare import encrypted, stock, yours

    made: tuple[type[stock.Stock], ...] = (*stock.STOCK, encrypted.Encrypted)
    if found := FRAMEWORK.shipped(argument, "filter", made):
        return found
    if not ADDRESS.fullmatch(argument):
        raise FRAMEWORK.no_name(argument, "stock/NAME, or MODULE:OBJECT of yours")
    return yours.defense(argument, name)
