"""Sentences on what a model gives away to its holder: members of the training data, and the true model's outputs.

A masking defense has clients train on another model than it delivers. Both are judged, separately for attackers who
take the model as it is and for those who know of the mask (`ppbench.report.findings`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.federation.threats import recorded_threat
from ppbench.questions.exposure import EXPOSURE_ABSENT, SECRETS_FIRST, bits
from ppbench.records.figure import Figured, best, grouped
from ppbench.records.schema import Record
from ppbench.report.controls import value
from ppbench.report.findings import (
    Fate,
    Finding,
    ModelFate,
    Verdict,
    audit_of,
    audits_of,
    holders_rows,
    joint_fate,
    refutation_of,
    same_outputs,
)
from ppbench.report.rows import SettingRow, audit_rows, extraction_metric_of, model_rows
from ppbench.report.words import attack_at, figure_text, listed_values
from ppbench.report.worst import Measured, attack_of, cell_of

# -- Sentences on audits: members among canaries and among average records, owners, a lower bound of epsilon --
# An audit trains anew with canaries: unusual records that a model must memorize to fit. They show the worst case;
# average records show the rest. Each figure stands beside the undefended model's.

CANARIES = "canary_auc"


def audit_verdicts(defense: str, records: Sequence[Record], findings: Sequence[Finding]) -> list[Verdict]:
    """Return the verdicts on the audits of `defense`, by adversary and audit. findings: those of `defense`."""
    every = audit_rows(records)
    verdicts: list[Verdict] = []
    several = len({audit_of(row)[1:] for row in every}) > 1
    for audit, mine, none in audits_of(defense, every):
        threat, references, canaries = audit
        members = [one for one in findings if one.subject == "canaries" and audit_of(one.row) == audit]
        own = [*_members(mine, members, none), *_owners(mine, none), *(v for row in mine for v in _epsilon(row))]
        words = f"{threat}, {canaries} canaries, {references} references" if several else threat
        verdicts += [verdict.worded(f"[{words}] {verdict.sentence}") for verdict in own]
    return verdicts


def _strongest_audit(
    rows: Sequence[SettingRow], metric: str
) -> tuple[list[SettingRow], SettingRow | None, Record | None]:
    """Return the rows with a figure, the row in which it is largest, and its cell."""
    measured = [row for row in rows if row.top(metric) is not None]
    top = max(measured, key=lambda row: value(row.top(metric), metric) or 0.0, default=None)
    return measured, top, None if top is None else top.top(metric)


def _members(rows: Sequence[SettingRow], findings: Sequence[Finding], none: SettingRow | None) -> list[Verdict]:
    """Return the verdict on members over the whole grid; its sentence names the strongest attack and control value."""
    if not findings:
        return []
    metric = findings[0].metric
    measured, top, cell = _strongest_audit(rows, metric)
    assert top is not None  # a finding has a figure
    became = joint_fate(one.fate for one in findings)
    shown = "" if became == "falls" else "not shown to be "
    at = attack_at(attack_of(cell), top.control)
    if metric != CANARIES:
        beside = "" if none is None else f"; undefended AUC {figure_text(none.top(metric), metric, '.2f')}"
        sentence = (
            f"In an audit without canaries: Members are {shown}distinguished{'' if shown else ' from others'} "
            f"({at}: AUC {figure_text(cell, metric, '.2f')}{beside})."
        )
    else:
        beside = "" if none is None else f"; undefended {_canaries(none.top(CANARIES))}"
        average = max(measured, key=lambda row: value(row.top("auc"), "auc") or 0.0)
        also = attack_at(attack_of(average.top("auc")), average.control)
        few = "at most " if len(measured) > 1 or findings[0].tried > 1 else ""
        sentence = (
            f"In an audit: Canaries are {shown}distinguished from those left out ({at}: {few}{_canaries(cell)}"
            f"{beside}); average records: {few}AUC {figure_text(average.top('auc'), 'auc', '.2f')} ({also})."
        )
    return [_audit_verdict(measured, cell, metric, became, sentence)]


def _audit_verdict(
    rows: Sequence[SettingRow], top: Record | None, metric: str, became: Fate | None, sentence: str
) -> Verdict:
    return Verdict(rows[0].key.defense, "audit", became, sentence, tuple(row.key for row in rows), top, metric)


def _canaries(record: Record | None) -> str:
    rate = figure_text(record, "canary_tpr_at_1pct_fpr", ".0%")
    return f"AUC {figure_text(record, CANARIES, '.2f')}{_worst_family(record)}" + (
        "" if rate == "-" else f", {rate} of members at 1% false ones"
    )


def _worst_family(record: Record | None) -> str:
    """Return the AUC of the worst family of canaries, where its members are found clearly oftener than those of all."""
    whole = None if record is None else record.metric(CANARIES)
    families = (
        [] if record is None else [m for m in record.metrics if m.name.startswith("auc_") and m.value is not None]
    )
    worst = max(families, key=lambda metric: metric.value or 0.0, default=None)
    if whole is None or worst is None or whole.high is None or worst.low is None or worst.low <= whole.high:
        return ""
    return f" ({worst.value:.2f} of {worst.name.removeprefix('auc_').replace('_', ' ')} ones alone)"


def _owners(rows: Sequence[SettingRow], none: SettingRow | None) -> list[Verdict]:
    name = "tracing_accuracy"
    measured, _, cell = _strongest_audit(rows, name)
    metric = None if cell is None else cell.metric(name)
    if metric is None:
        return []
    beside = "" if none is None else f", undefended {figure_text(none.top(name), name, '.0%')}"
    chance = "" if metric.chance is None else f", chance {metric.chance:.0%}"
    share = ("at most " if len(measured) > 1 else "") + figure_text(cell, name, ".0%")
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
    refutation = refutation_of(row.records)
    above = refutation is not None and refutation.by == "audit"
    refuted = "; the guarantee is REFUTED, unless this is the one such bound in twenty that errs" if above else ""
    gaussian = value(cell, "epsilon_gaussian")
    also = "" if not gaussian else f"; {gaussian:.2g} if the mechanism is Gaussian"
    sentence = (
        f"One run shows that epsilon is at least {bound:.2g}{at} ({attack_of(cell)}, 95 %{also}){claim}{refuted}."
    )
    return [_audit_verdict([row], cell, "epsilon_lower", "falls" if above else None, sentence)]


def secret_verdicts(findings: Sequence[Finding]) -> list[Verdict]:
    """Return a verdict for each audited setting with secrets: by how many bits training exposes them."""
    return [_secret_verdict(one) for one in findings if one.subject == "secrets"]


def _secret_verdict(one: Finding) -> Verdict:
    cell, beside = cell_of(one.top), value(one.undefended.figure, one.metric)
    metric, first = cell.metric(one.metric), cell.metric(SECRETS_FIRST.name)
    assert metric is not None and metric.chance is not None and first is not None and first.chance  # it was judged
    forms = round(1 / first.chance)
    figure = f"{figure_text(cell, one.metric, '.1f')} of {bits(1, forms):g} bits"
    unsure = f"is not shown to expose its names and numbers ({figure})"
    does = f"exposes its names and numbers by {figure}" if one.fate == "falls" else unsure
    none, absent = "" if beside is None else f"undefended {beside:.1f}, ", value(cell, EXPOSURE_ABSENT.name)
    alone = "" if absent is None else f"absent texts {absent:.1f}, "
    at = f" ({one.row.control})" if one.row.control else ""
    sentence = (
        f"[{one.row.key.threat}] In an audit{at}: Training on a text {does}; {first.value or 0.0:.0%} of {metric.n} "
        f"planted texts are ranked first of {forms} forms ({none}{alone}chance {metric.chance:.1f} bits)."
    )
    return Verdict(one.row.key.defense, "secrets", one.fate, sentence, (one.row.key,), one.top, one.metric)


def model_verdicts(defense: str, records: Sequence[Record], findings: Sequence[Finding]) -> list[Verdict]:
    """Return the verdicts on members and true outputs, by adversary. findings: those of `defense`."""
    own = holders_rows(defense, model_rows(records))
    masked = any(row.key.stage == "iterate" for row in own)
    verdicts: list[Verdict] = []
    for threat in sorted({row.key.threat for row in own}):
        prefix = "" if recorded_threat(threat).lone_client else f"[{threat}] "
        mine = [one for one in findings if one.row.key.threat == threat and one.row.key.stage != "audit"]
        trained_on = [one for one in mine if one.row.key.stage == "iterate"]
        delivered = [one for one in mine if one.subject == "members" and one.row.key.stage == "final"]
        results = [
            v for subject in ("members", "outputs") for v in _masked([f for f in trained_on if f.subject == subject])
        ]
        results += _delivered(delivered, masked)
        results += _answers([r for r in own if (r.key.threat, r.key.stage) == (threat, "final")])
        verdicts += [verdict.worded(prefix + verdict.sentence) for verdict in results]
    return verdicts


def _figures(subject: str, metric: str, record: Figured, few: str = "") -> str:
    """Return "ASR 54.0% [49.0, 58.9]", or of outputs "agrees with it on 99.8% of queries, relative error 1.2%"."""
    if subject == "members":
        return f"ASR {few}{figure_text(record, 'asr', '.1%')}"
    form, unit = (".1%", "") if (value(record, "output_error") or 0.0) < 10 else (".0f", " times their size")
    error = f"relative error {figure_text(record, 'output_error', form, unit)}"
    if metric == "output_error":
        return error
    return f"agrees with it on {few}{figure_text(record, 'agreement', '.1%')} of queries, {error}"


def _beside(one: Finding, missing: str = ", undefended: not attacked") -> str:
    """Return the undefended model's figure on members, in words; missing: where there is none."""
    if one.subject != "members":
        return ""
    if one.undefended.figure is None:
        return missing
    weak = "" if one.undefended.known("asr") is not None else ", not above chance itself"
    return f", undefended {figure_text(one.undefended.figure, 'asr', '.1%')}{weak}"


