"""Whether a guess moves the worst case of a row: it must be better than the worst case so far and than blind guesses.

Victims are compared pairwise, by the rules of `ppbench compare`: the figure must gain, and more victims must leak more
than less, by an exact sign test, since no bootstrap of a few victims supports a p of a millionth. A blind attacker may
beat the blind guesses, so its answers must also tell victims apart (`ledger.dealt`). Many tries succeed by chance; so
the K-th submission to a transcript is judged at level LEDGER_ALPHA / (zeta(3/2) K^(3/2)): over all tries, however many,
a row moves without reason with probability LEDGER_ALPHA at most (a union bound, so tries may depend on one another).
The few victims of a row are therefore spent at some point, and this is reported: N units show no p below 2^-N.
Published scores would reveal the truth; so a submission that did not move the row gets only this answer (Blum and Hardt
2015, the Ladder): see `ScoredSubmission.receipt`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from ppbench.questions.base import Rule, question_for
from ppbench.records.schema import Record
from ppbench.report.compare.samples import resampled_statistic, rules_for, sample_of
from ppbench.report.worst import Measured

LEDGER_ALPHA = 0.05
"""Probability that a row ever moves without reason."""
POWER = 1.5
_WHOLE = float(stats.zipf(POWER).pmf(1)) ** -1  # zeta(3/2)
DECIDING = ("mean", "median", "decision")


@dataclass(frozen=True)
class Decision:
    """Whether the worst case moves. tries: including this one; level: of the test; p: the smallest of all rules, on its
    `metric`; before, after: that figure; reason: a clause."""

    moved: bool
    tries: int
    level: float
    p: float
    metric: str
    before: float | None
    after: float
    reason: str


def try_level(tries: int) -> float:
    """Return the level at which the `tries`-th submission to a transcript is judged; they sum to LEDGER_ALPHA."""
    return float(LEDGER_ALPHA / (_WHOLE * tries**POWER))


def floor_of(record: Record) -> float:
    """Return the smallest p that a record's victims can show, by exact one-sided sign tests over all rules."""
    rules = [rule for rule in rules_for(record) if rule.form in DECIDING]
    return len(rules) * 2.0 ** -len({score.unit for score in record.victims})


def decide(
    now: Measured | None, blind: Sequence[Record], new: Record, tries: int, dealt: Callable[[], float] | None = None
) -> Decision:
    """Return whether `new` moves a row.

    now: the worst case so far, None for none. blind: records of blind guesses on the same victims; () if the question
    knows the chance of a right answer instead. dealt: returns the p of answers that do not tell victims apart
    (`ledger.dealt`), called if all else would move the row; None: not tested.
    """
    rules = [rule for rule in rules_for(new) if rule.form in DECIDING]
    level = try_level(tries)
    best: Decision | None = None
    for rule in rules:
        against = [p_of(side, new, rule) for side in (now, *blind) if side is not None]
        p = max(against, default=0.0)  # better than all of them
        p = min(1.0, len(rules) * max(p, 0.0 if blind else _by_chance(new)))  # by any rule
        before, after = None if now is None else _figure(now, rule.metric), _figure(new, rule.metric)
        reason = _reason(p, level, floor_of(new), now is not None)
        one = Decision(p <= level, tries, level, p, rule.metric, before, after, reason)
        best = one if best is None or one.p < best.p else best
    if best is None:
        raise ValueError(f"question {question_for(new).name!r} has no rule that decides on single victims")
    if not best.moved or dealt is None or (p := dealt()) <= level:
        return best
    why = f"its answers fit other victims as well as their own (p = {p:.2g}, judged at {level:.2g})"
    return replace(best, moved=False, p=p, reason=why)


def p_of(side: Measured, new: Record, rule: Rule) -> float:
    """Return the p of no gain of `new` over `side`, by an exact sign test on units without ties; 1 without a gain of
    the figure. Victims count by `Question.judged`."""
    sample = sample_of(side, new, rule)
    once = np.ones((1, len(sample.stratum)))
    base, now = (float(resampled_statistic(sample, values, rule.form, once)[0]) for values in (sample.base, sample.new))
    old, own = (np.bincount(sample.unit, sample.weight * values) for values in (sample.base, sample.new))
    more, less = (int((one > two).sum()) for one, two in ((own, old), (old, own)))
    gains = less if rule.safer else more
    better = now < base if rule.safer else now > base
    return float(stats.binom.sf(gains - 1, more + less, 0.5)) if better else 1.0


def _by_chance(new: Record) -> float:
    """Return the p of so many right answers by chance, 1 if the chance is unknown."""
    counts = question_for(new).blind(new.victims, new.config)
    if counts is None:
        return 1.0
    share, units, chance = counts
    return float(stats.binom.sf(round(share * units) - 1, units, chance))


def _figure(side: Measured, metric: str) -> float:
    figure = side.metric(metric)
    return 0.0 if figure is None or figure.value is None else figure.value


def _reason(p: float, level: float, floor: float, stands: bool) -> str:
    if p <= level:
        return f"better, victim by victim (p = {p:.2g}, judged at {level:.2g})"
    if floor > level:
        return (
            f"so few victims show no p below {floor:.2g}, and after so many tries it would have to be {level:.2g}: "
            "this transcript is spent; publish others"
        )
    than = "than the worst case so far, or than a blind guess" if stands else "than a blind guess"
    return f"not better {than} beyond chance (p = {p:.2g}, judged at {level:.2g})"
