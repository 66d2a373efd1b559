"""Gradients that work in a plain loop, inside vmap, and inside an attack that differentiates them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


class _Towards(torch.autograd.Function):
    """0, with value - target as its gradient by value, and none by what the target depends on."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, target: Tensor) -> Tensor:
        return value.new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        value, target = ctx.saved_tensors
        return slopes[0] * (value - target), None


def towards(value: Tensor, target: Tensor) -> Tensor:
    """Return 0, whose gradient is value - target by `value`, and 0 by all that `target` is computed of.

    A term for what is no minimum of the objective: a running mean moves towards a batch's without a say of the weights.
    That gradient is differentiable by both again. value, target: tensors of one shape.
    """
    zero: Tensor = _Towards.apply(value, target)  # type: ignore[no-untyped-call]
    return zero
