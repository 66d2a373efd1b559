"""The setting: a defense at one control value over all its seeds, judged once for page, terminal, JSON and headline.

A setting is judged by the worst case in one scene (`judged_leaks`: where inputs leak, else where attacks have it
easiest), over all adversaries and roles, beside the undefended model of the same scene, and by what is given away
beside inputs (`findings_of`). Nothing is concluded where controls fail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from ppbench.metrics.epsilon import epsilon_words
from ppbench.questions.membership import CANARY_TPR_1
from ppbench.records.figure import best, grouped, leakage_value
from ppbench.records.schema import Metric, Record
from ppbench.report.controls import above_chance, nothing_to_read, rebuilding, value, widened
from ppbench.report.costs import CostRow
from ppbench.report.entries import Entry
from ppbench.report.findings import Fate, Finding, Refutation, Subject
from ppbench.report.frame import EVALUATION, SETTING, TRAINED, Key
from ppbench.report.leak import LEVEL_WORDS, SEVERITY, Leak
from ppbench.report.learning import Learning, LearningState, is_usable, learning_of, mean_of, points_lost
from ppbench.report.rows import judged_keys, judged_leaks
from ppbench.report.words import key_differences
from ppbench.report.worst import Measured, WorstCase, attack_of

Tone = Literal["info", "good", "warning", "error"]
RECOVERED: tuple[tuple[str, tuple[Subject, ...]], ...] = (
    ("members", ("members", "canaries")),
    ("batch members", ("batch members",)),
    ("secrets", ("secrets",)),
    ("outputs", ("outputs",)),
)
"""What is recovered beside inputs and labels, and the subjects of findings that show it."""
FATE_WORDS: dict[Fate | None, str] = {"falls": "leaks", "stands": "withstands", "undecided": "open", None: "silent"}
"""A fate in JSON; "silent" where nothing is concluded."""
_SETTING = tuple(name for name in TRAINED if name not in ("seed", "digest"))


@dataclass(frozen=True)
class SeedValue:
    """A defense at one control value and seed.

    entry: its row of the judged boards that leaks most; leak: that of the row; labelled: its row with the most labels;
    findings: what is given away of members and outputs; reliable: whether the controls of its evaluation hold; lacking:
    whether an attack failed or training diverged; cost: its row of the costs.
    """

    entry: Entry
    leak: Leak | None
    labelled: Entry | None
    findings: tuple[Finding, ...]
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
        return _headline(self.worst)

    @property
    def labels(self) -> Record | None:
        """The cell with the highest label accuracy."""
        return None if self.labelled is None else self.labelled.labels

    @property
    def accuracy(self) -> float | None:
        """The delivered model's accuracy."""
        return self.entry.sample.utility.accuracy

    @property
    def refutation(self) -> Refutation | None:
        """The refutation of the stated epsilon, or None."""
        return None if self.cost is None else self.cost.refutation

    def about(self, *subjects: Subject) -> list[Finding]:
        """Return the findings on some subjects."""
        return [one for one in self.findings if one.subject in subjects]

    @property
    def gives_labels(self) -> bool:
        """Whether labels are recovered above chance, at the level of all attacks on the row.

        The share of the commonest class counts as chance where it is larger.
        """
        return self.labelled is not None and _gives_labels(self.labelled, len(self.labelled.records))

    @cached_property
    def recovered(self) -> tuple[str, ...]:
        """What is recovered beside inputs: "labels" and words of `RECOVERED`."""
        own = [word for word, subjects in RECOVERED if any(one.fate == "falls" for one in self.about(*subjects))]
        return ("labels", *own) if self.gives_labels else tuple(own)


@dataclass(frozen=True)
class Judgement:
    """The judgment of a setting. fate: "falls" if shown, "stands" if in every seed; None where nothing is concluded.

    verdict: in a few words; tone: whether it is good news; seeds: number of seeds with that fate.
    """

    fate: Fate | None
    verdict: str
    tone: Tone
    seeds: int = 1


