"""What a membership audit of a finished model found: figures, controls, limits, and the one judgement of them.

Not to be confused with the audits of a defense (`run.audit`), which train models of their own with canaries.
"""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ppbench.base.errors import Exit, UsageError, count_of
from ppbench.base.files import make_folder, write_output
from ppbench.base.version import __version__
from ppbench.metrics.intervals import clopper_pearson
from ppbench.metrics.spec import SHARE, MetricSpec
from ppbench.questions.membership import ASR, AUC, TPR_01, TPR_1, MemberScore
from ppbench.records.figure import leakage_value
from ppbench.records.schema import Metric
from ppbench.report.controls import exceeds_chance, widened

SHOWN_SPECS = (ASR, AUC, TPR_1, TPR_01)
FILES = ("audit.html", "audit.json", "scores.csv")
FALSE_RATE = 0.01
"""The false-positive rate of the limit on the true-positive rate."""
MOST_NEEDED = 10_000_000
"""Largest number of examples that a sentence asks for."""


def of_hundred(value: float | None) -> str:
    """Return a share as a percentage with one decimal, "-" for None."""
    return "-" if value is None else f"{100 * value:.1f} %"


def interval_words(metric: Metric) -> str:
    """Return a share with its interval: "52.3 % [50.1, 54.4]"."""
    if metric.low is None or metric.high is None:
        return of_hundred(metric.value)
    return f"{of_hundred(metric.value)} [{100 * metric.low:.1f}, {100 * metric.high:.1f}]"


def figure_words(spec: MetricSpec, metric: Metric) -> str:
    """Return a figure with its interval in its unit; "not measured" without one."""
    if metric.value is None:
        return "not measured"
    if spec.unit == SHARE:
        return interval_words(metric)
    return f"{metric.value:.3f}" + ("" if metric.low is None else f" [{metric.low:.3f}, {metric.high:.3f}]")


@dataclass(frozen=True)
class AttackResult:
    """One attack. metrics: its figures; scores: of each candidate; referenced: whether it used reference models."""

    name: str
    publication: str
    referenced: bool
    metrics: tuple[Metric, ...]
    scores: tuple[MemberScore, ...]

    def metric(self, name: str) -> Metric:
        """Return the figure called `name` (KeyError: there is none)."""
        return {metric.name: metric for metric in self.metrics}[name]


@dataclass(frozen=True)
class AuditCheck:
    """A control's outcome: its name, whether it holds, what it asks, and what came out, a sentence."""

    name: Literal["learned", "planted", "blind", "inputs"]
    ok: bool
    aim: str
    sentence: str


@dataclass(frozen=True)
class Limit:
    """The most that may come out of a metric."""

    spec: MetricSpec
    most: float

    def __post_init__(self) -> None:
        least = 0.5 if self.spec is ASR else FALSE_RATE
        if not least < self.most < 1:
            option = "--max-asr" if self.spec is ASR else "--max-tpr"
            raise UsageError(f"{option} {self.most:g} cannot be used; it must lie between guessing, {least:g}, and 1.")


@dataclass(frozen=True)
class Judged:
    """A limit's outcome: the 95 % interval lies beyond it, within it, or neither is shown."""

    limit: Limit
    status: Literal["over", "within", "undecided"]
    sentence: str


@dataclass(frozen=True)
class Exposed:
    """A member that the strongest attack recognizes best.

    false_rate: share of non-members that score as high. label, predicted: classes in words. png: the picture, or None;
    values: a row's values, "" of pictures.
    """

    name: str
    label: str
    predicted: str
    false_rate: float
    png: bytes | None
    values: str


@dataclass(frozen=True)
class CandidateRow:
    """One candidate in the table of scores; its place is its index in `AttackResult.scores`."""

    name: str
    member: bool
    half: int
    label: str
    predicted: str


@dataclass(frozen=True)
class AuditSubject:
    """What was audited: names of the model and of both sets, how many examples they had, and how many were attacked.

    duplicates: non-members dropped because they are among the members. candidates: members, and as many others, that
    were attacked. references: models that were trained. accuracies: of the model on both sets of candidates.
    """

    model: str
    members: str
    others: str
    member_count: int
    other_count: int
    duplicates: int
    candidates: int
    references: int
    member_accuracy: float
    other_accuracy: float
    seed: int


