"""The head of a page: a table for each evaluation with all its seeds, one row per defense, a verdict in a few words.

A row shows one control value: the usable one that leaks least (`standing_of`). How a setting is judged:
`ppbench.report.setting`. `choice_of` says what to choose, if one must.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ppbench.base.errors import listed
from ppbench.metrics.epsilon import VACUOUS, epsilon_words
from ppbench.metrics.modality import Modality, modality_of
from ppbench.questions.base import question_of
from ppbench.records.figure import best, grouped, leakage_value
from ppbench.records.schema import Utility
from ppbench.report.controls import Check, probe_words, rebuilding, value
from ppbench.report.costs import CostRow
from ppbench.report.entries import Board, Entry
from ppbench.report.findings import Finding, findings_of
from ppbench.report.frame import EVALUATION, TRAINED, Key, key_of
from ppbench.report.leak import SEVERITY
from ppbench.report.learning import USABLE, advice, learning_of
from ppbench.report.page.boards import COSTLY, UNRANKED, JudgedEvaluation, checks_of, leak_span, rank_intervals
from ppbench.report.page.sections import weights_words
from ppbench.report.setting import SeedValue, Setting, Tone, settings_of
from ppbench.report.words import evaluation_titles, listed_values

SEEDLESS = tuple(name for name in EVALUATION if name != "seed")
_PART = re.compile(r", (?![^(]*\))")
"""Between the parts of an evaluation in words; not inside of parentheses."""
UNSPLIT = tuple(name for name in SEEDLESS if name != "digest")


BEST_RULE = (
    f"A row shows the usable setting that leaks least, or that of all settings where none is usable. A usable setting "
    f"loses at most {USABLE:g} points of accuracy and at most half of what was learned. Defenses that stand in every "
    "seed come first, then undecided ones, then those that leak. Ties are ordered by level, by the number of other "
    "leaks, and by the leak to unaware attackers."
)
"""The rule of `standing_of`, for whoever reads a table."""


@dataclass(frozen=True)
class Standing:
    """One row. value: the setting shown; grid: all settings, best models first; none: the undefended model, or None.

    rank: first and last rank among the rows, seeds pooled; None where it is not ranked.
    """

    value: Setting
    grid: tuple[Setting, ...]
    none: Setting | None
    verdict: str
    tone: Tone
    rank: tuple[int, int] | None = None

    @property
    def by_control(self) -> tuple[Setting, ...]:
        """All settings, by role and control value."""
        return tuple(sorted(self.grid, key=lambda v: (v.differs, v.entry.key.role, v.entry.key.value or 0.0)))

    @property
    def leaking(self) -> tuple[Setting, ...]:
        """The settings that are shown to leak."""
        return tuple(v for v in self.grid if v.judgement.fate == "falls")

    @property
    def usable(self) -> tuple[Setting, ...]:
        """The settings that are not shown to be unusable."""
        return tuple(v for v in self.grid if v.usable is not False)


def standing_of(grid: Sequence[Setting], none: Setting | None) -> Standing:
    """Return a defense's row beside the undefended.

    The row shows the usable setting that leaks least; of equals, the one that resists unaware attackers best.
    """
    ordered = sorted(grid, key=lambda v: (-v.use, v.entry.name))
    usable = [v for v in ordered if v.usable is not False]
    value = min(usable or ordered, key=leaking_order)
    verdict, tone = value.judgement.verdict, value.judgement.tone
    if not usable and value.judgement.fate is not None:
        verdict, tone = f"no usable setting; {verdict}", "warning"
    if value.collapse and value.judgement.fate is not None:
        verdict = f"{verdict}; {value.collapse}"
    return Standing(value, tuple(ordered), none, verdict, tone)


def undefended(none: Setting) -> Standing:
    """Return the row of the undefended model."""
    return Standing(none, (none,), None, "undefended", "info")


def leaking_order(setting: Setting) -> tuple[int, int, bool, int, float]:
    """Return the order in which settings leak: what stands first, what falls last; then by what is seen and given."""
    order = ("stands", "undecided", None, "falls").index(setting.judgement.fate)
    if setting.leak is None:
        return order, 0, setting.lacking, len(setting.recovered), 0.0
    level = setting.leak.level
    plainly = 0.0 if level == "blind" else _plainly(setting.shown)
    return order, SEVERITY[level], setting.lacking, len(setting.recovered), plainly


def _plainly(value: SeedValue) -> float:
    """Return how much unaware attackers find, larger is more."""
    plain = value.entry.plain
    return leakage_value(None if plain is None else plain.metric(rebuilding(plain)), float("inf"))


@dataclass(frozen=True)
class Overview:
    """One evaluation with all its seeds.

    about: the evaluation in words; checks: those of all its seeds; reliable: whether conclusions may be drawn from some
    seed; headline: metric of the worst case, or ""; scene: judged batch size and weights; rows: `none` first; advice:
    what to change where the undefended model learned too little.
    """

    about: str
    checks: tuple[Check, ...]
    reliable: bool
    headline: str
    scene: str
    rows: tuple[Standing, ...]
    advice: str

    @property
    def compared(self) -> tuple[Standing, ...]:
        """The rows of defenses, without the undefended model's."""
        return tuple(row for row in self.rows if row.value.entry.role == "compared")

    @property
    def modality(self) -> Modality:
        """What kind of data it is of."""
        return modality_of(self.rows[0].value.entry.sample.config)

    @property
    def seeds(self) -> int:
        """The number of seeds."""
        return self.rows[0].value.seeds

    @property
    def questions(self) -> bool:
        """Whether anything was attacked; else only costs are reported."""
        values = [row.value for row in self.compared or self.rows]
        return any(v.leak is not None or any(one.findings for one in v.values) for v in values)

    @property
    def unlearned(self) -> str:
        """A clause where the undefended model learned too little to judge usability; else ""."""
        none = self.compared[0].none if self.compared else None
        if none is None or not self.questions or none.learning.suffices:
            return ""
        count = sum(not learning_of(v.entry.sample.utility).suffices for v in none.values)
        return none.learning.clause + ("" if self.seeds == 1 else f" in {count} of {self.seeds} seeds")

    def has_column(self, name: str) -> bool:
        """Return whether the table needs a column: whether some row has the figure `name`, or "reidentified"."""
        if name == "reidentified":
            return any(v.reidentified is not None for row in self.rows for v in row.grid)
        return any(getattr(row.value, name) is not None for row in self.rows)


