"""Optimizers as pure functions on one flat parameter vector: few kernels, however many layers.

`torch.optim` does not map over clients, is not differentiable, and its state cannot be part of a client's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ppbench.base.tree import Params, Tree


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the parameters inside a flat vector."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(params: Params) -> Layout:
        """Return the layout of `params`."""
        return Layout(tuple(params), tuple(tuple(p.shape) for p in params.values()))

    def pack(self, params: Params) -> Tensor:
        """Return `params` as one vector [P], in the layout's order."""
        return torch.cat([params[name].reshape(-1) for name in self.names])

    def unpack(self, flat: Tensor) -> Params:
        """Return views of `flat` [P] by name."""
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        parts: Sequence[Tensor] = flat.split(sizes)
        return {n: p.view(s) for n, p, s in zip(self.names, parts, self.shapes, strict=True)}


@dataclass(frozen=True)
class Opt:
    """SGD (with momentum) or Adam (eps 1e-8), as in torch; from each round in `decay_at` on, times `decay`."""

    name: Literal["sgd", "adam"] = "sgd"
    lr: float = 1.0
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    decay_at: tuple[int, ...] = ()
    decay: float = 0.5

    def rate(self, round_: int) -> float:
        """Return the learning rate of round `round_` (the first is 1)."""
        return self.lr * self.decay ** sum(round_ >= start for start in self.decay_at)

    def init(self, flat: Tensor) -> Tree:
        """Return the state before the first step."""
        zero = torch.zeros_like(flat)
        if self.name == "adam":
            return {"m": zero, "v": zero.clone(), "t": torch.zeros((), dtype=flat.dtype, device=flat.device)}
        return {"m": zero} if self.momentum else ()

    def step(self, flat: Tensor, gradient: Tensor, state: Tree, lr: float | Tensor) -> tuple[Tensor, Tree]:
        """Return parameters and state after one step; nothing is changed in place."""
        if self.name == "adam":
            b1, b2 = self.betas
            t = state["t"] + 1
            m = torch.lerp(gradient, state["m"], b1)
            v = torch.addcmul(state["v"] * b2, gradient, gradient, value=1 - b2)
            scale = (1 - b2**t).sqrt() / (1 - b1**t)
            return flat - lr * scale * (m / (v.sqrt() + 1e-8 * (1 - b2**t).sqrt())), {"m": m, "v": v, "t": t}
        if self.momentum:
            m = state["m"] * self.momentum + gradient
            return flat - lr * m, {"m": m}
        return flat - lr * gradient, state
