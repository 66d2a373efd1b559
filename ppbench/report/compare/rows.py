"""The rows of a comparison: attacks, the worst case over them, accuracy, claimed epsilon, CAP."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ppbench.questions.base import Rule
from ppbench.records.schema import Metric, Utility
from ppbench.report.compare.caps import cap_rows
from ppbench.report.compare.headlines import headlines, worst_cases
from ppbench.report.compare.join import Joined, Pair, Where
from ppbench.report.compare.judge import Row, row_of
from ppbench.report.compare.paired import Change, Level, change, same, unpaired, with_luck
from ppbench.report.compare.samples import RULES, TRAINED, rules_for
from ppbench.report.frame import MODEL, Key, key_of
from ppbench.report.worst import Measured

ACCURACY, EPSILON = 0.01, 0.25
"""How much worse counts: of an accuracy or a Dice coefficient (of a mean squared error: of its size), of a claimed
epsilon."""
LUCK = 0.5
"""Luck of training of an accuracy, in tolerances; see `Rule.luck`."""
_NOWHERE = {
    "threat": "",
    "stage": "",
    "batch": 0,
    "probe": "",
    "probe_rounds": 0,
    "role": "",
    "attack": "",
    "follows": "",
}


def rows_of(joined: Joined) -> list[Row]:
    """Return every row of a comparison, not yet judged; what is not of an attack is a headline, but for CAPs.

    There is a CAP for each attack, so that they would outnumber all other headlines.
    """
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
    if reason := next((_reason(metric) for metric in theirs if metric is None or metric.value is None), None):
        return row_of(pair, rule, None, f"not in NEW: {reason}")
    deltas = [(a.privacy.delta, b.privacy.delta) for a, b in zip(pair.base, pair.new, strict=True)]
    if rule.form == "epsilon" and any(one != two for one, two in deltas):
        note = f"delta is {deltas[0][0]}, NEW has {deltas[0][1]}"
        return replace(row_of(pair, rule, None, note), status="incomparable")
    found = change(pair.base, pair.new, rule, f"{pair.where} {rule.metric}")
    luck = rule.luck if pair.where.stage in TRAINED else 0.0
    return row_of(pair, rule, with_luck(found, luck, len(pair.seeds)), "")


def _reason(metric: Metric | None) -> str:
    return "the record has no such metric" if metric is None else metric.reason or "null"


def _trainings(pairs: Sequence[Pair]) -> Iterator[Pair]:
    """Yield what was trained at each point: any of its cells tells its accuracy, and an audit's has its own."""
    points = defaultdict[tuple[Where, Key], dict[int, tuple[Measured, Measured]]](dict)
    for pair in pairs:
        config = pair.base[0].config
        stage = "audit" if config.audit is not None else ""
        where = replace(pair.where, **{**_NOWHERE, "stage": stage})  # type: ignore[arg-type]  # a literal table
        key = where, key_of(config).only(MODEL)
        for seed, one, two in zip(pair.seeds, pair.base, pair.new, strict=True):
            points[key].setdefault(seed, (one, two))
    for (where, _), seeds in points.items():
        order = tuple(sorted(seeds))
        yield Pair(where, order, tuple(seeds[s][0] for s in order), tuple(seeds[s][1] for s in order))


@dataclass(frozen=True)
class _Figure:
    """A figure of a model: how it is read out of a record, and whether a higher one is the better."""

    name: str
    read: Callable[[Utility], tuple[float | None, float | None, float | None]]
    safer: bool


_UTILITIES = (
    _Figure("accuracy", lambda u: (u.accuracy, u.low, u.high), True),
    _Figure("dice", lambda u: (u.dice, u.dice_low, u.dice_high), True),
    _Figure("mse", lambda u: (u.mse, u.mse_low, u.mse_high), False),
)


def _utilities(pair: Pair) -> Iterator[Row]:
    for figure in _UTILITIES:
        if figure.name == "mse" and pair.base[0].utility.accuracy is not None:
            continue  # of a classifier the accuracy is judged
        sides = [[_level(record.utility, figure) for record in side] for side in (pair.base, pair.new)]
        base, new = ([level for level in side if level is not None] for side in sides)
        if len(base) < len(pair.seeds):
            continue
        tolerance = ACCURACY * (float(np.mean([b.value for b in base])) if figure.name == "mse" else 1.0)
        rule = Rule(figure.name, figure.name, "all", "mean", tolerance, figure.safer, LUCK * tolerance)
        if len(new) < len(base):
            reason = next((r.utility.reason for r in pair.new if _level(r.utility, figure) is None), None)
            yield row_of(pair, rule, None, f"not in NEW: {reason}")
        elif all(a.utility == b.utility for a, b in zip(pair.base, pair.new, strict=True)):
            mean = float(np.mean([b.value for b in base]))
            yield row_of(pair, rule, same(mean, sum(b.n for b in base), "equal utility"), "")
        else:
            found = with_luck(unpaired(base, new, figure.safer), rule.luck, len(base))
            yield row_of(pair, rule, found, "")


def _level(utility: Utility, figure: _Figure) -> Level | None:
    value, low, high = figure.read(utility)
    return None if value is None or low is None or high is None else Level(value, low, high, utility.n)


def _epsilons(pair: Pair) -> Iterator[Row]:
    """Yield the change of the claimed epsilon, which is stated and not estimated; a guarantee that is gone is worse."""
    rule = Rule("epsilon", "epsilon_claimed", "all", "mean", EPSILON, False, 0.0)
    base, new = ([r.privacy.epsilon for r in side] for side in (pair.base, pair.new))
    ours, theirs = ([e for e in side if e is not None] for side in (base, new))
    if not ours:
        return
    deltas = [{r.privacy.delta for r in side} for side in (pair.base, pair.new)]
    if len(theirs) < len(ours):
        yield replace(
            row_of(pair, rule, None, f"no guarantee in NEW: {pair.new[0].privacy.reason}"), status="regression"
        )
    elif deltas[0] != deltas[1]:
        note = f"delta is {sorted(map(str, deltas[0]))}, NEW has {sorted(map(str, deltas[1]))}"
        yield replace(row_of(pair, rule, None, note), status="incomparable")
    else:
        one, two = float(np.mean(ours)), float(np.mean(theirs))
        worse = two - one
        yield row_of(pair, rule, Change(one, two, worse, worse, worse, 1.0, len(ours), "as stated", certain=True), "")