def overviews(
    boards: Sequence[Board], evaluations: Sequence[JudgedEvaluation], costs: Sequence[CostRow]
) -> list[Overview]:
    """Return one table per evaluation with all its seeds, also of those with controls alone."""
    rows = grouped((entry for board in boards for entry in board.entries), lambda entry: entry.key.only(EVALUATION))
    paid = {row.entry.key.only(TRAINED): row for row in costs}
    alike = _alike([one for one in evaluations if one.key in rows])
    words = evaluation_titles(alike)
    tables = [
        _overview(about, seeds, part, [one for seed in seeds for one in findings_of(seed.records)], paid)
        for key, seeds in alike.items()
        for about, part in _probed(_with_seeds(words[key], seeds), [entry for one in seeds for entry in rows[one.key]])
    ]
    return [table for table in tables if table.rows]


def _alike(evaluations: Sequence[JudgedEvaluation]) -> dict[Key, list[JudgedEvaluation]]:
    """Return evaluations that differ only in their seeds, by their shared key.

    Where the seed also splits the data into parts, the digests differ: then data of one name and size count as the
    same, unless one seed has two.
    """
    alike: dict[Key, list[JudgedEvaluation]] = {}
    for some in grouped(evaluations, lambda one: (one.key.only(UNSPLIT), one.key.data)).values():
        together = len({one.key.seed for one in some}) == len(some)
        for one in some:
            alike.setdefault((some[0] if together else one).key.only(SEEDLESS), []).append(one)
    return alike


def _with_seeds(about: str, seeds: Sequence[JudgedEvaluation]) -> str:
    """Return an evaluation in words with its seeds: "..., seeds 0, 1 and 2"."""
    numbers = [str(one.key.seed) for one in seeds]
    return f"{about}, seed{'s' if len(numbers) > 1 else ''} {listed_values(numbers)}"


