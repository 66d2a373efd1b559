"""The two sets of a membership audit, what a model was trained on and what it was not, read alike from two sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ppbench.base.errors import UsageError, shown
from ppbench.base.tensor_files import named_tensors
from ppbench.task.dataset import default_root, existing
from ppbench.task.image_data import Part, join_images
from ppbench.task.imagefolder import read_class_folders
from ppbench.task.parquet import read_shard
from ppbench.task.table import read_two_tables
from ppbench.task.user_data import class_numbers, named, open_dataset

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES_OF = {"tensors": (".safetensors",), "parquet": (".parquet",), "csv": (".csv", ".csv.gz", ".tsv")}
"""Kinds of files that need no word before them."""
SAVED_BY_DATASETS = ("dataset_info.json", "dataset_dict.json")
"""A folder with one of these was saved by the library `datasets`."""


@dataclass(frozen=True, eq=False)
class MemberSet:
    """One set of examples.

    Attributes:
        x: [N, *shape] float32; images of files from 0 to 1.
        y: int64 [N], classes.
        names: where each stands: its file, row or place.
        words: each one's values, for people; "" of images and tensors.
        classes: the classes in words, () where they have none.
    """

    x: Tensor
    y: Tensor
    names: tuple[str, ...]
    words: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()

    def at(self, places: Tensor) -> MemberSet:
        """Return the examples at `places` int64 [n]."""
        names, words = (tuple(some[k] for k in places.tolist()) if some else () for some in (self.names, self.words))
        return MemberSet(self.x[places], self.y[places], names, words, self.classes)


def open_member_sets(members: str, others: str, seed: int) -> tuple[MemberSet, MemberSet]:
    """Return the members and the non-members that two sources name; classes have one number in both.

    A source is a folder with one folder of images per class, a file .safetensors with x and y as the network takes them
    (bytes are divided by 255), a file .parquet of images, a file .csv, a folder that `datasets` saved, or a data set as
    `--dataset` takes it, with both of its parts. UsageError: they are not of one kind, or cannot be used.
    """
    (kind, one), (other_kind, other) = _kind(members), _kind(others)
    if kind != other_kind:
        raise UsageError(
            f"The members are {kind} and the non-members {other_kind}; give both in one form, or how they were stored "
            "tells them apart."
        )
    readers = {"imagefolder": _images_of_folders, "csv": _rows_of_tables, "tensors": _tensors, "parquet": _parquet}
    if kind in readers:
        return readers[kind]((one, other))
    return _whole(members, seed), _whole(others, seed)


def _kind(text: str) -> tuple[str, str]:
    """Return the kind of a source, and its path or the text itself."""
    name, argument = named(text)
    if argument and name in ("imagefolder", "csv"):
        return name, argument
    if name == "parquet" and argument and existing(name, argument).is_file():
        return name, argument
    path = Path(text.partition("?")[0]).expanduser()
    if path.is_dir():
        saved = any((path / file).exists() for file in SAVED_BY_DATASETS)
        return ("data sets by name", f"hf:{text}") if saved else ("imagefolder", text)
    for kind, suffixes in SUFFIXES_OF.items():
        if path.name.lower().endswith(suffixes):
            return kind, text
    if ("/" in text or path.suffix) and ":" not in text:
        raise UsageError(
            f"The source {shown(text)} cannot be read; give a folder of class folders, a file .safetensors, .parquet "
            "or .csv, or a data set as --dataset takes it."
        )
    return "data sets by name", text


def _numbered(word: str, count: int) -> tuple[str, ...]:
    return tuple(f"{word} {number}" for number in range(count))


def _floats(x: Tensor) -> Tensor:
    return x.float() / 255 if x.dtype == torch.uint8 else x.float()


def _images_of_folders(folders: tuple[str, str]) -> tuple[MemberSet, MemberSet]:
    paths = [existing("imagefolder", folder) for folder in folders]
    parts, files, classes = read_class_folders(paths)
    one, other = (
        MemberSet(_floats(x), y, tuple(str(f.relative_to(home)) for f in own), (), tuple(classes))
        for home, (x, y), own in zip(paths, parts, files, strict=True)
    )
    return one, other


def _rows_of_tables(arguments: tuple[str, str]) -> tuple[MemberSet, MemberSet]:
    parts, frames, classes = read_two_tables(arguments)
    one, other = (
        MemberSet(x, y, tuple(f"row {row}" for row in frame.index), _row_words(frame), tuple(classes))
        for (x, y), frame in zip(parts, frames, strict=True)
    )
    return one, other


def _row_words(frame: pd.DataFrame) -> tuple[str, ...]:
    """Return each row as "name: value; ..."."""
    names = [str(name) for name in frame.columns]
    rows: list[Sequence[Any]] = frame.astype(str).to_numpy().tolist()
    return tuple("; ".join(f"{name}: {value}" for name, value in zip(names, row, strict=True)) for row in rows)


def _parquet(paths: tuple[str, str]) -> tuple[MemberSet, MemberSet]:
    parts: list[Part] = [read_shard(existing("parquet", path), default_root()) for path in paths]
    images = join_images([x for x, _ in parts], list(paths))
    one, other = (MemberSet(_floats(x), y, _numbered("row", len(y))) for x, (_, y) in zip(images, parts, strict=True))
    return one, other


def _tensors(paths: tuple[str, str]) -> tuple[MemberSet, MemberSet]:
    one, other = map(_tensor_set, paths)
    return one, other


def _tensor_set(text: str) -> MemberSet:
    path = existing("tensors", text)
    tensors = named_tensors(path)
    if missing := [name for name in ("x", "y") if name not in tensors]:
        names = shown(sorted(tensors), 60)
        raise UsageError(f"{path} has the tensors {names} and no {missing[0]!r}; give x [N, ...] and y [N], classes.")
    x, y = tensors["x"], tensors["y"]
    if x.dim() < 2 or y.dim() != 1 or len(x) != len(y):
        shapes = f"x {tuple(x.shape)} and y {tuple(y.shape)}"
        raise UsageError(f"{path} has {shapes}; give x [N, ...] and y [N], the class of each.")
    return MemberSet(_floats(x), class_numbers(str(path), y), _numbered("place", len(y)))


def _whole(text: str, seed: int) -> MemberSet:
    """Return both parts of a data set by name, the training part first."""
    dataset = open_dataset(text, seed=seed)
    if dataset.task != "classification":
        raise UsageError(f"The data set {shown(text)} is a {dataset.task}; an audit asks about classes.")
    parts = [split.take(torch.arange(len(split))) for split in (dataset.train, dataset.test)]
    labels = torch.cat([dataset.train.y, dataset.test.y])
    names = _numbered("training part", len(dataset.train)) + _numbered("test part", len(dataset.test))
    return MemberSet(torch.cat([part.x for part in parts]), labels, names)
