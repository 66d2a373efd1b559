"""Attacks on MP-DP through what it sends without noise: the surrogates Psi and Phi (here sigma and beta).

Yang et al. (2024) add noise to the gradient G at the perturbed weights, but not to Psi and Phi. One example: with
e = yhat - ybar and q = e / alpha, Psi_i = grad(alpha e_i) and Phi = grad(alpha^2 / 2) give G exactly, as
sum_i q_i Psi_i - ||q||^2 Phi, and q follows from the two by Euler's identities (`noiseless_moments`): for the server at
the true weights, for a listener at those of an ordinary network, as transitional layers fold away. Psi and Phi of a
batch are themselves exact functions of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.attacks.adaptive.inversion import invert_evidence, surrogate_simulation
from ppbench.attacks.adaptive.perturbed import Moments, by_rows, noiseless_moments
from ppbench.attacks.labels import LabelRecovery, Reader, greedy_multiset
from ppbench.base.tree import Params, tree_map
from ppbench.defenses.mpdp.expansion import fold
from ppbench.defenses.mpdp.model_perturbation import ModelPerturbation, tree_norm
from ppbench.defenses.mpdp.protocol import MPDPH
from ppbench.defenses.pbpfl.perturbation import (
    HEAD_WEIGHT,
    Perturbed,
    Surrogates,
    combine,
    exchanges,
    mask,
    perturbed_outputs,
    whole_cohorts,
)
from ppbench.federation.bounds import PositiveInt
from ppbench.federation.evidence import Evidence, Shared
from ppbench.federation.plan import Plan
from ppbench.federation.view import Exchange, View
from ppbench.federation.wire import Slot
from ppbench.nets.channels import Channels, Factor, channels_of

# -- Labels from MP-DP's noiseless surrogates: the label of one example, a weighted histogram of a batch --
# Psi_i = grad mean alpha (yhat_i - ybar_i) is of degree two in the weights that read the input and its first part of
# degree one in the head: Euler's identities give mean alpha ybar_i, the share of alpha that falls to class i (see
# `noiseless_moments`). It is exact for any noise on G.

CLIP_ROUNDING = 1e-6
"""Relative distance from the bound within which a norm counts as clipped."""
TARGETS = frozenset({"mpdp", "mp_dp_naive", "mp_cdp", "mpdp_h"})


def mask_directions(upload: Surrogates, public: Tensor) -> Tensor:
    """Return the directions [m, C], float64, of an upload's sigma: the public one, or the unit vectors."""
    sigma = upload.sigma[HEAD_WEIGHT]
    return public.double()[None] if len(public) else torch.eye(len(sigma), dtype=torch.float64, device=sigma.device)


def sent_share(view: View, exchange: Exchange) -> float | None:
    """Return the ratio of an upload's surrogates to the true ones: 1 / bound, less where clipped; None: unknown.

    The clipping factor is secret. One example reveals it where each class has its own coefficient: the moments
    alpha ybar_i of a one-hot label sum to alpha, and alpha^2 is known. A G without noise and below the bound was not
    clipped.
    """
    defense, upload = view.defense, exchange.answer
    assert isinstance(defense, ModelPerturbation)
    if not defense.shrinks:
        return 1 / defense.bound
    if view.plan.local.batch == 1 and len(upload.sigma[HEAD_WEIGHT]) == view.plan.spec.classes:
        moments = noiseless_moments(view.plan, upload, exchange.request.params)
        return float(moments.labels.sum() ** 2 / moments.square)
    silent = defense.clip == "seen" and defense.noise_variance(view.plan, None) == 0
    return 1 / defense.bound if silent and float(tree_norm(upload.g)) < 1 - CLIP_ROUNDING else None


def only_label(moments: Moments, along: Tensor, share: float | None, usual: float) -> Tensor:
    """Return the one-hot label [1, 1, C] float32 of one example: the class whose d_k fit alpha d_k^T ybar best.

    share: see `sent_share`. Where it is unknown, one direction leaves one equation. It implies an alpha for each class;
    the class whose alpha is nearest to `usual` is returned.
    """
    if share is None:
        implied = moments.square * along[0] / moments.labels[0]
        distance = (implied.clamp(min=1e-300) / usual).log().abs()
    else:
        alpha = (moments.square / share).clamp(min=0).sqrt()
        distance = (moments.labels[:, None] / share - alpha * along).square().sum(0)
    distance = distance.nan_to_num(nan=torch.inf)
    return one_hot(distance.argmin(), along.shape[1]).float()[None, None]


