"""The rows of a comparison: attacks, the worst case over them, accuracy, claimed epsilon, CAP."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ppbench.questions.base import DistanceLaw, Rule, question_for, question_of
from ppbench.records.figure import leak
from ppbench.records.schema import Utility
from ppbench.report.compare import paired
from ppbench.report.compare.join import Facts, Joined, Pair, Where, facts_of, notes
from ppbench.report.compare.judge import Row, row_of
from ppbench.report.compare.paired import Change, change, level_of, same, with_luck
from ppbench.report.compare.samples import RULES, TRAINED, Floats, rules_for, sample_of
from ppbench.report.frame import MODEL, POINT, Key, key_of
from ppbench.report.worst import Measured, cell_of, worst_case

ACCURACY, EPSILON, CAP = 0.01, 0.25, 0.01
"""How much worse counts: of an accuracy or a Dice coefficient (of a mean squared error: of its size), of a claimed
epsilon, of a CAP."""
CAP_LUCK, UNTRAINED_LUCK = 0.05, 0.005  # of training, of a CAP over attacks on trained models and on fresh ones
_Z = 3.92  # width of a 95 % interval over its standard error
LUCK = 0.5  # of training, of an accuracy, in tolerances; see `Rule.luck`


def rows_of(joined: Joined) -> list[Row]:
    """Return every row, not yet judged; what is of no attack is a headline, but for CAPs, one an attack."""
    chosen = headlines(joined.pairs)
    rows = [row for pair, names in zip(joined.pairs, chosen, strict=True) for row in _cells(pair, names)]
    everything = frozenset(rule.metric for rule in RULES)
    rows += [row for pair in worst_cases(joined.pairs) for row in _cells(pair, everything)]
    for trained in _trainings(joined.pairs):
        rows += [replace(row, headline=True) for row in (*_utilities(trained), *_epsilons(trained))]
    rows += cap_rows(joined)
    rows += [Row(left.where, "", "", left.status, None, 0.0, left.reason, left.record) for left in joined.left]
    return sorted(rows, key=lambda row: (*row.where.order(), row.subset, row.metric))


def _cells(pair: Pair, headline: frozenset[str]) -> Iterator[Row]:
    """Yield a row for each judged metric that BASELINE has in every seed; those in `headline` are headlines."""
    for rule in rules_for(pair.base[0]):
        if all((metric := r.metric(rule.metric)) is not None and metric.value is not None for r in pair.base):
            yield replace(_cell(pair, rule), headline=rule.metric in headline)


def _cell(pair: Pair, rule: Rule) -> Row:
    theirs = [r.metric(rule.metric) for r in pair.new]
    for metric in theirs:
        if metric is None or metric.value is None:
            reason = "the record has no such metric" if metric is None else metric.reason or "null"
            return row_of(pair, rule, None, f"not in NEW: {reason}")
    deltas = [(a.privacy.delta, b.privacy.delta) for a, b in zip(pair.base, pair.new, strict=True)]
    if rule.form == "epsilon" and any(one != two for one, two in deltas):
        note = f"delta is {deltas[0][0]}, NEW has {deltas[0][1]}"
        return replace(row_of(pair, rule, None, note), status="incomparable")
    estimated = change(pair.base, pair.new, rule, f"{pair.where} {rule.metric}")
    luck = rule.luck if pair.where.stage in TRAINED else 0.0
    return row_of(pair, rule, with_luck(estimated, luck, len(pair.seeds)), "")


def _trainings(pairs: Sequence[Pair]) -> Iterator[Pair]:
    """Yield what was trained at each point: any of its cells tells its accuracy, and an audit's has its own."""
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
        yield Pair(where, order, tuple(seeds[s][0] for s in order), tuple(seeds[s][1] for s in order))


