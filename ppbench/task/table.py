"""Tables: a CSV file whose columns become features and whose target column becomes the label, or the number to fit."""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args
from urllib.parse import parse_qsl

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ppbench.base.errors import UsageError, because, shown, unknown
from ppbench.base.files import kind_of
from ppbench.federation.plan import Columns
from ppbench.task.dataset import Dataset, Split, TaskKind, existing
from ppbench.task.partition import strata, three_way

if TYPE_CHECKING:
    import pandas as pd

_SEPARATORS = (",", ";", "\t", "|")
MAX_CATEGORIES = 1000
HEADER = 1_000_000
"""Characters of the first line, at most."""
LARGEST = 2**30
"""Bytes of a table, at most, unpacked."""


_FORM = "target=NAME&sep=CHARACTER&split=8:1:1&task=regression"
_DEFAULT_SPLIT = (4, 0, 1)


@dataclass(frozen=True)
class Options:
    """What stands behind the "?" of a csv data set, see `load`; target and sep are None where they are not given."""

    target: str | None
    sep: str | None
    split: tuple[int, int, int]
    task: TaskKind


def load(argument: str, *, seed: int, root: Path) -> Dataset:
    """Rows of a CSV file (also .gz) with a header: csv:FILE?target=NAME&sep=CHARACTER&split=8:1:1&task=regression.

    `target` is the column with the label, the last one by default; its distinct values, sorted, are the classes.
    With task=regression it is a column of numbers (or of true and false, 1 and 0), taken as they are, not scaled.
    `sep` is one character or "tab"; by default that of , ; tab | which the header has most of.

    Rows are split 80 : 20, or by `split` (training : validation : test; validation rows are not used), as a function of
    `seed`, stratified by class (a regression: see `partition.strata`). Columns of numbers are standardized and the
    others one-hot encoded, with figures and categories of the training part alone: a category that only the test part
    has becomes all zeros. A missing category is one of its own; a missing number is refused. Numbers come first.

    Raises UsageError: options, a file, columns or targets that cannot be used.
    """
    text, _, query = argument.partition("?")
    path = existing("csv", text)
    options = _options(query)
    frame = _frame(path, options.sep)
    target = frame.columns[-1] if options.target is None else options.target
    if target not in frame.columns:
        raise unknown("column", target, [str(column) for column in frame.columns])
    regression = options.task == "regression"
    y, classes = _targets(frame[target], path) if regression else _labels(frame[target], path)
    inputs = frame.drop(columns=[target])
    _check_columns(inputs, path)
    train, test = _parts(strata(y) if regression else y, options.split, seed, path)
    x, x_test, columns = _encode(inputs, train.numpy(), test.numpy())
    return Dataset(
        f"csv:{path.resolve().name}",
        Split(x, y[train], classes),
        Split(x_test, y[test], classes),
        classes=classes,
        shape=(x.shape[1],),
        data_range=(float(x.min()), float(x.max())),
        kind="tabular",
        task=options.task,
        columns=columns,
    )


def _options(query: str) -> Options:
    try:
        given = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError as cause:
        raise UsageError(f"The csv options {shown(query)} are malformed; write '{_FORM}'.") from cause
    for key in given:
        if key not in ("target", "sep", "split", "task"):
            raise unknown("csv option", key, ("target", "sep", "split", "task"))
    sep = given.get("sep")
    if sep is not None:
        sep = {"tab": "\t", "\\t": "\t"}.get(sep, sep)
        if len(sep) != 1:
            raise UsageError(f"The csv option sep={shown(sep)} is not one character; write e.g. 'sep=;' or 'sep=tab'.")
    task = given.get("task", "classification")
    if task not in get_args(TaskKind):
        raise unknown("csv task", task, get_args(TaskKind))
    return Options(given.get("target"), sep, _shares(given.get("split")), cast(TaskKind, task))


def _shares(text: str | None) -> tuple[int, int, int]:
    if text is None:
        return _DEFAULT_SPLIT
    found = re.fullmatch(r"(\d{1,6}):(\d{1,6}):(\d{1,6})", text, re.ASCII)
    train, validation, test = map(int, found.groups()) if found else (0, 0, 0)
    if train == 0 or test == 0:
        raise UsageError(
            f"The csv option split={shown(text)} cannot be used; write shares of training, validation and test as "
            "whole numbers, as 'split=8:1:1' or 'split=4:0:1', training and test above 0."
        )
    return train, validation, test


def _parts(groups: Tensor, shares: tuple[int, int, int], seed: int, path: Path) -> tuple[Tensor, Tensor]:
    train, _, test = three_way(groups, shares, seed)
    if len(test) == 0:  # the last row of a class is trained on
        raise UsageError(
            f"{path} has {len(groups)} rows, too few to hold some out as split={':'.join(map(str, shares))}; every "
            "class needs several."
        )
    return train, test


