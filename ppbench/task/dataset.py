"""Data sets: a training and a test split of tensors, with their metadata."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.base.errors import UsageError, because, shown
from ppbench.base.tree import update_digest
from ppbench.base.vocabulary import PADDING, Vocabulary
from ppbench.federation.plan import Columns, Data
from ppbench.metrics.modality import Modality, modality_from
from ppbench.task.partition import mask_strata, strata

TaskKind = Literal["classification", "regression", "segmentation", "next_token"]
MAX_CLASSES = 65_536
Loader = TypeVar("Loader", bound=Callable[..., Any])


@dataclass(frozen=True, eq=False)
class Split:
    """The training or the test part of a data set.

    Attributes:
        x: [N, *shape]: uint8 (images, 0 to 255) or float32 (already in the data set's range).
        y: int64 [N], classes from 0; of a regression float32 [N, 1]; of a segmentation float32 [N, 1, H, W] of 0 and 1;
            of texts that are their own targets `x`.
        classes: number of classes C of the whole data set, the width of one-hot labels; 1 if targets are no classes; of
            texts that are their own targets the number of tokens.
        domain: int64 [N], 0 to D - 1, the origin of each example, or None if there is only one.
    """

    x: Tensor
    y: Tensor
    classes: int
    domain: Tensor | None = None

    def __len__(self) -> int:
        return len(self.y)

    @property
    def strata(self) -> Tensor:
        """The stratum of each example, int64 [N]: its class, or by `partition.strata` or `mask_strata`."""
        if not self.y.is_floating_point():
            return self.y
        return strata(self.y) if self.y.dim() == 2 else mask_strata(self.y)

    def take(self, index: Tensor) -> Data:
        """Return a copy of the examples `index`, int64 [n], in storage of its own, as the data of a party.

        x float32 [n, *shape], uint8 images divided by 255; y float32 [n, C], one-hot, or as `y` is.
        """
        x, y = self.x.index_select(0, index), self.y.index_select(0, index)
        if x.dtype == torch.uint8:
            x = x.float().div_(255)
        return Data(x, y if y.is_floating_point() else one_hot(y, self.classes).float())


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test examples of one task, checked on construction (UsageError).

    Attributes:
        name: its name in records, without a path of the machine.
        classes: number of classes C; 1 of a regression, the width of its targets, and of a segmentation, its maps; the
            number of tokens of texts that are their own targets.
        shape: shape of one example: (channels, height, width) of an image, (features,) of a table row.
        data_range: smallest and largest value of an input: (0, 1) for images, the extremes of the training part for
            tables (test rows may lie outside).
        kind: name of the modality of its inputs, see `metrics.modality`; "": images, masks or table rows, by shape and
            task.
        columns: the encoding of table rows; None if unknown.
        vocabulary: of texts; None of other inputs.
        notes: lines for the user on how it was read: the columns and classes, and what was ignored.
        made_of: digest of the data set that it was made of by `predicting_tokens`, which is its own; else "".
    """

    name: str
    train: Split
    test: Split
    classes: int
    shape: tuple[int, ...]
    data_range: tuple[float, float]
    kind: str = ""
    task: TaskKind = "classification"
    columns: Columns | None = None
    vocabulary: Vocabulary | None = None
    notes: tuple[str, ...] = ()
    made_of: str = ""

    def __post_init__(self) -> None:
        if self.kind and self.modality.masked != (self.task == "segmentation"):
            raise UsageError(
                f"Data set {self.name!r} is a {self.task} of kind {self.kind!r}; inputs with masks are of a kind of "
                "their own: leave `kind` out."
            )
        if self.columns is not None and (self.columns.width,) != self.shape:
            raise UsageError(f"Data set {self.name!r} has inputs of shape {self.shape}; {self.columns} do not fit.")
        if self.task in ("regression", "segmentation"):
            if self.classes != 1:
                raise UsageError(f"Data set {self.name!r} has {self.classes} classes; a {self.task} must have 1.")
        elif not 2 <= self.classes <= MAX_CLASSES:
            raise UsageError(
                f"Data set {self.name!r} has {self.classes} classes; labels must be class numbers that start at 0, "
                f"of 2 to {MAX_CLASSES} classes."
            )
        _check_split(self, self.train, "training")
        _check_split(self, self.test, "test")

    @property
    def modality(self) -> Modality:
        """What kind of data its inputs are; UsageError: `kind` is none."""
        return modality_from(self.shape, self.task, self.kind)

    @property
    def named_kind(self) -> str:
        """The name of its modality where shape and task do not say it, else ""."""
        return "" if self.modality is modality_from(self.shape, self.task) else self.kind

    def sha256(self) -> str:
        """Return the SHA-256, in hex, of all four tensors, and domains: bytes (little-endian), dtypes and shapes.

        What is predicted of the same data does not change it.
        """
        return self.made_of or self._digest

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256()
        tensors = (self.train.x, self.train.y, self.test.x, self.test.y, self.train.domain, self.test.domain)
        update_digest(digest, *(part for part in tensors if part is not None))
        return digest.hexdigest()


def predicting_tokens(dataset: Dataset) -> Dataset:
    """Return a data set of texts as one whose texts are their own targets, as the next-token loss has it.

    UsageError: it has no texts, or none of two tokens in a part.
    """
    if dataset.vocabulary is None:
        words = f"Data set {dataset.name!r} has {dataset.modality.inputs}, whose next token cannot be predicted"
        raise UsageError(f"{words}; use another --loss, or texts, as letters.")
    if any(bool((part.x[:, 1:] == PADDING).all()) for part in (dataset.train, dataset.test)):
        words = f"Data set {dataset.name!r} has a part without a text of two tokens, so that no next token is there"
        raise UsageError(f"{words}; use longer texts, or another --loss.")
    count = len(dataset.vocabulary)
    parts = [Split(part.x, part.x, count, part.domain) for part in (dataset.train, dataset.test)]
    train, test = parts
    made = replace(dataset, train=train, test=test, classes=count, task="next_token")
    return replace(made, made_of=dataset.sha256())


def holds(kind: str) -> Callable[[Loader], Loader]:
    """Mark a data set's loader with the name of its modality, so that configurations suit data that nobody has read."""

    def marked(loader: Loader) -> Loader:
        setattr(loader, "kind", kind)  # noqa: B010 - a function has no such attribute by its type
        return loader

    return marked


def default_root() -> Path:
    """Return the folder of downloads: the environment variable PPBENCH_DATA, else ~/.cache/ppbench/data."""
    return Path(os.environ.get("PPBENCH_DATA") or Path.home() / ".cache" / "ppbench" / "data")


def no_argument(name: str, argument: str) -> None:
    """Raise UsageError if `argument` of the data set `name` is not empty."""
    if argument:
        raise UsageError(f"The data set {name!r} takes no argument, but got {shown(argument)}; write {name!r} alone.")


def existing(name: str, argument: str) -> Path:
    """Return the path in a data set's argument; UsageError: there is none, or it does not exist."""
    if not argument:
        raise UsageError(f"The data set {name!r} needs a path; write '{name}:PATH'.")
    try:
        path = Path(argument).expanduser()
        if path.stat() and (path.is_file() or path.is_dir()):
            return path
        reason = "it is neither a file nor a folder"
    except FileNotFoundError:
        reason = f"there is no {path.absolute()}"
    except (OSError, ValueError, RuntimeError) as cause:  # too long, not allowed, a zero byte, a home of nobody
        reason = (cause.strerror if isinstance(cause, OSError) else None) or because(cause)
    raise UsageError(f"The data set {shown(f'{name}:{argument}')} does not exist: {reason}.")


def check_content(dataset: Dataset) -> None:
    """Raise UsageError if every image is of one color: there is nothing to reconstruct or re-identify.

    Some such images among others are allowed: a black image has a PSNR like any other.
    """
    if not dataset.modality.drawn:
        return
    for split in (dataset.train, dataset.test):
        for images in split.x.split(1024):  # the first images of nearly all data sets decide
            rows = images.flatten(2)
            if bool((rows.amax(2) != rows.amin(2)).any()):
                return
    raise UsageError(f"Every image of data set {dataset.name!r} is of one color; there is nothing in them to find.")


def _check_split(dataset: Dataset, split: Split, part: str) -> None:
    where = f"the {part} part of data set {dataset.name!r}"
    if len(split.y) == 0:
        raise UsageError(f"There is no example in {where}; both the training and the test part need some.")
    dtype, width, expected_targets = {
        "classification": (torch.int64, (), "int64 with one axis"),
        "regression": (torch.float32, (1,), "float32 [N, 1], the targets of a regression"),
        "segmentation": (torch.float32, (1, *dataset.shape[1:]), "float32 [N, 1, H, W], the masks of the images"),
        "next_token": (torch.float32, dataset.shape, "the texts themselves"),
    }[dataset.task]
    if split.x.dtype not in (torch.uint8, torch.float32) or (split.y.dtype, split.y.shape[1:]) != (dtype, width):
        raise UsageError(
            f"The tensors of {where} are x {split.x.dtype} and y {split.y.dtype} {tuple(split.y.shape)}; "
            f"x must be uint8 or float32, and y {expected_targets}."
        )
    expected = (len(split.y), *dataset.shape)
    if tuple(split.x.shape) != expected or split.classes != dataset.classes:
        raise UsageError(
            f"The inputs of {where} have shape {tuple(split.x.shape)} and {split.classes} classes; "
            f"its labels and the data set ask for {expected} and {dataset.classes}."
        )
    _check_targets(dataset, split, where)
    _check_inputs(dataset, split, where)


def _check_targets(dataset: Dataset, split: Split, where: str) -> None:
    wrong, expected = _wrong_targets(dataset, split.y)
    if wrong.any():
        place = wrong.nonzero()[0]
        value = split.y[tuple(place)].item()
        raise UsageError(f"Example {int(place[0])} of {where} has label {value}; {expected}.")
    domain = split.domain
    if domain is not None and (domain.dtype != torch.int64 or domain.shape != split.y.shape[:1] or (domain < 0).any()):
        form = f"{domain.dtype} {tuple(domain.shape)}"
        raise UsageError(f"The domains of {where} are {form}; they must be int64 >= 0, one per example.")


def _wrong_targets(dataset: Dataset, y: Tensor) -> tuple[Tensor, str]:
    """Return where the targets `y` are out of range, a bool tensor of the same shape, and what is right, in words."""
    if dataset.task == "regression":
        return ~y.isfinite(), "targets must be finite"
    if dataset.task == "segmentation":
        return (y != 0) & (y != 1), "masks must be 0 or 1 in every pixel"
    if dataset.task == "next_token":
        return (y < 0) | (y >= dataset.classes), f"tokens must be from 0 to {dataset.classes - 1}"
    return (y < 0) | (y >= dataset.classes), f"labels must be from 0 to {dataset.classes - 1}"


def _check_inputs(dataset: Dataset, split: Split, where: str) -> None:
    if split.x.dtype == torch.uint8:
        if dataset.data_range != (0.0, 1.0):
            raise UsageError(f"The inputs of {where} are uint8, so its data range must be (0, 1).")
        return
    rows = split.x.flatten(1)
    low, high = dataset.data_range
    bad, fault = ~rows.isfinite().all(1), "not finite in single precision"
    if dataset.modality.drawn and not bad.any():
        bad, fault = (rows < low).any(1) | (rows > high).any(1), f"not in the data range [{low}, {high}]"
    if bad.any():
        raise UsageError(
            f"Example {int(bad.nonzero()[0])} of {where} holds a value that is {fault}; clean the data first."
        )
