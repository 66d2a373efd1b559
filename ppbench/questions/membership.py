"""Membership: whether a record was trained on; for average records and canaries, and for bounds by audits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from ppbench.metrics.epsilon import DELTA, client_epsilon, epsilon_bound
from ppbench.metrics.intervals import Estimate, unsupported
from ppbench.metrics.membership import Half, asr, auc, tpr_at
from ppbench.metrics.spec import SHARE, VALUE, Judgment, MetricSpec
from ppbench.questions.base import DistanceLaw, Question
from ppbench.questions.inquiry import FinishedAudit, Inquiry, Probe, Scored, TargetModel
from ppbench.records.figure import Terms, bootstrap_seed, record_metric
from ppbench.records.schema import CellConfig, Flag, Metric, Record, Score

if TYPE_CHECKING:
    from torch import Tensor

    from ppbench.adversary.attack import Challenge, Guess
    from ppbench.adversary.victims import Candidates
    from ppbench.federation.plan import Plan


AVERAGE = "average"
"""The family of candidates that are ordinary records; all others are canaries."""
ASR = MetricSpec(
    "asr",
    "ASR",
    SHARE,
    "Attack success rate: share of right decisions on who is a member; 0.5 is chance.",
    judgment=Judgment("decision", 0.02, 0.02, subset="average"),
)
AUC = MetricSpec(
    "auc",
    "AUC",
    "",
    "Area under the ROC curve of members against others; 0.5 is chance.",
    judgment=Judgment("auc", 0.02, 0.02, subset="average"),
)
TPR_1 = MetricSpec(
    "tpr_at_1pct_fpr",
    "TPR at 1 % FPR",
    SHARE,
    "True-positive rate at a false-positive rate of 1 %.",
    short="",
    judgment=Judgment("tpr", 0.02, 0.02, subset="average"),
)
TPR_01 = MetricSpec(
    "tpr_at_0.1pct_fpr",
    "TPR at 0.1 % FPR",
    SHARE,
    "True-positive rate at a false-positive rate of 0.1 %.",
    short="",
    columns=(),
)
CANARY_AUC = MetricSpec(
    "canary_auc",
    "Canaries, AUC",
    "",
    "`auc` of an audit's canaries.",
    short="Canary AUC",
    judgment=Judgment("auc", 0.02, 0.02, subset="canaries", name=AUC.name),
)
CANARY_TPR_1 = MetricSpec(
    "canary_tpr_at_1pct_fpr",
    "Canaries, TPR at 1 % FPR",
    SHARE,
    "`tpr_at_1pct_fpr` of an audit's canaries.",
    short="Canary TPR at 1 %",
    judgment=Judgment("tpr", 0.02, 0.05, subset="canaries", name=TPR_1.name),
)
CANARY_TPR_01 = MetricSpec(
    "canary_tpr_at_0.1pct_fpr",
    "Canaries, TPR at 0.1 % FPR",
    SHARE,
    "`tpr_at_0.1pct_fpr` of an audit's canaries.",
    short="",
    columns=(),
)
EPSILON_LOWER = MetricSpec(
    "epsilon_lower",
    "ε at least",
    "",
    "Lower bound of epsilon at 95 % by an audit.",
    digits=2,
    columns=VALUE,
    judgment=Judgment("epsilon", 0.25, 0.25, subset="canaries", digits=2, first=True),
)
EPSILON_GAUSSIAN = MetricSpec(
    "epsilon_gaussian",
    "ε at least, of a Gaussian mechanism",
    "",
    "The same bound under the assumption of a Gaussian mechanism.",
    short="",
    columns=(),
)
RATES = ((TPR_1, CANARY_TPR_1, 0.01), (TPR_01, CANARY_TPR_01, 0.001))
"""Metrics at a false-positive rate: of average records, of canaries, the rate."""
BATCH_ASR = MetricSpec(
    "batch_asr",
    "ASR",
    SHARE,
    "`asr` of the question who was in a victim's batch.",
    short="",
    judgment=Judgment("decision", 0.02, 0.05),
)
BATCH_AUC = MetricSpec(
    "batch_auc",
    "AUC",
    "",
    "`auc` of the question who was in a victim's batch.",
    short="",
    judgment=Judgment("auc", 0.02, 0.05),
)
CLIENT_EPSILON = MetricSpec(
    "client_epsilon",
    "Estimate of a client's ε",
    "",
    "Estimate (no bound) of a client's epsilon from canary clients.",
)
CLIENT_EPSILON_NULL = MetricSpec(
    "client_epsilon_null",
    "The same of absent canaries",
    "",
    "The same for canary clients that took no part: the noise of the estimate.",
)


class MemberScore(Score):
    """One candidate of a membership attack in one `half`; score: higher means member.

    decision: by the threshold of the other half; null if the attack abstained (audits guess on the surest only).
    family: "average" for an ordinary record, else the family of canaries, unknown to the attack.
    """

    kind: Literal["member"] = "member"
    half: Annotated[int, Field(ge=0, le=1)]
    member: bool
    score: float
    decision: bool | None
    family: str = AVERAGE

    @property
    def stratum(self) -> tuple[int, bool]:
        """Half and membership."""
        return self.half, self.member

    @property
    def truth(self) -> tuple[int | str, ...]:
        """Half, membership and family."""
        return self.half, self.member, self.family

    @property
    def canary(self) -> bool:
        """Whether it belongs to a family of canaries."""
        return self.family != AVERAGE


def decision_distance(asr: Any) -> Any:
    """Return the distance of a share of right decisions, scalar or array: 1 at chance, 0 if all are right."""
    return 2 * (1 - np.maximum(asr, 0.5))


class _Decisions(Question):
    """A question that is answered by scores and decisions on candidates."""

    def judged(self, score: MemberScore, metric: str) -> float:
        """Return whether the decision is right, or the score."""
        return float(score.decision == score.member) if metric in (ASR.name, BATCH_ASR.name) else score.score

    def blind(self, scores: Sequence[MemberScore], config: CellConfig) -> tuple[float, int, float] | None:
        """Return the share of right decisions; chance is 0.5. None without decisions."""
        decided = [score for score in scores if score.decision is not None]
        hits = sum(score.member == score.decision for score in decided)
        return (hits / len(decided), len(decided), 0.5) if decided else None


class Membership(_Decisions):
    """Which of the candidates were trained on? Each half is attacked with the membership of the other half known."""

    name = "membership"
    title = "Membership inference"
    score = MemberScore
    source = "model"
    reads = False
    audits = True
    order = 2
    chart = "roc"
    chapter = "models"
    distances = (DistanceLaw("mia/1", ASR.name, decision_distance, "2 (1 - ASR)"),)
    average = (AUC, ASR, TPR_1, TPR_01)
    canaries = (CANARY_AUC, CANARY_TPR_1)
    specs = (
        *(ASR, AUC, TPR_1, TPR_01, CANARY_AUC, CANARY_TPR_1, CANARY_TPR_01),
        *(EPSILON_LOWER, EPSILON_GAUSSIAN),
    )

    def of_model(self, model: TargetModel) -> Inquiry:
        """Return one challenge per half of the candidates."""
        return self._about(model.candidates, [model.candidates.challenge(half) for half in (0, 1)])

    def of_audit(self, audit: FinishedAudit) -> Inquiry:
        """Return one challenge per half, with the reference runs."""
        return self._about(audit.candidates, audit.challenges())

    def _about(self, candidates: Candidates, challenges: list[Challenge]) -> Inquiry:
        def score(guesses: Sequence[Guess]) -> Scored:
            scored = score_members(candidates, guesses)
            return replace(scored, flags=(*scored.flags, *families_differ(scored.victims)))

        return Inquiry(challenges, score, candidates.digest())

    def metrics(self, scores: Sequence[MemberScore], terms: Terms) -> list[Metric]:
        """Return the metrics of a membership cell.

        asr, auc, tpr_at_1pct_fpr, tpr_at_0.1pct_fpr: of the average candidates, or of all if there are only canaries.
        Of canaries: canary_auc, canary_tpr_at_1pct_fpr, canary_tpr_at_0.1pct_fpr over all families together, and
        auc_FAMILY of each. If the attack abstained on some: epsilon_lower over the canaries, whose membership is by
        independent coins, and epsilon_gaussian, which bounds Gaussian mechanisms only; no asr, which needs a decision
        on every candidate.
        """
        average = [score for score in scores if not score.canary]
        canaries = [score for score in scores if score.canary]
        metrics = _figures(average or canaries, terms.seed, pooled=bool(canaries))
        if canaries:
            both = halves(canaries)
            metrics.append(_auc(CANARY_AUC, both, terms.seed))
            metrics += [record_metric(spec, tpr_at(both, rate, pooled=True)) for _, spec, rate in RATES]
            for family in sorted({score.family for score in canaries}):
                family_halves = halves([s for s in canaries if s.family == family])
                metrics.append(_auc(replace(AUC, name=f"auc_{family}"), family_halves, terms.seed))
        if any(score.decision is None for score in scores):
            for spec, gaussian in ((EPSILON_LOWER, False), (EPSILON_GAUSSIAN, True)):
                bound = _bound(canaries, DELTA if terms.delta is None else terms.delta, gaussian)
                metrics.append(record_metric(spec, bound))
        return metrics

    def headline(self, config: CellConfig) -> str:
        """Return the AUC, in audits that of the canaries."""
        return (CANARY_AUC if config.audit is not None and config.audit.canaries else AUC).name

    def columns(self, headline: str) -> tuple[tuple[str, str], ...]:
        """Return the figures of average records, or of canaries."""
        return tuple(
            (spec.name, spec.title) for spec in (self.canaries if headline == CANARY_AUC.name else self.average)
        )


def score_members(candidates: Candidates, guesses: Sequence[Guess], form: type[MemberScore] = MemberScore) -> Scored:
    """Score each half by the guess on it; ValueError: scores or decisions are missing or not finite."""
    scores = []
    families = candidates.family
    for half, guess in enumerate(guesses):
        if guess.score is None or guess.decision is None or not bool(guess.score.isfinite().all()):
            raise ValueError("a membership attack must answer finite scores and decisions for every candidate")
        silent = [False] * len(guess.score) if guess.abstain is None else guess.abstain.tolist()
        for index in (candidates.half == half).nonzero().flatten().tolist():
            scores.append(
                form(
                    index=index,
                    half=half,
                    member=bool(candidates.member[index]),
                    score=float(guess.score[index]),
                    decision=None if silent[index] else bool(guess.decision[index]),
                    family=families[index] if families else AVERAGE,
                )
            )
    return Scored(scores)


DIFFERENT = 3.0
"""Deviations by which two families' AUCs differ, from which on they are not alike: 1 in 400 of three families do."""


