"""Rules for claims to be better than another defense, in one federation, on the same victims.

A CAP is large where the distances are or where the model is good, so that of two CAPs nothing follows: distances are
compared at equal accuracy.

Two worst cases over unlike many searches differ although the same can be seen: of each victim the best of three answers
is kept on one side, and the only one on the other. So nothing is said to leak less than what the other's best attack
alone found, nor to leak more by more than its own best attack alone found (`searched_alike`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ppbench.questions.base import Rule as Judged
from ppbench.questions.base import question_for, question_of
from ppbench.records.schema import Record
from ppbench.report.claims.attacks import UNKNOWN
from ppbench.report.claims.caps import asked, paper_grid
from ppbench.report.claims.case import Case, Finding, Verdict, cells_of, unreliable
from ppbench.report.claims.use import best_of
from ppbench.report.compare.paired import Change, bootstrapped, change, level_of, unpaired
from ppbench.report.compare.samples import sample_of
from ppbench.report.controls import value
from ppbench.report.frame import SETTING, frame_of
from ppbench.report.worst import Measured, WorstCase, attack_of, worst_of

TOGETHER = tuple(name for name in SETTING if name != "role")
"""What the cells of one setting share, whatever role clients played."""
ALIKE = 0.01
"""Shares of right answers that a rival may lack and still be as accurate."""

OF = {
    "psnr_median": ("psnr_median", "reconstruction", "server/1", "init"),
    "test_mse_mean": ("psnr_median", "reconstruction", "server/1", "init"),
    "asr": ("asr", "membership", "client/1", "iterate"),
}
"""What is judged of a claimed figure (errors by their decibels), of which kind of cells, whose view of which model."""


@dataclass(frozen=True)
class Point:
    """A defense at one control value: what is left to who tries all attacks, and how good the model is."""

    control: float | None
    worst: WorstCase
    accuracy: float


def _points(cells: Sequence[Record], metric: str) -> Iterator[Point]:
    """Yield the points of a defense's cells of one kind, of trainings that ended in a model."""
    for row in frame_of(cells).by(SETTING).values():
        worst, accuracy = row.worst(metric), row[0].utility.accuracy
        if worst is not None and accuracy is not None and value(worst, metric) is not None:
            control = row[0].config.defense.control
            yield Point(None if control is None else control.value, worst, accuracy)


def _pairs(mine: Sequence[Point], theirs: Sequence[Point], rule: Judged) -> list[tuple[Point, Point]]:
    """Return each point with the rival's that protects best among those of the same accuracy or a better one."""
    pairs = []
    for point in mine:
        equal = [other for other in theirs if other.accuracy >= point.accuracy - ALIKE]
        if equal:
            sign = 1 if rule.safer else -1
            pairs.append((point, max(equal, key=lambda p: sign * (value(p.worst, rule.metric) or 0.0))))
    return pairs


def stays_farther(case: Case) -> Finding | str:
    """That a CAP is larger than another defense's holds where, at equal accuracy, the worst case over all attacks stays
    farther from the truth, victim by victim, with its whole interval; it falls where it comes nearer. The other
    defense counts at the control value that protects best and costs no more accuracy (to a point). The interval is as
    wide as the number of searches could have made it: it reaches to what either side's best attack alone found.
    """
    kind, batch = case.claim.metric.removeprefix("cap_"), case.claim.batch
    question = question_of(kind)
    law = question.distances[0]
    mine, theirs = (asked(cells, law.name, batch) for cells in (case.mine, case.rival))
    if not mine or not theirs:
        who = "it" if not mine else _name(case)
        return f"no {kind} attack was run on {who} at batch {batch} from the server's view of random weights"
    rule = next(rule for rule in question.rules if rule.metric == law.metric)
    ours = list(_points(paper_grid(mine, case.claim), law.metric))
    others = list(_points(paper_grid(theirs, case.claim, own=False), law.metric))
    pairs = _pairs(ours, others, rule)
    if not ours or not others:
        return "no value of the paper's grids was run of both"
    if not pairs:
        reason = f"{_name(case)} is as accurate at none of its values: {_best(others)} beside {_best(ours)} at most"
        return Finding("cannot be told", "", reason)
    about = f"over {len(pairs)} of {len(ours)} values at which it is as accurate"
    if (less := max(mine.accuracy - other.accuracy for mine, other in pairs)) > 0:
        about += f", to {100 * less:.1g} points"
    return _judged(case, pairs, rule, about)


