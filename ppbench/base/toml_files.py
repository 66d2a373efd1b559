"""Hand-written TOML files: line numbers of their values, and the suites that come with ppbench.

Python's parser reports line numbers for syntax errors only. This module is light, for `ppbench list`.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ppbench.base.errors import UsageError, because

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

__all__ = ["Loc", "TomlFile", "shipped", "suite_titles", "toml_file", "tomllib"]

LARGEST_TOML = 1_000_000
"""Most bytes of a hand-written file; a larger one is something else."""

Loc = tuple[str | int, ...]
_HEADER = re.compile(r"\s*(\[{1,2})\s*([^\[\]]+?)\s*\]{1,2}\s*(?:#.*)?$")
_KEY = re.compile(r"\s*([A-Za-z0-9_.\-\"' ]+?)\s*=")


@dataclass(frozen=True)
class TomlFile:
    """A TOML file: its path, its text and its parsed content."""

    path: Path
    text: str
    raw: dict[str, Any]

    def error(self, loc: Loc, message: str) -> UsageError:
        """Return the error about the value at `loc` (keys and indices from the top): file, line, key, `message`."""
        return UsageError(f"{self.place(loc)}: {message}")

    @contextmanager
    def at(self, loc: Loc) -> Iterator[None]:
        """Add the place of the value at `loc` to a UsageError in the body."""
        try:
            yield
        except UsageError as cause:
            raise self.error(loc, str(cause)) from cause

    def place(self, loc: Loc) -> str:
        """Return the place of the value at `loc`: "FILE, line 12, key defense.2"."""
        existing = self._known(loc)
        line = next((self._lines[existing[:n]] for n in range(len(existing), 0, -1) if existing[:n] in self._lines), 1)
        keys = [str(part + 1) if isinstance(part, int) else str(part) for part in existing or loc]
        return f"{self.path}, line {line}" + (f", key {'.'.join(keys)}" if keys else "")

    def _known(self, loc: Loc) -> Loc:
        """Return the part of `loc` that is in the file: validators append names of their own."""
        value: Any = self.raw
        for n, part in enumerate(loc):
            inside = part in value if isinstance(value, dict) else isinstance(part, int) and isinstance(value, list)
            if not inside:
                # A key that is missing is named, with the line of the table that should have it.
                return loc[: n + 1] if isinstance(value, dict) and n == len(loc) - 1 else loc[:n]
            value = value[part]
        return loc

    @cached_property
    def _lines(self) -> dict[Loc, int]:
        """The line of every table and key, from 1. Keys within inline tables and arrays are not listed."""
        lines: dict[Loc, int] = {}
        count = Counter[str]()
        table: Loc = ()
        for number, line in enumerate(self.text.splitlines(), start=1):
            if header := _HEADER.match(line):
                names = [part.strip("\"' ") for part in header[2].split(".")]
                if header[1] == "[[":
                    count[header[2]] += 1
                table = _indexed(names, count)
                lines.setdefault(table, number)
            elif key := _KEY.match(line):
                place = (*table, *(part.strip("\"' ") for part in key[1].split(".")))
                for n in range(len(table) + 1, len(place) + 1):
                    lines.setdefault(place[:n], number)
        return lines


def _indexed(names: list[str], count: Counter[str]) -> Loc:
    place: list[str | int] = []
    for n, name in enumerate(names, start=1):
        place.append(name)
        if (number := count[".".join(names[:n])]) > 0:
            place.append(number - 1)
    return tuple(place)


def toml_file(path: Path, what: str) -> TomlFile:
    """Return a parsed TOML file; UsageError: it cannot be read, is too large for a `what` ("suite"), or is no TOML."""
    try:
        if path.stat().st_size > LARGEST_TOML:
            raise UsageError(f"{path} has more than {LARGEST_TOML:,} bytes, so it is no {what}; give a TOML file.")
        text = path.read_text(encoding="utf-8")
        return TomlFile(path, text, tomllib.loads(text))
    except OSError as cause:
        raise UsageError(
            f"{path} cannot be read as a {what} ({cause.strerror}); give a file that you may read."
        ) from cause
    except UnicodeDecodeError as cause:
        raise UsageError(f"{path} cannot be read as a {what} ({because(cause)}); it must be text in UTF-8.") from cause
    except RecursionError as cause:
        raise UsageError(f"{path} is nested too deep for a {what}, whose tables nest three levels at most.") from cause
    except ValueError as cause:  # a TOML error, or a number of more digits than Python reads
        raise UsageError(f"{path} is no TOML: {because(cause)}.") from cause


# -- Suites that come with ppbench --

SUITES_FOLDER = Path(__file__).parents[1] / "suites"


def shipped() -> dict[str, Path]:
    """Return the files of the suites that come with ppbench, by name."""
    return {path.stem: path for path in sorted(SUITES_FOLDER.glob("*.toml"))}


def suite_titles() -> dict[str, str]:
    """Return their titles by name, each with its presets: "... (presets: two-cores)"."""
    by_name = {}
    for name, path in shipped().items():
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        presets = ", ".join(raw.get("preset", {}))
        by_name[name] = str(raw.get("title", "")) + (f" (presets: {presets})" if presets else "")
    return by_name
