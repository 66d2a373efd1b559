"""SPN: every client trains a secret polarization head on the shared backbone (Fan et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ppbench.base.autodiff import gradient
from ppbench.base.tree import Params, Tree, node
from ppbench.federation.bounds import InMemoryCount, NonNegative, Positive
from ppbench.federation.contract import Context, Defense, Job, Server, step_inputs
from ppbench.federation.plan import Batch, Data, Layout, Plan
from ppbench.federation.wire import Hello


@node
class Secret:
    """A client's secrets. head: weight [K, D], bias [K]; code: [C, K] of -1 and +1; opt: optimizer state."""

    head: Params
    code: Tensor
    opt: Tree


@dataclass(frozen=True)
class SPN(Defense):
    """Adds alpha2 times a polarization loss of a secret linear head; only the public part is uploaded.

    Loss of a batch (Eq. 4, 5, 18): mean of CE(u, y) + alpha2 sum_k max(1 - v_k t_yk, 0), with v the secret head's
    output on the features and t the client's secret code of the class, of `bits` bits. The secret head, initially
    U(-head_scale, head_scale), and its optimizer's state persist at the client; the server takes the unweighted mean
    (Alg. 1-3). phi_tap: the secret head's input: the last linear layer's input, or the convolutions' flat output.
    """

    alpha2: NonNegative = 0.1
    bits: InMemoryCount = 64
    head_scale: Positive = 0.3
    phi_tap: Literal["head", "conv_flat"] = "head"

    name: ClassVar[str] = "spn"
    version: ClassVar[str] = "2"
    control: ClassVar[str] = "alpha2"
    grids: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "quick": (0.01, 0.1, 0.5),
        "paper": (1e-4, 1e-3, 0.01, 0.1, 0.2, 0.3, 0.4, 0.5),
    }
    paper: ClassVar[str] = "Fan et al., Rethinking Privacy Preserving Deep Learning, 2020 (arXiv 2006.11601)"

    def check(self, plan: Plan) -> None:
        """As the base class; also refuse another loss than cross-entropy."""
        super().check(plan)
        self.require(plan.loss == "cross_entropy", "alpha2", "used with loss 'cross_entropy' (Eq. 4)")

    def weights(self, server: Server, clients: Sequence[int]) -> list[float]:
        """Return equal weights (Alg. 2)."""
        return [1 / len(clients)] * len(clients)

    def init_client(self, ctx: Context, params: Params) -> Tree:
        """Draw the secret head and the code table."""
        x = next(iter(params.values())).new_zeros(1, *ctx.plan.spec.shape)
        with torch.no_grad():
            width = self._tapped(ctx.plan, params, x)[1].shape[1]
        uniform = ((ctx.secret.uniform((self.bits, width + 1)) * 2 - 1) * self.head_scale).float()
        code = ctx.secret.integers(0, 2, (ctx.plan.spec.classes, self.bits)).float() * 2 - 1
        head = {"weight": uniform[:, :-1].contiguous(), "bias": uniform[:, -1].contiguous()}
        return Secret(head, code, ctx.plan.local.opt.init(Layout.of(head).pack(head)))

    def loss(self, plan: Plan, params: Params, head: Params, code: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss of a batch: cross-entropy plus alpha2 times polarization."""
        features, tapped = self._tapped(plan, params, batch.x)
        public = plan.example_loss(plan.net.head(params, features), batch.y)
        v = torch.nn.functional.linear(tapped, head["weight"], head["bias"])
        total = public + self.alpha2 * polarization(v, batch.y @ code.to(v.dtype))
        return (batch.w * total).sum() / batch.w.sum().clamp(min=1e-12)

    def compute(self, plan: Plan, job: Job) -> Tree:
        """Return (public update, new secret): the public part's gradient, or start minus end of joint training."""
        secret, opt = job.own, plan.local.opt

        def gradients_of(public: Params, head: Params, batch: Batch) -> tuple[Params, Params]:
            joint = {**{f"p.{n}": v for n, v in public.items()}, **{f"s.{n}": v for n, v in head.items()}}

            def loss(q: Params) -> Tensor:
                parts = [{n[2:]: v for n, v in q.items() if n.startswith(kind)} for kind in ("p.", "s.")]
                return self.loss(plan, parts[0], parts[1], secret.code, batch)

            g = gradient(loss, joint)
            return {n: g[f"p.{n}"] for n in public}, {n: g[f"s.{n}"] for n in head}

        if plan.local.upload == "gradient":
            return gradients_of(job.start, secret.head, step_inputs(job, 0)[0])[0], secret
        layout, inner = Layout.of(job.start), Layout.of(secret.head)
        start = flat = layout.pack(job.start)
        secret_flat, state, secret_state = inner.pack(secret.head), opt.init(flat), secret.opt
        for t in range(job.batches.x.shape[0]):
            g, h = gradients_of(layout.unpack(flat), inner.unpack(secret_flat), step_inputs(job, t)[0])
            flat, state = opt.step(flat, layout.pack(g), state, job.lr)
            secret_flat, secret_state = opt.step(secret_flat, inner.pack(h), secret_state, job.lr)
        return layout.unpack(start - flat), Secret(inner.unpack(secret_flat), secret.code, secret_state)

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Keep the secret, upload the public part."""
        if isinstance(message, Hello):
            return super().reply(ctx, me, message, result, data)
        update, secret = result
        return secret, self.upload(ctx, me, update)

    def _tapped(self, plan: Plan, params: Params, x: Tensor) -> tuple[Tensor, Tensor]:
        features = plan.net.features(params, x)
        return features, features if self.phi_tap == "head" else plan.net.flat_features(params, x)


def polarization(v: Tensor, code: Tensor) -> Tensor:
    """Return sum_k max(1 - v_k t_k, 0) as [B], for outputs v [B, K] and codes [B, K] (Eq. 5, margin 1)."""
    return (1 - v * code).clamp(min=0).sum(-1)
