"""How a defense fares over its control values and seeds, and the setting that a row at a glance tells of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from ppbench.metrics.guarantee import epsilon_words
from ppbench.records.figure import best, leak
from ppbench.records.schema import Metric, Record
from ppbench.report.controls import above_chance, rebuilding, value, widened
from ppbench.report.leak import SEVERITY, WORDS, Leak
from ppbench.report.learning import Learning, State, keeps_enough, learning_of, points_lost, score_of
from ppbench.report.page.costs import CostRow
from ppbench.report.page.entries import Entry
from ppbench.report.refutation import Refutation
from ppbench.report.verdict.verdict import members_fate, outputs_fate
from ppbench.report.worst import Measured, WorstCase, attack_of

Tone = Literal["info", "good", "warning", "error"]
KEEPS: tuple[str, Tone] = ("members not found", "good")


@dataclass(frozen=True)
class Value:
    """A defense at one control value and seed.

    entry: its row of the judged boards that leaks most, `leak` how far; labels: the highest label accuracy; batch: the
    strongest cell that tells who was in a batch, of that row's scene; members, canaries, outputs: the strongest cells;
    found, tried: the strongest membership cells by metric, and of how many; reliable: whether the controls of its
    evaluation hold and the undefended model falls wherever it was judged; lacking: whether an attack failed or training
    diverged; cost: its row of the costs.
    """

    entry: Entry
    leak: Leak | None
    labels: Record | None
    batch: Record | None
    members: Record | None
    canaries: Record | None
    found: tuple[tuple[str, Record], ...]
    outputs: Record | None
    tried: int
    reliable: bool
    lacking: bool
    cost: CostRow | None

    @property
    def worst(self) -> WorstCase | None:
        """The worst case of what was to be rebuilt; None where nothing was, or no attack gave a figure."""
        return None if self.leak is None else self.leak.worst

    @property
    def metric(self) -> Metric | None:
        """What the worst case is measured by."""
        return None if self.worst is None else self.worst.metric(rebuilding(self.worst))

    @property
    def accuracy(self) -> float | None:
        """The delivered model's accuracy."""
        return self.entry.sample.utility.accuracy

    @property
    def refutation(self) -> Refutation | None:
        """What shows that the stated epsilon is wrong; None where nothing does."""
        return None if self.cost is None else self.cost.refutation

    @property
    def refuted(self) -> bool:
        """Whether the stated epsilon is refuted."""
        return self.refutation is not None

    @property
    def gives_members(self) -> bool:
        """Whether members or canaries are found above chance, at the level of all cells tried."""
        return any(above_chance(record, name, self.tried) for name, record in self.found)

    @property
    def gives_labels(self) -> bool:
        """Whether labels are recovered above chance, at the level of all attacks on the row.

        A guess of the commonest class needs no upload: its share counts as chance where that is larger.
        """
        if self.labels is None or not above_chance(self.labels, "label_accuracy", len(self.entry.records)):
            return False
        ends = widened(self.labels.metric("label_accuracy"), len(self.entry.records))
        return ends is None or ends[0] > self.labels.utility.floor

    @property
    def given(self) -> tuple[str, ...]:
        """What is found beside inputs: "labels", "members"."""
        parts = (("labels", self.gives_labels), ("members", self.gives_members))
        return tuple(word for word, is_given in parts if is_given)


@dataclass(frozen=True)
class Judgement:
    """What a setting came to. fate: `leaks` is shown, `withstands` needs every seed, else it is `open` or `silent`.

    verdict: in a few words; tone: whether they are good news; seeds: in how many seeds it came to that.
    """

    fate: Literal["leaks", "withstands", "open", "silent"]
    verdict: str
    tone: Tone
    seeds: int = 1


