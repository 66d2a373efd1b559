"""CSV files as rows of named columns: separator, encoding, header, and row lengths."""

from __future__ import annotations

import codecs
import csv
import gzip
import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, cast, get_args
from urllib.parse import parse_qsl

from ppbench.base.errors import UsageError, because, shown, unknown
from ppbench.base.files import kind_of
from ppbench.task.numerals import NumberForm, any_number, in_ascii, option, points_group

if TYPE_CHECKING:
    import pandas as pd


# -- The options behind the "?" in the name of a csv data set --

CSV_FORM = "target=NAME&sep=CHARACTER&split=8:1:1&task=regression"
_CHARACTERS = {"tab": "\t", "\\t": "\t", "space": " "}
CsvTask = Literal["classification", "regression"]


@dataclass(frozen=True)
class CsvOptions:
    """How to read a csv file, see `table.load`; None for options that were not stated.

    header: the line of the names, from 1; 0 for a file without. na: texts that mean no value, beside the usual ones.
    categories, drop: names of columns separated by commas, see `named_columns`.
    """

    target: str | None = None
    task: CsvTask = "classification"
    split: tuple[int, int, int] = (4, 0, 1)
    sep: str | None = None
    encoding: str | None = None
    header: int | None = None
    decimal: str | None = None
    thousands: str = ""
    na: tuple[str, ...] | None = None
    categories: str = ""
    drop: str = ""

    @property
    def form(self) -> NumberForm:
        """The format of its numbers."""
        return NumberForm(self.decimal or ".", self.thousands)


