"""Perturbs a model so that clients can train on it but not read it, and recovers gradients from their surrogates.

Feng et al. (2020), Eq. 6-19, and Yang et al. (2024), Eq. 12-22. Hidden layers are scaled channel by channel, the head
gets a column-constant additive mask r, so that logits become y + alpha r with alpha the sum of the head's inputs. The
gradient of the true loss is a polynomial in r of gradients that a client can compute without knowing r.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from ppbench.base.autodiff import gradients
from ppbench.base.errors import UsageError
from ppbench.base.tree import Params, Tree, node, tree_map
from ppbench.federation.bounds import between
from ppbench.federation.contract import Context, Job, Server, step_inputs
from ppbench.federation.plan import Batch, Data, Plan
from ppbench.federation.secagg import PairedDefense, cohorts
from ppbench.federation.view import Exchange, View
from ppbench.nets.channels import Channels
from ppbench.nets.net import Net

HEAD_BIAS_NAME = "head.bias"
HEAD_WEIGHT = "head.weight"


@node
class Perturbed:
    """Server to client, every round. params: perturbed weights; direction: r_a [C] (PBPFL, scalar gamma) or [0]."""

    params: Params
    direction: Tensor


@node
class Released:
    """Server to client at the end. params: weights with hidden scales, no additive mask: true outputs."""

    params: Params


@node
class Surrogates:
    """Client to server: gradients at the perturbed weights of the three surrogate losses, batch means.

    g: of the squared loss, like the parameters. sigma: [m, ...] of mean alpha d_k^T (yhat - ybar), one row per
    direction d_k (m = 1: r_a; m = C: the unit vectors). beta: of mean alpha^2 / 2.
    """

    g: Params
    sigma: Params
    beta: Params


def multiply(params: Params, multiplier: Params, dtype: torch.dtype) -> Params:
    """Return the weights with hidden scales, in `dtype`; parameters without a multiplier are copied."""
    scaled = {}
    for name, value in params.items():
        factor = multiplier.get(name)
        scaled[name] = value.to(dtype).clone() if factor is None else value.to(dtype) * factor.to(dtype)
    return scaled


def mask(params: Params, r: Tensor, masked_bias: bool) -> Params:
    """Return `params` with r [C] added to every column of the head's weight and, if `masked_bias`, to its bias."""
    out = dict(params)
    out[HEAD_WEIGHT] = params[HEAD_WEIGHT] + r[:, None]
    if masked_bias and HEAD_BIAS_NAME in params:
        out[HEAD_BIAS_NAME] = params[HEAD_BIAS_NAME] + r
    return out


def perturbed_outputs(net: Net, params: Params, x: Tensor, masked_bias: bool) -> tuple[Tensor, Tensor]:
    """Return masked logits yhat [B, C] and alpha [B], the sum of the head's inputs (and of the bias's 1 if masked)."""
    features = net.features(params, x)
    alpha = features.sum(1)
    if masked_bias and HEAD_BIAS_NAME in params:
        alpha = alpha + 1
    return net.head(params, features), alpha


def surrogates(
    net: Net, params: Params, batch: Batch, directions: Tensor, masked_bias: bool, constants: Params | None = None
) -> Surrogates:
    """Return the gradients of the surrogate losses on one batch (without the axis T), at perturbed weights `params`.

    With yhat = y + alpha r, 1/2 ||y - ybar||^2 = 1/2 ||yhat - ybar||^2 - alpha r^T (yhat - ybar) + r^T r alpha^2 / 2,
    pointwise, so the gradient of the true loss is the same combination of the three gradients (m + 2 backward passes).
    directions: [m, C]. constants: parameters without gradients (transitional layers).
    """
    dtype = directions.dtype
    x, y, w = batch.x.to(dtype), batch.y.to(dtype), batch.w.to(dtype)
    w = w / w.sum().clamp(min=1e-12)

    def losses(p: Params) -> Tensor:
        logits, alpha = perturbed_outputs(net, {**p, **(constants or {})}, x, masked_bias)
        error = logits - y
        loss = (w * 0.5 * (error**2).sum(-1)).sum()
        mixed = (w * alpha) @ (error @ directions.T)
        return torch.cat([loss[None], mixed, (w * 0.5 * alpha**2).sum()[None]])

    first, *middle, last = gradients(losses, params, len(directions) + 2)
    return Surrogates(first, {n: torch.stack([m[n] for m in middle]) for n in params}, last)


