"""What a metric is, declared once: names, unit, meaning, safer side, decimals, columns, and the rule of comparison.

Metrics of victims are declared beside the question that computes them (`Question.specs`), those of the delivered model
beside their fields (`MODEL_METRICS` in `ppbench/records/schema.py`). Tables, the page, docs/columns.md and
`ppbench compare` read these declarations.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Final, Literal

RuleForm = Literal["mean", "decision", "median", "auc", "tpr", "epsilon"]
Subset = Literal["all", "average", "canaries"]
Ending = Literal["", "_low", "_high", "_chance"]
VALUE: Final[tuple[Ending, ...]] = ("",)
INTERVAL: Final[tuple[Ending, ...]] = ("", "_low", "_high")
CHANCE: Final[tuple[Ending, ...]] = (*INTERVAL, "_chance")
"""Endings of the columns that a metric has in leaderboard.csv: the value, the ends of its interval, its chance."""
SHARE, DB = "share", "dB"
"""Units of metrics."""


@dataclass(frozen=True)
class Rule:
    """One metric that `ppbench compare` judges.

    metric, name: its names in records and in rows; subset: the victims that count; form: the statistic ("decision": a
    mean of yes or no); tolerance: the change for the worse that counts, in the metric's unit; safer: whether a higher
    value leaks less; luck: standard deviation between trainings with other draws, beyond what the victims explain;
    digits: decimals of a row's figures; first: whether the headline of a point is judged by it before all others.
    """

    metric: str
    name: str
    subset: Subset
    form: RuleForm
    tolerance: float
    safer: bool
    luck: float
    digits: int = 3
    first: bool = False


@dataclass(frozen=True)
class Judgment:
    """How a metric is compared: the fields of `Rule` that are not the metric's own; name: "" for the metric's."""

    form: RuleForm
    tolerance: float
    luck: float
    _: KW_ONLY
    subset: Subset = "all"
    name: str = ""
    digits: int = 3
    first: bool = False


@dataclass(frozen=True)
class MetricSpec:
    """One metric.

    name: in records and tables; title: head of its column on boards, and its name in sentences; unit: "" without one;
    meaning: a sentence; higher_is_safer: whether a higher value leaks less; digits: decimals in the page's table of all
    cells; short: head of its column there, None: `title`, "": it has none; columns: what leaderboard.csv has of it;
    judgment: how `ppbench compare` judges it, None: not at all.
    """

    name: str
    title: str
    unit: str = ""
    meaning: str = ""
    _: KW_ONLY
    higher_is_safer: bool = False
    digits: int = 3
    short: str | None = None
    columns: tuple[Ending, ...] = INTERVAL
    judgment: Judgment | None = None

    @property
    def head(self) -> str:
        """The head of its column in the page's table of all cells; "" if it has none."""
        return self.title if self.short is None else self.short

    @property
    def rule(self) -> Rule | None:
        """The rule by which it is compared, or None."""
        one = self.judgment
        if one is None:
            return None
        return Rule(
            self.name, one.name or self.name, one.subset, one.form, one.tolerance, self.higher_is_safer, one.luck,
            one.digits, one.first,
        )  # fmt: skip
