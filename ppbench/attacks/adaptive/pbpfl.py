"""The attack on extended PBPFL with one family of masks for all surrogates (Feng et al. 2020, Eq. 23-25 literally).

Clients send g + lambda, sigma + lambda and beta + lambda modulo 2^64. The masks cancel in the cohort's sum, as they
should, but also in the difference of two of one client's own messages: beta - g is bare, and it is the gradient of a
scalar of the network like any other. Three independent families leave nothing but the sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.attacks.adaptive.inversion import invert, surrogate_simulation
from ppbench.base.autodiff import gradient
from ppbench.base.tree import Params
from ppbench.defenses.pbpfl.extended import PBPFLExt
from ppbench.defenses.pbpfl.perturbation import HEAD_BIAS_NAME, HEAD_WEIGHT, Surrogates, exchanges
from ppbench.federation import secagg
from ppbench.federation.bounds import PositiveInt
from ppbench.federation.evidence import Evidence, Shared, Simulate
from ppbench.federation.plan import Plan
from ppbench.federation.view import View
from ppbench.federation.wire import Slot


@dataclass(frozen=True)
class AdaptivePBPFLExt(Attack):
    """Inverts differences of one client's masked messages, where the masks are shared; else the cohort's mean.

    Questions are about whole cohorts; each client's batch is attacked on its own, with `budget` gradient evaluations.
    Masks of independent families leave the mean gradient of the cohort, which is then inverted as it is.
    """

    budget: PositiveInt = 1800

    name: ClassVar[str] = "adaptive_pbpfl_ext"
    version: ClassVar[str] = "2"
    kind: ClassVar[Kind] = "reconstruction"
    threats: ClassVar[tuple[str, ...]] = ("server/1",)
    adaptive: ClassVar[bool] = True
    targets: ClassVar[frozenset[str] | None] = frozenset({"pbpfl_ext"})
    reference: ClassVar[str] = "this project; differences of messages under one mask, inverted as Phong et al. 2018 do"

    def evidence(self, view: View) -> list[Evidence]:
        """Return, a cohort, its clients' bare differences side by side; the defense's evidence where there are none."""
        cohorts: dict[int, list[Evidence]] = {}
        for one in bare_differences(view):
            cohorts.setdefault(one.unit[0].probe, []).append(one)
        return [side_by_side(parts) for parts in cohorts.values()] or view.defense.evidence(view)

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess a challenge: its clients' images in the order of the unit."""
        found = bare_differences(view)
        if not found:
            return invert(view.defense.evidence(view), view.plan, challenges, generator, self.budget)
        parts = [split(challenge) for challenge in challenges]
        asked = [one for some in parts for one in some]
        if view.plan.local.batch == 1:
            single = [Single.of(view, one) for one in found]
            found, labels = [s.evidence(view) for s in single], {s.unit: s.label for s in single}
            asked = [one if one.y is not None else replace(one, y=labels.get(one.unit)) for one in asked]
        guesses = iter(invert(found, view.plan, asked, generator, self.budget))
        return [joined([next(guesses) for _ in some]) for some in parts]


def bare_differences(view: View) -> list[Evidence]:
    """Return, a client, beta - g and sigma - g of its batch: exact, and without any secret of the server.

    The ring's difference is N_k / N times the true one, in fixed point; the server knows N_k. Empty where families are
    independent, or the view is not the server's.
    """
    defense = view.defense
    if not isinstance(defense, PBPFLExt) or defense.families != "shared":
        return []
    sent, found = exchanges(view), []

    def simulations(plan: Plan, params: Params) -> Simulate:
        direction: Tensor = next(e.request.direction for e in sent if e.request.params is params)
        return surrogate_simulation(plan.net, params, direction[None], defense.bias_masked, differences)

    shared = Shared(view.plan, simulations)
    for exchange in sent:
        server = view.state_at(exchange)
        if server is None:
            continue
        share = float(server.counts[exchange.slot.client]) / float(server.counts.sum())
        bare = differences(exchange.answer)
        observed = {n: secagg.from_ring(value, defense.fraction_bits) / share for n, value in bare.items()}
        found.append(Evidence((exchange.slot,), observed, shared.at(exchange.request.params), channel="difference"))
    return found


