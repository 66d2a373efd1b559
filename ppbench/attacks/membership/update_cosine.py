"""Membership by the direction of updates (Nasr et al., S&P 2019; Li et al., ICLR 2023), over the whole transcript.

A client that trains on x moves along the gradient of x. A cosine by itself mostly tells classes: gradients of alike
records are alike. So all candidates explain an upload together, by ridge regression on their gradients (digits MLPs:
AUC of canaries .96 to .99 where the plain cosine has .54 to .63).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import vmap

from ppbench.adversary.attack import Challenge
from ppbench.attacks.membership.base import AuditAttack
from ppbench.base.tree import Params, finite
from ppbench.federation.bounds import Positive
from ppbench.federation.evidence import Evidence
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER

HELD = 2**28
"""Gradient entries held at a time, all candidates together: 1 GiB in float32. Above it, coordinates are sampled."""
RIDGE = 0.03
"""Strength of the ridge. Canaries' AUC varies by .03 between .001 and .1, and falls toward plain cosines' above."""
CHUNK = 2**24
"""Gradient entries computed at a time."""
MOST = 60_000
"""Gradients of single candidates at most; above it rounds are taken evenly spaced. 40 rounds of one model and 640
candidates take 25,600; in round robin every client has a model of its own."""


def rounds_of(view: View) -> list[View]:
    """Return, for every round in which anybody uploaded, the part of `view` that is about it alone, in order."""
    parts = []
    for number in sorted({letter.round for letter in view.mail if letter.receiver == SERVER and letter.round > 0}):
        mail = tuple(letter for letter in view.mail if letter.round == number)
        states = tuple(state for state in view.states if state.round == number)
        parts.append(replace(view, mail=mail, states=states))
    return parts


def example_gradients(evidence: Evidence, x: Tensor, labels: Tensor) -> Iterator[tuple[slice, Params]]:
    """Yield, some examples at a time, what an update on each example alone would be: leaves [q, *parameter].

    Of examples [Q, *shape] and labels [Q, C], in the dtype and on the device to compute in. Evidence, without nuisance
    unknowns, about a weighted cohort simulates as many batches as it has slots; then every slot holds the example.
    """
    copies = 1 if evidence.params is not None else len(evidence.unit)

    def alone(one: Tensor, label: Tensor) -> Params:
        found: Params = evidence.simulate(one.expand(copies, 1, *one.shape), label.expand(copies, 1, *label.shape))
        return found

    many = max(1, CHUNK // max(1, copies * sum(value.numel() for value in evidence.observed.values())))
    for first in range(0, len(x), many):
        part = slice(first, first + many)
        yield part, vmap(alone)(x[part], labels[part])


def _flat(evidence: Evidence, values: Params, kept: Tensor | None) -> Tensor:
    """Return [q, P] of leaves [q, *parameter] in the order of the observation, times the root of its precision."""
    parts = []
    for name in evidence.observed:
        value = values[name]
        if evidence.weight is not None:
            value = value * evidence.weight[name].to(value).sqrt()
        parts.append(value.flatten(1))
    whole: Tensor = torch.cat(parts, 1)
    return whole if kept is None else whole[:, kept]


def _normalize(rows: Tensor) -> Tensor:
    """Bring rows [q, P] to norm 1 in place and return [q] bool, which were finite: the others become 0, as 0 stays."""
    norms: Tensor = rows.norm(dim=1)
    known = norms.isfinite()
    if not known.all():
        rows[~known] = 0
    rows /= torch.where(known, norms, 1.0).clamp(min=torch.finfo(rows.dtype).tiny)[:, None]
    return known


@dataclass(frozen=True)
class Directions:
    """Gradients of all candidates at one round's weights: rows [Q, P'] at norm 1, 0 where one is not finite.

    kept: [P'] the coordinates that are compared, or None for all; known: [Q] bool, whose gradient is finite; inverse:
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

        Where they would hold more than `HELD` entries, the same random coordinates of all are compared: an upload that
        is a sum of gradients is one in every coordinate.
        """
        like = max(evidence.observed.values(), key=torch.numel)
        x, labels = x.to(like.device, dtype), labels.to(like.device, dtype)
        total, most = sum(value.numel() for value in evidence.observed.values()), max(1, HELD // max(1, len(x)))
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
        """Return them with another strength of the ridge."""
        eye = torch.eye(len(self.rows), dtype=torch.float64, device=self.rows.device)
        return replace(self, inverse=torch.linalg.inv((self.rows @ self.rows.T).double() + ridge * eye))

    def explain(self, evidence: Evidence) -> Tensor:
        """Return each candidate's coefficient [Q] float64, on CPU; NaN where there is nothing to compare."""
        observed = {name: value[None].to(self.rows) for name, value in evidence.observed.items()}
        upload = _flat(evidence, observed, self.kept)
        usable = bool(_normalize(upload)[0]) and bool(upload.any())
        found = (self.inverse @ (self.rows @ upload[0]).double()).cpu()
        return torch.where(self.known.cpu() & usable, found, torch.nan)


@dataclass(frozen=True)
class Known:
    """The coefficients that were computed last: several attacks ask for the same of one view."""

    view: weakref.ref[View]
    x: Tensor
    labels: Tensor
    ridge: float | None
    found: Tensor

    def fits(self, view: View, x: Tensor, labels: Tensor, ridge: float | None) -> bool:
        """Return whether they are those asked for."""
        same = self.view() is view and self.ridge == ridge and self.x.shape == x.shape
        return same and torch.equal(self.x, x) and torch.equal(self.labels, labels)


_known: Known | None = None


def directed(
    seen: Iterable[Evidence], x: Tensor, labels: Tensor, ridge: float | None, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[Evidence, Directions]]:
    """Yield each readable evidence with the candidates' directions at its weights.

    Evidence with nuisance unknowns, or about weights that are not finite, is left out.
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
    """Return `coefficients`, those of the last call where it was about the same view and candidates."""
    global _known
    if _known is None or not _known.fits(view, x, labels, ridge):
        found = coefficients(view, x, labels, ridge)
        _known = Known(weakref.ref(view), x.clone(), labels.clone(), ridge, found)
    return _known.found.clone()


def affordable(view: View, count: int) -> list[View]:
    """Return the rounds of `view`, evenly spaced, the last included, with at most `MOST` candidates' gradients."""
    parts = rounds_of(view)
    seen = view.defense.evidence(parts[0]) if parts else []
    models = {id(e.simulate): 1 if e.params is not None else len(e.unit) for e in seen}  # a sum simulates all slots
    stride = max(1, -(-len(parts) * max(1, sum(models.values())) * count // MOST))
    return parts[::-1][::stride][::-1]


def coefficients(view: View, x: Tensor, labels: Tensor, ridge: float | None) -> Tensor:
    """Return how much of each client's upload each candidate explains, [T, N, Q] float64, on CPU, round by round.

    What a defense's own server makes of the uploads is compared (`Defense.evidence`, one round at a time). Where only
    a sum over some clients can be read, each of them gets the sum's coefficient. NaN where a client's upload of a round
    cannot be read, is 0 or not finite, or a candidate's gradient is not finite. The ridge is in units of a candidate's
    own squared norm; None for plain cosines.
    """
    assert view.plan.net  # built here: under vmap its initialization could not draw
    found = []
    for part in affordable(view, len(x)):
        table = torch.full((view.plan.clients, len(x)), torch.nan, dtype=torch.float64)
        for evidence, directions in directed(view.defense.evidence(part), x, labels, ridge):
            for slot in evidence.unit:
                table[slot.client] = directions.explain(evidence)
        found.append(table)
    return torch.stack(found) if found else torch.full((0, view.plan.clients, len(x)), torch.nan, dtype=torch.float64)


@dataclass(frozen=True)
class UpdateCosine(AuditAttack):
    """A record is a member when its gradient, at the weights of each round, keeps explaining some client's upload.

    The score is the largest over the clients, since a record's owner is not known, of the mean over all rounds (evenly
    spaced ones where there are too many, see `MOST`).

    Attributes:
        ridge: strength of the ridge; the weaker it is, the more records compete for an upload.
        alone: whether each record is judged by its cosine alone, as published.
    """

    name: ClassVar[str] = "mia_update_cosine"
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
        """Return the largest mean coefficient [Q]; NaN where no upload can be read."""
        assert challenge.x is not None and challenge.labels is not None  # `run` has checked
        found = update_coefficients(view, challenge.x, challenge.labels, None if self.alone else self.ridge)
        means = found.nanmean(0)
        best = means.nan_to_num(nan=-torch.inf).max(0).values
        return torch.where(best.isfinite(), best, torch.nan)
