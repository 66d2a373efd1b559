"""The fence around plugins: instances from user parameters, errors by plugin, package, file and line."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from ppbench.base.declarations import SCALARS, is_scalar
from ppbench.base.errors import PluginError, ProtocolError, UsageError, because, shown, unknown
from ppbench.base.import_guard import PACKAGE, error_text, frames, module_of, place, within
from ppbench.base.registry import GROUP_NOUNS, Plugin, PluginGroup, all_known, find, load_plugin

# -- Blame for errors: what a third-party plugin raises is reported with plugin, package, file and line --


@contextmanager
def guard(group: PluginGroup | None = None, name: str = "") -> Iterator[None]:
    """Turn what a third-party plugin raises in the block, exits too, into its `plugin_error`.

    It stands at doors, by which code enters that may run plugins: docs/design.md lists them.
    """
    try:
        yield
    except BaseException as error:
        sentence = plugin_error(error, group, name)
        if sentence is None:
            raise
        raise sentence from error


def plugin_error(error: BaseException, group: PluginGroup | None = None, name: str = "") -> PluginError | None:
    """Return an error as a sentence with plugin, package, file and line; None if no third-party plugin is to blame.

    Blamed is the plugin whose code the error passed (`blame`), else the one named here, whose result was in use. None
    for ppbench's own errors and for interrupts.
    """
    culprit = _culprit(error, group, name)
    if culprit is None:
        return None
    where = place(error, culprit.root)
    at = f" ({where})" if where else " in ppbench's own code, on its result"
    return PluginError(f"{culprit.words} raised {error_text(error)}{at}.")


def _culprit(error: BaseException, group: PluginGroup | None, name: str) -> Plugin | None:
    # A ProtocolError is the fault of the third-party plugin, if there is one; an Overflow means that training diverged.
    ours = type(error).__module__.partition(".")[0] == PACKAGE and type(error) is not ProtocolError
    if ours or isinstance(error, KeyboardInterrupt | GeneratorExit):
        return None
    stack = frames(error)
    if not isinstance(error, Exception) and (not stack or within(module_of(stack[0]), PACKAGE)):
        return None  # raised by a signal, wherever the process was
    named = None if group is None else find(group, name)
    named = None if named is None or named.ours else named
    return blame(error, named) or named


def blame(error: BaseException, named: Plugin | None = None) -> Plugin | None:
    """Return the third-party plugin whose code the error was raised in or passed, the innermost first; or None.

    Of several in one package, the one whose class or function was running, else `named`, else the first.
    """
    others = [p for p in all_known() if not p.ours and p.root]
    others = [p for p in others if p.root != PACKAGE and p.root not in sys.stdlib_module_names]
    for frame in frames(error) if others else ():
        module = module_of(frame)
        candidates = [p for p in others if within(module, p.root)]
        if candidates:
            at_work = type(frame.f_locals["self"]).__mro__ if "self" in frame.f_locals else ()
            names = [cls.__qualname__ for cls in at_work if within(cls.__module__, candidates[0].root)]  # derived first
            names += [] if at_work else [frame.f_code.co_name]
            exact = [p for name in names for p in candidates if p.target.partition(":")[2] == name]
            likely = [p for p in candidates if p == named] or [p for p in candidates if p.module == module]
            return (exact or likely or candidates)[0]
    return None


def third_party(group: PluginGroup, name: str) -> bool:
    """Return whether the plugin `name` belongs to another package than ppbench."""
    plugin = find(group, name)
    return plugin is not None and not plugin.ours


def check_answers(group: PluginGroup, name: str, faults: Callable[[], Iterable[str]]) -> None:
    """Raise PluginError with the first fault of a third-party plugin's answers; ppbench's own are not called."""
    plugin = find(group, name)
    if plugin is None or plugin.ours:
        return
    with guard(group, name):
        for fault in faults():
            raise PluginError(f"{plugin.words} {fault}.")


# -- Instances of plugins with parameters from users; each error is a sentence that blames the user or the plugin --

T = TypeVar("T")
ParameterValue = str | int | float | bool | None


@cache
def _adapter(factory: type) -> TypeAdapter[Any]:
    """Return the validator of a dataclass's parameters; cached, because building it is slow."""
    return TypeAdapter(factory)


def _check_booleans(kind: str, name: str, parameters: Mapping[str, ParameterValue], fields: Mapping[str, Any]) -> None:
    """Raise UsageError for True or False in place of a number: pydantic reads them as 1 and 0."""
    for key, value in parameters.items():
        if isinstance(value, bool) and isinstance(fields.get(key), int | float) and not isinstance(fields[key], bool):
            raise UsageError(f"The {kind} {name!r} refuses {key}={value}: it must be a number.")


def built(group: Literal["datasets", "models"], name: str, build: Callable[[Any], T]) -> T:
    """Return what `build` makes with the function of the plugin `name`; PluginError: that function raised."""
    with guard(group, name):
        return build(load_plugin(group, name))


def made(
    group: Literal["defenses", "attacks"],
    base: type[T],
    name: str,
    parameters: Mapping[str, ParameterValue],
    check: Callable[[T], None] = lambda instance: None,
) -> T:
    """Return an instance of the plugin `name` with `parameters` for its fields, else their defaults.

    check: its own check of them, which raises UsageError. Raises UsageError: an unknown name or parameter, or a value
    of another type; PluginError: the plugin does not make a `base` with parameters that records can store.
    """
    with guard(group, name):
        instance = _instance(group, base, name, parameters)
        check(instance)
        return instance


def _instance(
    group: Literal["defenses", "attacks"], base: type[T], name: str, parameters: Mapping[str, ParameterValue]
) -> T:
    kind, factory, plugin = GROUP_NOUNS[group], load_plugin(group, name), find(group, name)
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
    try:
        instance = _adapter(factory).validate_python(dict(parameters))
    except ValidationError as refusal:
        first = refusal.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        parameter = f"{where}={shown(first['input'])}" if where else "its parameters"
        reason = because(ValueError(first["msg"].lower()))
        raise UsageError(f"The {kind} {name!r} refuses {parameter}: {reason}.") from refusal
    values = {key: getattr(instance, key) for key in known}
    _check_booleans(kind, name, parameters, values)
    if not isinstance(instance, base):
        raise PluginError(f"{title} makes a {type(instance).__name__}, no {base.__name__}.")
    if no_scalars := [key for key, value in values.items() if not is_scalar(value)]:
        value = shown(values[no_scalars[0]], 60)
        raise PluginError(f"{title} has the parameter {no_scalars[0]}={value}; {SCALARS}.")
    return instance
