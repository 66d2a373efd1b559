"""Whether a guess moves the worst case of a row: better than what stands, and than a blind guess, beyond its interval.

Each victim is compared with itself, by the rules of `ppbench compare`: the figure must gain, and more victims leak more
than less, by an exact test of signs, since no bootstrap of a few victims can vouch for a p of a millionth. Who beats
the blind guesses need not have seen anything: his answers must tell victims apart, too (`ledger.dealt`). Who may try
often is right by chance at last; so the K-th submission to a transcript is judged at level ALPHA / (zeta(3/2) K^(3/2)):
over all tries, however many there will be, a row moves without reason with probability ALPHA at most (a sum, so that
tries may depend on one another). What can be concluded from a row's few victims therefore runs out, and then is said to
have: N units tell no p below 2^-N. Scores that are told become a way to the truth; so of what did not move, a submitter
hears that alone (Blum and Hardt 2015, the Ladder): see `Score.receipt`.
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

ALPHA = 0.05
"""Probability that a row ever moves without reason."""
POWER = 1.5
_WHOLE = float(stats.zipf(POWER).pmf(1)) ** -1  # zeta(3/2)
DECIDING = ("mean", "median", "decision")


@dataclass(frozen=True)
class Decision:
    """Whether the worst case moves. tries: this one counted; level: at which it was judged; p: of the rule that shows
    most, by its `metric`; before, after: that figure; reason: in a clause."""

    moved: bool
    tries: int
    level: float
    p: float
    metric: str
    before: float | None
    after: float
    reason: str


def level_of(tries: int) -> float:
    """Return the level at which the `tries`-th submission to a transcript is judged; they sum to ALPHA."""
    return float(ALPHA / (_WHOLE * tries**POWER))


def floor_of(record: Record) -> float:
    """Return the least p that so many victims can show: by an exact one-sided test of signs, for each rule."""
    rules = [rule for rule in rules_for(record) if rule.form in DECIDING]
    return len(rules) * 2.0 ** -len({score.unit for score in record.victims})


def decide(
    now: Measured | None, blind: Sequence[Record], new: Record, tries: int, dealt: Callable[[], float] | None = None
) -> Decision:
    """Return whether `new` moves a row.

    now: the worst case that stands, None for none. blind: what guesses that see nothing score on the same victims; ()
    where the question knows the chance of a right answer instead. dealt: the p of answers that do not tell victims
    apart (`ledger.dealt`), asked where all else would move the row; None: it is not asked.
    """
    rules = [rule for rule in rules_for(new) if rule.form in DECIDING]
    level = level_of(tries)
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
    """Return the p of no gain of `new` over `side`: by an exact test of signs on units, of which equal ones do not
    count; 1 where the figure does not gain. Victims count as `Question.judged` has them: what is exact is exact."""
    sample = sample_of(side, new, rule)
    once = np.ones((1, len(sample.stratum)))
    base, now = (float(resampled_statistic(sample, values, rule.form, once)[0]) for values in (sample.base, sample.new))
    old, own = (np.bincount(sample.unit, sample.weight * values) for values in (sample.base, sample.new))
    more, less = (int((one > two).sum()) for one, two in ((own, old), (old, own)))
    gains = less if rule.safer else more
    better = now < base if rule.safer else now > base
    return float(stats.binom.sf(gains - 1, more + less, 0.5)) if better else 1.0


def _by_chance(new: Record) -> float:
    """Return the p of so many right answers by chance, 1 where chance is not known."""
    told = question_for(new).blind(new.victims, new.config)
    if told is None:
        return 1.0
    share, units, chance = told
    return float(stats.binom.sf(round(share * units) - 1, units, chance))


def _figure(side: Measured, metric: str) -> float:
    found = side.metric(metric)
    return 0.0 if found is None or found.value is None else found.value


def _reason(p: float, level: float, floor: float, stands: bool) -> str:
    if p <= level:
        return f"better, victim by victim (p = {p:.2g}, judged at {level:.2g})"
    if floor > level:
        return (
            f"so few victims tell no p below {floor:.2g}, and after so many tries it would have to be {level:.2g}: "
            "this transcript is spent; publish others"
        )
    than = "than the worst case that stands, or than a blind guess" if stands else "than a blind guess"
    return f"not better {than} beyond chance (p = {p:.2g}, judged at {level:.2g})"
