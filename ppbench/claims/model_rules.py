"""Rules for claims about defended models: what they are good for, and whether they beat another defense."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ppbench.claims.attack_rules import NO_AWARE_ATTACK, cells_with_distance, grid_of, lowest_cap, paper_grid
from ppbench.claims.case import ClaimCase, ClaimFinding, ClaimVerdict, finding_of, unreliable
from ppbench.federation.threats import CURIOUS_CLIENT, HONEST_SERVER
from ppbench.metrics.spec import SHARE
from ppbench.metrics.spec import Rule as Judged
from ppbench.questions.base import question_for, question_of
from ppbench.records.schema import MODEL_METRICS, Record, Utility
from ppbench.report.compare.paired import Change, bootstrapped, change, model_figure, sample_of, unpaired
from ppbench.report.controls import value
from ppbench.report.frame import SETTING, frame_of
from ppbench.report.learning import learning_of
from ppbench.report.words import listed_values
from ppbench.report.worst import Measured, WorstCase, attack_of, worst_of

# -- Rules for claims about a defended model's utility, against the undefended model of the same federation --

ACCURACY_MARGIN = 0.02
"""By how much the loss of accuracy (or Dice) may exceed the paper's and count as the same."""
ERROR_MARGIN = 0.05
"""By how much the ratio of errors may exceed the paper's and count as the same."""
SAME_ACCURACY, SAME_ERROR, FEWEST_ROUNDS = 1e-3, 1e-4, 2
"""How far two curves may lie apart (accuracies absolute, squared errors relative), and how many evaluated rounds they
need, for two trainings to count as equal to rounding. Errors of trainings that stand still lie within a percent anyway.
"""
DIVERGED = "no model: training diverged"


def _text(utility: Utility, name: str, form: str) -> str:
    """Return a figure with its interval, as "95.0% [93.5, 96.2]"."""
    value, low, high = ("n/a" if end is None else f"{end:{form}}" for end in utility.figure(name))
    return f"{value} [{low}, {high}]".replace("%,", ",")


def accuracy_is_kept(case: ClaimCase) -> ClaimFinding | str:
    """A claimed accuracy holds if the interval of the loss against the undefended model ends less than 2 points above
    the paper's loss. It falls if the interval begins above that, and is inconclusive otherwise. If the paper prints no
    undefended model, the accuracy itself is compared. Trainings that are equal up to rounding are reported as an
    identity.
    """
    return _is_kept(case, "accuracy", "accuracy")


def top5_is_kept(case: ClaimCase) -> ClaimFinding | str:
    """A claimed Top-5 accuracy is judged as an accuracy is."""
    return _is_kept(case, "accuracy_top5", "Top-5 accuracy")


def dice_is_kept(case: ClaimCase) -> ClaimFinding | str:
    """A claimed Dice coefficient is judged as an accuracy is."""
    return _is_kept(case, "dice", "Dice coefficient")


def _is_kept(case: ClaimCase, name: str, words: str) -> ClaimFinding | str:
    paper, none = case.claim, case.undefended
    mine = min(case.mine, key=lambda r: (r.utility.figure(name)[0] or 0.0, r.cell_id))
    if paper.value is None:
        return f"the paper prints no {words}"
    theirs = None if none is None else model_figure(none.utility, name)
    if none is None or theirs is None:
        return f"the undefended model has no {words} to compare with"
    ours, may = model_figure(mine.utility, name), None if paper.undefended is None else paper.undefended - paper.value
    shown, beside = _text(mine.utility, name, ".1%"), f"undefended {_text(none.utility, name, '.1%')}"
    harm = math.inf if ours is None else -ours.value
    if learning_of(none.utility).state == "nothing":
        reason = f"the undefended model has learned nothing; {beside}"
        return finding_of("inconclusive", "", harm, reason, shown, mine, none)
    if ours is None and mine.utility.accuracy is not None:
        return f"no {words} of the defended model was kept"
    if ours is None:
        return finding_of("falls", DIVERGED, harm, beside, DIVERGED, mine, none)
    if _one_training(mine.utility, none.utility, SAME_ACCURACY, relative=False):
        return finding_of("identity", "", harm, f"{SAME_TRAINING}; {beside}", shown, mine, none)
    if may is None:
        reason = f"the paper reaches {paper.value:.1%}; {beside}"
        verdict = _verdict(-ours.high, -ours.low, -paper.value, ACCURACY_MARGIN)
        return finding_of(verdict, f"{ours.value:.1%}", harm, reason, shown, mine, none)
    lost = unpaired([theirs], [ours], safer=True)
    ends = f"[{100 * lost.low:.1f}, {100 * lost.high:.1f}]"
    reason = f"{100 * lost.worse + 0.0:.1f} points {ends} are lost where the paper loses {100 * may:.2f}; {beside}"
    verdict = _verdict(lost.low, lost.high, may, ACCURACY_MARGIN)
    return finding_of(verdict, f"{ours.value:.1%}", lost.worse, reason, shown, mine, none)


