"""What a metric is, declared once: names, unit, meaning, safer side, decimals, columns, and the rule of comparison.

Metrics of victims are declared beside the question that computes them (`Question.specs`), those of the delivered model
here (`MODEL_METRICS`). Tables, the page, docs/columns.md and `ppbench compare` read these declarations.
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


# -- Metrics of the delivered model --


UTILITY_TOLERANCE = 0.01
"""Tolerance of an accuracy or a Dice coefficient; of a mean squared error relative."""
UTILITY_LUCK = 0.5 * UTILITY_TOLERANCE
"""Luck of training of an accuracy; see `Rule.luck`."""
_JUDGED = Judgment("mean", UTILITY_TOLERANCE, UTILITY_LUCK)


@dataclass(frozen=True, kw_only=True)
class ModelMetric(MetricSpec):
    """One metric of the delivered model; a field of `Utility` has its name, and safer means better.

    low, high: the fields with the ends of its interval; constant: those with the value of the best constant answer, the
    first that is known counts; relative: whether tolerance and luck are shares of the value; unless: the metric beside
    which it is not judged, "" for none.
    """

    low: str
    high: str
    constant: tuple[str, ...] = ()
    relative: bool = False
    unless: str = ""

    def field(self, ending: Ending) -> str:
        """Return the field of `Utility` with the value ("") or an end of the interval ("_low", "_high")."""
        return {"": self.name, "_low": self.low, "_high": self.high}[ending]


ACCURACY = ModelMetric(
    "accuracy",
    "Accuracy",
    SHARE,
    "Accuracy of the delivered model on the test part.",
    higher_is_safer=True,
    judgment=_JUDGED,
    low="low",
    high="high",
    constant=("constant", "chance"),
)
ACCURACY_TOP5 = ModelMetric(
    "accuracy_top5",
    "Top-5 accuracy",
    SHARE,
    "Share whose class is among the five likeliest; only for more than ten classes.",
    higher_is_safer=True,
    short="",
    low="accuracy_top5_low",
    high="accuracy_top5_high",
)
DICE = ModelMetric(
    "dice",
    "Dice",
    SHARE,
    "Mean Dice coefficient per image of the delivered model where targets are masks.",
    higher_is_safer=True,
    short="",
    columns=(),
    judgment=_JUDGED,
    low="dice_low",
    high="dice_high",
)
MSE = ModelMetric(
    "mse",
    "MSE",
    "squared targets",
    "Mean squared error of the delivered model where targets are numbers.",
    digits=4,
    judgment=_JUDGED,
    low="mse_low",
    high="mse_high",
    constant=("constant_mse",),
    relative=True,
    unless="accuracy",
)
MODEL_METRICS: Final = {spec.name: spec for spec in (ACCURACY, ACCURACY_TOP5, DICE, MSE)}
"""Every metric of the delivered model by name."""
