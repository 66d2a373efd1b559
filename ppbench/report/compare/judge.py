"""From changes to verdicts: a tolerance, an interval, and Holm's correction over the rows of a defense.

A defense has two families of rows, each corrected by itself: the headlines, which a dozen victims can still decide,
and all others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import scipy

from ppbench.metrics.intervals import CONFIDENCE, REPLICATES, Floats
from ppbench.metrics.spec import Rule
from ppbench.questions.base import DistanceLaw, question_for, question_of
from ppbench.records.figure import grouped, leakage_value
from ppbench.records.schema import MODEL_METRICS, Record, Utility
from ppbench.report.compare import paired
from ppbench.report.compare.join import EqualFacts, Joined, RowPair, Where, equal_facts, notes
from ppbench.report.frame import EVALUATION, FREE, MODEL, POINT, Key, key_of
from ppbench.report.learning import USABLE, learning_of
from ppbench.report.worst import Measured, cell_of, worst_case

RowStatus = Literal["regression", "improved", "ok", "inconclusive", "missing", "incomparable", "new", "unjudged"]
SIGNIFICANCE = 1 - CONFIDENCE
_Z_ONE_ROW = float(-scipy.special.ndtri(SIGNIFICANCE / 2))
MOST_VICTIMS = 10**6
"""Numbers of victims beyond this are not named: such a row cannot be decided."""


@dataclass(frozen=True)
class ComparedRow:
    """One line of a comparison.

    where: what it is about; `attack` may be "worst case of N attacks", or "" where none is needed; metric: "" where the
    whole cell could not be compared; status: see docs/compare.md; change: None where nothing was compared; tolerance:
    the least worsening that counts; note: what a reader must know; record: its first in BASELINE; adjusted: p-value
    after Holm's correction over the `family` rows of its kind, headlines or others; needed: victims that would decide
    it; blind: whether it is an undecided headline that so few victims cannot decide among so many rows.
    """

    where: Where
    metric: str
    subset: str
    status: RowStatus
    change: paired.Change | None
    tolerance: float
    note: str
    record: Record
    adjusted: float | None = None
    needed: int | None = None
    headline: bool = False
    family: int = 0
    blind: bool = False
    digits: int = 3

    @property
    def point(self) -> str:
        """Defense and control value, as "dp sigma=0.01"."""
        where = self.where
        value = f" {where.control}={where.value:g}" if where.value is not None else f" over {where.control}"
        return printable(f"{where.defense}{value if where.control else ''}")

    @property
    def attack(self) -> str:
        """The attack, with the one whose images it starts from; "" where none is needed."""
        where = self.where
        return printable(f"{where.attack} after {where.follows}" if where.follows else where.attack)

    @property
    def title(self) -> str:
        """The metric with its subset, as "auc (canaries)"; "all" where the whole cell is meant."""
        return f"{self.metric} (canaries)" if self.subset == "canaries" else self.metric or "all"

    @property
    def place(self) -> str:
        """Stage, batch size, threat model, role and probe in words, "" without any."""
        where = self.where
        parts = [
            where.stage,
            f"batch {where.batch}" if where.batch else "",
            f"to {where.threat}" if where.threat else "",
        ]
        parts += [where.role, f"probe {where.probe} x{where.probe_rounds}" if where.probe == "local" else ""]
        return printable(", ".join(part for part in parts if part))

    @property
    def name(self) -> str:
        """The row in one line, as "dlg, init, batch 1, to server: psnr_median"."""
        about = ", ".join(part for part in (self.attack, self.place) if part)
        return f"{about}: {self.title}" if about else self.title

    def figure(self, value: float) -> str:
        """Return a figure with the decimals of its metric."""
        return f"{round(value, self.digits) + 0.0:.{self.digits}f}"  # no "-0.000"

    @property
    def levels(self) -> str:
        """Both figures, as "8.41 to 19.37"; "" where nothing was compared."""
        return f"{self.figure(self.change.base)} to {self.figure(self.change.new)}" if self.change else ""


def printable(text: str) -> str:
    """Return `text` with a question mark for every character that is not printable, such as a line break."""
    return "".join(c if c.isprintable() else "?" for c in text)


def unjudged_row(pair: RowPair, rule: Rule, change: paired.Change | None, note: str) -> ComparedRow:
    """Return a row without a verdict; without a change it is missing from NEW. The note names versions."""
    one, two = pair.base[0].config.edition, pair.new[0].config.edition
    notes = [note, pair.note, "" if one == two else f"version {one} -> {two}"]
    status: RowStatus = "missing" if change is None else "ok"
    note = "; ".join(part for part in notes if part)
    record = cell_of(pair.base[0])
    about = pair.where, rule.name, rule.subset, status, change, rule.tolerance, note, record
    return ComparedRow(*about, digits=rule.digits)


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values adjusted by Holm's step-down method (1979), in the given order."""
    order = sorted(range(len(values)), key=lambda place: values[place])
    adjusted, so_far = [0.0] * len(values), 0.0
    for rank, place in enumerate(order):
        so_far = max(so_far, min(1.0, (len(values) - rank) * values[place]))
        adjusted[place] = so_far
    return adjusted


