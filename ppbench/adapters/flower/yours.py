"""A function of strategy and mods, anybody's, as a defense."""

from __future__ import annotations

from dataclasses import asdict

from ppbench.adapters.flower.mechanism import Mechanism, Parts
from ppbench.adapters.given import given

CLIENTS = "clients"


def defense(address: str, name: str) -> type[Mechanism]:
    """Return the defense that the function at MODULE:OBJECT stands for; UsageError for what is no such function."""
    found = given(address, name, (CLIENTS,))

    def parts(self: Mechanism, clients: int) -> Parts:
        made: Parts = found.made(**({CLIENTS: clients} if found.takes else {}), **asdict(self))
        return made

    return found.defense(Mechanism, "flwr", parts=parts)
