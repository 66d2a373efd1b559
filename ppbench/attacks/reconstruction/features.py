"""Images from the public head's gradient: exact features first (without the backbone), then images with them.

With cross-entropy the head's gradient is dW = (1/B) A^T Phi and db = (1/B) A^T 1, where A = p - onehot(y) [B, C] and
Phi [B, D] are the features. One example: Phi = dW[y] / db[y]. More, while B < C: Phi = M R with R the B leading right
singular vectors of dW, and the predictions p = softmax(Phi W^T + b) close the system for the B x B matrix M.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ppbench.attacks.reconstruction.fastpath.chain import (
    TRACES,
    ChainMatch,
    backward_tangent,
    compile_chain,
    forward,
    forward_tangent,
    untracked,
)
from ppbench.attacks.reconstruction.fastpath.distances import layer_target, residual
from ppbench.attacks.reconstruction.fastpath.layers import Affine, ChainStep
from ppbench.attacks.reconstruction.search.lbfgs import LBFGSSettings, minimize
from ppbench.attacks.reconstruction.search.priors import TotalVariation
from ppbench.base.tree import Params, Recent, values_digest
from ppbench.federation.plan import Plan
from ppbench.nets.classifier import HEAD_NAMES

# -- Matching the backbone's gradient with a free cotangent, once the features are known --
# For any secret loss of a client on the features, the backbone's gradient is sum_i J(x_i)^T w_i, with J the Jacobian
# of the features by the backbone's weights and w_i the total cotangent at the features of example i: CE plus secret
# head (SPN paper, Eq. 6). Taking w_i as an unknown makes the secret head irrelevant. Value and gradient come from
# the chain of `reconstruction.fastpath`, or from double backward for networks without that form.

BACKBONE = "features."
SMALLEST_SCALE = 1e-30


BackboneObjective = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Maps guesses x [S, B, *shape], cotangents w [S, B, D] and index [S] (the victim of each row) to loss [S], dloss/dx
and dloss/dw: ||sum_i J(x_i)^T w_i - g||^2 / ||g||^2 + consistency * sum_i ||phi(x_i) - phi_i||^2 / ||phi_i||^2."""


class _Observations:
    """Observed gradients and features of V victims, in one dtype."""

    def __init__(
        self, observed: Sequence[Params], weights: Sequence[Params] | None, phi: Tensor, consistency: float
    ) -> None:
        names = [name for name in observed[0] if name.startswith(BACKBONE)]

        def kept(trees: Sequence[Params]) -> list[Params]:
            return [{n: tree[n].detach().to(phi.dtype) for n in names} for tree in trees]

        self.observed, self.weights = kept(observed), None if weights is None else kept(weights)
        scales = [sum(float(self._square(seen[n], v, n)) for n in names) for v, seen in enumerate(self.observed)]
        self.scale = phi.new_tensor(scales).clamp(min=SMALLEST_SCALE)
        self.phi = phi
        self.pull = consistency / (phi * phi).sum(-1).clamp(min=SMALLEST_SCALE)

    def _square(self, gap: Tensor, victim: int, name: str) -> Tensor:
        square = gap * gap
        return (square if self.weights is None else square * self.weights[victim][name]).sum()


