"""A function of filters, anybody's, as a defense."""

from __future__ import annotations

from dataclasses import asdict

from nvflare.apis.filter import Filter

from ppbench.adapters.given import given
from ppbench.adapters.nvflare.mechanism import Mechanism


def defense(address: str, name: str) -> type[Mechanism]:
    """Return the defense that the function at MODULE:OBJECT stands for; UsageError for what is no such function."""
    found = given(address, name, ())

    def filters(self: Mechanism) -> list[Filter]:
        made: list[Filter] = found.made(**asdict(self))
        return made

    return found.defense(Mechanism, "nvflare", filters=filters)
