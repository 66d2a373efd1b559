"""What a walk over a network's graph carries: scale numbers, their ties, and the factors found so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import fx

from ppbench.base.errors import UsageError
from ppbench.nets.channels import Factor, Norms, Numbers

ONE = 0


@dataclass(frozen=True)
class Value:
    """An activation during the walk: its numbers [C] along axis 1, and its shape with the batch axis."""

    ids: Numbers
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Parameter:
    """A free-standing parameter: its name and shape."""

    name: str
    shape: tuple[int, ...]


@dataclass
class Walk:
    """State of one walk: unions of numbers, and the factors found so far."""

    module: fx.GraphModule
    norms: Norms
    parent: list[int] = field(default_factory=lambda: [ONE])
    factors: dict[str, Factor] = field(default_factory=dict)

    def fresh(self, count: int) -> Numbers:
        """Return `count` new numbers."""
        first = len(self.parent)
        self.parent += range(first, first + count)
        return np.arange(first, first + count)

    def root(self, number: int) -> int:
        """Return the number that stands for all that are tied to `number`."""
        while self.parent[number] != number:
            number = self.parent[number]
        return number

    def tie(self, a: Numbers, b: Numbers) -> None:
        """Make the scales `a` and `b` equal, entry by entry; the smaller number stands for both."""
        for x, y in zip(a.tolist(), b.tolist(), strict=True):
            low, high = sorted((self.root(x), self.root(y)))
            self.parent[high] = low

    def fixed(self, ids: Numbers) -> bool:
        """Return whether any of the scales is fixed at 1."""
        return any(self.root(i) == ONE for i in ids.tolist())

    def put(self, name: str, factor: Factor) -> None:
        """Note the factor of a parameter; a layer that is used twice must be scaled twice alike."""
        if name in self.factors:
            raise refusal(name, "is used more than once", "a layer of its own for each use")
        self.factors[name] = factor


def refusal(layer: str, reason: str, instead: str) -> UsageError:
    """Return the error that names a layer, why it cannot be perturbed exactly, and what can."""
    return UsageError(f"Layer {layer!r} {reason}, so it cannot be perturbed exactly; use {instead}.")
