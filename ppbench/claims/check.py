"""What papers claim about their defenses, beside what the records say: findings by rule, nothing typed by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from ppbench.base.errors import count_of
from ppbench.base.registry import find
from ppbench.claims.attack_rules import own_measure
from ppbench.claims.case import (
    ClaimCase,
    ClaimFinding,
    ClaimVerdict,
    attacked_words,
    batches_and_steps,
    closeness,
    collapse_clauses,
    data_of,
    differing_needs,
    lack_of,
    stray_clauses,
    unmet_conditions,
    unmet_needs,
)
from ppbench.claims.claim import REBUILT_METRICS, Claim, allowed, claims_of, equations
from ppbench.claims.cost_rules import KEY_OF, STOPWATCH, Benchmark, time_is_kept
from ppbench.claims.rules import judge_with_ends, rule_of, unjudged_reason
from ppbench.records.schema import Record
from ppbench.report.cap import strays
from ppbench.report.controls import nothing_to_read
from ppbench.report.frame import EVALUATION, Frame, Key, frame_of, network_words
from ppbench.report.page.profiles import PaperClaims
from ppbench.report.words import evaluation_words, listed_values, setting_labels

NO_RECORD = "no record of "
OVER_SEEDS = tuple(name for name in EVALUATION if name != "seed")
"""Key of an evaluation over all seeds."""
VERDICTS_FROM_WORST: tuple[ClaimVerdict, ...] = ("falls", "inconclusive", "holds", "identity")
"""Of evaluations that are equally close the first of these counts: a claim that falls anywhere has fallen."""
Open = Literal["not run", "not comparable", "repetition", "apart"]
"""Why a claim has no verdict: nothing that applies was run; a stopwatch's figure; it is claimed elsewhere already;
nobody can judge it, or only who has its data.
"""


@dataclass(frozen=True)
class Checked:
    """A claim judged in our setting; of `evaluations` equally close ones the finding is of the `gathered`.

    lacks: what our setting lacks of the premise, a clause each; differs: in what else it is not the paper's; counted:
    what the claim's cost is without a clock.
    """

    defense: str
    claim: Claim
    setting: str
    finding: ClaimFinding
    lacks: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()
    evaluations: int = 1
    gathered: str = "worst"
    counted: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """The verdict of the finding."""
        return self.finding.verdict


@dataclass(frozen=True)
class Unchecked:
    """A claim that cannot be checked. reason: a clause; status: the kind of reason."""

    defense: str
    claim: Claim
    reason: str
    status: Open = "not run"
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
    if claim.apart:
        return Unchecked(name, claim, claim.apart, "apart")
    if claim.metric == "statement" and claim.repeats:
        return Unchecked(name, claim, f"it repeats {claim.repeats}", "repetition")
    if claim.metric in KEY_OF and (run or any(b.defense == name for b in benchmarks)):  # no record holds times
        return _timed(name, claim, groups, benchmarks)
    rule = rule_of(claim)
    if rule is None and unjudged_reason(claim.metric) == STOPWATCH:
        return Unchecked(name, claim, STOPWATCH, "not comparable")
    if not run:
        return Unchecked(name, claim, f"no record of {name}")
    if rule is None:
        return Unchecked(name, claim, unjudged_reason(claim.metric))
    cases = list(_cases(name, claim, _pooled(groups) if rule.gathered == "pooled" else groups, siblings, far))
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
    finding = replace(_within(claim, one, finding), own=own_measure(one.case))
    gathered = "one in the middle" if rule.gathered == "middle" else "worst"
    differs = differing_needs(claim, one.case.mine[0].config)
    return Checked(name, claim, setting_of(one.case), finding, one.lacks, differs, len(judged), gathered)


def _within(claim: Claim, one: _Evaluation, finding: ClaimFinding) -> ClaimFinding:
    """Return the finding of an evaluation: no verdict outside the claim's premise, nor where nothing is claimed."""
    if one.lacks:
        reason = "; ".join((*one.lacks, finding.reason))
        return replace(finding, verdict="outside the premise", to="", reason=reason)
    return replace(finding, verdict="comparison", to="") if claim.baseline else finding


def _timed(
    name: str, claim: Claim, groups: Mapping[tuple[str, str], Frame], benchmarks: Sequence[Benchmark]
) -> Checked | Unchecked:
    """Return the outcome of a claim about time, with the bytes that a client uploads, which need no clock."""
    timed = time_is_kept(claim, name, benchmarks)
    if isinstance(timed, str):
        return Unchecked(name, claim, timed, "not comparable")
    finding, setting = timed
    if claim.than is not None:
        return Checked(name, claim, setting, finding)
    passes = f"{name} {claim.counted}" if claim.counted else ""
    counted = tuple(word for word in (passes, _uploaded(name, claim, groups)) if word)
    return Checked(name, claim, setting, finding, counted=counted)


