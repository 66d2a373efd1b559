"""Membership inference from updates: their direction, other clients' updates as the null, one batch's upload."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import vmap

from ppbench.adversary.attack import Challenge, Guess, Kind
from ppbench.attacks.membership.model_queries import AuditAttack, MembershipAttack, MembershipQuestion, finite_scores
from ppbench.base.tree import Params, finite
from ppbench.federation.bounds import Positive
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.federation.view import View

# -- Membership by the direction of updates (Nasr et al., S&P 2019; Li et al., ICLR 2023), over the whole transcript
# --
# A client that trains on x moves along the gradient of x. A plain cosine mostly separates classes: similar records
# have similar gradients. So all candidates explain an upload together, by ridge regression on their gradients
# (digits MLPs: AUC of canaries 0.96 to 0.99, of the plain cosine 0.54 to 0.63).

MOST_ENTRIES = 2**28
"""Gradient entries in memory, all candidates together: 1 GiB in float32. Above it, coordinates are sampled."""
RIDGE = 0.03
"""Strength of the ridge. Canaries' AUC varies by 0.03 between 0.001 and 0.1, and falls toward plain cosines' above."""
ENTRIES_AT_ONCE = 2**24
"""Gradient entries computed at a time."""
MOST_GRADIENTS = 60_000
"""Gradients of single candidates, at most; above it evenly spaced rounds are used. 40 rounds of one model and 640
candidates take 25,600; in round robin every client has its own model."""


def example_gradients(evidence: Evidence, x: Tensor, labels: Tensor) -> Iterator[tuple[slice, Params]]:
    """Yield the simulated update on each example alone, a slice of examples at a time: leaves [q, *parameter].

    Takes examples [Q, *shape] and labels [Q, C], in the dtype and on the device to compute in, and evidence without
    nuisance unknowns. Evidence about a weighted cohort simulates one batch per slot; then every slot holds the example.
    """
    copies = 1 if evidence.params is not None else len(evidence.unit)

    def alone(one: Tensor, label: Tensor) -> Params:
        return evidence.simulate(one.expand(copies, 1, *one.shape), label.expand(copies, 1, *label.shape))

    at_once = max(1, ENTRIES_AT_ONCE // max(1, copies * sum(value.numel() for value in evidence.observed.values())))
    for first in range(0, len(x), at_once):
        part = slice(first, first + at_once)
        yield part, vmap(alone)(x[part], labels[part])


def _flat(evidence: Evidence, values: Params, kept: Tensor | None) -> Tensor:
    """Return leaves [q, *parameter] as rows [q, P], in the order of the observation, times the root of its weight."""
    parts = []
    for name in evidence.observed:
        value = values[name]
        if evidence.weight is not None:
            value = value * evidence.weight[name].to(value).sqrt()
        parts.append(value.flatten(1))
    whole: Tensor = torch.cat(parts, 1)
    return whole if kept is None else whole[:, kept]


def _normalize(rows: Tensor) -> Tensor:
    """Scale rows [q, P] to norm 1 in place and return [q] bool, which were finite; the others become 0."""
    norms: Tensor = rows.norm(dim=1)
    known = norms.isfinite()
    if not known.all():
        rows[~known] = 0
    rows /= torch.where(known, norms, 1.0).clamp(min=torch.finfo(rows.dtype).tiny)[:, None]
    return known


@dataclass(frozen=True)
class Directions:
    """Gradients of all candidates at one round's weights: rows [Q, P'] at norm 1, 0 where one is not finite.

    kept: [P'] the coordinates that are compared, or None for all; known: [Q] bool, rows that are finite; inverse:
    [Q, Q] float64, (rows rows^T + ridge)^-1, the identity for plain cosines.
    """

    rows: Tensor
    kept: Tensor | None
    known: Tensor
    inverse: Tensor

    @staticmethod
    def of(
        evidence: Evidence, x: Tensor, labels: Tensor, ridge: float | None, dtype: torch.dtype = torch.float32
    ) -> Directions:
        """Return the directions of candidates at the weights that `evidence` is about; ridge: None for plain cosines.

        If they had more than `MOST_ENTRIES` entries, the same random coordinates of all are compared: an upload that is
        a sum of gradients is one in every coordinate.
        """
        like = max(evidence.observed.values(), key=torch.numel)
        x, labels = x.to(like.device, dtype), labels.to(like.device, dtype)
        total, most = sum(value.numel() for value in evidence.observed.values()), max(1, MOST_ENTRIES // max(1, len(x)))
        kept = None
        if total > most:
            kept = torch.randperm(total, generator=torch.Generator().manual_seed(0))[:most].sort().values
            kept = kept.to(like.device)
        rows = torch.empty(len(x), min(total, most), dtype=dtype, device=like.device)
        for part, leaves in example_gradients(evidence, x, labels):
            rows[part] = _flat(evidence, leaves, kept)
        known = _normalize(rows)
        eye = torch.eye(len(x), dtype=torch.float64, device=like.device)
        alone = Directions(rows, kept, known, eye)
        return alone if ridge is None else alone.at(ridge)

    def at(self, ridge: float) -> Directions:
        """Return the directions with another strength of the ridge."""
        eye = torch.eye(len(self.rows), dtype=torch.float64, device=self.rows.device)
        return replace(self, inverse=torch.linalg.inv((self.rows @ self.rows.T).double() + ridge * eye))

    def explain(self, evidence: Evidence) -> Tensor:
        """Return each candidate's coefficient [Q] float64, on CPU; NaN for a zero or non-finite upload or gradient."""
        observed = {name: value[None].to(self.rows) for name, value in evidence.observed.items()}
        upload = _flat(evidence, observed, self.kept)
        usable = bool(_normalize(upload)[0]) and bool(upload.any())
        explained = (self.inverse @ (self.rows @ upload[0]).double()).cpu()
        return torch.where(self.known.cpu() & usable, explained, torch.nan)


@dataclass(frozen=True)
class LastCoefficients:
    """The coefficients that were computed last: several attacks need the same ones of a view."""

    view: weakref.ref[View]
    x: Tensor
    labels: Tensor
    ridge: float | None
    coefficients: Tensor

    def fits(self, view: View, x: Tensor, labels: Tensor, ridge: float | None) -> bool:
        """Return whether they were computed from these arguments."""
        same = self.view() is view and self.ridge == ridge and self.x.shape == x.shape
        return same and torch.equal(self.x, x) and torch.equal(self.labels, labels)


_last: LastCoefficients | None = None


def directed(
    seen: Iterable[Evidence], x: Tensor, labels: Tensor, ridge: float | None, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[Evidence, Directions]]:
    """Yield each readable evidence with the candidates' directions at its weights.

    Evidence with nuisance unknowns, or about weights that are not finite, is skipped.
    """
    shared: dict[int, Directions] = {}
    for evidence in seen:
        if evidence.nuisance or not finite(evidence.params):
            continue
        key = id(evidence.simulate)
        if key not in shared:
            shared = {key: Directions.of(evidence, x, labels, ridge, dtype)}  # of one model at a time
        yield evidence, shared[key]


def update_coefficients(view: View, x: Tensor, labels: Tensor, ridge: float | None) -> Tensor:
    """Return `coefficients`; cached from the last call if the arguments are the same."""
    global _last
    if _last is None or not _last.fits(view, x, labels, ridge):
        fresh = coefficients(view, x, labels, ridge)
        _last = LastCoefficients(weakref.ref(view), x.clone(), labels.clone(), ridge, fresh)
    return _last.coefficients.clone()


def affordable(view: View, count: int) -> list[View]:
    """Return evenly spaced rounds of `view`, the last included, with at most `MOST_GRADIENTS` gradients."""
    parts = view.by_round()
    seen = view.defense.evidence(parts[0]) if parts else []
    models = {id(e.simulate): 1 if e.params is not None else len(e.unit) for e in seen}  # a sum simulates all slots
    stride = max(1, -(-len(parts) * max(1, sum(models.values())) * count // MOST_GRADIENTS))
    return parts[::-1][::stride][::-1]


def coefficients(view: View, x: Tensor, labels: Tensor, ridge: float | None) -> Tensor:
    """Return how much of each client's upload each candidate explains, [T, N, Q] float64, on CPU, by round.

    The gradients are compared with `Defense.evidence`, one round at a time. Where only a sum over some clients can be
    read, each of them gets the sum's coefficient. NaN where a client's upload of a round cannot be read, is 0 or not
    finite, or a candidate's gradient is not finite. The ridge is in units of a candidate's own squared norm; None for
    plain cosines.
    """
    assert view.plan.net  # built here: under vmap its initialization could not draw
    tables = []
    for part in affordable(view, len(x)):
        table = torch.full((view.plan.clients, len(x)), torch.nan, dtype=torch.float64)
        for evidence, directions in directed(view.defense.evidence(part), x, labels, ridge):
            for slot in evidence.unit:
                table[slot.client] = directions.explain(evidence)
        tables.append(table)
    return torch.stack(tables) if tables else torch.full((0, view.plan.clients, len(x)), torch.nan, dtype=torch.float64)


@dataclass(frozen=True)
class UpdateCosine(AuditAttack):
    """A record is a member if its gradient, at the weights of each round, keeps explaining some client's upload.

    The score is the largest over the clients, since a record's owner is unknown, of the mean over all rounds (evenly
    spaced ones if there are too many, see `MOST_GRADIENTS`).

    Attributes:
        ridge: strength of the ridge; the weaker it is, the more records compete for an upload.
        alone: whether each record is judged by its cosine alone, as published.
    """

    name: ClassVar[str] = "mia_update_cosine"
    next_token: ClassVar[bool] = True
    threats: ClassVar[tuple[str, ...]] = ("server/1",)
    audit: ClassVar = "rounds"
    reference: ClassVar[str] = (
        "Nasr et al., Comprehensive Privacy Analysis of Deep Learning, S&P 2019; "
        "Li et al., Effective Passive Membership Inference Attacks in Federated Learning, ICLR 2023; "
        "joint regression: this project"
    )

    ridge: Positive = RIDGE
    alone: bool = False

    def signal(self, view: View, challenge: Challenge) -> Tensor:
        """Return the largest mean statistic [Q] of a client; NaN where no client has one."""
        assert challenge.x is not None and challenge.labels is not None  # `run` has checked
        explained = update_coefficients(view, challenge.x, challenge.labels, None if self.alone else self.ridge)
        best = self.statistics(explained).nanmean(0).nan_to_num(nan=-torch.inf).max(0).values
        return torch.where(best.isfinite(), best, torch.nan)

    def statistics(self, explained: Tensor) -> Tensor:
        """Return the statistics [T, N, Q] of each round and client, from `coefficients`: these."""
        return explained


# -- FedMIA (Zhu et al., CVPR 2025): the other clients' updates are the null, round by round; no reference models --

FEWEST_OTHERS = 2
"""Other clients whose updates must be readable: one has no spread."""


SHRINK = 4.0
"""Weight, in clients, of the variance pooled over candidates: two or nine others estimate a record's own badly."""
SMALLEST_SPREAD = 1e-6
"""Spread below which all others count as equal."""


def against_others(statistics: Tensor) -> Tensor:
    """Return Phi((s - mean) / sd) of each client's statistic under the other clients' of its round, [T, N, Q] float64.

    Takes statistics [T, N, Q], NaN for none. NaN where fewer than two others have one, or all others have the same (as
    from a sum over clients).
    """
    known = statistics.isfinite()
    value = torch.where(known, statistics, 0.0)
    n = known.sum(1, keepdim=True) - known.long()
    mean = (value.sum(1, keepdim=True) - value) / n.clamp(min=1)
    total = value.square().sum(1, keepdim=True) - value.square()
    squares, free = (total - n * mean.square()).clamp(min=0), (n - 1).clamp(min=0)
    pooled = torch.where(known, squares, 0.0).sum(2, keepdim=True) / free.where(known, 0).sum(2, keepdim=True).clamp(
        min=1
    )
    spread = ((SHRINK * pooled + squares) / (SHRINK + free)).sqrt()
    valid = known & (n >= FEWEST_OTHERS) & (spread > SMALLEST_SPREAD)
    return torch.where(valid, torch.special.ndtr((statistics - mean) / spread), torch.nan)


@dataclass(frozen=True)
class FedMIA(UpdateCosine):
    """A record is a member if its gradient fits one client's updates far better than the other clients'.

    The statistic is how much of an update the candidate's gradient explains. Its probability under a Gaussian fitted to
    the other clients' statistics in that round is averaged over all rounds; the score is the largest over clients,
    since a record's owner is unknown. With `alone`, the statistic is each record's cosine, as published (FedMIA-II).
    """

    name: ClassVar[str] = "mia_fedmia"
    reference: ClassVar[str] = (
        "Zhu et al., FedMIA: An Effective Membership Inference Attack Exploiting 'All for One' Principle in Federated "
        "Learning, CVPR 2025; joint regression: this project"
    )

    def statistics(self, explained: Tensor) -> Tensor:
        """Return the probabilities [T, N, Q]; NaN where fewer than three clients' uploads can be read singly."""
        return against_others(explained)


# -- Members of a batch by its upload: how much of the gradient each candidate explains, all candidates together --

RIDGES = (RIDGE, 1e-3, 1e-5, 1e-7, 1e-9)
"""Strengths of the ridge, in units of a candidate's own squared norm. The weakest separates exact gradients that are
almost parallel, as at a sigmoid network's random weights; noise on uploads needs a strong one."""


@dataclass(frozen=True)
class UploadMembers(MembershipAttack):
    """A record was in some batch if its gradient explains some upload beside all other candidates' gradients.

    The statistic is that of `mia_update_cosine` for one upload, in float64; the score is the largest over uploads. The
    strength of the ridge, which should fit the noise, is the one that best separates the known half.
    """

    name: ClassVar[str] = "mia_upload"
    next_token: ClassVar[bool] = True
    kind: ClassVar[Kind] = "batch_membership"
    threats: ClassVar[tuple[str, ...]] = ("server/1", "eavesdropper/1", "client/1", "collusion/1")
    reference: ClassVar[str] = (
        "Li et al., Effective Passive Membership Inference Attacks in Federated Learning, ICLR 2023; "
        "joint regression: this project"
    )

    def suits(self, plan: Plan) -> bool:
        """Return whether records have labels that are a few numbers, not maps."""
        return not plan.net.pixelwise

    def signal(self, view: View, challenge: Challenge) -> Tensor:
        """Return the largest coefficient over all uploads by each ridge, [Q, ridges]; NaN where none can be read."""
        assert challenge.x is not None and challenge.labels is not None  # `run` has checked
        assert view.plan.net  # built here: under vmap its initialization could not draw
        best = torch.full((len(challenge.x), len(RIDGES)), -torch.inf, dtype=torch.float64)
        known: list[Directions] = []
        for evidence, alone in directed(self.evidence(view), challenge.x, challenge.labels, None, torch.float64):
            if not known or known[0].rows is not alone.rows:
                known = [alone.at(ridge) for ridge in RIDGES]
            explained = torch.stack([directions.explain(evidence) for directions in known], 1)
            best = best.maximum(explained.nan_to_num(nan=-torch.inf))
        return torch.where(best.isfinite(), best, torch.nan)

    def answer(self, plan: Plan, signal: Tensor, question: MembershipQuestion, generator: torch.Generator) -> Guess:
        """Return scores [Q] and decisions by the ridge that best separates the known half; of equals the strongest."""
        from sklearn.metrics import roc_auc_score

        member = question.members
        if not member.any() or member.all():
            return super().answer(plan, signal[:, 0], question, generator)
        known_scores = [finite_scores(column)[question.is_known].numpy() for column in signal.T]
        areas = [float(roc_auc_score(member.numpy(), scores)) for scores in known_scores]
        return super().answer(plan, signal[:, areas.index(max(areas))], question, generator)
