"""A user's function as a defense: it returns a framework's mechanism, and its parameters become the defense's."""

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


class UserFunction(NamedTuple):
    """A user's function. fields: its own parameters, as `make_dataclass` takes them; accepts: the parameters that it
    takes of those that ppbench supplies; about: class attributes of the defense: name, control, grids, docstring.
    """

    call: Callable[..., Any]
    fields: list[tuple[str, Any, Any]]
    accepts: frozenset[str]
    about: dict[str, Any]

    def defense(self, base: type[T], distribution: str, **attributes: Any) -> type[T]:
        """Return a subclass of `base` with these parameters; its version includes the one of `distribution`.

        UsageError: a parameter has the name of an attribute of defenses, such as `noise`.
        """
        if taken := next((name for name, *_ in self.fields if hasattr(base, name)), None):
            problem = "which means something else of a defense; call it another name"
            raise UsageError(f"The defense {self.about['name']!r} has the parameter {taken!r}, {problem}.")
        about = {**self.about, "version": f"1+{distribution}{metadata.version(distribution)}", **attributes}
        return dataclasses.make_dataclass("Yours", self.fields, bases=(base,), namespace=about, frozen=True)


def user_function(address: str, name: str, supplied: tuple[str, ...]) -> UserFunction:
    """Return the function at MODULE:OBJECT for the defense `name`; ppbench supplies the parameters `supplied`.

    UsageError: it is no function, or another parameter has no default that is a number, a string or a bool.
    """
    call: Callable[..., Any] = imported(metadata.EntryPoint(name, address, ""))
    if not callable(call):
        right = ", ".join((*supplied, "**parameters"))
        raise UsageError(f"The defense {name!r} is {shown(call, 60)}; it must be a function ({right}).")
    fields: list[tuple[str, Any, Any]] = []
    parameters = inspect.signature(call).parameters
    for parameter in (p for p in parameters.values() if p.name not in supplied and p.kind is not p.VAR_KEYWORD):
        if parameter.default is parameter.empty or not is_scalar(parameter.default):
            raise UsageError(f"The defense {name!r} has the parameter {parameter.name} without a default; {SCALARS}.")
        fields.append((parameter.name, type(parameter.default), dataclasses.field(default=parameter.default)))
    numbers = [n for n, _, f in fields if isinstance(f.default, int | float) and not isinstance(f.default, bool)]
    control = numbers[0] if numbers else None
    usual = tuple(float(f.default) for n, _, f in fields if n == control)
    about = {
        "name": name, "control": control, "grids": {"quick": usual, "paper": usual},
        "__doc__": inspect.getdoc(call) or "", "__module__": getattr(call, "__module__", __name__),
    }  # fmt: skip
    return UserFunction(call, fields, frozenset(parameters) & {*supplied}, about)
