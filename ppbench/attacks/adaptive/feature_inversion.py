"""Images from what the head gave away: first from the features alone, then from the backbone's gradient as well."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ppbench.attacks.adaptive.backbone import BackboneObjective
from ppbench.attacks.reconstruction.search.lbfgs import Settings, minimize
from ppbench.base.tree import Params
from ppbench.federation.plan import Plan

FEATURE_WEIGHT = 1e3
RELAX = 0.01
SETTINGS = Settings(history=60, progress=0.03)


@dataclass(frozen=True)
class Images:
    """Reconstructions x [V, B, *shape] float32, not clipped, of V victims with B examples each.

    loss: [V] float64, the attacker's objective at the end, inf where the start was not finite; evaluations: [V] int64.
    """

    x: Tensor
    loss: Tensor
    evaluations: Tensor


def total_variation(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean |dx| + mean |dy| of images [N, C, H, W] as [N], and its gradient; zero for other inputs."""
    value, gradient = torch.zeros_like(x.flatten(1)[:, 0]), torch.zeros_like(x)
    if x.dim() != 4:
        return value, gradient
    for axis in (2, 3):
        size = x.shape[axis]
        if size < 2:
            continue
        step = x.narrow(axis, 1, size - 1) - x.narrow(axis, 0, size - 1)
        value = value + step.abs().mean((1, 2, 3))
        sign = step.sign() / step[0].numel()
        gradient.narrow(axis, 1, size - 1).add_(sign)
        gradient.narrow(axis, 0, size - 1).sub_(sign)
    return value, gradient


def invert_features(
    plan: Plan, params: Params, phi: Tensor, generator: torch.Generator, *, budget: int, smoothness: float
) -> Images:
    """Return images whose features are phi: min 1e3 ||phi(x) - phi||^2 / ||phi||^2 + smoothness TV(x) (spec 9.2).

    Weights and features [V, B, D], none of them zero, are float32; the start is grey with a little noise. An image has
    `budget` gradient evaluations, and its total variation is taken in units of the data range.
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
        rough, by_x = total_variation(x.detach())
        weight = smoothness / (high - low)
        return fit.detach() + weight * rough, (gradient + weight * by_x).flatten(1)

    noise = torch.randn(victims * batch, *plan.spec.shape, generator=generator)
    starts = ((low + high) / 2 + 0.02 * (high - low) * noise).to(phi)
    limit = torch.full((len(starts),), budget)
    found = minimize(objective, starts.flatten(1), budget=limit, stop=torch.zeros(len(starts)), settings=SETTINGS)
    return Images(
        found.z.view(victims, batch, *plan.spec.shape),
        found.loss.view(victims, batch).sum(1),
        found.evaluations.view(victims, batch).amax(1),
    )


def head_cotangents(params: Params, phi: Tensor, labels: Tensor) -> Tensor:
    """Return W^T (p - onehot(y)) / B [V, B, D] of features phi [V, B, D] and labels [V, B] int64.

    These are the cotangents at the features, were there no secret head.
    """
    weight, bias = params["head.weight"].to(phi.dtype), params["head.bias"].to(phi.dtype)
    onehot = torch.nn.functional.one_hot(labels, len(bias)).to(phi.dtype)
    return ((phi @ weight.T + bias).softmax(-1) - onehot) @ weight / phi.shape[1]


def cotangent_unit(objective: BackboneObjective, x: Tensor, w: Tensor) -> Tensor:
    """Return the unit [V] in which unknown cotangents are measured, from the observation alone.

    It is .3 of the rms of w scaled by ||g|| / ||J^T w||, i.e. to the size that the observed gradient asks for; a unit
    too small or too large lets the optimizer move images and cotangents at unlike speeds. The norm follows from the
    objective f being quadratic in w: ||J^T w||^2 / ||g||^2 = (f(w) + f(-w)) / 2 - f(0).
    """
    index = torch.arange(len(x), device=x.device)
    plus, minus, none = (objective(x, w * sign, index)[0] for sign in (1.0, -1.0, 0.0))
    ratio = ((plus + minus) / 2 - none).clamp(min=1e-4, max=1e4).nan_to_num(nan=1.0)
    return 0.3 * w.pow(2).mean((1, 2)).sqrt() / ratio.sqrt()


def match_backbone(
    objective: BackboneObjective, start: Tensor, cotangents: Tensor, *, budget: int, stop: float, smoothness: float
) -> Images:
    """Return images that explain features and backbone gradient together, cotangents free (spec 9.3, 9.4).

    Unknown are x_i, from `start` [V, B, *shape], and one cotangent w_i in R^D an example, from `cotangents` [V, B, D],
    those of an undefended client; minimized is `objective` plus smoothness TV. A prior that helps on the way keeps the
    end from being exact, so half of the budget at most is spent with it, the rest with a hundredth of it. A victim has
    `budget` gradient evaluations, and is done where the objective is `stop`.
    """
    unit = cotangent_unit(objective, start, cotangents)[:, None, None].clamp(min=1e-12)
    pixels = start[0].numel()

    def joint(z: Tensor, index: Tensor, smooth: float) -> tuple[Tensor, Tensor]:
        x, w = z[:, :pixels].reshape(-1, *start.shape[1:]), z[:, pixels:].reshape(-1, *cotangents.shape[1:])
        loss, by_x, by_w = objective(x, w * unit[index], index)
        rough, slope = total_variation(x.flatten(0, 1))
        loss = loss + smooth * rough.view(len(x), -1).sum(1)
        by_x = by_x + smooth * slope.view_as(x)
        return loss, torch.cat([by_x.flatten(1), (by_w * unit[index]).flatten(1)], 1)

    z = torch.cat([start.flatten(1), (cotangents / unit).flatten(1)], 1)
    stops, loss = torch.full((len(start),), stop), torch.full((len(start),), torch.inf, dtype=torch.float64)
    spent = torch.zeros(len(start), dtype=torch.int64)
    phases = [(smoothness, budget // 2), (smoothness * RELAX, budget)] if smoothness else [(0.0, budget)]
    for smooth, until in phases:
        found = minimize(partial(joint, smooth=smooth), z, budget=until - spent, stop=stops, settings=SETTINGS)
        z, loss, spent = found.z, found.loss, spent + found.evaluations
    return Images(z[:, :pixels].reshape(start.shape), loss, spent)
