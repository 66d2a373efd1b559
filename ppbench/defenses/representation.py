"""Defenses of the representation: what features are computed of, which an upload shows, and what the head reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import scipy
import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.nn.functional import linear, one_hot, softplus

from ppbench.base.autodiff import gradient
from ppbench.base.tree import Params, Tree, node
from ppbench.federation.bounds import InMemoryCount, NonNegative, UnitInterval
from ppbench.federation.contract import Context, Defense, Job, Server
from ppbench.federation.evidence import Evidence, Mappable, Shared
from ppbench.federation.plan import Batch, Data, Plan
from ppbench.federation.view import View
from ppbench.federation.wire import Hello
from ppbench.nets.classifier import HEAD_NAMES

# -- Soteria: the head's gradient without the features that an image is best read off --

ROWS_AT_ONCE = 32
"""Features whose derivatives are in memory at the same time, for each image of a batch."""
NO_SLOPE = 1e-12
"""Least norm of a feature's derivative: a unit that does not fire, 0 without a slope, tells nothing of an image."""


@dataclass(frozen=True)
class Soteria(Defense):
    """Leaves those columns of the head's gradient out, at each local step, whose features tell most of an image.

    Of features r of inputs x these are the largest sums over a batch of |r_i| / ||dr_i / dx||, which the authors' code
    takes for ||r_i (dr_i / dx)^-1||, the change of x that a change of r_i from r_i to 0 asks for. The rest of the
    gradient stays as it is. rate: share of the columns that are left out.
    """

    rate: UnitInterval = 0.6

    name: ClassVar[str] = "soteria"
    control: ClassVar[str] = "rate"
    grids: ClassVar[Mapping[str, tuple[float, ...]]] = {"quick": (0.2, 0.6, 0.9), "paper": (0.01, 0.4, 0.6, 0.8)}
    paper: ClassVar[str] = "Sun et al., Soteria, CVPR 2021 (arXiv 2012.06043)"
    epsilon_reason: ClassVar[str] = "which columns are left out depends on the data, and the others are not changed"

    def check(self, plan: Plan) -> None:
        """As the base class; also refuse networks whose head is frozen, or reads maps or every token."""
        super().check(plan)
        fits = HEAD_NAMES[0] in plan.net.names and not plan.net.pixelwise and not plan.next_token
        self.require(fits, "rate", "used with a network whose last layer is linear, trained, and reads one vector")

    def copies(self, plan: Plan, clients: int, examples: int) -> int:
        """As the base class, and the derivatives of the features that are computed at once, in models of their size."""
        inputs = min(plan.local.batch, examples) * ROWS_AT_ONCE * math.prod(plan.spec.shape)
        return super().copies(plan, clients, examples) + clients * -(-inputs // plan.net.parameter_count)

    def local_gradient(self, plan: Plan, params: Params, batch: Batch, own: Tree, noise: Tree) -> Params:
        """Return the batch gradient with zeros in the columns that are left out."""
        clean = super().local_gradient(plan, params, batch, own, noise)
        exposure = self.exposure(plan, params, batch)
        count = round(self.rate * len(exposure))
        hidden = torch.zeros_like(exposure).scatter(0, exposure.topk(count).indices, 1.0)
        return clean | {HEAD_NAMES[0]: clean[HEAD_NAMES[0]] * (1 - hidden)}

    def exposure(self, plan: Plan, params: Params, batch: Batch) -> Tensor:
        """Return the sum [D] over a batch of |r_i| / ||dr_i / dx||, for each of the head's D inputs."""
        features, pull = vjp(lambda x: plan.net.features(params, x), batch.x)[:2]

        def slope(row: Tensor) -> Tensor:
            norms: Tensor = pull(row.expand_as(features))[0].flatten(1).norm(dim=1)
            return norms

        rows = torch.eye(features.shape[1], dtype=features.dtype, device=features.device)
        slopes = torch.cat([vmap(slope)(part) for part in rows.split(ROWS_AT_ONCE)]).T
        total: Tensor = (batch.w[:, None] * features.abs() / slopes.clamp(min=NO_SLOPE)).sum(0)
        return total


# -- Mixup: clients train on mixtures of their examples --


@node
class Partners:
    """The client's own examples that others are mixed with. x: [N, *shape]; label: [N] int64, their classes."""

    x: Tensor
    label: Tensor


@dataclass(frozen=True)
class Mixup(Defense):
    """Trains on lambda x + (1 - lambda) x', inputs and labels alike, x' one of the client's examples.

    lambda is the larger of two parts by a law Beta(alpha, alpha), drawn with x' anew for each example of each step;
    where both examples are drawn alike, as in the paper, this changes nothing. alpha: 0 mixes nothing, 1 is uniform,
    and large values mix halves. partners: examples, at most, that a client keeps to mix others with: its first ones.
    They are kept because a probe, in which a client has one victim's batch alone, would else have none to mix.
    """

    alpha: NonNegative = 1.0
    partners: InMemoryCount = 256

    name: ClassVar[str] = "mixup"
    control: ClassVar[str] = "alpha"
    grids: ClassVar[Mapping[str, tuple[float, ...]]] = {"quick": (0.2, 1.0, 8.0), "paper": (0.2, 0.4, 1.0)}
    paper: ClassVar[str] = (
        "Zhang et al., mixup, ICLR 2018 (arXiv 1710.09412); against gradient inversion: Huang et al., NeurIPS 2021 "
        "(arXiv 2112.00059)"
    )
    epsilon_reason: ClassVar[str] = "a mixture shows a share of each of its examples, without noise"

    @property
    def mean_share(self) -> float:
        """The mean of lambda, for alpha > 0."""
        log_beta = float(scipy.special.betaln(self.alpha, self.alpha))
        return 0.5 + math.exp(-math.log(self.alpha) - self.alpha * math.log(4) - log_beta)

    def share_beyond(self, share: float) -> float:
        """Return the probability that lambda is larger than `share`, at least 1/2, for alpha > 0."""
        return 2 * float(scipy.special.betainc(self.alpha, self.alpha, 1 - share))

    def check(self, plan: Plan) -> None:
        """As the base class; also refuse targets that are no classes."""
        super().check(plan)
        classes = plan.spec.classes > 1 and not plan.net.pixelwise and not plan.next_token
        self.require(classes, "alpha", "used where targets are classes")

    def copies(self, plan: Plan, clients: int, examples: int) -> int:
        """As the base class, and the examples that are kept, in models of their size."""
        kept = clients * min(self.partners, examples) * math.prod(plan.spec.shape)
        return super().copies(plan, clients, examples) + -(-kept // plan.net.parameter_count)

    def prepare(self, ctx: Context, me: Tree, message: Tree, data: Data) -> Job | None:
        """Return the job of the base class with mixed batches; the partners stay out of it."""
        job = super().prepare(ctx, (), message, data)
        return job if job is None or self.alpha == 0 else replace(job, batches=self.mixed(ctx, me, job.batches))

    def mixed(self, ctx: Context, partners: Partners, batches: Batch) -> Batch:
        """Return batches of the same size in which each example is mixed with a partner."""
        shape = batches.w.shape
        share = torch.from_numpy(scipy.special.betaincinv(self.alpha, self.alpha, ctx.secret.uniform(shape).numpy()))
        share = torch.maximum(share, 1 - share).to(batches.w)
        index = ctx.secret.integers(0, len(partners.x), shape).to(batches.w.device)

        def mix(own: Tensor, other: Tensor) -> Tensor:
            part = share.view(*shape, *[1] * (own.dim() - 2))
            return part * own + (1 - part) * other[index].to(own)

        y = one_hot(partners.label, batches.y.shape[-1])
        return Batch(mix(batches.x, partners.x), mix(batches.y, y), batches.w)

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """As the base class; in set-up keep the partners."""
        me, answer = super().reply(ctx, me, message, result, data)
        if isinstance(message, Hello):
            me = Partners(data.x[: self.partners].clone(), data.y[: self.partners].argmax(1))
        return me, answer


# -- PRECODE: the head reads a random sample around what it read before --

ENCODER, DECODER = "bottleneck.encoder", "bottleneck.decoder"
LEAST_SPREAD = 1e-6
"""Least standard deviation of a sample, whose logarithm enters the loss."""


@dataclass(frozen=True)
class Precode(Defense):
    """Puts a variational bottleneck before the head, whose sample is drawn anew for each example of each step.

    An encoder makes a mean and a spread [size] each of the head's input r [D], a decoder the head's new input [D] of
    mean + softplus(spread) * N(0, 1); both are linear layers and travel with the model. The loss adds beta times the KL
    divergence in bits of that law from N(0, 1). Whoever uses the model takes the mean for the sample.
    """

    beta: NonNegative = 1e-3
    size: InMemoryCount = 256

    name: ClassVar[str] = "precode"
    control: ClassVar[str] = "beta"
    grids: ClassVar[Mapping[str, tuple[float, ...]]] = {"quick": (1e-4, 1e-3, 0.01), "paper": (1e-3,)}
    paper: ClassVar[str] = "Scheliga et al., PRECODE, WACV 2022 (arXiv 2108.04725)"
    epsilon_reason: ClassVar[str] = "the network before the bottleneck computes without noise"

    def check(self, plan: Plan) -> None:
        """As the base class; also refuse networks whose head reads maps or every token."""
        super().check(plan)
        fits = not plan.net.pixelwise and not plan.next_token
        self.require(fits, "size", "used with a network whose last layer is linear and reads one vector")

    def copies(self, plan: Plan, clients: int, examples: int) -> int:
        """As the base class, of the model with the bottleneck."""
        own = 3 * self.size * (plan.net.feature_count + 1)
        return super().copies(plan, clients, examples) * (1 + -(-own // plan.net.parameter_count))

    def init_server(self, ctx: Context, params: Params) -> Server:
        """Return the state of the base class; the weights include the bottleneck's, by torch's law of linear layers."""
        width = ctx.plan.net.feature_count
        whole = {name: params[name] for name in ctx.plan.net.names}
        for layer, inputs, outputs in ((ENCODER, width, 2 * self.size), (DECODER, self.size, width)):
            draws = torch.rand(outputs, inputs + 1, generator=ctx.generator)
            table = ((2 * draws - 1) / math.sqrt(inputs)).to(next(iter(params.values())))
            whole |= {f"{layer}.weight": table[:, :-1].contiguous(), f"{layer}.bias": table[:, -1].contiguous()}
        return super().init_server(ctx, whole)

    def prepare(self, ctx: Context, me: Tree, message: Tree, data: Data) -> Job | None:
        """Return the job of the base class with the draws [T, B, size] of all samples."""
        job = super().prepare(ctx, me, message, data)
        return None if job is None else replace(job, noise=ctx.secret.normal((*job.batches.w.shape, self.size)))

    def local_gradient(self, plan: Plan, params: Params, batch: Batch, own: Tree, noise: Tree) -> Params:
        """Return the gradient of the mean loss of a batch, with a sample of each example."""

        def mean_loss(p: Params) -> Tensor:
            outputs, divergence = self.outputs(plan, p, batch.x, noise)
            total = plan.example_loss(outputs, batch.y) + self.beta * divergence
            return (batch.w * total).sum() / batch.w.sum().clamp(min=1e-12)

        return gradient(mean_loss, params)

    def outputs(self, plan: Plan, params: Params, x: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs [B, C] for x [B, *shape], and divergences [B]; draws [B, size]: of samples; 0: means."""
        mean, spread = _linear(params, ENCODER, plan.net.features(params, x)).split(self.size, -1)
        std = softplus(spread).clamp(min=LEAST_SPREAD)
        divergence = (mean.square() + std.square() - 1 - 2 * std.log()).sum(-1) / (2 * math.log(2))
        return plan.net.head(params, _linear(params, DECODER, mean + std * draws)), divergence

    def predict(self, plan: Plan, message: Tree, x: Tensor) -> Tensor:
        """Return the outputs at the means."""
        return self.outputs(plan, message.params, x, x.new_zeros(len(x), self.size))[0]

    def evidence(self, view: View) -> list[Evidence]:
        """Return the evidence of who knows the network and takes means for the samples."""
        shared = Shared(view.plan, lambda plan, params: BottleneckGradient(params, plan, self))
        return [replace(e, simulate=shared.at(e.params)) for e in super().evidence(view) if e.params is not None]


def _linear(params: Params, layer: str, x: Tensor) -> Tensor:
    return linear(x, params[f"{layer}.weight"].to(x), params[f"{layer}.bias"].to(x))


@dataclass(frozen=True, eq=False)
class BottleneckGradient(Mappable):
    """The gradient of a network with PRECODE's bottleneck, at samples drawn by `draws`, or at means."""

    plan: Plan
    defense: Precode

    alters: ClassVar[bool] = True

    def __call__(self, x: Tensor, y: Tensor, draws: Tensor | None = None) -> Params:
        """Return the gradient of a batch x [U, B, *shape], y [U, B, C], draws [U, B, size], in the dtype of x."""
        images, labels = x.flatten(0, 1), y.flatten(0, 1)
        weights = {name: value.to(x.dtype) for name, value in self.params.items()}
        batch = Batch(images, labels, torch.ones(len(images), dtype=x.dtype, device=x.device))
        noise = x.new_zeros(len(images), self.defense.size) if draws is None else draws.flatten(0, 1)
        return self.defense.local_gradient(self.plan, weights, batch, (), noise)