def _frame(path: Path, sep: str | None) -> pd.DataFrame:
    import pandas as pd

    opened = gzip.open if path.suffix == ".gz" else open
    try:
        _check_bytes(path)
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            header = file.readline(HEADER)
            if len(header) == HEADER:
                raise UsageError(f"{path} is no table: its first line does not end within {HEADER:,} characters.")
            sep = sep or max(_SEPARATORS, key=header.count)
            names = next(csv.reader([header], delimiter=sep), [])
            frame = pd.read_csv(file, sep=sep, header=None, names=names, low_memory=False)
    except (OSError, EOFError, ValueError, csv.Error, zlib.error, OverflowError, MemoryError) as cause:
        # pandas' and Unicode errors are ValueErrors
        raise UsageError(
            f"{path} cannot be read as a table ({because(cause)}); it must be UTF-8 CSV with a header."
        ) from cause
    if not isinstance(frame.index, pd.RangeIndex):  # pandas takes surplus fields at the left for row names
        raise UsageError(f"{path} has rows with more fields than its header has names; give every column a name.")
    if len(frame.columns) < 2 or len(frame) == 0:
        raise UsageError(
            f"{path} has {len(frame)} rows and {len(frame.columns)} columns when split at {shown(sep)}; it needs rows, "
            "and at least one feature beside the target (name another separator with 'sep=')."
        )
    return frame


def _check_bytes(path: Path) -> None:
    """Refuse a table of more than `LARGEST` bytes, unpacked (UsageError); an archive is unpacked to count, not kept."""
    if kind_of(path) != "file":
        raise UsageError(f"{path} cannot be read as a table (it is no file); it must be UTF-8 CSV with a header.")
    size = 0
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        while chunk := file.read(1 << 20):
            size += len(chunk)
            if size > LARGEST:
                raise UsageError(f"{path} holds more than {LARGEST:,} bytes; tables end there: take fewer rows.")


def _labels(column: pd.Series, path: Path) -> tuple[Tensor, int]:
    """Return (labels int64 [N], number of classes): the rank of each value among the sorted distinct values."""
    _check_present(column, path)
    values, inverse = np.unique(column.to_numpy(), return_inverse=True)
    if not 2 <= len(values) <= MAX_CATEGORIES:
        raise UsageError(
            f"The target column {shown(column.name)} of {path} has {len(values)} distinct values; classes must number "
            f"from 2 to {MAX_CATEGORIES} (name another column with 'target=')."
        )
    return torch.from_numpy(inverse.astype(np.int64)), len(values)


def _targets(column: pd.Series, path: Path) -> tuple[Tensor, int]:
    """Return (targets float32 [N, 1], 1), the numbers of a regression's target column as they are."""
    from pandas.api.types import is_numeric_dtype

    _check_present(column, path)
    if not is_numeric_dtype(column):
        text = next((value for value in column if isinstance(value, str)), column.iloc[0])
        raise UsageError(
            f"The target column {shown(column.name)} of {path} holds text such as {shown(text)}; with task=regression "
            "it must be numbers (leave the option out to take its values for classes)."
        )
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is named below
        values = column.to_numpy(np.float64).astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise UsageError(
            f"Row {bad[0]} of {path} has {column.iloc[bad[0]]} in the target column {shown(column.name)}; targets must "
            "be finite in single precision."
        )
    if values.min() == values.max():
        raise UsageError(
            f"The target column {shown(column.name)} of {path} is {values[0]:g} in every row; there is nothing to fit "
            "(name another column with 'target=')."
        )
    return torch.from_numpy(values)[:, None], 1


def _check_present(column: pd.Series, path: Path) -> None:
    missing = np.flatnonzero(column.isna().to_numpy())
    if len(missing):
        raise UsageError(
            f"Row {missing[0]} of {path} has no value in the target column {shown(column.name)}; fill or drop it."
        )


def _check_columns(inputs: pd.DataFrame, path: Path) -> None:
    from pandas.api.types import is_bool_dtype, is_numeric_dtype

    for name, column in inputs.items():
        if is_numeric_dtype(column) and not is_bool_dtype(column):
            bad = np.flatnonzero(~np.isfinite(column.to_numpy(np.float64)))
            if len(bad):
                raise UsageError(
                    f"Row {bad[0]} of {path} has {column.iloc[bad[0]]} in the column {shown(name)}; numbers must be "
                    "finite and none may be missing."
                )
        elif column.nunique() > MAX_CATEGORIES:
            raise UsageError(
                f"The text column {shown(name)} of {path} has {column.nunique()} distinct values; one-hot columns stop "
                f"at {MAX_CATEGORIES}: drop it, or repair the entries that keep it from being numbers."
            )


def _encode(inputs: pd.DataFrame, train: NDArray[np.int64], test: NDArray[np.int64]) -> tuple[Tensor, Tensor, Columns]:
    """Return (training, test) features, float32 [N, D], encoded with figures of the training rows alone, and how."""
    from sklearn.compose import make_column_selector, make_column_transformer
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    encoder = make_column_transformer(
        (StandardScaler(), make_column_selector(dtype_include="number")),
        (
            OneHotEncoder(handle_unknown="ignore", sparse_output=False),
            make_column_selector(dtype_exclude="number"),
        ),
    )
    fitted = encoder.fit_transform(inputs.iloc[train])
    x = torch.tensor(np.asarray(fitted), dtype=torch.float32)
    words = inputs.iloc[train].select_dtypes(exclude="number")
    widths = tuple(int(words[name].nunique(dropna=False)) for name in words)
    x_test = torch.tensor(np.asarray(encoder.transform(inputs.iloc[test])), dtype=torch.float32)
    return x, x_test, Columns(x.shape[1] - sum(widths), widths)
