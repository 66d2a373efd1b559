"""Image files in one folder per class, and for several domains the class folders in one folder per domain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ppbench.base.errors import UsageError, count_of, listed, shown
from ppbench.task.dataset import Dataset, Split, existing, holds
from ppbench.task.image_data import Part, decode_image, image_dataset, join_images, stack_images
from ppbench.task.partition import hold_out, mask_strata

SUFFIXES = (".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
_LEFT_BEHIND = frozenset(
    ("__macosx", "thumbs.db", "desktop.ini", "@eadir", "$recycle.bin", "system volume information", "lost+found")
)


def load(argument: str, *, seed: int, root: Path) -> Dataset:
    """Image files in class folders: imagefolder:FOLDER/{train,test}/CLASS/*, or FOLDER/CLASS/* split 80 : 20.

    With "imagefolder:FOLDER?domains" every folder DOMAIN in FOLDER is laid out like that, and examples know their
    domain, numbered in the order of names; a domain need not have all classes. Classes are numbered in the order of
    their names, over all parts together. Names that start with a dot, or lack the suffix of an image, and __MACOSX are
    passed over. Images are 8-bit and of one size, grey if all are; grey 28x28 gets a black border to 32x32. A split is
    stratified, and a function of `seed`.

    Raises UsageError: no such folder, a class without images or only for testing, images that lie above or below their
    class folders, an image that cannot be read, or several image sizes.
    """
    text, _, query = argument.partition("?")
    if query not in ("", "domains"):
        raise UsageError(
            f"The imagefolder option {shown(query)} is unknown; write 'imagefolder:FOLDER?domains', or none."
        )
    folder = existing("imagefolder", text)
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file; imagefolder takes a folder with one folder of images per class.")
    sources = _folders(folder) if query else [folder]
    if not sources:
        raise UsageError(f"The folder {folder} has no folders; with ?domains it must hold one per domain.")
    layout = [_parts(source) for source in sources]
    parts = [part for source_parts in layout for part in source_parts]
    classes = _class_names(parts)
    x, y = zip(*(_read(part, classes) for part in parts), strict=True)
    images = iter(zip(join_images(x, [str(part) for part in parts]), y, strict=True))
    halves = [_halves([next(images) for _ in source_parts], seed) for source_parts in layout]
    train, domain = _joined([train for train, _ in halves])
    test, test_domain = _joined([test for _, test in halves])
    _check_trained(train[1], classes, folder)
    name = f"imagefolder:{folder.resolve().name}" + (f"?{query}" if query else "")
    summary = f"{sum(map(len, y))} images, {len(classes)} classes: {listed(classes)}{_passed_over(sources, layout)}"
    domains = (domain, test_domain) if query else None
    return image_dataset(name, train, test, len(classes), domains, (f"{name}: {summary}",))


def _check_trained(labels: Tensor, classes: Sequence[str], folder: Path) -> None:
    missing = sorted({*range(len(classes))} - {*labels.tolist()})
    if missing:
        raise UsageError(f"The class {shown(classes[missing[0]])} of {folder} has no image for training; give it some.")


def _passed_over(sources: Sequence[Path], layout: Sequence[Sequence[Path]]) -> str:
    """Return a remark on files without an image suffix and on folders beside train and test, "" if there are none."""
    homes = [home for parts in layout for part in parts for home in _folders(part)]
    inner = [path for home in homes for path in home.iterdir() if path.suffix.lower() not in SUFFIXES]
    other_files = [path for path in inner if path.is_file() and not _junk(path)]
    ignored = [
        str(path.relative_to(source.parent))
        for source, parts in zip(sources, layout, strict=True)
        for path in (_folders(source) if len(parts) == 2 else [])
        if path not in parts
    ]
    suffixes = sorted({path.suffix or path.name for path in other_files})
    remarks = [f"{count_of(len(other_files), 'file')} ({listed(suffixes, 60)})"] if other_files else []
    remarks += [listed(ignored)] if ignored else []
    return f"; passed over: {', '.join(remarks)}" if remarks else ""


def _parts(folder: Path) -> list[Path]:
    """Return [train, test] of `folder`, or [folder] if it has neither; UsageError: it has only one."""
    parts = [folder / "train", folder / "test"]
    existing_parts = [part for part in parts if part.is_dir()]
    if len(existing_parts) == 1:
        missing = next(part for part in parts if part not in existing_parts)
        raise UsageError(
            f"The folder {folder} has no {missing.name}/; it must hold train/ and test/, or class folders alone."
        )
    return existing_parts or [folder]


def _halves(parts: list[Part], seed: int) -> tuple[Part, Part]:
    if len(parts) == 2:
        return parts[0], parts[1]
    x, y = parts[0]
    train, test = hold_out(y, 5, seed)
    return (x[train], y[train]), (x[test], y[test])


def _joined(sources: list[Part]) -> tuple[Part, Tensor]:
    count = torch.tensor([len(y) for _, y in sources])
    examples = torch.cat([x for x, _ in sources]), torch.cat([y for _, y in sources])
    return examples, torch.arange(len(sources)).repeat_interleave(count)


def image_files(folder: Path) -> list[Path]:
    """Return the image files in `folder`, by `SUFFIXES`, sorted by name, without hidden files."""
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and not _junk(path))


def _junk(path: Path) -> bool:
    """Return whether a path is hidden, or left behind by an operating system or archiver."""
    return path.name.startswith(".") or path.name.lower() in _LEFT_BEHIND


def _folders(parent: Path) -> list[Path]:
    paths = sorted(path for path in parent.iterdir() if not _junk(path))
    for path in paths:
        if path.is_symlink() and not path.exists():
            raise UsageError(f"The link {path} leads nowhere; mend or remove it.")
    return [path for path in paths if path.is_dir()]


def _class_names(parents: list[Path]) -> list[str]:
    for parent in parents:
        if not _folders(parent):
            raise UsageError(f"The folder {parent} has no class folders; it must hold one folder of images per class.")
        if misplaced := image_files(parent):
            raise UsageError(f"The image {misplaced[0]} lies beside class folders; put it into that of its class.")
    return sorted({path.name for parent in parents for path in _folders(parent)})


def _read(parent: Path, classes: list[str]) -> Part:
    paths, labels = _labelled_files(parent, classes)
    arrays = [decode_image(path, str(path)) for path in paths]
    return stack_images(arrays, [str(path) for path in paths]), torch.tensor(labels)


def read_class_folders(folders: Sequence[Path]) -> tuple[list[Part], list[list[Path]], list[str]]:
    """Return images and labels of each of `folders`, of FOLDER/CLASS/*, their files, and the names of the classes.

    Classes are numbered in the order of their names, over all folders together. Images have their own size. Raises
    UsageError as `load`.
    """
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder} is no folder; give one with one folder of images per class.")
    classes = _class_names(list(folders))
    files = [_labelled_files(folder, classes)[0] for folder in folders]
    x, y = zip(*(_read(folder, classes) for folder in folders), strict=True)
    return list(zip(join_images(x, [str(folder) for folder in folders]), y, strict=True)), files, classes


def _labelled_files(parent: Path, classes: list[str]) -> tuple[list[Path], list[int]]:
    """Return the image files in the class folders of `parent`, and the number of each one's class."""
    paths: list[Path] = []
    labels: list[int] = []
    for folder in _folders(parent):
        images, inner = image_files(folder), [path for path in _folders(folder) if image_files(path)]
        if inner:
            advice = (
                "move them up"
                if images
                else f"name the folder that holds one folder per class, as 'imagefolder:{folder}'"
            )
            raise UsageError(f"The class folder {folder} has images in its folder {inner[0].name}; {advice}.")
        if not images:
            raise UsageError(f"The class folder {folder} has no image ({', '.join(SUFFIXES)}); fill or remove it.")
        paths += images
        labels += [classes.index(folder.name)] * len(images)
    return paths, labels


# -- Images and their masks, in two folders --

_FORM = "segmentation:FOLDER with FOLDER/images/NAME.png and FOLDER/masks/NAME.png for every NAME"


@holds("mask")
def load_masks(argument: str, *, seed: int, root: Path) -> Dataset:
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
    return Dataset(name, train, test, 1, shape, (0.0, 1.0), task="segmentation")


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