def _verdict(findings: Sequence[Finding], sentence: str) -> Verdict:
    """Return the verdict on one subject in some settings."""
    first, keys = findings[0], tuple(one.row.key for one in findings)
    top, became = best([one.top for one in findings], first.metric), joint_fate(one.fate for one in findings)
    what = "members" if first.subject == "members" else "outputs"
    return Verdict(first.row.key.defense, what, became, sentence, keys, top, first.metric)


# -- the model that clients train on ---------------------------------------------------------------------------------
def _masked(findings: Sequence[Finding]) -> list[Verdict]:
    """Return one verdict per group of control values with one outcome for both attackers."""
    groups = grouped(findings, lambda one: (one.plain, one.knowing))
    verdicts = []
    for (plain, knowing), some in groups.items():
        labels = [one.row.control for one in some if one.row.control]
        where = f" at {listed_values(labels)}" if labels and len(groups) > 1 else ""
        first = _strongest_words([one.sides.plain for one in some], some)
        second = _strongest_words([one.sides.knowing for one in some], some)
        sentence = f"What clients train on{where} {_clauses(some[0], plain, first, knowing, second)}."
        verdicts.append(_verdict(some, sentence))
    return verdicts


def _strongest_words(cells: Sequence[Measured | None], findings: Sequence[Finding]) -> str:
    """Return a grid's strongest cell in words: "mia_loss, kappa=1: ASR at most 54.0% [49.0, 58.9]"."""
    subject, metric = findings[0].subject, findings[0].metric
    top = best([r for r in cells if r is not None], metric)
    if top is None:
        return ""
    control = next(one.row.control for one, record in zip(findings, cells, strict=True) if record is top)
    several = _differ(cells, metric)
    at = attack_at(attack_of(top), control if several else "")
    return f"{at}: {_figures(subject, metric, top, 'at most ' if several else '')}"


