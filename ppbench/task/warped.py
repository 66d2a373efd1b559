"""Images that stand in no data set: those of another one, each bent a little in a way that a secret seed chooses.

Whoever has a public data set can compute what each of its images would have sent, and take the one that explains an
upload best. That finds victims exactly where nothing is rebuilt (`benchmarks/bench_lookup.py`). Of warped images only
the likes are public. They are no new people: who finds the original has most of what there is to know, and may bend it
until it fits, which the grain alone keeps from being exact.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, interpolate

from ppbench.base.errors import UsageError, shown
from ppbench.task.dataset import Dataset, Split
from ppbench.task.opening import named, open_dataset

TURN, SHEAR = math.radians(6), math.tan(math.radians(4))
"""Angle in radians, and shear in widths a height, that no image exceeds, either way."""
SCALE, CONTRAST = math.log(1.06), math.log(1.1)
"""Largest logarithm of the factors of width and of height, and of that of brightness around the middle of the range."""
SHIFT, BEND = 0.04, 0.03
"""Largest way of the image, and more of each of KNOTS x KNOTS places of it, right or left, up or down: shares of it."""
BRIGHTER, GRAIN = 0.05, 0.035
"""Largest change of the whole image, and of each pixel apart from the others, in units of the range."""
KNOTS = 3
NUMBERS = 8 + 2 * KNOTS**2
"""Of a bend: turn, two scales, shear, two ways, contrast, brightness, and the ways of the knots."""
LEVELS = 255
"""Steps of the range in which images are given: what another processor rounds otherwise then gives the same image."""
STRETCH = 100_000
"""Rounds of PBKDF2: the split of an inner data set is drawn by half the seed's bits, and may tell them."""
TOGETHER = 1 << 20
"""Pixels that are warped at once."""


@dataclass(frozen=True)
class Bend:
    """How images are bent, n of them: numbers in [-1, 1], shares of the bounds above.

    numbers: float64 [n, NUMBERS]. grain: float64 [n, C, H, W].
    """

    numbers: Tensor
    grain: Tensor


def warped(argument: str, *, seed: int, root: Path) -> Dataset:
    """Another image set, each image bent by the seed: warped:digits, warped:parquet:FOLDER; nobody has its images.

    Turned, scaled, sheared, shifted, bent, of other contrast and brightness, with grain, all within the bounds of this
    module, borders repeated; in 255 steps of the range. Labels, domains and the split are those of the other set opened
    with `seed`. A function of `seed`: it is secret where draws have a secret (`run.task.task_of`). Raises UsageError:
    the other set cannot be opened, or is none of images with classes.
    """
    if named(argument)[0] in ("", "warped"):
        raise UsageError("The data set 'warped' needs another one, whose images it warps; write 'warped:digits'.")
    inner = open_dataset(argument, seed=seed, root=root)
    if not inner.modality.drawn or inner.task != "classification":
        what = "images with masks" if inner.modality.drawn else "a table"
        raise UsageError(f"The data set {shown(argument)} is {what}; only images with classes can be warped.")
    secret = hashlib.pbkdf2_hmac("sha256", str(seed).encode(), b"ppbench.warped/1", STRETCH)
    parts = (_split(getattr(inner, part), inner.data_range, secret + part.encode()) for part in ("train", "test"))
    train, test = parts
    return replace(inner, name=f"warped:{inner.name}", train=train, test=test)


def bent(x: Tensor, bend: Bend) -> Tensor:
    """Return images [n, C, H, W], in [0, 1], bent: float64 of the same shape, differentiable in all but not clipped."""
    way, gain, brighter, knots = _parts(bend.numbers)
    grid = affine_grid(way, list(x.shape), align_corners=False)
    more = interpolate(knots, size=x.shape[2:], mode="bicubic", align_corners=True)
    there = grid_sample(x.double(), grid + more.permute(0, 2, 3, 1), padding_mode="border", align_corners=False)
    return (there - 0.5) * gain[:, None, None, None] + 0.5 + brighter[:, None, None, None] + GRAIN * bend.grain


def _parts(numbers: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return of [n, NUMBERS] maps [n, 2, 3], gain and brightness [n], and ways of knots [n, 2, KNOTS, KNOTS]."""
    turn, wide, high, shear, right, down, contrast, brighter = numbers[:, :8].unbind(1)
    turn, wide, high = TURN * turn, (SCALE * wide).exp(), (SCALE * high).exp()
    across = torch.stack([turn.cos() * wide, SHEAR * shear * turn.cos() - turn.sin() * high, 2 * SHIFT * right], 1)
    along = torch.stack([turn.sin() * wide, SHEAR * shear * turn.sin() + turn.cos() * high, 2 * SHIFT * down], 1)
    knots = 2 * BEND * numbers[:, 8:].reshape(-1, 2, KNOTS, KNOTS)  # the side of an image is 2 in a grid
    return torch.stack([across, along], 1), (CONTRAST * contrast).exp(), BRIGHTER * brighter, knots


def _split(split: Split, data_range: tuple[float, float], secret: bytes) -> Split:
    low, high = data_range
    count = max(1, TOGETHER // split.x[0].numel())
    found = torch.empty_like(split.x)
    for first, some in zip(range(0, len(split), count), split.x.split(count), strict=True):
        whole = some.dtype == torch.uint8
        unit = some.double() / LEVELS if whole else (some.double() - low) / (high - low)
        steps = (bent(unit, _drawn(unit.shape, secret, first)) * LEVELS).round().clamp(0, LEVELS)
        out = steps if whole else (low + steps / LEVELS * (high - low)).float().clamp(low, high)
        found[first : first + len(some)] = out.to(some.dtype)
    return replace(split, x=found)


def _drawn(shape: torch.Size, secret: bytes, first: int) -> Bend:
    """Return how images of `shape` [n, C, H, W] are bent, from the one at `first` on: each by SHAKE-256 of its place.

    torch's generators keep 32 bits of a seed, which can all be tried.
    """
    streams = b"".join(_streams(shape, secret, first))
    read = np.frombuffer(streams, [("numbers", "<u4", (NUMBERS,)), ("grain", "u1", shape[1:])])
    numbers, grain = (torch.from_numpy(read[name].astype(np.float64)) for name in ("numbers", "grain"))
    return Bend(numbers / (2**31 - 0.5) - 1, grain / 127.5 - 1)


def _streams(shape: torch.Size, secret: bytes, first: int) -> Iterator[bytes]:
    length = 4 * NUMBERS + math.prod(shape[1:])
    for place in range(first, first + shape[0]):
        yield hashlib.shake_256(secret + place.to_bytes(8, "big")).digest(length)
