"""A function of somebody's as a defense: what it returns is a mechanism, its parameters become the defense's."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from importlib import metadata
from typing import Any, NamedTuple, TypeVar

from ppbench.base.declared import SCALARS, is_scalar
from ppbench.base.entries import imported
from ppbench.base.errors import UsageError, shown

T = TypeVar("T")


class Given(NamedTuple):
    """A function at an address. fields: its parameters but those that the bench hands it, for a dataclass; takes: which
    of the latter it has; about: what a defense of it is called, and which of its parameters is the trade-off's axis.
    """

    made: Callable[..., Any]
    fields: list[tuple[str, Any, Any]]
    takes: frozenset[str]
    about: dict[str, Any]

    def defense(self, base: type[T], distribution: str, **own: Any) -> type[T]:
        """Return a defense on `base` with these parameters; its version holds that of the distribution below it.

        UsageError: a parameter is called what everybody asks a defense for, such as `noise`.
        """
        if taken := next((name for name, *_ in self.fields if hasattr(base, name)), None):
            told = "which means something else of a defense; call it another name"
            raise UsageError(f"The defense {self.about['name']!r} has the parameter {taken!r}, {told}.")
        about = {**self.about, "version": f"1+{distribution}{metadata.version(distribution)}", **own}
        return dataclasses.make_dataclass("Yours", self.fields, bases=(base,), namespace=about, frozen=True)


def given(address: str, name: str, handed: tuple[str, ...]) -> Given:
    """Return the function at MODULE:OBJECT for the defense `name`; the bench hands it the parameters `handed`.

    UsageError: it is no function, or another parameter has no default that is a number, a text or a flag.
    """
    made: Callable[..., Any] = imported(metadata.EntryPoint(name, address, ""))
    if not callable(made):
        right = ", ".join((*handed, "**parameters"))
        raise UsageError(f"The defense {name!r} is {shown(made, 60)}; it must be a function ({right}).")
    fields: list[tuple[str, Any, Any]] = []
    parameters = inspect.signature(made).parameters
    for one in (p for p in parameters.values() if p.name not in handed and p.kind is not p.VAR_KEYWORD):
        if one.default is one.empty or not is_scalar(one.default):
            raise UsageError(f"The defense {name!r} has the parameter {one.name} without a default; {SCALARS}.")
        fields.append((one.name, type(one.default), dataclasses.field(default=one.default)))
    numbers = [n for n, _, f in fields if isinstance(f.default, int | float) and not isinstance(f.default, bool)]
    control = numbers[0] if numbers else None
    usual = tuple(float(f.default) for n, _, f in fields if n == control)
    about = {
        "name": name, "control": control, "grids": {"quick": usual, "paper": usual},
        "__doc__": inspect.getdoc(made) or "", "__module__": getattr(made, "__module__", __name__),
    }  # fmt: skip
    return Given(made, fields, frozenset(parameters) & {*handed}, about)
