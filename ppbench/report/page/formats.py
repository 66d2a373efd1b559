"""Figures as the page shows them."""

from __future__ import annotations

from ppbench.records.schema import Metric, Utility


def number(value: float | None, digits: int = 2) -> str:
    """Return a figure with `digits` decimals, "n/a" for null, scientific from a million on."""
    if value is None:
        return "n/a"
    return f"{value:.2e}" if abs(value) >= 1e6 else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """Return a share as a percentage with one decimal, "n/a" for null."""
    return "n/a" if value is None else f"{100 * value:.1f} %"


def error(value: float | None) -> str:
    """Return a relative error as a percentage, from 10 on as a factor: "1.2 %", "98 times"; "n/a" for null."""
    if value is None:
        return "n/a"
    return f"{100 * value:.1f} %" if value < 10 else f"{value:.3g} times"


def span(estimate: Metric | Utility, factor: float = 1.0) -> str:
    """Return the interval of a figure, times `factor`, with one decimal: "17.2–19.7"; "" without one."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{factor * estimate.low:.1f}–{factor * estimate.high:.1f}"  # noqa: RUF001 - a range takes an en dash


def size(value: float | None) -> str:
    """Return bytes in B, kB, MB or GB (powers of 1000)."""
    if value is None:
        return "n/a"
    units = (
        f"{value / factor:.1f} {unit}" for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if value >= factor
    )
    return next(units, f"{value:.0f} B")


def seconds(value: float) -> str:
    """Return a time in s, ms or µs with three digits."""
    unit, factor = next((pair for pair in (("s", 1.0), ("ms", 1e-3)) if value >= pair[1]), ("µs", 1e-6))
    return f"{value / factor:.3g} {unit}"
