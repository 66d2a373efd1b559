"""A user's function that makes a training private, as a defense."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ppbench.adapters.given import user_function
from ppbench.adapters.opacus.mechanism import OpacusDefense
from ppbench.adapters.opacus.private import Public


def defense(address: str, name: str) -> type[OpacusDefense]:
    """Return the defense of the function at MODULE:OBJECT; UsageError: there is no such function."""
    function = user_function(address, name, Public._fields)

    def parts(self: OpacusDefense, training: Public) -> Any:
        arguments = {part: value for part, value in training._asdict().items() if part in function.accepts}
        return function.call(**arguments, **asdict(self))

    return function.defense(OpacusDefense, "opacus", parts=parts)