def _probed(about: str, rows: Sequence[Entry]) -> Iterator[tuple[str, list[Entry]]]:
    """Yield words and rows of an evaluation for each probe of uploads.

    Rows on a model go with each probe whose uploads of it were attacked, or with all if none were.
    """
    probes = [None if question_of(entry.key.kind).source == "model" else entry.key.probing for entry in rows]
    several = sorted({probe for probe in probes if probe is not None}, key=lambda probing: probing.order)
    if len(several) < 2:
        yield about, list(rows)
        return
    models = [entry.key.only(TRAINED) for entry in rows]
    uploads = {(model, probe) for model, probe in zip(models, probes, strict=True) if probe is not None}
    attacked = {model for model, _ in uploads}
    for one in several:
        with_models = {model for model in models if (model, one) in uploads or model not in attacked}
        some = [
            entry
            for entry, probe, model in zip(rows, probes, models, strict=True)
            if probe == one or (probe is None and model in with_models)
        ]
        yield f"{about}, {probe_words(one)}", some


def _overview(
    about: str,
    seeds: Sequence[JudgedEvaluation],
    rows: Sequence[Entry],
    findings: Sequence[Finding],
    paid: Mapping[Key, CostRow],
) -> Overview:
    sound = {one.key for one in seeds if one.reliable}
    grids = settings_of(rows, findings, paid, sound, len(seeds))
    none = next(iter(grids.pop("none", [])), None)
    table = (*([] if none is None else [undefended(none)]), *(standing_of(grid, none) for grid in grids.values()))
    worst = [v.worst for row in table for setting in row.grid for v in setting.values if v.worst is not None]
    scenes = dict.fromkeys(f"batch {case.config.batch_size}, {weights_words(key_of(case.config))}" for case in worst)
    headline = rebuilding(worst[0]) if worst else ""
    if len(sound) == len(seeds):
        table = _with_ranks(table)
    federation = rows[0].sample.config.federation
    return Overview(about, checks_of(seeds), bool(sound), headline, " or ".join(scenes), table, advice(federation))


def _with_ranks(rows: Sequence[Standing]) -> tuple[Standing, ...]:
    """Return the rows with their ranks by the figures shown, the rule of boards; seeds are pooled in the settings."""
    shown = [row.value for row in rows]
    spans = [leak_span(v.metric) if v.usable and not _unranked(v) else None for v in shown]
    ranks = rank_intervals(spans, [v.leak is not None and v.leak.level == "blind" for v in shown])
    return tuple(replace(row, rank=rank) for row, rank in zip(rows, ranks, strict=True))


def _unranked(setting: Setting) -> bool:
    """Return whether a remark keeps a setting from ranks at some seed; usability is judged over all of them."""
    return bool({badge.text for v in setting.values for badge in v.entry.badges} & (UNRANKED - {COSTLY}))


# -- a setting in words ------------------------------------------------------------------------------------------------
def control_words(setting: Setting) -> str:
    """Return the control parameter and its value, as "sigma=1"; "" without any."""
    return setting.entry.control.replace(" = ", "=")


def amount_words(setting: Setting) -> str:
    """Return " at 46 dB", for table rows " within 2%" where they are rebuilt, else " (relative error 30%)"."""
    metric = setting.metric
    if metric is None or metric.value is None or setting.leak is None:
        return ""
    return setting.leak.everybody.amount_words(metric.value, setting.leak.level == "rebuilt")


def figures_words(setting: Setting) -> str:
    """Return " at 46 dB (undefended 89, blind 11)"; for table rows the relative error."""
    words = amount_words(setting)
    if not words or setting.leak is None or setting.metric is None or not setting.leak.everybody.modality.decibels:
        return words
    pairs = (("undefended", None if setting.beside is None else setting.beside.value), ("blind", setting.leak.blind))
    beside = ", ".join(f"{what} {number:.0f}" for what, number in pairs if number)
    return f"{words} ({beside})" if beside else words


def example_words(setting: Setting) -> str:
    """Return what the headline quotes of a setting's reconstructions; "" of images and rows."""
    leak = setting.leak
    return "" if leak is None or leak.worst is None else leak.everybody.modality.example(leak.worst.victims)


def recovered_words(setting: Setting) -> str:
    """Return what is recovered beside inputs: ", 90% of labels, members"."""
    share = None if setting.labels is None else value(best([setting.labels], "label_accuracy"), "label_accuracy")
    return "".join(
        f", {share:.0%} of labels" if word == "labels" and share else f", {word}" for word in setting.recovered
    )