@dataclass(frozen=True)
class Setting:
    """A defense at one control value over all its seeds.

    values: one for each seed; none: the undefended model at the same seeds, or None; seeds: how many seeds there are;
    differs: differences from others beside the control value. Figures are those of the seed that leaks most; accuracy
    is the mean.
    """

    values: tuple[SeedValue, ...]
    none: Setting | None
    seeds: int
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
    def metric(self) -> Metric | None:
        """The headline metric of that worst case."""
        return self.shown.metric

    @property
    def beside(self) -> Metric | None:
        """The headline metric of the undefended model in the same scene and seed."""
        undefended = None if self.leak is None else self.leak.undefended
        return None if undefended is None else _headline(undefended.worst)

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
    def batch(self) -> Measured | None:
        """The strongest cell of all seeds on members of a batch."""
        return best([one.top for one in self._about("batch members")], "batch_asr")

    @property
    def members(self) -> Measured | None:
        """The strongest membership cell of all seeds."""
        return best([one.top for one in self._about("members")], "asr")

    @property
    def canaries(self) -> Record | None:
        """The strongest audit of all seeds."""
        return best([r for one in self._about("canaries") for r in one.row.records], CANARY_TPR_1.name)

    @property
    def outputs(self) -> Measured | None:
        """The strongest extraction of all seeds, of what clients train on."""
        cells = [one.top for one in self._about("outputs")]
        return best(cells, "agreement") or best(cells, "output_error")

    def _about(self, subject: Subject) -> list[Finding]:
        return [one for v in self.values for one in v.about(subject)]

    @property
    def accuracy(self) -> float | None:
        """The delivered model's accuracy, the mean over seeds; None where one has none."""
        return mean_of([v.accuracy for v in self.values])

    @property
    def counted(self) -> str:
        """Of what accuracy is a share, see `Utility.counted`."""
        return self.entry.sample.utility.counted

    @property
    def mse(self) -> float | None:
        """The mean squared error where targets are numbers, the mean over seeds."""
        return mean_of([v.entry.sample.utility.mse for v in self.values])

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
    def epsilon(self) -> str:
        """The stated guarantee in words, whether vacuous or refuted; "" where none is stated."""
        stated = self.entry.sample.privacy.epsilon
        if stated is None:
            return ""
        return f"refuted ({stated:.3g})" if self.refutation else epsilon_words(stated)

    @property
    def recovered(self) -> tuple[str, ...]:
        """What is recovered beside inputs at some reliable seed: "labels" and words of `RECOVERED`."""
        words = ("labels", *(word for word, _ in RECOVERED))
        return tuple(word for word in words if any(word in v.recovered for v in self.sound))

    @property
    def lacking(self) -> bool:
        """Whether an attack failed, or training diverged, at some seed."""
        return any(v.lacking for v in self.values)

    @property
    def loss(self) -> float | None:
        """Points of accuracy gained over the undefended model of the same seeds, below 0 where it loses.

        None where that one learned too little.
        """
        loss = points_lost(self.accuracy, mean_of([v.accuracy for v in self._same_seeds]))
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
        """Whether the model is usable: see `is_usable`; None without an undefended model that learned."""
        if self.none is None or not self.none.learning.suffices:
            return None
        uses, beside = ([v.entry.sample.utility for v in values] for values in (self.values, self._same_seeds))
        return is_usable(uses, beside)

    @cached_property
    def judgement(self) -> Judgement:
        """The judgment over all seeds; "withstands" needs every one of them."""
        every = [(v, _judged(v)) for v in self.sound]
        if not every:
            return Judgement(None, "nothing concluded", "info")
        leaking = [pair for pair in every if pair[1].fate == "falls"]
        if leaking:
            worst = max(leaking, key=lambda pair: _severity(pair[0]))[1]
            count = "" if len(leaking) == self.seeds else f" ({len(leaking)} of {self.seeds} seeds)"
            return replace(worst, verdict=f"{worst.verdict}{count}", seeds=len(leaking))
        withstanding = [(v, one) for v, one in every if one.fate == "stands"]
        if len(withstanding) == self.seeds:
            blind = [v.leak for v, _ in withstanding if v.leak is not None]
            untested, one = any(leak.untested for leak in blind), withstanding[0][1]
            return replace(_blind(untested, self.recovered) if blind else one, seeds=self.seeds)
        if withstanding:
            words = f"inconclusive ({len(withstanding)} of {self.seeds} seeds)"
            return Judgement("undecided", words, "warning", len(withstanding))
        return max(every, key=lambda pair: _severity(pair[0]))[1]

    @property
    def collapse(self) -> str:
        """At how many seeds training collapsed: "training collapsed", "training collapsed in 1 of 3 seeds", or ""."""
        count = sum(v.entry.sample.utility.is_collapsed for v in self.values)
        if not count:
            return ""
        return "training collapsed" + ("" if count == self.seeds else f" in {count} of {self.seeds} seeds")

    @property
    def verdict(self) -> str:
        """The verdict in a few words, with "not usable" and a collapsed training where these apply."""
        if self.judgement.fate is None:
            return self.judgement.verdict
        unusable = "not usable" if self.usable is False else ""
        return "; ".join(word for word in (self.judgement.verdict, unusable, self.collapse) if word)

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
            "fate": FATE_WORDS[self.judgement.fate],
            "level": None if self.leak is None else self.leak.level,
            "accuracy": self.accuracy,
            "points": self.loss,
            "epsilon": self.epsilon,
            "usable": self.usable,
            "labels": value(self.labels, "label_accuracy"),
            "gives": list(self.recovered),
        }


