"""MP-DP: PBPFL whose scales and noise multiply to a Gaussian, with noise of pairs that cancels (Yang et al. 2024).

What this file does is the paper's protocol, not what the paper claims for it. Psi and Phi (here sigma and beta) travel
without noise and determine the exact gradient of a network without biases; given the scales R, which the server draws,
the noise is uniform and bounded; and a client cannot clip a gradient that it does not know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.base.errors import UsageError
from ppbench.base.tree import Tree
from ppbench.defenses.claims import paper
from ppbench.defenses.mpdp.accounting import (
    Graph,
    Sigmas,
    calibrate,
    epsilon_of,
    exact_theta,
    gaussian_epsilon,
    theorem10_theta,
    theorem11_theta,
)
from ppbench.defenses.mpdp.known_scales import delta_averaged, delta_given_R, theta_cond
from ppbench.defenses.mpdp.laws import SECOND_MOMENT, dn
from ppbench.defenses.mpdp.model_perturbation import ModelPerturbation, Secrets
from ppbench.federation import secagg
from ppbench.federation.contract import Claim, Context, Round, Server
from ppbench.federation.plan import Data, Noise, Plan

YANG2024 = paper("yang2024")

UNIFORM = 2 / 3  # variance of DN(sigma, 1) in units of sigma^2


@dataclass(frozen=True)
class Account:
    """What the paper claims for one client's gradient, and what its noise does against who knows the scales R.

    All of it is about the first surrogate alone: Psi and Phi, which carry no noise, give delta = 1 at every epsilon.

    Attributes:
        sigmas: of the noise, in units of the bound.
        claimed: (epsilon, delta) of one round.
        theta: squared signal-to-noise ratio by the theorem for the graph (infinite where its formula has no value).
        exact_theta: of the graph that was drawn, or None where it is not known.
        epsilon_round: Eq. [23] at `exact_theta`.
        epsilon_exact: the Gaussian mechanism's exact epsilon at `exact_theta`.
        epsilon_total: the same over all rounds; the paper does not compose.
        rounds: number of rounds.
        delta_spread: by attack, at every epsilon, where all neighbors collude: for a shift of the bound's norm, equal
            in all coordinates, given R drawn from the law.
        delta_single: the same for a shift in one coordinate, in the mean over R.
        theta_given_scales: squared signal-to-noise ratio of the worst shift in everybody's sum, given that R.
    """

    sigmas: Sigmas
    claimed: tuple[float, float]
    theta: float
    exact_theta: float | None
    epsilon_round: float | None
    epsilon_exact: float | None
    epsilon_total: float | None
    rounds: int
    delta_spread: float
    delta_single: float
    theta_given_scales: float


@dataclass(frozen=True)
class MPDP(ModelPerturbation):
    """Clients add uniform noise of their own and uniform noise of pairs, which cancels in the mean.

    Scales have the laws |DN*(1)| and |DN*(2)| (Eq. 13), so that R times a client's noise is Gaussian in each coordinate
    on its own, to who does not know R. Sigmas follow from (epsilon, delta) by Theorems 10 and 11; the graph of
    pairs is drawn by the server at set-up and public.

    Attributes:
        graph: "complete", or "n_out": each client picks `n` others, and every pick is an edge.
        n: for "n_out". Outside Theorem 11's conditions (as the paper's own n = 5 is) the complete graph's sigmas are
            taken, and there is no guarantee.
    """

    graph: Graph = "complete"
    n: int = 5

    name: ClassVar[str] = "mpdp"
    claimed: ClassVar[tuple[Claim, ...]] = YANG2024.claims("mpdp")

    def check(self, plan: Plan) -> None:
        """As its base; also refuse graphs that do not exist, a single client, and clients one after another."""
        super().check(plan)
        self.require(self.graph in ("complete", "n_out"), "graph", "'complete' or 'n_out'")
        if plan.clients < 2:
            raise UsageError(f"Defense {self.name!r} adds the noise of pairs of clients; use at least 2 clients.")
        if self.graph == "n_out":
            right = f"from 1 to {plan.clients - 1} with {plan.clients} clients"
            self.require(1 <= self.n < plan.clients, "n", f"{right}, or take graph=complete")
        if plan.schedule != "parallel":
            raise UsageError(
                f"Defense {self.name!r} cancels the noise of pairs in a sum over all clients, so they upload together; "
                f"use --schedule parallel, not {plan.schedule!r}."
            )

    def sigmas(self, plan: Plan) -> Sigmas:
        """Return the noise's standard deviations, in units of the bound."""
        n = self.n if self.graph == "n_out" else None
        return calibrate(self.epsilon, self.delta, plan.clients, self.graph, n)

    def why_no_epsilon(self, plan: Plan, server: Server | None = None, rounds: int = 1) -> str:
        """Return why there is no guarantee, what the paper claims, and what is left of it even without Psi and Phi."""
        graph = server.own.graph if server is not None else None
        account = self.accounting(plan, max(1, rounds), graph)
        claim = f"the paper claims epsilon {self.epsilon:g} a round, delta {self.delta:g}"
        if account.sigmas.conditions:
            claim += f", with no guarantee here: {account.sigmas.conditions[0]}"
        told = f"; a change of one coordinate is told at delta {account.delta_single:.2g} by who knows the scales"
        if account.exact_theta is not None:
            told = (
                f"; the drawn graph has theta {account.exact_theta:.3g}: by Eq. 23 epsilon {account.epsilon_round:.3g} "
                f"a round, were noise Gaussian {account.epsilon_total:.3g} over {account.rounds} rounds{told}"
            )
        return f"Psi and Phi travel without noise, so the exact gradient can be rebuilt ({claim}{told})"

    def noise(self, plan: Plan) -> Noise | None:
        """Return the law of the noise on a recovered coordinate to who does not know R, as the paper has it: Gaussian.

        At the mean number of neighbors. Its coordinates depend on each other through R, and the server knows R, so the
        evidence carries the standard deviation of the round instead.
        """
        return Noise("gaussian", self.bound * math.sqrt(SECOND_MOMENT * self.noise_variance(plan, None)))

    def noise_variance(self, plan: Plan, degree: float | None) -> float:
        """Return the variance of eta + sum Delta at one coordinate."""
        if degree is None:
            others = plan.clients - 1
            degree = others if self.graph == "complete" else self.n * (2 - self.n / others)
        sigmas = self.sigmas(plan)
        return UNIFORM * (sigmas.eta**2 + degree * sigmas.delta**2)

    # -- set-up --------------------------------------------------------------------------------------------------
    def init_client(self, ctx: Context, params: Tree) -> Tree:
        """Draw a key pair."""
        return secagg.new_keys(ctx)

    def setup(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Draw the client graph, exchange public keys, announce the graph; neighbors share a secret."""
        everybody = self.graph == "complete"
        graph = complete(len(cohort)) if everybody else n_out(len(cohort), self.n, ctx.generator)
        server = yield from secagg.setup(ctx, server, cohort, graph)
        none = torch.zeros(0, dtype=torch.float64)
        return Server(server.params, server.opt, server.counts, Secrets(none, none, none, graph))

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Announce a public key, agree on secrets, or upload noisy surrogates."""
        return secagg.answered(ctx, me, message, data) or (me, self.upload(ctx, me, result))

    # -- a round -------------------------------------------------------------------------------------------------
    def added(self, ctx: Context, me: secagg.Keys, words: int) -> Tensor:
        """Return eta + sum Delta (Algorithm 2), float64 [words]: all of it uniform, because n = 1 factors are drawn.

        Delta is bitwise the same at both ends of an edge up to the sign, so only rounding is left of it in the mean.
        """
        sigmas = self.sigmas(ctx.plan)
        eta = dn(sigmas.eta, (words,), 1, ctx.generator)
        return eta + math.sqrt(2) * sigmas.delta * secagg.pair_noise(me, ctx, "delta", words)

    # -- accounting ----------------------------------------------------------------------------------------------
    def accounting(self, plan: Plan, rounds: int = 1, graph: Tensor | None = None, seed: int = 0) -> Account:
        """Return the paper's claim beside what can be said of the mechanism.

        Args:
            plan: the plan.
            rounds: rounds to compose over, >= 1.
            graph: [K, K] bool, the graph that was drawn (`Server.own.graph`); needed for "n_out" only.
            seed: of the scales R that the figures given R are for.
        """
        sigmas, clients = self.sigmas(plan), plan.clients
        if graph is None and self.graph == "complete":
            graph = complete(clients)
        if self.graph == "complete":
            theta = theorem10_theta(clients, sigmas.eta, sigmas.delta)
        else:
            theta = theorem11_theta(clients, self.n, sigmas.eta, sigmas.delta)
        exact = None if graph is None else exact_theta(graph, sigmas.eta, sigmas.delta)
        scale = self._drawn_scale(plan, seed)
        spread = torch.full_like(scale, len(scale) ** -0.5)
        return Account(
            sigmas=sigmas,
            claimed=(self.epsilon, self.delta),
            theta=theta,
            exact_theta=exact,
            epsilon_round=None if exact is None else epsilon_of(exact, self.delta),
            epsilon_exact=None if exact is None else gaussian_epsilon(exact, self.delta),
            epsilon_total=None if exact is None else gaussian_epsilon(exact, self.delta, rounds),
            rounds=rounds,
            delta_spread=float(delta_given_R(spread, sigmas.eta, scale)),
            delta_single=self._delta_single(sigmas.eta, scale),
            theta_given_scales=theta_cond(scale, clients, sigmas.eta),
        )

    def _drawn_scale(self, plan: Plan, seed: int) -> Tensor:
        """Return one draw of R, of all coordinates [P]."""
        ctx = Context(plan, 1, "accounting", -1, torch.Generator().manual_seed(seed))
        every = self.expansion(plan).channels.multipliers(self.scales(ctx))
        return torch.cat([every[n].flatten() for n in plan.net.names])

    def _delta_single(self, sigma_eta: float, scale: Tensor) -> float:
        return delta_averaged(torch.ones(1), sigma_eta)


def complete(clients: int) -> Tensor:
    """Return the complete graph of `clients` clients, bool [K, K]."""
    return ~torch.eye(clients, dtype=torch.bool)


def n_out(clients: int, n: int, generator: torch.Generator) -> Tensor:
    """Return a random n-out graph, bool [K, K]: each client picks n others, and every pick is an edge.

    A client has n neighbors or more, because others pick it too. (The paper's Fig. 2, n = 3, draws two a client.)

    Args:
        clients: number of clients K, >= 2.
        n: others that each client picks, without replacement; 1 <= n <= K - 1.
        generator: CPU generator.
    """
    score = torch.rand(clients, clients, generator=generator, dtype=torch.float64)
    # Scores lie below 1, so 2 keeps a client from picking itself; the n smallest of a row are a uniform n-subset.
    order = torch.where(complete(clients), score, 2.0).argsort(dim=1)
    picks = torch.zeros(clients, clients, dtype=torch.bool).scatter(1, order[:, :n], True)
    return picks | picks.T