def parameter_words(setting: Setting) -> str:
    """Return the control parameter and the parameters that differ; "" without any."""
    return ", ".join(word for word in (control_words(setting), setting.differs) if word)


def setting_words(setting: Setting) -> str:
    """Return a setting in a sentence: "dp_sgd at noise_multiplier=1", with the parameters that differ."""
    about = parameter_words(setting)
    return f"{setting.entry.defense.id} at {about}" if about else setting.entry.defense.id


def model_words(setting: Setting) -> str:
    """Return the model in a clause: "30.1% accurate, 20.7 points below the undefended 50.7%"; "" without figures.

    Of texts that are their own targets "30.1% of next tokens right".
    """
    accuracy, loss = setting.accuracy, setting.loss
    if accuracy is None:
        return "" if setting.mse is None else f"mean squared error {setting.mse:.3g}"
    right = f"{accuracy:.1%}{setting.counted} {'right' if setting.counted else 'accurate'}"
    if loss is None:
        return right
    side = "above" if loss > 0 else "below"
    return f"{right}, {abs(round(loss, 1)):.1f} points {side} the undefended {accuracy - loss / 100:.1%}"


def guarantee_words(setting: Setting) -> str:
    """Return what a setting guarantees: "epsilon 2.56 at delta 0.0005", "no guarantee (epsilon 4e4)", or ""."""
    epsilon, delta = stated_epsilon(setting), setting.entry.sample.privacy.delta
    if epsilon is None:
        return ""
    if setting.refutation is not None:
        return f"its epsilon of {epsilon:.3g} is refuted"
    if epsilon > VACUOUS:
        return epsilon_words(epsilon)
    return f"epsilon {epsilon:.3g}" + (f" at delta {delta:.2g}" if delta else "")


def stated_epsilon(setting: Setting) -> float | None:
    """Return the largest epsilon that a setting states; None where it states none at some seed."""
    stated = [v.entry.sample.privacy.epsilon for v in setting.values]
    known = [epsilon for epsilon in stated if epsilon is not None]
    return max(known) if len(known) == len(stated) else None


def sends_nothing(setting: Setting) -> bool:
    """Return whether clients send nothing in training, so that each trains alone."""
    return all(v.entry.sample.cost.bytes_up == 0 for v in setting.values)


# -- if you must choose ------------------------------------------------------------------------------------------------
CHOICE_RULE = (
    f"A usable setting loses at most {USABLE:g} points against the undefended model, and at most half of what that one "
    f"learned. An epsilon counts as a guarantee up to {VACUOUS:g}; beyond, an attacker at even odds may be right "
    "99.995% of the time."
)
"""The rules of `Choice`, for whoever reads it."""


@dataclass(frozen=True)
class Choice:
    """What to choose in one evaluation, if one must.

    least: the usable setting that leaks least, though it may leak; guarded: the best model with a guarantee worth the
    name; alone: training without sending anything; each None where there is none, and all where nothing can be
    concluded. sentences: what is concluded, then from what.
    """

    least: Setting | None
    guarded: Setting | None
    alone: Setting | None
    sentences: tuple[str, ...]

    @property
    def words(self) -> str:
        """The sentences as a paragraph."""
        return " ".join(self.sentences)

    def as_dict(self) -> dict[str, str | None]:
        """Return the choice in types that JSON has."""
        settings = {"least": self.least, "guarded": self.guarded, "alone": self.alone}
        return {name: None if v is None else setting_words(v) for name, v in settings.items()} | {"words": self.words}


def choice_of(table: Overview) -> Choice:
    """Return what to choose in an evaluation, by the judgment of its settings."""
    if reason := _reason_for_none(table):
        return Choice(None, None, None, (reason,))
    settings = [v for row in table.compared for v in row.grid]
    alone = next((v for v in settings if sends_nothing(v) and v.accuracy is not None), None)
    sending = [v for v in settings if not sends_nothing(v)]
    tops = sorted((row.value for row in table.compared if row.value.usable and row.value in sending), key=least_order)
    stating = [v for v in sending if stated_epsilon(v) is not None]
    guarded = max((v for v in stating if _is_guarantee(v)), key=lambda v: v.use, default=None)
    least = _least_sentence(tops) if tops else _useless_sentence(sending)
    others = _guarantee_sentence(sending, stating, guarded), _alone_sentence(alone, guarded, tops)
    sentences = filter(None, (_conclusion(stating, alone), least, *others))
    return Choice(next(iter(tops), None), guarded, alone, tuple(sentences))


