"""Rules for claims to be better than another defense, in one federation, on the same victims.

A CAP is large where the distances are large or where the model is good, so nothing follows from two CAPs: distances are
compared at equal accuracy.

Two worst cases over different numbers of searches differ even where both leak the same: one side keeps the best of
three answers on each victim, the other its only one. `search_adjusted` widens the interval accordingly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ppbench.federation.threats import CURIOUS_CLIENT, HONEST_SERVER
from ppbench.questions.base import Rule as Judged
from ppbench.questions.base import question_for, question_of
from ppbench.records.schema import Record
from ppbench.report.claims.attacks import NO_AWARE_ATTACK
from ppbench.report.claims.caps import cells_with_distance, paper_grid
from ppbench.report.claims.case import ClaimCase, ClaimFinding, ClaimVerdict, cell_names, unreliable
from ppbench.report.claims.use import best_of
from ppbench.report.compare.paired import Change, bootstrapped, change, model_figure, unpaired
from ppbench.report.compare.samples import sample_of
from ppbench.report.controls import value
from ppbench.report.frame import SETTING, frame_of
from ppbench.report.worst import Measured, WorstCase, attack_of, worst_of

ACROSS_ROLES = tuple(name for name in SETTING if name != "role")
"""Key of a setting over all roles of clients."""
EQUAL_ACCURACY = 0.01
"""By how much a rival may be less accurate and still count as equally accurate."""

JUDGED_CELLS = {
    "psnr_median": ("psnr_median", "reconstruction", HONEST_SERVER.name, "init"),
    "test_mse_mean": ("psnr_median", "reconstruction", HONEST_SERVER.name, "init"),
    "asr": ("asr", "membership", CURIOUS_CLIENT.name, "iterate"),
}
"""By claimed metric: the judged metric (errors by decibels), the kind of cells, the threat model, and the stage."""


@dataclass(frozen=True)
class ControlPoint:
    """A defense at one control value: its worst case over all attacks, and its model's accuracy."""

    control: float | None
    worst: WorstCase
    accuracy: float


def _points(cells: Sequence[Record], metric: str) -> Iterator[ControlPoint]:
    """Yield the points of a defense's cells of one kind whose training ended in a model."""
    for row in frame_of(cells).by(SETTING).values():
        worst, accuracy = row.worst(metric), row[0].utility.accuracy
        if worst is not None and accuracy is not None and value(worst, metric) is not None:
            control = row[0].config.defense.control
            yield ControlPoint(None if control is None else control.value, worst, accuracy)


def _pairs(
    mine: Sequence[ControlPoint], theirs: Sequence[ControlPoint], rule: Judged
) -> list[tuple[ControlPoint, ControlPoint]]:
    """Return each point with the rival's point that protects best among those at least as accurate."""
    pairs = []
    for point in mine:
        equal = [other for other in theirs if other.accuracy >= point.accuracy - EQUAL_ACCURACY]
        if equal:
            sign = 1 if rule.safer else -1
            pairs.append((point, max(equal, key=lambda p: sign * (value(p.worst, rule.metric) or 0.0))))
    return pairs


def stays_farther(case: ClaimCase) -> ClaimFinding | str:
    """That a CAP is larger than another defense's holds where, at equal accuracy, the worst case over all attacks stays
    farther from the truth, victim by victim, with its whole interval; it falls where it comes nearer. The other
    defense counts at the control value that protects best and costs no more accuracy (to a point). The interval allows
    for different numbers of searches: it reaches to the figures of either side's best attack alone.
    """
    kind, batch = case.claim.metric.removeprefix("cap_"), case.claim.batch
    question = question_of(kind)
    law = question.distances[0]
    mine, theirs = (cells_with_distance(cells, law.name, batch) for cells in (case.mine, case.rival))
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
        return ClaimFinding("inconclusive", "", reason)
    about = f"over {len(pairs)} of {len(ours)} values at which it is as accurate"
    if (less := max(mine.accuracy - other.accuracy for mine, other in pairs)) > 0:
        about += f", to {100 * less:.1g} points"
    return _judged(case, pairs, rule, about)


def _best(points: Sequence[ControlPoint]) -> str:
    return f"{max(point.accuracy for point in points):.1%}"


