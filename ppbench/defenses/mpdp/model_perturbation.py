"""The common base of MP-DP and its baselines: an expanded perturbed model, noise on uploads, a recovered mean.

Yang et al., arXiv 2412.11737: Algorithm 1 (the server perturbs), Algorithm 3 (it recovers and steps), Theorem 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from ppbench.base.autodiff import gradient
from ppbench.base.errors import ProtocolError, UsageError
from ppbench.base.tree import Params, Tree, node, tree_map
from ppbench.defenses.mpdp.expansion import Expansion, expanded
from ppbench.defenses.pbpfl.perturbation import Perturbation, Perturbed, Surrogates, exchanges, whole_cohorts
from ppbench.federation.bounds import OpenFraction, between
from ppbench.federation.contract import Context, Server
from ppbench.federation.evidence import Evidence, Measure, Shared, Simulate
from ppbench.federation.plan import Data, Layout, Noise, Plan
from ppbench.federation.view import Exchange, View
from ppbench.nets.channels import Channels
from ppbench.nets.net import Net

# -- Clipping before masking, which bounds the sensitivity of MP-DP, as far as a client can do it --
# Yang et al. (2024, note 2) clip the gradient of the true model, F / max(1, ||F|| / B), and take S_f = B. By their
# own Theorem 2 (and note 1) a client does not know F = R o (G - r^T Psi + r^T r Phi): R and r are the server's, and
# guesses give no bound. A client knows G, the gradient at the perturbed weights, to which the noise is added. So the
# feasible rule with a bounded sensitivity is the paper's with G instead of F. One factor scales G, Psi and Phi, so
# that the server recovers that factor times F (clipping G alone would break Theorem 4). The mask makes G larger than
# F, for kappa above 1 by about kappa^2, and clipping costs as much signal.

Clip = Literal["seen", "oracle", "none"]


def tree_norm(tree: Mapping[str, Tensor]) -> Tensor:
    """Return the L2 norm of all entries of a tree, a scalar, float64."""
    return torch.stack([value.double().square().sum() for value in tree.values()]).sum().sqrt()


def clipping_factor(measured: Mapping[str, Tensor], bound: float) -> Tensor:
    """Return min(1, bound / ||measured||), a scalar, float64; its derivative is 0 if nothing is clipped."""
    squares = torch.stack([value.double().square().sum() for value in measured.values()]).sum()
    return bound / squares.clamp(min=bound**2).sqrt()


def clipped(surrogates: Surrogates, measured: Params, bound: float) -> Surrogates:
    """Return the surrogates times min(1, bound / ||measured||), one factor for all, so that recovery stays exact."""
    by = clipping_factor(measured, bound)
    return tree_map(lambda value: value * by.to(value.dtype), surrogates)


@dataclass(frozen=True, eq=False)
class Clipped:
    """A simulation of clients that each clip `true`, on their slot's batch, by the norm of `measured`; their mean."""

    true: Simulate
    measured: Simulate
    bound: float
    alters: ClassVar[bool] = True

    @property
    def unscaled(self) -> Simulate:
        """The simulation before clipping, which has the same direction for one client."""
        return self.true

    def __call__(self, x: Tensor, y: Tensor) -> Params:
        """Return the mean of the clipped gradients at x [U, B, *shape], y [U, B, C], in the dtype of x."""
        parts = []
        for i in range(len(x)):
            batch = x[i : i + 1], y[i : i + 1]
            by = clipping_factor(self.measured(*batch), self.bound).to(x.dtype)
            parts.append({name: by * value for name, value in self.true(*batch).items()})
        return {name: torch.stack([part[name] for part in parts]).mean(0) for name in parts[0]}