def families_differ(scores: Sequence[Any]) -> tuple[Flag, ...]:
    """Return a flag if members of one family of canaries are found oftener than those of another, else ().

    A figure over all families then hides the worst. Deviations are those of Hanley and McNeil (1982).
    """
    from sklearn.metrics import roc_auc_score

    areas = []
    for family in sorted({score.family for score in scores if score.canary}):
        own = [score for score in scores if score.family == family]
        inside = sum(score.member for score in own)
        if 0 < inside < len(own):
            area = float(roc_auc_score([score.member for score in own], [score.score for score in own]))
            areas.append((area, auc_deviation(area, inside, len(own) - inside), family))
    if not areas:
        return ()
    (best, first, one), (least, second, other) = max(areas), min(areas)
    if best - least <= DIFFERENT * max((first**2 + second**2) ** 0.5, 1e-12):
        return ()
    detail = f"the AUC of {one} canaries is {best:.2f}, of {other} ones {least:.2f}: the worst family counts"
    return (Flag(code="families_differ", severity="info", detail=detail),)


def auc_deviation(area: float, members: int, others: int) -> float:
    """Return the standard deviation of an AUC by Hanley and McNeil (1982)."""
    one, two = area / (2 - area), 2 * area**2 / (1 + area)
    spread = area * (1 - area) + (members - 1) * (one - area**2) + (others - 1) * (two - area**2)
    return math.sqrt(max(spread, 0.0) / (members * others))


