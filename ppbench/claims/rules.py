"""Which rule judges claims about which metric, with its counterfactuals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ppbench.claims import cost_rules, model_rules
from ppbench.claims.attack_rules import (
    IMAGES,
    cap_is_kept,
    members_stay_hidden,
    outputs_stay_hidden,
    pixels_stay_hidden,
)
from ppbench.claims.case import ClaimCase, ClaimFinding, Judge
from ppbench.claims.claim import Claim
from ppbench.claims.model_rules import JUDGED_CELLS, leaks_less, learns_more, stays_farther
from ppbench.metrics.intervals import clopper_pearson
from ppbench.questions.base import question_for
from ppbench.records.figure import best
from ppbench.records.schema import Record, Utility

# -- Counterfactuals: a verdict that no result of the same setting could change is no verdict --
# A rule judges the same records again as if everything had leaked (each cell with its adversary's figures on the
# undefended model) and as if nothing had (with those on noise), or as if the model were useless, or as good as the
# undefended one. A claim that falls, or holds, in both cases could not have come out otherwise.

GUESSED = ("agreement", "label_accuracy", "tracing_accuracy")
"""Shares of right answers that a blind guess has at the level of chance."""
Counterfactual = Callable[[ClaimCase], ClaimCase | str]
"""Returns the case as it would have been, or a clause on why that is not known."""


@dataclass(frozen=True)
class ClaimRule:
    """How claims about one metric are judged.

    judge: judges a case; worst, best: change the case as if all, or nothing, had gone wrong, None where the protocol
    alone decides the figure (bytes, a guarantee); gathered: which of several equally close evaluations counts: the
    "worst", or the one in the "middle", as a training is drawn and not chosen; "pooled": the worst, after the seeds of
    each setting were pooled, as two defenses are compared on the victims of all seeds.
    """

    judge: Judge
    worst: Counterfactual | None = None
    best: Counterfactual | None = None
    gathered: str = "worst"


def judge_with_ends(rule: ClaimRule, case: ClaimCase) -> ClaimFinding | str:
    """Return the rule's finding with both ends; "inconclusive" where an end would have had the same verdict."""
    finding = rule.judge(case)
    if isinstance(finding, str) or rule.worst is None or rule.best is None:
        return finding
    least, most = (_at(rule.judge, change(case)) for change in (rule.worst, rule.best))
    finding = replace(finding, least=least.worst or "not known", most=most.worst or "not known")
    if finding.verdict == "falls" and (most.verdict == "falls" or not most.worst):
        return _inconclusive(
            finding, "it would fall even if nothing leaked or were lost" if most.worst else most.reason
        )
    if finding.verdict == "holds" and (least.verdict == "holds" or not least.worst):
        return _inconclusive(finding, "it would hold even if all leaked or were lost" if least.worst else least.reason)
    return finding


def _at(judge: Judge, case: ClaimCase | str) -> ClaimFinding:
    finding = case if isinstance(case, str) else judge(case)
    return ClaimFinding("inconclusive", "", finding) if isinstance(finding, str) else finding


def _inconclusive(finding: ClaimFinding, why: str) -> ClaimFinding:
    return replace(finding, verdict="inconclusive", to="", reason=f"{why}; {finding.reason}")


# -- attacks ---------------------------------------------------------------------------------------------------------
def if_all_leaked(case: ClaimCase) -> ClaimCase | str:
    """Return the case with the figures of the undefended model in every cell of the defense."""
    return _with_figures(case, "none", case.none)


def if_nothing_leaked(case: ClaimCase) -> ClaimCase | str:
    """Return the case with the figures of noise in every cell of the defense, at chance where chance is known.

    Shares of labels and owners are exactly at chance: the few victims of the noise may be lucky.
    """
    guessed = [_at_chance(r) for r in case.mine if not question_for(r).noise]
    rest = replace(case, mine=[r for r in case.mine if question_for(r).noise])
    noise = [r for r in case.everything if r.config.defense.id == "full_noise" and r.status == "complete"]
    changed = _with_figures(rest, "full_noise", [_at_chance(r) for r in noise])
    if not isinstance(changed, str):
        guessed += changed.mine
    return replace(case, mine=guessed) if guessed else changed


