"""What parameters of defenses and attacks may be, as annotations say: `Literal` its values, `Annotated` a `Bound`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from inspect import get_annotations
from math import inf
from typing import Annotated, Any, Literal, get_args, get_origin


@dataclass(frozen=True)
class Bound:
    """A condition on a parameter. holds: whether a value is right; right: what it must be, in words."""

    holds: Callable[[Any], bool]
    right: str


Positive = Annotated[float, Bound(lambda value: 0 < value < inf, "a finite number > 0")]
NonNegative = Annotated[float, Bound(lambda value: 0 <= value < inf, "a finite number >= 0")]
Share = Annotated[float, Bound(lambda value: 0 <= value <= 1, "in [0, 1]")]
Count = Annotated[int, Bound(lambda value: value >= 1, "a whole number >= 1")]
Whole = Annotated[int, Bound(lambda value: value >= 0, "a whole number >= 0")]
Bits = Annotated[int, Bound(lambda value: 16 <= value <= 56, "from 16 to 56")]
"""Fractional bits of fixed-point numbers in 64-bit words."""


@cache
def bounds_of(plugin: type) -> Mapping[str, Bound]:
    """Return the bounds in the annotations of a dataclass's fields, by field; a subclass's own default loosens none."""
    found: dict[str, Bound] = {}
    for owner in reversed(plugin.__mro__):
        if owner.__module__ in sys.modules:  # a class may outlive its script: nothing to read its annotations by
            stated = {name: _bound(hint) for name, hint in get_annotations(owner, eval_str=True).items()}
            found |= {name: bound for name, bound in stated.items() if bound is not None}
    return found


def _bound(hint: Any) -> Bound | None:
    if get_origin(hint) is not Literal:
        return next((extra for extra in get_args(hint)[1:] if isinstance(extra, Bound)), None)
    *first, last = map(repr, get_args(hint))
    return Bound(lambda value: value in get_args(hint), f"{', '.join(first)} or {last}")
