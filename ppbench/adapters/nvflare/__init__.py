"""NVFlare: filters of clients' task results as defenses: `nvflare:stock/NAME`, `nvflare:MODULE:OBJECT`.

OBJECT is a function `(**parameters) -> [filters]` of yours: it lists the `Filter`s or `DXOFilter`s of a client's task
results, in order. Its parameters, with defaults, are the defense's; the first that is a number is the axis of its
trade-off. Filters are made anew whenever they are needed; what they keep between rounds is put back.
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

from ppbench.base.errors import UsageError, shown, unknown
from ppbench.base.registry import ADDRESS

if TYPE_CHECKING:
    from ppbench.federation.contract import Defense

OLDEST, NEWEST = (2, 3), (2, 9)
"""Versions that the tests are run with at both ends."""


def defense(argument: str, name: str) -> type[Defense]:
    """NVFlare's filters of task results: nvflare:stock/NAME, nvflare:MODULE:OBJECT of yours.

    Raises UsageError: NVFlare is not installed, or in another version than is known here, or there is no such filter.
    """
    _check_version(name)
    from ppbench.adapters.nvflare import encrypted, stock, yours

    if argument.startswith("stock/"):
        made: tuple[type[stock.Stock], ...] = (*stock.STOCK, encrypted.Encrypted)
        known = {f"stock/{one.stock}": one for one in made}
        if argument not in known:
            raise unknown("filter of NVFlare", argument, known)
        return known[argument]
    if not ADDRESS.fullmatch(argument):
        right = "stock/NAME, or MODULE:OBJECT of yours"
        raise UsageError(f"{shown(argument)} is no name behind nvflare:; give {right}.")
    return yours.defense(argument, name)


def _check_version(name: str) -> None:
    try:
        found = metadata.version("nvflare")
    except metadata.PackageNotFoundError:
        raise UsageError(f"The defense {name!r} needs NVFlare; pip install 'ppbench-fl[nvflare]'.") from None
    here = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if not OLDEST <= here <= NEWEST:
        low, high = (".".join(map(str, end)) for end in (OLDEST, NEWEST))
        raise UsageError(f"The defense {name!r} is known to work with NVFlare {low} to {high}; {found} is installed.")
