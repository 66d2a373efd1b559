"""Verdicts on what a model gives away to its holder: members of the training data, and the true model's outputs.

A masking defense has clients train on another model than it delivers. Both are judged, separately for attackers who
take the model as it is and for those who know of the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from ppbench.federation.threats import recorded_threat
from ppbench.records.figure import best
from ppbench.records.schema import Record
from ppbench.report.controls import above_chance, value
from ppbench.report.verdict.lines import (
    SettingRow,
    Sides,
    attack_at,
    audit_rows,
    extraction_metric_of,
    figure,
    listed_values,
    model_rows,
)
from ppbench.report.verdict.verdict import (
    Fate,
    ModelFate,
    Verdict,
    joint_fate,
    members_fate,
    outputs_fate,
    same_outputs,
)
from ppbench.report.worst import WorstCase, attack_of

# -- Verdicts on audits: members among canaries and among average records, owners, a lower bound of epsilon --
# An audit trains anew with canaries: unusual records that a model must memorize to fit. They show the worst case;
# average records show the rest. Each figure stands beside the undefended model's.

CANARIES = "canary_auc"


def audit_verdicts(defense: str, records: Sequence[Record]) -> list[Verdict]:
    """Return the verdicts on the audits of `defense`, by adversary and audit."""
    every = audit_rows(records)
    verdicts: list[Verdict] = []
    several = len({_audit(row)[1:] for row in every}) > 1
    for audit in sorted({_audit(row) for row in every if row.key.defense == defense}):
        threat, references, canaries = audit
        mine = [row for row in every if row.key.defense == defense and _audit(row) == audit]
        none = next((row for row in every if row.key.defense == "none" and _audit(row) == audit), None)
        none = None if defense == "none" else none
        own = [*_members(mine, none), *_owners(mine, none), *(v for row in mine for v in _epsilon(row))]
        words = f"{threat}, {canaries} canaries, {references} references" if several else threat
        verdicts += [verdict.worded(f"[{words}] {verdict.sentence}") for verdict in own]
    return verdicts


def _audit(row: SettingRow) -> tuple[str, int, int]:
    """Return the key of a row's audit: threat model, number of references, number of canaries."""
    audit = row.key.audit
    return (row.key.threat, 0, 0) if audit is None else (row.key.threat, audit.references, audit.canaries)


def _strongest_audit(
    rows: Sequence[SettingRow], metric: str
) -> tuple[list[SettingRow], SettingRow | None, Record | None]:
    """Return the rows with a figure, the row in which it is largest, and its cell."""
    measured = [row for row in rows if row.top(metric) is not None]
    top = max(measured, key=lambda row: value(row.top(metric), metric) or 0.0, default=None)
    return measured, top, None if top is None else top.top(metric)


def _members(rows: Sequence[SettingRow], none: SettingRow | None) -> list[Verdict]:
    """Return the verdict on members over the whole grid; its sentence names the strongest attack and control value."""
    metric = CANARIES if any(row.top(CANARIES) for row in rows) else "auc"
    measured, top, cell = _strongest_audit(rows, metric)
    if top is None:
        return []
    tried = sum(len(row.of("membership")) for row in rows)
    above = above_chance(cell, metric, tried)
    at = attack_at(attack_of(cell), top.control)
    if metric == "auc":
        verb = "Members are distinguished from others" if above else "Members are not shown to be distinguished"
        beside = "" if none is None else f"; undefended AUC {figure(none.top('auc'), 'auc', '.2f')}"
        sentence = f"In an audit without canaries: {verb} ({at}: AUC {figure(cell, 'auc', '.2f')}{beside})."
    else:
        verb = (
            "Canaries are distinguished from those left out" if above else "Canaries are not shown to be distinguished"
        )
        beside = "" if none is None else f"; undefended {_canaries(none.top(CANARIES))}"
        average = max(measured, key=lambda row: value(row.top("auc"), "auc") or 0.0)
        also = attack_at(attack_of(average.top("auc")), average.control)
        few = "at most " if len(measured) > 1 or tried > 1 else ""
        sentence = (
            f"In an audit: {verb} ({at}: {few}{_canaries(cell)}{beside}); average records: {few}AUC "
            f"{figure(average.top('auc'), 'auc', '.2f')} ({also})."
        )
    return [_audit_verdict(measured, cell, metric, "falls" if above else "undecided", sentence)]


