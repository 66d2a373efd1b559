"""Which parameters a usual run asks of a long test: the others are left to the nightly run."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

SMALL_BOARD = "bank-marketing-two-cores"


def every_third(values: Iterable[Any]) -> list[Any]:
    """Return parameters, of which every third runs daily."""
    return every_third_row((value,) for value in values)


def every_third_row(rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return rows of parameters, of which every third runs daily."""
    return [pytest.param(*row, marks=[pytest.mark.nightly] if place % 3 else []) for place, row in enumerate(rows)]


def all_but_nightly(values: Iterable[Any], nightly: Iterable[Any]) -> list[Any]:
    """Return parameters, of which those in `nightly` are left to the nightly run."""
    late = list(nightly)
    return [pytest.param(value, marks=[pytest.mark.nightly] if value in late else []) for value in values]


def boards(paths: Iterable[Path]) -> list[Any]:
    """Return paths in folders of committed boards as parameters, of which a small board runs daily."""
    paths = list(paths)
    return all_but_nightly(paths, [path for path in paths if path.parent.name != SMALL_BOARD])
