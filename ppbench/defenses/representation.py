"""Defenses of the representation: what the network's features are computed of, or which of them an upload shows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import scipy
import torch
from torch import Tensor
from torch.func import vjp, vmap

from ppbench.base.tree import Params, Tree, node
from ppbench.federation.bounds import InMemoryCount, NonNegative, UnitInterval
from ppbench.federation.contract import Context, Defense, Job
from ppbench.federation.plan import Batch, Data, Plan
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
        """As the base class; also refuse networks whose head is frozen, or reads maps."""
        super().check(plan)
        fits = HEAD_NAMES[0] in plan.net.names and not plan.net.pixelwise
        self.require(fits, "rate", "used with a network whose last layer is linear, and trained")

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
    """Trains on lambda x + (1 - lambda) x', inputs and labels alike, x' another of the client's examples.

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
        self.require(plan.spec.classes > 1 and not plan.net.pixelwise, "alpha", "used where targets are classes")

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

        y = torch.nn.functional.one_hot(partners.label, batches.y.shape[-1])
        return Batch(mix(batches.x, partners.x), mix(batches.y, y), batches.w)

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """As the base class; in set-up keep the partners."""
        me, answer = super().reply(ctx, me, message, result, data)
        if isinstance(message, Hello):
            me = Partners(data.x[: self.partners].clone(), data.y[: self.partners].argmax(1))
        return me, answer
