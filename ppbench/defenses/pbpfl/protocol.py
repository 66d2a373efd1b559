"""PBPFL: the server perturbs the model, clients train on it without being able to read it (Feng et al. 2020)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ppbench.base.tree import Params, Tree, node, tree_map
from ppbench.defenses.claims import paper
from ppbench.defenses.pbpfl.evidence import gradient_evidence
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
from ppbench.federation.contract import Claim, Context, Defense, Job, Server, at
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Data, Plan
from ppbench.federation.view import View
from ppbench.nets.channels import Channels, Norms
from ppbench.nets.walk import channels

FENG2020 = paper("feng2020")


SETTING: Mapping[str, Any] = {
    "model": "mlp",
    "model_options": {"hidden": "64,64"},
    "loss": "squared",
    "upload": "gradient",
    "schedule": "parallel",
    "optimizer": "adam",
    "lr": 5e-3,
    "rounds": 400,
    "decay_at": (),
}


@node
class Secrets:
    """The server's secrets of one round. scales: [count] > 0, the hidden channels' r; gamma: scalar; direction: [C]."""

    scales: Tensor
    gamma: Tensor
    direction: Tensor


@dataclass(frozen=True)
class PBPFL(Defense):
    """Perturbs hidden channels by secret scales and the logits by a secret multiple of a public direction.

    Fresh every round: scales r ~ U(.5, 2), direction r_a ~ U(-1, 1)^C, gamma so that the mask is kappa times as large
    as the logits (the paper names no laws). Clients return three gradients, from which the server recovers each one's
    exact gradient: to the server this is FedSGD.

    Attributes:
        kappa: mask-to-signal ratio RMS(gamma alpha r_a) / RMS(y) at the logits, on noise inputs; > 0. Precision falls
            with its square.
        precision: of the perturbed model, and so of what travels.
        norms: "refuse" normalization layers, or perturb their affine part only ("affine").
        head_bias: "masked" puts the mask on the head's bias too; "clear" sends the bias as it is.
    """

    kappa: float = 10.0
    precision: Literal["float64", "float32"] = "float64"
    norms: Norms = "refuse"
    head_bias: Literal["masked", "clear"] = "masked"

    name: ClassVar[str] = "pbpfl"
    control: ClassVar[str] = "kappa"
    grids: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "quick": (1.0, 10.0, 100.0),
        "paper": (0.1, 1.0, 10.0, 100.0, 1000.0),
    }
    paper: ClassVar[str] = FENG2020.citation
    setting: ClassVar[Mapping[str, Mapping[str, Any]]] = {"quick": SETTING, "paper": SETTING}
    masked: ClassVar[bool] = True
    claimed: ClassVar[tuple[Claim, ...]] = FENG2020.claims("pbpfl")
    epsilon_reason: ClassVar[str] = "there is no noise; the server recovers every client's exact gradient"

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the perturbed model."""
        return torch.float32 if self.precision == "float32" else torch.float64

    @property
    def bias_masked(self) -> bool:
        """Whether the head's bias carries the mask."""
        return self.head_bias == "masked"

    def check(self, plan: Plan) -> None:
        """Refuse a kappa that is no mask, another loss, local training, and layers that cannot be perturbed."""
        self.require(0 < self.kappa < math.inf, "kappa", "a finite number > 0")
        self.require(self.precision in ("float32", "float64"), "precision", "'float64' or 'float32'")
        self.require(self.head_bias in ("masked", "clear"), "head_bias", "'masked' or 'clear'")
        self.require(self.norms in ("refuse", "affine"), "norms", "'refuse' or 'affine'")
        check_masked(plan, self.name)
        self.channels(plan)
        warn_of_rounding(self.name, self.precision, self.kappa)

    def channels(self, plan: Plan) -> Channels:
        """Return where scales enter the network; raises UsageError for a layer that cannot be perturbed."""
        return channels(plan.spec, self.norms)

    # -- the server ----------------------------------------------------------------------------------------------
    def broadcast(self, ctx: Context, server: Server) -> tuple[Server, Tree]:
        """Draw fresh secrets and return the perturbed model (Eq. 6-8)."""
        device = server.params[HEAD_WEIGHT].device
        scales = self._scales(ctx).to(device)
        classes = ctx.plan.spec.classes
        direction = (torch.rand(classes, generator=ctx.generator, dtype=torch.float64) * 2 - 1).to(device)
        hidden = multiply(server.params, self.channels(ctx.plan).multipliers(scales), torch.float64)
        gamma = self.kappa * mask_size(ctx.plan, ctx.plan.net, hidden, direction, ctx.generator, self.bias_masked)
        params = mask(hidden, gamma * direction, self.bias_masked)
        own = Secrets(scales, gamma, direction)
        sent = {n: value.to(self.dtype) for n, value in params.items()}
        return Server(server.params, server.opt, server.counts, own), Perturbed(sent, direction.to(self.dtype))

    def _scales(self, ctx: Context) -> Tensor:
        count = self.channels(ctx.plan).count
        return 0.5 + 1.5 * torch.rand(count, generator=ctx.generator, dtype=torch.float64)

    def decoded(self, ctx: Context, server: Server, client: int, upload: Tree) -> Params:
        """Return a client's exact gradient."""
        return self.recover(ctx.plan, server, upload)

    def recover(self, plan: Plan, server: Server, found: Surrogates) -> Params:
        """Return the gradient at the true weights, float64, from surrogates of the same round (Eq. 19).

        The combination cancels terms of order kappa^2, so it is taken in float64 whatever travelled, and where the
        server's secrets lie: sums in a ring are on the CPU.
        """
        own: Secrets = server.own
        square = own.gamma**2 * (own.direction @ own.direction)
        combined = combine(tree_map(lambda t: t.to(own.gamma.device, torch.float64), found), own.gamma[None], square)
        return unscale(combined, self.channels(plan).multipliers(own.scales), server.params)

    def deliver(self, ctx: Context, server: Server) -> Tree:
        """Return the final model with hidden scales and no additive mask: its outputs are the true ones."""
        multiplier = self.channels(ctx.plan).multipliers(self._scales(ctx).to(server.params[HEAD_WEIGHT].device))
        return Released(multiply(server.params, multiplier, self.dtype))

    def predict(self, plan: Plan, message: Tree, x: Tensor) -> Tensor:
        """Return logits [B, C] of a delivered model, or masked logits of a broadcast one."""
        return plan.net(message.params, x.to(message.params[HEAD_WEIGHT].dtype))

    # -- a client ------------------------------------------------------------------------------------------------
    def prepare(self, ctx: Context, me: Tree, message: Tree, data: Data) -> Job | None:
        """Return the inputs of `compute`: the perturbed model, its public direction, one batch."""
        if not isinstance(message, Perturbed):
            return None
        batches = self.batches(ctx, data)
        return Job(message.params, batches, torch.zeros((), dtype=batches.x.dtype), message.direction[None], ())

    def compute(self, plan: Plan, job: Job) -> Tree:
        """Return the three surrogate gradients, from one forward and three backward passes."""
        return surrogates(plan.net, job.start, at(job, 0)[0], job.own, self.bias_masked)

    def upload(self, ctx: Context, me: Tree, result: Tree) -> Tree:
        """Send the surrogates as they are."""
        return result

    # -- the adversary -------------------------------------------------------------------------------------------
    def evidence(self, view: View) -> list[Evidence]:
        """Return each client's recovered gradient (server), or its first surrogate at the perturbed weights (listener).

        Both are exact: a perturbed network is a network, and its squared-loss gradient an ordinary one. A client sees
        no other client's upload, and to one who takes things as they are two perturbed models in a row do not subtract
        to a gradient. (Rows of the first layer, brought to norm 1, do: up to a factor and a component a row they show
        what the server's step added to them. Nothing is made of that here.)
        """
        return gradient_evidence(view, self.recover)