def combine(surrogates: Surrogates, coefficients: Tensor, square: Tensor) -> Params:
    """Return g - sum_k c_k sigma_k + square beta: the true loss's gradient at the perturbed weights (PBPFL, Eq. 19).

    coefficients: [m] c with r = sum_k c_k d_k of the clients' directions. square: r^T r. Of one client, or of a mean.
    """
    if len(coefficients) == 1:  # a product is ten times as fast as a contraction of one
        return {
            n: g - coefficients[0] * surrogates.sigma[n][0] + square * surrogates.beta[n]
            for n, g in surrogates.g.items()
        }
    return {
        n: g - torch.tensordot(coefficients, surrogates.sigma[n], 1) + square * surrogates.beta[n]
        for n, g in surrogates.g.items()
    }


def unscale(gradient: Params, multiplier: Params, like: Params) -> Params:
    """Return the gradient of the parameters of `like` at the true weights: the multiplier times the perturbed one.

    A bias that was expanded to one value per channel gets the sum over its channels.
    """
    out = {}
    for name, value in like.items():
        factor = multiplier.get(name)
        full = gradient[name] if factor is None else factor.to(gradient[name]) * gradient[name]
        out[name] = full.sum_to_size(value.shape)
    return out


def exchanges(view: View) -> list[Exchange]:
    """Return the view's uploads of surrogates; none for a client, which sees only its own."""
    if not view.threat.sees_uploads:
        return []
    return [e for e in view.exchanges() if isinstance(e.request, Perturbed) and isinstance(e.answer, Surrogates)]


def whole_cohorts(view: View) -> list[list[Exchange]]:
    """Return the uploads of surrogates of every probe in which all clients took part."""
    return cohorts(exchanges(view), view.plan.clients)


# -- A round on a perturbed model, the common base of PBPFL (Feng et al. 2020) and MP-DP (Yang et al. 2024) --

FLOAT32_KAPPA = 10.0  # float32 loses at least 3e-7 kappa^2 of the gradient (measured), some percent at 100
LOGITS = 10  # least number of logits, on noise inputs, from which the server chooses the mask's size