def _headline(worst: WorstCase | None) -> Metric | None:
    """Return the headline metric of reconstructions."""
    return None if worst is None else worst.metric(rebuilding(worst))


def _severity(value: SeedValue) -> tuple[int, bool, bool, float]:
    """Return the order of seeds: level of leak, refuted epsilon, failures, and amount of the leak."""
    refuted = value.refutation is not None
    if value.leak is None:
        return int(any(one.fate == "falls" for one in value.findings)), refuted, value.lacking, 0.0
    return SEVERITY[value.leak.level], refuted, value.lacking, leakage_value(value.metric)


UNDECIDED_REASONS = {
    "failed": "undecided, attacks failed",
    "undefended_stands": "undecided: even undefended resists",
    "few_victims": "undecided: too few victims",
    "undefended_missing": "undecided, undefended not attacked",
    "unlearned": "undecided, undefended model learned too little",
    "belied": "undecided, belied",
    "unreplayed": "undecided, cannot be replayed",
    "unmeasured": "undecided, recognition not measured",
}
"""Words on why a level is undecided, by the code of its qualifier."""


def reason_of(leak: Leak) -> str:
    """Return why a level is undecided, in words."""
    return next(
        (q.words for q in leak.qualifiers if q.code in UNDECIDED_REASONS), "a leak is neither shown nor ruled out"
    )


def _blind(untested: bool, recovered: Sequence[str]) -> Judgement:
    """Return the judgment of what withstands, with its qualifiers."""
    words = [LEVEL_WORDS["blind"], *(["untested"] if untested else ()), *(f"gives {word}" for word in recovered)]
    return Judgement("stands", ", ".join(words), "warning" if len(words) > 1 else "good")


def _refuted(value: SeedValue) -> list[str]:
    return [] if value.refutation is None else [f"epsilon refuted by {value.refutation.by}"]


def _judged(value: SeedValue) -> Judgement:
    """Return the judgment of a setting at one seed: its level with its qualifiers."""
    leak = value.leak
    if leak is None:
        return _without_inputs(value)
    if leak.falls or value.refutation:
        clear = leak.everybody.clear if leak.level == "recognizable" else ()
        seen = [f"{LEVEL_WORDS[leak.level]} by {winner_of(clear[0][1] if clear else leak.worst)}"] if leak.falls else []
        return Judgement("falls", ", ".join([*seen, *_refuted(value)]), "error")
    if leak.level == "blind":
        return _blind(leak.untested, value.recovered)
    reasons = [UNDECIDED_REASONS[q.code] for q in leak.qualifiers if q.code in UNDECIDED_REASONS]
    words = [*(reasons[:1] or [LEVEL_WORDS["undecided"]]), *(f"gives {word}" for word in value.recovered)]
    return Judgement("undecided", ", ".join(words), "warning")


