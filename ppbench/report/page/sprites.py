"""Reconstructed images as sprites: one PNG with one column per victim, originals above reconstructions."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ppbench.records.schema import Record
from ppbench.records.store import CellImages

SPRITE_COLUMNS = 10
"""Images in a row: the first victims, not the best ones."""
SPRITE_BUDGET = 6_000_000
"""Largest number of bytes of sprites on a page; further images are only beside the records."""
ImagesOf = Callable[[Record], CellImages | None]
"""Returns a record's reconstructions, as `Store.images` does."""
_TILE, _GAP = 32, 2
ImageArray = NDArray[np.float32]


def data_uri(png: bytes) -> str:
    """Return a PNG as a data URI."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


class Album:
    """The images of a page, in order up to `budget` bytes of PNG. refused: number of sprites left out."""

    def __init__(self, images: ImagesOf, budget: int = SPRITE_BUDGET) -> None:
        self._images, self.left, self.refused = images, budget, 0

    def of(self, record: Record | None) -> CellImages | None:
        """Return a record's images; None where it has none (tables, labels) or no room is left."""
        if record is None:
            return None
        if self.left <= 0:
            self.refused += 1
            return None
        images = self._images(record)
        return None if images is None or images.guess.ndim != 4 or not len(images.guess) else images

    def sprite(self, rows: Sequence[ImageArray], tile: int = _TILE) -> str | None:
        """Return a data URI of rows of images [n, C, H, W], None without room; tile: pixels per image, at least."""
        png = sprite(rows, tile)
        if len(png) > self.left:
            self.refused, self.left = self.refused + 1, 0
            return None
        self.left -= len(png)
        return data_uri(png)

    def strip(self, record: Record | None) -> str | None:
        """Return a record's originals above its reconstructions as a data URI, or None."""
        images = self.of(record)
        return None if images is None else self.sprite((images.truth, images.guess))


def sprite(rows: Sequence[ImageArray], tile: int = _TILE) -> bytes:
    """Return a PNG with one row of up to SPRITE_COLUMNS images for each of `rows` [n, C, H, W], and transparent gaps.

    tile: size of an image to which pixels are enlarged, about.
    """
    scale = max(1, round(tile / max(rows[0].shape[2:])))
    height, width = rows[0].shape[2] * scale, rows[0].shape[3] * scale
    count = min(max(map(len, rows)), SPRITE_COLUMNS)
    canvas = np.zeros((len(rows) * (height + _GAP) - _GAP, count * (width + _GAP) - _GAP, 4), dtype=np.uint8)
    for row, images in enumerate(rows):
        top = row * (height + _GAP)
        for index in range(min(count, len(images))):
            start = index * (width + _GAP)
            canvas[top : top + height, start : start + width] = _tile(images[index], scale)
    buffer = io.BytesIO()
    Image.fromarray(canvas, "RGBA").save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def _tile(image: ImageArray, scale: int) -> NDArray[np.uint8]:
    """Return one image [C, H, W] as RGBA [H * scale, W * scale, 4]; a checkerboard if it is not finite."""
    if not np.isfinite(image).all():
        rows, columns = np.indices(image.shape[1:])
        grey = np.where((rows + columns) % 2, 110, 150)[..., None].repeat(3, axis=2)
    else:
        channels = image if len(image) == 3 else image.mean(axis=0, keepdims=True).repeat(3, axis=0)
        grey = np.rint(channels.clip(0, 1) * 255).transpose(1, 2, 0)
    opaque = np.concatenate([grey, np.full((*grey.shape[:2], 1), 255)], axis=2).astype(np.uint8)
    return np.asarray(opaque.repeat(scale, axis=0).repeat(scale, axis=1))
