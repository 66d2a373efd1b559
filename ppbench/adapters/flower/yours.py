"""A function of strategy and mods, anybody's, as a defense: its parameters become the defense's."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from importlib import metadata
from typing import Any

from ppbench.adapters.flower.mechanism import Mechanism, Parts
from ppbench.base.declared import SCALARS, is_scalar
from ppbench.base.errors import UsageError, shown
from ppbench.base.registry import imported

CLIENTS = "clients"


def defense(address: str, name: str) -> type[Mechanism]:
    """Return the defense that the function at MODULE:OBJECT stands for; UsageError for what is no such function."""
    made: Callable[..., Any] = imported(metadata.EntryPoint(name, address, ""))
    if not callable(made):
        raise UsageError(f"The defense {name!r} is {shown(made, 60)}; it must be a function (clients, **parameters).")
    fields: list[tuple[str, Any, Any]] = []
    parameters = inspect.signature(made).parameters
    for one in (p for p in parameters.values() if p.name != CLIENTS and p.kind is not p.VAR_KEYWORD):
        if one.default is one.empty or not is_scalar(one.default):
            raise UsageError(f"The defense {name!r} has the parameter {one.name} without a default; {SCALARS}.")
        fields.append((one.name, type(one.default), dataclasses.field(default=one.default)))
    takes = CLIENTS in parameters

    def parts(self: Mechanism, clients: int) -> Parts:
        found: Parts = made(**({CLIENTS: clients} if takes else {}), **dataclasses.asdict(self))
        return found

    numbers = [n for n, _, f in fields if isinstance(f.default, int | float) and not isinstance(f.default, bool)]
    control = numbers[0] if numbers else None
    usual = tuple(float(f.default) for n, _, f in fields if n == control)
    about = {
        "name": name, "control": control, "grids": {"quick": usual, "paper": usual}, "parts": parts,
        "__doc__": inspect.getdoc(made) or "",
        "version": f"1+flwr{metadata.version('flwr')}", "__module__": getattr(made, "__module__", __name__),
    }  # fmt: skip
    return dataclasses.make_dataclass("Yours", fields, bases=(Mechanism,), namespace=about, frozen=True)
