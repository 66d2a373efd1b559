"""What settings give away beside inputs: who was in a batch, members, canaries, secrets, the true model's outputs.

Each is judged here once; the table of settings, JSON and sentences read it. A figure is judged as the largest of all
cells of its question on the defense in that scene, over its control values, since the largest is what is reported. Also
judged is whether a run refutes the epsilon that its defense states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from ppbench.federation.threats import recorded_threat
from ppbench.metrics.epsilon import success_bound
from ppbench.metrics.intervals import CONFIDENCE, lower_bound
from ppbench.questions.exposure import EXPOSURE
from ppbench.questions.membership import ASR, AUC, BATCH_ASR, CANARY_AUC
from ppbench.questions.recognition import RECOGNITION_METRICS, REIDENTIFIED, gallery_size, successes_of
from ppbench.records.figure import Figured, best, grouped
from ppbench.records.schema import Record
from ppbench.report.controls import BELIED, above_chance, exceeds_chance, value, widened
from ppbench.report.frame import EVALUATION, Key, frame_of
from ppbench.report.leak import FEWEST_UNITS, Leak, Level
from ppbench.report.learning import learning_of
from ppbench.report.rows import (
    SettingRow,
    Sides,
    audit_rows,
    extraction_metric_of,
    judged_keys,
    model_rows,
    secret_rows,
    upload_rows,
)
from ppbench.report.worst import Measured, attack_of, cell_of

READ_SHARE, HARDLY_READ = 0.9, 0.2
"""Shares of the true decisions, beyond chance: read from the first on, hardly any below the second."""
READ_ERROR, UNREAD_ERROR = 0.2, 0.5
"""Relative errors of predicted numbers: read up to the first, not read from the second on."""
Fate = Literal["falls", "stands", "undecided"]
"""What a judgment comes to: something is shown to leak, it is shown not to, or neither."""
ModelFate = Literal["falls", "part", "stands", "undecided"]
"""The same of one attacker on a model: outputs may be read in part."""
Subject = Literal["batch members", "members", "canaries", "secrets", "outputs"]


def fate_of(level: Level) -> Fate:
    """Return the fate of inputs with a level of leak."""
    return "falls" if level in ("rebuilt", "recognizable") else "stands" if level == "blind" else "undecided"


def members_fate(record: Figured, tried: int, undefended: Figured | None, name: str = "asr") -> Fate:
    """Return whether the strongest of `tried` cells finds members, by the metric `name`.

    "falls": it lies above chance at Bonferroni's level; "stands": it does not, and lies below `undefended`, a cell that
    finds members of the undefended model; else "undecided".
    """
    if above_chance(record, name, tried):
        return "falls"
    metric, beside = record.metric(name), value(undefended, name)
    if metric is None or metric.high is None or beside is None:
        return "undecided"
    return "stands" if metric.high < beside else "undecided"


def outputs_fate(record: Figured, tried: int) -> ModelFate:
    """Return whether an attack reads the true model's outputs: nearly all, in part, or hardly any.

    Decisions are judged by their agreement beyond chance, (a - chance) / (1 - chance); predictions of numbers,
    and those of a model that always decides alike, by their relative error. The interval is Bonferroni's for `tried`
    cells.
    """
    agreement = record.metric("agreement")
    chance = 1.0 if agreement is None else agreement.chance or 0.0
    if record.config.model.classes > 1 and chance < 1:
        ends = widened(agreement, tried)
        if ends is None:
            return "undecided"
        low, high = ((end - chance) / (1 - chance) for end in ends)
        return (
            "falls"
            if low >= READ_SHARE
            else "stands"
            if high < HARDLY_READ
            else "part"
            if low >= HARDLY_READ
            else "undecided"
        )
    ends = widened(record.metric("output_error"), tried)
    if ends is None:
        return "undecided"
    low, high = ends
    return (
        "falls"
        if high <= READ_ERROR
        else "stands"
        if low >= UNREAD_ERROR
        else "part"
        if high < UNREAD_ERROR
        else "undecided"
    )


def same_outputs(record: Figured, tried: int) -> bool:
    """Return whether a model answers as the true one, by its decisions or by its outputs."""
    ends = widened(record.metric("output_error"), tried)
    return outputs_fate(record, tried) == "falls" or (ends is not None and ends[1] <= READ_ERROR)


def joint_fate(fates: Iterable[ModelFate]) -> Fate:
    """Return the joint fate of several attacks or settings: "falls" where any does, "stands" where all do."""
    every = set(fates)
    return "falls" if every & {"falls", "part"} else "stands" if every == {"stands"} else "undecided"


# -- findings: one for each setting and subject ------------------------------------------------------------------------
@dataclass(frozen=True)
class Undefended:
    """The undefended model's figure beside a finding. figure: the strongest cell, one of `tried`, or None."""

    figure: Measured | None = None
    tried: int = 1

    def known(self, metric: str) -> Measured | None:
        """Return the figure where it is above chance, so that staying below it means something."""
        return self.figure if above_chance(self.figure, metric, self.tried) else None


