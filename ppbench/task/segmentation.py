"""Images and their masks, in two folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ppbench.base.errors import UsageError, shown
from ppbench.task.dataset import Dataset, Split, existing
from ppbench.task.imagefolder import image_files
from ppbench.task.images import decode_image, stack_images
from ppbench.task.partition import hold_out, mask_strata

_FORM = "segmentation:FOLDER with FOLDER/images/NAME.png and FOLDER/masks/NAME.png for every NAME"


def load(argument: str, *, seed: int, root: Path) -> Dataset:
    """Images and masks of the same names: segmentation:FOLDER/{images,masks}/NAME.*, split 80 : 20.

    Names are compared without their suffix. Images are 8-bit and of one size, grey if all are; a mask has its image's
    size, black (0) and one other grey value, which becomes 1. The split is stratified by the masks' shares of ones and
    treats images as independent: it may part slices of one patient. UsageError: a file cannot be used.
    """
    folder = existing("segmentation", argument)
    images, masks = _by_name(folder / "images"), _by_name(folder / "masks")
    for name in sorted(images.keys() ^ masks.keys()):
        lacking = "masks" if name in images else "images"
        raise UsageError(f"The folder {folder / lacking} has no file for {shown(name)}; it must be {_FORM}.")
    paths = [images[name] for name in sorted(images)]
    x = stack_images([decode_image(path, str(path)) for path in paths], [str(path) for path in paths])
    y = torch.stack([_mask(masks[name], tuple(x.shape[2:])) for name in sorted(images)])
    parts = hold_out(mask_strata(y), 5, seed)
    if not all(len(index) for index in parts):
        raise UsageError(f"The folder {folder} has {len(x)} images, too few to hold some out for testing.")
    name = f"segmentation:{folder.resolve().name}"
    return masked_dataset(name, *(Split(x[index], y[index], 1) for index in parts))


def masked_dataset(name: str, train: Split, test: Split) -> Dataset:
    """Return a segmentation data set of images in [0, 1]; raises UsageError as `Dataset` does."""
    shape = tuple(train.x.shape[1:])
    return Dataset(name, train, test, 1, shape, (0.0, 1.0), "image", "segmentation")


def _by_name(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise UsageError(f"There is no folder {folder}; a segmentation data set is {_FORM}.")
    by_name: dict[str, Path] = {}
    for path in image_files(folder):
        if path.stem in by_name:
            raise UsageError(f"{folder} has {by_name[path.stem].name} and {path.name}; keep one file for each name.")
        by_name[path.stem] = path
    if not by_name:
        raise UsageError(f"The folder {folder} has no image; a segmentation data set is {_FORM}.")
    return by_name


def _mask(path: Path, size: tuple[int, ...]) -> Tensor:
    """Return the mask in `path`, float32 [1, *size] of 0 and 1."""
    pixels: NDArray[np.uint8] = decode_image(path, str(path))
    if pixels.ndim == 3 and (pixels == pixels[..., :1]).all():  # grey, stored as RGB
        pixels = pixels[..., 0]
    if pixels.shape != size:
        height, width = size
        raise UsageError(f"The mask {path} must be grey and {width}x{height} pixels (width x height), as its image.")
    values = np.unique(pixels)
    if len(values[values > 0]) > 1:
        raise UsageError(f"The mask {path} has {len(values)} values; it must be black but for one other value.")
    return torch.from_numpy((pixels > 0).astype(np.float32))[None]