def _with_figures(case: ClaimCase, name: str, donors: Sequence[Record]) -> ClaimCase | str:
    """Return the case with a control's figures in place of the defense's; cells without a counterpart are left out."""
    scenes: dict[tuple[object, ...], list[Record]] = {}
    for donor in donors:
        scenes.setdefault(_scene(donor), []).append(donor)
    masked = {r.config.attack.kind for r in case.mine if r.config.stage == "iterate"}
    delivered = [r for r in case.mine if r.config.stage == "final" and r.config.attack.kind in masked]
    rest = [r for r in case.mine if r not in delivered]
    changed = [_with_donor(record, scenes[_scene(record)]) for record in rest if _scene(record) in scenes]
    if not changed:
        return f"no cells of {name} show what else could have come out"
    return replace(case, mine=[*changed, *delivered])  # the delivered model has no masks


def _scene(record: Record) -> tuple[object, ...]:
    config = record.config
    return (
        config.attack.kind, config.threat_model.id, config.stage, config.batch_size, config.probing,
        config.audit is None, config.seed,
    )  # fmt: skip


def _with_donor(record: Record, donors: Sequence[Record]) -> Record:
    """Return a record with the figures of a donor: of the same attack if it has any, else of the strongest."""
    same = [d for d in donors if d.config.attack.id == record.config.attack.id]
    metric = question_for(record).headline(record.config)
    donor = best(same or donors, metric) or (same or donors)[0]
    return record.model_copy(update={"victims": donor.victims, "metrics": donor.metrics, "status": donor.status})


def _at_chance(record: Record) -> Record:
    """Return a record with the metrics of a blind guess, where chance is known: decisions, outputs, labels, owners."""
    metrics = [
        m.model_copy(update=dict.fromkeys(("value", "low", "high"), level))
        if (level := 1.0 if m.name == "output_error" else m.chance if m.name in GUESSED else None) is not None
        else m
        for m in record.metrics
    ]
    return record.model_copy(update={"metrics": metrics})


# -- models ----------------------------------------------------------------------------------------------------------
def if_useless(case: ClaimCase) -> ClaimCase | str:
    """Return the case as if the defended model had learned nothing: at chance, or with the error of noise."""
    noise = [r for r in case.everything if r.config.defense.id == "full_noise"]
    return _with_use(case, [_untaught(r.utility, [*case.none, *noise]) for r in case.mine])


def if_lossless(case: ClaimCase) -> ClaimCase | str:
    """Return the case as if the defense had cost nothing: with the undefended model's figures."""
    none = case.undefended
    return "there is no undefended model" if none is None else _with_use(case, [none.utility for _ in case.mine])


def if_flawless(case: ClaimCase) -> ClaimCase | str:
    """Return the case as if the defended model made no mistake: the largest possible gain."""
    return _with_use(case, [_faultless(r.utility) for r in case.mine])


def if_accuracy_stepped(case: ClaimCase, *, upwards: bool) -> ClaimCase | str:
    """Return the case as if the model made no mistake at the smallest control value, and learned nothing beyond it.

    upwards: the other way round.
    """
    values = [0.0 if (control := r.config.defense.control) is None else control.value for r in case.mine]
    good = [(value > min(values)) == upwards for value in values]
    pairs = zip(case.mine, good, strict=True)
    return _with_use(case, [_faultless(r.utility) if fine else _untaught(r.utility, []) for r, fine in pairs])


def _faultless(own: Utility) -> Utility:
    low = clopper_pearson(own.n, own.n).low if own.n else None
    return own.model_copy(update={"accuracy": 1.0, "low": low, "high": None if low is None else 1.0})


def _with_use(case: ClaimCase, utilities: Iterable[Utility]) -> ClaimCase:
    pairs = zip(case.mine, utilities, strict=True)
    return replace(case, mine=[record.model_copy(update={"utility": utility}) for record, utility in pairs])


