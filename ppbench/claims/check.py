"""What papers claim about their defenses, beside what the records say: findings by rule, nothing typed by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import ClassVar

from ppbench.base.errors import count_of
from ppbench.claims.attack_rules import own_measure
from ppbench.claims.case import (
    ClaimCase,
    ClaimFinding,
    ClaimVerdict,
    closeness,
    collapse_clauses,
    data_of,
    differing_needs,
    lack_of,
    steps_of,
    stray_clauses,
    unmet_conditions,
    unmet_needs,
)
from ppbench.claims.claim import Claim, allowed, claims_of, equations
from ppbench.claims.cost_rules import KEY_OF, Benchmark, time_is_kept
from ppbench.claims.rules import judge_with_ends, rule_of, unjudged_reason
from ppbench.records.schema import Record
from ppbench.report.cap import strays
from ppbench.report.controls import nothing_to_read
from ppbench.report.frame import EVALUATION, Frame, Key, frame_of, network_words
from ppbench.report.page.profiles import PaperClaims
from ppbench.report.words import evaluation_words, listed_values, setting_labels

NO_RECORD = "no record of "
VERDICTS_FROM_WORST: tuple[ClaimVerdict, ...] = ("falls", "inconclusive", "holds", "identity", "outside the premise")
"""Of evaluations that are equally close the first of these counts: a claim that falls anywhere has fallen."""


@dataclass(frozen=True)
class Checked:
    """A claim judged in our setting; of `evaluations` equally close ones the finding is of the `gathered`."""

    defense: str
    claim: Claim
    setting: str
    finding: ClaimFinding
    differs: tuple[str, ...] = ()
    evaluations: int = 1
    gathered: str = "worst"

    @property
    def verdict(self) -> str:
        """The verdict of the finding."""
        return self.finding.verdict


@dataclass(frozen=True)
class Unchecked:
    """A claim that cannot be checked. reason: a clause; unrun: whether the defense has no record at all."""

    defense: str
    claim: Claim
    reason: str
    unrun: bool = False
    verdict: ClassVar[str] = ""


@dataclass(frozen=True)
class _Evaluation:
    """The finding of one evaluation. lacks: what it lacks of the claim's premise, a clause each."""

    place: tuple[str, str]
    case: ClaimCase
    finding: ClaimFinding | str
    lacks: tuple[str, ...]

    @property
    def closeness(self) -> tuple[float, ...]:
        """How close the evaluation is to the paper's, larger being closer: by what it lacks first."""
        return -len(self.lacks), *closeness(self.case.claim, self.case.mine[0].config)


def check_claims(
    claimed: Mapping[str, Sequence[Claim]], records: Sequence[Record], benchmarks: Sequence[Benchmark]
) -> list[Checked | Unchecked]:
    """Return the outcome of each claim, in order, in the worst of the evaluations closest to the paper's setting."""
    some = {record.cell_id: record for record in records}
    frame = frame_of(records).of(some[cell] for cell in sorted(some))
    groups, far = frame.by(EVALUATION), strays(frame)
    places = {key: (evaluation_words(key), key.text()) for key in groups}
    order = sorted(groups, key=places.__getitem__)
    ordered = {places[key]: groups[key] for key in order}
    return [
        _one(name, claim, ordered, benchmarks, claimed[name], far)
        for name in sorted(claimed)
        for claim in claimed[name]
    ]


def _one(
    name: str,
    claim: Claim,
    groups: Mapping[tuple[str, str], Frame],
    benchmarks: Sequence[Benchmark],
    siblings: Sequence[Claim],
    far: Set[Key],
) -> Checked | Unchecked:
    run = any(r.config.defense.id == name for records in groups.values() for r in records)
    if claim.metric in KEY_OF and (run or any(b.defense == name for b in benchmarks)):  # no record holds times
        timed = time_is_kept(claim, name, benchmarks)
        return Unchecked(name, claim, timed) if isinstance(timed, str) else Checked(name, claim, timed[1], timed[0])
    if not run:
        return Unchecked(name, claim, f"no record of {name}", unrun=True)
    rule = rule_of(claim)
    if rule is None:
        return Unchecked(name, claim, unjudged_reason(claim.metric))
    cases = list(_cases(name, claim, groups, siblings, far))
    if not cases:
        return Unchecked(name, claim, _missing(name, claim, groups))
    evaluations = [_Evaluation(place, case, judge_with_ends(rule, case), lacks) for place, case, lacks in cases]
    # A figure in a farther setting beats none in a closer one.
    candidates = [one for one in evaluations if isinstance(one.finding, ClaimFinding)] or evaluations
    nearest = max(one.closeness for one in candidates)
    near = [one for one in candidates if one.closeness == nearest]
    judged = [(one, one.finding) for one in near if isinstance(one.finding, ClaimFinding)]
    if not judged:
        lacks = f"outside the premise ({'; '.join(near[0].lacks)}): " if near[0].lacks else ""
        return Unchecked(name, claim, f"{lacks}{near[0].finding}")
    one, finding = _gathered(judged, rule.gathered)
    if one.lacks:
        reason = "; ".join(("; ".join(one.lacks), finding.reason))
        finding = replace(finding, verdict="outside the premise", to="", reason=reason)
    finding = replace(finding, own=own_measure(one.case))
    gathered = "worst" if rule.gathered == "worst" else "one in the middle"
    differs = differing_needs(claim, one.case.mine[0].config)
    return Checked(name, claim, setting_of(one.case), finding, differs, len(judged), gathered)