SAME_TRAINING = "the training equals the undefended one in every round, as by an identity, which training does not test"


def _verdict(low: float, high: float, may: float, margin: float) -> ClaimVerdict:
    """Return the outcome of two one-sided tests: no more than `margin` beyond `may`, or more than `may`."""
    return "holds" if high < may + margin else "falls" if low > may else "inconclusive"


def _one_training(mine: Utility, none: Utility, apart: float, *, relative: bool) -> bool:
    """Return whether two trainings have the same figures in every evaluated round, to rounding."""
    if mine is none or [at for at, _ in mine.curve] != [at for at, _ in none.curve] or len(none.curve) < FEWEST_ROUNDS:
        return False
    pairs = [(ours, theirs) for (_, ours), (_, theirs) in zip(mine.curve, none.curve, strict=True)]
    return all(abs(ours - theirs) <= apart * (theirs if relative else 1.0) for ours, theirs in pairs)


def accuracy_is_gained(case: ClaimCase) -> ClaimFinding | str:
    """A claimed gain of accuracy over the undefended model holds if the interval of ours lies above 0 and reaches it;
    it falls if the interval lies below it.
    """
    mine, none = best_of(case.mine, "accuracy"), case.undefended
    ours = None if mine is None else model_figure(mine.utility, "accuracy")
    theirs = None if none is None else model_figure(none.utility, "accuracy")
    if mine is None or none is None or ours is None or theirs is None:
        return "there are no two accuracies to compare"
    gain, claimed = unpaired([theirs], [ours], safer=True), case.claim.value or 0.0
    low, high = -gain.high, -gain.low
    verdict: ClaimVerdict = "falls" if high < claimed else "holds" if low > 0 else "inconclusive"
    figures = f"{_text(mine.utility, 'accuracy', '.1%')}; undefended {_text(none.utility, 'accuracy', '.1%')}"
    reason = f"{-100 * gain.worse + 0.0:.1f} points [{100 * low:.1f}, {100 * high:.1f}] more than undefended"
    return finding_of(verdict, f"{ours.value:.1%}", gain.worse, reason, figures, mine, none)


def accuracy_rises(case: ClaimCase) -> ClaimFinding | str:
    """The claim that accuracy rises with the control parameter holds if the interval at its largest value lies above
    that at its smallest; it falls if it lies below.
    """
    by = {r.config.defense.control.value: r for r in case.mine if r.config.defense.control is not None}
    if len(by) < 2:
        return "fewer than two values of the control parameter were run"
    first, last = by[min(by)].utility, by[max(by)].utility
    figures = f"{_text(first, 'accuracy', '.1%')} at {min(by):g}, {_text(last, 'accuracy', '.1%')} at {max(by):g}"
    reason = f"from {min(by):g} to {max(by):g}"
    verdict: ClaimVerdict = "inconclusive"
    if None in (first.low, first.high, last.low, last.high):
        reason += ", where training diverged"
    elif (last.low or 0.0) > (first.high or 0.0):
        verdict = "holds"
    elif (last.high or 0.0) < (first.low or 0.0):
        verdict = "falls"
    else:
        reason += ", the intervals overlap"
    rise = (last.accuracy or 0.0) - (first.accuracy or 0.0)
    return finding_of(verdict, "", -rise, reason, figures, by[min(by)], by[max(by)])


