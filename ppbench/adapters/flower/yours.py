"""A user's function that returns a strategy and mods, or a secure aggregation workflow and mods, as a defense."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from flwr.server.workflow import SecAggPlusWorkflow

from ppbench.adapters.flower.inside import running_flower
from ppbench.adapters.flower.mechanism import FlowerDefense
from ppbench.adapters.flower.secure import Secure
from ppbench.adapters.given import UserFunction, user_function
from ppbench.base.errors import ProtocolError

CLIENTS_PARAMETER = "clients"
TRIAL_CLIENTS = 10
"""Number of clients in the call that finds out what the function returns."""


def defense(address: str, name: str) -> type[FlowerDefense]:
    """Return the defense of the function at MODULE:OBJECT; UsageError: there is no such function."""
    function = user_function(address, name, (CLIENTS_PARAMETER,))

    def parts(self: FlowerDefense, clients: int) -> Any:
        return _called(function, clients, **asdict(self))

    return function.defense(Secure if _aggregates_securely(function) else FlowerDefense, "flwr", parts=parts)


def _called(function: UserFunction, clients: int, **parameters: Any) -> Any:
    return function.call(**({CLIENTS_PARAMETER: clients} if function.accepts else {}), **parameters)


def _aggregates_securely(function: UserFunction) -> bool:
    """Return whether the function returns a workflow by default; if it raises, `check` reports that later."""
    try:
        with running_flower("It", 0):
            made = _called(function, TRIAL_CLIENTS)
    except ProtocolError:
        return False
    return isinstance(made, tuple) and bool(made) and isinstance(made[0], SecAggPlusWorkflow)
