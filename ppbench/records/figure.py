"""The form of figures in records, which of several leaks most, and items in groups."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ppbench.base.errors import UsageError
from ppbench.base.registry import load_all
from ppbench.metrics.intervals import Estimate
from ppbench.metrics.spec import MetricSpec
from ppbench.records.schema import CellConfig, Metric, Score, Utility


@dataclass(frozen=True)
class Terms:
    """The inputs of a cell's metrics besides its scores.

    classes: their number, for chance levels; seed: the cell's, every bootstrap draws from (seed, name of the metric);
    delta: of the defense's guarantee, None if it claims none.
    """

    classes: int
    seed: int
    delta: float | None = None


def round_figure(value: float | None) -> float | None:
    """Return `value` with 12 significant digits, as records keep it."""
    return None if value is None else float(f"{value:.12g}")


def record_metric(metric: MetricSpec, figure: Estimate, safer: object = None) -> Metric:
    """Return the record's form of a figure of a metric; TypeError for a name with its `safer` side, the former form."""
    if not isinstance(metric, MetricSpec) or safer is not None:
        raise TypeError(
            "record_metric takes a MetricSpec, which says the safer side; declare it in `specs` of the question, and "
            "write record_metric(SPEC, figure)"
        )
    return Metric(
        name=metric.name,
        value=round_figure(figure.value),
        low=round_figure(figure.interval.low),
        high=round_figure(figure.interval.high),
        method=figure.interval.method,
        n=figure.n,
        higher_is_safer=metric.higher_is_safer,
        reason=figure.reason,
        chance=round_figure(figure.chance),
        realized_fpr=round_figure(figure.realized_fpr),
    )


def bootstrap_seed(seed: int, name: str) -> int:
    """Return the seed of the bootstrap of the metric called `name` in a cell with master seed `seed`."""
    return (seed % 2**32) << 32 | zlib.crc32(name.encode())


def leakage_value(metric: Metric | None, missing: float = -float("inf")) -> float:
    """Return a metric's value such that larger leaks more; `missing` where there is none."""
    if metric is None or metric.value is None:
        return missing
    return -metric.value if metric.higher_is_safer else metric.value


_Item = TypeVar("_Item")
_Group = TypeVar("_Group", bound=Hashable)


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Group]) -> dict[_Group, list[_Item]]:
    """Return items by their `key`, in order of first appearance."""
    groups: dict[_Group, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


class Figured(Protocol):
    """Has figures: a cell, or the worst case over several (`ppbench.report.worst`)."""

    @property
    def config(self) -> CellConfig:
        """The cell's configuration."""

    @property
    def status(self) -> str:
        """Whether it is complete, diverged or failed."""

    @property
    def utility(self) -> Utility:
        """The utility of the delivered model."""

    @property
    def victims(self) -> Sequence[Score]:
        """The victims' scores."""

    def metric(self, name: str) -> Metric | None:
        """Return the aggregate called `name`, or None."""


AnyFigured = TypeVar("AnyFigured", bound=Figured)


def attack_order(config: CellConfig) -> tuple[bool, str]:
    """Return the order of attacks of equal figures: those unaware of the defense first, then by name."""
    return config.attack.adaptive, config.attack.id


def best(records: Iterable[AnyFigured], name: str) -> AnyFigured | None:
    """Return the record that leaks most by a metric, without oracles, or None.

    Ties go to an attack unaware of the defense, since no knowledge was needed, then to the first name and cell.
    """
    figures = [(r.metric(name), r) for r in records if not r.config.attack.oracle]
    leaks = [(leakage_value(m), r) for m, r in figures if m is not None and m.value is not None]
    most = max((leaked for leaked, _ in leaks), default=0.0)
    equal = [record for leaked, record in leaks if leaked == most]
    first = min((attack_order(record.config) for record in equal), default=None)
    equal = [record for record in equal if attack_order(record.config) == first]
    return min(equal, key=lambda r: r.config.cell_id()) if len(equal) > 1 else next(iter(equal), None)


# -- Aggregate per-victim scores to a cell's metrics: a pure function, so that `ppbench verify` can recompute it --
# The question defines the metrics. Figures keep 12 significant digits, so that a last bit that differs between
# processors does not look like a forged record.


def aggregate(victims: Sequence[Score], *, classes: int, seed: int, delta: float | None = None) -> list[Metric]:
    """Return a cell's metrics, each with n, a 95 % interval and its method; no victims: no metrics.

    victims: the per-victim scores, all of one kind; classes, seed, delta: as of `Terms`. UsageError: scores of several
    kinds, or of a question that is not installed.
    """
    kinds = sorted({victim.kind for victim in victims})
    if len(kinds) > 1:
        raise UsageError(f"A cell's victims are scored as {' and '.join(kinds)}; expected one kind.")
    for question in load_all("questions").values() if kinds else ():
        if type(victims[0]) is question.score:  # its class may derive from another question's
            metrics: list[Metric] = question().metrics(victims, Terms(classes, seed, delta))
            return metrics
    if kinds:
        raise UsageError(f"Scores of kind {kinds[0]!r} belong to a question that is not installed here.")
    return []