MPDP_SETTING: Mapping[str, Any] = {
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
# Twenty clients halve the noise of ten; few examples are memorized, so that membership attacks can succeed.
MPDP_QUICK_SETTING: Mapping[str, Any] = {
    **MPDP_SETTING,
    "batch_size": 32,
    "clients": 20,
    "train": 300,
    "lr": 0.3,
    "rounds": 600,
}
# Tables 2 and 4: GIFD's generator and the learned attack get half of the data; 100 epochs are of the rest.
MPDP_PAPER_SETTING: Mapping[str, Any] = {
    **MPDP_SETTING,
    "dataset": "cifar10",
    "model": "resnet20",
    "model_options": {"head_bias": False},
    "clients": 5,
    "public": 0.5,
    "rounds": 1950,  # 100 epochs of 25,000 / 5 examples in batches of 256
    "attacks": ("gifd", "mia_nn"),
    "attack_batch": (1,),
    "victims": 64,
    "stages": ("init", "iterate", "final"),
    "threats": ("server/1", "client/1"),
}


@node(name="ppbench.defenses.mpdp.model_perturbation.Secrets")
class ServerSecrets:
    """The server's own state. All but `graph` are empty before the first round.

    scales: [count] > 0, hidden channels' r and 1/s. mask: [C], the mask r of the logits. coefficients: [m], with r =
    sum_k c_k d_k of clients' directions. graph: [N, N] bool, the pairs that share noise.
    """

    scales: Tensor
    mask: Tensor
    coefficients: Tensor
    graph: Tensor


@dataclass(frozen=True)
class ModelPerturbation(Perturbation):
    """Perturbs the expanded model anew every round and recovers gradients from the clients' surrogates.

    Attributes:
        epsilon, delta: the paper's privacy budget of ONE round.
        gamma: "vector" has one secret coefficient per class (the paper's: C + 2 backward passes and uploads), "scalar"
            one for all, along a public direction (PBPFL's: three).
        bound: the L2 norm B to which a client clips, and the sensitivity in whose units its noise is.
        clip: the gradient whose norm determines the factor of G, Psi and Phi (`clipping`). "seen": G, the gradient at
            the perturbed weights, which a client has. "oracle": the true gradient, as in the paper; no client knows it
            and nothing is sent for it, so this is a simulation, not a protocol. "none": no clipping; a gradient above
            the bound silently voids the claim.
        kappa: as in PBPFL, but 1: the paper gives none, and with clip="seen" a larger mask prevents learning (digits at
            epsilon 200: accuracy 0.13 at 10, 0.77 at 1, chance 0.10). It hides outputs less: read directly, 35 to 57 %
            of a memorized model's decisions are correct, at 10 18 %.
    """

    epsilon: Annotated[float, between(1e-6, 1e6)] = 3.0
    delta: OpenFraction = 1e-5
    gamma: Literal["vector", "scalar"] = "vector"
    bound: Annotated[float, between(1e-12, 1e12)] = 1.0
    clip: Clip = "seen"
    kappa: Annotated[float, between(1e-6, 1e30)] = 1.0

    version: ClassVar[str] = "3"
    control: ClassVar[str] = "epsilon"
    grids: ClassVar[Mapping[str, tuple[float, ...]]] = {"quick": (3.0, 10.0, 30.0), "paper": (0.5, 1.0, 3.0, 5.0, 10.0)}
    paper: ClassVar[str] = (
        "Yang et al., Efficiently Achieving Secure Model Training and Secure Aggregation to Ensure "
        "Bidirectional Privacy-preservation in Federated Learning, 2024 (arXiv 2412.11737)"
    )
    setting: ClassVar[Mapping[str, Mapping[str, Any]]] = {"quick": MPDP_QUICK_SETTING, "paper": MPDP_PAPER_SETTING}

    def check_data(self, plan: Plan, counts: Sequence[int]) -> None:
        """Raise UsageError for clients of unequal sizes: the paper's weights 1/K would not match their examples."""
        if max(counts) - min(counts) > 1:
            raise UsageError(
                f"Defense {self.name!r} averages clients with equal weights 1/K, but they hold from {min(counts)} to "
                f"{max(counts)} examples; use --partition iid."
            )

    def expansion(self, plan: Plan) -> Expansion:
        """Return the expansion of the network (UsageError: it cannot be perturbed)."""
        return expanded(plan.spec)

    def network(self, plan: Plan) -> Net:
        """Return the expanded network."""
        return self.expansion(plan).net

    def channels(self, plan: Plan) -> Channels:
        """Return where scales enter the expanded network."""
        return self.expansion(plan).channels

    def full(self, plan: Plan, params: Params) -> Params:
        """Return the expanded network's true weights."""
        return self.expansion(plan).full(params)

    def scales(self, ctx: Context) -> Tensor:
        """Return new scales [count], float64, on the CPU: r and 1/s of the laws of Eq. 13."""
        return self.expansion(ctx.plan).laws.draw(ctx.secret)

    def secrets(self, ctx: Context, server: Server, scales: Tensor, hidden: Params) -> tuple[Tree, Tensor, Tensor]:
        """Return (`ServerSecrets`, mask r, public direction r_a of a scalar gamma, else [0])."""
        uniform = ctx.secret.uniform((3, ctx.plan.spec.classes)).to(scales.device)
        direction = 2 * uniform[0] - 1
        if self.gamma == "vector":
            sign = torch.where(uniform[1] < 0.5, -1.0, 1.0)
            direction = direction * sign * (0.5 + 1.5 * uniform[2])  # r_a times gamma, one coefficient per class
        size = self.mask_size(ctx, hidden, direction)
        r = size * direction
        coefficients, public = (r, r[:0]) if self.gamma == "vector" else (size[None], direction)
        graph = server.own.graph if isinstance(server.own, ServerSecrets) else torch.zeros(0, 0, dtype=torch.bool)
        return ServerSecrets(scales, r, coefficients, graph), r, public

    def coefficients(self, own: ServerSecrets) -> tuple[Tensor, Tensor]:
        """Return the secret coefficients [m] and the mask's squared norm."""
        return own.coefficients, own.mask @ own.mask

    def weights(self, server: Server, clients: Sequence[int]) -> list[float]:
        """Return equal weights 1/K (Eq. 20)."""
        return [1 / len(clients)] * len(clients)

    def aggregate(self, ctx: Context, server: Server, uploads: Mapping[int, Tree]) -> Server:
        """Average the surrogates, recover the mean gradient, step (Algorithm 3)."""
        try:
            mean = self.recover(ctx.plan, server, self.mean(list(uploads.values())))
        except (AttributeError, KeyError, IndexError, ValueError, RuntimeError) as cause:
            raise ProtocolError(f"A client sent surrogates that cannot be averaged: {cause}") from cause
        return self.stepped(ctx, server, mean)

    def mean(self, uploads: Sequence[Surrogates]) -> Surrogates:
        """Return the mean of the clients' surrogates, float64 (Eq. 20, 21)."""
        return Surrogates(*(average([getattr(u, part) for u in uploads]) for part in ("g", "sigma", "beta")))

    def recover(self, plan: Plan, server: Server, surrogates: Surrogates) -> Params:
        """Return the gradient at the true weights, float64 (Eq. 22), with noise bound times R o the upload's noise."""
        return {name: self.bound * value for name, value in super().recover(plan, server, surrogates).items()}

    @property
    def shrinks(self) -> bool:
        """Whether clients clip, so that uploads are smaller by an unknown factor."""
        return self.clip != "none"

    def omniscient(self, plan: Plan, server: Server, result: Tree) -> Tree:
        """Return the surrogates, clipped by the norm of the true gradient if clip is "oracle": no client knows it."""
        if not (self.clip == "oracle" and self.shrinks):
            return result
        return clipped(result, Perturbation.recover(self, plan, server, result), self.bound)

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """As the base class, after clipping the surrogates if clip is "seen"."""
        if isinstance(message, Perturbed) and self.clip == "seen":
            result = clipped(result, result.g, self.bound)
        return super().reply(ctx, me, message, result, data)

    def multipliers(self, plan: Plan, server: Server) -> Params:
        """Return R by parameter of the original network: the server's multiplier of coordinates and their noise."""
        every = super().multipliers(plan, server)
        return {name: every[name] for name in plan.net.names}

    def upload(self, ctx: Context, me: Tree, result: Tree) -> Tree:
        """Return the surrogates divided by the bound, with noise on the first of them."""
        scaled: Surrogates = tree_map(lambda t: t / self.bound, result)
        layout = Layout.of(scaled.g)
        flat = layout.pack(scaled.g)
        noise = self.added(ctx, me, len(flat)).to(flat.device)
        return Surrogates(layout.unpack((flat.double() + noise).to(flat.dtype)), scaled.sigma, scaled.beta)

    def added(self, ctx: Context, me: Tree, words: int) -> Tensor:
        """Return a client's noise on G / bound, float64 [words], at the perturbed weights. Default: none."""
        return torch.zeros(words, dtype=torch.float64)

    def noise_variance(self, plan: Plan, degree: float | None) -> float:
        """Return the variance of `added` at one coordinate, for a client with `degree` neighbors; None: the mean."""
        return 0.0

    def evidence(self, view: View) -> list[Evidence]:
        """Return evidence of each client's gradient (`sums`: each cohort's mean) for an attacker that ignores Psi, Phi.

        The server's is recovered, at the true weights, with the noise's root mean square over the coordinates given R.
        It does not know a client's clipping factor, but the broadcast: it simulates the factor too, of each client of a
        sum (`Clipped`). An eavesdropper gets the first surrogate, the gradient of another network than the plan's, so
        `params` is None; under "oracle" clipping it compares directions.
        """
        plan, expansion, pieces = view.plan, self.expansion(view.plan), []
        true, perturbed = Shared(plan), Shared(plan, partial(_simulation, expansion, self.bound, self.clip == "seen"))
        perturbed_gradient = Shared(plan, partial(_simulation, expansion, 1.0, False))
        clipped_simulations: dict[tuple[int, int], Simulate] = {}
        for unit in whole_cohorts(view) if self.sums else [[e] for e in exchanges(view)]:
            server, slots = view.state_at(unit[0]), tuple(e.slot for e in unit)
            answer = self.mean([e.answer for e in unit]) if self.sums else unit[0].answer
            variance = self._variance(plan, unit[0], server)
            if server is None:
                simulate, law = perturbed.at(unit[0].request.params), _law(math.sqrt(variance))
                unknown = self.shrinks and self.clip == "oracle"
                measure: Measure = "cosine" if unknown else "squares"
                piece = Evidence(slots, answer.g, simulate, noise=law, channel="g", measure=measure)
            else:
                flat_multipliers = torch.cat([value.flatten() for value in self.multipliers(plan, server).values()])
                law = _law(self.bound * float(flat_multipliers.square().mean().sqrt()) * math.sqrt(variance))
                observed, simulate = self.recover(plan, server, answer), true.at(server.params)
                if self.shrinks:
                    measured = perturbed_gradient.at(unit[0].request.params) if self.clip == "seen" else simulate
                    whole = Clipped(simulate, measured, self.bound)
                    simulate = clipped_simulations.setdefault((id(simulate), id(measured)), whole)
                channel = "noisy" if variance else "recovered"
                piece = Evidence(slots, observed, simulate, server.params, noise=law, channel=channel)
            pieces.append(replace(piece, channel="sum") if self.sums else piece)
        return pieces

    def _variance(self, plan: Plan, exchange: Exchange, server: Server | None) -> float:
        """Return the variance of the noise on a coordinate of the observation, as far as it is known."""
        if self.sums:  # the noise of pairs has cancelled
            return self.noise_variance(plan, 0) / plan.clients
        if server is None:
            return self.noise_variance(plan, None)
        graph = server.own.graph
        return self.noise_variance(plan, int(graph[exchange.slot.client].sum()) if len(graph) else 0)


def average(parts: Sequence[Params]) -> Params:
    """Return the mean of several trees of equal form, float64."""
    return {name: torch.stack([part[name].double() for part in parts]).mean(0) for name in parts[0]}


def _simulation(expansion: Expansion, bound: float, clips: bool, plan: Plan, params: Params) -> Simulate:
    """Return the simulation of G / bound of the original parameters, perhaps clipped, at perturbed weights `params`."""

    def simulate(x: Tensor, y: Tensor) -> Params:
        original, transitional = expansion.split({name: value.to(x.dtype) for name, value in params.items()})

        def slot_gradient(images: Tensor, labels: Tensor) -> Params:
            def loss(p: Params) -> Tensor:
                return plan.example_loss(expansion.net({**p, **transitional}, images), labels).mean()

            g = gradient(loss, original)
            by = clipping_factor(g, bound).to(x.dtype) / bound if clips else 1 / bound
            return {name: value * by for name, value in g.items()}

        if not clips:
            return slot_gradient(x.flatten(0, 1), y.flatten(0, 1))
        parts = [slot_gradient(*batch) for batch in zip(x, y, strict=True)]
        return {name: torch.stack([part[name] for part in parts]).mean(0) for name in parts[0]}

    return simulate


def _law(std: float) -> Noise | None:
    """Return a Gaussian law for the noise, a sum of uniforms, times R if recovered; None for std 0."""
    return Noise("gaussian", std) if std else None