def _best(points: Sequence[Point]) -> str:
    return f"{max(point.accuracy for point in points):.1%}"


def _judged(case: Case, pairs: Sequence[tuple[Point, Point]], rule: Judged, about: str) -> Finding:
    if bad := unreliable(case, "server/1"):
        return Finding("cannot be told", "", bad)
    form = replace(rule, form="mean") if len(pairs) > 1 else rule

    def judged(theirs: Sequence[WorstCase], mine: Sequence[WorstCase]) -> Change:
        samples = [sample_of(other, own, rule) for other, own in zip(theirs, mine, strict=True)]
        base, new = (np.mean([getattr(s, side) for s in samples], axis=0) for side in ("base", "new"))
        mean = replace(samples[0], base=base, new=new)
        return bootstrapped([mean], form, f"{case.claim.source} {case.claim.metric}")

    try:
        difference = searched_alike(judged, [theirs.worst for _, theirs in pairs], [mine.worst for mine, _ in pairs])
    except ValueError:
        return Finding("cannot be told", "", "the two were asked about other victims")
    cells = cells_of(*(mine.worst for mine, _ in pairs), *(theirs.worst for _, theirs in pairs))
    knows = any(mine.worst.knows for mine, _ in pairs) or any(r.config.attack.adaptive for r in case.mine)
    if not rule.safer:  # a share of right answers: told as the distance, which is the rest
        difference = replace(difference, base=1 - difference.base, new=1 - difference.new)
    return _difference_finding(difference, True, knows, about, _attack_names([mine.worst for mine, _ in pairs]), cells)


def searched_alike(
    judged: Callable[[Sequence[WorstCase], Sequence[WorstCase]], Change],
    theirs: Sequence[WorstCase],
    mine: Sequence[WorstCase],
) -> Change:
    """Return how much more mine leak than theirs, its interval as wide as the number of searches could have made it.

    The lower end is that of my best attack alone beside all of theirs, the upper end that of mine beside their best one
    alone, where these lie farther out. `judged` compares; ValueError as it raises.
    """
    difference = judged(theirs, mine)
    low = judged(theirs, [_alone(case, other) for case, other in zip(mine, theirs, strict=True)]).low
    high = judged([_alone(case, other) for case, other in zip(theirs, mine, strict=True)], mine).high
    return replace(difference, low=min(difference.low, low), high=max(difference.high, high))


def _alone(case: WorstCase, other: WorstCase) -> WorstCase:
    """Return what a case's leading cell found on the victims of `other`; all found where it lacks some."""
    one = WorstCase(case.leading, tuple(case.leading.victims))
    return case if case.alone or not other.places <= one.places else _only(one, other.places)


def _difference_finding(
    difference: Change, safer: bool, knows: bool, about: str, attacks: str, cells: tuple[str, ...]
) -> Finding:
    """Return the verdict of a difference: `worse` is positive where the defense leaks more than the other."""
    verdict: Verdict = "falls" if difference.low > 0 else "holds" if difference.high < 0 else "cannot be told"
    sign = -1.0 if safer else 1.0
    ends = sorted((sign * difference.low, sign * difference.high))
    what = "distance " if safer else ""
    figures = f"{what}{difference.new:.2f} beside {difference.base:.2f} ({attacks})"
    reason = f"difference {sign * difference.worse + 0.0:+.2f} [{ends[0] + 0.0:+.2f}, {ends[1] + 0.0:+.2f}], {about}"
    if verdict == "holds" and not knows:
        return Finding("cannot be told", "", f"{UNKNOWN}; {reason}", "", figures, cells, difference.worse)
    return Finding(verdict, f"to {figures}" if verdict == "falls" else "", reason, "", figures, cells, difference.worse)


def _attack_names(cases: Sequence[Measured]) -> str:
    return ", ".join(dict.fromkeys(attack_of(case) for case in cases))


def _name(case: Case) -> str:
    return "the other" if case.claim.than is None else case.claim.than.defense