def judged_rows(rows: Sequence[ComparedRow]) -> list[ComparedRow]:
    """Return the rows with verdicts; Holm's correction is over the estimated changes of each family of each defense."""
    estimated = [place for place, row in enumerate(rows) if row.change is not None and not row.change.certain]
    corrected = list(rows)
    for places in grouped(estimated, lambda place: (rows[place].where.defense, rows[place].headline)).values():
        adjusted = holm([change.p for place in places if (change := rows[place].change) is not None])
        for place, p in zip(places, adjusted, strict=True):
            corrected[place] = replace(rows[place], adjusted=p, family=len(places))
    return [_verdict(row) for row in corrected]


def _verdict(row: ComparedRow) -> ComparedRow:
    change = row.change
    if change is None:
        return row
    sure = change.certain or (row.adjusted is not None and row.adjusted < SIGNIFICANCE)
    if sure and change.low > 0 and change.worse > row.tolerance:
        status: RowStatus = "regression"
    elif sure and change.high < 0 and change.worse < -row.tolerance:
        status = "improved"
    else:
        status = "ok" if change.high < row.tolerance else "inconclusive"
    if status != "inconclusive":
        return replace(row, status=status)
    if row.headline and change.floor * row.family >= SIGNIFICANCE:
        return replace(row, status=status, blind=True, needed=_seeing(change, row.family))
    return replace(row, status=status, needed=_needed(change, row.tolerance, row.adjusted))


def _seeing(change: paired.Change, family: int) -> int:
    """Return how many victims could decide a blind row; each further unit halves its least p-value."""
    more = math.floor(math.log2(change.floor * family / SIGNIFICANCE)) + 1
    return math.ceil(change.n * (change.units + more) / change.units)


def _needed(change: paired.Change, tolerance: float, adjusted: float | None) -> int | None:
    """Return how many victims would decide a row if the estimate were exact; None beyond `MOST_VICTIMS`."""
    shared = _Z_ONE_ROW * change.luck  # what is not luck of training shrinks with the root of n
    if change.worse < tolerance:
        half, margin = change.high - change.worse, tolerance - change.worse
    else:
        times = 1.0 if not adjusted or change.p <= 0 else max(1.0, adjusted / change.p)
        half = change.worse - change.low
        margin = change.worse * _Z_ONE_ROW / float(scipy.stats.norm.isf(SIGNIFICANCE / times / 2))
    if margin <= shared:
        return None
    number = change.n * (half**2 - shared**2) / (margin**2 - shared**2)
    return None if number > MOST_VICTIMS else max(change.n + 1, math.ceil(number))


# -- The rows of a comparison: attacks, the worst case over them, accuracy, claimed epsilon, CAP --

EPSILON, CAP = 0.25, 0.01
"""Tolerances of a claimed epsilon and of a CAP."""
CAP_LUCK, UNTRAINED_LUCK = 0.05, 0.005  # luck of training of a CAP over attacks on trained models, and on fresh ones
UNLEARNED_LUCK = USABLE / 100
"""Luck of training of an accuracy where hardly anything was learned: one noise draw gave 19 %, nine others 10 %."""
_INTERVAL_OVER_ERROR = 3.92  # width of a 95 % interval over its standard error