def _utilities(pair: Pair) -> Iterator[Row]:
    for name, safer in (("accuracy", True), ("dice", True), ("mse", False)):
        if name == "mse" and pair.base[0].utility.accuracy is not None:
            continue  # of a classifier the accuracy is judged
        sides = [[level_of(record.utility, name) for record in side] for side in (pair.base, pair.new)]
        base, new = ([level for level in side if level is not None] for side in sides)
        if len(base) < len(pair.seeds):
            continue
        mean = float(np.mean([b.value for b in base]))
        tolerance = ACCURACY * (mean if name == "mse" else 1.0)
        rule = Rule(name, name, "all", "mean", tolerance, safer, LUCK * tolerance)
        if len(new) < len(base):
            reason = next((r.utility.reason for r in pair.new if level_of(r.utility, name) is None), None)
            yield row_of(pair, rule, None, f"not in NEW: {reason}")
        elif all(a.utility == b.utility for a, b in zip(pair.base, pair.new, strict=True)):
            yield row_of(pair, rule, same(mean, sum(b.n for b in base), "equal utility"), "")
        else:
            yield row_of(pair, rule, with_luck(paired.unpaired(base, new, safer), rule.luck, len(base)), "")


def _epsilons(pair: Pair) -> Iterator[Row]:
    """Yield the change of the claimed epsilon, which is stated and not estimated; a guarantee that is gone is worse."""
    rule = Rule("epsilon", "epsilon_claimed", "all", "mean", EPSILON, False, 0.0)
    base, new = ([r.privacy.epsilon for r in side] for side in (pair.base, pair.new))
    ours, theirs = ([e for e in side if e is not None] for side in (base, new))
    if not ours:
        return
    deltas = [{r.privacy.delta for r in side} for side in (pair.base, pair.new)]
    if len(theirs) < len(ours):
        note = f"no guarantee in NEW: {pair.new[0].privacy.reason}"
        yield replace(row_of(pair, rule, None, note), status="regression")
    elif deltas[0] != deltas[1]:
        note = f"delta is {sorted(map(str, deltas[0]))}, NEW has {sorted(map(str, deltas[1]))}"
        yield replace(row_of(pair, rule, None, note), status="incomparable")
    else:
        one, two = float(np.mean(ours)), float(np.mean(theirs))
        worse = two - one
        yield row_of(pair, rule, Change(one, two, worse, worse, worse, 1.0, len(ours), "as stated", certain=True), "")


# -- the CAP, a mean over control values of accuracy times distance ---------------------------------------------------
def cap_rows(joined: Joined) -> Iterator[Row]:
    """Yield the change of the CAP of every series of control values that is whole on both sides."""
    broken = {replace(left.where, value=None) for left in joined.left if left.status != "new"}
    series = defaultdict[tuple[Where, Facts, tuple[int, ...]], list[Pair]](list)
    for pair in joined.pairs:
        where = replace(pair.where, value=None)
        if where.control and where not in broken:
            series[where, facts_of(pair.base[0].config), pair.seeds].append(pair)
    for (where, _, seeds), some in series.items():
        if len(some) > 1:
            yield from _cap(Pair(where, seeds, some[0].base, some[0].new, notes(some)), some)


def _cap(shown: Pair, some: Sequence[Pair]) -> Iterator[Row]:
    """Yield the change of one series' CAP."""
    # Victims are drawn alike at all control values; accuracies by the normal law of their intervals, a side at once.
    question = question_for(shown.base[0])
    law = question.distance()
    if law is None:
        return
    metric = law.metric
    rule = next(r for r in question.rules if r.metric == metric)
    cells = [(a, b) for pair in some for a, b in zip(pair.base, pair.new, strict=True)]
    if any(r.utility.accuracy is None or (m := r.metric(metric)) is None or m.value is None for c in cells for r in c):
        return
    row = Rule("cap", "cap", "all", "mean", CAP, True, CAP_LUCK if shown.where.stage in TRAINED else UNTRAINED_LUCK)
    n = sum(len(r.victims) for r, _ in cells)
    worse, base, new = _cap_resamples(some, rule, law, f"{shown.where} cap")
    if all(a.victims == b.victims and a.utility == b.utility for a, b in cells):
        yield row_of(shown, row, same(base, n), "")
        return
    units = sum(len(sample_of(a, b, rule).stratum) for a, b in zip(some[0].base, some[0].new, strict=True))
    estimated = paired.resampled(base, new, worse, units, n, f"paired bootstrap over victims, {paired.REPLICATES}")
    yield row_of(shown, row, with_luck(estimated, row.luck, len(shown.seeds)), "")