def choices_of(tables: Sequence[Overview]) -> list[tuple[str, str]]:
    """Return what to choose, each paragraph with the evaluations that it is of, "" where there is one."""
    by_words = grouped(zip(distinct_words(tables), tables, strict=True), lambda pair: choice_of(pair[1]).words)
    if len(by_words) == 1 and len(tables) > 1:
        return [(f"All {len(tables)} evaluations", words) for words in by_words]
    return [("; ".join(about for about, _ in some), words) for words, some in by_words.items()]


def distinct_words(tables: Sequence[Overview]) -> list[str]:
    """Return of each evaluation the parts of its words that not all have; "" where there is one."""
    parts = [_PART.split(table.about) for table in tables]
    shared = set(parts[0]).intersection(*parts[1:]) if parts else set()
    return [", ".join(one for one in some if one not in shared) for some in parts]


def _reason_for_none(table: Overview) -> str:
    """Return why no setting can be named, a sentence; "" where one can."""
    bad = [check.sentence for check in table.checks if check.ok is not True]
    if bad or not table.reliable:
        why = "; ".join(dict.fromkeys(bad)) or "The self-test fails."
        return f"No setting is recommended, because controls fail or did not run. {why}"
    if not table.questions:
        return (
            "No setting is recommended: inputs and members were not attacked here, and costs say nothing about privacy."
        )
    if table.unlearned:
        return f"No setting is recommended, because {table.unlearned}, so no setting can be called usable."
    if all(row.none is None for row in table.compared):
        return "No setting is recommended: there is no undefended model to compare accuracy with."
    if all(v.usable is None for row in table.compared for v in row.grid):
        return "No setting is recommended: these records lack a constant answer's score, so usability cannot be judged."
    return ""


def least_order(setting: Setting) -> tuple[int, int, bool, int, float]:
    """Return the order among defenses: `leaking_order`, but settings that are alike by the worst case."""
    return (*leaking_order(setting)[:4], leakage_value(setting.metric, float("inf")))


def _is_guarantee(setting: Setting) -> bool:
    """Return whether a setting carries a guarantee worth the name that nothing refutes."""
    epsilon = stated_epsilon(setting)
    return epsilon is not None and epsilon <= VACUOUS and setting.refutation is None


def _useless_sentence(settings: Sequence[Setting]) -> str:
    """Return a sentence where no setting is usable, with the best model."""
    top = max(settings, key=lambda v: v.use, default=None)
    words = "" if top is None else model_words(top)
    best_model = f"; the best model is that of {setting_words(top)} ({words})" if top is not None and words else ""
    return f"No setting is usable{best_model}."


def _least_sentence(tops: Sequence[Setting]) -> str:
    """Return a sentence on the setting that leaks least; tops: each defense's usable one, the least leak first."""
    top, fate, recovered = tops[0], tops[0].judgement.fate, recovered_words(tops[0]).removeprefix(", ")
    words = figures_words(top)
    head = f"{setting_words(top)} leaks least of the usable settings{',' if words else ''}{words}"
    if fate == "falls":
        head = f"Every usable setting leaks; {setting_words(top)} leaks least"
        how, recovered = f"{top.judgement.verdict}{words}", "" if top.leak is None else recovered
    elif fate == "stands":
        how = "members not found" if top.leak is None else "no better than blind"
        how += " by the attacks tried here"
        how += ", untested against an aware attacker" if top.leak is not None and top.leak.untested else ""
    elif top.judgement.verdict.startswith("inconclusive"):
        how = f"no better than blind in {top.judgement.seeds} of {top.seeds} seeds, open in the others"
    else:
        how = "undecided, a leak is neither shown nor ruled out"
    also = f"also recovered: {recovered}" if recovered else ""
    clauses = (f"{head}: {how}", also, model_words(top), guarantee_words(top))
    return "; ".join(clause for clause in clauses if clause) + "." + _undistinguished(tops)


