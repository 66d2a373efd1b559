"""Decoding of images, and data sets of uint8 tensors: shared by parquet, imagefolder and the downloads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from ppbench.base.errors import UsageError, because
from ppbench.task.dataset import Dataset, Split

if TYPE_CHECKING:
    from PIL import Image

Part = tuple[Tensor, Tensor]
"""Inputs and int64 labels [N] of a split."""
# Named, because Pillow would otherwise also try formats that start other programs (EPS).
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
LARGEST_IMAGE = 2**24
"""Most pixels of an image; one that claims more is damaged, or made to exhaust memory."""
LABEL_COLUMNS = ("label", "labels", "fine_label", "target", "class", "y")
"""Names of a column of labels; the first existing one counts."""
_MOVING = ("PNG", "GIF", "WEBP", "TIFF")
_ORIENTATION = 0x0112
_GREY = ("1", "L")
_COLOR = ("RGB", "RGBA", "RGBX", "LA", "P", "PA", "CMYK", "YCbCr")


def decode_image(source: IO[bytes] | Path, where: str) -> NDArray[np.uint8]:
    """Return the `pixels` of an encoded image. where: its name in errors, "row 3 of train.parquet".

    UsageError: it has none of `FORMATS`, is damaged, or `pixels` refuses it.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(source, formats=FORMATS) as image:
            return pixels(image, where)
    except UsageError:
        raise
    except UnidentifiedImageError as cause:
        formats = ", ".join(FORMATS)
        raise UsageError(
            f"The image in {where} cannot be decoded: it is none of {formats}; repair or remove it."
        ) from cause
    except Exception as cause:  # a damaged file makes its decoder raise anything
        raise UsageError(f"The image in {where} cannot be decoded ({because(cause)}); repair or remove it.") from cause


def pixels(image: Image.Image, where: str) -> NDArray[np.uint8]:
    """Return an opened image as uint8: [H, W] if it is stored as grey, else [H, W, 3], rotated by its EXIF.

    Transparency is dropped. UsageError: over 8 bits per channel, several frames, more than `LARGEST_IMAGE` pixels, or
    all content is in the transparency. Exceptions of the decoder for a damaged file pass.
    """
    from PIL import ImageOps

    if image.width * image.height > LARGEST_IMAGE:
        size = f"{image.width}x{image.height}"
        raise UsageError(f"The image in {where} claims to be {size}; images may have up to {LARGEST_IMAGE:,} pixels.")
    if image.mode not in _GREY + _COLOR:
        raise UsageError(f"The image in {where} has pixels of type {image.mode!r}; convert it to 8-bit grey or RGB.")
    if _deep(image):
        raise UsageError(f"The image in {where} has 16 bits a channel; convert it to 8-bit grey or RGB.")
    if image.format in _MOVING and getattr(image, "is_animated", False):
        raise UsageError(f"The image in {where} has several frames; save the one that counts.")
    if image.getexif().get(_ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    plain = image if image.mode in ("L", "RGB") else image.convert("L" if image.mode in _GREY else "RGB")
    colors = np.array(plain)
    if image.has_transparency_data and (colors == colors[:1, :1]).all():
        opaque = np.array(image.convert("RGBA"))[..., 3]
        if opaque.min() != opaque.max():
            raise UsageError(
                f"The image in {where} is of one color, and shows something by its transparency alone; save it on a "
                "background."
            )
    return colors


def _deep(image: Image.Image) -> bool:
    """Return whether a file has more than 8 bits per channel, of which Pillow would keep the upper ones."""
    tiles = getattr(image, "tile", ())
    if image.format == "PPM":
        return any(isinstance(tile[3], tuple) and tile[3][-1] > 255 for tile in tiles)
    return any(";16" in str(tile[3]) for tile in tiles)


def stack_images(arrays: Sequence[NDArray[np.uint8]], names: Sequence[str]) -> Tensor:
    """Return images of `decode_image` as one uint8 tensor [N, C, H, W]; UsageError as of `join_images`."""
    images = [torch.from_numpy(a)[None] if a.ndim == 2 else torch.from_numpy(a).permute(2, 0, 1) for a in arrays]
    return torch.cat(join_images([image[None] for image in images], names))


def join_images(parts: Sequence[Tensor], names: Sequence[str]) -> list[Tensor]:
    """Return images [N, C, H, W] with equal numbers of channels, grey made RGB if needed; UsageError: several sizes."""
    for part, name in zip(parts, names, strict=True):
        if part.shape[2:] != parts[0].shape[2:]:
            one, other = (f"{tensor.shape[3]}x{tensor.shape[2]} pixels" for tensor in (part, parts[0]))
            raise UsageError(
                f"The image in {name} is {one} but that in {names[0]} is {other} (width x height); "
                "resize all images to one size."
            )
    channels = max(part.shape[1] for part in parts)
    return [part if part.shape[1] == channels else part.expand(-1, channels, -1, -1).contiguous() for part in parts]


def image_dataset(
    name: str,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    classes: int,
    domains: tuple[Tensor, Tensor] | None = None,
    notes: tuple[str, ...] = (),
) -> Dataset:
    """Return an image data set with range [0, 1] of parts (x uint8 [N, C, H, W], y int64 [N]); UsageError of `Dataset`.

    Grey images of 28x28 (MNIST and similar sets) get a black border of 2 pixels: the SPN paper's networks take 32x32.
    domains: of the training and of the test examples, int64 [N] each, if there are any.
    """
    x, x_test = (pad(x, (2, 2, 2, 2)) if x.shape[1:] == (1, 28, 28) else x for x in (train[0], test[0]))
    known_domains = domains or (None, None)
    splits = Split(x, train[1], classes, known_domains[0]), Split(x_test, test[1], classes, known_domains[1])
    shape = tuple(x.shape[1:])
    return Dataset(name, *splits, classes=classes, shape=shape, data_range=(0.0, 1.0), notes=notes)
