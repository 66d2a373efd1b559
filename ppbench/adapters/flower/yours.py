"""A function of strategy and mods, anybody's, as a defense; of secure aggregation's workflow and mods too."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from flwr.server.workflow import SecAggPlusWorkflow

from ppbench.adapters.flower.inside import running
from ppbench.adapters.flower.mechanism import Mechanism
from ppbench.adapters.flower.secure import Secure
from ppbench.adapters.given import Given, given
from ppbench.base.errors import ProtocolError

CLIENTS = "clients"
SEVERAL = 10
"""Clients, of which the function is asked what it gives."""


def defense(address: str, name: str) -> type[Mechanism]:
    """Return the defense that the function at MODULE:OBJECT stands for; UsageError for what is no such function."""
    found = given(address, name, (CLIENTS,))

    def parts(self: Mechanism, clients: int) -> Any:
        return _called(found, clients, **asdict(self))

    return found.defense(Secure if _aggregates_securely(found) else Mechanism, "flwr", parts=parts)


def _called(found: Given, clients: int, **parameters: Any) -> Any:
    return found.made(**({CLIENTS: clients} if found.takes else {}), **parameters)


def _aggregates_securely(found: Given) -> bool:
    """Return whether the function gives a workflow, as it comes; where it raises, `check` will say so."""
    try:
        with running("It", 0):
            made = _called(found, SEVERAL)
    except ProtocolError:
        return False
    return isinstance(made, tuple) and bool(made) and isinstance(made[0], SecAggPlusWorkflow)
