"""Data sets that need no download: digits of scikit-learn, faces and photographs of scikit-image, drawn shapes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import avg_pool2d

from ppbench.base.errors import UsageError
from ppbench.base.seeds import Seeds
from ppbench.task.dataset import Dataset, Split, holds, no_argument
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
    return _held_out("digits", x, y)


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


def faces(argument: str, *, seed: int, root: Path) -> Dataset:
    """Faces and other pictures, 25x25 grey, 2 classes, 160 + 40 images; come with scikit-image, no download.

    100 faces of Labeled Faces in the Wild (Huang et al. 2007) and 100 crops of its backgrounds, as scikit-image ships
    them (`skimage.data.lfw_subset`). The stratified split 80 : 20 is fixed and does not depend on `seed`.
    """
    no_argument("faces", argument)
    x = torch.from_numpy(np.load(_of_scikit_image("lfw_subset.npy"), allow_pickle=False)).float()[:, None]
    y = (torch.arange(len(x)) >= len(x) // 2).long()  # faces come first
    return _held_out("faces", x, y)


PICTURES = ("astronaut.png", "chelsea.png", "coffee.png", "ihc.png", "hubble_deep_field.jpg")
"""Pictures of scikit-image without copyright: NASA's astronaut and deep field, a cat and a cup (both CC0), a tissue."""
CROP, CROPS = 32, 64
"""Pixels of a crop's side, at half the picture's resolution, and most crops of a picture."""


def photos(argument: str, *, seed: int, root: Path) -> Dataset:
    """Crops of five photographs, 32x32 RGB, 5 classes, 219 + 55 images; come with scikit-image, no download.

    An astronaut, a cat, a cup of coffee, a tissue and galaxies; the class is the photograph. Crops do not overlap. The
    stratified split 80 : 20 is fixed and does not depend on `seed`.
    """
    no_argument("photos", argument)
    crops = [_crops(_of_scikit_image(name)) for name in PICTURES]
    labels = torch.repeat_interleave(torch.arange(len(crops)), torch.tensor([len(some) for some in crops]))
    return _held_out("photos", torch.cat(crops), labels)


def _of_scikit_image(name: str) -> Path:
    package = find_spec("skimage")
    assert package is not None and package.origin is not None  # a requirement
    path = Path(package.origin).parent / "data" / name
    if not path.is_file():
        raise UsageError(f"The installed scikit-image lacks {name}; pip install --force-reinstall scikit-image.")
    return path


def _crops(path: Path) -> Tensor:
    """Return the first crops [n, 3, 32, 32] of a picture, row by row, halved by the mean of four pixels."""
    from PIL import Image

    with Image.open(path) as picture:
        pixels = torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1).float() / 255
    tiles = avg_pool2d(pixels, 2).unfold(1, CROP, CROP).unfold(2, CROP, CROP)
    return tiles.flatten(1, 2).transpose(0, 1)[:CROPS].contiguous()


def _held_out(name: str, x: Tensor, y: Tensor) -> Dataset:
    classes, shape = int(y.max()) + 1, (x.shape[1], x.shape[2], x.shape[3])
    train, test = (Split(x[index], y[index], classes) for index in hold_out(y, 5, seed=0))
    return Dataset(name, train, test, classes=classes, shape=shape, data_range=(0.0, 1.0))


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


@holds("mask")
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