def error_is_kept(case: ClaimCase) -> ClaimFinding | str:
    """A claimed MSE holds if the interval of its ratio to the undefended one ends less than 0.05 above the paper's
    ratio. It falls if the interval begins above that, and is inconclusive otherwise. Trainings that are equal up to
    rounding are reported as an identity.
    """

    def error(record: Record) -> tuple[float, str]:
        return float("inf") if record.utility.mse is None else record.utility.mse, record.cell_id

    paper, mine, none = case.claim, max(case.mine, key=error), case.undefended
    if none is None or not none.utility.mse or none.utility.mse_low is None or paper.value is None:
        return "the undefended model has no squared error to compare with"
    if not paper.undefended:
        return "the paper prints no undefended error"
    shown, beside = _text(mine.utility, "mse", ".4f"), f"undefended {_text(none.utility, 'mse', '.4f')}"
    if mine.utility.mse is None or mine.utility.mse_low is None:
        return finding_of("falls", DIVERGED, math.inf, beside, DIVERGED, mine, none)
    may = paper.value / paper.undefended
    if _one_training(mine.utility, none.utility, SAME_ERROR, relative=True):
        return finding_of("identity", "", mine.utility.mse, f"{SAME_TRAINING}; {beside}", shown, mine, none)
    low, high = _ratio(mine.utility, none.utility)
    share = mine.utility.mse / none.utility.mse
    reason = f"{share:.3f} [{low:.3f}, {high:.3f}] of the undefended error where the paper has {may:.3f}; {beside}"
    verdict = _verdict(low, high, may, ERROR_MARGIN)
    return finding_of(verdict, f"{mine.utility.mse:.4f}", share, reason, shown, mine, none)


def _ratio(mine: Utility, none: Utility) -> tuple[float, float]:
    """Return the interval of a ratio of two errors of independent samples, on the logarithmic scale by MOVER."""
    logs = [[math.log(max(end or 0.0, 1e-30)) for end in one.figure("mse")] for one in (mine, none)]
    (ours, low, high), (theirs, least, most) = logs
    middle = ours - theirs
    down, up = math.hypot(ours - low, most - theirs), math.hypot(high - ours, theirs - least)
    return math.exp(middle - down), math.exp(middle + up)


def guarantee_is_given(case: ClaimCase) -> ClaimFinding | str:
    """A claimed epsilon holds if the implemented mechanism gives one over the whole training that is no larger."""
    record = max(case.mine, key=lambda r: (r.privacy.epsilon is None, r.privacy.epsilon or 0.0, r.cell_id))
    privacy, whole = record.privacy, "over the whole training"
    if privacy.epsilon is None:
        # What stands in brackets is what would hold of one part of the uploads alone, and to a coalition.
        reason = (privacy.reason or "no reason is recorded").partition(" (")[0].rstrip(".")
        return finding_of("falls", "no guarantee", math.inf, reason, "none", record)
    guarantee = f"epsilon {privacy.epsilon:.3g}, delta {privacy.delta:.1g} {whole}"
    verdict: ClaimVerdict = "falls" if privacy.epsilon > (case.claim.value or 0.0) else "holds"
    return finding_of(verdict, f"{privacy.epsilon:.3g}", privacy.epsilon, whole, guarantee, record)


def best_of(records: Sequence[Record], name: str) -> Record | None:
    """Return the record whose model is best by a figure, ties by cell id; None where none has it."""
    known = [r for r in records if r.utility.figure(name)[0] is not None]
    return max(known, key=lambda r: (r.utility.figure(name)[0] or 0.0, r.cell_id), default=None)


