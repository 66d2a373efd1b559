"""Flower: strategies and client mods, and whole apps: `flower:stock/NAME`, `flower:MODULE:OBJECT`, `flower:FOLDER`.

OBJECT is your function `(clients, **parameters) -> (strategy, [mods])`: it returns a strategy of `flwr.serverapp` for
that many clients, and the mods around each client's training. Its parameters, with defaults, are the defense's; the
first number among them is the axis of its trade-off. Both are made anew whenever they are needed: the strategy's
attributes are restored, and a client's state between rounds must be in its context.

FOLDER is a Flower app, unchanged except for two names in its `pyproject.toml`: see `app`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ppbench.adapters.framework import Framework
from ppbench.base.registry import ADDRESS

if TYPE_CHECKING:
    from ppbench.federation.contract import Defense

STOCK_NAMES: Mapping[str, tuple[str, ...]] = {
    "fedavg": ("FedAvg",),
    "dp_server_fixed": ("DifferentialPrivacyServerSideFixedClipping",),
    "dp_client_fixed": ("DifferentialPrivacyClientSideFixedClipping", "fixedclipping_mod"),
    "dp_server_adaptive": ("DifferentialPrivacyServerSideAdaptiveClipping",),
    "dp_client_adaptive": ("DifferentialPrivacyClientSideAdaptiveClipping", "adaptiveclipping_mod"),
    "local_dp": ("LocalDpMod",),
    "secaggplus": ("SecAggPlusWorkflow", "secaggplus_mod"),
    "fedmedian": ("FedMedian",),
    "krum": ("Krum",),
    "fedadam": ("FedAdam",),
    "fedprox": ("FedProx",),
}
"""Defenses that ship with Flower: our names, which records keep, each with Flower's own names."""
FRAMEWORK = Framework("Flower", "flwr", "flower", (1, 23), (1, 42), STOCK_NAMES)


def defense(argument: str, name: str) -> type[Defense]:
    """Flower's strategies, client mods and apps: flower:stock/NAME, flower:MODULE:OBJECT of yours, flower:FOLDER.

    Raises UsageError: Flower is not installed, or too old, or there is no such mechanism.
    """
    with FRAMEWORK.importing(name):
        from ppbench.adapters.flower import defenses

    if shipped := FRAMEWORK.shipped(argument, "mechanism", defenses.FLOWER_STOCK):
        return shipped
    if ADDRESS.fullmatch(argument):
        return defenses.defense(argument, name)
    if not Path(argument).is_dir():
        raise FRAMEWORK.no_name(argument, "stock/NAME, MODULE:OBJECT of yours, or an app's folder")
    from ppbench.adapters.flower import app_folder

    return app_folder.app_defense(argument, name)