def leaks_less(case: Case) -> Finding | str:
    """That less is rebuilt, or fewer members are told, than under another defense holds where the worst case over all
    attacks lies below the other's, victim by victim, with its whole interval; it falls where it lies above. Both are
    seen by the same, of those whom the claim speaks of by who sees most, on the victims whom both were asked about.
    Where clients play roles, each counts in the role that it played. The interval is as wide as the number of searches
    could have made it: it reaches to what either side's best attack alone found beside all of the other's.
    """
    metric, kind, _, _ = OF[case.claim.metric]
    mine = _strongest(case.mine, case.claim.metric, case.claim.views)
    seen = (mine.config.threat_model.id,) if mine is not None and case.claim.views else ()
    theirs = _strongest(case.rival, case.claim.metric, seen)
    if mine is None or theirs is None:
        return f"no {kind} attack came to a figure on {'it' if mine is None else _name(case)}"
    if bad := unreliable(case, mine.config.threat_model.id):
        return Finding("cannot be told", "", bad)
    rule = next(rule for rule in question_for(mine).rules if rule.metric == metric and rule.subset != "canaries")
    about = f"victim by victim{', seen by ' + seen[0] if seen else ''}"
    if mine.places != theirs.places:  # whole cohorts are probed, until each role has enough
        mine, theirs = shared(mine, theirs)
        about += f", on the {len(mine.victims)} whom both were asked about"

    def judged(theirs: Sequence[WorstCase], mine: Sequence[WorstCase]) -> Change:
        return change(theirs, mine, rule, f"{case.claim.source} {metric}")

    if not mine.victims:
        return Finding("cannot be told", "", "the two were asked about other victims")
    difference = searched_alike(judged, [theirs], [mine])
    knows = any(r.config.attack.adaptive for r in case.mine if r.config.attack.kind == kind)
    return _difference_finding(difference, rule.safer, knows, about, _attack_names([mine]), cells_of(mine, theirs))


def shared(one: WorstCase, other: WorstCase) -> tuple[WorstCase, WorstCase]:
    """Return two worst cases on the victims that both have: of one task and seed those at one place are the same."""
    places = one.places & other.places
    return _only(one, places), _only(other, places)


def _only(case: WorstCase, places: frozenset[tuple[int, ...]]) -> WorstCase:
    kept = [i for i, victim in enumerate(case.victims) if victim.place in places]
    victims, winners = tuple(case.victims[i] for i in kept), tuple(case.winners[i] for i in kept if case.winners)
    return WorstCase(case.leading, victims, winners)


def _strongest(cells: Sequence[Record], claimed: str, views: Sequence[str] = ()) -> WorstCase | None:
    """Return the worst case of a kind, at the smallest batch, of all roles together, and over some views."""
    metric, kind, threat, stage = OF[claimed]
    some = [r for r in cells if r.config.attack.kind == kind and value(r, metric) is not None]
    some = [r for r in some if r.config.threat_model.id in (views or (threat,))] or some
    some = [r for r in some if r.config.stage == stage] or some
    smallest = min((r.config.batch_size for r in some), default=0)
    frame = frame_of([r for r in some if r.config.batch_size == smallest])
    return worst_of((row.worst(metric) for row in frame.by(TOGETHER).values()), metric)


def learns_more(case: Case) -> Finding | str:
    """That a model is better than under another defense holds where the interval of the difference, of independent
    samples, lies above 0, and falls where it lies below.
    """
    name = case.claim.metric
    mine, theirs = best_of(case.mine, name), best_of(case.rival, name)
    ours = None if mine is None else level_of(mine.utility, name)
    other = None if theirs is None else level_of(theirs.utility, name)
    if mine is None or theirs is None or ours is None or other is None:
        return f"{'it' if ours is None else _name(case)} has no {name} here"
    difference = unpaired([other], [ours], safer=name != "mse")
    verdict: Verdict = "falls" if difference.low > 0 else "holds" if difference.high < 0 else "cannot be told"
    form, scale = (".4f", 1.0) if name == "mse" else (".1%", 100.0)
    sign = 1.0 if name == "mse" else -1.0
    ends = sorted((sign * difference.low * scale, sign * difference.high * scale))
    figures = f"{ours.value:{form}} beside {other.value:{form}}"
    reason = f"difference {sign * difference.worse * scale:+.3g} [{ends[0]:+.3g}, {ends[1]:+.3g}]"
    to = f"to {figures}" if verdict == "falls" else ""
    return Finding(verdict, to, reason, "", figures, cells_of(mine, theirs), difference.worse)
