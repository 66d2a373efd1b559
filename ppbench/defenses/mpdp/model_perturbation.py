"""What MP-DP and its baselines share: a perturbed model, C + 2 surrogate gradients, recovery by the server.

Yang et al., arXiv 2412.11737: Algorithm 1 (the server perturbs), Algorithm 3 (it recovers and steps), Theorem 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ppbench.base.errors import ProtocolError, UsageError
from ppbench.base.tree import Params, Tree, node, tree_map
from ppbench.defenses.claims import paper
from ppbench.defenses.mpdp.evidence import Shelf
from ppbench.defenses.mpdp.expansion import Expansion, expanded
from ppbench.defenses.pbpfl.evidence import exchanges
from ppbench.defenses.pbpfl.perturbation import (
    HEAD_WEIGHT,
    Perturbed,
    Released,
    Surrogates,
    check_masked,
    combine,
    mask,
    mask_size,
    multiply,
    surrogates,
    unscale,
    warn_of_rounding,
)
from ppbench.federation.contract import Context, Defense, Job, Server, at
from ppbench.federation.evidence import Evidence
from ppbench.federation.optim import Layout
from ppbench.federation.plan import Data, Plan
from ppbench.federation.view import View

YANG2024 = paper("yang2024")


SETTING: Mapping[str, Any] = {
    "model": "mlp",
    "model_options": {"hidden": "64,64", "bias": False},
    "loss": "squared",
    "upload": "gradient",
    "schedule": "parallel",
    "optimizer": "sgd",
    "lr": 0.1,
    "batch_size": 256,
    "rounds": 2000,
    "decay_at": (),
}
# Twenty clients halve the noise of ten; few examples are memorized, so that membership has something to find.
QUICK: Mapping[str, Any] = {**SETTING, "batch_size": 32, "clients": 20, "train": 300, "lr": 0.3, "rounds": 600}


@node
class Secrets:
    """The server's state of its own. Before the first round all but `graph` are empty.

    scales: [count] > 0, hidden channels' r and 1/s. mask: [C], the additive mask r of the logits. coefficients: [m],
    of the directions d_k that clients use, with r = sum_k c_k d_k. graph: [N, N] bool, who shares noise with whom.
    """

    scales: Tensor
    mask: Tensor
    coefficients: Tensor
    graph: Tensor


@dataclass(frozen=True)
class ModelPerturbation(Defense):
    """Perturbs the expanded model anew every round and recovers gradients from what clients compute on it.

    Attributes:
        epsilon: the paper's privacy budget of ONE round, in (epsilon, delta)-DP; > 0.
        delta: of the same; in (0, 1).
        gamma: "vector" has one secret coefficient a class (the paper's: C + 2 backward passes and uploads), "scalar"
            one for all, along a public direction (PBPFL's: three).
        kappa: mask-to-signal ratio RMS(alpha r) / RMS(y) at the logits, on noise inputs; > 0 (no law in the paper).
        bound: the L2 norm that one client's gradient is said never to exceed; > 0. A client cannot clip the true
            gradient, which it does not know, so it scales what it sends by the public 1 / bound, which the server
            undoes (a common factor of all surrogates is exact). A larger gradient voids the guarantee, unnoticed.
        precision: of the perturbed model, and so of what travels.
    """

    epsilon: float = 3.0
    delta: float = 1e-5
    gamma: Literal["vector", "scalar"] = "vector"
    kappa: float = 10.0
    bound: float = 1.0
    precision: Literal["float64", "float32"] = "float64"

    control: ClassVar[str] = "epsilon"
    grids: ClassVar[Mapping[str, tuple[float, ...]]] = {"quick": (3.0, 10.0, 30.0), "paper": (0.5, 1.0, 3.0, 5.0, 10.0)}
    paper: ClassVar[str] = YANG2024.citation
    setting: ClassVar[Mapping[str, Mapping[str, Any]]] = {"quick": QUICK, "paper": SETTING}
    masked: ClassVar[bool] = True

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the perturbed model."""
        return torch.float32 if self.precision == "float32" else torch.float64

    # -- public checks -------------------------------------------------------------------------------------------
    def check(self, plan: Plan) -> None:
        """Refuse numbers out of range, another loss, local training, and layers that cannot be perturbed."""
        self.require(0 < self.epsilon < math.inf, "epsilon", "a finite number > 0")
        self.require(0 < self.delta < 1, "delta", "a number between 0 and 1")
        self.require(self.gamma in ("vector", "scalar"), "gamma", "'vector' or 'scalar'")
        self.require(0 < self.kappa < math.inf, "kappa", "a finite number > 0")
        self.require(0 < self.bound < math.inf, "bound", "a finite number > 0")
        self.require(self.precision in ("float32", "float64"), "precision", "'float64' or 'float32'")
        check_masked(plan, self.name)
        self.expansion(plan)
        warn_of_rounding(self.name, self.precision, self.kappa)

    def check_data(self, plan: Plan, counts: Sequence[int]) -> None:
        """Refuse clients of unequal sizes: the paper's equal weights 1/K would not be those of the examples."""
        if max(counts) - min(counts) > 1:
            raise UsageError(
                f"Defense {self.name!r} averages clients with equal weights 1/K, but they hold from {min(counts)} to "
                f"{max(counts)} examples; use --partition iid."
            )

    def expansion(self, plan: Plan) -> Expansion:
        """Return the expanded network; raises UsageError for one that cannot be perturbed."""
        return expanded(plan.spec)

    # -- the server ----------------------------------------------------------------------------------------------
    def weights(self, server: Server, clients: Sequence[int]) -> list[float]:
        """Return equal weights 1/K (Eq. 20)."""
        return [1 / len(clients)] * len(clients)

    def scales(self, ctx: Context) -> Tensor:
        """Return fresh scales [count], float64, on CPU: r and 1/s of the laws of Eq. 13."""
        return self.expansion(ctx.plan).laws.draw(ctx.generator)

    def broadcast(self, ctx: Context, server: Server) -> tuple[Server, Tree]:
        """Draw fresh secrets and return the perturbed expanded model (Algorithm 1)."""
        expansion, device = self.expansion(ctx.plan), server.params[HEAD_WEIGHT].device
        scales = self.scales(ctx).to(device)
        hidden = multiply(expansion.full(server.params), expansion.channels.multipliers(scales), torch.float64)
        r, coefficients, public = self._mask(ctx, expansion, hidden)
        graph = server.own.graph if isinstance(server.own, Secrets) else torch.zeros(0, 0, dtype=torch.bool)
        own = Secrets(scales, r, coefficients, graph)
        sent = {n: value.to(self.dtype) for n, value in mask(hidden, r, masked_bias=False).items()}
        return Server(server.params, server.opt, server.counts, own), Perturbed(sent, public.to(self.dtype))

    def _mask(self, ctx: Context, expansion: Expansion, hidden: Params) -> tuple[Tensor, Tensor, Tensor]:
        """Return (mask r [C], coefficients [m], what is sent of the direction: r_a [C], or nothing), float64."""
        classes, device = ctx.plan.spec.classes, hidden[HEAD_WEIGHT].device
        uniform = torch.rand(3, classes, generator=ctx.generator, dtype=torch.float64).to(device)
        direction = 2 * uniform[0] - 1
        if self.gamma == "vector":
            sign = torch.where(uniform[1] < 0.5, -1.0, 1.0)
            direction = direction * sign * (0.5 + 1.5 * uniform[2])  # r_a times gamma, one coefficient a class
        size = self.kappa * mask_size(ctx.plan, expansion.net, hidden, direction, ctx.generator)
        r = size * direction
        return (r, r, r[:0]) if self.gamma == "vector" else (r, size[None], direction)

    def aggregate(self, ctx: Context, server: Server, uploads: Mapping[int, Tree]) -> Server:
        """Average the surrogates, recover the mean gradient, step (Algorithm 3)."""
        try:
            mean = self.recover(ctx.plan, server, self.mean(list(uploads.values())))
        except (AttributeError, KeyError, IndexError, ValueError, RuntimeError) as cause:
            raise ProtocolError(f"A client sent surrogates that cannot be averaged: {cause}") from cause
        return self.stepped(ctx, server, mean)

    def mean(self, uploads: Sequence[Surrogates]) -> Surrogates:
        """Return the mean of the clients' surrogates, float64 (Eq. 20, 21)."""

        def average(parts: Sequence[Params]) -> Params:
            return {n: torch.stack([p[n].double() for p in parts]).mean(0) for n in parts[0]}

        return Surrogates(
            average([u.g for u in uploads]), average([u.sigma for u in uploads]), average([u.beta for u in uploads])
        )

    def recover(self, plan: Plan, server: Server, found: Surrogates) -> Params:
        """Return the gradient at the true weights, float64, from surrogates of the same round (Eq. 22).

        With the noise of the upload on it: bound times R o noise.
        """
        own: Secrets = server.own
        combined = combine(
            tree_map(lambda t: t.to(own.mask.device, torch.float64), found), own.coefficients, own.mask @ own.mask
        )
        exact = unscale(combined, self.multipliers(plan, server), server.params)
        return {n: self.bound * value for n, value in exact.items()}

    def decoded(self, ctx: Context, server: Server, client: int, upload: Tree) -> Params:
        """Return what the server makes of one client's upload."""
        return self.recover(ctx.plan, server, upload)

    def multipliers(self, plan: Plan, server: Server) -> Params:
        """Return R by parameter of the original network: what the server multiplies a coordinate by, noise and all."""
        every = self.expansion(plan).channels.multipliers(server.own.scales)
        return {n: every[n] for n in plan.net.names}

    def deliver(self, ctx: Context, server: Server) -> Tree:
        """Return the final expanded model with hidden scales and no mask, as PBPFL does: the paper does not say how."""
        expansion = self.expansion(ctx.plan)
        multiplier = expansion.channels.multipliers(self.scales(ctx).to(server.params[HEAD_WEIGHT].device))
        return Released(multiply(expansion.full(server.params), multiplier, self.dtype))

    def predict(self, plan: Plan, message: Tree, x: Tensor) -> Tensor:
        """Return logits [B, C] of a delivered model, or masked logits of a broadcast one."""
        return self.expansion(plan).net(message.params, x.to(message.params[HEAD_WEIGHT].dtype))

    # -- a client ------------------------------------------------------------------------------------------------
    def prepare(self, ctx: Context, me: Tree, message: Tree, data: Data) -> Job | None:
        """Return the inputs of `compute`: the perturbed model, the mask's directions [m, C], one batch."""
        if not isinstance(message, Perturbed):
            return None
        self.expansion(ctx.plan)  # here, because tracing a network does not work inside vmap
        like, batches = message.params[HEAD_WEIGHT], self.batches(ctx, data)
        unknown = torch.eye(len(like), dtype=like.dtype, device=like.device)
        directions = message.direction[None] if len(message.direction) else unknown
        return Job(message.params, batches, torch.zeros((), dtype=like.dtype, device=like.device), directions, ())

    def compute(self, plan: Plan, job: Job) -> Tree:
        """Return the surrogate gradients of the original network's weights: one forward, m + 2 backward passes."""
        expansion = self.expansion(plan)
        odd, transitional = expansion.split(job.start)
        return surrogates(expansion.net, odd, at(job, 0)[0], job.own, False, transitional)

    def upload(self, ctx: Context, me: Tree, result: Tree) -> Tree:
        """Send the surrogates divided by the bound, with noise on the first of them."""
        scaled: Surrogates = tree_map(lambda t: t / self.bound, result)
        layout = Layout.of(scaled.g)
        flat = layout.pack(scaled.g)
        noise = self.added(ctx, me, len(flat)).to(flat.device)
        return Surrogates(layout.unpack((flat.double() + noise).to(flat.dtype)), scaled.sigma, scaled.beta)

    def added(self, ctx: Context, me: Tree, words: int) -> Tensor:
        """Return a client's noise on G / bound, float64 [words], at the perturbed weights. Default: none."""
        return torch.zeros(words, dtype=torch.float64)

    # -- the adversary -------------------------------------------------------------------------------------------
    def evidence(self, view: View) -> list[Evidence]:
        """Return each client's recovered gradient (server), or its first surrogate (listener)."""
        shelf, found = self.shelf(view), []
        for exchange in exchanges(view):
            server, client = view.state_at(exchange), exchange.slot.client
            if server is None:
                variance = self.noise_variance(view.plan, None)
                found.append(shelf.overheard([exchange], exchange.answer.g, variance))
                continue
            degree = int(server.own.graph[client].sum()) if len(server.own.graph) else 0
            observed = self.recover(view.plan, server, exchange.answer)
            multipliers, variance = self.multipliers(view.plan, server), self.noise_variance(view.plan, degree)
            found.append(shelf.recovered([exchange], observed, server, multipliers, variance))
        return found

    def shelf(self, view: View) -> Shelf:
        """Return what makes evidence about `view`."""
        return Shelf(view.plan, self.expansion(view.plan), self.bound)

    def noise_variance(self, plan: Plan, degree: float | None) -> float:
        """Return the variance of the noise on a coordinate of G / bound, for a client with `degree` neighbors.

        None stands for the mean degree, for who was not told the graph.
        """
        return 0.0
