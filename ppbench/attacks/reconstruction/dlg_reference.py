"""The plain loop of deep leakage from gradients: the reference for tests and timings of `dlg`.

torch.optim.LBFGS with learning rate 1 and its defaults (at most 20 evaluations per step, history 100, no line search),
an N(0, 1) start for image and label logits, autograd's double backward, float32 (Zhu, Liu and Han, NeurIPS 2019).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ppbench.base.tree import Params
from ppbench.federation.plan import Plan

OUTER = 300


def reference_dlg(plan: Plan, params: Params, observed: Params, stop: float, generator: torch.Generator) -> Tensor:
    """Return the reconstruction [1, *shape] of one image from its gradient `observed` at public weights `params`.

    The loop ends if, after an outer step, the squared distance of gradients is at most `stop` or not finite.
    """
    x = torch.randn(1, *plan.spec.shape, generator=generator).requires_grad_()
    q = torch.randn(1, plan.spec.classes, generator=generator).requires_grad_()
    optimizer = torch.optim.LBFGS([x, q])
    weights = {name: value.detach().requires_grad_() for name, value in params.items()}
    last = math.inf

    def closure() -> Tensor:
        nonlocal last
        optimizer.zero_grad()
        loss = plan.example_loss(plan.net(weights, x), torch.softmax(q, -1)).mean()
        simulated = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        distance = torch.stack([((g - observed[n]) ** 2).sum() for n, g in zip(weights, simulated, strict=True)]).sum()
        distance.backward(inputs=[x, q])
        last = distance.item()
        return distance.detach()

    for _ in range(OUTER):
        optimizer.step(closure)
        if not last > stop:
            break
    return x.detach()
