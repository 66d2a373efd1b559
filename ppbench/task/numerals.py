"""Number formats of tables, and texts that look like numbers, dates or names of rows rather than categories."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ppbench.base.errors import listed, shown

_ASCII: dict[int, int | str] = {
    **{code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)},  # full-width forms
    **dict.fromkeys(map(ord, "\u2212\u2013\u2012\u2011\u2010"), "-"),
    **dict.fromkeys(map(ord, "\u00a0\u202f\u2009\u2007\u3000"), " "),
    **dict.fromkeys(map(ord, "\u2019\u02bc"), "'"),
}
"""ASCII for typographic minus signs, spaces, apostrophes and full-width characters."""
_CURRENCY = r"USD|EUR|GBP|CHF|JPY|CNY|INR|[$€£¥₹]"
_BEFORE = re.compile(rf"^(?:{_CURRENCY}|[\s#~<>=≤≥(*'\"+-])+(?=[\d.,])", re.ASCII)
_BEHIND = re.compile(rf"(?:{_CURRENCY}|[\s%‰°)+*'\"-])+$", re.ASCII)
_BASE_16 = re.compile(r"[+-]?0[xX][0-9a-fA-F]+", re.ASCII)
_WITH_UNIT = re.compile(r"[+-]?\d[\d.,]*\s?[A-Za-zµ/]{1,6}[²³\d]?", re.ASCII)
_DATE = re.compile(
    r"(?:\d{4}[-/](?:0[1-9]|1[0-2])"
    r"|\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](?:\d{4}|\d{2})|\d{1,2}[ -][A-Za-z]{3,9}\.?[ ,-]+\d{2,4}"
    r"|[A-Za-z]{3,9}\.? \d{1,2},? \d{4})(?:[T ,].*)?|\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?: ?[AaPp][Mm])?",
    re.ASCII,
)
_NO_VALUE = frozenset(
    (
        *("", "?", "-", "--", "---", ".", "..", "*", "x", "na", "n/a", "n.a.", "n.a", "none", "nil", "null", "nan"),
        *("missing", "unknown", "undefined", "k.a.", "<na>", "#n/a", "#na", "#div/0!", "#value!", "#null!", "#ref!"),
        *("#num!", "#name?"),
    )
)
"""Entries that people write for a missing value, in lower case."""
MANY_TEXTS = 20
"""Number of distinct texts above which numbers with a unit, and texts that hardly repeat, are no categories."""


@dataclass(frozen=True)
class NumberForm:
    """A number format: the decimal mark, and the separator of thousands ("": none)."""

    decimal: str = "."
    thousands: str = ""

    @property
    def query(self) -> str:
        """The data set options for this format, "decimal=,&thousands=space"; "" for plain numbers."""
        between = {" ": "space"}.get(self.thousands, self.thousands)
        parts = (("decimal", self.decimal if self.decimal != "." else ""), ("thousands", between))
        return "&".join(f"{name}={mark}" for name, mark in parts if mark)

    def read(self, text: str) -> float | None:
        """Return the number in `text`, None if it is none; typographic signs count as ASCII."""
        plain = in_ascii(text.strip())
        if not _pattern(self).fullmatch(plain):
            return None
        return float(plain.replace(self.thousands or "_", "").replace(self.decimal, "."))


@lru_cache
def _pattern(form: NumberForm) -> re.Pattern[str]:
    mark, between = re.escape(form.decimal), re.escape(form.thousands)
    # 1,234,567 and, as India groups them, 12,34,567
    grouped = rf"\d{{1,3}}(?:{between}\d{{3}})+|\d{{1,2}}(?:{between}\d\d)+{between}\d{{3}}|" if between else ""
    return re.compile(rf"[+-]?(?:(?:{grouped}\d+)(?:{mark}\d*)?|{mark}\d+)(?:[eE][+-]?\d+)?", re.ASCII)


_GROUPED = re.compile(r"[+-]?[1-9]\d{0,2}(?:\.\d{3})+", re.ASCII)
_FORMS = tuple(NumberForm(decimal, between) for between in ("", *",. '_") for decimal in ".," if decimal != between)


def doubt(name: str, counts: Mapping[str, int], form: NumberForm) -> str:
    """Return why the texts of a column are unlikely categories, and how to read them; "" if they may be categories.

    counts: number of rows by text. form: the number format of the table. The words follow the column's name in a
    sentence.
    """
    texts = [text for text in counts if text.lower() not in _NO_VALUE]
    advice = f"'categories={option(name)}' to take each text for a category"
    for reason in (
        _numbers(texts, counts, form),
        _signed(texts, counts),
        _dates(name, texts, counts),
        _single(name, counts),
    ):
        if reason:
            return f"{reason}, or write {advice}"
    cases = {text.casefold(): text for text in counts}
    double = next((text for text in counts if cases[text.casefold()] != text), None)
    if double is None:
        return ""
    pair = f"{shown(double, 30)} and {shown(cases[double.casefold()], 30)}"
    return f"holds {pair}, which differ in case alone; write one of them in the file, or write {advice}"


def in_ascii(text: str) -> str:
    """Return a text with typographic minus signs, spaces, apostrophes and digits replaced by ASCII."""
    return text.translate(_ASCII)


def any_number(text: str) -> bool:
    """Return whether a text is a number in some format, possibly with a currency or other signs around it."""
    bare = _BEHIND.sub("", _BEFORE.sub("", in_ascii(text)))
    return bool(_BASE_16.fullmatch(text)) or any(one.read(bare) is not None for one in _FORMS)


def points_group(texts: Collection[str]) -> str:
    """Return one of the texts if their points seem to separate thousands, else "".

    That is if three digits follow every point, and texts without one have at most three: decimals vary in length.
    """
    pointed = [text for text in texts if "." in text]
    others = [text.lstrip("+-") for text in texts if "." not in text]
    if len(pointed) < 2 or not others or not all(_GROUPED.fullmatch(text) for text in pointed):
        return ""
    return pointed[0] if all(text.isdecimal() and len(text) <= 3 for text in others) else ""


def option(value: str) -> str:
    """Return a value escaped for the options behind a "?", where %, & and + are special."""
    return value.replace("%", "%25").replace("&", "%26").replace("+", "%2B")


def _most(some: Collection[str], texts: Collection[str], counts: Mapping[str, int]) -> bool:
    """Return whether `some` are most of the texts, by rows or by distinct ones."""
    return 2 * len(some) > len(texts) or 2 * _rows(some, counts) > _rows(texts, counts)


def _rows(texts: Collection[str], counts: Mapping[str, int]) -> int:
    return sum(counts[text] for text in texts)


def _numbers(texts: Sequence[str], counts: Mapping[str, int], form: NumberForm) -> str:
    hits = {one: [text for text in texts if one.read(text) is not None] for one in dict.fromkeys((form, *_FORMS))}
    if not _most({text for some in hits.values() for text in some}, texts, counts):
        return ""
    rows = max(_rows(some, counts) for some in hits.values())
    costs = {one: _cost(one, form) for one, some in hits.items() if _rows(some, counts) == rows}
    best = [one for one, cost in costs.items() if cost == min(costs.values())]
    numbers = hits[best[0]]
    others = [text for text in counts if text not in numbers]
    example = next((text for text in numbers if text not in hits[form]), numbers[0])
    finding = f"holds numbers written like {shown(example, 30)}"
    if others:
        other_texts = listed([shown(text, 20) for text in others], 60)
        entries = f"{rows} of {sum(counts.values())} entries"
        finding = f"has {entries} that are numbers, as {shown(example, 30)}, others {other_texts}"
    return f"{finding}; {_remedy([one for one in best if one != form], example, others)}"


def _cost(one: NumberForm, form: NumberForm) -> tuple[bool, bool, int]:
    """Return the distance of a format from that of the table; a smaller one explains the same numbers better."""
    return one != form, one.decimal != form.decimal and form != NumberForm(), one.query.count("=")


def _remedy(best: Sequence[NumberForm], example: str, others: Sequence[str]) -> str:
    """Return the advice that reads numbers in one of the formats `best` beside other texts; `best` may be empty."""
    if any(not one.query for one in best):
        return "write numbers in one way in the whole table"
    if len(others) > 3 or any("," in text or any_number(text) for text in others):
        return "repair the other entries"
    marks = [f"na={option(','.join(others))}"] if others else []
    ways = [repr("&".join([one.query, *marks])) for one in best] or [repr(marks[0])]
    if len(best) > 1:
        ways = [f"{way} (that is {one.read(example):.15g})" for way, one in zip(ways, best, strict=True)]
    return f"write {' or '.join(ways)}{' if that is no value (such rows are left out)' if marks else ''}"


def _signed(texts: Sequence[str], counts: Mapping[str, int]) -> str:
    some = [text for text in texts if any_number(text)]
    if not some or not _most(some, texts, counts):
        some = [text for text in texts if _WITH_UNIT.fullmatch(text)]
        if len(some) <= MANY_TEXTS or not _most(some, texts, counts):
            return ""
    example = next((text for text in some if NumberForm().read(text) is None), some[0])
    rows = f"{_rows(some, counts)} of {sum(counts.values())} entries"
    return f"has {rows} that are numbers with signs or units, as {shown(example, 30)}; write bare numbers in the file"


def _dates(name: str, texts: Sequence[str], counts: Mapping[str, int]) -> str:
    some = [text for text in texts if _DATE.fullmatch(text)]
    if not some or not _most(some, texts, counts):
        return ""
    return f"holds dates or times, as {shown(some[0], 30)}; write 'drop={option(name)}' to leave it out"


def _single(name: str, counts: Mapping[str, int]) -> str:
    rows = sum(counts.values())
    if len(counts) <= MANY_TEXTS or 2 * len(counts) <= rows:
        return ""
    finding = f"has {len(counts)} distinct values in {rows} rows, as names of rows or sentences do"
    return f"{finding}; write 'drop={option(name)}' to leave it out"