@dataclass(frozen=True)
class Finding:
    """What one setting gives away of a subject, in one scene at one seed.

    metric: the figure that decides; sides: the strongest unaware and aware attacks; tried: how many cells of the
    defense were tried, over its grid; plain, knowing: the outcome by each side where they are judged apart.
    """

    row: SettingRow
    subject: Subject
    metric: str
    fate: Fate
    sides: Sides
    tried: int
    undefended: Undefended = Undefended()
    plain: ModelFate | None = None
    knowing: ModelFate | None = None

    @property
    def top(self) -> Measured:
        """The strongest attack."""
        assert self.sides.worst is not None  # else there is no finding
        return self.sides.worst


def findings_of(records: Sequence[Record]) -> list[Finding]:
    """Return what is given away beside inputs in each setting of each defense, evaluation by evaluation.

    Nothing stands where the undefended model learned too little.
    """
    every: list[Finding] = []
    for some in frame_of(records).by(EVALUATION).values():
        judges = (
            (_in_batches, upload_rows(some)), (_of_models, model_rows(some)), (_of_audits, audit_rows(some)),
            (_of_secrets, secret_rows(some)),
        )  # fmt: skip
        defenses = dict.fromkeys(r.config.defense.id for r in some)
        own = [one for name in defenses for judge, rows in judges for one in judge(name, rows)]
        learned = next((learning_of(r.utility) for r in some if r.config.defense.id == "none"), None)
        every += own if learned is None or learned.suffices else map(_unproven, own)
    return every


def _unproven(one: Finding) -> Finding:
    """Return the finding beside an undefended model that learned too little for anything to stand."""
    plain, knowing = (_unless_stands(side) for side in (one.plain, one.knowing))
    return replace(one, fate="undecided" if one.fate == "stands" else one.fate, plain=plain, knowing=knowing)


def _unless_stands(side: ModelFate | None) -> ModelFate | None:
    return "undecided" if side == "stands" else side


def _view(row: SettingRow) -> tuple[object, ...]:
    """Return what an adversary sees of uploads in a row."""
    key = row.key
    return key.threat, key.auxiliary, key.probing, key.stage, key.batch


def _in_batches(defense: str, rows: Sequence[SettingRow]) -> Iterator[Finding]:
    """Yield what uploads reveal of who was in a batch, in the scene of each setting where they do, else the easiest."""
    name = BATCH_ASR.name
    attacked = [row for row in rows if row.top(name) is not None]
    own = [row for row in attacked if row.key.defense == defense]
    tried = sum(value(record, name) is not None for row in own for record in row.records)
    revealing = {row.key for row in own if above_chance(row.top(name), name, tried)}
    judged = judged_keys((row.key for row in own), revealing)
    own = [row for row in own if row.key in judged]
    for mine in grouped(own, lambda row: (*_view(row), row.key.role)).values():
        beside = [r.top(name) for r in attacked if r.key.defense == "none" and _view(r) == _view(mine[0])]
        undefended = Undefended(None if defense == "none" else next(iter(beside), None))
        tried = sum(value(record, name) is not None for row in mine for record in row.records)
        for row in mine:
            sides = Sides.of(row.records, name)
            assert sides.worst is not None  # it was attacked
            became = members_fate(sides.worst, tried, undefended.known(name), name)
            if became == "stands" and any(flag.code in BELIED for record in row.records for flag in record.flags):
                became = "undecided"
            yield Finding(row, "batch members", name, became, sides, tried, undefended)


