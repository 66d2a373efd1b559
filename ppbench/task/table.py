"""Tables: a CSV file whose columns become features and whose target column becomes the label, or the number to fit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ppbench.base.errors import UsageError, listed, shown, unknown
from ppbench.federation.plan import Columns
from ppbench.task.csv_rows import CsvOptions, csv_frame, named_columns, options_of
from ppbench.task.dataset import Dataset, Split, existing, holds
from ppbench.task.image_data import Part
from ppbench.task.numerals import MANY_TEXTS, doubt, option
from ppbench.task.partition import strata, three_way

if TYPE_CHECKING:
    import pandas as pd


# -- Types of table columns, numbers or categories; a column that looks like the other type is refused --

MAX_CATEGORIES = 1000
_NO_VALUE = frozenset(("", "NA", "N/A", "n/a", "nan", "NaN", "null", "NULL", "None", "<NA>", "#N/A"))
"""Entries that mean no value, with or without spaces around them, which pandas' own list misses."""


def is_number(column: pd.Series) -> bool:
    """Return whether a column holds numbers; truth values are two categories."""
    from pandas.api.types import is_bool_dtype, is_numeric_dtype

    return bool(is_numeric_dtype(column) and not is_bool_dtype(column))


def typed_columns(frame: pd.DataFrame, options: CsvOptions, path: Path) -> pd.DataFrame:
    """Return the columns of `frame`, each of numbers, of truth values, or of texts without spaces around them.

    Texts become numbers if all of a column are. UsageError: a column has no value at all, or is text that looks like
    numbers, dates, or names of rows, and is not named in `categories`.
    """
    import pandas as pd

    categories = named_columns(options.categories, list(frame.columns))
    columns = {}
    for name, column in frame.items():
        texts = not is_number(column) and column.dtype != bool
        columns[name] = _typed(column, str(name) in categories, options, path) if texts else column
        if columns[name].isna().all():
            raise UsageError(
                f"The column {shown(name)} of {path} has no value in any row; leave it out by "
                f"'drop={option(str(name))}'."
            )
    return pd.DataFrame(columns)


def _typed(column: pd.Series, category: bool, options: CsvOptions, path: Path) -> pd.Series:
    none = _NO_VALUE | {*(options.na or ())}
    stripped = {value: str(value).strip() for value in column.dropna().unique()}
    texts = column.map({value: text for value, text in stripped.items() if text not in none})
    counts = {str(text): int(rows) for text, rows in texts.value_counts().items()}
    if category or not counts:
        return texts
    if {*map(str.lower, counts)} <= {"true", "false"}:
        truth = {text: text.lower() == "true" for text in counts}
        return texts if texts.isna().any() else texts.map(truth).astype(bool)
    numbers = {text: options.form.read(text) for text in counts}
    if None not in numbers.values():
        return texts.map(numbers).astype(np.float64)
    if reason := doubt(str(column.name), counts, options.form):
        raise UsageError(f"The column {shown(column.name)} of {path} {reason}.")
    return texts


_ROWS_A_CLASS = 5
"""Least average number of rows per class for which many distinct numbers may be classes."""
_LARGEST = float(np.finfo(np.float32).max)


@holds("row")
def load(argument: str, *, seed: int, root: Path) -> Dataset:
    """Rows of a CSV file (also .gz) with a header: csv:FILE?target=NAME&sep=CHARACTER&split=8:1:1&task=regression.

    `target` is the column with the label, the last one by default; its distinct values, sorted, are the classes.
    With task=regression it is a column of numbers (or of true and false, 1 and 0), taken as they are, not scaled.
    `sep` is one character or "tab"; by default that of , ; tab | which the header has most of. `header` is the line of
    the names, or "none" (columns are then called 1, 2, ...). `decimal` and `thousands` are the marks in numbers, as
    "decimal=,&thousands=.". `na` lists texts that stand for no value, beside the usual (empty, NA, nan, null, ...);
    rows without a number or a target are then left out. `categories` and `drop` list columns whose values are no
    numbers whatever they look like, and that are left out. `encoding` is UTF-8 by default.

    Rows are split 80 : 20, or by `split` (training : validation : test; validation rows are not used), as a function of
    `seed`, stratified by class (a regression: see `partition.strata`). Columns of numbers are standardized and the
    others one-hot encoded, with figures and categories of the training part alone: a category that only the test part
    has becomes all zeros. A missing category is one of its own; a missing number is refused. Numbers come first.

    Raises UsageError: options, a file, columns or targets that cannot be used, or that may be read wrongly: a text
    column that looks like numbers or dates, a header that looks like a row, numbers that are no classes.
    """
    text, _, query = argument.partition("?")
    path = existing("csv", text)
    options = options_of(query)
    frame = csv_frame(path, options)
    target = frame.columns[-1] if options.target is None else options.target
    if target not in frame.columns:
        raise unknown("column", target, [str(column) for column in frame.columns])
    return _dataset(typed_columns(frame, options, path), target, options, seed, path)


