"""A user's function that returns filters, as a defense."""

from __future__ import annotations

from dataclasses import asdict

from nvflare.apis.filter import Filter

from ppbench.adapters.given import user_function
from ppbench.adapters.nvflare.mechanism import NVFlareDefense


def defense(address: str, name: str) -> type[NVFlareDefense]:
    """Return the defense of the function at MODULE:OBJECT; UsageError: there is no such function."""
    function = user_function(address, name, ())

    def filters(self: NVFlareDefense) -> list[Filter]:
        new_filters: list[Filter] = function.call(**asdict(self))
        return new_filters

    return function.defense(NVFlareDefense, "nvflare", filters=filters)
