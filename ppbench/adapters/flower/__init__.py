"""Flower: strategies and client mods, and whole apps: `flower:stock/NAME`, `flower:MODULE:OBJECT`, `flower:FOLDER`.

OBJECT is a function `(clients, **parameters) -> (strategy, [mods])` of yours: it makes the strategy of `flwr.serverapp`
for so many clients and lists the mods that stand around each client's training. Its parameters, with defaults, are the
defense's; the first that is a number is the axis of its trade-off. Both are made anew whenever they are needed: a
strategy's attributes are put back, and what a client keeps between rounds must lie in its context's state.

FOLDER is an app's, with its `pyproject.toml`, unchanged but for two names there: see `app`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ppbench.adapters.framework import Framework
from ppbench.base.errors import UsageError, shown
from ppbench.base.registry import ADDRESS

if TYPE_CHECKING:
    from ppbench.federation.contract import Defense

FRAMEWORK = Framework("Flower", "flwr", "flower", (1, 23), (1, 42))


def defense(argument: str, name: str) -> type[Defense]:
    """Flower's strategies, client mods and apps: flower:stock/NAME, flower:MODULE:OBJECT of yours, flower:FOLDER.

    Raises UsageError: Flower is not installed, or in another version than is known here, or there is no such mechanism.
    """
    FRAMEWORK.check_version(name)
    from ppbench.adapters.flower import stock, yours

    if found := FRAMEWORK.shipped(argument, "mechanism", stock.STOCK):
        return found
    if ADDRESS.fullmatch(argument):
        return yours.defense(argument, name)
    if not Path(argument).is_dir():
        right = "stock/NAME, MODULE:OBJECT of yours, or an app's folder"
        raise UsageError(f"{shown(argument)} is no name behind flower:; give {right}.")
    from ppbench.adapters.flower import app

    return app.defense(argument, name)
