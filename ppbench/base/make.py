"""Instances of plugins with parameters from users: each refusal is one sentence, and names whose fault it is."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from ppbench.base.blame import guard
from ppbench.base.declared import SCALARS, is_scalar
from ppbench.base.errors import PluginError, UsageError, because, shown, unknown
from ppbench.base.registry import KINDS, find, load

T = TypeVar("T")
Value = str | int | float | bool | None


@cache
def _adapter(factory: type) -> TypeAdapter[Any]:
    """Return what checks a dataclass's parameters; building it takes longer than using it a hundred times."""
    return TypeAdapter(factory)


def _made(factory: type, parameters: Mapping[str, Value]) -> tuple[Any, ValidationError | None]:
    """Return an instance, or why the types of its fields refuse `parameters`: these are the user's."""
    try:
        return _adapter(factory).validate_python(dict(parameters)), None
    except ValidationError as refusal:
        return None, refusal


def _check_booleans(kind: str, name: str, parameters: Mapping[str, Value], fields: Mapping[str, Any]) -> None:
    """Refuse True and False in the place of a number (UsageError): pydantic reads them as 1 and 0."""
    for key, value in parameters.items():
        if isinstance(value, bool) and isinstance(fields.get(key), int | float) and not isinstance(fields[key], bool):
            raise UsageError(f"The {kind} {name!r} refuses {key}={value}: it must be a number.")


def made(group: Literal["defenses", "attacks"], base: type[T], name: str, parameters: Mapping[str, Value]) -> T:
    """Return an instance of the plugin called `name`, whose fields are `parameters` where these say something.

    Raises UsageError: an unknown name or parameter, or a value of another type; PluginError: the plugin makes something
    else than `base` asks for.
    """
    kind, factory, plugin = KINDS[group], load(group, name), find(group, name)
    words = plugin.words if plugin is not None else shown(name)
    known = [field.name for field in dataclasses.fields(factory)]
    for key in parameters:
        if key not in known:
            raise unknown(f"parameter of {kind} {name!r}", key, known or ["(it has none)"])
    if odd := [key for key, value in parameters.items() if isinstance(value, float) and not math.isfinite(value)]:
        raise UsageError(f"The {kind} {name!r} refuses {odd[0]}={shown(parameters[odd[0]])}: it must be finite.")
    with guard(group, name):
        found, refusal = _made(factory, parameters)
        held = {} if refusal else {key: getattr(found, key) for key in known}
    if refusal is not None:
        first = refusal.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        what = f"{where}={shown(first['input'])}" if where else "its parameters"
        why = because(ValueError(first["msg"].lower()))
        raise UsageError(f"The {kind} {name!r} refuses {what}: {why}.") from refusal
    _check_booleans(kind, name, parameters, held)
    if not isinstance(found, base):
        raise PluginError(f"{words} makes a {type(found).__name__}, no {base.__name__}.")
    if strange := [key for key, value in held.items() if not is_scalar(value)]:
        told = shown(held[strange[0]], 60)
        raise PluginError(f"{words} has the parameter {strange[0]}={told}; {SCALARS}.")
    return found