def halves(scores: Sequence[Any]) -> list[Half]:
    """Return the candidates of each half; an abstention counts as the decision "not a member"."""
    return [
        Half(
            np.array([score.member for score in some], dtype=bool),
            np.array([score.score for score in some], dtype=np.float64),
            np.array([score.decision is True for score in some], dtype=bool),
        )
        for number in sorted({score.half for score in scores})
        for some in [[score for score in scores if score.half == number]]
    ]


def _figures(scores: Sequence[MemberScore], seed: int, pooled: bool) -> list[Metric]:
    """Return the metrics of average candidates. pooled: use one threshold for both halves if each is too small."""
    by_half = halves(scores)
    silent = any(score.decision is None for score in scores)
    no_asr = unsupported(len(scores), "the attack abstains on some candidates", 0.5) if silent else None
    return [
        record_metric(ASR, no_asr or asr(by_half, bootstrap_seed(seed, ASR.name))),
        _auc(AUC, by_half, seed),
        *(record_metric(spec, tpr_at(by_half, rate, pooled)) for spec, _, rate in RATES),
    ]


def _auc(spec: MetricSpec, both: Sequence[Half], seed: int) -> Metric:
    return record_metric(spec, auc(both, bootstrap_seed(seed, spec.name)))


def _bound(canaries: Sequence[MemberScore], delta: float, gaussian: bool) -> Estimate:
    """Return the lower bound on epsilon from guesses on half of the canaries, a number that no score changes."""
    if not canaries:
        return unsupported(0, "no canaries, whose membership alone is by independent coins", 0.0)
    # The quarter with the highest scores is guessed in, the lowest quarter out; ties are broken by index.
    order = sorted(range(len(canaries)), key=lambda place: (canaries[place].score, canaries[place].index))
    quarter = len(order) // 4
    decision, guessed = np.zeros(len(order), dtype=bool), np.zeros(len(order), dtype=bool)
    decision[order[len(order) - quarter :]] = True
    guessed[order[:quarter]] = guessed[order[len(order) - quarter :]] = True
    return epsilon_bound(np.array([score.member for score in canaries], dtype=bool), decision, guessed, delta, gaussian)