@dataclass(frozen=True)
class Perturbation(PairedDefense):
    """The server scales hidden channels and masks the logits anew every round; clients answer with surrogates.

    kappa: mask-to-signal ratio RMS(alpha r) / RMS(y) at the logits, on noise inputs (the papers give no law); precision
    falls with its square. precision: of the perturbed model and the messages.
    """

    kappa: Annotated[float, between(1e-6, 1e30)] = 10.0
    precision: Literal["float64", "float32"] = "float64"

    masked: ClassVar[bool] = True

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the perturbed model."""
        return torch.float32 if self.precision == "float32" else torch.float64

    @property
    def bias_masked(self) -> bool:
        """Whether the head's bias is masked."""
        return False

    def check(self, plan: Plan) -> None:
        """As the base class; also refuse another loss, local training, and layers that cannot be perturbed."""
        super().check(plan)
        if plan.loss != "squared":
            raise UsageError(
                f"Defense {self.name!r} needs the squared loss, because the mask on the logits is recovered as a "
                f"polynomial; use --loss squared, not {plan.loss!r}."
            )
        if plan.local.upload != "gradient":
            raise UsageError(
                f"Defense {self.name!r} needs one gradient a round: a local step on perturbed weights is no perturbed "
                "step; use --upload gradient."
            )
        self.channels(plan)
        if self.precision == "float32" and self.kappa > FLOAT32_KAPPA:
            warnings.warn(
                f"Defense {self.name!r}: in float32 a mask of kappa={self.kappa:g} drowns the gradient (relative error "
                f"{3e-7 * self.kappa**2:.1g} and more); use precision=float64 or kappa <= {FLOAT32_KAPPA:g}.",
                stacklevel=2,
            )

    def network(self, plan: Plan) -> Net:
        """Return the network that clients train."""
        return plan.net

    def channels(self, plan: Plan) -> Channels:
        """Return where scales enter `network` (UsageError: a layer cannot be perturbed)."""
        raise NotImplementedError

    def full(self, plan: Plan, params: Params) -> Params:
        """Return the true weights of `network` from those of the plan's network."""
        return params

    def scales(self, ctx: Context) -> Tensor:
        """Return new scales [count], float64, on the CPU. Default: U(0.5, 2)."""
        count = self.channels(ctx.plan).count
        return 0.5 + 1.5 * ctx.secret.uniform((count,))

    def secrets(self, ctx: Context, server: Server, scales: Tensor, hidden: Params) -> tuple[Tree, Tensor, Tensor]:
        """Return the server's own state, the mask r [C], and the public direction (r_a [C] or [0]), float64."""
        raise NotImplementedError

    def coefficients(self, own: Tree) -> tuple[Tensor, Tensor]:
        """Return c [m] with r = sum_k c_k d_k of the clients' directions, and r^T r, from the server's own state."""
        raise NotImplementedError

    def mask_size(self, ctx: Context, hidden: Params, direction: Tensor) -> Tensor:
        """Return the factor (scalar) that makes a mask along `direction` [C] kappa times the logits, on noise inputs.

        That is kappa RMS(y) / (RMS(alpha) RMS(direction)), with 1 for a zero RMS.
        """
        low, high = ctx.plan.data_range
        count = -(-LOGITS // ctx.plan.spec.classes)
        x = (ctx.secret.uniform((count, *ctx.plan.spec.shape)) * (high - low) + low).float()
        with torch.no_grad():  # float32 suffices for a size
            rough = {name: value.float() for name, value in hidden.items()}
            masked_outputs = perturbed_outputs(self.network(ctx.plan), rough, x.to(direction.device), self.bias_masked)
            logits, alpha = (t.double() for t in masked_outputs)
        size = alpha.square().mean().sqrt() * direction.square().mean().sqrt()
        target = logits.square().mean().sqrt()
        one = torch.ones_like(target)
        return self.kappa * (torch.where(target > 0, target, one) / torch.where(size > 0, size, one))

    def broadcast(self, ctx: Context, server: Server) -> tuple[Server, Tree]:
        """Draw fresh secrets and return the perturbed model (PBPFL, Eq. 6-8; MP-DP, Algorithm 1)."""
        plan, scales = ctx.plan, self.scales(ctx).to(server.params[HEAD_WEIGHT].device)
        multiplier = self.channels(plan).multipliers(scales)
        hidden = multiply(self.full(plan, server.params), multiplier, torch.float64)
        own, r, public = self.secrets(ctx, server, scales, hidden)
        sent = {name: value.to(self.dtype) for name, value in mask(hidden, r, self.bias_masked).items()}
        return replace(server, own=own), Perturbed(sent, public.to(self.dtype))

    def recover(self, plan: Plan, server: Server, surrogates: Surrogates) -> Params:
        """Return the gradient at the true weights, float64, from surrogates of the same round (PBPFL, Eq. 19).

        Terms of order kappa^2 cancel, so it is computed in float64, on the device of the server's secrets.
        """
        coefficients, square = self.coefficients(server.own)
        exact = tree_map(lambda t: t.to(coefficients.device, torch.float64), surrogates)
        return unscale(combine(exact, coefficients, square), self.multipliers(plan, server), server.params)

    def multipliers(self, plan: Plan, server: Server) -> Params:
        """Return the server's multiplier of recovered coordinates, by parameter."""
        return self.channels(plan).multipliers(server.own.scales)

    def decoded(self, ctx: Context, server: Server, client: int, upload: Tree) -> Params:
        """Return the gradient that the server recovers from one client's upload."""
        return self.recover(ctx.plan, server, upload)

    def deliver(self, ctx: Context, server: Server) -> Tree:
        """Return the final model with hidden scales and no mask: its outputs are the true ones."""
        multiplier = self.channels(ctx.plan).multipliers(self.scales(ctx).to(server.params[HEAD_WEIGHT].device))
        return Released(multiply(self.full(ctx.plan, server.params), multiplier, self.dtype))

    def predict(self, plan: Plan, message: Tree, x: Tensor) -> Tensor:
        """Return logits [B, C] of a delivered model, or masked logits of a broadcast one."""
        return self.network(plan)(message.params, x.to(message.params[HEAD_WEIGHT].dtype))

    def prepare(self, ctx: Context, me: Tree, message: Tree, data: Data) -> Job | None:
        """Return the inputs of `compute`: the perturbed model, the mask's directions [m, C], one batch."""
        if not isinstance(message, Perturbed):
            return None
        self.network(ctx.plan)  # here, because tracing a network does not work inside vmap
        like, batches = message.params[HEAD_WEIGHT], self.batches(ctx, data)
        unknown = torch.eye(len(like), dtype=like.dtype, device=like.device)
        directions = message.direction[None] if len(message.direction) else unknown
        return Job(message.params, batches, torch.zeros((), dtype=like.dtype, device=like.device), directions, ())

    def compute(self, plan: Plan, job: Job) -> Tree:
        """Return the surrogate gradients of the plan's parameters: one forward, m + 2 backward passes."""
        known = set(plan.net.names)
        own = {name: value for name, value in job.start.items() if name in known}
        constants = {name: value for name, value in job.start.items() if name not in known}
        return surrogates(self.network(plan), own, step_inputs(job, 0)[0], job.own, self.bias_masked, constants)

    def upload(self, ctx: Context, me: Tree, result: Tree) -> Tree:
        """Return the surrogates unchanged."""
        return result
