"""Noise of a round of local steps, drawn step by step.

A client's noise for all steps is steps times as large as its model, and under vmap all clients' noise would be in
memory at once. So for a large parameter only a key for each step is stored, and each step draws by its key. That is a
pure function of the keys, so it works under vmap (client by client outside).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ppbench.base.secret_draws import KEY_BYTES, SecretDraws
from ppbench.base.tree import Tree, node, tree_map

Law = Literal["gaussian", "laplace"]
EAGER_NUMBERS = 4096
"""Numbers per step below which a parameter's noise is drawn at once."""


@node
class DeferredNoise:
    """Noise of one parameter that is not drawn yet.

    keys: [steps, 32] uint8, of each step's draws. shape, law: see `noise`.
    """

    keys: Tensor
    shape: tuple[int, ...]
    law: Law

    def at(self, t: int) -> Tensor:
        """Return the noise of step `t` [*shape], float32, on the device of `keys`."""
        return _draw(self.keys[t], self.shape, self.law)


def noise(secret: SecretDraws, steps: int, shape: tuple[int, ...], law: Law = "gaussian") -> Tree:
    """Return noise of scale 1 for `steps` local steps, float32 [steps, *shape], or a `DeferredNoise` of it.

    Read it by `at_step`.
    """
    if math.prod(shape) < EAGER_NUMBERS:
        return drawn(secret, (steps, *shape), law)
    return DeferredNoise(secret.random_bytes((steps, KEY_BYTES)), tuple(shape), law)


def drawn(secret: SecretDraws, shape: Sequence[int], law: Law) -> Tensor:
    """Return noise of scale 1, float32 [*shape]: standard normal or Laplace."""
    return secret.normal(shape) if law == "gaussian" else secret.laplace(shape)


def at_step(tree: Tree, t: int) -> Tree:
    """Return the noise of local step `t` from a tree with leading axis steps, `DeferredNoise`, or a dict of these."""
    if isinstance(tree, dict):
        return {name: at_step(value, t) for name, value in tree.items()}
    return tree.at(t) if isinstance(tree, DeferredNoise) else tree_map(lambda leaf: leaf[t], tree)


def _draw(key: Tensor, shape: tuple[int, ...], law: Law) -> Tensor:
    numbers: Tensor = _Draw.apply(key, shape, law)  # type: ignore[no-untyped-call]
    return numbers


class _Draw(torch.autograd.Function):
    """A step's noise of a client, or, under vmap, of each client."""

    @staticmethod
    def forward(key: Tensor, shape: tuple[int, ...], law: Law) -> Tensor:
        return drawn(SecretDraws.of(key), shape, law).to(key.device)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: drawn numbers have no derivative."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, key: Tensor, shape: tuple[int, ...], law: Law) -> tuple[Tensor, int]:
        keys = key.expand(info.batch_size, -1) if in_dims[0] is None else key.movedim(in_dims[0], 0)
        return torch.stack([_draw(one, shape, law) for one in keys]), 0
