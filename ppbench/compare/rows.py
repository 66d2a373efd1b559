"""The rows of a comparison: attacks, the worst case over them, accuracy, claimed epsilon, CAP."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ppbench.compare.caps import cap_rows
from ppbench.compare.join import Facts, Joined, Pair, Where, facts_of
from ppbench.compare.judge import Row, row_of
from ppbench.compare.paired import Change, Level, change, same, unpaired, with_luck
from ppbench.compare.samples import TRAINED, Rule, rules_for
from ppbench.portfolio import worst_case
from ppbench.records.schema import Metric, Record, Utility

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
    """Return every row of a comparison, not yet judged."""
    rows = [row for pair in joined.pairs for row in _cells(pair)]
    rows += [row for pair in _worst_cases(joined.pairs) for row in _cells(pair)]
    for trained in _trainings(joined.pairs):
        rows += [*_utilities(trained), *_epsilons(trained)]
    rows += cap_rows(joined)
    rows += [Row(left.where, "", "", left.status, None, 0.0, left.reason, left.record) for left in joined.left]
    return sorted(rows, key=lambda row: (*row.where.order(), row.subset, row.metric))


def _cells(pair: Pair) -> Iterator[Row]:
    """Yield a row for each judged metric that BASELINE has in every seed."""
    for rule in rules_for(pair.base[0]):
        ours, theirs = ([r.metric(rule.metric) for r in side] for side in (pair.base, pair.new))
        if any(metric is None or metric.value is None for metric in ours):
            continue
        if reason := next((_reason(metric) for metric in theirs if metric is None or metric.value is None), None):
            yield row_of(pair, rule, None, f"not in NEW: {reason}")
        elif rule.form == "epsilon" and any(
            a.privacy.delta != b.privacy.delta for a, b in zip(pair.base, pair.new, strict=True)
        ):
            note = f"delta is {pair.base[0].privacy.delta}, NEW has {pair.new[0].privacy.delta}"
            yield replace(row_of(pair, rule, None, note), status="incomparable")
        else:
            found = change(pair.base, pair.new, rule, f"{pair.where} {rule.metric}")
            luck = rule.luck if pair.where.stage in TRAINED else 0.0
            yield row_of(pair, rule, with_luck(found, luck, len(pair.seeds)), "")


def _reason(metric: Metric | None) -> str:
    return "the record has no such metric" if metric is None else metric.reason or "null"


def _worst_cases(pairs: Sequence[Pair]) -> Iterator[Pair]:
    """Yield the worst case of each point that several reconstruction attacks can be compared on.

    The same attacks on both sides: one that is only in NEW changes what is known of a defense, not the defense.
    """
    points = defaultdict[tuple[Where, Facts, tuple[int, ...]], list[Pair]](list)
    for pair in pairs:
        if pair.base[0].config.attack.kind == "reconstruction":
            facts = [f for f in facts_of(pair.base[0].config) if not f[0].startswith(("attack.", "threat_model."))]
            facts = [f for f in facts if f[0] not in ("tuning", "victims")]
            points[replace(pair.where, attack="", follows=""), tuple(facts), pair.seeds].append(pair)
    for (where, _, seeds), some in points.items():
        if len(some) > 1:
            sides = [
                [worst_case([side[place] for side in part]) for place in range(len(seeds))]
                for part in ([p.base for p in some], [p.new for p in some])
            ]
            base, new = (tuple(r for r in side if r is not None) for side in sides)
            if len(base) == len(new) == len(seeds):
                yield Pair(replace(where, attack=f"worst case of {len(some)} attacks"), seeds, base, new)


def _trainings(pairs: Sequence[Pair]) -> Iterator[Pair]:
    """Yield what was trained at each point: any of its cells tells its accuracy, and an audit's has its own."""
    points = defaultdict[tuple[Where, str], dict[int, tuple[Record, Record]]](dict)
    for pair in pairs:
        config = pair.base[0].config
        stage = "audit" if config.audit is not None else ""
        where = replace(pair.where, **{**_NOWHERE, "stage": stage})  # type: ignore[arg-type]  # a literal table
        parts = (config.federation, config.data, config.model, config.audit)
        key = where, json.dumps([None if part is None else part.model_dump(mode="json") for part in parts])
        for seed, one, two in zip(pair.seeds, pair.base, pair.new, strict=True):
            points[key].setdefault(seed, (one, two))
    for (where, _), seeds in points.items():
        order = tuple(sorted(seeds))
        yield Pair(where, order, *(tuple(seeds[s][side] for s in order) for side in (0, 1)))


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
        rule = Rule(figure.name, figure.name, "all", "mean", tolerance, figure.safer, (), LUCK * tolerance)
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
    rule = Rule("epsilon", "epsilon_claimed", "all", "mean", EPSILON, False, (), 0.0)
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