def holders_rows(defense: str, rows: Sequence[SettingRow]) -> list[SettingRow]:
    """Return a defense's rows on models, without the delivered model's to who sees uploads where a client's are there.

    These are asked about the same records of the same model. Clients who collude are not: nobody asks about their own.
    """
    own = [row for row in rows if row.key.defense == defense]
    client = any(row.key.stage == "final" and recorded_threat(row.key.threat).lone_client for row in own)
    return [r for r in own if r.key.stage != "final" or not client or not recorded_threat(r.key.threat).sees_uploads]


def _of_models(defense: str, rows: Sequence[SettingRow]) -> Iterator[Finding]:
    """Yield what models give away to their holders of members and, where clients train on a mask, of outputs."""
    own = holders_rows(defense, rows)
    for threat, stage in sorted({(row.key.threat, row.key.stage) for row in own}):
        mine = [row for row in own if (row.key.threat, row.key.stage) == (threat, stage)]
        undefended = _undefended_members(rows, threat, stage, defense)
        known, asr = undefended.known(ASR.name), ASR.name
        sides = [(row, row.members) for row in mine]
        if stage == "iterate":
            yield from _sided("members", asr, sides, partial(members_fate, undefended=known), undefended)
            outputs = [(row, row.outputs) for row in mine]
            name = extraction_metric_of([r for row in mine for r in row.records])
            yield from _sided("outputs", name, outputs, outputs_fate, Undefended())
            continue
        tried = sum(one.tried for _, one in sides)
        for row, one in sides:
            if one.worst is not None:
                became = members_fate(one.worst, tried, known)
                yield Finding(row, "members", asr, became, one, tried, undefended)


def _sided(
    subject: Subject,
    metric: str,
    rows: Sequence[tuple[SettingRow, Sides]],
    fate: Callable[[Figured, int], ModelFate],
    undefended: Undefended,
) -> Iterator[Finding]:
    """Yield the findings on what clients train on, judged apart for attackers who un-mask it and those who do not."""
    plain_tried, knowing_tried = (sum(getattr(s, name) for _, s in rows) for name in ("plain_tried", "knowing_tried"))
    for row, sides in rows:
        if sides.worst is None:
            continue
        plain = None if sides.plain is None else fate(sides.plain, plain_tried)
        knowing = None if sides.knowing is None else fate(sides.knowing, knowing_tried)
        became = joint_fate(side for side in (plain, knowing) if side is not None)
        yield Finding(row, subject, metric, became, sides, plain_tried + knowing_tried, undefended, plain, knowing)


def _undefended_members(rows: Sequence[SettingRow], threat: str, stage: str, defense: str) -> Undefended:
    """Return the strongest figure on members of `none` at the same stage, the only one that compares."""
    some = [r for r in rows if (r.key.defense, r.key.stage) == ("none", stage) and r.members.tried]
    some = [] if defense == "none" else [r for r in some if r.key.threat == threat] or some
    strongest = best([r for row in some if (r := row.members.worst) is not None], ASR.name)
    return Undefended(strongest, sum(row.members.tried for row in some))


def audit_of(row: SettingRow) -> tuple[str, int, int]:
    """Return the key of a row's audit: threat model, number of references, number of canaries."""
    audit = row.key.audit
    return (row.key.threat, 0, 0) if audit is None else (row.key.threat, audit.references, audit.canaries)


