"""The contract of a question: its challenges, its answers, their scores, and how its figures are shown.

A record names its question (`AttackInfo.kind`); runner, boards, tables, sentences, comparisons and batteries use it by
that name. Reading records loads every question, so these modules import torch only inside functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ppbench.base.declarations import class_faults, contract_faults, word_faults
from ppbench.base.errors import UsageError
from ppbench.base.registry import load_all, load_plugin, plugins
from ppbench.metrics.spec import MetricSpec, Rule
from ppbench.questions.inquiry import FinishedAudit, Inquiry, Probe, TargetModel
from ppbench.records.figure import Figured, Terms, best
from ppbench.records.schema import CellConfig, Metric, Record, Score
from ppbench.records.scores import OtherScore, word_of

if TYPE_CHECKING:
    from ppbench.adversary.attack import Challenge, Guess
    from ppbench.federation.plan import Plan
    from ppbench.records.store import CellImages


@dataclass(frozen=True)
class DistanceLaw:
    """The distance of an attack from its goal, a function of one metric; larger is safer.

    name: with its version, as "label/1"; of: the distance of the metric's value, scalar or array; words: for the axis
    of a figure.
    """

    name: str
    metric: str
    of: Callable[[Any], Any]
    words: str


def one_minus(value: Any) -> Any:
    """Return 1 - value, the distance of a share of right answers."""
    return 1 - value


class Question:
    """A question; an instance has no state.

    Class attributes a question sets:
        name: its name in records, an attack's `kind`.  title: of its board.
        score: the class of one victim's score.
        source: what it is about: "probe", probed clients, or "model", a model that the adversary has.
        reads: whether its attacks read probed clients' uploads; if nothing can be read, the cell fails.
        follows: the question whose answers are part of its challenges, "" for none.
        owners: least number of clients that own victims; with fewer the question is void, and no cell is made.
        audits: whether all its attacks run in audits too, and not only those that need one.
        inputs: whether answers are inputs, which are measured as such (decibels, perceptual distances) and stored.
        board: the question on whose board its cells are listed, "" for its own.  order: of its board among others.
        distances: the distances for a CAP, the main one first.
        specs: its metrics, each declared once; the headline is the first, unless `headline` overrides this.
        chart: the chart of a board beside accuracy over distance: success over the budget, or ROC curves.
        intended: stages at which the delivered model is meant to answer the question; these are not ranked.
        noise: whether uploads of pure noise must defeat its attacks, so that `full_noise` is a control.
        chapter: the part of the report for its cells: "uploads" and "models" are tables and sentences of the harness;
            "" for columns and sentences made of `specs`.
    """

    name: ClassVar[str]
    contract: ClassVar[int] = 0
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
    specs: ClassVar[tuple[MetricSpec, ...]]
    chart: ClassVar[Literal["budget", "roc", ""]] = ""
    intended: ClassVar[tuple[str, ...]] = ()
    noise: ClassVar[bool] = True
    chapter: ClassVar[Literal["uploads", "models", ""]] = ""

    # -- challenges and scores -----------------------------------------------------------------------------------------
    def of_probe(self, probe: Probe) -> Inquiry:
        """Return the challenges about probed clients. UsageError: the question is not about them."""
        raise UsageError(f"Question {self.name!r} is not about probed clients; leave its attacks out.")

    def of_model(self, model: TargetModel) -> Inquiry:
        """Return the challenges about a model. UsageError: the question is not about models."""
        raise UsageError(f"Question {self.name!r} is not about models; leave its attacks out.")

    def of_audit(self, audit: FinishedAudit) -> Inquiry:
        """Return the challenges of an audit. UsageError: the question is not for audits."""
        raise UsageError(f"Question {self.name!r} is not for audits; leave its attacks out.")

    def malformed(self, guess: Guess, challenge: Challenge, plan: Plan) -> Iterator[str]:
        """Yield faults in the form of an answer, for the conformance battery of attacks. Default: nothing."""
        return iter(())

    def metrics(self, scores: Sequence[Any], terms: Terms) -> list[Metric]:
        """Return a cell's metrics, a pure function of `scores` of this question, at least one."""
        raise NotImplementedError

    def worth(self, scores: Sequence[Any], plan: Plan) -> float:
        """Return the quality of answers on tuning victims; larger is better. Default: by the first metric."""
        if not scores:
            return 0.0
        first = self.metrics(scores, Terms(plan.spec.classes, 0))[0]
        return (first.value or 0.0) * (-1 if first.higher_is_safer else 1)

    # -- checks of records ---------------------------------------------------------------------------------------------
    def flawed(self, record: Record) -> Iterator[str]:
        """Yield contradictions among a record's scores and flags, a clause each. Default: nothing."""
        return iter(())

    def contradicted(self, record: Record, images: CellImages) -> Iterator[str]:
        """Yield contradictions between a record's scores and its stored images, a clause each. Default: nothing."""
        return iter(())

    # -- reports -------------------------------------------------------------------------------------------------------
    def headline(self, config: CellConfig) -> str:
        """Return the metric by which a board of such cells is ranked. Default: the first of `specs`."""
        return self.specs[0].name

    def spec(self, name: str) -> MetricSpec:
        """Return the spec of a metric; KeyError if the question declares none of this name."""
        return {spec.name: spec for spec in self.specs}[name]

    def distance(self, name: str | None = None) -> DistanceLaw | None:
        """Return the distance `name`, by default the main one; None if there is none."""
        return next((law for law in self.distances if name in (None, law.name)), None)

    def columns(self, headline: str) -> tuple[tuple[str, str], ...]:
        """Return the metrics in a row of a board with their titles. Default: all with a title, the headline first."""
        titled = [(spec.name, spec.title) for spec in self.specs if spec.title]
        return tuple(sorted(titled, key=lambda column: column[0] != headline))

    def judged(self, score: Any, metric: str) -> float:
        """Return a victim's value of a rule's metric; a failed answer has the worst value. KeyError: no such rule."""
        raise KeyError(metric)

    def together(self, score: Any, config: CellConfig) -> tuple[int, ...]:
        """Return the cluster of a victim, which is resampled as a whole. Default: its unit."""
        unit: tuple[int, ...] = score.unit
        return unit

    @property
    def all_rules(self) -> tuple[Rule, ...]:
        """The rules of all its metrics."""
        return tuple(rule for spec in self.specs if (rule := spec.rule) is not None)

    def rules_of(self, config: CellConfig) -> tuple[Rule, ...]:
        """Return the rules by which such a cell is judged. Default: those of all its metrics."""
        return self.all_rules

    def blind(self, scores: Sequence[Any], config: CellConfig) -> tuple[float, int, float] | None:
        """Return (share of successes, number of units, chance of a success), or None. Default: of the first metric."""
        first = self.metrics(scores, Terms(config.model.classes, config.seed))[0]
        units = len({score.unit for score in scores})
        return None if first.value is None or first.chance is None else (first.value, units, first.chance)

    def sentences(self, defense: str, records: Sequence[Record]) -> list[str]:
        """Return sentences on a defense, by default the strongest attack's figure; unused if `chapter` is set."""
        return [
            self._sentence(place, [r for r in records if _place_of(r.config) == place], defense)
            for place in sorted({_place_of(r.config) for r in records if r.config.defense.id == defense})
        ]

    def _sentence(self, place: str, records: Sequence[Record], defense: str) -> str:
        name = self.headline(records[0].config)
        defended, none = (
            best([r for r in records if r.config.defense.id == name_of], name) for name_of in (defense, "none")
        )
        if defended is None:
            return f"{self.title} [{place}]: no attack came to a figure."
        metric, control = defended.metric(name), defended.config.defense.control
        assert metric is not None
        ends = "" if metric.low is None or metric.high is None else f" [{metric.low:.3g}, {metric.high:.3g}]"
        at = defended.config.attack.id + ("" if control is None else f", {control.name}={control.value:g}")
        other = None if none is None or defense == "none" else none.metric(name)
        undefended = "" if other is None else f", undefended {other.value:.3g}"
        chance = "" if metric.chance is None else f", chance {metric.chance:.3g}"
        bound = "at least" if metric.higher_is_safer else "at most"
        title = {spec.name: spec.title for spec in self.specs}.get(name) or name
        return f"{self.title} [{place}]: {title} {bound} {metric.value:.3g}{ends} ({at}{undefended}{chance})."


