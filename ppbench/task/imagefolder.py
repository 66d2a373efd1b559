"""Images as files in one folder a class, and the classes in one folder a domain where they come from several."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ppbench.base.errors import UsageError, shown
from ppbench.task.dataset import Dataset, existing
from ppbench.task.images import decode, image_dataset, join, stack
from ppbench.task.partition import hold_out

Part = tuple[Tensor, Tensor]  # x uint8 [N, C, H, W], y int64 [N]
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


def load(argument: str, *, seed: int, root: Path) -> Dataset:
    """Image files in class folders: imagefolder:FOLDER/{train,test}/CLASS/*, or FOLDER/CLASS/* split 80 : 20.

    With "imagefolder:FOLDER?domains" every folder DOMAIN in FOLDER is laid out like that, and examples know their
    domain, numbered in the order of names; a domain need not have all classes. Classes are numbered in the order of
    their names, over all parts together. Names that start with a dot, or lack the suffix of an image, are passed over.
    Images are 8-bit and of one size, grey if all are; grey 28x28 gets a black border to 32x32. A split is stratified,
    and a function of `seed`.

    Raises UsageError: no such folder, a class without images, an image that cannot be read, or several image sizes.
    """
    text, _, query = argument.partition("?")
    if query not in ("", "domains"):
        raise UsageError(
            f"The imagefolder option {shown(query)} is unknown; write 'imagefolder:FOLDER?domains', or none."
        )
    folder = existing("imagefolder", text)
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file; imagefolder takes a folder with one folder of images a class.")
    sources = _folders(folder) if query else [folder]
    if not sources:
        raise UsageError(f"The folder {folder} has no folders; with ?domains it must hold one a domain.")
    layout = [_parts(source) for source in sources]
    parts = [part for own in layout for part in own]
    classes = _class_names(parts)
    x, y = zip(*(_read(part, classes) for part in parts), strict=True)
    found = iter(zip(join(x, [str(part) for part in parts]), y, strict=True))
    halves = [_halves([next(found) for _ in own], seed) for own in layout]
    train, domain = _joined([train for train, _ in halves])
    test, test_domain = _joined([test for _, test in halves])
    name = f"imagefolder:{folder.resolve().name}"
    if not query:
        return image_dataset(name, train, test, len(classes))
    return image_dataset(f"{name}?{query}", train, test, len(classes), (domain, test_domain))


def _parts(folder: Path) -> list[Path]:
    """Return [train, test] of `folder`, or `folder` itself if it has neither; raises UsageError if it has one."""
    parts = [folder / "train", folder / "test"]
    there = [part for part in parts if part.is_dir()]
    if len(there) == 1:
        missing = next(part for part in parts if part not in there)
        raise UsageError(
            f"The folder {folder} has no {missing.name}/; it must hold train/ and test/, or class folders alone."
        )
    return there or [folder]


def _halves(read: list[Part], seed: int) -> tuple[Part, Part]:
    if len(read) == 2:
        return read[0], read[1]
    x, y = read[0]
    train, test = hold_out(y, 5, seed)
    return (x[train], y[train]), (x[test], y[test])


def _joined(sources: list[Part]) -> tuple[Part, Tensor]:
    count = torch.tensor([len(y) for _, y in sources])
    whole = torch.cat([x for x, _ in sources]), torch.cat([y for _, y in sources])
    return whole, torch.arange(len(sources)).repeat_interleave(count)


def files(folder: Path) -> list[Path]:
    """Return the image files in `folder`, by `SUFFIXES`, in the order of their names; hidden ones are left out."""
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and path.name[0] != ".")


def _folders(parent: Path) -> list[Path]:
    return sorted(path for path in parent.iterdir() if path.is_dir() and not path.name.startswith("."))


def _class_names(parents: list[Path]) -> list[str]:
    for parent in parents:
        if not _folders(parent):
            raise UsageError(f"The folder {parent} has no class folders; it must hold one folder of images a class.")
    return sorted({path.name for parent in parents for path in _folders(parent)})


def _read(parent: Path, classes: list[str]) -> Part:
    paths: list[Path] = []
    labels: list[int] = []
    for folder in _folders(parent):
        found = files(folder)
        if not found:
            raise UsageError(f"The class folder {folder} has no image ({', '.join(SUFFIXES)}); fill or remove it.")
        paths += found
        labels += [classes.index(folder.name)] * len(found)
    arrays = [decode(path, str(path)) for path in paths]
    return stack(arrays, [str(path) for path in paths]), torch.tensor(labels)
