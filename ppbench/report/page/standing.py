"""A defense's results over its control values and seeds, and the setting that its row shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from ppbench.metrics.epsilon import epsilon_words
from ppbench.records.figure import best, leakage_value
from ppbench.records.schema import Metric, Record
from ppbench.report.controls import above_chance, rebuilding, value, widened
from ppbench.report.leak import LEVEL_WORDS, SEVERITY, Leak
from ppbench.report.learning import Learning, LearningState, keeps_enough, learning_of, points_lost, score_of
from ppbench.report.page.costs import CostRow
from ppbench.report.page.entries import Entry
from ppbench.report.refutation import Refutation
from ppbench.report.verdict.verdict import members_fate, outputs_fate
from ppbench.report.worst import Measured, WorstCase, attack_of

Tone = Literal["info", "good", "warning", "error"]
KEEPS: tuple[str, Tone] = ("members not found", "good")


@dataclass(frozen=True)
class SeedValue:
    """A defense at one control value and seed.

    entry: its row of the judged boards that leaks most; leak: that of the row; labels: the cell with the highest label
    accuracy; batch: the strongest cell on members of a batch, in that scene; members, canaries, outputs: the strongest
    cells; membership, tried: the strongest membership cells by metric, and the number of all; reliable: whether the
    controls of its evaluation hold and the undefended model falls on all judged boards; lacking: whether an attack
    failed or training diverged; cost: its row of the costs.
    """

    entry: Entry
    leak: Leak | None
    labels: Record | None
    batch: Record | None
    members: Record | None
    canaries: Record | None
    membership: tuple[tuple[str, Record], ...]
    outputs: Record | None
    tried: int
    reliable: bool
    lacking: bool
    cost: CostRow | None

    @property
    def worst(self) -> WorstCase | None:
        """The worst case of reconstructions; None without any figure."""
        return None if self.leak is None else self.leak.worst

    @property
    def metric(self) -> Metric | None:
        """The headline metric of the worst case."""
        return None if self.worst is None else self.worst.metric(rebuilding(self.worst))

    @property
    def accuracy(self) -> float | None:
        """The delivered model's accuracy."""
        return self.entry.sample.utility.accuracy

    @property
    def refutation(self) -> Refutation | None:
        """The refutation of the stated epsilon, or None."""
        return None if self.cost is None else self.cost.refutation

    @property
    def refuted(self) -> bool:
        """Whether the stated epsilon is refuted."""
        return self.refutation is not None

    @property
    def gives_members(self) -> bool:
        """Whether members or canaries are found above chance, at the level of all cells tried."""
        return any(above_chance(record, name, self.tried) for name, record in self.membership)

    @property
    def gives_labels(self) -> bool:
        """Whether labels are recovered above chance, at the level of all attacks on the row.

        The share of the commonest class counts as chance where it is larger.
        """
        if self.labels is None or not above_chance(self.labels, "label_accuracy", len(self.entry.records)):
            return False
        ends = widened(self.labels.metric("label_accuracy"), len(self.entry.records))
        return ends is None or ends[0] > self.labels.utility.floor

    @property
    def recovered(self) -> tuple[str, ...]:
        """What is recovered beside inputs: "labels", "members"."""
        parts = (("labels", self.gives_labels), ("members", self.gives_members))
        return tuple(word for word, is_recovered in parts if is_recovered)


@dataclass(frozen=True)
class Judgement:
    """The judgment of a setting. fate: "leaks" if shown, "withstands" if in every seed, else "open" or "silent".

    verdict: in a few words; tone: whether it is good news; seeds: number of seeds with that fate.
    """

    fate: Literal["leaks", "withstands", "open", "silent"]
    verdict: str
    tone: Tone
    seeds: int = 1