def _audit_verdict(
    rows: Sequence[SettingRow], top: Record | None, metric: str, became: Fate | None, sentence: str
) -> Verdict:
    return Verdict(rows[0].key.defense, "audit", became, sentence, tuple(row.key for row in rows), top, metric)


def _canaries(record: Record | None) -> str:
    rate = figure(record, "canary_tpr_at_1pct_fpr", ".0%")
    return f"AUC {figure(record, CANARIES, '.2f')}" + ("" if rate == "-" else f", {rate} of members at 1% false ones")


def _owners(rows: Sequence[SettingRow], none: SettingRow | None) -> list[Verdict]:
    name = "tracing_accuracy"
    measured, _, cell = _strongest_audit(rows, name)
    metric = None if cell is None else cell.metric(name)
    if metric is None:
        return []
    beside = "" if none is None else f", undefended {figure(none.top(name), name, '.0%')}"
    chance = "" if metric.chance is None else f", chance {metric.chance:.0%}"
    share = ("at most " if len(measured) > 1 else "") + figure(cell, name, ".0%")
    sentence = f"In an audit, records are traced to their owner in {share} of cases{beside}{chance}."
    return [_audit_verdict(measured, cell, name, None, sentence)]


def _epsilon(row: SettingRow) -> list[Verdict]:
    """Return the verdict on one run's bound of epsilon, where that is positive or the defense claims an epsilon."""
    cell, claimed = row.top("epsilon_lower"), row.records[0].privacy.epsilon
    bound = value(cell, "epsilon_lower")
    if bound is None or (claimed is None and bound <= 0):
        return []
    at = f" at {row.control}" if row.control else ""
    claim = "" if claimed is None else f", {claimed:.3g} is guaranteed"
    above = claimed is not None and bound > claimed
    refuted = "; the guarantee is REFUTED, unless this is the one such bound in twenty that errs" if above else ""
    gaussian = value(cell, "epsilon_gaussian")
    also = "" if not gaussian else f"; {gaussian:.2g} if the mechanism is Gaussian"
    sentence = (
        f"One run shows that epsilon is at least {bound:.2g}{at} ({attack_of(cell)}, 95 %{also}){claim}{refuted}."
    )
    return [_audit_verdict([row], cell, "epsilon_lower", "falls" if above else None, sentence)]


@dataclass(frozen=True)
class _Members:
    """The question for members. undefended: the strongest cell on the undefended model, one of `tried`, or None."""

    undefended: WorstCase | None
    tried: int
    noun: ClassVar[str] = "members"
    metric: ClassVar[str] = "asr"
    name: ClassVar[Literal["members"]] = "members"

    def of(self, row: SettingRow) -> Sides:
        return row.members

    @property
    def known(self) -> WorstCase | None:
        """The undefended cell, if it finds members, else None."""
        return self.undefended if above_chance(self.undefended, "asr", self.tried) else None

    def fate(self, record: WorstCase, tried: int) -> ModelFate:
        return members_fate(record, tried, self.known)

    def figures(self, record: WorstCase, few: str = "") -> str:
        return f"ASR {few}{figure(record, 'asr', '.1%')}"

    @property
    def beside(self) -> str:
        """The undefended model's figure, in words."""
        if self.undefended is None:
            return ", undefended: not attacked"
        weak = "" if self.known is not None else ", not above chance itself"
        return f", undefended {figure(self.undefended, 'asr', '.1%')}{weak}"


@dataclass(frozen=True)
class _Outputs:
    """The question for the true model's outputs: its decisions, or the numbers that it predicts."""

    metric: str
    beside: ClassVar[str] = ""
    name: ClassVar[Literal["outputs"]] = "outputs"

    @property
    def noun(self) -> str:
        return "the true model's decisions" if self.metric == "agreement" else "the true model's predictions"

    def of(self, row: SettingRow) -> Sides:
        return row.outputs

    def fate(self, record: WorstCase, tried: int) -> ModelFate:
        return outputs_fate(record, tried)

    def figures(self, record: WorstCase, few: str = "") -> str:
        """Return "agrees with it on 99.8% [99.1, 100.0] of queries, relative error 1.2% [1.1, 1.3]"."""
        form, unit = (".1%", "") if (value(record, "output_error") or 0.0) < 10 else (".0f", " times their size")
        error = f"relative error {figure(record, 'output_error', form, unit)}"
        if self.metric == "output_error":
            return error
        return f"agrees with it on {few}{figure(record, 'agreement', '.1%')} of queries, {error}"