def rows_of(joined: Joined) -> list[ComparedRow]:
    """Return every row, not yet judged; rows without an attack are headlines, except for CAPs, one per attack."""
    chosen = headlines(joined.pairs)
    rows = [row for pair, names in zip(joined.pairs, chosen, strict=True) for row in _cells(pair, names)]
    everything = frozenset(rule.metric for rule in paired.ALL_RULES)
    worst = [worst for some, worst in scenes_of(joined.pairs) if len(some) > 1]  # a lone attack is its own worst case
    rows += [row for pair in worst for row in _cells(pair, everything)]
    trainings = [*_trainings(joined.pairs)]
    for trained in trainings:
        utilities = _utilities(trained, _has_learned(trained, trainings))
        rows += [replace(row, headline=True) for row in (*utilities, *_epsilons(trained))]
    rows += cap_rows(joined)
    rows += [ComparedRow(left.where, "", "", left.status, None, 0.0, left.reason, left.record) for left in joined.left]
    return sorted(rows, key=lambda row: (*row.where.order(), row.subset, row.metric))


def _cells(pair: RowPair, headline: frozenset[str]) -> Iterator[ComparedRow]:
    """Yield a row for each judged metric that BASELINE has in every seed; headline: metrics of headlines."""
    for rule in paired.rules_for(pair.base[0]):
        if all((metric := r.metric(rule.metric)) is not None and metric.value is not None for r in pair.base):
            yield replace(_cell(pair, rule), headline=rule.metric in headline)


def _cell(pair: RowPair, rule: Rule) -> ComparedRow:
    theirs = [r.metric(rule.metric) for r in pair.new]
    for metric in theirs:
        if metric is None or metric.value is None:
            reason = "the record has no such metric" if metric is None else metric.reason or "null"
            return unjudged_row(pair, rule, None, f"not in NEW: {reason}")
    deltas = [(a.privacy.delta, b.privacy.delta) for a, b in zip(pair.base, pair.new, strict=True)]
    if rule.form == "epsilon" and any(one != two for one, two in deltas):
        note = f"delta is {deltas[0][0]}, NEW has {deltas[0][1]}"
        return replace(unjudged_row(pair, rule, None, note), status="incomparable")
    estimated = paired.change(pair.base, pair.new, rule, f"{pair.where} {rule.metric}")
    luck = rule.luck if pair.where.stage in paired.TRAINED_STAGES else 0.0
    return unjudged_row(pair, rule, paired.with_luck(estimated, luck, len(pair.seeds)), "")


def _trainings(pairs: Sequence[RowPair]) -> Iterator[RowPair]:
    """Yield one pair per training: any of its cells has its accuracy; an audit is a training of its own."""
    points = defaultdict[tuple[Where, Key], dict[int, tuple[Measured, Measured]]](dict)
    for pair in pairs:
        config = pair.base[0].config
        stage = "audit" if config.audit is not None else ""
        where = replace(pair.where, threat="", stage=stage, batch=0, probe="", probe_rounds=0, role="", attack="")
        key = replace(where, follows=""), key_of(config).only(MODEL)
        for seed, one, two in zip(pair.seeds, pair.base, pair.new, strict=True):
            points[key].setdefault(seed, (one, two))
    for (where, _), seeds in points.items():
        order = tuple(sorted(seeds))
        yield RowPair(where, order, tuple(seeds[s][0] for s in order), tuple(seeds[s][1] for s in order))


_FEDERATION = tuple(name for name in EVALUATION if name not in FREE)  # what all defenses of one evaluation share


def _has_learned(pair: RowPair, trainings: Sequence[RowPair]) -> bool:
    """Return whether BASELINE's model, and the undefended one of its federation, are shown to have learned."""
    key = key_of(pair.base[0].config).only(_FEDERATION)
    undefended = [one for one in trainings if one.where.defense == "none"]
    beside = [one for one in undefended if key_of(one.base[0].config).only(_FEDERATION) == key]
    return all(learning_of(record.utility).suffices for one in (pair, *beside) for record in one.base)


def _utilities(pair: RowPair, has_learned: bool) -> Iterator[ComparedRow]:
    for name, metric in MODEL_METRICS.items():
        rule = metric.rule
        if rule is None or (metric.unless and getattr(pair.base[0].utility, metric.unless) is not None):
            continue  # a classifier is judged by accuracy
        sides = [[paired.model_figure(record.utility, name) for record in side] for side in (pair.base, pair.new)]
        base, new = ([level for level in side if level is not None] for side in sides)
        if len(base) < len(pair.seeds):
            continue
        if not has_learned:
            rule = replace(rule, luck=max(rule.luck, UNLEARNED_LUCK))
        mean = float(np.mean([b.value for b in base]))
        if metric.relative:
            rule = replace(rule, tolerance=rule.tolerance * mean, luck=rule.luck * mean)
        if len(new) < len(base):
            reason = next((r.utility.reason for r in pair.new if paired.model_figure(r.utility, name) is None), None)
            yield unjudged_row(pair, rule, None, f"not in NEW: {reason}")
        elif all(a.utility.agrees(b.utility) for a, b in zip(pair.base, pair.new, strict=True)):
            yield unjudged_row(pair, rule, paired.unchanged(mean, sum(b.n for b in base), "equal utility"), "")
        else:
            yield unjudged_row(
                pair, rule, paired.with_luck(paired.unpaired(base, new, rule.safer), rule.luck, len(base)), ""
            )


