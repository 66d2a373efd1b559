"""Images as files in one folder a class."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ppbench.errors import UsageError
from ppbench.task.dataset import Dataset, existing
from ppbench.task.images import decode, image_dataset, join, stack
from ppbench.task.partition import hold_out

_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


def load(argument: str, *, seed: int, root: Path) -> Dataset:
    """Image files in class folders: imagefolder:FOLDER/{train,test}/CLASS/*, or FOLDER/CLASS/* split 80 : 20.

    Classes are numbered in the order of their names, over train and test together. Files with the suffix of an image
    are read, in the order of their names; others, and names that start with a dot, are passed over. Images are 8-bit
    and of one size, grey if all are; grey 28x28 gets a black border to 32x32, as for `mnist`. The split of a folder
    without train and test is stratified and a function of `seed`.

    Raises:
        UsageError: no such folder, a class without images, an image that cannot be read, or several image sizes.
    """
    folder = existing("imagefolder", argument)
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file; imagefolder takes a folder with one folder of images a class.")
    name = f"imagefolder:{folder.resolve().name}"
    parts = [folder / "train", folder / "test"]
    if not any(part.is_dir() for part in parts):
        classes = _class_names([folder])
        x, y = _read(folder, classes)
        train, test = hold_out(y, 5, seed)
        return image_dataset(name, (x[train], y[train]), (x[test], y[test]), len(classes))
    for part in parts:
        if not part.is_dir():
            raise UsageError(
                f"The folder {folder} has no {part.name}/; it must hold train/ and test/, or class folders alone."
            )
    classes = _class_names(parts)
    (x, y), (x_test, y_test) = (_read(part, classes) for part in parts)
    x, x_test = join([x, x_test], [str(part) for part in parts])
    return image_dataset(name, (x, y), (x_test, y_test), len(classes))


def _folders(parent: Path) -> list[Path]:
    return sorted(path for path in parent.iterdir() if path.is_dir() and not path.name.startswith("."))


def _class_names(parents: list[Path]) -> list[str]:
    """Return the sorted names of all class folders in `parents`; raises UsageError if one parent has none."""
    for parent in parents:
        if not _folders(parent):
            raise UsageError(f"The folder {parent} has no class folders; it must hold one folder of images a class.")
    return sorted({path.name for parent in parents for path in _folders(parent)})


def _read(parent: Path, classes: list[str]) -> tuple[Tensor, Tensor]:
    """Return (x uint8 [N, C, H, W], y int64 [N]) of the class folders in `parent`."""
    files: list[Path] = []
    labels: list[int] = []
    for folder in _folders(parent):
        found = sorted(
            path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES and not path.name.startswith(".")
        )
        if not found:
            raise UsageError(f"The class folder {folder} has no image ({', '.join(_SUFFIXES)}); fill or remove it.")
        files += found
        labels += [classes.index(folder.name)] * len(found)
    arrays = [decode(path, str(path)) for path in files]
    return stack(arrays, [str(path) for path in files]), torch.tensor(labels)