# -- Batch membership: whether a record was in the batch of a client's upload --


class BatchScore(MemberScore):
    """One candidate for a member of a batch."""

    kind: Literal["batch_member"] = "batch_member"  # type: ignore[assignment]  # each question has its own kind


class BatchMembers(_Decisions):
    """Which of the candidates were in a victim's batch? The non-members are as many records of the test part.

    An undefended federation fails this question at any accuracy, because the upload of a small batch depends strongly
    on each record, whereas a delivered model that generalizes depends little on any.
    """

    name = "batch_membership"
    title = "Members of a batch"
    source = "probe"
    reads = True
    score = BatchScore
    order = 3
    chapter = "uploads"
    distances = (DistanceLaw("batch/1", BATCH_ASR.name, decision_distance, "2 (1 - ASR)"),)
    specs = (BATCH_ASR, BATCH_AUC)

    def of_probe(self, probe: Probe) -> Inquiry:
        """Return one challenge per half of the candidates: the victims and as many others."""
        from ppbench.adversary.victims import beside

        candidates = beside(probe.victims, probe.test, probe.seeds)
        challenges = [candidates.challenge(half) for half in (0, 1)]
        score = partial(score_members, candidates, form=BatchScore)
        return Inquiry(challenges, score, candidates.digest())

    def malformed(self, guess: Guess, challenge: Challenge, plan: Plan) -> Iterator[str]:
        """Yield faults of scores and decisions: one per candidate, finite."""
        count = 0 if challenge.x is None else len(challenge.x)
        for name, value in (("score", guess.score), ("decision", guess.decision)):
            if value is None or tuple(value.shape) != (count,) or not bool(value.double().isfinite().all()):
                yield f"the guess's {name} is {value!r}; it must be finite, of shape ({count},)"

    def metrics(self, scores: Sequence[MemberScore], terms: Terms) -> list[Metric]:
        """Return batch_asr and batch_auc; intervals treat records of one batch as independent."""
        metrics = Membership().metrics(scores, terms)
        names = {ASR.name: BATCH_ASR.name, AUC.name: BATCH_AUC.name}
        return [m.model_copy(update={"name": names[m.name]}) for m in metrics if m.name in names]

    def headline(self, config: CellConfig) -> str:
        """Return the AUC."""
        return BATCH_AUC.name


