"""What is said of a defense first: the worst case of each point, and which rows of single attacks stand for one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ppbench.questions.base import question_of
from ppbench.records.figure import leak
from ppbench.report.compare.join import Pair, Where
from ppbench.report.compare.samples import RULES, rules_for
from ppbench.report.frame import POINT, Key, key_of
from ppbench.report.worst import Measured, cell_of, worst_case

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
    """Yield the worst case of each point that several reconstruction attacks can be compared on.

    The same attacks on both sides: one that is only in NEW changes what is known of a defense, not the defense.
    """
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
            note = "; ".join(dict.fromkeys(pair.note for pair in some if pair.note))
            yield Pair(replace(where, attack=f"worst case of {len(some)} attacks"), seeds, base, new, note)


def headlines(pairs: Sequence[Pair]) -> list[frozenset[str]]:
    """Return the metrics of each pair that are headlines.

    A lone reconstruction attack is the worst case itself. Of other kinds no worst case over attacks is made: there the
    attack that leaks most in BASELINE stands for the point, by one metric. NEW has no say in it, or chance would have.
    """
    found = [frozenset[str]() for _ in pairs]
    for (_, _, _, kind), places in _points(pairs).items():
        if question_of(kind).inputs:
            if len(places) == 1:
                found[places[0]] = frozenset(rule.metric for rule in RULES)
            continue
        names = (*MAIN, *(rule.metric for rule in question_of(kind).rules))
        metric = next((name for name in names if any(_level(pairs[p].base, name) is not None for p in places)), None)
        if metric is not None:
            levels = [-np.inf if (level := _level(pairs[p].base, metric)) is None else level for p in places]
            found[places[int(np.argmax(levels))]] = frozenset([metric])
    return found


def _level(records: Sequence[Measured], name: str) -> float | None:
    """Return how much leaks by a judged metric, the mean over seeds; None where a seed lacks it."""
    if all(rule.metric != name for rule in rules_for(records[0])):
        return None
    metrics = [record.metric(name) for record in records]
    known = [leak(metric) for metric in metrics if metric is not None and metric.value is not None]
    return float(np.mean(known)) if len(known) == len(records) else None