def usual_alpha(view: View, params: Params) -> float:
    """Return alpha, the sum of the head's inputs at perturbed weights, for a mid-grey input."""
    low, high = view.plan.data_range
    grey = torch.full((1, *view.plan.spec.shape), (low + high) / 2).to(params[HEAD_WEIGHT])
    defense = view.defense
    assert isinstance(defense, ModelPerturbation)
    return float(perturbed_outputs(defense.network(view.plan), params, grey, masked_bias=False)[1])


def readable_units(view: View) -> list[tuple[list[Exchange], Surrogates]]:
    """Return the uploads whose Psi and Phi can be read: one by one, or the means of whole cohorts (mpdp_h)."""
    if isinstance(view.defense, MPDPH):
        return [(unit, view.defense.mean([e.answer for e in unit])) for unit in whole_cohorts(view)]
    return [([e], e.answer) for e in exchanges(view)] if isinstance(view.defense, ModelPerturbation) else []


def single_labels(view: View) -> dict[tuple[Slot, ...], Tensor]:
    """Return the one-hot label [1, 1, C] of every upload of one example."""
    known: dict[tuple[Slot, ...], Tensor] = {}
    if view.plan.local.batch != 1 or not isinstance(view.defense, ModelPerturbation) or view.defense.sums:
        return known
    for (exchange,), upload in readable_units(view):
        moments = noiseless_moments(view.plan, upload, exchange.request.params)
        along = mask_directions(upload, exchange.request.direction)
        share, usual = sent_share(view, exchange), usual_alpha(view, exchange.request.params)
        known[(exchange.slot,)] = only_label(moments, along, share, usual)
    return known