def _place_of(config: CellConfig) -> str:
    """Return in words what the cells of one sentence share: threat model, stage, batch and role."""
    batch = f", batch {config.batch_size}" if question_of(config.attack.kind).source == "probe" else ""
    return f"{config.threat_model.id}, {config.stage}{batch}" + (f", {config.role}" if config.role else "")


class MissingQuestion(Question):
    """A question that is not installed here: its records can be read, but have no figures or boards."""

    score = OtherScore
    distances = ()
    specs = ()
    noise = False

    def __init__(self, name: str) -> None:
        self.name = name  # type: ignore[misc]  # of an installed question a class variable
        self.title = f"{name} (this question is not installed here)"  # type: ignore[misc]

    def headline(self, config: CellConfig) -> str:
        """Return "": the headline is unknown."""
        return ""


@cache
def question_of(name: str) -> Question:
    """Return the question `name` of records, a `MissingQuestion` if it is not installed; UsageError: it is broken."""
    if name not in plugins("questions"):
        return MissingQuestion(name)
    question: Question = load_plugin("questions", name)()  # raises nothing: it was called when it was loaded
    return question


def question_for(record: Figured) -> Question:
    """Return the question that a record answers."""
    return question_of(record.config.attack.kind)


@cache
def questions() -> Mapping[str, Question]:
    """Return all installed questions by name, in the order of their boards."""
    instances = [question_of(name) for name in load_all("questions")]
    return {q.name: q for q in sorted(instances, key=lambda q: (q.order, q.name))}


