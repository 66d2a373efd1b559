"""The change of a CAP: of the mean over control values of accuracy times distance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ppbench.questions.base import DistanceLaw, Rule, question_for
from ppbench.records.schema import Utility
from ppbench.report.compare.join import Facts, Joined, Pair, Where, facts_of, notes
from ppbench.report.compare.judge import Row, row_of
from ppbench.report.compare.paired import REPLICATES, generator_of, over_seeds, replicated, resampled, same, with_luck
from ppbench.report.compare.samples import TRAINED, Floats, sample_of

CAP = 0.01  # how much lower a CAP must be to count
LUCK, UNTRAINED_LUCK = 0.05, 0.005  # of training (`Rule.luck`), over attacks on trained models and on fresh ones
_Z = 3.92  # width of a 95 % interval over its standard error


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
    """Yield the change of one series' CAP.

    Victims are the same at all control values and are drawn alike; accuracies are drawn by the normal law of their own
    intervals, all of one side together, because the test images are the same.
    """
    question = question_for(shown.base[0])
    law = question.distance()
    if law is None:
        return
    metric = law.metric
    rule = next(r for r in question.rules if r.metric == metric)
    cells = [(a, b) for pair in some for a, b in zip(pair.base, pair.new, strict=True)]
    if any(r.utility.accuracy is None or (m := r.metric(metric)) is None or m.value is None for c in cells for r in c):
        return
    row = Rule("cap", "cap", "all", "mean", CAP, True, LUCK if shown.where.stage in TRAINED else UNTRAINED_LUCK)
    n = sum(len(r.victims) for r, _ in cells)
    worse, base, new = _cap_resamples(some, rule, law, f"{shown.where} cap")
    if all(a.victims == b.victims and a.utility == b.utility for a, b in cells):
        yield row_of(shown, row, same(base, n), "")
        return
    units = sum(len(sample_of(a, b, rule).stratum) for a, b in zip(some[0].base, some[0].new, strict=True))
    found = resampled(base, new, worse, units, n, f"paired bootstrap over victims, {REPLICATES}")
    yield row_of(shown, row, with_luck(found, row.luck, len(shown.seeds)), "")


def _cap_resamples(some: Sequence[Pair], rule: Rule, law: DistanceLaw, key: str) -> tuple[Floats, float, float]:
    """Return the worsening of a CAP in all resamples, and the CAP of both sides."""
    each: list[Floats] = []
    levels: list[tuple[float, float]] = []
    for place in range(len(some[0].seeds)):
        luck = generator_of(f"{key} accuracy {place}").standard_normal((2, REPLICATES))
        caps = []
        for pair in some:
            one, two = pair.base[place], pair.new[place]
            distances = replicated(sample_of(one, two, rule), rule, generator_of(f"{key} {place}"))
            equal = one.utility == two.utility
            accuracies = [_accuracies(r.utility, luck[0 if equal else side]) for side, r in enumerate((one, two))]
            caps.append([a * law.of(d) for a, d in zip(accuracies, distances, strict=True)])
        base, new = (np.mean([cap[side] for cap in caps], axis=0) for side in (0, 1))
        each.append(base - new)
        levels.append((float(base[0]), float(new[0])))
    base_level, new_level = (float(np.mean([level[side] for level in levels])) for side in (0, 1))
    return over_seeds(each, generator_of(f"{key} seeds")), base_level, new_level


def _accuracies(utility: Utility, luck: Floats) -> Floats:
    value, low, high = utility.accuracy or 0.0, utility.low or 0.0, utility.high or 0.0
    return np.concatenate([[value], np.clip(value + luck * (high - low) / _Z, 0.0, 1.0)])
