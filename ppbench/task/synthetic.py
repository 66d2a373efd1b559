"""Data sets that need no download: digits of scikit-learn, and drawn shapes with masks."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ppbench.base.seeds import Seeds
from ppbench.task.dataset import Dataset, Split, no_argument
from ppbench.task.imagefolder import masked_dataset
from ppbench.task.partition import hold_out, mask_strata

# -- Data sets that are part of a required library: no download, no file --


def digits(argument: str, *, seed: int, root: Path) -> Dataset:
    """Handwritten digits, 8x8 grey, 10 classes, 1437 + 360 images; comes with scikit-learn, no download.

    The optical digits of UCI (Alpaydin and Kaynak 1998); pixels are counts 0..16, given as count / 16. The stratified
    split 80 : 20 is fixed and does not depend on `seed`.
    """
    no_argument("digits", argument)
    rows = torch.from_numpy(_digit_rows())
    x, y = rows[:, :-1].float().reshape(-1, 1, 8, 8) / 16, rows[:, -1].long()
    train, test = (Split(x[index], y[index], 10) for index in hold_out(y, 5, seed=0))
    return Dataset("digits", train, test, classes=10, shape=(1, 8, 8), data_range=(0.0, 1.0))


def _digit_rows() -> NDArray[np.float64]:
    """Return 64 counts and the class of each image [1797, 65], as `sklearn.datasets.load_digits` reads them.

    The file is looked for first: importing scikit-learn takes half a second in every process.
    """
    package = find_spec("sklearn")
    assert package is not None and package.origin is not None  # a requirement
    file = Path(package.origin).parent / "datasets/data/digits.csv.gz"
    if not file.exists():
        from sklearn.datasets import load_digits

        return np.column_stack(load_digits(return_X_y=True))
    return np.loadtxt(file, delimiter=",")


# -- Synthetic images with masks: discs, rectangles and triangles on a textured background --

COUNT, SIDE = 240, 32
GRAIN = 8
"""Pixels between the knots of the background's texture."""
OBJECT_CONTRAST = (0.25, 0.5)
"""Least and largest difference of an object's brightness from the middle of the range, in units of the range."""
NOISE = 0.06
"""Standard deviation of the noise on every pixel and channel, in units of the range."""

_Floats = NDArray[np.float64]
_Bools = NDArray[np.bool_]


def shapes(argument: str, *, seed: int, root: Path) -> Dataset:
    """Synthetic scenes with masks, 32x32 RGB, 192 + 48 images: one to three discs, rectangles or triangles a scene.

    The ground is smooth random texture in the middle of the range, objects are brighter or darker than it, of random
    color, and noise lies over all. Scenes and the split 80 : 20, stratified by the masks' shares of ones, are a
    function of `seed`. Raises UsageError: an argument was given.
    """
    no_argument("shapes", argument)
    generator = np.random.default_rng(Seeds(seed).seed("shapes"))
    scenes = [_scene(generator) for _ in range(COUNT)]
    x = torch.from_numpy(np.stack([image for image, _ in scenes]))
    y = torch.from_numpy(np.stack([mask for _, mask in scenes])[:, None].astype(np.float32))
    parts = hold_out(mask_strata(y), 5, seed)
    return masked_dataset("shapes", *(Split(x[index], y[index], 1) for index in parts))


def _scene(generator: np.random.Generator) -> tuple[NDArray[np.uint8], _Bools]:
    image = 0.35 + 0.3 * np.stack([_texture(generator) for _ in range(3)])
    mask = np.zeros((SIDE, SIDE), dtype=bool)
    for _ in range(generator.integers(1, 4)):
        inside = _object(generator)
        side = generator.choice((-1.0, 1.0))
        color = 0.5 + side * generator.uniform(*OBJECT_CONTRAST, size=3)
        image[:, inside] = color[:, None]
        mask |= inside
    image += generator.normal(0.0, NOISE, image.shape)
    return np.rint(255 * image.clip(0, 1)).astype(np.uint8), mask


def _texture(generator: np.random.Generator) -> _Floats:
    knots = generator.uniform(size=(SIDE // GRAIN + 1,) * 2)
    place = np.arange(SIDE) / GRAIN
    base = place.astype(int)
    part = place - base
    rows = knots[base] * (1 - part)[:, None] + knots[base + 1] * part[:, None]
    return np.asarray(rows[:, base] * (1 - part) + rows[:, base + 1] * part)


def _object(generator: np.random.Generator) -> _Bools:
    """Return the pixels [SIDE, SIDE] of a disc, a rectangle or a triangle within the image."""
    down, right = np.mgrid[:SIDE, :SIDE].astype(np.float64)
    radius = generator.uniform(4, 9)
    center = generator.uniform(radius, SIDE - 1 - radius, size=2)
    y, x = down - center[0], right - center[1]
    kind = generator.integers(3)
    if kind == 0:
        return np.asarray(y**2 + x**2 <= radius**2)
    if kind == 1:
        half = radius * generator.uniform(0.5, 1.0, size=2)
        return np.asarray((abs(y) <= half[0]) & (abs(x) <= half[1]))
    turns = generator.uniform(0, 2 * np.pi) + np.arange(3) * 2 * np.pi / 3
    return np.asarray(np.all([y * np.sin(a) + x * np.cos(a) <= radius / 2 for a in turns], axis=0))