def _epsilons(pair: RowPair) -> Iterator[ComparedRow]:
    """Yield the change of the claimed epsilon, which is not estimated; a lost guarantee is a regression."""
    rule = Rule("epsilon", "epsilon_claimed", "all", "mean", EPSILON, False, 0.0, digits=2)
    base, new = ([r.privacy.epsilon for r in side] for side in (pair.base, pair.new))
    ours, theirs = ([e for e in side if e is not None] for side in (base, new))
    if not ours:
        return
    deltas = [{r.privacy.delta for r in side} for side in (pair.base, pair.new)]
    if len(theirs) < len(ours):
        note = f"no guarantee in NEW: {pair.new[0].privacy.reason}"
        yield replace(unjudged_row(pair, rule, None, note), status="regression")
    elif deltas[0] != deltas[1]:
        note = f"delta is {sorted(map(str, deltas[0]))}, NEW has {sorted(map(str, deltas[1]))}"
        yield replace(unjudged_row(pair, rule, None, note), status="incomparable")
    else:
        one, two = float(np.mean(ours)), float(np.mean(theirs))
        worse = two - one
        yield unjudged_row(
            pair, rule, paired.Change(one, two, worse, worse, worse, 1.0, len(ours), "as stated", certain=True), ""
        )


# -- the CAP, a mean over control values of accuracy times distance ---------------------------------------------------
def cap_rows(joined: Joined) -> Iterator[ComparedRow]:
    """Yield the change of the CAP of every series of control values that is complete on both sides."""
    broken = {replace(left.where, value=None) for left in joined.left if left.status != "new"}

    def series(pair: RowPair) -> tuple[Where, EqualFacts, tuple[int, ...]]:
        return replace(pair.where, value=None), equal_facts(pair.base[0].config), pair.seeds

    for (where, _, seeds), some in grouped(joined.pairs, series).items():
        if len(some) > 1 and where.control and where not in broken:
            yield from _cap(RowPair(where, seeds, some[0].base, some[0].new, notes(some)), some)


def _cap(shown: RowPair, some: Sequence[RowPair]) -> Iterator[ComparedRow]:
    """Yield the change of one series' CAP."""
    # Resamples draw the same victims at all control values, and accuracies from the normal law of their intervals.
    question = question_for(shown.base[0])
    law = question.distance()
    if law is None:
        return
    metric = law.metric
    rule = next(r for r in question.all_rules if r.metric == metric)
    cells = [(a, b) for pair in some for a, b in zip(pair.base, pair.new, strict=True)]
    if any(r.utility.accuracy is None or (m := r.metric(metric)) is None or m.value is None for c in cells for r in c):
        return
    row = Rule(
        "cap",
        "cap",
        "all",
        "mean",
        CAP,
        True,
        CAP_LUCK if shown.where.stage in paired.TRAINED_STAGES else UNTRAINED_LUCK,
    )
    n = sum(len(r.victims) for r, _ in cells)
    worse, base, new = _cap_resamples(some, rule, law, f"{shown.where} cap")
    if all(_agree(a, b) for a, b in cells):
        yield unjudged_row(shown, row, paired.unchanged(base, n), "")
        return
    units = sum(len(paired.sample_of(a, b, rule).stratum) for a, b in zip(some[0].base, some[0].new, strict=True))
    estimated = paired.resampled(base, new, worse, units, n, f"paired bootstrap over victims, {REPLICATES}")
    yield unjudged_row(shown, row, paired.with_luck(estimated, row.luck, len(shown.seeds)), "")


def _agree(base: Measured, new: Measured) -> bool:
    """Return whether victims and utility are equal, apart from figures that one side lacks."""
    if len(base.victims) != len(new.victims) or not base.utility.agrees(new.utility):
        return False
    return all(one.agrees(two) for one, two in zip(base.victims, new.victims, strict=True))


