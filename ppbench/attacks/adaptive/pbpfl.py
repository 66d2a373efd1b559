"""The attack on extended PBPFL with one family of masks for all surrogates (Feng et al. 2020, Eq. 23-25 literally).

Clients send g + lambda, sigma + lambda and beta + lambda modulo 2^64. The masks cancel in the cohort's sum, as they
should, but also in the difference of two messages of one client: beta - g carries no mask, and it is the gradient of a
scalar of the network. Three independent families reveal the sum alone.
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
from ppbench.base.autodiff import gradient
from ppbench.base.tree import Params
from ppbench.defenses.pbpfl.perturbation import HEAD_BIAS_NAME, HEAD_WEIGHT, Surrogates, exchanges
from ppbench.defenses.pbpfl.protocol import PBPFLExt
from ppbench.federation import secagg
from ppbench.federation.bounds import PositiveInt
from ppbench.federation.evidence import Evidence, Shared, Simulate, numbered
from ppbench.federation.plan import Plan
from ppbench.federation.view import View
from ppbench.federation.wire import Slot


@dataclass(frozen=True)
class AdaptivePBPFLExt(Attack):
    """Inverts differences of one client's masked messages where they share masks; else the cohort's mean.

    Questions are about whole cohorts; each client's batch is attacked on its own, with `budget` gradient evaluations.
    With masks of independent families, the cohort's mean gradient is inverted.
    """

    budget: PositiveInt = 1800

    name: ClassVar[str] = "adaptive_pbpfl_ext"
    version: ClassVar[str] = "6"
    kind: ClassVar[Kind] = "reconstruction"
    threats: ClassVar[tuple[str, ...]] = ("server/1",)
    adaptive: ClassVar[bool] = True
    targets: ClassVar[frozenset[str] | None] = frozenset({"pbpfl_ext"})
    reference: ClassVar[str] = "this project; differences of messages under one mask, inverted as Phong et al. 2018 do"

    def evidence(self, view: View) -> list[Evidence]:
        """Return the clients' unmasked differences by cohort, side by side; without any, the defense's evidence."""
        cohorts: dict[int, list[Evidence]] = {}
        for difference in unmasked_differences(view):
            cohorts.setdefault(difference.unit[0].probe, []).append(difference)
        return [side_by_side(parts) for parts in cohorts.values()] or view.defense.evidence(view)

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess per challenge: its clients' images in the order of the unit."""
        evidence = unmasked_differences(view)
        if not evidence:
            return invert_evidence(view.defense.evidence(view), view.plan, challenges, generator, self.budget)
        parts = [split_unit(challenge) for challenge in challenges]
        flat = [part for slots in parts for part in slots]
        if view.plan.local.batch == 1:
            single = [Single.of(view, difference) for difference in evidence]
            evidence, labels = [s.evidence(view) for s in single], {s.unit: s.label for s in single}
            flat = [part if part.y is not None else replace(part, y=labels.get(part.unit)) for part in flat]
        guesses = iter(invert_evidence(evidence, view.plan, flat, generator, self.budget))
        return [joined_guess([next(guesses) for _ in slots]) for slots in parts]


def unmasked_differences(view: View) -> list[Evidence]:
    """Return beta - g and sigma - g of each client's batch: exact, computed without any secret of the server.

    The ring's difference is N_k / N times the true one, in fixed point; the server knows N_k. Empty where families are
    independent, or the view is not the server's.
    """
    defense = view.defense
    if not isinstance(defense, PBPFLExt) or defense.families != "shared":
        return []
    sent, evidence = exchanges(view), []

    def simulations(plan: Plan, params: Params) -> Simulate:
        direction: Tensor = next(e.request.direction for e in sent if e.request.params is params)
        return surrogate_simulation(plan.net, params, direction[None], defense.bias_masked, message_differences)

    shared = Shared(view.plan, simulations)
    for exchange in sent:
        server = view.state_at(exchange)
        if server is None:
            continue
        share = float(server.counts[exchange.slot.client]) / float(server.counts.sum())
        upload_difference = message_differences(exchange.answer)
        observed = {n: secagg.from_ring(value, defense.fraction_bits) / share for n, value in upload_difference.items()}
        evidence.append(Evidence((exchange.slot,), observed, shared.at(exchange.request.params), channel="difference"))
    return evidence


