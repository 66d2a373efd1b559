"""Labels from MP-DP's noiseless surrogates: the label of one example, a weighted histogram of a batch.

Psi_i = grad mean alpha (yhat_i - ybar_i) is of degree two in the weights that read the input and its first part of
degree one in the head: Euler's identities give mean alpha ybar_i, the share of alpha that falls to class i (see
`noiseless_moments`). It is exact for any noise on G.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Challenge
from ppbench.attacks.adaptive.mask_estimators import Moments, noiseless_moments
from ppbench.attacks.label.multisets import greedy_multiset
from ppbench.attacks.label.recovery import LabelRecovery, Reader
from ppbench.base.tree import Params
from ppbench.defenses.mpdp.clipping import tree_norm
from ppbench.defenses.mpdp.hardened import MPDPH
from ppbench.defenses.mpdp.model_perturbation import ModelPerturbation
from ppbench.defenses.pbpfl.perturbation import HEAD_WEIGHT, Surrogates, exchanges, outputs, whole_cohorts
from ppbench.federation.view import Exchange, View
from ppbench.federation.wire import Slot

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
    return float(outputs(defense.network(view.plan), params, grey, masked_bias=False)[1])


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
