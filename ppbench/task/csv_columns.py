"""Types of table columns, numbers or categories; a column that looks like the other type is refused."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ppbench.base.errors import UsageError, shown
from ppbench.task.csv_options import CsvOptions, named_columns
from ppbench.task.numerals import doubt, option

if TYPE_CHECKING:
    import pandas as pd

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