def _untaught(own: Utility, controls: Sequence[Record]) -> Utility:
    ends = clopper_pearson(own.chance * own.n, own.n) if own.n else None
    low, high = (None, None) if ends is None else (ends.low, ends.high)
    changed: dict[str, object] = {"accuracy": own.chance, "low": low, "high": high}
    if own.mse is not None:
        first = max([error for r in controls for _, error in r.utility.curve] or [own.mse])
        changed |= {"accuracy": None, "low": None, "high": None, "mse": first, "mse_low": first, "mse_high": first}
    if own.accuracy_top5 is not None:
        five = clopper_pearson(round(5 * own.chance * own.n), own.n)
        changed |= {"accuracy_top5": 5 * own.chance, "accuracy_top5_low": five.low, "accuracy_top5_high": five.high}
    if own.dice is not None:
        changed |= {"dice": 0.0, "dice_low": 0.0, "dice_high": 0.0}
    return own.model_copy(update=changed)


CAPS = ("cap_reconstruction", "cap_label", "cap_tracing")
RULES: dict[str, ClaimRule] = {
    "asr": ClaimRule(members_stay_hidden, if_all_leaked, if_nothing_leaked),
    **dict.fromkeys(IMAGES, ClaimRule(pixels_stay_hidden, if_all_leaked, if_nothing_leaked)),
    "agreement": ClaimRule(outputs_stay_hidden, if_all_leaked, if_nothing_leaked),
    **dict.fromkeys(CAPS, ClaimRule(cap_is_kept, if_all_leaked, if_nothing_leaked)),
    "accuracy": ClaimRule(model_rules.accuracy_is_kept, if_useless, if_lossless, "middle"),
    "accuracy_top5": ClaimRule(model_rules.top5_is_kept, if_useless, if_lossless, "middle"),
    "dice": ClaimRule(model_rules.dice_is_kept, if_useless, if_lossless, "middle"),
    "mse": ClaimRule(model_rules.error_is_kept, if_useless, if_lossless, "middle"),
    "accuracy_rises": ClaimRule(
        model_rules.accuracy_rises,
        partial(if_accuracy_stepped, upwards=False),
        partial(if_accuracy_stepped, upwards=True),
    ),
    "accuracy_gain": ClaimRule(model_rules.accuracy_is_gained, if_useless, if_flawless, "middle"),
    "epsilon": ClaimRule(model_rules.guarantee_is_given),
    "upload_ratio": ClaimRule(cost_rules.upload_is_as_large),
    "bytes_saving": ClaimRule(cost_rules.bytes_are_saved),
    "memory_ratio": ClaimRule(cost_rules.memory_is_as_small),
}
"""Rules of claims about one defense."""
RIVALS: dict[str, ClaimRule] = {
    **dict.fromkeys(CAPS, ClaimRule(stays_farther, if_all_leaked, if_nothing_leaked)),
    **dict.fromkeys(JUDGED_CELLS, ClaimRule(leaks_less, if_all_leaked, if_nothing_leaked, "pooled")),
    **dict.fromkeys(
        ("accuracy", "accuracy_top5", "dice", "mse"), ClaimRule(learns_more, if_useless, if_lossless, "middle")
    ),
    "bytes_saving": ClaimRule(cost_rules.sends_less),
}
"""Rules of claims to be better than another defense."""
UNJUDGED = {
    "statement": "it is a statement without a figure",
    **dict.fromkeys(
        ("time_to_accuracy_ratio", "client_forward_ratio", "server_update_ratio", "_seconds"), cost_rules.STOPWATCH
    ),
}
"""Why no rule judges a metric that papers print, or all metrics with an ending: a clause."""


def unjudged_reason(metric: str) -> str:
    """Return why no rule judges a metric, a clause."""
    known = (why for name, why in UNJUDGED.items() if metric == name or (name[0] == "_" and metric.endswith(name)))
    return next(known, f"no rule judges {metric!r}")


def rule_of(claim: Claim) -> ClaimRule | None:
    """Return the rule that judges a claim, or None."""
    return (RULES if claim.than is None else RIVALS).get(claim.metric)