def metric_specs() -> dict[str, MetricSpec]:
    """Return every metric of the installed questions by name; of a name that several declare, the first counts."""
    specs: dict[str, MetricSpec] = {}
    for question in questions().values():
        for spec in question.specs:
            specs.setdefault(spec.name, spec)
    return specs


def missing_sentences(records: Sequence[Record]) -> list[str]:
    """Return a sentence for each question in `records` that is not installed here."""
    names = Counter(r.config.attack.kind for r in records if isinstance(question_for(r), MissingQuestion))
    return [
        f"{count} records answer the question {name!r}, which is not installed here: they are on no board; install the "
        "package that brings it."
        for name, count in sorted(names.items())
    ]


# -- Checks of every question's declarations before it is used --


def question_faults(plugin: Any, name: str) -> Iterator[str]:
    """Yield why a class is not the question `name`; after the first fault others may be meaningless."""
    yield from class_faults(plugin, Question, name)
    yield from contract_faults(plugin, Question)
    yield from word_faults(plugin, ("title", "source"))
    if not (isinstance(plugin.score, type) and issubclass(plugin.score, Score)):
        yield f"declares score = {plugin.score!r}; it must be a subclass of ppbench's Score"
    yield from _word_faults(plugin, name)
    for attribute in ("follows", "board"):
        if (other := getattr(plugin, attribute)) and other not in plugins("questions"):
            yield f"declares {attribute} = {other!r}, which is not an installed question"
    if not plugin.specs and plugin.headline is Question.headline:
        yield "declares no specs; give a MetricSpec for each of its metrics, the headline first"
    names = [spec.name for spec in plugin.specs]
    if len(set(names)) < len(names):
        yield f"declares several specs of one name: {', '.join(names)}"
    if plugin.metrics is Question.metrics:
        yield "has no metrics(scores, terms); define it"
    if all(getattr(plugin, ask) is getattr(Question, ask) for ask in ("of_probe", "of_model", "of_audit")):
        yield "has no challenges; define of_probe, of_model or of_audit"
    plugin()  # without arguments: an instance has no state


def _word_faults(plugin: type[Question], name: str) -> Iterator[str]:
    """Yield why records could not identify its scores by their `kind`."""
    word = plugin.score.model_fields["kind"].default
    if not isinstance(word, str) or not word:
        yield "has scores without a word; set kind: Literal['word'] = 'word' in their class"
    installed = plugins("questions")
    for other, installed_plugin in installed.items() if name in installed and not installed[name].ours else ():
        if installed_plugin.ours:
            other_score = load_plugin("questions", other).score
            if word_of(other_score) == word and other_score is not plugin.score:
                yield f"has scores of kind {word!r}, which are those of {other!r}; take another word"