_Question = _Members | _Outputs


def model_verdicts(defense: str, records: Sequence[Record]) -> list[Verdict]:
    """Return the verdicts on members and true outputs, by adversary."""
    everything = model_rows(records)
    own = [row for row in everything if row.key.defense == defense]
    masked = any(row.key.stage == "iterate" for row in own)
    outputs = _Outputs(extraction_metric_of(records))
    verdicts: list[Verdict] = []
    for threat in sorted({row.key.threat for row in own}):
        everybody = recorded_threat(threat).lone_client
        prefix = "" if everybody else f"[{threat}] "
        mine = [row for row in own if row.key.threat == threat]
        trained_on, delivered = ([r for r in mine if r.key.stage == stage] for stage in ("iterate", "final"))
        if not everybody and any(r.key.stage == "final" and recorded_threat(r.key.threat).lone_client for r in own):
            delivered = []  # clients receive the same model: reported there
        members = [_undefended(everything, threat, stage, defense) for stage in ("iterate", "final")]
        results = [*_judged(trained_on, members[0]), *_judged(trained_on, outputs)]
        results += _delivered(delivered, members[1]) if masked else _queried(delivered, members[1])
        verdicts += [verdict.worded(prefix + verdict.sentence) for verdict in [*results, *_answers(delivered, outputs)]]
    return verdicts


def _undefended(rows: Sequence[SettingRow], threat: str, stage: str, defense: str) -> _Members:
    """Return the question for members with the figure of `none` at the same stage, the only one that compares."""
    some = [r for r in rows if (r.key.defense, r.key.stage) == ("none", stage) and r.members.tried]
    some = [] if defense == "none" else [r for r in some if r.key.threat == threat] or some
    strongest = best([r for row in some if (r := row.members.worst) is not None], "asr")
    return _Members(strongest, sum(row.members.tried for row in some))


# -- the model that clients train on ---------------------------------------------------------------------------------
def _judged(rows: Sequence[SettingRow], question: _Question) -> list[Verdict]:
    """Return one verdict per group of control values with one fate."""
    cells = [question.of(row) for row in rows]
    tried = sum(c.plain_tried for c in cells), sum(c.knowing_tried for c in cells)
    groups: dict[tuple[ModelFate | None, ModelFate | None], list[SettingRow]] = {}
    for row, cell in zip(rows, cells, strict=True):
        plain, knowing = (
            None if record is None else question.fate(record, n)
            for record, n in zip((cell.plain, cell.knowing), tried, strict=True)
        )
        if plain is not None or knowing is not None:
            groups.setdefault((plain, knowing), []).append(row)
    verdicts = []
    for (plain, knowing), some in groups.items():
        labels = [row.control for row in some if row.control]
        where = f" at {listed_values(labels)}" if labels and len(groups) > 1 else ""
        first = _strongest_words([question.of(row).plain for row in some], some, question)
        second = _strongest_words([question.of(row).knowing for row in some], some, question)
        sentence = f"What clients train on{where} {_clauses(question, plain, first, knowing, second)}."
        became = joint_fate(side for side in (plain, knowing) if side is not None)
        top = best([case for row in some if (case := question.of(row).worst) is not None], question.metric)
        verdicts.append(_model_verdict(some, question, top, became, sentence))
    return verdicts


def _model_verdict(
    rows: Sequence[SettingRow], question: _Question, top: WorstCase | None, became: Fate | None, sentence: str
) -> Verdict:
    keys = tuple(row.key for row in rows)
    return Verdict(rows[0].key.defense, question.name, became, sentence, keys, top, question.metric)


def _strongest_words(cells: Sequence[WorstCase | None], rows: Sequence[SettingRow], question: _Question) -> str:
    """Return a grid's strongest cell in words: "mia_loss, kappa=1: ASR at most 54.0% [49.0, 58.9]"."""
    top = best([r for r in cells if r is not None], question.metric)
    if top is None:
        return ""
    control = next(row.control for row, record in zip(rows, cells, strict=True) if record is top)
    several = _differ(cells, question)
    at = attack_at(attack_of(top), control if several else "")
    return f"{at}: {question.figures(top, 'at most ' if several else '')}"


def _differ(cells: Sequence[WorstCase | None], question: _Question) -> bool:
    """Return whether a grid's figures differ to three decimals."""
    return len({f"{value(record, question.metric):.3f}" for record in cells if record is not None}) > 1


