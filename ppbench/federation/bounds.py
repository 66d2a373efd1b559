"""What parameters of defenses and attacks may be, as annotations say: `Literal` its values, `Annotated` a `Bound`."""

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
    """A condition on a parameter. holds: whether a value is right; right: what it must be, in words.

    ends: the least and the largest number that is right, where numbers between two ends are; else None.
    """

    holds: Callable[[Any], bool]
    right: str
    ends: tuple[float, float] | None = None


LARGE = 1e6
"""Where noise, weights and rates end: what is larger swamps a network of float32 numbers, whatever it is."""
SMALL = 1e-30
"""The least that a number > 0 may be: its square is 0 in float32, and nothing is divided by that."""
MANY = 10_000_000
"""Where counts end. Steps of a search are paid for in days then, not in memory."""


def between(least: float, most: float, right: str = "", *, zero: bool = False) -> Bound:
    """Return the bound of numbers from `least` to `most`, both allowed.

    right: in words, by default "from LEAST to MOST". zero: 0 is right too, and stands for "none". NaN is never right.
    """
    words = right or f"{'0 or ' if zero else ''}from {least:g} to {most:g}"
    return Bound(lambda value: least <= value <= most or (zero and value == 0), words, (least, most))


def whole(least: int, most: int) -> Bound:
    """Return the bound of whole numbers from `least` to `most`."""
    words = f"a whole number from {least} to {most:,}"
    return Bound(lambda value: isinstance(value, int) and least <= value <= most, words, (least, most))


Positive = Annotated[float, between(SMALL, LARGE, f"a number > 0, at most {LARGE:,.0f}")]
NonNegative = Annotated[float, between(0, LARGE, f"a number >= 0, at most {LARGE:,.0f}")]
Share = Annotated[float, between(0, 1, "in [0, 1]")]
OpenShare = Annotated[float, between(0, nextafter(1, 0), "in [0, 1)")]
Fraction = Annotated[float, between(SMALL, 1, "above 0, at most 1")]
OpenFraction = Annotated[float, between(SMALL, nextafter(1, 0), "a number between 0 and 1")]
Count = Annotated[int, whole(1, MANY)]
Whole = Annotated[int, whole(0, MANY)]
Held = Annotated[int, whole(1, 10_000)]
"""A count of things that are kept in memory at the same time."""
Bits = Annotated[int, Bound(lambda value: 16 <= value <= 56, "from 16 to 56", (16, 56))]
"""Fractional bits of fixed-point numbers in 64-bit words."""
Seed = Annotated[int, whole(0, 2**63 - 1)]


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