@dataclass(frozen=True, repr=False)
class AuditedModel:
    """The result of `ppbench.audit`.

    Attributes:
        subject: what was audited.
        attacks: the figures of each attack, with 95 % intervals.
        checks: the controls.
        limits: of the user's options.
        exposed: the members that are recognized best.
        rows: the candidates, in the order of the scores' indices.
    """

    subject: AuditSubject
    attacks: tuple[AttackResult, ...]
    checks: tuple[AuditCheck, ...]
    limits: tuple[Limit, ...]
    exposed: tuple[Exposed, ...]
    rows: tuple[CandidateRow, ...]

    def __repr__(self) -> str:
        return f"<AuditedModel {self.subject.model}: {self.verdict}>"

    def _repr_html_(self) -> str:
        """Return the report's body, for notebooks."""
        return audit_html(self, whole=False)

    # -- the judgement -------------------------------------------------------------------------------------------------
    def strongest(self, spec: MetricSpec = ASR) -> AttackResult:
        """Return the attack with the largest figure; of equals the first."""
        return max(self.attacks, key=lambda attack: leakage_value(attack.metric(spec.name)))

    @property
    def failed(self) -> tuple[AuditCheck, ...]:
        """The controls that do not hold: nothing is concluded then."""
        return tuple(check for check in self.checks if not check.ok)

    @property
    def is_found(self) -> bool:
        """Whether an attack decides or orders better than guessing, at Bonferroni's level over attacks and figures."""
        return self._shown is not None

    @property
    def _shown(self) -> tuple[MetricSpec, AttackResult] | None:
        """The figure that shows that members are recognized, and the attack with the largest; None if none does."""
        tests = 2 * len(self.attacks)
        exceeded = [spec for spec in (ASR, AUC) if exceeds_chance(self.strongest(spec).metric(spec.name), tests)]
        return (exceeded[0], self.strongest(exceeded[0])) if exceeded else None

    def bound(self, spec: MetricSpec) -> float | None:
        """Return the largest upper end of the attacks' intervals of a figure (95 %); None where it is not measured."""
        ends = [attack.metric(spec.name).high for attack in self.attacks]
        return max((end for end in ends if end is not None), default=None)

    @property
    def judged(self) -> tuple[Judged, ...]:
        """The outcome of each limit."""
        return tuple(limit_outcome(limit, self.attacks) for limit in self.limits)

    @property
    def exit_code(self) -> Exit:
        """3 where a control fails; else 1 beyond a limit, 3 where a limit is undecided, 0 otherwise."""
        states = {judged.status for judged in self.judged}
        if self.failed:
            return Exit.CONTROLS
        return Exit.FOUND if "over" in states else Exit.CONTROLS if "undecided" in states else Exit.OK

    @property
    def verdict(self) -> str:
        """The outcome in a sentence."""
        if self.failed:
            return f"Nothing is concluded. {self.failed[0].sentence}"
        for status, word in (("over", "OVER THE LIMIT"), ("undecided", "UNDECIDED"), ("within", "Within the limit")):
            if some := [judged for judged in self.judged if judged.status == status]:
                return f"{word}: {' '.join(judged.sentence for judged in some)}"
        return self.finding

    @property
    def finding(self) -> str:
        """What the strongest attack shows, in a sentence."""
        if self._shown is not None:
            spec, top = self._shown
            shown = figure_words(spec, top.metric(spec.name))
            right = f"is right in {shown} of its decisions (95 %); guessing in 50 %."
            words = right if spec is ASR else f"has an AUC of {shown} (95 %), guessing 0.5."
            best = self.strongest(TPR_1)
            rate = best.metric(TPR_1.name)
            among = f" {best.name} finds {interval_words(rate)} of them while it accuses 1 % of others."
            return f"Members are recognized: {top.name} {words}{'' if rate.value is None else among}"
        most = f"{of_hundred(self.bound(ASR))} of right decisions (guessing: 50 %)"
        end = self.bound(TPR_1)
        share = "" if end is None else f", or finds more than {of_hundred(end)} of the members at 1 % FPR"
        return f"None of these attacks beats guessing beyond {most}{share} (95 %)."

    @property
    def remark(self) -> str:
        """What was left out for want of reference models, "" if there are some."""
        if self.subject.references:
            return ""
        return (
            "A lower bound: only attacks without reference models were run. With --train, models trained on other "
            "splits add LiRA and RMIA, which usually recognize more."
        )

    # -- files ---------------------------------------------------------------------------------------------------------
    def save(self, folder: str | Path) -> list[Path]:
        """Write the report (audit.html), the figures (audit.json) and a line per candidate (scores.csv) to a folder.

        UsageError: it cannot be written.
        """
        home = make_folder(Path(folder))
        contents = audit_html(self), json.dumps(self.figures(), indent=1), self.table()
        paths = [home / name for name in FILES]
        for path, text in zip(paths, contents, strict=True):
            write_output(path, text.encode("utf-8", errors="backslashreplace"))
        return paths

    def figures(self) -> dict[str, Any]:
        """Return all figures as values of JSON."""
        return {
            "ppbench": __version__,
            "verdict": self.verdict,
            "exit_code": int(self.exit_code),
            "subject": vars(self.subject),
            "controls": [vars(check) for check in self.checks],
            "limits": [{"metric": j.limit.spec.name, "most": j.limit.most, "status": j.status} for j in self.judged],
            "attacks": {
                attack.name: [metric.model_dump(mode="json", exclude_none=True) for metric in attack.metrics]
                for attack in self.attacks
            },
        }

    def table(self) -> str:
        """Return one line of CSV per candidate: who it is, and each attack's score and decision."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        heads = [f"{attack.name}_{word}" for attack in self.attacks for word in ("score", "decision")]
        writer.writerow(["name", "set", "half", "label", "predicted", *heads])
        by_index = [{score.index: score for score in attack.scores} for attack in self.attacks]
        for index, row in enumerate(self.rows):
            own = [scores[index] for scores in by_index]
            answers = [word for one in own for word in (f"{one.score:.9g}", _set_word(one.decision is True))]
            writer.writerow([row.name, _set_word(row.member), row.half, row.label, row.predicted, *answers])
        return file.getvalue()


def audit_html(audited: AuditedModel, whole: bool = True) -> str:
    """Return the report as HTML; whole: as a page of its own, else its body."""
    from ppbench.report.page.html import template  # it imports what draws figures, which takes seconds

    pictures = [None if one.png is None else base64.b64encode(one.png).decode() for one in audited.exposed]
    reasons = {m.name: m.reason for attack in audited.attacks for m in attack.metrics if m.value is None}
    text: str = template("audit").render(
        audit=audited,
        whole=whole,
        specs=SHOWN_SPECS,
        pictures=pictures,
        reasons=[(spec.title, reasons[spec.name]) for spec in SHOWN_SPECS if spec.name in reasons],
        of_hundred=of_hundred,
        figure_words=figure_words,
        version=__version__,
    )
    return text.replace(" %", "\N{NO-BREAK SPACE}%")


def _set_word(member: bool) -> str:
    return "member" if member else "non-member"


# -- limits ------------------------------------------------------------------------------------------------------------
def limit_outcome(limit: Limit, attacks: Sequence[AttackResult]) -> Judged:
    """Return a limit's outcome.

    Over: the lower end of some attack's interval, widened for their number (Bonferroni), lies above the limit. Within:
    the upper end of every attack's 95 % interval lies at or below it, so that few examples, whose intervals are wide,
    never pass. Else undecided.
    """
    figures = [(attack, attack.metric(limit.spec.name)) for attack in attacks]
    most, name = f"the limit is {of_hundred(limit.most)}", _name_of(limit.spec)
    unknown = [metric for _, metric in figures if metric.value is None or metric.high is None]
    if unknown:
        return Judged(limit, "undecided", f"{name} cannot be measured ({unknown[0].reason}); {most}.")
    over = [(a, m) for a, m in figures if (ends := widened(m, len(figures))) and ends[0] > limit.most]
    if over:
        attack, metric = max(over, key=lambda pair: leakage_value(pair[1]))
        return Judged(
            limit, "over", f"{name} of {attack.name} is {interval_words(metric)}; {most}, below the interval."
        )
    attack, metric = max(figures, key=lambda pair: pair[1].high or 1.0)
    if (metric.high or 1.0) <= limit.most:
        return Judged(limit, "within", f"{name} is at most {of_hundred(metric.high)} (95 %, {attack.name}); {most}.")
    words = f"{name} of {attack.name} is {interval_words(metric)}; {most}, inside the interval"
    return Judged(limit, "undecided", f"{words}: {_remedy(limit, metric)}.")


def _name_of(spec: MetricSpec) -> str:
    right = spec is ASR
    return "The share of right decisions (ASR)" if right else spec.title.replace("TPR", "The share of members found")


def _remedy(limit: Limit, metric: Metric) -> str:
    """Return what would decide an undecided limit, a clause."""
    value = metric.value or 0.0
    if value >= limit.most:
        return "more examples would show whether it is beyond"
    trials = float(metric.n if limit.spec is ASR else metric.n / 2)
    while trials < MOST_NEEDED and (clopper_pearson(value * trials, trials).high or 1.0) > limit.most:
        trials *= 1.1
    needed = round(trials / 2 if limit.spec is ASR else trials)
    least = clopper_pearson(metric.n / 2, metric.n).high or 1.0
    none = "no outcome could pass with so few examples; " if limit.spec is ASR and least > limit.most else ""
    return f"{none}it takes about {count_of(needed, 'member')} and as many others to decide"