def _undistinguished(tops: Sequence[Setting]) -> str:
    """Return a sentence on settings whose leak is not told apart from the first one's; "" without any."""
    first = leak_span(tops[0].metric)
    same = [(v, leak_span(v.metric)) for v in tops[1:] if leaking_order(v)[:2] == leaking_order(tops[0])[:2]]
    alike = [setting_words(v) for v, span in same if first is not None and span is not None and span[0] <= first[1]]
    return f" Not distinguishable from it: {listed(alike)}." if alike else ""


def _claimed_words(settings: Sequence[Setting]) -> str:
    """Return in parentheses whose parameter is named epsilon, though none holds; "" without any."""
    controls = {v.entry.defense.id: v.entry.defense.control for v in settings}
    names = [name for name, control in controls.items() if control is not None and control.name == "epsilon"]
    return f" (the parameter of {listed(names)} is a claim)" if names else ""


def _guarantee_sentence(settings: Sequence[Setting], stating: Sequence[Setting], guarded: Setting | None) -> str:
    """Return a sentence on guarantees; stating: those of `settings` that state an epsilon."""
    if not stating:
        return f"No epsilon holds for any defense here{_claimed_words(settings)}, so none carries a guarantee."
    if guarded is None:
        closest = min(stating, key=lambda v: (v.refutation is not None, stated_epsilon(v) or 0.0))
        name = setting_words(closest)
        return f"No setting has a guarantee; closest is {name}: {guarantee_words(closest)}."
    useless = ", not usable" if guarded.usable is False else ""
    leaks = f"; it still leaks: {guarded.judgement.verdict}" if guarded.judgement.fate == "falls" else ""
    about = f"{guarantee_words(guarded)}, {model_words(guarded)}{useless}{leaks}"
    return f"Of the settings with a guarantee, {setting_words(guarded)} has the best model: {about}."


def _alone_sentence(alone: Setting | None, guarded: Setting | None, tops: Sequence[Setting]) -> str:
    """Return a sentence on training alone beside the guarantee, else beside the setting that leaks least; or ""."""
    other = guarded or next(iter(tops), None)
    if alone is None or alone.accuracy is None:
        return ""
    words = f"Training alone, where nothing is sent, is {model_words(alone)}"
    if other is None or other.accuracy is None:
        return f"{words}."
    points, name = f"{abs(100 * (alone.accuracy - other.accuracy)):.1f} points", setting_words(other)
    beside = {True: f"{points} better than {name}", False: f"{points} worse than {name}", None: f"level with {name}"}
    return f"{words}, and {beside[more_accurate(alone, other)]}."


def more_accurate(one: Setting, other: Setting) -> bool | None:
    """Return whether a model is more accurate than another at every shared seed, its whole interval above the other's.

    False where it is less accurate at every one, None else.
    """
    uses, besides = ({v.entry.key.seed: v.entry.sample.utility for v in setting.values} for setting in (one, other))
    pairs = [(uses[seed], besides[seed]) for seed in uses.keys() & besides.keys()]
    above, below = (bool(pairs) and all(_clears(a, b) for a, b in some) for some in (pairs, [(b, a) for a, b in pairs]))
    return True if above else False if below else None


def _clears(one: Utility, other: Utility) -> bool:
    """Return whether the interval of an accuracy lies above another's."""
    return one.low is not None and other.high is not None and one.low > other.high


def _conclusion(stating: Sequence[Setting], alone: Setting | None) -> str:
    """Return whether anything keeps accuracy and gives a guarantee; "" where no defense states one."""
    worthy = [v for v in stating if _is_guarantee(v)]
    kept = max((v for v in worthy if v.usable), key=lambda v: v.use, default=None)
    if kept is not None:
        but = ", and training alone is more accurate still" if alone and more_accurate(alone, kept) else ""
        return f"{setting_words(kept)} keeps accuracy and gives a guarantee{but}."
    if not stating:
        return ""
    if alone is not None and alone.usable:
        return "No defense keeps accuracy and gives a guarantee; training alone keeps accuracy and sends nothing."
    beaten = bool(worthy) and alone is not None and all(more_accurate(alone, v) for v in worthy)
    end = "; training alone is more accurate than every guarantee" if beaten else ""
    return f"No setting keeps accuracy and gives a guarantee{end}."