def read_two_tables(arguments: tuple[str, str]) -> tuple[list[Part], list[pd.DataFrame], list[str]]:
    """Return features and labels of two CSV files, encoded as one table, their rows, and the classes in words.

    arguments: as of `load`, without split; the options of the first hold for both. Numbers are standardized by the
    rows of the first file, and its categories are those that have a feature. Raises UsageError as `load`.
    """
    options = options_of(arguments[0].partition("?")[2])
    paths = [existing("csv", argument.partition("?")[0]) for argument in arguments]
    if options.task == "regression":
        raise UsageError(f"{paths[0]} has numbers for targets (task=regression); the target must be a class.")
    frames = [csv_frame(path, options) for path in paths]
    if list(frames[0].columns) != list(frames[1].columns):
        raise UsageError(f"{paths[0]} and {paths[1]} have other columns; they must be the same, in one order.")
    import pandas as pd

    target = frames[0].columns[-1] if options.target is None else options.target
    if target not in frames[0].columns:
        raise unknown("column", target, [str(column) for column in frames[0].columns])
    whole = typed_columns(pd.concat(frames, keys=(0, 1)), options, paths[0])
    table = _complete(whole, target, options, paths[0])
    labels, _ = _labels(table[target], paths[0])
    inputs, source = table.drop(columns=[target]), np.asarray(table.index.get_level_values(0))
    _check_columns(inputs, paths[0])
    first, second = np.flatnonzero(source == 0), np.flatnonzero(source == 1)
    x, x_other, _ = _encode(inputs, first, second, paths[0])
    parts = [(x, labels[torch.from_numpy(first)]), (x_other, labels[torch.from_numpy(second)])]
    return parts, [table.xs(part, level=0) for part in (0, 1)], [str(value) for value in np.unique(table[target])]


def _dataset(table: pd.DataFrame, target: str, options: CsvOptions, seed: int, path: Path) -> Dataset:
    """Return the data set of a table: rows that the options keep, split and encoded."""
    frame = _complete(table, target, options, path)
    regression = options.task == "regression"
    y, classes = _targets(frame[target], path) if regression else _labels(frame[target], path)
    inputs = frame.drop(columns=[target])
    _check_columns(inputs, path)
    train, test = _parts(strata(y) if regression else y, options.split, seed, path)
    x, x_test, columns = _encode(inputs, train.numpy(), test.numpy(), path)
    name = f"csv:{path.resolve().name}"
    aim = f"{target} (numbers)" if regression else f"{target} ({classes} classes)"
    return Dataset(
        name,
        Split(x, y[train], classes),
        Split(x_test, y[test], classes),
        classes=classes,
        shape=(x.shape[1],),
        data_range=(float(x.min()), float(x.max())),
        task=options.task,
        columns=columns,
        notes=(f"{name}: {_rows(len(table), len(frame))}; {_reading(inputs)}; target: {aim}",),
    )


def _rows(rows: int, kept: int) -> str:
    without = f" ({rows - kept} without a value are left out)" if kept < rows else ""
    return f"{kept} rows{without}"


def _reading(inputs: pd.DataFrame) -> str:
    """Return in words which columns are numbers, and which are categories with their numbers of values."""
    numbers = [f"{name}{_counting(column)}" for name, column in inputs.items() if is_number(column)]
    value_counts = {str(name): column.nunique(dropna=False) for name, column in inputs.items() if not is_number(column)}
    categories = [f"{name} ({count})" for name, count in value_counts.items()]
    parts = [f"numbers: {listed(numbers)}"] if numbers else []
    parts += [f"categories (values): {listed(categories, 600)}"] if categories else []
    return "; ".join(parts)


def _counting(column: pd.Series) -> str:
    """Return a remark on a column that only counts the rows, "" for other columns."""
    values = column.to_numpy()
    return " (it counts the rows)" if len(values) > MANY_TEXTS and bool((np.diff(values) == 1).all()) else ""


def _complete(frame: pd.DataFrame, target: str, options: CsvOptions, path: Path) -> pd.DataFrame:
    """Return the rows without missing numbers or target; all rows unless the option `na` is set."""
    if options.na is None:
        return frame
    needed = [name for name, column in frame.items() if name == target or is_number(column)]
    complete = frame.dropna(subset=needed)
    if complete.empty:
        raise UsageError(f"Every row of {path} lacks a number or its target; leave columns out by 'drop='.")
    return complete


def _parts(groups: Tensor, shares: tuple[int, int, int], seed: int, path: Path) -> tuple[Tensor, Tensor]:
    train, _, test = three_way(groups, shares, seed)
    if len(test) == 0:  # the last row of a class is trained on
        raise UsageError(
            f"{path} has {len(groups)} rows, too few to hold some out as split={':'.join(map(str, shares))}; every "
            "class needs several."
        )
    return train, test


