"""The options behind the "?" in the name of a csv data set."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, cast, get_args
from urllib.parse import parse_qsl

from ppbench.base.errors import UsageError, shown, unknown
from ppbench.task.numerals import NumberForm, in_ascii

CSV_FORM = "target=NAME&sep=CHARACTER&split=8:1:1&task=regression"
_DEFAULT_SPLIT = (4, 0, 1)
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
    split: tuple[int, int, int] = _DEFAULT_SPLIT
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


OPTION_NAMES = tuple(field.name for field in fields(CsvOptions))


def options_of(query: str) -> CsvOptions:
    """Return the options in `query`, "target=y&sep=;". UsageError: one is unknown or has an unusable value."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as cause:
        raise UsageError(f"The csv options {shown(query)} are malformed; write '{CSV_FORM}'.") from cause
    values = dict(pairs)
    for name, _ in pairs:
        if name not in OPTION_NAMES:
            raise unknown("csv option", name, OPTION_NAMES)
    if len(values) < len(pairs):
        raise UsageError(f"The csv options {shown(query)} name one option twice; write each once, lists with commas.")
    task = values.get("task", "classification")
    if task not in get_args(CsvTask):
        raise unknown("csv task", task, get_args(CsvTask))
    options = CsvOptions(
        target=values["target"].strip() if "target" in values else None,
        task=cast(CsvTask, task),
        split=_shares(values.get("split")),
        sep=_character("sep", values["sep"]) if "sep" in values else None,
        encoding=_encoding(values["encoding"]) if "encoding" in values else None,
        header=_line(values["header"]) if "header" in values else None,
        decimal=_character("decimal", values["decimal"]) if "decimal" in values else None,
        thousands=_character("thousands", values["thousands"]) if "thousands" in values else "",
        na=tuple(mark.strip() for mark in values["na"].split(",")) if "na" in values else None,
        categories=values.get("categories", ""),
        drop=values.get("drop", ""),
    )
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


def _shares(text: str | None) -> tuple[int, int, int]:
    if text is None:
        return _DEFAULT_SPLIT
    parts = re.fullmatch(r"(\d{1,6}):(\d{1,6}):(\d{1,6})", text, re.ASCII)
    train, validation, test = map(int, parts.groups()) if parts else (0, 0, 0)
    if train == 0 or test == 0:
        raise UsageError(
            f"The csv option split={shown(text)} cannot be used; write shares of training, validation and test as "
            "whole numbers, as 'split=8:1:1' or 'split=4:0:1', training and test above 0."
        )
    return train, validation, test