# -- Client membership: whether a client took part in training, for the canary clients of an audit --


class ClientScore(Score):
    """One canary direction. member: whether its client took part; score: N(0, 1) for one that did not."""

    kind: Literal["client"] = "client"
    member: bool
    score: float

    @property
    def truth(self) -> tuple[int | str, ...]:
        """Membership."""
        return (self.member,)


class Clients(Question):
    """Which random directions belong to clients that took part? Answers give an estimate of a client's epsilon."""

    name = "client_membership"
    title = "Membership of clients"
    score = ClientScore
    source = "model"
    reads = False
    order = 5
    distances = ()
    specs = (CLIENT_EPSILON, CLIENT_EPSILON_NULL)

    def of_audit(self, audit: FinishedAudit) -> Inquiry:
        """Return one challenge about all directions. UsageError: the audit has no canary clients."""
        clients = audit.clients
        return Inquiry(
            [clients.challenge()], lambda guesses: score_clients(clients.inside, guesses[0]), clients.digest()
        )

    def metrics(self, scores: Sequence[ClientScore], terms: Terms) -> list[Metric]:
        """Return client_epsilon, of canaries that took part, and client_epsilon_null, of those that did not.

        Both at the delta of the defense's guarantee, or 1e-5.
        """
        delta = DELTA if terms.delta is None or not 0 < terms.delta < 1 else terms.delta
        metrics = []
        for spec, member in ((CLIENT_EPSILON, True), (CLIENT_EPSILON_NULL, False)):
            values = np.array([score.score for score in scores if score.member == member], dtype=np.float64)
            metrics.append(record_metric(spec, client_epsilon(values, delta)))
        return metrics

    def blind(self, scores: Sequence[ClientScore], config: CellConfig) -> tuple[float, int, float] | None:
        """Return the share of directions whose score's sign shows membership; chance is 0.5."""
        return sum((s.score > 0) == s.member for s in scores) / len(scores), len(scores), 0.5

    def sentences(self, defense: str, records: Sequence[Record]) -> list[str]:
        """Return a sentence for each estimate of a defense."""
        sentences = []
        for record in records:
            estimate, null = (record.metric(spec.name) for spec in self.specs)
            if record.config.defense.id != defense or estimate is None or estimate.value is None:
                continue
            control = record.config.defense.control
            at = "" if control is None else f", {control.name}={control.value:g}"
            null_words = "" if null is None or null.value is None else f"; absent canaries give {null.value:.2g}"
            sentences.append(
                f"Epsilon of a client against an adversary with the model, from {estimate.n} canary clients{at}: "
                f"{estimate.value:.3g} [{estimate.low:.3g}, {estimate.high:.3g}]{null_words}. An estimate, no bound."
            )
        return sentences


def score_clients(inside: Tensor, guess: Guess) -> Scored:
    """Score directions [Q] against `inside` [Q] bool; ValueError: scores are missing or not finite."""
    if guess.score is None or guess.score.shape != inside.shape or not bool(guess.score.isfinite().all()):
        raise ValueError("an attack on clients must answer a finite score for every direction")
    pairs = zip(inside.tolist(), guess.score.tolist(), strict=True)
    return Scored([ClientScore(index=i, member=member, score=score) for i, (member, score) in enumerate(pairs)])