def _uploaded(name: str, claim: Claim, groups: Mapping[tuple[str, str], Frame]) -> str:
    """Return how many times the undefended bytes a client uploads, "" where the claim's network was not run."""
    for records in groups.values():
        mine, none = (
            next((r for r in records if r.config.defense.id == side and r.config.model.id == claim.model), None)
            for side in (name, "none")
        )
        if mine is not None and none is not None and none.cost.bytes_up:
            ratio = mine.cost.bytes_up / none.cost.bytes_up
            return f"{name} uploads {ratio:.3g} times the undefended bytes ({claim.model})"
    return ""


def _gathered(judged: Sequence[tuple[_Evaluation, ClaimFinding]], how: str) -> tuple[_Evaluation, ClaimFinding]:
    """Return the evaluation that counts: the worst, or the one in the middle of all, from worst to best.

    They are ordered by verdict, then by figure; the place (with the seed) only breaks ties.
    """
    rising = sorted(judged, key=lambda pair: (VERDICTS_FROM_WORST.index(pair[1].verdict), -pair[1].harm, pair[0].place))
    return rising[(len(rising) - 1) // 2] if how == "middle" else rising[0]


def _pooled(groups: Mapping[tuple[str, str], Frame]) -> dict[tuple[str, str], Frame]:
    """Return the evaluations that differ in their seed alone as one each, at the place of the first."""
    alike: dict[Key, list[tuple[str, str]]] = {}
    for place, records in groups.items():
        alike.setdefault(records.key(records[0]).only(OVER_SEEDS), []).append(place)
    return {places[0]: frame_of([record for place in places for record in groups[place]]) for places in alike.values()}


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
    long = f", updates of a {attacked_words(config)}" if batches_and_steps(config)[1] > 1 else ""
    other = {word.strip("()") for label in setting_labels(case.mine).values() for word in label.split()[1:]}
    more = f" ({', '.join(sorted(other))})" if other else ""
    seeds = sorted({r.config.seed for r in case.mine})
    drawn = f"{'seed' if len(seeds) == 1 else 'seeds'} {listed_values([str(seed) for seed in seeds])}"
    return (
        f"{config.data.name}, {config.data.train} examples, {model}, {count_of(fed.clients, 'client')}, "
        f"{count_of(fed.rounds, 'round')}, {fed.optimizer} at {fed.lr:g}, {drawn}{long}{at}{more}"
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


# -- Facts: what a paper says once, in however many cells, against however many others --

ClaimFate = ClaimVerdict | Open
FATES: tuple[ClaimFate, ...] = (
    *("falls", "holds", "inconclusive", "identity", "outside the premise", "comparison"),
    *("not comparable", "not run", "apart", "repetition"),
)
"""What becomes of a claim, the first of these of a fact: where one cell falls, the fact has fallen."""
KNOWN = 4
"""The first of them are outcomes of a claim inside its premise."""


def claim_fate(outcome: Checked | Unchecked) -> ClaimFate:
    """Return what became of a claim: its verdict, or why it has none."""
    if outcome.claim.repeats:
        return "repetition"
    return outcome.finding.verdict if isinstance(outcome, Checked) else outcome.status


@dataclass(frozen=True)
class Fact:
    """One thing that a paper claims: cells of a defense's row in a table, on one data set, of one kind of figure."""

    outcomes: tuple[Checked | Unchecked, ...]

    @property
    def fate(self) -> ClaimFate:
        """The first fate of `FATES` that a cell has."""
        return min((claim_fate(outcome) for outcome in self.outcomes), key=FATES.index)

    @property
    def share(self) -> tuple[int, int]:
        """How many cells have the fact's fate, and of how many it is known."""
        fates = [claim_fate(outcome) for outcome in self.outcomes]
        known = [fate for fate in fates if fate in FATES[:KNOWN]]
        return fates.count(self.fate), max(len(known), fates.count(self.fate))

    @property
    def leading(self) -> Checked | Unchecked:
        """The first cell that has the fact's fate."""
        return next(outcome for outcome in self.outcomes if claim_fate(outcome) == self.fate)


def facts_of(outcomes: Sequence[Checked | Unchecked]) -> list[Fact]:
    """Return the facts that a paper claims, in the order of their first cells; repetitions and comparisons are none."""
    groups: dict[tuple[object, ...], list[Checked | Unchecked]] = {}
    for outcome in outcomes:
        if not outcome.claim.repeats and not outcome.claim.baseline:
            groups.setdefault(_fact_key(outcome.defense, outcome.claim), []).append(outcome)
    return [Fact(tuple(group)) for group in groups.values()]


def _fact_key(defense: str, claim: Claim) -> tuple[object, ...]:
    if claim.fact:
        return defense, claim.fact
    plugin = find("defenses", defense)
    control = None if plugin is None else plugin.loaded.control
    fixed = tuple(pair for pair in claim.when if pair[0] != control)
    metric = REBUILT_METRICS if claim.metric in REBUILT_METRICS else claim.metric
    about = claim.dataset, claim.model, claim.options, fixed, claim.note if claim.value is None else ""
    return defense, claim.table, metric, claim.than is not None, about
