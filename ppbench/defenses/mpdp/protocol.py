"""MP-DP: PBPFL whose scales and noise multiply to a Gaussian, with noise of pairs that cancels (Yang et al. 2024).

This is the paper's protocol, which does not have the claimed guarantee. Psi and Phi (here sigma and beta) are sent
without noise and determine the exact gradient of a network without biases; given the scales R, which the server draws,
the noise is uniform and bounded; and a client cannot clip a gradient that it does not know (see `clipping`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from ppbench.base.errors import ProtocolError
from ppbench.base.tree import Tree
from ppbench.defenses.mpdp.accounting import (
    Graph,
    Sigmas,
    calibrate,
    composed_epsilon,
    delta_given_scales,
    epsilon_of,
    exact_theta,
    theta_max,
)
from ppbench.defenses.mpdp.expansion import SECOND_MOMENT, Expansion, unexpanded, uniform_noise
from ppbench.defenses.mpdp.model_perturbation import ModelPerturbation, ServerSecrets, average
from ppbench.defenses.pbpfl.perturbation import Perturbation, Surrogates
from ppbench.federation import secagg
from ppbench.federation.bounds import Bits, NonNegative, whole_number
from ppbench.federation.contract import Context, Round, Server
from ppbench.federation.plan import Layout, Noise, Plan

UNIFORM = 2 / 3  # variance of DN(sigma, 1) in units of sigma^2


@dataclass(frozen=True)
class MPDP(ModelPerturbation):
    """Clients add their own uniform noise, and pairwise uniform noise, which cancels in the mean.

    R times a client's noise is Gaussian in each single coordinate if R is unknown. Sigmas follow from (epsilon, delta)
    by Theorems 10 and 11. graph: of pairs, public: "complete", or "n_out": each client picks `n` others. Outside
    Theorem 11's conditions (such as the paper's own n = 5) the complete graph's sigmas are used, without guarantee.
    """

    graph: Graph = "complete"
    n: Annotated[int, whole_number(0, 10_000)] = 5

    name: ClassVar[str] = "mpdp"
    version: ClassVar[str] = "4"
    paired = True  # pairs draw their noise from their common keys

    def check(self, plan: Plan) -> None:
        """As the base class; also refuse impossible graphs."""
        super().check(plan)
        if self.graph == "n_out":
            right = f"from 1 to {plan.clients - 1} with {plan.clients} clients"
            self.require(1 <= self.n < plan.clients, "n", f"{right}, or take graph=complete")

    def sigmas(self, plan: Plan) -> Sigmas:
        """Return the noise's standard deviations, in units of the bound."""
        n = self.n if self.graph == "n_out" else None
        return calibrate(self.epsilon, self.delta, plan.clients, self.graph, n)

    def why_no_epsilon(self, plan: Plan, server: Server | None = None, rounds: int = 1) -> str:
        """Return why there is no guarantee, the paper's claim, and what remains of it for the first surrogate alone.

        That is Eq. [23] on the drawn graph, the exact epsilon over all rounds, and the effect of known scales R.
        """
        sigmas, rounds = self.sigmas(plan), max(1, rounds)
        claim = f"the paper claims epsilon {self.epsilon:g} a round, delta {self.delta:g}"
        if sigmas.violated:
            claim += f", with no guarantee here: {sigmas.violated[0]}"
        single = delta_given_scales(sigmas.eta)
        certain = f"is certain of a change of one coordinate with probability {single:.2g}"
        consequences = f"; who knows the scales and colludes with all neighbours {certain}"
        drawn = None if server is None else server.own.graph
        graph = secagg.complete_graph(plan.clients) if drawn is None and self.graph == "complete" else drawn
        if graph is not None:
            theta = exact_theta(graph, sigmas.eta, sigmas.delta)
            total = composed_epsilon(theta, self.delta, rounds)
            consequences = (
                f"; the drawn graph has theta {theta:.3g}: by Eq. 23 epsilon {epsilon_of(theta, self.delta):.3g} a "
                f"round, were noise Gaussian {total:.3g} over {rounds} rounds{consequences}"
            )
        return f"Psi and Phi travel without noise, so the exact gradient can be rebuilt ({claim}{consequences})"

    def noise(self, plan: Plan) -> Noise | None:
        """Return the law of the noise on a recovered coordinate, at the mean degree, if R is unknown."""
        return Noise("gaussian", self.bound * math.sqrt(SECOND_MOMENT * self.noise_variance(plan, None)))

    def noise_variance(self, plan: Plan, degree: float | None) -> float:
        """Return the variance of eta + sum Delta at one coordinate."""
        if degree is None:
            others = plan.clients - 1
            degree = others if self.graph == "complete" else self.n * (2 - self.n / others)
        sigmas = self.sigmas(plan)
        return UNIFORM * (sigmas.eta**2 + degree * sigmas.delta**2)

    def setup(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Draw the client graph, exchange public keys, announce the graph; neighbors share a secret."""
        everybody = self.graph == "complete"
        graph = secagg.complete_graph(len(cohort)) if everybody else n_out(len(cohort), self.n, ctx.generator)
        server = yield from secagg.exchange_keys(server, cohort, graph)
        none = torch.zeros(0, dtype=torch.float64)
        return replace(server, own=ServerSecrets(none, none, none, graph))

    def added(self, ctx: Context, me: secagg.Keys, words: int) -> Tensor:
        """Return eta + sum Delta (Algorithm 2), float64 [words]; each term is uniform."""
        sigmas = self.sigmas(ctx.plan)
        eta = uniform_noise(sigmas.eta, (words,), ctx.secret)
        return eta + math.sqrt(2) * sigmas.delta * secagg.pair_noise(me, ctx, "delta", words)


def n_out(clients: int, n: int, generator: torch.Generator) -> Tensor:
    """Return a random n-out graph, bool [K, K]: each client picks n others, 1 <= n < K, and every pick is an edge."""
    score = torch.rand(clients, clients, generator=generator, dtype=torch.float64)
    # Scores lie below 1, so 2 keeps a client from picking itself; the n smallest of a row are a uniform n-subset.
    order = torch.where(secagg.complete_graph(clients), score, 2.0).argsort(dim=1)
    picks = torch.zeros(clients, clients, dtype=torch.bool).scatter(1, order[:, :n], True)
    return picks | picks.T


# -- MP-DP hardened, our own variant: the surrogates without noise are masked --

NOISELESS = ("sigma", "beta")  # the surrogates that are masked: Psi and Phi


@dataclass(frozen=True)
class MPDPH(MPDP):
    """MP-DP hardened (ours): Psi and Phi are masked, so that only their exact sums over the cohort can be read.

    floor: smallest value of r and s, so that no row has too little noise; above 0 recovered noise is not Gaussian.
    fraction_bits: of the fixed-point numbers, 1/K of each; 40 represent values below 4e6 to 5e-13, less than the noise.
    """

    floor: NonNegative = 0.5
    fraction_bits: Bits = 40

    name: ClassVar[str] = "mpdp_h"
    sums = True

    def why_no_epsilon(self, plan: Plan, server: Server | None = None, rounds: int = 1) -> str:
        """Return why there is no guarantee."""
        return (
            "the sums of Psi and Phi travel without noise, and the noise given the scales is bounded (epsilon "
            f"{self.epsilon:g} a round was aimed at, delta {self.delta:g})"
        )

    def noise(self, plan: Plan) -> Noise | None:
        """Return None: with a floor the noise has no closed law; evidence has the round's standard deviation."""
        return None

    def scales(self, ctx: Context) -> Tensor:
        """Return fresh scales [count], float64, with r and s at least `floor`."""
        return self.expansion(ctx.plan).laws.draw(ctx.secret, self.floor)

    def upload(self, ctx: Context, me: secagg.Keys, result: Surrogates) -> Tree:
        """Return the noisy first surrogate, and 1/K times the others in fixed point, masked, int64 (Overflow)."""
        noisy, share = super().upload(ctx, me, result), 1 / ctx.plan.clients
        parts = (secagg.hide(me, ctx, p, getattr(noisy, p), self.fraction_bits, share) for p in NOISELESS)
        return Surrogates(noisy.g, *parts)

    def aggregate(self, ctx: Context, server: Server, uploads: Mapping[int, Tree]) -> Server:
        """As MP-DP; ProtocolError unless every client sent an upload, because masks would not cancel."""
        secagg.need_everybody(server, uploads)
        return super().aggregate(ctx, server, uploads)

    def mean(self, uploads: Sequence[Surrogates]) -> Surrogates:
        """Return the mean of the surrogates of all clients, float64: Psi and Phi from the ring, where masks cancel."""
        parts = (secagg.sum_of_masked([getattr(u, part) for u in uploads], self.fraction_bits) for part in NOISELESS)
        return Surrogates(average([u.g for u in uploads]), *parts)


# -- Baselines of MP-DP: naive noise on a perturbed model, and central noise (the paper's Eq. 7-8, Section 6) --


@dataclass(frozen=True)
class MPDPNaive(ModelPerturbation):
    """PBPFL's perturbation of the original network, and Gaussian noise on the first surrogate (Eq. 7-8).

    Recovery multiplies the noise by quotients r_i / r_j, and the mean keeps all of it. sigma is that of Eq. [23] for
    one client's gradient; scales are PBPFL's.
    """

    name: ClassVar[str] = "mp_dp_naive"

    def why_no_epsilon(self, plan: Plan, server: Server | None = None, rounds: int = 1) -> str:
        """Return why there is no guarantee."""
        return (
            "the recovered noise is no Gaussian, and Psi and Phi travel without any (epsilon "
            f"{self.epsilon:g} a round was aimed at, delta {self.delta:g})"
        )

    def sigma(self) -> float:
        """Return the noise's standard deviation at the perturbed weights, in units of the bound."""
        return 1 / math.sqrt(theta_max(self.epsilon, self.delta))

    def noise_variance(self, plan: Plan, degree: float | None) -> float:
        """Return sigma squared."""
        return self.sigma() ** 2

    def expansion(self, plan: Plan) -> Expansion:
        """Return the original network, not expanded."""
        return unexpanded(plan.spec)

    def scales(self, ctx: Context) -> Tensor:
        """Return PBPFL's scales."""
        return Perturbation.scales(self, ctx)

    def added(self, ctx: Context, me: Tree, words: int) -> Tensor:
        """Return Gaussian noise, float64 [words]."""
        return self.sigma() * ctx.secret.normal((words,), torch.float64)


@dataclass(frozen=True)
class MPCDP(ModelPerturbation):
    """Model perturbation with central noise: the server recovers every gradient and adds noise to their mean.

    sigma is that of Eq. [23] for the mean, to which a client contributes bound / K. Clients clip as in MP-DP. The
    server also clips recovered gradients, unless clip is "none"; it knows the true norm: with "oracle" it alone clips.
    """

    name: ClassVar[str] = "mp_cdp"

    def why_no_epsilon(self, plan: Plan, server: Server | None = None, rounds: int = 1) -> str:
        """Return why there is no guarantee against the server, and the one against others."""
        return (
            "the server sees every client's exact gradient; noise is added to the mean only (against an adversary who "
            f"sees only the true model: epsilon {self.epsilon:g} a round, delta {self.delta:g})"
        )

    @property
    def shrinks(self) -> bool:
        """Whether clients clip."""
        return self.clip == "seen"

    def sigma(self, plan: Plan) -> float:
        """Return the standard deviation of the noise on the mean gradient."""
        return self.bound / (plan.clients * math.sqrt(theta_max(self.epsilon, self.delta)))

    def aggregate(self, ctx: Context, server: Server, uploads: Mapping[int, Tree]) -> Server:
        """Recover every gradient, clip it, average, add noise, step."""
        layout = Layout.of(server.params)
        total = torch.zeros(sum(v.numel() for v in server.params.values()), dtype=torch.float64)
        for client, upload in uploads.items():
            try:
                flat = layout.pack(self.recover(ctx.plan, server, upload)).cpu()
            except (AttributeError, KeyError, IndexError, ValueError, RuntimeError) as cause:
                raise ProtocolError(f"Client {client} sent surrogates that cannot be recovered: {cause}") from cause
            total = total + (flat if self.clip == "none" else flat * (self.bound / flat.norm().clamp(min=self.bound)))
        noise = self.sigma(ctx.plan) * ctx.secret.normal((len(total),), torch.float64)
        mean = (total / len(uploads) + noise).to(next(iter(server.params.values())).device)
        return self.stepped(ctx, server, layout.unpack(mean))