@dataclass(frozen=True)
class Setting:
    """A defense at one control value over all seeds that it was evaluated with.

    values: one for each seed; none: the undefended model at the same seeds, or None; seeds: how many seeds there are;
    tried: how many settings the defense has; differs: in what else than its control value it is unlike others. Figures
    are those of the seed that leaks most, accuracy is the mean.
    """

    values: tuple[Value, ...]
    none: Setting | None
    seeds: int
    tried: int = 1
    differs: str = ""

    @cached_property
    def sound(self) -> tuple[Value, ...]:
        """The values from whose evaluations something may be concluded."""
        return tuple(v for v in self.values if v.reliable)

    @cached_property
    def shown(self) -> Value:
        """The seed that leaks most, of those from which something may be concluded if there are any."""
        return max(self.sound or self.values, key=_severity)

    @property
    def entry(self) -> Entry:
        """The row of that seed."""
        return self.shown.entry

    @property
    def leak(self) -> Leak | None:
        """How far that seed's inputs leak."""
        return self.shown.leak

    @property
    def worst(self) -> WorstCase | None:
        """That seed's worst case."""
        return self.shown.worst

    @property
    def metric(self) -> Metric | None:
        """What that worst case is measured by."""
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
    def found_again(self) -> Measured | None:
        """The cell, or worst case, by which most originals are found again among held-out images, of that seed."""
        tops = () if self.leak is None else self.leak.everybody.readers
        return next((top for name, top in tops if name == "reidentified"), None)

    @property
    def batch(self) -> Record | None:
        """The cell of all seeds that tells best who was in a batch."""
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
        """How good the model is, larger being better: by accuracy, or where there is none by its error."""
        if self.accuracy is not None:
            return self.accuracy
        return -float("inf") if self.mse is None else -self.mse

    @cached_property
    def refutation(self) -> Refutation | None:
        """What shows at some seed that the stated epsilon is wrong; None where nothing does."""
        return next((v.refutation for v in self.sound if v.refutation is not None), None)

    @property
    def refuted(self) -> bool:
        """Whether the stated epsilon is refuted at some seed."""
        return self.refutation is not None

    @property
    def epsilon(self) -> str:
        """The guarantee in words: its epsilon, that there is none, or that it is refuted; "" where none is stated."""
        stated = self.entry.sample.privacy.epsilon
        if stated is None:
            return ""
        return f"refuted ({stated:.3g})" if self.refuted else epsilon_words(stated)

    @property
    def given(self) -> tuple[str, ...]:
        """What is recovered beside inputs at some seed: "labels", "members"."""
        return tuple(word for word in ("labels", "members") if any(word in v.given for v in self.values))

    @property
    def lacking(self) -> bool:
        """Whether an attack failed, or training diverged, at some seed."""
        return any(v.lacking for v in self.values)

    @property
    def loss(self) -> float | None:
        """Points of accuracy gained over the undefended model of the same seeds, below 0 where it loses.

        None where that one learned too little: losing nothing of nothing is no figure.
        """
        loss = points_lost(self.accuracy, _mean([v.accuracy for v in self._same_seeds]))
        known = self.none is not None and self.none.learning.suffices
        return None if loss is None or not known else 0.0 - loss

    @property
    def _same_seeds(self) -> tuple[Value, ...]:
        """The undefended model at the seeds that this setting has."""
        seeds = {v.entry.key.seed for v in self.values}
        return () if self.none is None else tuple(v for v in self.none.values if v.entry.key.seed in seeds)

    @cached_property
    def learning(self) -> Learning:
        """What was learned at the seed at which that is least."""
        order: tuple[State, ...] = ("nothing", "little", "unknown", "learned")
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
        """What all seeds together say: that it withstands the attacks needs every one of them."""
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
            fullest = max(withstanding, key=lambda one: len(one.verdict))  # with all that must be said along
            return replace(fullest, seeds=self.seeds)
        if withstanding:
            words = f"inconclusive ({len(withstanding)} of {self.seeds} seeds)"
            return Judgement("open", words, "warning", len(withstanding))
        return max(every, key=lambda pair: _severity(pair[0]))[1]

    def _beside(self, value: Value) -> Value | None:
        """Return the undefended model at a value's seed."""
        same = (v for v in (() if self.none is None else self.none.values) if v.entry.key.seed == value.entry.key.seed)
        return next(same, None)

    @property
    def verdict(self) -> str:
        """The verdict in a few words, with what must be said along of a model that is not usable."""
        words = self.judgement.verdict
        return f"{words}; not usable" if self.usable is False and self.judgement.fate != "silent" else words

    @property
    def tone(self) -> Tone:
        """Whether that is good news: of a model that is not usable it never is."""
        unusable = self.usable is False and self.judgement.tone == "good"
        return "warning" if unusable else self.judgement.tone

    def as_dict(self) -> dict[str, Any]:
        """Return it for programs, in types that JSON has."""
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
            "gives": list(self.given),
        }


