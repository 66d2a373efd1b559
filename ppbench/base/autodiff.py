"""Gradients that work in a plain loop, inside vmap, and inside an attack that differentiates them again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad, vjp

from ppbench.base.tree import Params


def gradient(function: Callable[[Params], Tensor], params: Params) -> Params:
    """Return d function / d params, differentiable where grad mode is on; torch.func, slow in a loop, is for vmap."""
    if torch._C._functorch.peek_interpreter_stack() is not None:  # no public test for "inside vmap" exists
        inner: Params = grad(function)(params)
        return inner
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs = _inputs(params, differentiable)
        parts = torch.autograd.grad(
            function(inputs), list(inputs.values()), create_graph=differentiable, materialize_grads=True
        )
    return dict(zip(params, parts, strict=True))


def gradients(function: Callable[[Params], Tensor], params: Params, count: int) -> list[Params]:
    """Return the gradients of each of the `count` entries of function(params) [count], in one pass; see `gradient`."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        values, pull = vjp(function, params)[:2]
        return [pull(row)[0] for row in torch.eye(count, dtype=values.dtype, device=values.device)]
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs = _inputs(params, differentiable)
        values = function(inputs)
        parts = [
            torch.autograd.grad(
                values[i],
                list(inputs.values()),
                retain_graph=differentiable or i + 1 < count,
                create_graph=differentiable,
                materialize_grads=True,
            )
            for i in range(count)
        ]
    return [dict(zip(params, part, strict=True)) for part in parts]


def _inputs(params: Params, differentiable: bool) -> Params:
    return {n: p if differentiable and p.requires_grad else p.detach().requires_grad_() for n, p in params.items()}