def _differ(cells: Sequence[Measured | None], metric: str) -> bool:
    """Return whether a grid's figures differ to three decimals."""
    return len({f"{value(record, metric):.3f}" for record in cells if record is not None}) > 1


_CLOSINGS: dict[bool, dict[ModelFate, str]] = {
    True: {
        "falls": " but not {}",
        "part": " but only in part {}",
        "stands": " and {}",
        "undecided": "; whether {} is undecided",
    },
    False: {
        "falls": "; it does not hide them {}",
        "part": "; it hides them only in part {}",
        "stands": "; the attacks tried here that un-mask it find none",
        "undecided": "; whether {} is undecided",
    },
}
"""Second clauses, on attackers who un-mask the model, by whether those who take it as it is find nothing, and fate."""


def _clauses(one: Finding, plain: ModelFate | None, first: str, knowing: ModelFate | None, second: str) -> str:
    """Return clauses on the attacker who takes the model as it is, then on the one who un-masks it."""
    decides = "decisions" if one.metric == "agreement" else "predictions"
    noun, knower = "members" if one.subject == "members" else f"the true model's {decides}", "from one who un-masks it"
    if plain is None:
        return f"{_opening(knowing or 'undecided', noun, knower)} ({second}{_beside(one)})"
    opening = f"{_opening(plain, noun, 'from one who takes it as it is')} ({first}{_beside(one)})"
    if knowing is None:
        return opening + ("" if plain == "falls" else "; no attack that un-masks it was tried")
    return f"{opening}{_CLOSINGS[plain == 'stands'][knowing].format(knower)} ({second})"