_CLOSINGS: dict[bool, dict[ModelFate, str]] = {
    True: {
        "falls": " but not {}",
        "part": " but only in part {}",
        "stands": " and {}, as far as tried here",
        "undecided": "; whether {} is undecided",
    },
    False: {
        "falls": "; it does not hide them {}",
        "part": "; it hides them only in part {}",
        "stands": "; un-masking it finds none",
        "undecided": "; whether {} is undecided",
    },
}
"""Second clauses, on attackers who un-mask the model, by whether those who take it as it is find nothing, and fate."""


def _clauses(question: _Question, plain: ModelFate | None, first: str, knowing: ModelFate | None, second: str) -> str:
    """Return clauses on the attacker who takes the model as it is, then on the one who un-masks it."""
    noun, knower = question.noun, "from one who un-masks it"
    if plain is None:
        return f"{_opening(knowing or 'undecided', noun, knower)} ({second}{question.beside})"
    opening = f"{_opening(plain, noun, 'from one who takes it as it is')} ({first}{question.beside})"
    if knowing is None:
        return opening + ("" if plain == "falls" else "; no attack that un-masks it was tried")
    return f"{opening}{_CLOSINGS[plain == 'stands'][knowing].format(knower)} ({second})"


def _opening(fate: ModelFate, noun: str, who: str) -> str:
    return {
        "stands": f"hides {noun} {who}",
        "falls": f"does not hide {noun}, even {who}" if "takes" in who else f"does not hide {noun} {who}",
        "part": f"hides {noun} only in part {who}",
        "undecided": f"leaves it undecided whether {noun} are hidden {who}",
    }[fate]


# -- the delivered model ---------------------------------------------------------------------------------------------
def _strongest_attack(rows: Sequence[SettingRow], question: _Question) -> tuple[WorstCase | None, int, str]:
    """Return the strongest cell of a grid, how many were tried, and "at most " where others differ from it."""
    cells = [r for row in rows if (r := question.of(row).worst) is not None]
    tried = sum(question.of(row).tried for row in rows)
    return best(cells, question.metric), tried, "at most " if _differ(cells, question) else ""


def _delivered(rows: Sequence[SettingRow], question: _Members) -> list[Verdict]:
    """Return the verdict on members by the model that a masking defense delivers."""
    top, tried, few = _strongest_attack(rows, question)
    if top is None:
        return []
    fate = members_fate(top, tried, question.known)
    does = {
        "stands": "hides members from the attacks tried here",
        "falls": f"gives members away{_beside(top, question)}",
        "undecided": "is not shown to give members away, nor to hide them",
    }[fate]
    text = f"{attack_of(top)}: {question.figures(top, few)}{question.beside}"
    return [_model_verdict(rows, question, top, fate, f"The delivered model {does} ({text}).")]


def _beside(top: WorstCase, question: _Members) -> str:
    """Return " as the undefended one does", or "more than", "less than"; "" where that is unknown."""
    metric, none = top.metric("asr"), value(question.known, "asr")
    if none is None or metric is None or metric.low is None or metric.high is None:
        return ""
    as_much = "as" if metric.low <= none <= metric.high else "more than" if metric.low > none else "less than"
    return f" {as_much} the undefended one does"


def _queried(rows: Sequence[SettingRow], question: _Members) -> list[Verdict]:
    """Return the verdict on members by queries to the model of a defense that masks nothing."""
    top, tried, _ = _strongest_attack(rows, question)
    if top is None:
        return []
    fate, beside = members_fate(top, tried, question.known), question.beside if question.undefended is not None else ""
    does = {
        "falls": "distinguishes members from others",
        "stands": "finds no members with the attacks tried here",
        "undecided": "is not shown to find members" + ("; whether they can be found is undecided" if beside else ""),
    }[fate]
    text = f"{attack_of(top)}: {question.figures(top, 'at most ')}{beside}"
    sentence = f"A client who queries the delivered model {does} ({text})."
    return [_model_verdict(rows, question, top, fate, sentence)]


def _answers(rows: Sequence[SettingRow], question: _Outputs) -> list[Verdict]:
    """Return the verdict on whether the delivered model answers as the true one."""
    top, tried, few = _strongest_attack(rows, question)
    if top is None:
        return []
    does = "answers" if same_outputs(top, tried) else "does not answer"
    sentence = f"The delivered model {does} as the true one does ({attack_of(top)}: {question.figures(top, few)})."
    return [_model_verdict(rows, question, top, None, sentence)]