# -- Rules for claims to be better than another defense, in one federation, on the same victims --
# A CAP is large where the distances are large or where the model is good, so nothing follows from two CAPs:
# distances are compared at equal accuracy.
#
# Two worst cases over different numbers of searches differ even where both leak the same: one side keeps the best of
# three answers on each victim, the other its only one. `search_adjusted` widens the interval accordingly.

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
    """The claim that a CAP is larger than another defense's holds if, at equal accuracy, the worst case over all
    attacks stays farther from the truth, victim by victim, with its whole interval; it falls if it comes nearer. The
    other defense is taken at the control value that protects best and costs no more accuracy (to a point). The interval
    allows for different numbers of searches: it extends to the figures of either side's best attack alone. Where the
    other defense is less accurate at all values of its grid, the claim falls if the CAP itself is lower all the same,
    with its whole interval.
    """
    kind, batch = case.claim.metric.removeprefix("cap_"), case.claim.batch
    question = question_of(kind)
    law = question.distances[0]
    mine, theirs = (cells_with_distance(cells, law.name, batch) for cells in (case.mine, case.rival))
    if not mine or not theirs:
        who = "it" if not mine else _name(case)
        return f"no {kind} attack was run on {who} at batch {batch} from the server's view of initial weights"
    rule = next(rule for rule in question.all_rules if rule.metric == law.metric)
    ours = list(_points(paper_grid(mine, case.claim), law.metric))
    others = list(_points(paper_grid(theirs, case.claim, own=False), law.metric))
    pairs = _pairs(ours, others, rule)
    if not ours or not others:
        return "no value of the paper's grids was run of both"
    if not pairs:
        reason = f"{_name(case)} is as accurate at none of its values: {_best(others)} beside {_best(ours)} at most"
        skipped = {*grid_of(case.rival[0].config.defense.id)} - {0.0, *(point.control for point in others)}
        if skipped:  # one of them may be as accurate
            return f"{reason}; {listed_values([f'{value:g}' for value in sorted(skipped)])} of its grid were not run"
        own = paper_grid(mine, case.claim), paper_grid(theirs, case.claim, own=False)
        return _at_unequal_accuracy(case, reason, *own, law.name)
    about = f"over {len(pairs)} of {len(ours)} values at which it is as accurate"
    if (less := max(mine.accuracy - other.accuracy for mine, other in pairs)) > 0:
        about += f", to {100 * less:.1g} points"
    return _judged(case, pairs, rule, about)


def _at_unequal_accuracy(
    case: ClaimCase, reason: str, mine: Sequence[Record], theirs: Sequence[Record], law: str
) -> ClaimFinding:
    """Return the finding where the rival is less accurate everywhere: better models with a lower CAP leak more.

    A higher CAP of better models tells nothing.
    """
    if bad := unreliable(case, HONEST_SERVER.name):
        return ClaimFinding("inconclusive", "", bad)
    (ours, cap, cases), (other, rival, more) = lowest_cap(mine, law), lowest_cap(theirs, law)
    if cap is None or rival is None or cap.value is None or cap.high is None or rival.low is None:
        return ClaimFinding("inconclusive", "", reason)
    figures = f"CAP {ours} beside {other}"
    verdict: ClaimVerdict = "falls" if cap.high < rival.low else "inconclusive"
    return finding_of(verdict, figures, -cap.value, f"{reason}; {figures}", figures, *cases, *more)


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
    cases = *(mine.worst for mine, _ in pairs), *(theirs.worst for _, theirs in pairs)
    knows = any(mine.worst.knows for mine, _ in pairs) or any(r.config.attack.adaptive for r in case.mine)
    if not rule.safer:  # a share of right answers: reported as the distance, which is 1 minus it
        difference = replace(difference, base=1 - difference.base, new=1 - difference.new)
    return _difference_finding(difference, True, knows, about, _attack_names([mine.worst for mine, _ in pairs]), cases)


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
    difference: Change, safer: bool, knows: bool, about: str, attacks: str, cases: Sequence[WorstCase]
) -> ClaimFinding:
    """Return the finding of a difference, whose `worse` is positive where the defense leaks more than the other."""
    verdict: ClaimVerdict = "falls" if difference.low > 0 else "holds" if difference.high < 0 else "inconclusive"
    sign = -1.0 if safer else 1.0
    ends = sorted((sign * difference.low, sign * difference.high))
    what = "distance " if safer else ""
    figures = f"{what}{difference.new:.2f} beside {difference.base:.2f} ({attacks})"
    reason = f"difference {sign * difference.worse + 0.0:+.2f} [{ends[0] + 0.0:+.2f}, {ends[1] + 0.0:+.2f}], {about}"
    if verdict == "holds" and not knows:
        verdict, reason = "inconclusive", f"{NO_AWARE_ATTACK}; {reason}"
    return finding_of(verdict, figures, difference.worse, reason, figures, *cases)


def _attack_names(cases: Sequence[Measured]) -> str:
    return ", ".join(dict.fromkeys(attack_of(case) for case in cases))


def _name(case: ClaimCase) -> str:
    return "the other" if case.claim.than is None else case.claim.than.defense


