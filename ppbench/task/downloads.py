"""The standard image sets by torchvision.datasets: downloaded on first use, then read from their folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ppbench.base.errors import UsageError, because
from ppbench.base.import_guard import torchvision
from ppbench.task.dataset import Dataset, no_argument
from ppbench.task.image_data import image_dataset

_IDX = tuple(f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))


@dataclass(frozen=True)
class DownloadedSet:
    """A data set and its class (`factory`) in torchvision.datasets.

    folder, files: the files that torchvision reads, and their folder below the root. axes: of its array.
    """

    name: str
    factory: str
    folder: str
    files: tuple[str, ...]
    classes: int
    axes: Literal["NHW", "NHWC", "NCHW"]


def mnist(argument: str, *, seed: int, root: Path) -> Dataset:
    """Handwritten digits, 28x28 grey with a black border to 32x32, 10 classes, 60,000 + 10,000 images."""
    return _load(DownloadedSet("mnist", "MNIST", "MNIST/raw", _IDX, 10, "NHW"), argument, root)


def fashion_mnist(argument: str, *, seed: int, root: Path) -> Dataset:
    """Pieces of clothing, 28x28 grey with a black border to 32x32, 10 classes, 60,000 + 10,000 images."""
    return _load(DownloadedSet("fashion_mnist", "FashionMNIST", "FashionMNIST/raw", _IDX, 10, "NHW"), argument, root)


def cifar10(argument: str, *, seed: int, root: Path) -> Dataset:
    """Photographs of objects, 32x32 RGB, 10 classes, 50,000 + 10,000 images."""
    return _load(DownloadedSet("cifar10", "CIFAR10", ".", ("cifar-10-python.tar.gz",), 10, "NHWC"), argument, root)


def cifar100(argument: str, *, seed: int, root: Path) -> Dataset:
    """Photographs of objects, 32x32 RGB, 100 (fine) classes, 50,000 + 10,000 images."""
    return _load(DownloadedSet("cifar100", "CIFAR100", ".", ("cifar-100-python.tar.gz",), 100, "NHWC"), argument, root)


def svhn(argument: str, *, seed: int, root: Path) -> Dataset:
    """House numbers cropped to one digit, 32x32 RGB, 10 classes, 73,257 + 26,032 images."""
    return _load(DownloadedSet("svhn", "SVHN", ".", ("train_32x32.mat", "test_32x32.mat"), 10, "NCHW"), argument, root)


def _load(source: DownloadedSet, argument: str, root: Path) -> Dataset:
    no_argument(source.name, argument)
    try:
        train, test = _part(source, root, train=True), _part(source, root, train=False)
    except Exception as cause:  # a damaged file makes its reader raise anything
        reason = f"{type(cause).__name__}: {because(cause, 300)}"
        raise UsageError(
            f"{source.name} is neither readable in {(root / source.folder).absolute()} nor could it be downloaded "
            f"({reason}); put {', '.join(source.files)} there (deleting damaged files), or name the folder that has "
            "them in PPBENCH_DATA."
        ) from cause
    return image_dataset(source.name, train, test, source.classes)


def _part(source: DownloadedSet, root: Path, *, train: bool) -> tuple[Tensor, Tensor]:
    factory = getattr(torchvision().datasets, source.factory)
    part: dict[str, Any] = {"train": train}
    if source.factory == "SVHN":
        part = {"split": "train" if train else "test"}
    dataset = factory(str(root), download=True, **part)
    x = torch.as_tensor(dataset.data)
    if source.axes == "NHW":
        x = x[:, None]
    elif source.axes == "NHWC":
        x = x.permute(0, 3, 1, 2)
    labels = dataset.labels if source.factory == "SVHN" else dataset.targets
    return x.contiguous(), torch.as_tensor(labels, dtype=torch.int64)