def _cap_resamples(some: Sequence[RowPair], rule: Rule, law: DistanceLaw, key: str) -> tuple[Floats, float, float]:
    """Return the worsening of a CAP [1 + REPLICATES], and the CAP on both sides."""
    each: list[Floats] = []
    levels: list[tuple[float, float]] = []
    for place in range(len(some[0].seeds)):
        luck = paired.generator_of(f"{key} accuracy {place}").standard_normal((2, REPLICATES))
        caps = []
        for pair in some:
            one, two = pair.base[place], pair.new[place]
            distances = paired.replicated(paired.sample_of(one, two, rule), rule, paired.generator_of(f"{key} {place}"))
            equal = one.utility.agrees(two.utility)
            accuracies = [_accuracies(r.utility, luck[0 if equal else side]) for side, r in enumerate((one, two))]
            caps.append([a * law.of(d) for a, d in zip(accuracies, distances, strict=True)])
        base, new = (np.mean([cap[side] for cap in caps], axis=0) for side in (0, 1))
        each.append(base - new)
        levels.append((float(base[0]), float(new[0])))
    base_level, new_level = (float(np.mean([level[side] for level in levels])) for side in (0, 1))
    return paired.over_seeds(each, paired.generator_of(f"{key} seeds")), base_level, new_level


def _accuracies(utility: Utility, luck: Floats) -> Floats:
    value, low, high = utility.accuracy or 0.0, utility.low or 0.0, utility.high or 0.0
    return np.concatenate([[value], np.clip(value + luck * (high - low) / _INTERVAL_OVER_ERROR, 0.0, 1.0)])


# -- headlines -------------------------------------------------------------------------------------------------------
_Point = tuple[Where, Key, tuple[int, ...], str]


def _points(pairs: Sequence[RowPair]) -> dict[_Point, list[int]]:
    """Return the indices in `pairs` of the attacks of one kind on each point."""

    def point(place: int) -> _Point:
        pair, key = pairs[place], key_of(pairs[place].base[0].config)
        return replace(pair.where, attack="", follows=""), key.only(POINT), pair.seeds, key.question

    return grouped(range(len(pairs)), point)


def scenes_of(pairs: Sequence[RowPair]) -> Iterator[tuple[list[RowPair], RowPair]]:
    """Yield the reconstruction attacks on both sides of each point in one scene, and the worst case over them."""
    for (where, _, seeds, kind), places in _points(pairs).items():
        if not question_of(kind).inputs:
            continue
        some = [pairs[place] for place in places]
        sides = [
            [worst_case([cell_of(side[place]) for side in part], "psnr_median") for place in range(len(seeds))]
            for part in ([p.base for p in some], [p.new for p in some])
        ]
        base, new = (tuple(case for case in side if case is not None) for side in sides)
        if len(base) == len(new) == len(seeds):
            where = replace(where, attack=f"worst case of {len(some)} attacks")
            yield some, RowPair(where, seeds, base, new, notes(some))


def headlines(pairs: Sequence[RowPair]) -> list[frozenset[str]]:
    """Return the metrics of each pair that are headlines.

    A lone reconstruction attack is the worst case itself. Of other kinds, the attack that leaks most in BASELINE is the
    headline, by one metric, the first with a rule that BASELINE has; choosing by NEW would select by chance.
    """
    metrics = [frozenset[str]() for _ in pairs]
    for (_, _, _, kind), places in _points(pairs).items():
        if question_of(kind).inputs:
            if len(places) == 1:
                metrics[places[0]] = frozenset(rule.metric for rule in paired.ALL_RULES)
            continue
        rules = sorted(question_of(kind).all_rules, key=lambda rule: not rule.first)
        names = [rule.metric for rule in rules]
        metric = next((name for name in names if any(_leaked(pairs[p].base, name) is not None for p in places)), None)
        if metric is not None:
            levels = [-np.inf if (level := _leaked(pairs[p].base, metric)) is None else level for p in places]
            metrics[places[int(np.argmax(levels))]] = frozenset([metric])
    return metrics


def _leaked(records: Sequence[Measured], name: str) -> float | None:
    """Return the leak by a judged metric, the mean over seeds; None where a seed lacks it."""
    if all(rule.metric != name for rule in paired.rules_for(records[0])):
        return None
    metrics = [record.metric(name) for record in records]
    known = [leakage_value(metric) for metric in metrics if metric is not None and metric.value is not None]
    return float(np.mean(known)) if len(known) == len(records) else None