def audits_of(
    defense: str, rows: Sequence[SettingRow]
) -> Iterator[tuple[tuple[str, int, int], list[SettingRow], SettingRow | None]]:
    """Yield each audit of a defense: its key (`audit_of`), its rows, and the undefended model's row beside them."""
    for audit in sorted({audit_of(row) for row in rows if row.key.defense == defense}):
        alike = [row for row in rows if audit_of(row) == audit]
        none = next((row for row in alike if row.key.defense == "none" != defense), None)
        yield audit, [row for row in alike if row.key.defense == defense], none


def _of_audits(defense: str, rows: Sequence[SettingRow]) -> Iterator[Finding]:
    """Yield what audits find of canaries, or of average members in audits without canaries."""
    for _, mine, none in audits_of(defense, rows):
        name = CANARY_AUC.name if any(row.top(CANARY_AUC.name) for row in mine) else AUC.name
        undefended = Undefended(None if none is None else none.top(name))
        families = family_metrics(mine) if name == CANARY_AUC.name else []
        tried = sum(len(row.of("membership")) for row in mine)
        for row in mine:
            sides = Sides.of(row.records, name)
            if sides.worst is not None:
                alone = any(
                    above_chance(record, one, tried * len(families)) for record in row.records for one in families
                )
                became: Fate = "falls" if alone or above_chance(sides.worst, name, tried) else "undecided"
                yield Finding(row, "canaries", name, became, sides, tried, undefended)


def _of_secrets(defense: str, rows: Sequence[SettingRow]) -> Iterator[Finding]:
    """Yield whether audits find that training exposes the secrets of planted texts: by more bits than chance."""
    name = EXPOSURE.name
    for _, mine, none in audits_of(defense, rows):
        undefended = Undefended(None if none is None else none.top(name))
        tried = sum(value(record, name) is not None for row in mine for record in row.records)
        for row in mine:
            sides = Sides.of(row.records, name)
            metric = None if sides.worst is None else sides.worst.metric(name)
            if metric is not None:
                exposed = metric.n >= FEWEST_UNITS and exceeds_chance(metric, tried)
                yield Finding(row, "secrets", name, "falls" if exposed else "undecided", sides, tried, undefended)


def family_metrics(rows: Sequence[SettingRow]) -> list[str]:
    """Return the names of the AUCs of single families of canaries: the worst family counts."""
    names = (metric.name for row in rows for record in row.records for metric in record.metrics)
    return sorted({name for name in names if name.startswith(f"{AUC.name}_")})


# -- Whether a run refutes the stated epsilon: an attack that succeeds more often than it allows --

SHARES = ("label_accuracy", "batch_asr", "asr")
"""Shares of right answers, beside the `RECOGNITION_METRICS`, that a guarantee bounds."""


@dataclass(frozen=True)
class Refutation:
    """A refutation. by: "audit" or "attack"; words: the figure beside the one that the stated epsilon allows."""

    by: str
    words: str


def refutation_of(records: Sequence[Record]) -> Refutation | None:
    """Return the clearest refutation of the stated epsilon by the cells of one training, or None.

    Intervals have Bonferroni's level for all figures tested; an audit's bound has its own.
    """
    strongest = best(records, "epsilon_lower")
    claimed = next((r.privacy.epsilon for r in records if r.privacy.epsilon is not None), None)
    bound = None if strongest is None else strongest.metric("epsilon_lower")
    if claimed is not None and bound is not None and bound.value is not None and bound.value > claimed:
        return Refutation(
            "audit", f"an audit shows that epsilon is at least {bound.value:.2g}, {claimed:.3g} is stated"
        )
    figures = [(r, name) for r in records for name in (*RECOGNITION_METRICS, *SHARES) if _bounded(r, name)]
    excesses = [one for r, name in figures if (one := _excess(r, name, len(figures))) is not None]
    if not excesses:
        return None
    return Refutation("attack", max(excesses)[1])