@dataclass(frozen=True)
class Setting:
    """A defense at one control value over all its seeds.

    values: one for each seed; none: the undefended model at the same seeds, or None; seeds: how many seeds there are;
    tried: how many settings the defense has; differs: differences from others beside the control value. Figures are
    those of the seed that leaks most; accuracy is the mean.
    """

    values: tuple[SeedValue, ...]
    none: Setting | None
    seeds: int
    tried: int = 1
    differs: str = ""

    @cached_property
    def sound(self) -> tuple[SeedValue, ...]:
        """The values of reliable evaluations."""
        return tuple(v for v in self.values if v.reliable)

    @cached_property
    def shown(self) -> SeedValue:
        """The value that leaks most, of the reliable ones if there are any."""
        return max(self.sound or self.values, key=_severity)

    @property
    def entry(self) -> Entry:
        """The row of that seed."""
        return self.shown.entry

    @property
    def leak(self) -> Leak | None:
        """That seed's leak of inputs."""
        return self.shown.leak

    @property
    def worst(self) -> WorstCase | None:
        """That seed's worst case."""
        return self.shown.worst

    @property
    def metric(self) -> Metric | None:
        """The headline metric of that worst case."""
        return self.shown.metric

    @property
    def cost(self) -> CostRow | None:
        """That seed's costs."""
        return self.shown.cost

    @property
    def labels(self) -> Record | None:
        """The cell with the highest label accuracy of all seeds."""
        return best([v.labels for v in self.values if v.labels is not None], "label_accuracy")

    @property
    def reidentified(self) -> Measured | None:
        """The cell, or worst case, of that seed with the most originals re-identified among held-out images."""
        tops = () if self.leak is None else self.leak.everybody.readers
        return next((top for name, top in tops if name == "reidentified"), None)

    @property
    def batch(self) -> Record | None:
        """The strongest cell of all seeds on members of a batch."""
        return best([v.batch for v in self.values if v.batch is not None], "batch_asr")

    @property
    def members(self) -> Record | None:
        """The strongest membership cell of all seeds."""
        return best([v.members for v in self.values if v.members is not None], "asr")

    @property
    def canaries(self) -> Record | None:
        """The strongest audit of all seeds."""
        return best([v.canaries for v in self.values if v.canaries is not None], "canary_tpr_at_1pct_fpr")

    @property
    def outputs(self) -> Record | None:
        """The strongest extraction of all seeds."""
        cells = [v.outputs for v in self.values if v.outputs is not None]
        return best(cells, "agreement") or best(cells, "output_error")

    @property
    def accuracy(self) -> float | None:
        """The delivered model's accuracy, the mean over seeds; None where one has none."""
        return _mean([v.accuracy for v in self.values])

    @property
    def mse(self) -> float | None:
        """The mean squared error where targets are numbers, the mean over seeds."""
        return _mean([v.entry.sample.utility.mse for v in self.values])

    @property
    def use(self) -> float:
        """The model's utility, larger is better: its accuracy, or minus its error."""
        if self.accuracy is not None:
            return self.accuracy
        return -float("inf") if self.mse is None else -self.mse

    @cached_property
    def refutation(self) -> Refutation | None:
        """A refutation of the stated epsilon at some seed, or None."""
        return next((v.refutation for v in self.sound if v.refutation is not None), None)

    @property
    def refuted(self) -> bool:
        """Whether the stated epsilon is refuted at some seed."""
        return self.refutation is not None

    @property
    def epsilon(self) -> str:
        """The stated guarantee in words, whether vacuous or refuted; "" where none is stated."""
        stated = self.entry.sample.privacy.epsilon
        if stated is None:
            return ""
        return f"refuted ({stated:.3g})" if self.refuted else epsilon_words(stated)

    @property
    def recovered(self) -> tuple[str, ...]:
        """What is recovered beside inputs at some seed: "labels", "members"."""
        return tuple(word for word in ("labels", "members") if any(word in v.recovered for v in self.values))

    @property
    def lacking(self) -> bool:
        """Whether an attack failed, or training diverged, at some seed."""
        return any(v.lacking for v in self.values)

    @property
    def loss(self) -> float | None:
        """Points of accuracy gained over the undefended model of the same seeds, below 0 where it loses.

        None where that one learned too little.
        """
        loss = points_lost(self.accuracy, _mean([v.accuracy for v in self._same_seeds]))
        known = self.none is not None and self.none.learning.suffices
        return None if loss is None or not known else 0.0 - loss

    @property
    def _same_seeds(self) -> tuple[SeedValue, ...]:
        """The undefended model's values at the seeds of this setting."""
        seeds = {v.entry.key.seed for v in self.values}
        return () if self.none is None else tuple(v for v in self.none.values if v.entry.key.seed in seeds)

    @cached_property
    def learning(self) -> Learning:
        """What the model learned at the seed where that is least."""
        order: tuple[LearningState, ...] = ("nothing", "little", "unknown", "learned")
        return min((learning_of(v.entry.sample.utility) for v in self.values), key=lambda one: order.index(one.state))

    @cached_property
    def usable(self) -> bool | None:
        """Whether the model is usable: see `keeps_enough`; None without an undefended model that learned."""
        if self.none is None or not self.none.learning.suffices:
            return None
        if self.learning.state == "nothing":
            return False
        uses = [v.entry.sample.utility for v in self.values]
        beside = [v.entry.sample.utility for v in self._same_seeds]
        floor = 0.0 if self.accuracy is None else max(use.floor for use in uses)
        return keeps_enough(_mean([score_of(use) for use in uses]), _mean([score_of(use) for use in beside]), floor)

    @cached_property
    def judgement(self) -> Judgement:
        """The judgment over all seeds; "withstands" needs every one of them."""
        every = [(v, _judged(v, self._beside(v), self.tried)) for v in self.sound]
        if not every:
            return Judgement("silent", "nothing concluded", "info")
        leaking = [pair for pair in every if pair[1].fate == "leaks"]
        if leaking:
            worst = max(leaking, key=lambda pair: _severity(pair[0]))[1]
            count = "" if len(leaking) == self.seeds else f" ({len(leaking)} of {self.seeds} seeds)"
            return replace(worst, verdict=f"{worst.verdict}{count}", seeds=len(leaking))
        withstanding = [one for _, one in every if one.fate == "withstands"]
        if len(withstanding) == self.seeds:
            fullest = max(withstanding, key=lambda one: len(one.verdict))  # with all qualifiers
            return replace(fullest, seeds=self.seeds)
        if withstanding:
            words = f"inconclusive ({len(withstanding)} of {self.seeds} seeds)"
            return Judgement("open", words, "warning", len(withstanding))
        return max(every, key=lambda pair: _severity(pair[0]))[1]

    def _beside(self, value: SeedValue) -> SeedValue | None:
        """Return the undefended model at a value's seed."""
        same = (v for v in (() if self.none is None else self.none.values) if v.entry.key.seed == value.entry.key.seed)
        return next(same, None)

    @property
    def verdict(self) -> str:
        """The verdict in a few words, with "not usable" where that applies."""
        words = self.judgement.verdict
        return f"{words}; not usable" if self.usable is False and self.judgement.fate != "silent" else words

    @property
    def tone(self) -> Tone:
        """The verdict's tone; never "good" for a model that is not usable."""
        unusable = self.usable is False and self.judgement.tone == "good"
        return "warning" if unusable else self.judgement.tone

    def as_dict(self) -> dict[str, Any]:
        """Return the setting in types that JSON has."""
        control = self.entry.defense.control
        return {
            "defense": self.entry.defense.id,
            "control": None if control is None else control.name,
            "value": None if control is None else control.value,
            "role": self.entry.sample.config.role,
            "seeds": sorted(v.entry.key.seed or 0 for v in self.values),
            "verdict": self.judgement.verdict,
            "fate": self.judgement.fate,
            "level": None if self.leak is None else self.leak.level,
            "accuracy": self.accuracy,
            "points": self.loss,
            "epsilon": self.epsilon,
            "usable": self.usable,
            "labels": value(self.labels, "label_accuracy"),
            "gives": list(self.recovered),
        }