def message_differences(upload: Surrogates) -> Params:
    """Return beta - g, named as the parameters, and "sigma/..." for sigma - g; in the ring, or of true surrogates."""
    mixed = {f"sigma/{n}": value[0] - upload.g[n] for n, value in upload.sigma.items()}
    return {**{n: value - upload.g[n] for n, value in upload.beta.items()}, **mixed}


@dataclass(frozen=True)
class Single:
    """What the head's differences reveal about a batch of one example; all exact.

    beta has no gradient by the head, so the differences there are -g = -e h^T and sigma - g, sigma = r_a alpha h^T:
    alpha, the head's inputs h and the error e = yhat - ybar follow. So does the label, as yhat follows from h. The rest
    of beta - g is the gradient of alpha 1^T h - e^T W h with alpha and e fixed: a known linear function of h.

    params: perturbed weights; features: h [D]; weight: [D], of that linear function; label: one-hot [1, 1, C] float32;
    observed: the function's gradient by the hidden parameters.
    """

    unit: tuple[Slot, ...]
    params: Params
    features: Tensor
    weight: Tensor
    label: Tensor
    observed: Params

    @staticmethod
    def of(view: View, difference: Evidence) -> Single:
        """Return what one of `unmasked_differences` reveals."""
        broadcast = next(e.request for e in exchanges(view) if (e.slot,) == difference.unit)
        params = {n: v.double().cpu() for n, v in broadcast.params.items()}
        unit = broadcast.direction.double().cpu() / broadcast.direction.double().cpu().square().sum()
        g = {n: -v for n, v in difference.observed.items() if n in (HEAD_WEIGHT, HEAD_BIAS_NAME)}
        scaled = unit @ (difference.observed[f"sigma/{HEAD_WEIGHT}"] + g[HEAD_WEIGHT])
        alpha = scaled.sum().clamp(min=0).sqrt()
        if HEAD_BIAS_NAME in g:
            alpha = unit @ (difference.observed[f"sigma/{HEAD_BIAS_NAME}"] + g[HEAD_BIAS_NAME])
        features = scaled / alpha
        error = g[HEAD_WEIGHT] @ features / features.square().sum()
        y = view.plan.net.head(params, features) - error
        hidden = {n: difference.observed[n] for n in params if n not in g}
        label = one_hot(y.nan_to_num(nan=0.0).argmax(), len(y)).float()[None, None]
        return Single(difference.unit, params, features, alpha - params[HEAD_WEIGHT].T @ error, label, hidden)

    def evidence(self, view: View) -> Evidence:
        """Return evidence of the linear function's gradient and of h; both are independent of the label."""
        net, weight, size = view.plan.net, self.weight, self.weight.norm()
        hidden = {n: self.params[n] for n in self.observed}

        def simulate(x: Tensor, y: Tensor) -> Params:
            images, weights = x.flatten(0, 1), {n: v.to(x) for n, v in hidden.items()}
            slopes = gradient(lambda p: (net.features(p, images) @ (weight / size).to(x)).mean(), weights)
            return {**slopes, "h": net.features(weights, images).mean(0)}

        observed = {n: value / size for n, value in self.observed.items()}
        return Evidence(self.unit, {**observed, "h": self.features}, simulate, channel="difference")


def split_unit(challenge: Challenge) -> list[Challenge]:
    """Return one challenge for each slot of the unit."""
    labels = [None] * len(challenge.unit) if challenge.y is None else list(challenge.y[:, None])
    return [replace(challenge, unit=(slot,), y=y) for slot, y in zip(challenge.unit, labels, strict=True)]


def joined_guess(guesses: Sequence[Guess]) -> Guess:
    """Return the guess about a unit from those about its slots; its confidence is the worst of theirs."""
    images, labels = [g.x for g in guesses if g.x is not None], [g.y for g in guesses if g.y is not None]
    confidences = [g.confidence for g in guesses if g.confidence is not None]
    return Guess(
        x=torch.cat(images),
        y=torch.cat(labels) if len(labels) == len(guesses) else None,
        confidence=max(confidences) if len(confidences) == len(guesses) else None,
        evaluations=sum(g.evaluations for g in guesses),
    )


def side_by_side(parts: Sequence[Evidence]) -> Evidence:
    """Return evidence about all slots of `parts` together; entries of part i are named "i/..."."""

    def simulate(x: Tensor, y: Tensor) -> Params:
        return numbered([one.simulate(x[i : i + 1], y[i : i + 1]) for i, one in enumerate(parts)])

    unit = tuple(slot for one in parts for slot in one.unit)
    return Evidence(unit, numbered([one.observed for one in parts]), simulate, channel=parts[0].channel)