def _labels(column: pd.Series, path: Path) -> tuple[Tensor, int]:
    """Return (labels int64 [N], number of classes): the rank of each value among the sorted distinct values."""
    _check_present(column, path)
    values, inverse = np.unique(column.to_numpy(), return_inverse=True)
    if not 2 <= len(values) <= MAX_CATEGORIES:
        raise UsageError(
            f"The target column {shown(column.name)} of {path} has {len(values)} distinct values; classes must number "
            f"from 2 to {MAX_CATEGORIES} (name another column with 'target=')."
        )
    if is_number(column):
        _check_classes(str(column.name), values, len(column), path)
    return torch.from_numpy(inverse.astype(np.int64)), len(values)


def _check_classes(name: str, values: NDArray[np.generic], rows: int, path: Path) -> None:
    """Refuse sorted distinct numbers that are no class numbers: fractions, and many with gaps or few repetitions."""
    numbers = values.astype(np.float64)
    fractions = numbers[~np.isfinite(numbers) | (numbers != np.round(numbers))]
    gapless = numbers[0] in (0, 1) and numbers[-1] - numbers[0] == len(numbers) - 1
    if len(fractions):
        fault = f"holds numbers such as {fractions[0]:.15g}, which are no classes"
    elif len(numbers) > MANY_TEXTS and (not gapless or len(numbers) * _ROWS_A_CLASS > rows):
        fault = f"has {len(numbers)} distinct numbers in {rows} rows, which are hardly classes"
    else:
        return
    raise UsageError(
        f"The target column {shown(name)} of {path} {fault}; write 'task=regression' to fit them as numbers, or "
        f"'categories={option(name)}' to take each for a class."
    )


def _targets(column: pd.Series, path: Path) -> tuple[Tensor, int]:
    """Return (targets float32 [N, 1], 1), the unscaled numbers of a regression's target column."""
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
    not_finite = np.flatnonzero(~np.isfinite(values))
    if len(not_finite):
        raise UsageError(
            f"Row {column.index[not_finite[0]]} of {path} has {column.iloc[not_finite[0]]} in the target column "
            f"{shown(column.name)}; targets must be finite in single precision."
        )
    if values.min() == values.max():
        raise UsageError(
            f"The target column {shown(column.name)} of {path} is {values[0]:g} in every row; there is nothing to fit "
            "(name another column with 'target=')."
        )
    return torch.from_numpy(values)[:, None], 1


def _check_present(column: pd.Series, path: Path) -> None:
    missing = column.index[column.isna()]
    if len(missing):
        raise UsageError(
            f"Row {missing[0]} of {path} has no value in the target column {shown(column.name)}; fill it, or write "
            "'na=' to leave such rows out."
        )


def _check_columns(inputs: pd.DataFrame, path: Path) -> None:
    for name, column in inputs.items():
        if not is_number(column):
            count = column.nunique()
            if count > MAX_CATEGORIES:
                raise UsageError(
                    f"The text column {shown(name)} of {path} has {count} distinct values; one-hot columns stop at "
                    f"{MAX_CATEGORIES}: leave it out by 'drop={option(str(name))}'."
                )
            continue
        values = column.to_numpy(np.float64)
        bad = np.flatnonzero(~(np.abs(values) <= _LARGEST))
        if len(bad):
            where = f"Row {column.index[bad[0]]} of {path} has {column.iloc[bad[0]]} in the column {shown(name)}"
            if np.isnan(values[bad[0]]):
                raise UsageError(f"{where}, no number; fill it, or write 'na=' to leave out rows without one.")
            raise UsageError(f"{where}; numbers must be finite in single precision.")


def _encode(
    inputs: pd.DataFrame, train: NDArray[np.int64], test: NDArray[np.int64], path: Path
) -> tuple[Tensor, Tensor, Columns]:
    """Return training and test features, float32 [N, D], encoded by the training rows' statistics, and the encoding."""
    from sklearn.compose import make_column_selector, make_column_transformer
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    encoder = make_column_transformer(
        (StandardScaler(), make_column_selector(dtype_include="number")),
        (
            OneHotEncoder(handle_unknown="ignore", sparse_output=False),
            make_column_selector(dtype_exclude="number"),
        ),
    )
    fitted = np.asarray(encoder.fit_transform(inputs.iloc[train]))
    categories = inputs.iloc[train].select_dtypes(exclude="number")
    widths = tuple(int(categories[name].nunique(dropna=False)) for name in categories)
    columns = Columns(fitted.shape[1] - sum(widths), widths)
    _check_scales(inputs.iloc[train].select_dtypes(include="number"), fitted[:, : columns.numbers], path)
    x_test = torch.tensor(np.asarray(encoder.transform(inputs.iloc[test])), dtype=torch.float32)
    return torch.tensor(fitted, dtype=torch.float32), x_test, columns


def _check_scales(numbers: pd.DataFrame, scaled: NDArray[np.float64], path: Path) -> None:
    """Refuse numbers that vary too little, relative to their size, to be standardized."""
    for index, name in enumerate(numbers):
        if numbers[name].nunique() > 1 and abs(scaled[:, index].std() - 1) > 0.01:
            raise UsageError(
                f"The numbers of the column {shown(name)} of {path} differ too little beside their size to be "
                "standardized; subtract their mean in the file."
            )