def _mean(figures: Sequence[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return sum(known) / len(known) if known and len(known) == len(figures) else None


def _severity(value: SeedValue) -> tuple[int, bool, bool, float]:
    """Return the order of seeds: level of leak, refuted epsilon, failures, and amount of the leak."""
    if value.leak is None:
        return int(value.gives_members), value.refuted, value.lacking, 0.0
    metric = value.metric
    amount = -float("inf") if metric is None or metric.value is None else leakage_value(metric)
    return SEVERITY[value.leak.level], value.refuted, value.lacking, amount


@dataclass(frozen=True)
class Standing:
    """One row. value: the setting shown; grid: all settings, best models first; none: the undefended model, or None."""

    value: Setting
    grid: tuple[Setting, ...]
    none: Setting | None
    verdict: str
    tone: Tone

    @property
    def by_control(self) -> tuple[Setting, ...]:
        """All settings, by role and control value."""
        return tuple(sorted(self.grid, key=lambda v: (v.differs, v.entry.key.role, v.entry.key.value or 0.0)))

    @property
    def accuracies(self) -> tuple[float, float] | None:
        """The lowest and the highest accuracy over the grid; None for a single setting."""
        return _ends([v.accuracy for v in self.grid])

    @property
    def leaks(self) -> tuple[float, float] | None:
        """The lowest and the highest figure of the worst case, as in `accuracies`."""
        return _ends([None if v.metric is None else v.metric.value for v in self.grid])

    @property
    def leaking(self) -> tuple[Setting, ...]:
        """The settings that are shown to leak."""
        return tuple(v for v in self.grid if v.judgement.fate == "leaks")

    @property
    def usable(self) -> tuple[Setting, ...]:
        """The settings that are not shown to be unusable."""
        return tuple(v for v in self.grid if v.usable is not False)


def _ends(values: Sequence[float | None]) -> tuple[float, float] | None:
    known = [v for v in values if v is not None]
    return (min(known), max(known)) if len(values) > 1 and known else None


def standing_of(grid: Sequence[Setting], none: Setting | None) -> Standing:
    """Return a defense's row beside the undefended.

    The row shows the usable setting that leaks least; of equals, the one that resists unaware attackers best.
    """
    ordered = sorted(grid, key=lambda v: (-v.use, v.entry.name))
    usable = [v for v in ordered if v.usable is not False]
    value = min(usable or ordered, key=_leaking)
    verdict, tone = value.judgement.verdict, value.judgement.tone
    if not usable and value.judgement.fate != "silent":
        verdict, tone = f"no usable setting; {verdict}", "warning"
    return Standing(value, tuple(ordered), none, verdict, tone)


def undefended(none: Setting) -> Standing:
    """Return the row of the undefended model."""
    return Standing(none, (none,), None, "undefended", "info")


def _leaking(setting: Setting) -> tuple[int, int, bool, int, float]:
    order = ("withstands", "open", "silent", "leaks").index(setting.judgement.fate)
    if setting.leak is None:
        return order, 0, setting.lacking, len(setting.recovered), 0.0
    level = setting.leak.level
    plainly = 0.0 if level == "blind" else _plainly(setting.shown)
    return order, SEVERITY[level], setting.lacking, len(setting.recovered), plainly


UNDECIDED_REASONS = {
    "undefended_stands": "undecided, undefended stands too",
    "undefended_missing": "undecided, undefended not attacked",
    "unlearned": "undecided, undefended model learned too little",
    "belied": "undecided, belied",
    "unmeasured": "undecided, recognition not measured",
}
"""Words on why a level is undecided, by the code of its qualifier."""


def reason_of(leak: Leak) -> str:
    """Return why a level is undecided, in words."""
    return next(
        (q.words for q in leak.qualifiers if q.code in UNDECIDED_REASONS), "a leak is neither shown nor ruled out"
    )


def chip(value: SeedValue) -> tuple[str, Tone]:
    """Return the level of a setting with its qualifiers in words, and the tone."""
    leak = value.leak
    if leak is None:
        return "not attacked", "info"
    if leak.falls or value.refuted:
        clear = leak.everybody.clear if leak.level == "recognizable" else ()
        seen = [f"{LEVEL_WORDS[leak.level]} by {winner_of(clear[0][1] if clear else leak.worst)}"] if leak.falls else []
        return ", ".join([*seen, *_refuted(value)]), "error"
    if value.lacking:
        return "undecided, attacks failed", "warning"
    if leak.level == "undecided":
        reason = next(
            (UNDECIDED_REASONS[q.code] for q in leak.qualifiers if q.code in UNDECIDED_REASONS),
            LEVEL_WORDS["undecided"],
        )
        return ", ".join([reason, *(f"gives {word}" for word in value.recovered)]), "warning"
    words = [
        LEVEL_WORDS["blind"],
        *(["untested"] if leak.untested else ()),
        *(f"gives {word}" for word in value.recovered),
    ]
    return ", ".join(words), "warning" if len(words) > 1 else "good"


def _refuted(value: SeedValue) -> list[str]:
    return [] if value.refutation is None else [f"epsilon refuted by {value.refutation.by}"]


def _judged(value: SeedValue, none: SeedValue | None, tried: int) -> Judgement:
    """Return the judgment of a setting, one of `tried`, at one seed, beside the undefended model of that seed."""
    if value.leak is None:
        return _of_model(value, none, tried)
    verdict, tone = chip(value)
    if tone == "error":
        return Judgement("leaks", verdict, tone)
    withstands = value.leak.level == "blind" and not value.lacking
    return Judgement("withstands" if withstands else "open", verdict, tone)


def _of_model(value: SeedValue, none: SeedValue | None, tried: int) -> Judgement:
    """Return the judgment by members and by outputs, where there are no reconstructions."""
    if value.refuted:
        return Judgement("leaks", ", ".join(_refuted(value)), "error")
    if value.gives_members:
        return Judgement("leaks", f"gives members to {winner_of(value.membership[0][1])}", "error")
    if value.outputs is not None and outputs_fate(value.outputs, tried) == "falls":
        return Judgement("leaks", f"outputs read by {winner_of(value.outputs)}", "error")
    known = none.members if none is not None and none.gives_members else None
    if value.members is not None and members_fate(value.members, value.tried, known) == "stands":
        return Judgement("withstands", *KEEPS)
    # That no members are found shows little: weak attacks end at chance.
    return Judgement("open", "undecided", "warning")


def _plainly(value: SeedValue) -> float:
    """Return how much unaware attackers find, larger is more."""
    plain = value.entry.plain
    metric = None if plain is None else plain.metric(rebuilding(plain))
    return float("inf") if metric is None or metric.value is None else leakage_value(metric)


def winner_of(record: Measured | None) -> str:
    """Return a cell's attack, or a worst case's most frequent winner."""
    return record.attack if isinstance(record, WorstCase) else attack_of(record)
