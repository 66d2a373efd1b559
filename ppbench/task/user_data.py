"""Data sets by name, from an installed plugin or a user's function."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ppbench.base.errors import UsageError, because, listed, one_line, shown
from ppbench.base.fence import built, check_answers
from ppbench.base.import_guard import importable
from ppbench.base.registry import ADDRESS, ADDRESSED, find, plugins
from ppbench.metrics.modality import Modality, modality_from
from ppbench.task.dataset import MAX_CLASSES, Dataset, Split, default_root, existing
from ppbench.task.image_data import LABEL_COLUMNS, Part, pixels, stack_images
from ppbench.task.partition import hold_out

# -- Checks that labels are class numbers from 0 --

MANY_CLASSES = 20
"""Number of classes above which labels that hardly repeat are taken for names of examples."""
_USED = 4
"""At least one of so many class numbers must be in use."""


def class_numbers(source: str, labels: Iterable[Any]) -> Tensor:
    """Return labels as class numbers, int64 [N]; True and 3.0 are allowed.

    source: their origin in error messages. UsageError: a label is a fraction, no number, missing, below 0, or not below
    `MAX_CLASSES`.
    """
    numbers = []
    for row, label in enumerate(labels):
        value = label
        if isinstance(label, Tensor | np.ndarray | np.generic) and math.prod(label.shape) == 1:
            value = label.item()
        try:
            number = int(value) if isinstance(value, bool | int | float) else -1
        except (OverflowError, ValueError):  # infinite, or no number
            number = -1
        if number != value or not 0 <= number < MAX_CLASSES:
            raise UsageError(
                f"Row {row} of {source} has label {shown(value, 40)}; labels must be class numbers, whole and from 0 "
                f"to {MAX_CLASSES - 1} (numbers to fit: csv:FILE?task=regression)."
            )
        numbers.append(number)
    return torch.tensor(numbers, dtype=torch.int64)


def classes_of(source: str, labels: Tensor) -> int:
    """Return the number of classes of labels int64 [N]: one more than the largest.

    UsageError: there is no class 0, few of the numbers are in use, or labels hardly repeat.
    """
    used, classes = labels.unique(), int(labels.max()) + 1
    if len(used) > MANY_CLASSES and 2 * len(used) > len(labels):
        fault = (
            f"has {len(used)} labels in {len(labels)} examples, as names of examples do; give the number of each class"
        )
    elif int(used[0]) > 0:
        fault = f"has labels from {int(used[0])} on; classes are numbered from 0: subtract {int(used[0])}"
    elif len(used) * _USED < classes:
        fault = f"has {len(used)} labels, the largest {classes - 1}; number the classes from 0 without gaps"
    else:
        return classes
    raise UsageError(f"{source} {fault}.")


def empty_classes(labels: Tensor, classes: int) -> str:
    """Return a remark on classes without an example in labels int64 [N], "" if all have some."""
    empty = sorted({*range(classes)} - {*labels.tolist()})
    if not empty:
        return ""
    names = ", ".join(map(str, empty[:5])) + (f" and {len(empty) - 5} more" if len(empty) > 5 else "")
    return f", of which {names} {'has' if len(empty) == 1 else 'have'} no example for training"


# -- Data sets in common formats: from a user's function, and from folders of the library `datasets` --
# A part (training, test) is a pair of inputs and labels, or anything with a length whose items are such pairs or
# dicts: a `torch.utils.data.Dataset`, a `datasets.Dataset`. Inputs are images (uint8, or floats up to 1) or rows of
# numbers (uint8: divided by 255), labels are class numbers from 0.

_PARTS = ("train", "test")
_INPUTS = ("image", "img", "images", "pixel_values", "x", "features", "input")
_BRIGHTEST = 2.0
"""Largest value of an image in floats: a larger one was not divided by 255, or by its white."""
REQUIRED_FORM = "it must return (training part, test part), or a dict of train and test"


def load_saved_dataset(argument: str, *, seed: int, root: Path) -> Dataset:
    """A folder that the library `datasets` saved (save_to_disk): hf:FOLDER?image=COLUMN&label=COLUMN.

    With splits train and test; one split is divided 80 : 20, a function of `seed`. Columns not named in the options
    are found by common names. Needs the package `datasets`. UsageError: the folder or a column cannot be used.
    """
    folder, _, query = argument.partition("?")
    path, options = existing("hf", folder), dict(parse_qsl(query, keep_blank_values=True))
    if unknown_options := {*options} - {"image", "label"}:
        raise UsageError(
            f"The data set {shown('hf:' + argument)} has the option {min(unknown_options)!r}; known are image and "
            "label."
        )
    saved = saved_by_datasets(path)
    return dataset_from(
        f"hf:{path.resolve().name}", saved if isinstance(saved, Mapping) else {"train": saved}, seed, options
    )


def saved_by_datasets(path: Path) -> Any:
    """Return what the library `datasets` saved in a folder; UsageError: nothing, or the library is not installed."""
    try:
        from datasets import load_from_disk  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as cause:
        raise UsageError(f"The folder {path} needs the package `datasets`; pip install datasets.") from cause
    try:
        return load_from_disk(str(path))
    except Exception as cause:
        advice = f"write 'parquet:{path}'" if any(path.glob("**/*.parquet")) else "write it again"
        raise UsageError(f"{path} is no folder that `datasets` saved ({because(cause)}); {advice}.") from cause


def dataset_from(name: str, value: Any, seed: int, columns: Mapping[str, str] | None = None) -> Dataset:
    """Return the result of a user's function as a data set with `name`; UsageError: it cannot be one.

    Of a `Dataset` only the name is changed. uint8 images are [N, C, H, W] or [N, H, W, C]; floats keep their values,
    and their range is [0, 1] if all are in it, else their extremes. columns: "image" and "label", of items in dicts.
    """
    if isinstance(value, Dataset):
        return replace(value, name=name)
    parts = [_part(name, part, columns or {}) for part in _parts(name, value)]
    if len(parts) == 1:
        (x, y), (train, test) = parts[0], hold_out(parts[0][1], 5, seed)
        parts = [(x[train], y[train]), (x[test], y[test])]
    (x, y), (x_test, y_test) = parts
    shape, classes = tuple(x.shape[1:]), classes_of(f"The data set {shown(name)}", torch.cat([y, y_test]))
    low, high = (0.0, 1.0) if x.dtype == torch.uint8 else _range(x, x_test)
    modality = modality_from(shape)
    if modality.drawn and low >= 0 and _BRIGHTEST < high < math.inf:
        raise UsageError(
            f"The images of data set {shown(name)} have values from {low:g} to {high:g}; give uint8, or floats divided "
            "by what is white."
        )
    summary = f"{modality.noun} of {tuple(shape)} from {low:g} to {high:g}"
    others = [str(part) for part in value if part not in _PARTS] if isinstance(value, Mapping) else []
    note = f"{name}: {len(y) + len(y_test)} {summary}, {classes} classes{empty_classes(y, classes)}"
    note += f"; not read: {listed(others)}" if others else ""
    splits = Split(x, y, classes), Split(x_test, y_test, classes)
    return Dataset(name, *splits, classes, shape, (low, high), notes=(note,))


def _parts(name: str, value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        parts = [value[part] for part in _PARTS if part in value]
        if "train" in value:
            return parts
        raise UsageError(f"The data set {shown(name)} has the parts {one_line([*value], 80)}; {REQUIRED_FORM}.")
    if isinstance(value, tuple | list) and len(value) == 2:
        return [*value]
    raise UsageError(f"The data set {shown(name)} gave {one_line(type(value).__name__, 60)}; {REQUIRED_FORM}.")


def _part(name: str, part: Any, columns: Mapping[str, str]) -> Part:
    """Return inputs uint8 or float32 [N, *shape] and labels int64 [N] of one part."""
    if isinstance(part, tuple | list) and len(part) == 2 and all(hasattr(one, "shape") for one in part):
        array, labels = (np.asarray(_plain(name, one)) for one in part)
        if labels.ndim != 1:
            shape = f"{labels.dtype} {labels.shape}"
            raise UsageError(f"The labels of data set {shown(name)} are {shape}; give whole numbers, one per example.")
        x, y = _tensor(name, array), class_numbers(f"data set {shown(name)}", labels)
    else:
        inputs, targets = _items(name, part, columns)
        x, y = _inputs(name, inputs), class_numbers(f"data set {shown(name)}", targets)
    if x.dim() == 3:  # grey images without an axis of channels
        x = x[:, None]
    if x.dim() == 4 and x.shape[1] not in (1, 3) and x.shape[3] in (1, 3):
        x = x.permute(0, 3, 1, 2)
    if x.dim() == 4 and x.shape[3] in (2, 4) and x.shape[1] > 4:
        raise UsageError(
            f"The images of data set {shown(name)} have shape {tuple(x.shape[1:])}, as height x width x channels; give "
            "1 or 3 channels, or [C, H, W]."
        )
    if x.dim() not in (2, 4):
        input_shape = str(tuple(x.shape[1:]))
        raise UsageError(
            f"The inputs of data set {shown(name)} have shape {input_shape}; images are [C, H, W], rows [F]."
        )
    return x.contiguous().clone(), y


def _items(name: str, part: Any, columns: Mapping[str, str]) -> tuple[list[Any], list[Any]]:
    """Return the inputs and the labels of the items of a part."""
    try:
        items: list[Any] = [part[index] for index in range(len(part))]
    except TypeError as cause:
        kind = one_line(type(part).__name__, 60)
        raise UsageError(f"A part of data set {shown(name)} is {kind}; give (inputs, labels) or a data set.") from cause
    if not items:
        raise UsageError(f"A part of data set {shown(name)} has no example; both need some.")
    if isinstance(items[0], Mapping):
        image = _column(name, items[0], _INPUTS, columns.get("image"))
        label = _column(name, items[0], LABEL_COLUMNS, columns.get("label"))
        return [item[image] for item in items], [item[label] for item in items]
    if isinstance(items[0], tuple | list) and len(items[0]) == 2:
        return [item[0] for item in items], [item[1] for item in items]
    kind = one_line(type(items[0]).__name__, 60)
    raise UsageError(f"An item of data set {shown(name)} is {kind}; it must be (input, label), or a dict of them.")


def _column(name: str, item: Mapping[str, Any], known: Sequence[str], named: str | None) -> str:
    chosen = next((column for column in ([named] if named else known) if column in item), None)
    if chosen is None:
        reason = f"there is no {named!r}" if named else f"none of them is called {', '.join(known[:3])} or the like"
        raise UsageError(f"The data set {shown(name)} has the columns {one_line([*item], 120)}; {reason}.")
    return chosen


def _inputs(name: str, inputs: Iterable[Any]) -> Tensor:
    """Return stacked inputs: images as uint8 [N, C, H, W], arrays and tensors unchanged."""
    arrays = [np.array(_plain(name, one)) for one in inputs]
    if arrays[0].dtype == np.uint8 and all(a.ndim == 2 or (a.ndim == 3 and a.shape[2] in (1, 3)) for a in arrays):
        return stack_images(arrays, [f"example {index} of {name}" for index in range(len(arrays))])
    if len({array.shape for array in arrays}) > 1:
        sizes = " and ".join(str(size) for size in sorted({array.shape for array in arrays})[:2])
        raise UsageError(f"The inputs of data set {shown(name)} have the shapes {sizes}; they must be of one.")
    return _tensor(name, np.stack(arrays))


def _tensor(name: str, array: NDArray[Any]) -> Tensor:
    if array.dtype.kind not in "fiub":
        raise UsageError(f"The inputs of data set {shown(name)} are {array.dtype}; they must be numbers or images.")
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused
        numbers = array if array.dtype == np.uint8 else array.astype(np.float32)
    return torch.as_tensor(np.ascontiguousarray(numbers))


def _plain(name: str, value: Any) -> Any:
    """Return a PIL image as its `pixels`, a tensor as a NumPy array, anything else unchanged."""
    if isinstance(value, Tensor):
        return value.numpy(force=True) if not value.is_sparse else value.to_dense().numpy(force=True)
    if not (hasattr(value, "mode") and hasattr(value, "convert")):
        return value
    try:
        return pixels(value, f"data set {shown(name)}")
    except UsageError:
        raise
    except Exception as cause:  # a damaged file makes its decoder raise anything
        raise UsageError(f"An image of data set {shown(name)} cannot be decoded ({because(cause)}).") from cause


def _range(*parts: Tensor) -> tuple[float, float]:
    low, high = (float(min(p.min() for p in parts)), float(max(p.max() for p in parts)))
    return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)


def named(text: str) -> tuple[str, str]:
    """Return the registered name in `text` and its argument; an address, MODULE:FUNCTION, is all name."""
    name, _, argument = text.partition(":")
    return (text, "") if name not in plugins("datasets") and ADDRESS.fullmatch(text) else (name, argument)


def plugins_of(text: str) -> tuple[str, ...]:
    """Return the registered names of all plugins that make the data set `text`: for "warped:csv:FILE" both."""
    name, argument = named(text)
    return (name, named(argument)[0]) if name == "warped" else (name,)


def dataset_modality(text: str) -> Modality | None:
    """Return the kind of data that the data set `text` holds, as its loader says (`holds`); None if it does not."""
    plugin = plugins("datasets").get(named(text)[0])
    name = "" if plugin is None else getattr(plugin.loaded, "kind", "")
    return modality_from((), name=name) if name else None


def open_dataset(text: str, *, seed: int, root: Path | None = None) -> Dataset:
    """Return the data set that `text` names. Raises UsageError: the name is unknown or the data cannot be used.

    Args:
        text: NAME or NAME:ARGUMENT, e.g. "digits", "parquet:FOLDER" or "csv:FILE?target=y&sep=;". NAME is an entry
            point of the group `ppbench.datasets`: a callable (argument: str, *, seed: int, root: Path) -> Dataset. Or
            MODULE:FUNCTION, without arguments; for its result see `task.user_data`.
        seed: of the split into train and test, if the source has none.
        root: folder of downloads and caches; `default_root()` when None.
    """
    name, argument = named(text)

    def read(loader: Any) -> Any:
        plugin = find("datasets", name)
        if plugin is not None and plugin.distribution == ADDRESSED:
            return dataset_from(name, importable(loader), seed)
        return loader(argument, seed=seed, root=default_root() if root is None else root)

    try:
        dataset = built("datasets", name, read)
    except (OSError, MemoryError, RecursionError, OverflowError) as cause:
        reason = (cause.strerror if isinstance(cause, OSError) else None) or because(cause)
        raise UsageError(f"The data set {shown(text)} cannot be read ({reason}); give one that can.") from cause
    if not isinstance(dataset, Dataset):
        raise UsageError(f"The data set plugin {name!r} returned {type(dataset).__name__}; it must return a Dataset.")
    check_answers("datasets", name, lambda: _faults(dataset, name))
    return dataset


def _faults(dataset: Dataset, name: str) -> Iterator[str]:
    """Yield faults of a third-party data set in its name, tensors or digest."""
    if not isinstance(dataset.name, str) or not f"{dataset.name}:".startswith(f"{name}:"):
        yield f"returns a data set called {dataset.name!r}; call it {name!r}, or {name + ':'!r} and more"
    for split in (dataset.train, dataset.test):
        for tensor in (split.x, split.y, *([] if split.domain is None else [split.domain])):
            if type(tensor) is not Tensor or tensor.requires_grad or tensor.device.type != "cpu" or tensor.is_sparse:
                yield "returns tensors that are not plain ones on the CPU without gradients; detach and copy them"
    if dataset.sha256() != Dataset.sha256(dataset):
        yield "returns a data set with a digest of its own; return a Dataset"