def differences(found: Surrogates) -> Params:
    """Return beta - g, named as the parameters, and "sigma/..." for sigma - g; in the ring, or of true surrogates."""
    mixed = {f"sigma/{n}": value[0] - found.g[n] for n, value in found.sigma.items()}
    return {**{n: value - found.g[n] for n, value in found.beta.items()}, **mixed}


@dataclass(frozen=True)
class Single:
    """What the head's differences tell about a batch of one example; all exact.

    beta has no gradient by the head, so the differences there are -g = -e h^T and sigma - g, sigma = r_a alpha h^T:
    alpha, the head's inputs h and the error e = yhat - ybar follow. So does the label, as yhat follows from h. What is
    left of beta - g is the gradient of alpha 1^T h - e^T W h with alpha and e held fixed: a known linear function of h.

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
    def of(view: View, bare: Evidence) -> Single:
        """Read one of `bare_differences`."""
        asked = next(e.request for e in exchanges(view) if (e.slot,) == bare.unit)
        params = {n: v.double().cpu() for n, v in asked.params.items()}
        unit = asked.direction.double().cpu() / asked.direction.double().cpu().square().sum()
        g = {n: -v for n, v in bare.observed.items() if n in (HEAD_WEIGHT, HEAD_BIAS_NAME)}
        scaled = unit @ (bare.observed[f"sigma/{HEAD_WEIGHT}"] + g[HEAD_WEIGHT])
        alpha = scaled.sum().clamp(min=0).sqrt()
        if HEAD_BIAS_NAME in g:
            alpha = unit @ (bare.observed[f"sigma/{HEAD_BIAS_NAME}"] + g[HEAD_BIAS_NAME])
        features = scaled / alpha
        error = g[HEAD_WEIGHT] @ features / features.square().sum()
        y = view.plan.net.head(params, features) - error
        hidden = {n: bare.observed[n] for n in params if n not in g}
        label = one_hot(y.nan_to_num(nan=0.0).argmax(), len(y)).float()[None, None]
        return Single(bare.unit, params, features, alpha - params[HEAD_WEIGHT].T @ error, label, hidden)

    def evidence(self, view: View) -> Evidence:
        """Return evidence of the gradient of the linear function, and of h itself; the label plays no part."""
        net, weight, size = view.plan.net, self.weight, self.weight.norm()
        hidden = {n: self.params[n] for n in self.observed}

        def simulate(x: Tensor, y: Tensor) -> Params:
            images, weights = x.flatten(0, 1), {n: v.to(x) for n, v in hidden.items()}
            found = gradient(lambda p: (net.features(p, images) @ (weight / size).to(x)).mean(), weights)
            return {**found, "h": net.features(weights, images).mean(0)}

        observed = {n: value / size for n, value in self.observed.items()}
        return Evidence(self.unit, {**observed, "h": self.features}, simulate, channel="difference")


def split(challenge: Challenge) -> list[Challenge]:
    """Return one question a slot of the unit."""
    labels = [None] * len(challenge.unit) if challenge.y is None else list(challenge.y[:, None])
    return [replace(challenge, unit=(slot,), y=y) for slot, y in zip(challenge.unit, labels, strict=True)]


def joined(guesses: Sequence[Guess]) -> Guess:
    """Return the guess about a unit from those about its slots; as sure as the least sure of them."""
    images, labels = [g.x for g in guesses if g.x is not None], [g.y for g in guesses if g.y is not None]
    sure = [g.confidence for g in guesses if g.confidence is not None]
    return Guess(
        x=torch.cat(images),
        y=torch.cat(labels) if len(labels) == len(guesses) else None,
        confidence=max(sure) if len(sure) == len(guesses) else None,
        evaluations=sum(g.evaluations for g in guesses),
    )


def side_by_side(parts: Sequence[Evidence]) -> Evidence:
    """Return evidence about all slots of `parts` together; entries of part i are named "i/..."."""

    def named(trees: Iterable[Params]) -> Params:
        return {f"{i}/{n}": value for i, tree in enumerate(trees) for n, value in tree.items()}

    def simulate(x: Tensor, y: Tensor) -> Params:
        return named(one.simulate(x[i : i + 1], y[i : i + 1]) for i, one in enumerate(parts))

    unit = tuple(slot for one in parts for slot in one.unit)
    return Evidence(unit, named(one.observed for one in parts), simulate, channel=parts[0].channel)
