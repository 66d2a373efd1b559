"""What a defense's parameters may be, as their annotations say: `Literal` by its values, `Annotated` by a `Bound`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from inspect import get_annotations
from math import inf
from types import SimpleNamespace
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Bound:
    """A condition on a parameter. holds: whether a value is right; right: what it must be, in words."""

    holds: Callable[[Any], bool]
    right: str


Positive = Annotated[float, Bound(lambda value: 0 < value < inf, "a finite number > 0")]
NonNegative = Annotated[float, Bound(lambda value: 0 <= value < inf, "a finite number >= 0")]
Count = Annotated[int, Bound(lambda value: value >= 1, "a whole number >= 1")]
Bits = Annotated[int, Bound(lambda value: 16 <= value <= 56, "from 16 to 56")]
"""Fractional bits of fixed-point numbers in 64-bit words."""


@cache
def bounds_of(defense: type) -> Mapping[str, Bound]:
    """Return the bounds in the annotations of a dataclass's fields, by field."""
    names, found = {field.name for field in fields(defense)}, dict[str, Bound | None]()
    for owner in reversed(defense.__mro__):
        own = {name: hint for name, hint in get_annotations(owner).items() if name in names}
        module = sys.modules.get(owner.__module__)  # None where a class outlives its script: nothing to read it by
        if own and module is not None:
            hints = get_type_hints(SimpleNamespace(__annotations__=own), vars(module), include_extras=True)
            found |= {name: _bound(hint) for name, hint in hints.items()}
    return {name: bound for name, bound in found.items() if bound is not None}


def _bound(hint: Any) -> Bound | None:
    if get_origin(hint) is not Literal:
        return next((extra for extra in get_args(hint)[1:] if isinstance(extra, Bound)), None)
    *first, last = map(repr, get_args(hint))
    return Bound(lambda value: value in get_args(hint), f"{', '.join(first)} or {last}")
