"""Matching the backbone's gradient with a free cotangent, once the features are known.

For any secret loss of a client on the features, the backbone's gradient is sum_i J(x_i)^T w_i, with J the Jacobian of
the features by the backbone's weights and w_i the total cotangent at the features of example i: CE plus secret head
(SPN paper, Eq. 6). Taking w_i as an unknown makes the secret head irrelevant. Value and gradient come from the chain of
`reconstruction.fastpath`, or from double backward for networks without that form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ppbench.attacks.reconstruction.fastpath.affine import Affine
from ppbench.attacks.reconstruction.fastpath.chain import (
    ChainMatch,
    backward_tangent,
    compile_chain,
    forward,
    forward_tangent,
    untracked,
)
from ppbench.attacks.reconstruction.fastpath.distances import layer_target, residual
from ppbench.attacks.reconstruction.fastpath.layers import ChainStep
from ppbench.attacks.reconstruction.fastpath.traces import TRACES
from ppbench.base.tree import Params
from ppbench.federation.plan import Plan

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
        for name, value in gradient.items():
            square = (value - torch.stack([self.known.observed[i][name] for i in index.tolist()])) ** 2
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
    steps = compile_chain(plan, params, phi.dtype)
    if steps is None:
        return AutogradBackbone(plan, params, known)
    return ChainBackbone(steps[:-1], known, phi.shape[1])
