"""From encoded images to a data set of uint8 tensors: what parquet, imagefolder and the downloads share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from ppbench.base.errors import UsageError
from ppbench.task.dataset import Dataset, Split

# Named, because Pillow would otherwise also try formats that start other programs (EPS).
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
_GREY = ("1", "L")
_COLOR = ("RGB", "RGBA", "RGBX", "LA", "P", "PA", "CMYK", "YCbCr")


def decode(source: IO[bytes] | Path, where: str) -> NDArray[np.uint8]:
    """Return an image as uint8: [H, W] if it is stored as grey, else [H, W, 3] (transparency is dropped).

    source: one of `FORMATS`; of an animation, the first frame. where: how an error names it, "row 3 of train.parquet".
    Raises UsageError: it is no such image, or has more than 8 bits a channel.
    """
    from PIL import Image

    try:
        with Image.open(source, formats=FORMATS) as image:
            if image.mode not in _GREY + _COLOR:
                raise UsageError(
                    f"The image in {where} has pixels of type {image.mode!r}; convert it to 8-bit grey or RGB."
                )
            plain = image if image.mode in ("L", "RGB") else image.convert("L" if image.mode in _GREY else "RGB")
            return np.array(plain)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as cause:
        raise UsageError(f"The image in {where} cannot be decoded ({cause}); repair or remove it.") from cause


def stack(arrays: Sequence[NDArray[np.uint8]], names: Sequence[str]) -> Tensor:
    """Return images as `decode` returns them as one uint8 tensor [N, C, H, W]: C = 1 if every one is grey, else 3.

    Raises UsageError: two images differ in size, by their `names`.
    """
    for array, name in zip(arrays, names, strict=True):
        if array.shape[:2] != arrays[0].shape[:2]:
            raise UsageError(
                f"The image in {name} is {_size(array)} pixels but that in {names[0]} is {_size(arrays[0])} (width x "
                "height); resize all images to one size."
            )
    if all(array.ndim == 2 for array in arrays):
        return torch.from_numpy(np.stack(arrays))[:, None]
    colored = [np.repeat(array[..., None], 3, axis=2) if array.ndim == 2 else array for array in arrays]
    return torch.from_numpy(np.stack(colored)).permute(0, 3, 1, 2).contiguous()


def join(parts: Sequence[Tensor], names: Sequence[str]) -> list[Tensor]:
    """Return image tensors [N, C, H, W] with one number of channels, grey made RGB where any of them is RGB.

    Raises UsageError: two of them differ in image size.
    """
    for part, name in zip(parts, names, strict=True):
        if part.shape[2:] != parts[0].shape[2:]:
            raise UsageError(
                f"The images in {name} are {part.shape[3]}x{part.shape[2]} pixels but those in {names[0]} are "
                f"{parts[0].shape[3]}x{parts[0].shape[2]} (width x height); resize all images to one size."
            )
    channels = max(part.shape[1] for part in parts)
    return [part if part.shape[1] == channels else part.expand(-1, channels, -1, -1).contiguous() for part in parts]


def image_dataset(
    name: str,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    classes: int,
    domains: tuple[Tensor, Tensor] | None = None,
) -> Dataset:
    """Return an image data set with range [0, 1]; raises UsageError as `Dataset` does.

    Grey images of 28x28 (MNIST and its kin) get a black border of 2 pixels: the SPN paper's networks take 32x32.

    Args:
        train, test: (x uint8 [N, C, H, W], y int64 [N]).
        domains: of the training and of the test examples, int64 [N] each, where they have any.
    """
    x, x_test = (pad(x, (2, 2, 2, 2)) if x.shape[1:] == (1, 28, 28) else x for x in (train[0], test[0]))
    known = domains or (None, None)
    splits = Split(x, train[1], classes, known[0]), Split(x_test, test[1], classes, known[1])
    return Dataset(name, *splits, classes=classes, shape=tuple(x.shape[1:]), data_range=(0.0, 1.0), kind="image")


def _size(array: NDArray[Any]) -> str:
    return f"{array.shape[1]}x{array.shape[0]}"