def _judged(
    case: ClaimCase, pairs: Sequence[tuple[ControlPoint, ControlPoint]], rule: Judged, about: str
) -> ClaimFinding:
    if bad := unreliable(case, HONEST_SERVER.name):
        return ClaimFinding("inconclusive", "", bad)
    form = replace(rule, form="mean") if len(pairs) > 1 else rule

    def judged(theirs: Sequence[WorstCase], mine: Sequence[WorstCase]) -> Change:
        samples = [sample_of(other, own, rule) for other, own in zip(theirs, mine, strict=True)]
        base, new = (np.mean([getattr(s, side) for s in samples], axis=0) for side in ("base", "new"))
        mean = replace(samples[0], base=base, new=new)
        return bootstrapped([mean], form, f"{case.claim.source} {case.claim.metric}")

    try:
        difference = search_adjusted(judged, [theirs.worst for _, theirs in pairs], [mine.worst for mine, _ in pairs])
    except ValueError:
        return ClaimFinding("inconclusive", "", "the two have different victims")
    cells = cell_names(*(mine.worst for mine, _ in pairs), *(theirs.worst for _, theirs in pairs))
    knows = any(mine.worst.knows for mine, _ in pairs) or any(r.config.attack.adaptive for r in case.mine)
    if not rule.safer:  # a share of right answers: reported as the distance, which is 1 minus it
        difference = replace(difference, base=1 - difference.base, new=1 - difference.new)
    return _difference_finding(difference, True, knows, about, _attack_names([mine.worst for mine, _ in pairs]), cells)


def search_adjusted(
    judged: Callable[[Sequence[WorstCase], Sequence[WorstCase]], Change],
    theirs: Sequence[WorstCase],
    mine: Sequence[WorstCase],
) -> Change:
    """Return how much more mine leak than theirs, with an interval that allows for different numbers of searches.

    The lower end is that of my best attack alone against all of theirs, the upper end that of all of mine against their
    best one alone, where these lie farther out. judged: compares two sides, may raise ValueError.
    """
    difference = judged(theirs, mine)
    low = judged(theirs, [_alone(case, other) for case, other in zip(mine, theirs, strict=True)]).low
    high = judged([_alone(case, other) for case, other in zip(theirs, mine, strict=True)], mine).high
    return replace(difference, low=min(difference.low, low), high=max(difference.high, high))


def _alone(case: WorstCase, other: WorstCase) -> WorstCase:
    """Return a case's leading cell alone on the victims of `other`; the whole case where that lacks some of them."""
    one = WorstCase(case.leading, tuple(case.leading.victims))
    return case if case.alone or not other.places <= one.places else _only(one, other.places)


def _difference_finding(
    difference: Change, safer: bool, knows: bool, about: str, attacks: str, cells: tuple[str, ...]
) -> ClaimFinding:
    """Return the finding of a difference, whose `worse` is positive where the defense leaks more than the other."""
    verdict: ClaimVerdict = "falls" if difference.low > 0 else "holds" if difference.high < 0 else "inconclusive"
    sign = -1.0 if safer else 1.0
    ends = sorted((sign * difference.low, sign * difference.high))
    what = "distance " if safer else ""
    figures = f"{what}{difference.new:.2f} beside {difference.base:.2f} ({attacks})"
    reason = f"difference {sign * difference.worse + 0.0:+.2f} [{ends[0] + 0.0:+.2f}, {ends[1] + 0.0:+.2f}], {about}"
    if verdict == "holds" and not knows:
        return ClaimFinding("inconclusive", "", f"{NO_AWARE_ATTACK}; {reason}", "", figures, cells, difference.worse)
    return ClaimFinding(
        verdict, f"to {figures}" if verdict == "falls" else "", reason, "", figures, cells, difference.worse
    )


def _attack_names(cases: Sequence[Measured]) -> str:
    return ", ".join(dict.fromkeys(attack_of(case) for case in cases))


def _name(case: ClaimCase) -> str:
    return "the other" if case.claim.than is None else case.claim.than.defense