def _without_inputs(value: SeedValue) -> Judgement:
    """Return the judgment by what is given away beside inputs, where there are no reconstructions."""
    if value.refutation:
        return Judgement("falls", ", ".join(_refuted(value)), "error")
    for word, subjects in RECOVERED:
        for one in value.about(*subjects):
            if one.fate == "falls":
                read = f"outputs read {'' if 'falls' in (one.plain, one.knowing) else 'in part '}by"
                does = read if one.subject == "outputs" else f"gives {word} to"
                return Judgement("falls", f"{does} {winner_of(one.top)}", "error")
    judged = value.about("members", "batch members", "outputs")
    if value.about("members", "batch members") and all(one.fate == "stands" for one in judged):
        read = ", outputs not read" if value.about("outputs") else ""
        return Judgement("stands", f"members not found{read}", "good")
    # That no members are found shows little: weak attacks end at chance.
    return Judgement("undecided", "undecided", "warning")


def winner_of(record: Measured | None) -> str:
    """Return a cell's attack, or a worst case's most frequent winner."""
    return record.attack if isinstance(record, WorstCase) else attack_of(record)


# -- settings from the rows of all boards ------------------------------------------------------------------------------
def settings_of(
    entries: Sequence[Entry], findings: Sequence[Finding], paid: Mapping[Key, CostRow], sound: Set[Key], seeds: int
) -> dict[str, list[Setting]]:
    """Return the settings of each defense in one evaluation with all its seeds, `none` first, without `full_noise`.

    entries: its rows on all boards; findings: those on them; paid: the costs, by `TRAINED`; sound: the keys of the
    reliable seeds, by `EVALUATION`; seeds: how many there are.
    """
    trained = grouped((e for e in entries if e.defense.id != "full_noise"), lambda entry: entry.key.only(TRAINED))
    values: dict[Key, list[SeedValue]] = {}
    for key in sorted(trained, key=Key.text):
        rows = {entry.key.only(SETTING) for entry in trained[key]}
        own = [one for one in findings if one.row.key in rows]
        value = _seed_value(trained[key], own, paid.get(key), key.only(EVALUATION) in sound)
        values.setdefault(key.only(_SETTING), []).append(value)
    grids = grouped(values, lambda key: key.defense)
    words, none = key_differences(list(values)), grids.pop("none", [])[:1]
    plain = next((Setting(tuple(values[key]), None, seeds) for key in none), None)
    settings = {} if plain is None else {"none": [plain]}
    return settings | {
        name: [Setting(tuple(values[key]), plain, seeds, words[key]) for key in grid]
        for name, grid in sorted(grids.items())
    }


def _seed_value(
    entries: Sequence[Entry], findings: Sequence[Finding], cost: CostRow | None, reliable: bool
) -> SeedValue:
    """Return the results of one training, from its rows on all boards."""
    leaking = {entry.key.only(SETTING): entry.leak for entry in entries if entry.leak is not None}
    judged = _in_scenes(entries, judged_leaks(leaking))
    labelled = [entry for entry in entries if entry.labels is not None]
    tried = sum(len(entry.records) for entry in labelled)
    giving = {entry.key.only(SETTING) for entry in labelled if _gives_labels(entry, tried)}
    labelled = _in_scenes(labelled, judged_keys((entry.key.only(SETTING) for entry in labelled), giving))
    most = best([entry.labels for entry in labelled if entry.labels is not None], "label_accuracy")
    failed = any(r.status != "complete" and not nothing_to_read(r) for entry in entries for r in entry.records)
    measured = [entry for entry in judged if entry.worst is not None]
    entry = max(measured or judged or entries, key=_entry_severity)
    return SeedValue(
        entry=entry,
        leak=entry.leak if judged else None,
        labelled=next((one for one in labelled if one.labels is most), None),
        findings=tuple(findings),
        reliable=reliable,
        lacking=any(one.leak is not None and one.leak.lacking for one in judged) if judged else failed,
        cost=cost,
    )


def _gives_labels(entry: Entry, tried: int) -> bool:
    """Return whether a row's labels are recovered above chance, and above the commonest class, as one of so many."""
    if entry.labels is None or not above_chance(entry.labels, "label_accuracy", tried):
        return False
    ends = widened(entry.labels.metric("label_accuracy"), tried)
    return ends is None or ends[0] > entry.labels.utility.floor


def _in_scenes(entries: Sequence[Entry], keys: Set[Key]) -> list[Entry]:
    return [entry for entry in entries if entry.key.only(SETTING) in keys]


def _entry_severity(entry: Entry) -> tuple[int, float]:
    if entry.leak is None:
        return -1, -float("inf")
    return SEVERITY[entry.leak.level], leakage_value(_headline(entry.worst))
