"""The contract of a question: what is asked, what is answered, how it is scored, and how its figures are shown.

A record names its question (`AttackInfo.kind`); runner, boards, tables, sentences, comparisons and batteries look the
question up and ask it. Reading records loads every question, so these modules import torch only where they need it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ppbench.base.blame import guard
from ppbench.base.errors import UsageError
from ppbench.base.registry import load, load_all, plugins
from ppbench.questions.inquiry import Audit, Inquiry, Model, Probe
from ppbench.records.figure import Figured, Terms, best
from ppbench.records.schema import CellConfig, Metric, Record, Score
from ppbench.records.scores import OtherScore

if TYPE_CHECKING:
    from ppbench.adversary.attack import Challenge, Guess
    from ppbench.federation.plan import Plan
    from ppbench.records.store import CellImages

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class DistanceLaw:
    """How far an attack stayed from its goal, as a function of one metric; larger is safer.

    name: with its version, as "label/1"; of: from the metric's value, scalar or array; words: for the axis of a figure.
    """

    name: str
    metric: str
    of: Callable[[Any], Any]
    words: str


@dataclass(frozen=True)
class Rule:
    """One metric that `ppbench compare` judges.

    metric, name: its names in records and in rows; subset: of which victims; form: the statistic ("decision": a mean of
    yes or no); tolerance: how much worse counts, in the metric's own unit; safer: whether a higher value leaks less;
    luck: standard deviation over trainings that differ in their draws alone, beyond what its victims explain.
    """

    metric: str
    name: str
    subset: Literal["all", "average", "canaries"]
    form: Literal["mean", "decision", "median", "auc", "tpr", "epsilon"]
    tolerance: float
    safer: bool
    luck: float


def rest(value: Any) -> Any:
    """Return 1 - value: the distance of a share of right answers."""
    return 1 - value


class Question:
    """A question; an instance has no state.

    Class attributes a question sets:
        name: the word in records, in an attack's `kind`.  title: of its board.
        score: what is kept of each victim.
        source: what is asked about: clients that are probed, or a model that the adversary holds.
        reads: whether its attacks read probed clients' uploads; where nothing can be read the cell fails.
        follows: the question whose answers its challenges hold, "" for none.
        owners: clients whose batches the victims must be of, at least: fewer can tell nothing, and no cell is made.
        audits: whether all its attacks are asked in audits too, and not only those that need one.
        inputs: whether answers are inputs, measured as such (decibels, perceptual distances) and kept.
        board: the question on whose board its cells stand, "" for its own.  order: of its board among others.
        distances: what goes into a CAP, the main one first.
        figures: its metrics with their titles, the first one the headline, unless methods say otherwise.
        rules: what `ppbench compare` judges.
        chart: what is drawn of a board beside accuracy over distance: success over the budget, or ROC curves.
        intended: stages at which the model is delivered for what is asked; then nothing is ranked.
        noise: whether uploads of pure noise must hide what is asked, so that `full_noise` is a control.
        chapter: where its cells are told of: "uploads" and "models" are tables and sentences of the harness, which has
            columns for them; "" for a question that brings its own: columns and sentences by `figures`.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    score: ClassVar[type[Score]]
    source: ClassVar[Literal["probe", "model"]] = "probe"
    reads: ClassVar[bool] = True
    follows: ClassVar[str] = ""
    owners: ClassVar[int] = 1
    audits: ClassVar[bool] = False
    inputs: ClassVar[bool] = False
    board: ClassVar[str] = ""
    order: ClassVar[int] = 100
    distances: ClassVar[tuple[DistanceLaw, ...]]
    figures: ClassVar[tuple[tuple[str, str], ...]]
    rules: ClassVar[tuple[Rule, ...]] = ()
    chart: ClassVar[Literal["budget", "roc", ""]] = ""
    intended: ClassVar[tuple[str, ...]] = ()
    noise: ClassVar[bool] = True
    chapter: ClassVar[Literal["uploads", "models", ""]] = ""

    # -- asked and scored ----------------------------------------------------------------------------------------------
    def of_probe(self, probe: Probe) -> Inquiry:
        """Return what is asked about probed clients. Raises UsageError where the question is none about them."""
        raise UsageError(f"Question {self.name!r} is not asked about probed clients; leave its attacks out.")

    def of_model(self, model: Model) -> Inquiry:
        """Return what is asked about a model. Raises UsageError where the question is none about models."""
        raise UsageError(f"Question {self.name!r} is not asked about models; leave its attacks out.")

    def of_audit(self, audit: Audit) -> Inquiry:
        """Return what is asked in an audit. Raises UsageError where the question is none of audits."""
        raise UsageError(f"Question {self.name!r} is not asked about audits; leave its attacks out.")

    def malformed(self, guess: Guess, challenge: Challenge, plan: Plan) -> Iterator[str]:
        """Yield what is wrong with an answer's form, for the battery of attacks. Default: nothing."""
        return iter(())

    def metrics(self, scores: Sequence[Any], terms: Terms) -> list[Metric]:
        """Return a cell's metrics, a pure function; `scores` are this question's, at least one."""
        raise NotImplementedError

    def worth(self, scores: Sequence[Any], plan: Plan) -> float:
        """Return how good answers on tuning victims are, larger being better. Default: by the first metric."""
        if not scores:
            return 0.0
        first = self.metrics(scores, Terms(plan.spec.classes, 0))[0]
        return (first.value or 0.0) * (-1 if first.higher_is_safer else 1)

    # -- checked again ------------------------------------------------------------------------------------------------
    def flawed(self, record: Record) -> Iterator[str]:
        """Yield what a record's scores and flags say of one another that does not fit, a clause each; none is known."""
        return iter(())

    def contradicted(self, record: Record, images: CellImages) -> Iterator[str]:
        """Yield what a record's scores say that its kept images do not give, a clause each. Default: nothing."""
        return iter(())

    # -- shown ---------------------------------------------------------------------------------------------------------
    def headline(self, config: CellConfig) -> str:
        """Return the metric that a board of such cells ranks by. Default: the first of `figures`."""
        return self.figures[0][0]

    def distance(self, name: str | None = None) -> DistanceLaw | None:
        """Return the distance of this name, by default the main one; None where there is none."""
        return next((law for law in self.distances if name in (None, law.name)), None)

    def columns(self, headline: str) -> tuple[tuple[str, str], ...]:
        """Return the metrics of a board's row with their titles. Default: `figures`."""
        return self.figures

    def judged(self, score: Any, metric: str) -> float:
        """Return a victim's value under a rule; failures count as failures. Raises KeyError: no such rule."""
        raise KeyError(metric)

    def together(self, score: Any, config: CellConfig) -> tuple[int, ...]:
        """Return what a victim was judged with: victims alike in it are drawn together. Default: its unit."""
        unit: tuple[int, ...] = score.unit
        return unit

    def rules_of(self, config: CellConfig) -> tuple[Rule, ...]:
        """Return the rules that such a cell is judged by. Default: all."""
        return self.rules

    def blind(self, scores: Sequence[Any], config: CellConfig) -> tuple[float, int, float] | None:
        """Return the successes' share, units and chance at each, by default of the first figure, or None."""
        first = self.metrics(scores, Terms(config.model.classes, config.seed))[0]
        units = len({score.unit for score in scores})
        return None if first.value is None or first.chance is None else (first.value, units, first.chance)

    def sentences(self, defense: str, records: Sequence[Record]) -> list[str]:
        """Return what its cells show of a defense, by default what finds most; not asked where there is a `chapter`."""
        return [
            self._sentence(place, [r for r in records if _place_of(r.config) == place], defense)
            for place in sorted({_place_of(r.config) for r in records if r.config.defense.id == defense})
        ]

    def _sentence(self, place: str, records: Sequence[Record], defense: str) -> str:
        name = self.headline(records[0].config)
        mine, none = (best([r for r in records if r.config.defense.id == who], name) for who in (defense, "none"))
        if mine is None:
            return f"{self.title} [{place}]: no attack came to a figure."
        metric, control = mine.metric(name), mine.config.defense.control
        assert metric is not None
        ends = "" if metric.low is None or metric.high is None else f" [{metric.low:.3g}, {metric.high:.3g}]"
        at = mine.config.attack.id + ("" if control is None else f", {control.name}={control.value:g}")
        other = None if none is None or defense == "none" else none.metric(name)
        beside = "" if other is None else f", undefended {other.value:.3g}"
        chance = "" if metric.chance is None else f", chance {metric.chance:.3g}"
        most = "at least" if metric.higher_is_safer else "at most"
        title = dict(self.figures).get(name, name)
        return f"{self.title} [{place}]: {title} {most} {metric.value:.3g}{ends} ({at}{beside}{chance})."