def feature_term(phi: Tensor, known: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum_i pull_i ||phi_i - known_i||^2 as [S], and its gradient by phi [S, B, D]; pull: [S, B]."""
    gap = phi - known
    pulled = pull[..., None] * gap
    return (pulled * gap).sum((1, 2)), 2 * pulled


class ChainBackbone:
    """`BackboneObjective` on the fast chain of layers: `steps` of the features, without the head."""

    def __init__(self, steps: Sequence[ChainStep], known: _Observations, batch: int) -> None:
        layers, self.known = [step for step in steps if isinstance(step, Affine)], known
        self.match = ChainMatch(steps, [layer_target(layer, known.observed, known.weights, batch) for layer in layers])
        self.tensors = [known.scale, known.phi, known.pull, *self.match.tensors()]
        self.about = f"backbone {self.match.about}"

    def __call__(self, x: Tensor, w: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss [S], dloss/dx [S, B, *shape], dloss/dw [S, B, D]."""
        with untracked(x.device):
            loss, by_x, by_w = TRACES.run(self.slopes, self.about, (x, w, index, *self.tensors))
        return loss, by_x, by_w

    def slopes(
        self, x: Tensor, w: Tensor, index: Tensor, scale: Tensor, phi: Tensor, pull: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the same for given scales, features and pulls of V victims, and the match with other `tensors`."""
        match, scale = self.match.of(tensors), scale[index]
        a, memos = forward(match.steps, x)
        features, pulled = feature_term(a.reshape(w.shape), phi[index], pull[index])
        distance, directions = torch.zeros_like(features), []
        for layer in match.paired(memos, w.reshape(a.shape), index):
            direction, part = residual(*layer)
            directions.append(direction)
            distance = distance + part
        # dD/dx is linear in the change at the features: the pull of the known features enters there
        by_w = forward_tangent(match.steps, memos, directions)
        by_x = backward_tangent(match.steps, memos, directions, (pulled * scale[:, None, None]).reshape(a.shape))
        by_x, by_w = by_x.reshape(len(x), -1) / scale[:, None], by_w.reshape(w.shape) / scale[:, None, None]
        return distance / scale + features, by_x.reshape(x.shape), by_w


class AutogradBackbone:
    """`BackboneObjective` by double backward, for any network."""

    def __init__(self, plan: Plan, params: Params, known: _Observations) -> None:
        self.net, self.known = plan.net, known
        self.params = {n: p.detach().to(known.phi.dtype) for n, p in params.items() if n.startswith(BACKBONE)}

    def _gradient(self, x: Tensor, w: Tensor) -> tuple[Params, Tensor]:
        """Return J^T w by name and the features [B, D], for one victim."""

        def scalar(weights: Params) -> tuple[Tensor, Tensor]:
            phi = self.net.features(weights, x)
            return (w * phi).sum(), phi

        gradient, phi = torch.func.grad(scalar, has_aux=True)(self.params)
        return gradient, phi

    @torch.enable_grad()  # optimizers run without autograd
    def __call__(self, x: Tensor, w: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss [S], dloss/dx [S, B, *shape], dloss/dw [S, B, D]."""
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        gradient, phi = torch.func.vmap(self._gradient)(x, w)
        distance = torch.zeros(len(x), dtype=x.dtype, device=x.device)
        for name in self.known.observed[0]:  # a defense may not send all
            square = (gradient[name] - torch.stack([self.known.observed[i][name] for i in index.tolist()])) ** 2
            if self.known.weights is not None:
                square = square * torch.stack([self.known.weights[i][name] for i in index.tolist()])
            distance = distance + square.flatten(1).sum(1)
        features, _ = feature_term(phi, self.known.phi[index], self.known.pull[index])
        loss = distance / self.known.scale[index] + features
        by_x, by_w = torch.autograd.grad(loss.sum(), (x, w))
        return loss.detach(), by_x, by_w


def backbone_objective(
    plan: Plan,
    params: Params,
    observed: Sequence[Params],
    phi: Tensor,
    *,
    weights: Sequence[Params] | None = None,
    consistency: float = 10.0,
) -> BackboneObjective:
    """Return the objective of V victims that share the public weights `params`, in the dtype of `phi`.

    observed: their gradients, whose entries of the head are ignored; weights: precisions (0 hides an entry); phi:
    features [V, B, D] as recovered from the head.
    """
    known = _Observations(observed, weights, phi, consistency)
    whole = all(name in observed[0] for name in params if name.startswith(BACKBONE))
    steps = compile_chain(plan, params, phi.dtype) if whole else None
    if steps is None:
        return AutogradBackbone(plan, params, known)
    return ChainBackbone(steps[:-1], known, phi.shape[1])


TINY_DIVISOR = 1e-300
DAMPING_START, DAMPING_DOWN, DAMPING_UP, DAMPING_MAX = 1e-3, 0.3, 5.0, 1e12
DAMPED_STEPS = 100
"""Damped steps per start, at most."""
RESTART_NOISE = 0.3
"""Relative size of the multiplicative noise of restarts."""
STOP, ENOUGH, ACCEPT = 1e-20, 1e-13, 1e-9
"""Relative squared residuals: at which the search ends; of the plain start that makes restarts needless (about 1e-14
for a float32 gradient); largest one of a solution."""


@dataclass(frozen=True)
class Features:
    """Features [B, D] float64 of a batch with labels [B] int64, the head's relative squared mismatch, whether exact."""

    value: Tensor
    labels: Tensor
    residual: float
    exact: bool


@dataclass(frozen=True)
class FeatureSystem:
    """The closed system in the row space of dW, in float64.

    target: [C, B + 1], dW R^T beside db, which (1/B) A^T [M, 1] must equal; logits: [B, C], R W^T: logits are
    M @ logits + bias [C]; onehot: [B, C] of the labels.
    """

    target: Tensor
    logits: Tensor
    bias: Tensor
    onehot: Tensor

    def residual(self, m: Tensor) -> Tensor:
        """Return the relative residuals [S, C * (B + 1)] of candidates m [S, B, B]."""
        a = (m @ self.logits + self.bias).softmax(-1) - self.onehot
        wide = torch.cat([m, torch.ones_like(m[..., :1])], -1)
        gap: Tensor = a.mT @ wide / len(self.onehot) - self.target
        relative: Tensor = gap / self.target.norm().clamp(min=TINY_DIVISOR)
        return relative.flatten(1)

    def jacobian(self, m: Tensor) -> Tensor:
        """Return d residual / d m as [S, C * (B + 1), B * B] for m [S, B, B]."""
        batch, count = len(self.onehot), len(m)
        p = (m @ self.logits + self.bias).softmax(-1)
        # dp[s, i, c, j]: derivative of p[i, c] to M[i, j]
        dp = p[..., None] * (self.logits.T - (p @ self.logits.T)[:, :, None])
        wide = torch.cat([m, torch.ones_like(m[..., :1])], -1)
        parts = torch.einsum("sicj,sik->sckij", dp, wide)
        eye = torch.eye(batch, batch + 1, dtype=m.dtype, device=m.device)
        parts = parts + torch.einsum("sic,jk->sckij", p - self.onehot, eye)
        scale: Tensor = batch * self.target.norm().clamp(min=TINY_DIVISOR)
        return parts.reshape(count, -1, batch * batch) / scale


def levenberg_marquardt(system: FeatureSystem, m: Tensor) -> tuple[Tensor, Tensor]:
    """Return the candidates [S, B, B], refined until one is below `STOP`, and their squared residuals [S]."""
    damping = torch.full((len(m),), DAMPING_START, dtype=m.dtype, device=m.device)
    r = system.residual(m)
    loss = (r * r).sum(1)
    for _ in range(DAMPED_STEPS):
        if bool((loss < STOP).any()) or bool((damping > DAMPING_MAX).all()):
            break
        j = system.jacobian(m)
        gram = j.mT @ j
        scale = gram.diagonal(dim1=1, dim2=2).clamp(min=1e-12)
        step, info = torch.linalg.solve_ex(gram + torch.diag_embed(damping[:, None] * scale), (j.mT @ r[..., None]))
        trial = m - step.reshape_as(m)
        r_trial = system.residual(trial)
        loss_trial = (r_trial * r_trial).sum(1)
        better = (loss_trial < loss) & (info == 0)  # False for NaN: the old candidate stays
        m = torch.where(better[:, None, None], trial, m)
        r, loss = torch.where(better[:, None], r_trial, r), torch.where(better, loss_trial, loss)
        damping = torch.where(better, damping * DAMPING_DOWN, damping * DAMPING_UP)
    return m, loss


SOLVED_FEATURES: Recent[Tensor] = Recent(64)
"""The features solved last: a defense that leaves the head's gradient as it is has the same ones at every setting."""


def class_starts(weight_grad: Tensor, bias_grad: Tensor, labels: Tensor) -> Tensor:
    """Return dW[c] / db[c] for each label as [B, D] float64: exact for one example, a class mean otherwise."""
    divisor = bias_grad[labels].double()
    safe = torch.where(divisor.abs() < TINY_DIVISOR, torch.ones_like(divisor), divisor)
    return weight_grad[labels].double() / safe[:, None]


def recover_features(
    params: Params,
    weight_grad: Tensor,
    bias_grad: Tensor,
    labels: Tensor,
    generator: torch.Generator,
    *,
    restarts: int = 30,
) -> Features:
    """Return the features of a batch from the gradient of the public head, [C, D] and [C], finite (spec 9.2, 9.2b).

    labels: [B] int64, the recovered multiset. The generator draws the `restarts` starts besides the plain one.
    """
    start, batch = class_starts(weight_grad, bias_grad, labels), len(labels)
    params = {name: params[name].detach() for name in HEAD_NAMES}
    if 1 < batch < len(bias_grad):  # the rows of p - onehot sum to zero, so dW has rank below C: room for B < C
        draws = torch.randn(restarts, *start.shape, generator=generator, dtype=torch.float64).to(start.device)
        seen = {"weight": weight_grad, "bias": bias_grad, "labels": labels, "draws": draws}
        solve = partial(_solved, params, weight_grad.double(), bias_grad.double(), start, labels, draws)
        value = SOLVED_FEATURES.of(values_digest(params, seen), solve)
        residual = head_mismatch(params, weight_grad, bias_grad, value, labels)
        if residual <= ACCEPT:
            return Features(value, labels, residual, True)
    return Features(start, labels, head_mismatch(params, weight_grad, bias_grad, start, labels), batch == 1)


def _solved(params: Params, dw: Tensor, db: Tensor, start: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
    """Return the features [B, D] of the smallest residual, from the plain start or, if it is too large, noisy ones.

    draws: [restarts, B, D] of a normal law, for the noisy starts.
    """
    rows = torch.linalg.svd(dw, full_matrices=False).Vh[: len(labels)]
    onehot = torch.nn.functional.one_hot(labels, len(db)).double()
    weight, bias = params["head.weight"].double(), params["head.bias"].double()
    system = FeatureSystem(torch.cat([dw @ rows.T, db[:, None]], 1), rows @ weight.T, bias, onehot)
    best, loss = levenberg_marquardt(system, (start @ rows.T)[None])
    if not float(loss[0]) <= ENOUGH:
        more, more_loss = levenberg_marquardt(system, (start * (1 + RESTART_NOISE * draws)) @ rows.T)
        best, loss = torch.cat([best, more]), torch.cat([loss, more_loss])
    value: Tensor = best[int(loss.nan_to_num(nan=torch.inf).argmin())] @ rows
    return value


def head_mismatch(params: Params, weight_grad: Tensor, bias_grad: Tensor, phi: Tensor, labels: Tensor) -> float:
    """Return the relative squared distance of the head's gradient for features phi [B, D] from the observed one."""
    weight, bias = params["head.weight"].double(), params["head.bias"].double()
    a = (phi @ weight.T + bias).softmax(-1) - torch.nn.functional.one_hot(labels, len(bias)).double()
    dw, db = a.T @ phi / len(phi), a.mean(0)
    error = ((dw - weight_grad) ** 2).sum() + ((db - bias_grad) ** 2).sum()
    return float(error / ((weight_grad.double() ** 2).sum() + (bias_grad.double() ** 2).sum()).clamp(min=TINY_DIVISOR))


FEATURE_WEIGHT = 1e3
RELAX, TINY_SLOPE = 0.01, 1e-12
FEATURE_SETTINGS = LBFGSSettings(history=60, progress=0.03)
TOTAL_VARIATION = TotalVariation(1.0)


@dataclass(frozen=True)
class RecoveredImages:
    """Reconstructions x [V, B, *shape] float32, not clipped, of V victims with B examples each.

    loss: [V] float64, the attacker's objective at the end, inf if the start was not finite; evaluations: [V] int64.
    """

    x: Tensor
    loss: Tensor
    evaluations: Tensor


def invert_features(
    plan: Plan, params: Params, phi: Tensor, generator: torch.Generator, *, budget: int, smoothness: float
) -> RecoveredImages:
    """Return images whose features are phi: min 1e3 ||phi(x) - phi||^2 / ||phi||^2 + smoothness TV(x) (spec 9.2).

    Weights and features [V, B, D], none of them zero, are float32; the start is grey with a little noise. Each image
    gets `budget` gradient evaluations; its total variation is in units of the data range.
    """
    victims, batch = phi.shape[:2]
    low, high = plan.data_range
    goal = phi.flatten(0, 1)
    scale = FEATURE_WEIGHT / (goal * goal).sum(1)

    def objective(z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = z.unflatten(1, plan.spec.shape).detach().requires_grad_()
            fit = scale[index] * ((plan.net.features(params, x) - goal[index]) ** 2).sum(1)
            (gradient,) = torch.autograd.grad(fit.sum(), x)
        rough, by_x = TOTAL_VARIATION(x.detach()[:, None], index)
        weight = smoothness / (high - low)
        return fit.detach() + weight * rough, (gradient + weight * by_x[:, 0]).flatten(1)

    noise = torch.randn(victims * batch, *plan.spec.shape, generator=generator)
    starts = ((low + high) / 2 + 0.02 * (high - low) * noise).to(phi)
    limit = torch.full((len(starts),), budget)
    minima = minimize(
        objective, starts.flatten(1), budget=limit, stop=torch.zeros(len(starts)), settings=FEATURE_SETTINGS
    )
    return RecoveredImages(
        minima.z.view(victims, batch, *plan.spec.shape),
        minima.loss.view(victims, batch).sum(1),
        minima.evaluations.view(victims, batch).amax(1),
    )


def head_cotangents(params: Params, phi: Tensor, labels: Tensor) -> Tensor:
    """Return W^T (p - onehot(y)) / B [V, B, D], cotangents without a secret head, for phi [V, B, D], labels [V, B]."""
    weight, bias = params["head.weight"].to(phi.dtype), params["head.bias"].to(phi.dtype)
    onehot = torch.nn.functional.one_hot(labels, len(bias)).to(phi.dtype)
    return ((phi @ weight.T + bias).softmax(-1) - onehot) @ weight / phi.shape[1]


def cotangent_unit(objective: BackboneObjective, x: Tensor, w: Tensor) -> Tensor:
    """Return the unit [V] of unknown cotangents: 0.3 times the rms of w, scaled by ||g|| / ||J^T w||, from f alone.

    The objective f is quadratic in w: ||J^T w||^2 / ||g||^2 = (f(w) + f(-w)) / 2 - f(0).
    """
    index = torch.arange(len(x), device=x.device)
    plus, minus, none = (objective(x, w * sign, index)[0] for sign in (1.0, -1.0, 0.0))
    ratio = ((plus + minus) / 2 - none).clamp(min=1e-4, max=1e4).nan_to_num(nan=1.0)
    return 0.3 * w.pow(2).mean((1, 2)).sqrt() / ratio.sqrt()


def match_backbone(
    objective: BackboneObjective, start: Tensor, cotangents: Tensor, *, budget: int, stop: float, smoothness: float
) -> RecoveredImages:
    """Return images that explain features and backbone gradient together, cotangents free (spec 9.3, 9.4).

    Unknown are x_i, from `start` [V, B, *shape], and one cotangent w_i in R^D per example, from `cotangents` [V, B, D],
    those of an undefended client. Minimized is `objective` plus TV, weighted to pull `smoothness` times as hard at the
    start (a trained network's features pull a hundred times as hard as a random one's). The prior guides the search but
    prevents an exact end, so at most half of the budget is spent with it, the rest with a hundredth of it. A victim
    gets `budget` gradient evaluations, and is done at the objective `stop`.
    """
    unit = cotangent_unit(objective, start, cotangents)[:, None, None].clamp(min=1e-12)
    pixels, weight = start[0].numel(), start.new_zeros(len(start))
    if smoothness:
        pulled = objective(start, cotangents, torch.arange(len(start), device=start.device))[1].flatten(1).abs().sum(1)
        slope = TOTAL_VARIATION(start.flatten(0, 1)[:, None], torch.arange(len(start)))[1].view_as(start)
        weight = (smoothness * pulled / slope.flatten(1).abs().sum(1).clamp(min=TINY_SLOPE)).nan_to_num(0.0, 0.0)

    def joint(z: Tensor, index: Tensor, smooth: float) -> tuple[Tensor, Tensor]:
        x, w = z[:, :pixels].reshape(-1, *start.shape[1:]), z[:, pixels:].reshape(-1, *cotangents.shape[1:])
        loss, by_x, by_w = objective(x, w * unit[index], index)
        rough, slope = TOTAL_VARIATION(x.flatten(0, 1)[:, None], index)
        own = smooth * weight[index]
        loss = loss + own * rough.view(len(x), -1).sum(1)
        by_x = by_x + own.view(-1, *[1] * (x.dim() - 1)) * slope.view_as(x)
        return loss, torch.cat([by_x.flatten(1), (by_w * unit[index]).flatten(1)], 1)

    z = torch.cat([start.flatten(1), (cotangents / unit).flatten(1)], 1)
    stops, loss = torch.full((len(start),), stop), torch.full((len(start),), torch.inf, dtype=torch.float64)
    spent = torch.zeros(len(start), dtype=torch.int64)
    phases = [(1.0, budget // 2), (RELAX, budget)] if smoothness else [(0.0, budget)]
    for smooth, until in phases:
        minima = minimize(partial(joint, smooth=smooth), z, budget=until - spent, stop=stops, settings=FEATURE_SETTINGS)
        z, loss, spent = minima.z, minima.loss, spent + minima.evaluations
    return RecoveredImages(z[:, :pixels].reshape(start.shape), loss, spent)
