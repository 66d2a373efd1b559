"""NVFlare: filters of clients' task results as defenses: `nvflare:stock/NAME`, `nvflare:MODULE:OBJECT`.

OBJECT is a function `(**parameters) -> [filters]` of yours: it lists the `Filter`s or `DXOFilter`s of a client's task
results, in order. Its parameters, with defaults, are the defense's; the first that is a number is the axis of its
trade-off. Filters are made anew whenever they are needed; what they keep between rounds is put back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppbench.adapters.framework import Framework
from ppbench.base.errors import UsageError, shown
from ppbench.base.registry import ADDRESS

if TYPE_CHECKING:
    from ppbench.federation.contract import Defense

FRAMEWORK = Framework("NVFlare", "nvflare", "nvflare", (2, 3), (2, 9))


def defense(argument: str, name: str) -> type[Defense]:
    """NVFlare's filters of task results: nvflare:stock/NAME, nvflare:MODULE:OBJECT of yours.

    Raises UsageError: NVFlare is not installed, or in another version than is known here, or there is no such filter.
    """
    FRAMEWORK.check_version(name)
    from ppbench.adapters.nvflare import encrypted, stock, yours

    made: tuple[type[stock.Stock], ...] = (*stock.STOCK, encrypted.Encrypted)
    if found := FRAMEWORK.shipped(argument, "filter", made):
        return found
    if not ADDRESS.fullmatch(argument):
        right = "stock/NAME, or MODULE:OBJECT of yours"
        raise UsageError(f"{shown(argument)} is no name behind nvflare:; give {right}.")
    return yours.defense(argument, name)