def _mean(figures: Sequence[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return sum(known) / len(known) if known and len(known) == len(figures) else None


def _severity(value: Value) -> tuple[int, bool, bool, float]:
    """Return what seeds are ordered by: how far inputs leak, refuted, what failed, and by how much inputs leak."""
    if value.leak is None:
        return int(value.gives_members), value.refuted, value.lacking, 0.0
    metric = value.metric
    amount = -float("inf") if metric is None or metric.value is None else leak(metric)
    return SEVERITY[value.leak.level], value.refuted, value.lacking, amount


@dataclass(frozen=True)
class Standing:
    """One row. value: the setting that it tells of; grid: all, best models first; none: the undefended, or None."""

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
        """The lowest and the highest accuracy over the grid; None of a single value."""
        return _ends([v.accuracy for v in self.grid])

    @property
    def leaks(self) -> tuple[float, float] | None:
        """The same of the worst case."""
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


def standing(grid: Sequence[Setting], none: Setting | None) -> Standing:
    """Return a defense's row beside the undefended.

    Told of is, of the usable settings, the one that leaks least; where all leak alike, the one that resists attackers
    unaware of the defense best: there it looks best, and its fall says most.
    """
    ordered = sorted(grid, key=lambda v: (-v.use, v.entry.name))
    usable = [v for v in ordered if v.usable is not False]
    value = min(usable or ordered, key=_leaking)
    verdict, tone = value.judgement.verdict, value.judgement.tone
    if not usable and value.judgement.fate != "silent":
        verdict, tone = f"no usable setting; {verdict}", "warning"
    return Standing(value, tuple(ordered), none, verdict, tone)


def undefended(none: Setting) -> Standing:
    """Return the row of the undefended model, which is what others are judged beside."""
    return Standing(none, (none,), None, "undefended", "info")


def _leaking(setting: Setting) -> tuple[int, int, bool, int, float]:
    order = ("withstands", "open", "silent", "leaks").index(setting.judgement.fate)
    if setting.leak is None:
        return order, 0, setting.lacking, len(setting.given), 0.0
    level = setting.leak.level
    plainly = 0.0 if level == "blind" else _plainly(setting.shown)
    return order, SEVERITY[level], setting.lacking, len(setting.given), plainly


SHORT = {
    "undefended_stands": "undecided, undefended stands too",
    "undefended_missing": "undecided, undefended not attacked",
    "unlearned": "undecided, undefended model learned too little",
    "belied": "undecided, belied",
    "unmeasured": "undecided, recognition not measured",
}
"""Why a level is undecided, by the code of its qualifier."""


def reason_of(leak: Leak) -> str:
    """Return why a level is undecided, in words."""
    return next((q.words for q in leak.qualifiers if q.code in SHORT), "a leak is neither shown nor ruled out")


def chip(value: Value) -> tuple[str, Tone]:
    """Return how far a setting leaks, with what must be said along, and whether that is good."""
    leak = value.leak
    if leak is None:
        return "not attacked", "info"
    if leak.falls or value.refuted:
        clear = leak.everybody.clear if leak.level == "recognizable" else ()
        seen = [f"{WORDS[leak.level]} by {winner_of(clear[0][1] if clear else leak.worst)}"] if leak.falls else []
        return ", ".join([*seen, *_refuted(value)]), "error"
    if value.lacking:
        return "undecided, attacks failed", "warning"
    if leak.level == "undecided":
        reason = next((SHORT[q.code] for q in leak.qualifiers if q.code in SHORT), WORDS["undecided"])
        return ", ".join([reason, *(f"gives {word}" for word in value.given)]), "warning"
    words = [WORDS["blind"], *(["untested"] if leak.untested else ()), *(f"gives {word}" for word in value.given)]
    return ", ".join(words), "warning" if len(words) > 1 else "good"


def _refuted(value: Value) -> list[str]:
    return [] if value.refutation is None else [f"epsilon refuted by {value.refutation.by}"]


def _judged(value: Value, none: Value | None, tried: int) -> Judgement:
    """Return what one seed says of a setting, one of `tried`, beside the undefended model of that seed."""
    if value.leak is None:
        return _of_model(value, none, tried)
    verdict, tone = chip(value)
    if tone == "error":
        return Judgement("leaks", verdict, tone)
    withstands = value.leak.level == "blind" and not value.lacking
    return Judgement("withstands" if withstands else "open", verdict, tone)


def _of_model(value: Value, none: Value | None, tried: int) -> Judgement:
    """Judge by members and by outputs, where nothing was to be rebuilt."""
    if value.refuted:
        return Judgement("leaks", ", ".join(_refuted(value)), "error")
    if value.gives_members:
        return Judgement("leaks", f"gives members to {winner_of(value.found[0][1])}", "error")
    if value.outputs is not None and outputs_fate(value.outputs, tried) == "falls":
        return Judgement("leaks", f"outputs read by {winner_of(value.outputs)}", "error")
    known = none.members if none is not None and none.gives_members else None
    if value.members is not None and members_fate(value.members, value.tried, known) == "stands":
        return Judgement("withstands", *KEEPS)
    # That no members are found says little: chance is where weak attacks end.
    return Judgement("open", "undecided", "warning")


def _plainly(value: Value) -> float:
    """Return how much attackers who do not know the defense find: where it looks best, its fall says most."""
    plain = value.entry.plain
    metric = None if plain is None else plain.metric(rebuilding(plain))
    return float("inf") if metric is None or metric.value is None else leak(metric)


def winner_of(record: Measured | None) -> str:
    """Return an attack's name, of a worst case that of its most frequent winner."""
    return record.attack if isinstance(record, WorstCase) else attack_of(record)
