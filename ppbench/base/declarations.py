"""Checks of a plugin's class against the annotations of the contract that it subclasses."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterator, Mapping
from functools import cache
from types import FunctionType
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ppbench.base.errors import one_line, shown

_MISSING = object()
CONTRACT = 2
"""Version of what plugins may import and must be, `ppbench.api`; it rises when either changes."""
CHANGES: Mapping[int, str] = {
    1: "what plugins import lies in ppbench.api, and modules behind it may move",
    2: "secrets are drawn from ctx.secret, because noise of ctx.generator can be subtracted exactly",
}
"""What changed with each version, a clause each."""


@cache
def _declarations(base: type) -> dict[str, TypeAdapter[Any]]:
    """Return a validator for each class attribute that the contract `base` annotates as ClassVar, by name."""
    config = ConfigDict(arbitrary_types_allowed=True)
    hints = get_type_hints(base, include_extras=True)
    attributes = {name: get_args(hint)[0] for name, hint in hints.items() if get_origin(hint) is ClassVar}
    return {name: TypeAdapter(_checkable(hint), config=config) for name, hint in attributes.items()}


def declared(plugin: type, base: type) -> dict[str, Any]:
    """Return what a class declares of the contract `base`: the values of its class attributes by name, as JSON."""
    return {name: one.dump_python(getattr(plugin, name), mode="json") for name, one in _declarations(base).items()}


def read_declared(values: Mapping[str, Any], base: type) -> dict[str, Any]:
    """Return the values that `declared` wrote, each of its annotated type.

    Raises ValueError: one lacks, is too many, or is of another type.
    """
    known = _declarations(base)
    if odd := sorted(set(values) ^ set(known)):
        raise ValueError(f"{shown(odd[0], 60)} is declared where it should not be, or is not declared")
    return {name: one.validate_python(values[name]) for name, one in known.items()}


def _checkable(hint: Any) -> Any:
    return type if get_origin(hint) is type else hint  # pydantic would call foreign metaclasses; the contract does not


def class_faults(plugin: Any, base: type, name: str) -> Iterator[str]:
    """Yield why `plugin` is not the subclass of `base` that records call `name`; report the first.

    The class must set `name` itself: with an inherited name its results would be recorded as another plugin's.
    """
    if not isinstance(plugin, type):
        yield f"is no class; its entry point must name a subclass of ppbench's {base.__name__}, as module:Class"
        return
    if plugin is base or not issubclass(plugin, base):
        yield f"is no subclass of ppbench's {base.__name__}; make it one"
        return
    own = inspect.getattr_static(plugin, "name", None) if "name" in vars(plugin) else _MISSING
    if own is _MISSING:
        yield f"has no name of its own (an inherited one does not count); set name = {name!r} in the class"
    elif type(own) is not str or own != name:
        yield f"has the name {shown(own, 60)}, its entry point {name!r}; make them equal"
    for attribute, adapter in _declarations(base).items():
        value = getattr(plugin, attribute, _MISSING)
        if value is _MISSING:
            yield f"declares no {attribute}; set it in the class"
            continue
        try:
            adapter.validate_python(value, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in (attribute, *first["loc"]))
            yield f"declares {where} = {shown(first['input'], 60)}; {one_line(first['msg']).lower()}"


def contract_faults(plugin: Any, base: type) -> Iterator[str]:
    """Yield why a plugin does not fit this version of the contract: it is newer, or cannot be called as it will be."""
    if plugin.contract > CONTRACT:
        yield f"is written for contract {plugin.contract}, and this ppbench has contract {CONTRACT}; update ppbench"
    for name, method in vars(base).items():
        own = inspect.getattr_static(plugin, name)
        if name.startswith("_") or own is method or not isinstance(method, FunctionType):
            continue
        if not isinstance(own, FunctionType):
            continue
        needed = inspect.signature(method)
        named = {p.name: None for p in needed.parameters.values() if p.kind is p.KEYWORD_ONLY}
        try:
            inspect.signature(own).bind(*[None] * (len(needed.parameters) - len(named)), **named)
        except TypeError as cause:
            right = f"{name}{needed.replace(return_annotation=inspect.Signature.empty)}"
            yield f"cannot be called as {one_line(right, 200)} ({one_line(cause)}){since(plugin.contract)}"


def since(contract: int) -> str:
    """Return what changed since a version of the contract, for the end of a clause; "" for the present one."""
    changes = "; ".join(f"since {version}: {CHANGES[version]}" for version in range(contract + 1, CONTRACT + 1))
    stated = f"is written for contract {contract}" if contract else "states no contract"
    return f"; it {stated}, this is {CONTRACT} ({changes})" if changes else ""


def field_faults(plugin: type) -> Iterator[str]:
    """Yield why a class is no frozen dataclass whose fields are its parameters."""
    if not plugin.__dataclass_params__.frozen:  # type: ignore[attr-defined]  # of a dataclass's subclass
        yield "is no frozen dataclass; decorate it with @dataclass(frozen=True)"
    fields = {field.name for field in dataclasses.fields(plugin)}
    annotated = [name for name, hint in vars(plugin).get("__annotations__", {}).items() if "ClassVar" not in str(hint)]
    if no_fields := [name for name in annotated if name not in fields]:
        yield f"annotates {no_fields[0]}, which is no field; decorate the class with @dataclass(frozen=True)"
    for field in dataclasses.fields(plugin):
        factory = field.default_factory
        value = field.default if factory is dataclasses.MISSING else factory()
        if value is not dataclasses.MISSING and not is_scalar(value):
            yield f"has a parameter {field.name} that is {shown(value, 60)}; {SCALARS}"


SCALARS = "records hold str, int, float (finite), bool or None"


def is_scalar(value: object) -> bool:
    """Return whether records can store this value of a parameter."""
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | int)


def word_faults(plugin: Any, names: tuple[str, ...]) -> Iterator[str]:
    """Yield faults of the class attributes `names`, texts or tuples of texts: empty, repeated or unprintable."""
    for name in names:
        value = getattr(plugin, name)
        words = [value][: len(value)] if isinstance(value, str) else list(value)
        if not words or len(set(words)) < len(words):
            yield f"declares {name} = {shown(value, 60)}; it must not be empty or repeat a name"
        for word in words:
            if len(word) > 64 or not word.isprintable():
                yield f"declares {name} with {shown(word, 60)}; give up to 64 printable characters"


def call_faults(plugin: Any, *arguments: Any, **keywords: Any) -> Iterator[str]:
    """Yield why a function plugin cannot be called with these arguments."""
    if not callable(plugin):
        yield f"is a {type(plugin).__name__}, which cannot be called; its entry point must name a function"
        return
    try:
        signature = inspect.signature(plugin)
    except (ValueError, TypeError):  # a builtin tells nothing of its arguments
        return
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as cause:
        yield f"cannot be called with its group's arguments ({one_line(cause)}); see the documentation of its group"