def leaks_less(case: ClaimCase) -> ClaimFinding | str:
    """That less is rebuilt, or fewer members are identified, than under another defense holds where the worst case over
    all attacks lies below the other's, victim by victim, with its whole interval; it falls where it lies above. Both
    are attacked by the same adversary, the strongest of those that the claim names, on the victims that both share.
    Where clients play roles, each counts in the role that it played. The interval allows for different numbers of
    searches: it reaches to the figures of either side's best attack alone against all of the other's.
    """
    metric, kind, _, _ = JUDGED_CELLS[case.claim.metric]
    mine = _strongest(case.mine, case.claim.metric, case.claim.views)
    seen = (mine.config.threat_model.id,) if mine is not None and case.claim.views else ()
    theirs = _strongest(case.rival, case.claim.metric, seen)
    if mine is None or theirs is None:
        return f"no {kind} attack came to a figure on {'it' if mine is None else _name(case)}"
    if bad := unreliable(case, mine.config.threat_model.id):
        return ClaimFinding("inconclusive", "", bad)
    rule = next(rule for rule in question_for(mine).rules if rule.metric == metric and rule.subset != "canaries")
    about = f"victim by victim{', seen by ' + seen[0] if seen else ''}"
    if mine.places != theirs.places:  # probing takes whole cohorts until each role has enough
        mine, theirs = on_shared_victims(mine, theirs)
        about += f", on the {len(mine.victims)} that both share"

    def judged(theirs: Sequence[WorstCase], mine: Sequence[WorstCase]) -> Change:
        return change(theirs, mine, rule, f"{case.claim.source} {metric}")

    if not mine.victims:
        return ClaimFinding("inconclusive", "", "the two have different victims")
    difference = search_adjusted(judged, [theirs], [mine])
    knows = any(r.config.attack.adaptive for r in case.mine if r.config.attack.kind == kind)
    return _difference_finding(difference, rule.safer, knows, about, _attack_names([mine]), cell_names(mine, theirs))


def on_shared_victims(one: WorstCase, other: WorstCase) -> tuple[WorstCase, WorstCase]:
    """Return two worst cases of one task and seed on the victims that both share, which have the same place."""
    places = one.places & other.places
    return _only(one, places), _only(other, places)


def _only(case: WorstCase, places: frozenset[tuple[int, ...]]) -> WorstCase:
    kept = [i for i, victim in enumerate(case.victims) if victim.place in places]
    victims, winners = tuple(case.victims[i] for i in kept), tuple(case.winners[i] for i in kept if case.winners)
    return WorstCase(case.leading, victims, winners)


def _strongest(cells: Sequence[Record], claimed: str, views: Sequence[str] = ()) -> WorstCase | None:
    """Return the worst case behind a claimed metric: at the smallest batch, over all roles and the given views."""
    metric, kind, threat, stage = JUDGED_CELLS[claimed]
    some = [r for r in cells if r.config.attack.kind == kind and value(r, metric) is not None]
    some = [r for r in some if r.config.threat_model.id in (views or (threat,))] or some
    some = [r for r in some if r.config.stage == stage] or some
    smallest = min((r.config.batch_size for r in some), default=0)
    frame = frame_of([r for r in some if r.config.batch_size == smallest])
    return worst_of((row.worst(metric) for row in frame.by(ACROSS_ROLES).values()), metric)


def learns_more(case: ClaimCase) -> ClaimFinding | str:
    """That a model is better than under another defense holds where the interval of the difference, of independent
    samples, lies above 0, and falls where it lies below.
    """
    name = case.claim.metric
    mine, theirs = best_of(case.mine, name), best_of(case.rival, name)
    ours = None if mine is None else model_figure(mine.utility, name)
    other = None if theirs is None else model_figure(theirs.utility, name)
    if mine is None or theirs is None or ours is None or other is None:
        return f"{'it' if ours is None else _name(case)} has no {name} here"
    difference = unpaired([other], [ours], safer=name != "mse")
    verdict: ClaimVerdict = "falls" if difference.low > 0 else "holds" if difference.high < 0 else "inconclusive"
    form, scale = (".4f", 1.0) if name == "mse" else (".1%", 100.0)
    sign = 1.0 if name == "mse" else -1.0
    ends = sorted((sign * difference.low * scale, sign * difference.high * scale))
    figures = f"{ours.value:{form}} beside {other.value:{form}}"
    reason = f"difference {sign * difference.worse * scale:+.3g} [{ends[0]:+.3g}, {ends[1]:+.3g}]"
    to = f"to {figures}" if verdict == "falls" else ""
    return ClaimFinding(verdict, to, reason, "", figures, cell_names(mine, theirs), difference.worse)
