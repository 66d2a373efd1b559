"""Images that are in no public data set: those of another one, each warped a little by a secret seed.

An adversary with a public data set can compute the upload of each of its images and pick the one that fits best. That
finds victims exactly even without reconstructing anything (`benchmarks/bench_lookup.py`). Of warped images only
similar ones are public. They show no new people: an adversary who finds the original knows most of it, and may warp it
to fit, though never exactly, because of the grain.
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
from ppbench.task.user_data import named, open_dataset

TURN, SHEAR = math.radians(6), math.tan(math.radians(4))
"""Largest angle in radians, and largest shear in widths per height, in either direction."""
SCALE, CONTRAST = math.log(1.06), math.log(1.1)
"""Largest logarithm of the factors of width and of height, and of that of brightness around the middle of the range."""
SHIFT, BEND = 0.04, 0.03
"""Largest shift of the image, and further shift of each of KNOTS x KNOTS places, on either axis, as shares of it."""
BRIGHTER, GRAIN = 0.05, 0.035
"""Largest change of the brightness of the whole image, and of each pixel by itself, in units of the range."""
KNOTS = 3
WARP_NUMBERS = 8 + 2 * KNOTS**2
"""Parameters of a warp: turn, two scales, shear, two shifts, contrast, brightness, and the shifts of the knots."""
LEVELS = 255
"""Steps of the range to which images are rounded, so that every processor gives the same image."""
STRETCH = 100_000
"""Rounds of PBKDF2: the split of the inner data set is drawn by half of the seed's bits, and may reveal them."""
PIXELS_AT_ONCE = 1 << 20
"""Pixels that are warped at once."""


@dataclass(frozen=True)
class Bend:
    """The warps of n images, as shares in [-1, 1] of the bounds above.

    numbers: float64 [n, NUMBERS]. grain: float64 [n, C, H, W].
    """

    numbers: Tensor
    grain: Tensor


def warped(argument: str, *, seed: int, root: Path) -> Dataset:
    """Another image set, each image warped by the seed: warped:digits, warped:parquet:FOLDER; nobody has its images.

    Images are turned, scaled, sheared, shifted, bent, changed in contrast and brightness, and get grain, all within the
    bounds of this module, with borders repeated, in 255 steps of the range. Labels, domains and the split are those of
    the other set opened with `seed`. A function of `seed`, which is secret if draws have a secret
    (`run.task.task_of`). UsageError: the other set cannot be opened, or has no images with classes.
    """
    if named(argument)[0] in ("", "warped"):
        raise UsageError("The data set 'warped' needs another one, whose images it warps; write 'warped:digits'.")
    inner = open_dataset(argument, seed=seed, root=root)
    if not inner.modality.drawn or inner.task != "classification":
        content = "images with masks" if inner.modality.drawn else "a table"
        raise UsageError(f"The data set {shown(argument)} is {content}; only images with classes can be warped.")
    secret = hashlib.pbkdf2_hmac("sha256", str(seed).encode(), b"ppbench.warped/1", STRETCH)
    parts = (_split(getattr(inner, part), inner.data_range, secret + part.encode()) for part in ("train", "test"))
    train, test = parts
    return replace(inner, name=f"warped:{inner.name}", train=train, test=test)


def bent(x: Tensor, bend: Bend) -> Tensor:
    """Return warped images [n, C, H, W], from [0, 1]: float64, differentiable in all arguments, not clipped."""
    maps, gain, brighter, knots = _parts(bend.numbers)
    grid = affine_grid(maps, list(x.shape), align_corners=False)
    shifts = interpolate(knots, size=x.shape[2:], mode="bicubic", align_corners=True)
    warped_x = grid_sample(x.double(), grid + shifts.permute(0, 2, 3, 1), padding_mode="border", align_corners=False)
    return (warped_x - 0.5) * gain[:, None, None, None] + 0.5 + brighter[:, None, None, None] + GRAIN * bend.grain


def _parts(numbers: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return affine maps [n, 2, 3], gain and brightness [n], and shifts of knots [n, 2, KNOTS, KNOTS] of `numbers`."""
    turn, wide, high, shear, right, down, contrast, brighter = numbers[:, :8].unbind(1)
    turn, wide, high = TURN * turn, (SCALE * wide).exp(), (SCALE * high).exp()
    across = torch.stack([turn.cos() * wide, SHEAR * shear * turn.cos() - turn.sin() * high, 2 * SHIFT * right], 1)
    along = torch.stack([turn.sin() * wide, SHEAR * shear * turn.sin() + turn.cos() * high, 2 * SHIFT * down], 1)
    knots = 2 * BEND * numbers[:, 8:].reshape(-1, 2, KNOTS, KNOTS)  # the side of an image is 2 in a grid
    return torch.stack([across, along], 1), (CONTRAST * contrast).exp(), BRIGHTER * brighter, knots


def _split(split: Split, data_range: tuple[float, float], secret: bytes) -> Split:
    low, high = data_range
    count = max(1, PIXELS_AT_ONCE // split.x[0].numel())
    warped_x = torch.empty_like(split.x)
    for first, images in zip(range(0, len(split), count), split.x.split(count), strict=True):
        integer = images.dtype == torch.uint8
        unit = images.double() / LEVELS if integer else (images.double() - low) / (high - low)
        steps = (bent(unit, _drawn(unit.shape, secret, first)) * LEVELS).round().clamp(0, LEVELS)
        result = steps if integer else (low + steps / LEVELS * (high - low)).float().clamp(low, high)
        warped_x[first : first + len(images)] = result.to(images.dtype)
    return replace(split, x=warped_x)


def _drawn(shape: torch.Size, secret: bytes, first: int) -> Bend:
    """Return the warps of images of `shape` [n, C, H, W] from number `first` on, each drawn by SHAKE-256 of its number.

    torch's generators keep 32 bits of a seed, which can all be tried.
    """
    streams = b"".join(_streams(shape, secret, first))
    fields = np.frombuffer(streams, [("numbers", "<u4", (WARP_NUMBERS,)), ("grain", "u1", shape[1:])])
    numbers, grain = (torch.from_numpy(fields[name].astype(np.float64)) for name in ("numbers", "grain"))
    return Bend(numbers / (2**31 - 0.5) - 1, grain / 127.5 - 1)


def _streams(shape: torch.Size, secret: bytes, first: int) -> Iterator[bytes]:
    length = 4 * WARP_NUMBERS + math.prod(shape[1:])
    for number in range(first, first + shape[0]):
        yield hashlib.shake_256(secret + number.to_bytes(8, "big")).digest(length)