def _opening(fate: ModelFate, noun: str, who: str) -> str:
    return {
        "stands": f"hides {noun}, as far as tried here, {who}",
        "falls": f"does not hide {noun}, even {who}" if "takes" in who else f"does not hide {noun} {who}",
        "part": f"hides {noun} only in part {who}",
        "undecided": f"leaves it undecided whether {noun} are hidden {who}",
    }[fate]


# -- the delivered model ---------------------------------------------------------------------------------------------
def _delivered(findings: Sequence[Finding], masked: bool) -> list[Verdict]:
    """Return the verdict on members by the delivered model. masked: whether the defense masks what clients train on."""
    top = best([one.top for one in findings], "asr")
    if top is None:
        return []
    one, became = findings[0], joint_fate(one.fate for one in findings)
    few = "at most " if not masked or _differ([one.top for one in findings], "asr") else ""
    beside = _beside(one) if masked else _beside(one, "")
    text = f"{attack_of(top)}: {_figures('members', 'asr', top, few)}{beside}"
    head = "The delivered model" if masked else f"{recorded_threat(one.row.key.threat).querier} the delivered model"
    return [_verdict(findings, f"{head} {_delivers(became, one, top, masked)} ({text}).")]


def _delivers(became: Fate, one: Finding, top: Measured, masked: bool) -> str:
    if masked:
        return {
            "stands": "hides members from the attacks tried here",
            "falls": f"gives members away{_as_much(one, top)}",
            "undecided": "is not shown to give members away, nor to hide them",
        }[became]
    unsure = "; whether they can be found is undecided" if one.undefended.figure is not None else ""
    return {
        "falls": "distinguishes members from others",
        "stands": "finds no members with the attacks tried here",
        "undecided": f"is not shown to find members{unsure}",
    }[became]


def _as_much(one: Finding, top: Measured) -> str:
    """Return " as the undefended one does", or "more than", "less than"; "" where that is unknown."""
    metric, none = top.metric("asr"), value(one.undefended.known("asr"), "asr")
    if none is None or metric is None or metric.low is None or metric.high is None:
        return ""
    as_much = "as" if metric.low <= none <= metric.high else "more than" if metric.low > none else "less than"
    return f" {as_much} the undefended one does"


def _answers(rows: Sequence[SettingRow]) -> list[Verdict]:
    """Return the statement on whether the delivered model answers as the true one, which is no verdict on privacy."""
    cells = [row.outputs.worst for row in rows if row.outputs.worst is not None]
    metric = extraction_metric_of(cells)
    top, tried = best(cells, metric), sum(row.outputs.tried for row in rows)
    if top is None:
        return []
    does = "answers" if same_outputs(top, tried) else "does not answer"
    few = "at most " if _differ(cells, metric) else ""
    words = f"{attack_of(top)}: {_figures('outputs', metric, top, few)}"
    sentence = f"The delivered model {does} as the true one does ({words})."
    return [Verdict(rows[0].key.defense, "outputs", None, sentence, tuple(row.key for row in rows), top, metric)]