def leaks_less(case: ClaimCase) -> ClaimFinding | str:
    """The claim that less is rebuilt, or fewer members are identified, than under another defense holds if the worst
    case over all attacks lies below the other's, victim by victim, with its whole interval; it falls if it lies above.
    Both defenses are attacked by the same adversary, the strongest of those that the claim names, on the victims that
    both share, of all seeds that both have. Where clients play roles, each counts in the role that it played. The
    interval allows for different numbers of searches: it extends to the figures of either side's best attack alone
    against all of the other's.
    """
    metric, kind, _, _ = JUDGED_CELLS[case.claim.metric]
    pairs = list[tuple[WorstCase, WorstCase]]()
    for seed in sorted({r.config.seed for r in case.mine}):
        pair = _strongest_pair(case, seed)
        if isinstance(pair, str):
            return pair
        if bad := unreliable(case, pair[0].config.threat_model.id, seed):
            return ClaimFinding("inconclusive", "", bad)
        pairs.append(pair)
    rule = next(
        rule for rule in question_for(pairs[0][0]).all_rules if rule.metric == metric and rule.subset != "canaries"
    )
    about = f"victim by victim{', seen by ' + pairs[0][0].config.threat_model.id if case.claim.views else ''}"
    shared = [_shared(*pair) for pair in pairs]  # probing takes whole cohorts until each role has enough
    if shared != pairs:
        about += f", on the {sum(len(mine.victims) for mine, _ in shared)} that both share"
    if not all(mine.victims for mine, _ in shared):
        return ClaimFinding("inconclusive", "", "the two have different victims")

    def judged(theirs: Sequence[WorstCase], mine: Sequence[WorstCase]) -> Change:
        return change(theirs, mine, rule, f"{case.claim.source} {metric}")

    ours, others = [mine for mine, _ in shared], [theirs for _, theirs in shared]
    difference = search_adjusted(judged, others, ours)
    knows = any(r.config.attack.adaptive for r in case.mine if r.config.attack.kind == kind)
    return _difference_finding(difference, rule.safer, knows, about, _attack_names(ours), (*ours, *others))


def _strongest_pair(case: ClaimCase, seed: int) -> tuple[WorstCase, WorstCase] | str:
    """Return the worst cases of the defense and its rival by the same adversary, of one seed; or why there are none."""
    mine, rival = ([r for r in side if r.config.seed == seed] for side in (case.mine, case.rival))
    ours = _strongest(mine, case.claim.metric, case.claim.views)
    seen = (ours.config.threat_model.id,) if ours is not None and case.claim.views else ()
    theirs = _strongest(rival, case.claim.metric, seen)
    if ours is None or theirs is None:
        kind = JUDGED_CELLS[case.claim.metric][1]
        return f"no {kind} attack came to a figure on {'it' if ours is None else _name(case)}"
    return ours, theirs


def _shared(mine: WorstCase, theirs: WorstCase) -> tuple[WorstCase, WorstCase]:
    """Return two worst cases on the victims that both have: in one task and seed a victim has one place."""
    if mine.places == theirs.places:
        return mine, theirs
    places = mine.places & theirs.places
    return _only(mine, places), _only(theirs, places)


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
    """The claim that a model is better than under another defense holds if the interval of the difference, of
    independent samples, lies above 0, and falls if it lies below. It is inconclusive if the undefended model learned
    nothing.
    """
    name, none = case.claim.metric, case.undefended
    mine, theirs = best_of(case.mine, name), best_of(case.rival, name)
    ours = None if mine is None else model_figure(mine.utility, name)
    other = None if theirs is None else model_figure(theirs.utility, name)
    if mine is None or theirs is None or ours is None or other is None:
        return f"{'it' if ours is None else _name(case)} has no {name} here"
    metric = MODEL_METRICS[name]
    difference = unpaired([other], [ours], safer=metric.higher_is_safer)
    verdict: ClaimVerdict = "falls" if difference.low > 0 else "holds" if difference.high < 0 else "inconclusive"
    form, scale = (".1%", 100.0) if metric.unit == SHARE else (".4f", 1.0)
    sign = -1.0 if metric.higher_is_safer else 1.0
    ends = sorted((sign * difference.low * scale, sign * difference.high * scale))
    figures = f"{ours.value:{form}} beside {other.value:{form}}"
    reason = f"difference {sign * difference.worse * scale:+.3g} [{ends[0]:+.3g}, {ends[1]:+.3g}]"
    if none is not None and learning_of(none.utility).state == "nothing":
        verdict, reason = "inconclusive", f"the undefended model has learned nothing; {reason}"
    return finding_of(verdict, figures, difference.worse, reason, figures, mine, theirs)