@dataclass(frozen=True)
class MPDPHistogram(LabelRecovery):
    """Reads the alpha-weighted label histogram mean alpha ybar off Psi, exactly at any batch size and any noise.

    Its zeros are exact: a class is present or not. Counts are the shares, rounded to the batch's size. One coefficient
    for all classes (gamma=scalar) leaves one equation, enough for one example; if that was clipped, the class depends
    on a guess of the input's brightness. Where only sums can be read (mpdp_h) the histogram is that of the whole
    cohort. On other defenses the labels are read as by `label_recovery`.
    """

    name: ClassVar[str] = "mpdp_histogram"
    version: ClassVar[str] = "2"
    threats: ClassVar[tuple[str, ...]] = ("server/1", "eavesdropper/1")
    adaptive: ClassVar[bool] = True
    targets: ClassVar[frozenset[str] | None] = TARGETS
    reference: ClassVar[str] = "this project; Psi of Yang et al. 2024 by Euler's identities"

    def reader(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> Reader:
        """Return the labels of units whose histogram can be read."""
        counted = {u: y.flatten(0, 1).argmax(-1) for u, y in counted_labels(view, challenges).items()}
        return lambda challenge: counted.get(challenge.unit)


def histograms(view: View) -> dict[tuple[Slot, ...], Tensor]:
    """Return sum alpha_n ybar_n / sum alpha_n [C] float64 by unit, 0 for absent classes; none for one row of sigma."""
    shares = {}
    for unit, upload in readable_units(view):
        params = unit[0].request.params
        if len(upload.sigma[HEAD_WEIGHT]) != view.plan.spec.classes:
            continue
        moments = noiseless_moments(view.plan, upload, params)
        size = (moments.error.abs() + moments.labels.abs()).max()
        rounding = torch.finfo(params[HEAD_WEIGHT].dtype).eps ** 0.5 * size
        weighted = torch.where(moments.labels > rounding, moments.labels, 0.0)
        if bool(weighted.isfinite().all()) and float(weighted.sum()) > 0:
            shares[tuple(e.slot for e in unit)] = weighted / weighted.sum()
    return shares


def counted_labels(view: View, challenges: Sequence[Challenge]) -> dict[tuple[Slot, ...], Tensor]:
    """Return one-hot labels [U, B, C] of every challenge whose histogram can be read, in ascending order."""
    shares, counted = histograms(view), single_labels(view)
    for challenge in challenges:
        share, count = shares.get(challenge.unit), len(challenge.unit) * challenge.batch
        if challenge.unit not in counted and share is not None:
            labels = greedy_multiset(count * share, share > 0, count)
            counted[challenge.unit] = one_hot(labels, len(share)).float().unflatten(0, (len(challenge.unit), -1))
    return counted


CHANNELS = 2
"""How many combinations of the Psi_i a batch is matched with; each is a long vector and costs a backward pass."""


def rebuilt_gradient(plan: Plan, upload: Surrogates, params: Params) -> Params:
    """Return the noiseless G of one example, up to a factor, from sigma [C, ...] and beta; NaN where no unit fires."""
    moments = noiseless_moments(plan, upload, params)
    ratio = moments.error / moments.square
    return {
        n: torch.tensordot(ratio, sigma.double(), 1) - ratio.square().sum() * upload.beta[n].double()
        for n, sigma in upload.sigma.items()
    }


@dataclass(frozen=True)
class AdaptiveMPDP(Attack):
    """Rebuilds the exact gradient from the noiseless surrogates and inverts it; batches are matched with surrogates.

    One example and one secret coefficient per class: the exact gradient of the true network (server) or of the folded
    perturbed one (listener). Else Phi and combinations of the Psi_i at the perturbed weights: of a client, or of the
    whole cohort where only sums can be read (mpdp_h), also without noise. A G without noise (mp_cdp) is used as it is.
    A client's clipping factor follows from the same identities, or is simulated (`sent_share`).
    """

    budget: PositiveInt = 1800

    name: ClassVar[str] = "adaptive_mpdp"
    version: ClassVar[str] = "7"
    kind: ClassVar[Kind] = "reconstruction"
    threats: ClassVar[tuple[str, ...]] = ("server/1", "eavesdropper/1")
    adaptive: ClassVar[bool] = True
    targets: ClassVar[frozenset[str] | None] = TARGETS
    reference: ClassVar[str] = "this project; Psi and Phi of Yang et al. 2024 by Euler's identities"

    def evidence(self, view: View) -> list[Evidence]:
        """Return the evidence to match: exact wherever single uploads can be read."""
        defense = view.defense
        if not isinstance(defense, ModelPerturbation) or not exchanges(view):
            return view.defense.evidence(view)
        exact_evidence, evidence = ExactEvidence(view, defense), []
        if isinstance(defense, MPDPH):
            return [
                exact_evidence.channels(tuple(e.slot for e in unit), unit[0].request, mean)
                for unit, mean in readable_units(view)
            ]
        silent = defense.noise_variance(view.plan, None) == 0
        for exchange in exchanges(view):
            vector = len(exchange.answer.sigma[HEAD_WEIGHT]) == view.plan.spec.classes
            if silent:
                evidence.append(exact_evidence.gradient(exchange, exchange.answer.g))
            elif view.plan.local.batch == 1 and vector:
                exact = rebuilt_gradient(view.plan, exchange.answer, exchange.request.params)
                evidence.append(exact_evidence.gradient(exchange, exact))
            else:
                evidence.append(exact_evidence.channels((exchange.slot,), exchange.request, exchange.answer))
        return evidence

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess per challenge; labels of single examples are read off the surrogates."""
        counted = counted_labels(view, challenges)
        labelled = [
            challenge if challenge.y is not None else replace(challenge, y=counted.get(challenge.unit))
            for challenge in challenges
        ]
        return invert_evidence(self.evidence(view), view.plan, labelled, generator, self.budget)


class ExactEvidence:
    """Makes exact evidence of single uploads; victims at equal weights share a simulation."""

    def __init__(self, view: View, defense: ModelPerturbation) -> None:
        self.view, self.defense, self.shared = view, defense, Shared(view.plan)
        self.expansion = defense.expansion(view.plan)
        self.folded: list[tuple[Params, Params, Params]] = []

    def gradient(self, exchange: Exchange, g: Params) -> Evidence:
        """Return the exact gradient at the true weights (server), or at weights that a listener can make of them.

        Where it was clipped by an unknown factor, directions are compared.
        """
        server, share = self.view.state_at(exchange), sent_share(self.view, exchange)
        if server is None:
            params, sent = self._unmasked(exchange, g)
        else:
            params, upload = server.params, replace(exchange.answer, g=g)
            sent = tree_map(lambda t: t / self.defense.bound, self.defense.recover(self.view.plan, server, upload))
        observed = tree_map(lambda t: t / (share or 1.0), sent)
        evidence = Evidence((exchange.slot,), observed, self.shared.at(params), params, channel="rebuilt")
        return evidence if share else replace(evidence, measure="cosine")

    def _unmasked(self, exchange: Exchange, g: Params) -> tuple[Params, Params]:
        """Return weights and the gradient sent for them, both less the mask estimated from the head's columns."""
        params, along = exchange.request.params, mask_directions(exchange.answer, exchange.request.direction)
        coefficients = by_rows(params[HEAD_WEIGHT].double(), along).coefficients
        r = coefficients @ along
        exact = combine(tree_map(lambda t: t.double(), replace(exchange.answer, g=g)), coefficients, r @ r)
        weights, units = self.fold(params, mask({n: v.double() for n, v in params.items()}, -r, False))
        return weights, {n: value / units[n] for n, value in exact.items()}

    def fold(self, perturbed: Params, weights: Params) -> tuple[Params, Params]:
        """Return weights of the plan's network that compute what `weights` do, and their quotient by `weights`.

        Transitional layers are folded away and hidden channels brought to canonical units, in which a search is as well
        conditioned as at weights without hidden scales. A gradient at `weights` is the quotient times that at the
        returned ones. Computed once per broadcast `perturbed`.
        """
        for known, params, factor in self.folded:
            if all(torch.equal(known[n], value) for n, value in perturbed.items()):
                return params, factor
        odd, between = self.expansion.split(weights)
        between = {n: torch.where(value == 0, 1.0, value) for n, value in between.items()}  # no server sends zeros
        ones = {n: torch.ones_like(value) for n, value in odd.items()}
        params, factor = (fold(self.expansion, {**tree, **between}) for tree in (odd, ones))
        free = channels_of(self.view.plan.spec)
        units = free.multipliers(canonical_scales(free, params).to(weights[HEAD_WEIGHT].device))
        params, factor = ({n: units[n] * value for n, value in tree.items()} for tree in (params, factor))
        self.folded.append((perturbed, params, factor))
        return params, factor

    def channels(self, unit: tuple[Slot, ...], broadcast: Perturbed, answer: Surrogates) -> Evidence:
        """Return Phi, named as the parameters, and combinations "psi/..." of the Psi_i: norm 1, in canonical units."""
        weights = {n: v.double() for n, v in broadcast.params.items()}
        odd, transitional = self.expansion.split(weights)
        along = mask_directions(answer, broadcast.direction)
        mix = torch.randn(CHANNELS, len(along), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        mix = (torch.ones(1, 1, dtype=torch.float64) if len(along) == 1 else mix).to(along.device)
        _, units = self.fold(broadcast.params, weights)
        mixed = {n: torch.tensordot(mix, value.double(), 1) / units[n] for n, value in answer.sigma.items()}
        phi = {n: value.double() / units[n] for n, value in answer.beta.items()}
        sizes, bound, clips = (_norm(phi), _norm(mixed)), self.defense.bound, self.defense.clip == "seen"

        def named(upload: Surrogates) -> Params:
            factor = (1 / tree_norm(upload.g).clamp(min=bound)).to(upload.g[HEAD_WEIGHT]) if clips else 1 / bound
            psi = {f"psi/{n}": value * factor / (sizes[1] * units[n].to(value)) for n, value in upload.sigma.items()}
            return {**{n: v * factor / (sizes[0] * units[n].to(v)) for n, v in upload.beta.items()}, **psi}

        observed = {**{n: v / sizes[0] for n, v in phi.items()}, **{f"psi/{n}": v / sizes[1] for n, v in mixed.items()}}
        simulate = surrogate_simulation(self.expansion.net, odd, mix @ along, False, named, transitional)
        evidence = Evidence(unit, observed, simulate, channel="noiseless")
        return replace(evidence, measure="cosine") if self.defense.shrinks and not clips else evidence


def _norm(tree: Params) -> float:
    size = float(torch.cat([value.flatten() for value in tree.values()]).norm())
    return size if size > 0 else 1.0


def canonical_scales(free: Channels, params: Params) -> Tensor:
    """Return the scales [count] > 0, float64, that bring each channel's incoming weights to norm 1: the gauge.

    Positive scales of hidden channels (the secrets r of PBPFL and MP-DP) act on the weights of a positively homogeneous
    network without changing it, so every choice of them can be undone up to a convention. True and perturbed weights
    (less the mask on the logits, transitional layers folded first) have the same form in these units.

    Channels are taken in the order of the network, each from the first weight that writes to it: with residual ties
    several do, and later ones read channels that depend on it. Biases follow. A channel whose incoming weights are
    all 0, or that no weight writes to, keeps its units.
    """
    full = torch.ones(free.count + 1, dtype=torch.float64)
    known = torch.zeros(free.count + 1, dtype=torch.bool)
    known[0] = True
    for name, factor in free.factors.items():
        if factor.out is None or factor.diagonal:
            continue
        numbers = torch.from_numpy(factor.out)
        if bool(known[numbers].all()):
            continue
        power = torch.zeros(free.count + 1, dtype=torch.float64)
        power = power.index_add(0, numbers, _incoming(params[name], factor, full))
        fresh = (power > 0) & ~known
        full = torch.where(fresh, power.clamp(min=1e-300).rsqrt(), full)
        known = known | fresh
        known[numbers] = True
    return full[1:]


def _incoming(value: Tensor, factor: Factor, scales: Tensor) -> Tensor:
    """Return the squared norms [out] of a parameter's entries by output channel, its input channels in new units."""
    weight = value.detach().double().cpu().expand(factor.shape)
    if factor.inp is not None:
        weight = weight / scales[torch.from_numpy(factor.inp)].view(-1, *[1] * (weight.dim() - 2))
    return weight.square().movedim(factor.axis, 0).flatten(1).sum(1) if weight.dim() > 1 else weight.square()
