"""Common checks of models: image shapes, options, activations. Every ValueError is the second half of a sentence."""

from __future__ import annotations

import re
from collections.abc import Collection

from torch import nn

from ppbench.base.errors import shown

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "hardswish": nn.Hardswish,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
}


def checked_image(shape: tuple[int, ...], least: int = 1) -> tuple[int, int, int]:
    """Return `shape` as (channels, height, width); raises ValueError unless it is an image of `least` x `least`."""
    if len(shape) != 3 or shape[0] < 1 or min(shape[1:]) < least:
        raise ValueError(f"it takes images (channels, height, width) of at least {least}x{least}, not {tuple(shape)}")
    return shape[0], shape[1], shape[2]


def checked_flag(name: str, value: bool) -> bool:
    """Return `value`; raises ValueError unless it is true or false (any other word would count as true)."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not {shown(value)}")
    return value


WIDEST = 16_384
"""Most units or channels of a layer."""
DEEPEST = 256
"""Most layers or blocks that an option may set."""


def checked_int(name: str, value: int, least: int, most: int = WIDEST) -> int:
    """Return `value`; raises ValueError unless it is a whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} must be a whole number of at least {least}, at most {most}, not {shown(value)}")
    return value


def one_of(name: str, value: str, known: Collection[str]) -> str:
    """Return `value`; raises ValueError unless it is one of `known`."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, not {shown(value)}")
    return value


def widths(name: str, text: str | int) -> list[int]:
    """Return the comma-separated widths in `text`; raises ValueError unless all are whole numbers > 0."""
    words = str(text).split(",") if str(text).strip() else []
    sizes = [int(word) if re.fullmatch(r"\s*\d{1,9}\s*", word, re.ASCII) else 0 for word in words]
    if len(sizes) > DEEPEST or not all(0 < size <= WIDEST for size in sizes):
        most = f"at most {DEEPEST} and each at most {WIDEST}"
        raise ValueError(f"{name} must be widths > 0 such as '128,64', {most}, not {shown(text)}")
    return sizes
