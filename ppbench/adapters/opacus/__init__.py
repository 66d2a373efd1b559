"""Opacus: differentially private training in a client: `opacus:stock/NAME`, `opacus:MODULE:OBJECT`.

OBJECT is a function `(model, optimizer, loader, **parameters) -> (engine, model, optimizer, loader)` of yours: it makes
them private as your own code does, with a `PrivacyEngine`. Its parameters, with defaults, are the defense's; the first
that is a number is the axis of its trade-off. It is called anew for every round of every client, and for every probe.
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

from ppbench.base.errors import UsageError, shown, unknown
from ppbench.base.registry import ADDRESS

if TYPE_CHECKING:
    from ppbench.federation.contract import Defense

OLDEST, NEWEST = (1, 4), (1, 6)
"""Versions that the tests are run with at both ends."""


def defense(argument: str, name: str) -> type[Defense]:
    """Opacus's private training in a client: opacus:stock/NAME, opacus:MODULE:OBJECT of yours.

    Raises UsageError: Opacus is not installed, or in another version than is known here, or there is no such mechanism.
    """
    _check_version(name)
    from ppbench.adapters.opacus import stock, yours

    if argument.startswith("stock/"):
        known = {f"stock/{one.stock}": one for one in stock.STOCK}
        if argument not in known:
            raise unknown("mechanism of Opacus", argument, known)
        return known[argument]
    if not ADDRESS.fullmatch(argument):
        raise UsageError(f"{shown(argument)} is no name behind opacus:; give stock/NAME, or MODULE:OBJECT of yours.")
    return yours.defense(argument, name)


def _check_version(name: str) -> None:
    try:
        found = metadata.version("opacus")
    except metadata.PackageNotFoundError:
        raise UsageError(f"The defense {name!r} needs Opacus; pip install 'ppbench-fl[opacus]'.") from None
    here = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if not OLDEST <= here <= NEWEST:
        low, high = (".".join(map(str, end)) for end in (OLDEST, NEWEST))
        raise UsageError(f"The defense {name!r} is known to work with Opacus {low} to {high}; {found} is installed.")
