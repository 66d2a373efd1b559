"""Bounds of the parameters of defenses and attacks, in annotations: `Literal` values, or `Annotated` with a `Bound`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from inspect import get_annotations
from math import nextafter
from typing import Annotated, Any, Literal, get_args, get_origin


@dataclass(frozen=True)
class Bound:
    """A condition on a parameter. holds: whether a value is allowed; right: the allowed values, in words.

    ends: the smallest and the largest allowed number of an interval; else None.
    """

    holds: Callable[[Any], bool]
    right: str
    ends: tuple[float, float] | None = None


LARGEST_NUMBER = 1e6
"""Largest noise, weight or rate: anything larger swamps a network of float32 numbers."""
SMALLEST_POSITIVE = 1e-30
"""Smallest positive parameter: its square is 0 in float32, by which nothing is divided."""
LARGEST_COUNT = 10_000_000
"""Largest count: that many steps of a search take days, but no memory."""


def between(least: float, most: float, right: str = "", *, zero: bool = False) -> Bound:
    """Return the bound of numbers from `least` to `most`, both allowed; NaN is not.

    right: in words, by default "from LEAST to MOST". zero: also allow 0, which stands for "none".
    """
    words = right or f"{'0 or ' if zero else ''}from {least:g} to {most:g}"
    return Bound(lambda value: least <= value <= most or (zero and value == 0), words, (least, most))


def whole_number(least: int, most: int) -> Bound:
    """Return the bound of whole numbers from `least` to `most`."""
    words = f"a whole number from {least} to {most:,}"
    return Bound(lambda value: isinstance(value, int) and least <= value <= most, words, (least, most))


Positive = Annotated[float, between(SMALLEST_POSITIVE, LARGEST_NUMBER, f"a number > 0, at most {LARGEST_NUMBER:,.0f}")]
NonNegative = Annotated[float, between(0, LARGEST_NUMBER, f"a number >= 0, at most {LARGEST_NUMBER:,.0f}")]
UnitInterval = Annotated[float, between(0, 1, "in [0, 1]")]
OpenShare = Annotated[float, between(0, nextafter(1, 0), "in [0, 1)")]
Fraction = Annotated[float, between(SMALLEST_POSITIVE, 1, "above 0, at most 1")]
OpenFraction = Annotated[float, between(SMALLEST_POSITIVE, nextafter(1, 0), "a number between 0 and 1")]
PositiveInt = Annotated[int, whole_number(1, LARGEST_COUNT)]
NonNegativeInt = Annotated[int, whole_number(0, LARGEST_COUNT)]
InMemoryCount = Annotated[int, whole_number(1, 10_000)]
"""A count of things that are in memory at the same time."""
Bits = Annotated[int, Bound(lambda value: 16 <= value <= 56, "from 16 to 56", (16, 56))]
"""Fractional bits of fixed-point numbers in 64-bit words."""
RandomSeed = Annotated[int, whole_number(0, 2**63 - 1)]


@cache
def bounds_of(plugin: type) -> Mapping[str, Bound]:
    """Return the bounds in the annotations of a dataclass's fields, by field, inherited ones included."""
    bounds: dict[str, Bound] = {}
    for owner in reversed(plugin.__mro__):
        if owner.__module__ in sys.modules:  # a class may outlive its script; its annotations cannot be read then
            stated = {name: _bound(hint) for name, hint in get_annotations(owner, eval_str=True).items()}
            bounds |= {name: bound for name, bound in stated.items() if bound is not None}
    return bounds


def _bound(hint: Any) -> Bound | None:
    if get_origin(hint) is not Literal:
        return next((extra for extra in get_args(hint)[1:] if isinstance(extra, Bound)), None)
    *first, last = map(repr, get_args(hint))
    return Bound(lambda value: value in get_args(hint), f"{', '.join(first)} or {last}")