def _gathered(judged: Sequence[tuple[_Evaluation, ClaimFinding]], how: str) -> tuple[_Evaluation, ClaimFinding]:
    """Return the evaluation that counts: the worst, or the one in the middle of all, from worst to best.

    They are ordered by verdict, then by figure; the place (with the seed) only breaks ties.
    """
    rising = sorted(judged, key=lambda pair: (VERDICTS_FROM_WORST.index(pair[1].verdict), -pair[1].harm, pair[0].place))
    return rising[0] if how == "worst" else rising[(len(rising) - 1) // 2]


def _cases(
    name: str, claim: Claim, groups: Mapping[tuple[str, str], Frame], siblings: Sequence[Claim], far: Set[Key]
) -> Iterator[tuple[tuple[str, str], ClaimCase, tuple[str, ...]]]:
    """Yield the place and case of each evaluation with cells at the claim's control value, and what it lacks of the
    premise.
    """
    for place, records in groups.items():
        if "dataset" in claim.premise and lack_of(claim, records[0].config, "dataset"):
            continue  # figures of other data do not compare
        complete = [r for r in records if r.status != "failed"]
        at = [r for r in complete if r.config.defense.id == name and not unmet_conditions(claim.when, r.config, True)]
        if claim.batch is not None and "batch" in claim.premise:
            at = [r for r in at if r.config.batch_size == claim.batch]
        alike: dict[tuple[str, ...], list[Record]] = {}
        for record in at:
            alike.setdefault(unmet_conditions(claim.when, record.config, False), []).append(record)
        for other in sorted(alike, key=lambda clauses: (len(clauses), clauses))[:1]:
            mine = records.of(alike[other])
            none = records.of([r for r in complete if r.config.defense.id == "none"])
            rival = records.of(_rival(claim, [r for r in records if r.status != "failed" or nothing_to_read(r)]))
            case = ClaimCase(claim, mine, none, records, rival, siblings)
            trained = (*collapse_clauses(claim, mine, rival), *stray_clauses(claim, far, mine))
            yield place, case, (*unmet_needs(claim, mine[0].config), *other, *trained)


def _rival(claim: Claim, known: Sequence[Record]) -> list[Record]:
    """Return the cells of the rival, the defense that a claim compares with, at the parameters that the claim names."""
    than = claim.than
    if than is None:
        return []
    own = [r for r in known if r.config.defense.id == than.defense]
    return [r for r in own if not any(unmet_conditions(than.when, r.config, control) for control in (True, False))]


def _missing(name: str, claim: Claim, groups: Mapping[tuple[str, str], Frame]) -> str:
    """Return why no evaluation applies to a claim, a clause: none has its control value, or every cell failed."""
    mine = [r for records in groups.values() for r in records if r.config.defense.id == name]
    if "dataset" in claim.premise:
        mine = [r for r in mine if not lack_of(claim, r.config, "dataset")]
        if not mine:
            return f"{NO_RECORD}{claim.dataset}"
    mine = [r for r in mine if not unmet_conditions(claim.when, r.config, True)]
    if not mine:
        return f"no record at {', '.join(equations(claim.when))}"
    if claim.batch is not None and all(r.config.batch_size != claim.batch for r in mine):
        return f"no record at batch {claim.batch}"
    return "every cell of it failed"


def setting_of(case: ClaimCase) -> str:
    """Return our setting in words: data, model, clients, rounds, optimizer, seed, updates, control values."""
    config = case.mine[0].config
    model, fed = network_words(config.model.id, config.model.options), config.federation
    controls = sorted({(c.name, c.value) for r in case.mine if (c := r.config.defense.control) is not None})
    at = f"; {listed_values([f'{name}={value:g}' for name, value in controls])}" if controls else ""
    steps = steps_of(config)
    long = f", updates of {config.batch_size} examples in {steps} mini-batches or more" if steps > 1 else ""
    other = {word.strip("()") for label in setting_labels(case.mine).values() for word in label.split()[1:]}
    more = f" ({', '.join(sorted(other))})" if other else ""
    return (
        f"{config.data.name}, {config.data.train} examples, {model}, {count_of(fed.clients, 'client')}, "
        f"{count_of(fed.rounds, 'round')}, {fed.optimizer} at {fed.lr:g}, seed {config.seed}{long}{at}{more}"
    )


# -- What a board shows of papers' claims: the claim beside a record, and what became of each --

CLAIM_FORMS = {
    ("membership", "iterate"): {"asr": "ASR {:.1%}"},
    ("reconstruction", "init"): {"psnr_median": "PSNR {:.2f} dB"},
}
"""By kind and stage of a cell: the metric that a comparable claim has, except CAP, and its form."""


def claimed(record: Record) -> str:
    """Return the claim of the defense's paper for this very setting, as "CAP 0.69 (Table 8)", or ""."""
    config = record.config
    forms = CLAIM_FORMS.get((config.attack.kind, config.stage), {}) | {f"cap_{config.attack.kind}": "CAP {:.2f}"}
    for claim in claims_of(config.defense.id):
        fits = (
            claim.metric in forms
            and claim.dataset == data_of(config)
            and claim.model == config.model.id
            and claim.batch in (None, config.batch_size)
            and all(config.defense.parameters.get(name) in allowed(value) for name, value in claim.when)
            and claim.than is None
        )
        if fits and claim.value is not None:
            return f"{forms[claim.metric].format(claim.value)} ({claim.source})"
    return ""


def outcomes_of(records: Sequence[Record]) -> list[Checked | Unchecked]:
    """Return the outcomes of the claims of all defenses in `records`."""
    names = sorted({record.config.defense.id for record in records})
    return check_claims({name: claims for name in names if (claims := claims_of(name))}, records, ())


PAPER_CLAIMS = PaperClaims(claimed, outcomes_of)
"""What every board of ppbench shows."""