def _guarantee(record: Record) -> tuple[float, float] | None:
    """Return (epsilon, delta) of the attacked uploads, or of the training of an attacked model; None without any."""
    privacy, stage = record.privacy, record.config.stage
    if stage == "audit" or record.config.attack.oracle or record.status != "complete":
        return None
    pair = (privacy.epsilon, privacy.delta)
    if record.metric("asr") is None:
        pair = (privacy.probe_epsilon, privacy.probe_delta)
    elif stage != "final":
        return None
    return None if pair[0] is None or pair[1] is None else (pair[0], pair[1])


def _bounded(record: Record, name: str) -> bool:
    """Return whether a guarantee bounds a figure; not in larger batches, where answers are matched to examples."""
    metric = record.metric(name)
    alone = name in ("batch_asr", "asr") or record.config.batch_size == 1
    return metric is not None and metric.value is not None and alone and _guarantee(record) is not None


def _excess(record: Record, name: str, tried: int) -> tuple[float, str] | None:
    """Return by how much a figure's interval exceeds what the guarantee allows, with words; None if it does not."""
    metric, guarantee = record.metric(name), _guarantee(record)
    assert metric is not None and guarantee is not None  # `_bounded`
    chance = metric.chance if metric.chance is not None else 0.5
    if name == "label_accuracy" or name.startswith("recognized"):
        chance = max(chance, record.utility.floor)  # a guess of the commonest class needs no upload
    allowed = success_bound(chance, *guarantee)
    if name in RECOGNITION_METRICS:
        low = lower_bound([*successes_of(name, record.victims).values()], (1 - CONFIDENCE) / 2 / tried)
    else:
        low = (widened(metric, tried) or (0.0, 1.0))[0]
    if low <= allowed:
        return None
    what = f"{metric.value:.0%} of {_noun(record, name)}"
    return low - allowed, f"{attack_of(record)} finds {what}, epsilon {guarantee[0]:.3g} allows {allowed:.0%}"


def _noun(record: Record, name: str) -> str:
    if name.startswith(REIDENTIFIED):
        return f"images among {gallery_size(record.victims)} others"
    if name == "label_accuracy" or name in RECOGNITION_METRICS:
        return "labels"
    return "members (attack success rate)"


# -- Verdicts: one sentence for each question about a defense, with what it renders --


@dataclass(frozen=True)
class Verdict:
    """The verdict on one question; sentences, terminal, page and JSON use it.

    question: "pixels", "rows", "labels", "members", "outputs", "secrets", "audit", "guarantee", "usability", or of
    another package; fate: None where figures are only reported; settings: keys by `SETTING`; strongest: the source of
    the figures; metric: the one that decides, or ""; leak: for inputs, that of the strongest figure.
    """

    defense: str
    question: str
    fate: Fate | None
    sentence: str
    settings: tuple[Key, ...] = ()
    strongest: Measured | None = None
    metric: str = ""
    leak: Leak | None = None

    def worded(self, sentence: str) -> Verdict:
        """Return the same verdict with another sentence."""
        return replace(self, sentence=sentence)

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict in types that JSON has, with its settings, cell and figure."""
        figure = None if self.strongest is None or not self.metric else self.strongest.metric(self.metric)
        return {
            "defense": self.defense,
            "question": self.question,
            "fate": self.fate,
            "level": None if self.leak is None else self.leak.level,
            "level_plain": None if self.leak is None else self.leak.plain,
            "qualifiers": [] if self.leak is None else [vars(one) for one in self.leak.qualifiers],
            "settings": [_setting(key) for key in self.settings],
            "attack": None if self.strongest is None else attack_of(self.strongest),
            "cell_id": None if self.strongest is None else cell_of(self.strongest).cell_id,
            "figure": None if figure is None else figure.model_dump(),
            "sentence": self.sentence,
        }


def _setting(key: Key) -> dict[str, Any]:
    """Return what tells a setting of one verdict from the others, in types that JSON has."""
    audit = key.audit
    return {
        **{name: getattr(key, name) for name in ("control", "value", "threat", "stage", "batch", "role")},
        **key.probing.model_dump(),
        "references": None if audit is None else audit.references,
        "canaries": None if audit is None else audit.canaries,
    }