def _place_of(config: CellConfig) -> str:
    """Return what the cells of one sentence share, in words."""
    batch = f", batch {config.batch_size}" if question_of(config.attack.kind).source == "probe" else ""
    return f"{config.threat_model.id}, {config.stage}{batch}" + (f", {config.role}" if config.role else "")


class Missing(Question):
    """A question that is not installed here: its records are read, and say what they say; nothing is made of them."""

    score = OtherScore
    distances = ()
    figures = ()

    def __init__(self, name: str) -> None:
        self.name = name  # type: ignore[misc]  # of an installed question a class variable
        self.title = f"{name} (this question is not installed here)"  # type: ignore[misc]

    def headline(self, config: CellConfig) -> str:
        """Return "": which of its figures counts only the question knows."""
        return ""


@cache
def question_of(name: str) -> Question:
    """Return the question that records call `name`, `Missing` where it is not installed; UsageError: it is broken."""
    if name not in plugins("questions"):
        return Missing(name)
    with guard("questions", name):
        made: Question = load("questions", name)()
    return made


def question_for(record: Figured) -> Question:
    """Return the question that a record answers."""
    return question_of(record.config.attack.kind)


@cache
def questions() -> Mapping[str, Question]:
    """Return all installed questions by name, in the order of their boards."""
    found = [question_of(name) for name in load_all("questions")]
    return {q.name: q for q in sorted(found, key=lambda q: (q.order, q.name))}


def missing(records: Sequence[Record]) -> list[str]:
    """Return a sentence for each question that is not installed here, of which nothing is made of its records."""
    names = Counter(r.config.attack.kind for r in records if isinstance(question_for(r), Missing))
    return [
        f"{count} records answer the question {name!r}, which is not installed here: they are on no board; install the "
        "package that brings it."
        for name, count in sorted(names.items())
    ]
