"""Gradients that work in a plain loop, inside vmap, and inside an attack that differentiates them again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad

from ppbench.federation.tree import Params


def gradient(function: Callable[[Params], Tensor], params: Params) -> Params:
    """Return d function / d params, differentiable where grad mode is on.

    torch.func is needed under vmap and costs about half a millisecond a call elsewhere, so a plain loop takes
    autograd.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:  # no public test for "inside vmap" exists
        inner: Params = grad(function)(params)
        return inner
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs = {n: p if again and p.requires_grad else p.detach().requires_grad_() for n, p in params.items()}
        parts = torch.autograd.grad(function(inputs), list(inputs.values()), create_graph=again, materialize_grads=True)
    return dict(zip(params, parts, strict=True))
