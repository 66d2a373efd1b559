"""The form that figures have in records."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from ppbench.metrics.intervals import Estimate
from ppbench.records.schema import Metric


@dataclass(frozen=True)
class Terms:
    """What a cell's metrics depend on beside its scores.

    Attributes:
        classes: number of classes, for chance levels.
        seed: the cell's; every bootstrap draws from (seed, name of the metric).
        delta: of the guarantee that the defense claims; None: it claims none.
    """

    classes: int
    seed: int
    delta: float | None = None


def rounded(value: float | None) -> float | None:
    """Return `value` with 12 significant digits: what records keep."""
    return None if value is None else float(f"{value:.12g}")


def metric_of(name: str, figure: Estimate, safer: bool) -> Metric:
    """Return the record's form of a figure. safer: whether a higher value means less leakage."""
    return Metric(
        name=name,
        value=rounded(figure.value),
        low=rounded(figure.interval.low),
        high=rounded(figure.interval.high),
        method=figure.interval.method,
        n=figure.n,
        higher_is_safer=safer,
        reason=figure.reason,
        chance=rounded(figure.chance),
        realized_fpr=rounded(figure.realized_fpr),
    )


def seed_of(seed: int, name: str) -> int:
    """Return the seed of the bootstrap of the metric called `name` in a cell with master seed `seed`."""
    return (seed % 2**32) << 32 | zlib.crc32(name.encode())