def _cap_resamples(some: Sequence[Pair], rule: Rule, law: DistanceLaw, key: str) -> tuple[Floats, float, float]:
    """Return the worsening of a CAP in all resamples, and the CAP of both sides."""
    each: list[Floats] = []
    levels: list[tuple[float, float]] = []
    for place in range(len(some[0].seeds)):
        luck = paired.generator_of(f"{key} accuracy {place}").standard_normal((2, paired.REPLICATES))
        caps = []
        for pair in some:
            one, two = pair.base[place], pair.new[place]
            distances = paired.replicated(sample_of(one, two, rule), rule, paired.generator_of(f"{key} {place}"))
            equal = one.utility == two.utility
            accuracies = [_accuracies(r.utility, luck[0 if equal else side]) for side, r in enumerate((one, two))]
            caps.append([a * law.of(d) for a, d in zip(accuracies, distances, strict=True)])
        base, new = (np.mean([cap[side] for cap in caps], axis=0) for side in (0, 1))
        each.append(base - new)
        levels.append((float(base[0]), float(new[0])))
    base_level, new_level = (float(np.mean([level[side] for level in levels])) for side in (0, 1))
    return paired.over_seeds(each, paired.generator_of(f"{key} seeds")), base_level, new_level


def _accuracies(utility: Utility, luck: Floats) -> Floats:
    value, low, high = utility.accuracy or 0.0, utility.low or 0.0, utility.high or 0.0
    return np.concatenate([[value], np.clip(value + luck * (high - low) / _Z, 0.0, 1.0)])


# -- what is said of a defense first ---------------------------------------------------------------------------------
MAIN = ("epsilon_lower", "label_accuracy", "asr", "auc", "tracing_accuracy", "agreement", "output_error")
"""The metric that an attack stands for a point with, the first that BASELINE has."""
_Point = tuple[Where, Key, tuple[int, ...], str]


def _points(pairs: Sequence[Pair]) -> dict[_Point, list[int]]:
    """Return the places in `pairs` of the attacks of one kind on each point."""
    points = defaultdict[_Point, list[int]](list)
    for number, pair in enumerate(pairs):
        key = key_of(pair.base[0].config)
        where = replace(pair.where, attack="", follows="")
        points[where, key.only(POINT), pair.seeds, key.asked].append(number)
    return points


def worst_cases(pairs: Sequence[Pair]) -> Iterator[Pair]:
    """Yield the worst case of each point, over the reconstruction attacks that are on both sides, if several are."""
    for (where, _, seeds, kind), places in _points(pairs).items():
        if not question_of(kind).inputs or len(places) < 2:
            continue
        some = [pairs[place] for place in places]
        sides = [
            [worst_case([cell_of(side[place]) for side in part], "psnr_median") for place in range(len(seeds))]
            for part in ([p.base for p in some], [p.new for p in some])
        ]
        base, new = (tuple(case for case in side if case is not None) for side in sides)
        if len(base) == len(new) == len(seeds):
            yield Pair(replace(where, attack=f"worst case of {len(some)} attacks"), seeds, base, new, notes(some))


def headlines(pairs: Sequence[Pair]) -> list[frozenset[str]]:
    """Return the metrics of each pair that are headlines.

    A lone reconstruction attack is the worst case itself. Of other kinds the attack that leaks most in BASELINE stands
    for the point, by one metric; NEW has no say in it, or chance would have.
    """
    metrics = [frozenset[str]() for _ in pairs]
    for (_, _, _, kind), places in _points(pairs).items():
        if question_of(kind).inputs:
            if len(places) == 1:
                metrics[places[0]] = frozenset(rule.metric for rule in RULES)
            continue
        names = (*MAIN, *(rule.metric for rule in question_of(kind).rules))
        metric = next((name for name in names if any(_leaked(pairs[p].base, name) is not None for p in places)), None)
        if metric is not None:
            levels = [-np.inf if (level := _leaked(pairs[p].base, metric)) is None else level for p in places]
            metrics[places[int(np.argmax(levels))]] = frozenset([metric])
    return metrics


def _leaked(records: Sequence[Measured], name: str) -> float | None:
    """Return how much leaks by a judged metric, the mean over seeds; None where a seed lacks it."""
    if all(rule.metric != name for rule in rules_for(records[0])):
        return None
    metrics = [record.metric(name) for record in records]
    known = [leak(metric) for metric in metrics if metric is not None and metric.value is not None]
    return float(np.mean(known)) if len(known) == len(records) else None
