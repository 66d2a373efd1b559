"""A function that makes a training private, anybody's, as a defense."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ppbench.adapters.given import given
from ppbench.adapters.opacus.mechanism import Mechanism
from ppbench.adapters.opacus.private import Public


def defense(address: str, name: str) -> type[Mechanism]:
    """Return the defense that the function at MODULE:OBJECT stands for; UsageError for what is no such function."""
    found = given(address, name, Public._fields)

    def parts(self: Mechanism, handed: Public) -> Any:
        taken = {part: value for part, value in handed._asdict().items() if part in found.takes}
        return found.made(**taken, **asdict(self))

    return found.defense(Mechanism, "opacus", parts=parts)