def options_of(query: str) -> CsvOptions:
    """Return the options in `query`, "target=y&sep=;". UsageError: one is unknown or has an unusable value."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as cause:
        raise UsageError(f"The csv options {shown(query)} are malformed; write '{CSV_FORM}'.") from cause
    values = dict(pairs)
    for name, _ in pairs:
        if name not in _READERS:
            raise unknown("csv option", name, _READERS)
    if len(values) < len(pairs):
        raise UsageError(f"The csv options {shown(query)} name one option twice; write each once, lists with commas.")
    options = CsvOptions(**{name: read(values[name]) for name, read in _READERS.items() if name in values})
    for name, mark in (("decimal", options.form.decimal), ("thousands", options.thousands)):
        if mark.isalnum() or mark in ("+", "-", '"') or (name == "thousands" and mark == options.form.decimal):
            raise UsageError(f"The csv option {name}={shown(mark)} cannot be used; write e.g. 'decimal=,&thousands=.'.")
    return options


def named_columns(text: str, known: Sequence[str]) -> list[str]:
    """Return the columns that an option names, separated by commas; UsageError: a column does not exist."""
    text = text.strip()
    names = [text] if text in known else [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise unknown("column", name, known)
    return names


def _task(name: str) -> str:
    if name not in get_args(CsvTask):
        raise unknown("csv task", name, get_args(CsvTask))
    return name


def _character(name: str, text: str) -> str:
    character = _CHARACTERS.get(text, text if name == "sep" else in_ascii(text))
    if len(character) != 1:
        example = {"sep": "'sep=;' or 'sep=tab'", "decimal": "'decimal=,'"}.get(
            name, "'thousands=.' or 'thousands=space'"
        )
        raise UsageError(f"The csv option {name}={shown(text)} is not one character; write e.g. {example}.")
    return character


def _encoding(name: str) -> str | None:
    try:
        "".encode(name)
        return None if codecs.lookup(name).name == "utf-8" else name  # that is the default, with or without a mark
    except (LookupError, ValueError) as cause:  # unknown, no encoding of texts, or a zero byte
        raise UsageError(
            f"The csv option encoding={shown(name)} is no encoding; write e.g. 'encoding=cp1252' or 'encoding=utf-16'."
        ) from cause


def _line(text: str) -> int:
    if text != "none" and not re.fullmatch(r"[1-9]\d{0,5}", text, re.ASCII):
        raise UsageError(
            f"The csv option header={shown(text)} cannot be used; write 'header=none' for a file without names of "
            "columns, or the line of the names, as 'header=1'."
        )
    return 0 if text == "none" else int(text)


def _shares(text: str) -> tuple[int, int, int]:
    parts = re.fullmatch(r"(\d{1,6}):(\d{1,6}):(\d{1,6})", text, re.ASCII)
    train, validation, test = map(int, parts.groups()) if parts else (0, 0, 0)
    if train == 0 or test == 0:
        raise UsageError(
            f"The csv option split={shown(text)} cannot be used; write shares of training, validation and test as "
            "whole numbers, as 'split=8:1:1' or 'split=4:0:1', training and test above 0."
        )
    return train, validation, test


_READERS: Mapping[str, Callable[[str], Any]] = {
    "task": _task,
    "target": str.strip,
    "split": _shares,
    "sep": partial(_character, "sep"),
    "encoding": _encoding,
    "header": _line,
    "decimal": partial(_character, "decimal"),
    "thousands": partial(_character, "thousands"),
    "na": lambda text: tuple(mark.strip() for mark in text.split(",")),
    "categories": str,
    "drop": str,
}
"""What reads the text of each option of `CsvOptions`."""


_SEPARATORS = (",", ";", "\t", "|")
LONGEST_LINE = 1_000_000
"""Most characters of a line."""
_SNIFFED = 50
"""Lines after the first that are read to determine the separator."""
_SEEN = 1000
"""Rows at the start that are examined for the meaning of points in numbers."""
LARGEST_TABLE = 2**30
"""Most bytes of a table, unpacked."""


@dataclass(frozen=True)
class _Layout:
    """names: of the columns; sep: their separator; lines: physical lines before the first row."""

    names: list[str]
    sep: str
    lines: int


def csv_frame(path: Path, options: CsvOptions) -> pd.DataFrame:
    """Return the rows of a CSV file: columns of numbers as pandas reads them, other columns as texts.

    If `options` state the format of numbers, and in columns that they name categories, all entries are texts; columns
    that they drop are left out. UsageError: the file is no table, its rows are not as long as its header, or names are
    missing, repeated, or look like a row.
    """
    try:
        _check_bytes(path)
        with _opened(path, options) as file:
            layout = _layout(file, path, options)
        frame = _read(path, options, layout)
    except UnicodeDecodeError as cause:
        raise UsageError(f"{path} is not written in {options.encoding or 'UTF-8'}; {_encoding_hint(path)}.") from cause
    except (OSError, EOFError, ValueError, csv.Error, zlib.error, OverflowError, MemoryError) as cause:
        # pandas' and Unicode errors are ValueErrors
        raise UsageError(
            f"{path} cannot be read as a table ({because(cause)}); it must be UTF-8 CSV with a header."
        ) from cause
    if len(frame.columns) < 2 or len(frame) == 0:
        raise UsageError(
            f"{path} has {len(frame)} rows and {len(frame.columns)} columns when split at {shown(layout.sep)}; it "
            "needs rows, and at least one feature beside the target (name another separator with 'sep=')."
        )
    if options.header is None:
        _check_names(frame, path)
    return frame


def _read(path: Path, options: CsvOptions, layout: _Layout) -> pd.DataFrame:
    """Return the rows after the header; refuse what pandas would silently read wrongly."""
    import pandas as pd

    dropped, texts = (named_columns(text, layout.names) for text in (options.drop, options.categories))
    columns = [name for name in layout.names if name not in dropped]
    with _opened(path, options) as file:
        rows = _checked(_body(file, path, layout.lines), layout, path, {*texts, *dropped})
    if options.decimal is None and not options.thousands:
        _check_points(rows, layout, path, {*texts, *dropped})
    with _opened(path, options) as file:
        for _ in range(layout.lines):
            file.readline()
        return pd.read_csv(
            file,
            sep=layout.sep,
            header=None,
            names=layout.names,
            usecols=columns,
            low_memory=False,
            skipinitialspace=True,
            na_values=list(options.na or ()),
            dtype={name: str for name in columns if name in texts or options.form != NumberForm()},
        )


@contextmanager
def _opened(path: Path, options: CsvOptions) -> Iterator[IO[str]]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding=options.encoding or "utf-8-sig", newline="") as file:
        yield cast(IO[str], file)


def _encoding_hint(path: Path) -> str:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        start = file.read(4)
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "write 'encoding=utf-16'"
    if start[:2] in (b"\x1f\x8b", b"PK"):
        return "it is an archive or a workbook: save it as UTF-8 CSV, or call it .gz if it is gzip's"
    return "save it as UTF-8 CSV, or name its encoding, as 'encoding=cp1252'"


def _lines(file: IO[str], path: Path) -> Iterator[str]:
    """Yield the physical lines of a file; UsageError: one is too long, or has a zero byte."""
    while line := file.readline(LONGEST_LINE):
        if len(line) == LONGEST_LINE:
            raise UsageError(f"{path} is no table: one of its lines does not end within {LONGEST_LINE:,} characters.")
        if "\0" in line:
            raise UsageError(f"{path} is no table: it holds zero bytes; if it is UTF-16, write 'encoding=utf-16-le'.")
        yield line


def _body(file: IO[str], path: Path, lines: int) -> Iterator[str]:
    """Return an iterator over the physical lines after the first `lines`."""
    all_lines = _lines(file, path)
    for _ in range(lines):
        next(all_lines, "")
    return all_lines


def _layout(file: IO[str], path: Path, options: CsvOptions) -> _Layout:
    """Return the layout of a file at its start, by its header or, without one, by its first line."""
    before = max((options.header or 1) - 1, 0)
    lines = _body(file, path, before)
    first = next(lines, "")
    while options.header is None and first and not first.strip():
        first, before = next(lines, ""), before + 1
    if options.header is None and first.startswith("#"):
        place = next((number for number, line in enumerate(lines, before + 2) if not line.startswith("#")), before + 2)
        raise UsageError(
            f"Line {before + 1} of {path} begins with '#'; say which line has the names of the columns, as "
            f"'header={place}', or 'header={before + 1}' if that one has."
        )
    if options.header is None and first.lstrip()[:1] in ("{", "[", "<"):
        raise UsageError(f"{path} begins with {shown(first.strip(), 30)}, as JSON or HTML do; it must be CSV.")
    start = [first, *islice(lines, _SNIFFED)]
    sep = options.sep or _separator(start, path)
    reader = csv.reader(start, delimiter=sep, skipinitialspace=True)
    names = [name.strip() for name in next(reader, [])]
    if options.header == 0:
        return _Layout([str(place + 1) for place in range(len(names))], sep, 0)
    double = next((name for name, count in Counter(names).items() if count > 1 and name), None)
    if double is not None:
        raise UsageError(
            f"Duplicate names are in {path}: two columns are called {shown(double)}; rename one, or write "
            "'header=none' if the file has no names."
        )
    named = [name or str(place + 1) for place, name in enumerate(names)]
    if options.header is None:
        _check_header(names, named, options, path)
    return _Layout(named, sep, before + reader.line_num)


def _separator(lines: Sequence[str], path: Path) -> str:
    """Return the one separator that splits all lines into equally many fields, else the best of the first line."""
    widths = {sep: [len(row) for row in csv.reader(lines, delimiter=sep) if row] for sep in _SEPARATORS}
    consistent = [sep for sep, counts in widths.items() if len({*counts}) == 1 and counts[0] > 1]
    if len(consistent) > 1:
        raise UsageError(
            f"{path} may be separated by {shown(consistent[0])} or by {shown(consistent[1])}; say by which, as "
            f"'sep={consistent[1]}'."
        )
    return consistent[0] if consistent else max(_SEPARATORS, key=lambda sep: max(widths[sep][:1], default=0))


def _check_header(names: Sequence[str], named: Sequence[str], options: CsvOptions, path: Path) -> None:
    """Refuse names that look like a row of data, and unnamed columns that are not dropped (UsageError)."""
    number = next((name for name in names if any_number(name)), None)
    if number is not None:
        raise UsageError(
            f"The header of {path} has the number {shown(number)} for a name; write 'header=none' if the file has no "
            "names of columns, or 'header=1' if these are."
        )
    dropped = named_columns(options.drop, named)
    for place, name in enumerate(names, 1):
        if not name and named[place - 1] not in dropped:
            raise UsageError(
                f"Column {place} of {path} has no name; leave it out by 'drop={place}', or say which line has "
                "the names, as 'header=2' ('header=1': this one)."
            )


def _check_names(frame: pd.DataFrame, path: Path) -> None:
    """Refuse a header with a name that is also an entry of its column (UsageError)."""
    from pandas.api.types import is_bool_dtype, is_numeric_dtype

    for name, column in frame.items():
        if not is_numeric_dtype(column) or is_bool_dtype(column):
            texts = {str(value).strip().lower() for value in column.dropna().unique()}
            if str(name).lower() in texts:
                raise UsageError(
                    f"The name {shown(name)} of a column of {path} stands among its entries, too; write 'header=none' "
                    "if the file has no names of columns, 'header=1' if it is one, or remove lines that repeat it."
                )


def _checked(lines: Iterator[str], layout: _Layout, path: Path, unchecked: Collection[str]) -> list[list[str]]:
    """Return the first rows. UsageError: a row is not as long as the header, or a column not in `free` has "0123"."""
    reader = csv.reader(lines, delimiter=layout.sep, skipinitialspace=True)
    width = len(layout.names)
    rows: list[list[str]] = []
    codes: dict[int, str] = {}
    for row in reader:
        if len(row) != width:
            if len(row) > 1 or any(field.strip() for field in row):
                raise _uneven(len(row), layout, layout.lines + reader.line_num, path)
            continue
        if len(rows) < _SEEN:
            rows.append(row)
        for index, field in enumerate(row):
            if "00" <= field < "0:" and field.strip().isdecimal():  # a zero, and a digit
                codes.setdefault(index, field.strip())
    for index, code in codes.items():
        name = layout.names[index]
        if name not in unchecked:
            raise UsageError(
                f"The column {shown(name)} of {path} holds {shown(code)}, which begins with a zero as codes do; write "
                f"'categories={option(name)}' to take each for a category, 'drop={option(name)}' to leave it out, or "
                "the numbers without such zeros."
            )
    return rows


def _uneven(fields: int, layout: _Layout, line: int, path: Path) -> UsageError:
    which = "more" if fields > len(layout.names) else "fewer"
    return UsageError(
        f"Line {line} of {path} has {which} fields than its header: {fields}, not {len(layout.names)}, when split at "
        f"{shown(layout.sep)}; repair it, or say with 'sep=' what separates fields and with 'header=' which line has "
        "the names."
    )


def _check_points(rows: Sequence[Sequence[str]], layout: _Layout, path: Path, unchecked: Collection[str]) -> None:
    """Refuse columns of numbers whose points seem to separate thousands, but would be read as decimal points."""
    for index, name in enumerate(layout.names):
        example = "" if name in unchecked else points_group({row[index].strip() for row in rows} - {""})
        if example:
            raise UsageError(
                f"The column {shown(name)} of {path} holds numbers such as {shown(example)} beside whole numbers below "
                "1000, as where points stand between thousands; write 'decimal=,&thousands=.' if they do, or "
                "'decimal=.' if not."
            )


def _check_bytes(path: Path) -> None:
    """Refuse a table of more than `LARGEST_TABLE` bytes (UsageError); an archive is unpacked to count them."""
    if kind_of(path) != "file":
        raise UsageError(f"{path} cannot be read as a table (it is no file); it must be UTF-8 CSV with a header.")
    size = 0
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        while chunk := file.read(1 << 20):
            size += len(chunk)
            if size > LARGEST_TABLE:
                raise UsageError(f"{path} holds more than {LARGEST_TABLE:,} bytes; tables end there: take fewer rows.")
