"""Instances of plugins with parameters from users; each error is one sentence that blames the user or the plugin."""

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
from ppbench.base.registry import GROUP_NOUNS, find, load

T = TypeVar("T")
ParameterValue = str | int | float | bool | None


@cache
def _adapter(factory: type) -> TypeAdapter[Any]:
    """Return the validator of a dataclass's parameters; cached, because building it is slow."""
    return TypeAdapter(factory)


def _made(factory: type, parameters: Mapping[str, ParameterValue]) -> tuple[Any, ValidationError | None]:
    """Return an instance and None, or None and the error about the user's `parameters`."""
    try:
        return _adapter(factory).validate_python(dict(parameters)), None
    except ValidationError as refusal:
        return None, refusal


def _check_booleans(kind: str, name: str, parameters: Mapping[str, ParameterValue], fields: Mapping[str, Any]) -> None:
    """Raise UsageError for True or False in place of a number: pydantic reads them as 1 and 0."""
    for key, value in parameters.items():
        if isinstance(value, bool) and isinstance(fields.get(key), int | float) and not isinstance(fields[key], bool):
            raise UsageError(f"The {kind} {name!r} refuses {key}={value}: it must be a number.")


def made(
    group: Literal["defenses", "attacks"], base: type[T], name: str, parameters: Mapping[str, ParameterValue]
) -> T:
    """Return an instance of the plugin `name` with `parameters` for its fields, else their defaults.

    Raises UsageError: an unknown name or parameter, or a value of another type; PluginError: the plugin does not make
    a `base` with parameters that records can store.
    """
    kind, factory, plugin = GROUP_NOUNS[group], load(group, name), find(group, name)
    title = plugin.words if plugin is not None else shown(name)
    known = [field.name for field in dataclasses.fields(factory)]
    for key in parameters:
        if key not in known:
            raise unknown(f"parameter of {kind} {name!r}", key, known or ["(it has none)"])
    if not_finite := [
        key for key, value in parameters.items() if isinstance(value, float) and not math.isfinite(value)
    ]:
        raise UsageError(
            f"The {kind} {name!r} refuses {not_finite[0]}={shown(parameters[not_finite[0]])}: it must be finite."
        )
    with guard(group, name):
        instance, refusal = _made(factory, parameters)
        values = {} if refusal else {key: getattr(instance, key) for key in known}
    if refusal is not None:
        first = refusal.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        parameter = f"{where}={shown(first['input'])}" if where else "its parameters"
        reason = because(ValueError(first["msg"].lower()))
        raise UsageError(f"The {kind} {name!r} refuses {parameter}: {reason}.") from refusal
    _check_booleans(kind, name, parameters, values)
    if not isinstance(instance, base):
        raise PluginError(f"{title} makes a {type(instance).__name__}, no {base.__name__}.")
    if no_scalars := [key for key, value in values.items() if not is_scalar(value)]:
        value = shown(values[no_scalars[0]], 60)
        raise PluginError(f"{title} has the parameter {no_scalars[0]}={value}; {SCALARS}.")
    return instance
