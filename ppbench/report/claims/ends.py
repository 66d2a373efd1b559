"""What else could have come out: a verdict that no result of the same setting could change is no verdict.

A rule is asked again about the same records as if everything had leaked (each cell with what its adversary finds of the
undefended model) and as if nothing had (with what he finds of noise), or as if the model were useless, or as good as
the undefended one. A claim that falls even so, or holds even so, could not have come out otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ppbench.metrics.intervals import clopper_pearson
from ppbench.questions.base import question_for
from ppbench.records.figure import best
from ppbench.records.schema import Record, Utility
from ppbench.report.claims.case import Case, Finding, Judge

GUESSED = ("agreement", "label_accuracy", "tracing_accuracy")
"""Shares of right answers of which chance is all that who sees nothing gets."""
Change = Callable[[Case], Case | str]
"""Returns the case as it would have been, or why nobody knows how, a clause."""


@dataclass(frozen=True)
class Rule:
    """How claims about one metric are judged.

    judge: from a case; worst, best: the case as if all had gone wrong, or nothing; None: the figure is computed from
    the protocol alone (bytes, a guarantee), and nothing but another protocol could change it; gathered: which of
    several evaluations that are equally close counts: the "worst", or the one in the "middle", since a training is
    drawn and not chosen.
    """

    judge: Judge
    worst: Change | None = None
    best: Change | None = None
    gathered: str = "worst"


def within(rule: Rule, case: Case) -> Finding | str:
    """Return what the rule says, with both ends; "cannot be told" where it would have said the same at an end."""
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


def _at(judge: Judge, case: Case | str) -> Finding:
    finding = case if isinstance(case, str) else judge(case)
    return Finding("cannot be told", "", finding) if isinstance(finding, str) else finding


def _inconclusive(finding: Finding, why: str) -> Finding:
    return replace(finding, verdict="cannot be told", to="", reason=f"{why}; {finding.reason}")


# -- attacks ---------------------------------------------------------------------------------------------------------
def leaking(case: Case) -> Case | str:
    """Return the case with what is found of the undefended model in every cell of the defense."""
    return _with_figures(case, "none", case.none)


def silent(case: Case) -> Case | str:
    """Return the case with what is found of noise in every cell of the defense, at chance where chance is known.

    Shares of right labels and owners are those of guessing, not the luck of the few victims that noise was drawn for.
    """
    guessed = [_at_chance(r) for r in case.mine if not question_for(r).noise]
    rest = replace(case, mine=[r for r in case.mine if question_for(r).noise])
    noise = [r for r in case.everything if r.config.defense.id == "full_noise" and r.status == "complete"]
    changed = _with_figures(rest, "full_noise", [_at_chance(r) for r in noise])
    if not isinstance(changed, str):
        guessed += changed.mine
    return replace(case, mine=guessed) if guessed else changed


def _with_figures(case: Case, name: str, donors: Sequence[Record]) -> Case | str:
    """Return the case with the figures of a control for the defense's; cells that it has none for are left out."""
    scenes: dict[tuple[object, ...], list[Record]] = {}
    for donor in donors:
        scenes.setdefault(_scene(donor), []).append(donor)
    masked = {r.config.attack.kind for r in case.mine if r.config.stage == "iterate"}
    delivered = [r for r in case.mine if r.config.stage == "final" and r.config.attack.kind in masked]
    rest = [r for r in case.mine if r not in delivered]
    changed = [_with_donor(record, scenes[_scene(record)]) for record in rest if _scene(record) in scenes]
    if not changed:
        return f"no cells of {name} say what else could have come out"
    return replace(case, mine=[*changed, *delivered])  # where masks are claimed, the delivered model has none anyhow


def _scene(record: Record) -> tuple[object, ...]:
    config = record.config
    return (
        config.attack.kind, config.threat_model.id, config.stage, config.batch_size, config.probe,
        config.probe_rounds, config.audit is None,
    )  # fmt: skip


def _with_donor(record: Record, donors: Sequence[Record]) -> Record:
    """Return a record with the figures of a donor: of the same attack if it was run there, else of the strongest."""
    same = [d for d in donors if d.config.attack.id == record.config.attack.id]
    metric = question_for(record).headline(record.config)
    donor = best(same or donors, metric) or (same or donors)[0]
    return record.model_copy(update={"victims": donor.victims, "metrics": donor.metrics, "status": donor.status})


def _at_chance(record: Record) -> Record:
    """Return a record with what guessing gives, of what is known: decisions and outputs of a model, labels, owners."""
    metrics = [
        m.model_copy(update=dict.fromkeys(("value", "low", "high"), level))
        if (level := 1.0 if m.name == "output_error" else m.chance if m.name in GUESSED else None) is not None
        else m
        for m in record.metrics
    ]
    return record.model_copy(update={"metrics": metrics})


# -- models ----------------------------------------------------------------------------------------------------------
def useless(case: Case) -> Case | str:
    """Return the case as if the defended model had learnt nothing: at chance, or with the error of noise."""
    noise = [r for r in case.everything if r.config.defense.id == "full_noise"]
    return _with_use(case, [_untaught(r.utility, [*case.none, *noise]) for r in case.mine])


def lossless(case: Case) -> Case | str:
    """Return the case as if the defense had cost nothing: with the undefended model's figures."""
    none = case.undefended
    return "there is no undefended model" if none is None else _with_use(case, [none.utility for _ in case.mine])


def flawless(case: Case) -> Case | str:
    """Return the case as if the defended model made no mistake, which is what a gain could have been at most."""
    return _with_use(case, [_faultless(r.utility) for r in case.mine])


def falling(case: Case) -> Case | str:
    """Return the case as if the model made no mistake at the smallest control value, and had learnt nothing beyond."""
    return _stepping(case, upwards=False)


def rising(case: Case) -> Case | str:
    """Return the case as if the model had learnt nothing at the smallest control value, and made no mistake beyond."""
    return _stepping(case, upwards=True)


def _stepping(case: Case, *, upwards: bool) -> Case:
    """Return the case as if the model made no mistake at all but the smallest control value, or at that one alone."""
    values = [0.0 if (control := r.config.defense.control) is None else control.value for r in case.mine]
    good = [(value > min(values)) == upwards for value in values]
    pairs = zip(case.mine, good, strict=True)
    return _with_use(case, [_faultless(r.utility) if fine else _untaught(r.utility, []) for r, fine in pairs])


def _faultless(own: Utility) -> Utility:
    low = clopper_pearson(own.n, own.n).low if own.n else None
    return own.model_copy(update={"accuracy": 1.0, "low": low, "high": None if low is None else 1.0})


def _with_use(case: Case, utilities: Iterable[Utility]) -> Case:
    pairs = zip(case.mine, utilities, strict=True)
    return replace(case, mine=[record.model_copy(update={"utility": use}) for record, use in pairs])


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
