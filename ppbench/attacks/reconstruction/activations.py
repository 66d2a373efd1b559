"""Elementwise activations as recorded in a network: their values, slopes and inverses, by bisection.

Nothing is known of a function but its calls. One that falls and then rises (GELU, SiLU) has two inverses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ppbench.attacks.reconstruction.walk import Call

Function = Callable[[Tensor], Tensor]

ELEMENTWISE = frozenset(
    [
        *("relu", "relu6", "leaky_relu", "elu", "celu", "selu", "hardtanh", "softplus", "sigmoid", "tanh"),
        *("log_sigmoid", "gelu", "silu", "mish", "hardswish"),
    ]
)
"""Names of functions that act on each number alone."""
FAR = 50.0
"""Inputs at least this small show the level where a function is flat."""
WIDEST = 2.0**40
"""Largest input that an inverse may have."""
HALVINGS = 100
GRID = 4001
"""Inputs among which a function's least value is looked for, from -10 to 10."""


@dataclass(frozen=True)
class Activation:
    """An elementwise function; None is the identity."""

    function: Function | None = None

    def __call__(self, z: Tensor) -> Tensor:
        """Return the function's values."""
        return z if self.function is None else self.function(z.clone())

    def slope(self, z: Tensor) -> Tensor:
        """Return the function's derivative."""
        if self.function is None:
            return torch.ones_like(z)
        with torch.enable_grad():
            leaf = z.detach().clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.function(leaf.clone()).sum(), leaf)
        return slope

    @cached_property
    def bottom(self) -> float:
        """The input of the least value if the function falls before it, else -inf."""
        grid = torch.linspace(-10, 10, GRID, dtype=torch.float64)
        values = self(grid)
        least = int(values.argmin())
        if not float(values[least]) < float(values[0]) - 1e-9:
            return -torch.inf
        low, high = grid[max(least - 1, 0)].item(), grid[min(least + 1, GRID - 1)].item()
        for _ in range(HALVINGS):
            a, b = low + (high - low) / 3, high - (high - low) / 3
            at = self(torch.tensor([a, b], dtype=torch.float64))
            low, high = (a, high) if at[0] > at[1] else (low, b)
        return (low + high) / 2

    @cached_property
    def flat(self) -> float | None:
        """The level of small inputs if the function is flat there, so that it has no inverse; else None."""
        far = torch.tensor([-FAR], dtype=torch.float64)
        return float(self(far)) if float(self.slope(far)) == 0 else None

    @cached_property
    def ends(self) -> tuple[float, float] | None:
        """Least and greatest value of a bounded function, None of others."""
        values = self(torch.tensor([-1e6, 1e6], dtype=torch.float64))
        low, high = float(values[0]), float(values[1])
        return (low, high) if -1e3 < low < high < 1e3 else None

    def inverse(self, values: Tensor, near: Tensor | None = None, slack: float = 0.0) -> Tensor:
        """Return inputs with these values: of two the one next to `near`, without it the greater.

        Values out of range have an input at which the function is flat. Within `slack` of the level of a flat part, the
        input lies in it, unless `near` says otherwise.
        """
        if self.function is None:
            return values
        z = self._bisected(values, max(self.bottom, -WIDEST), WIDEST)
        if near is not None and self.bottom > -torch.inf:
            other = self._bisected(values, self.bottom, -WIDEST)
            z = torch.where((other - near).abs() < (z - near).abs(), other, z)
        if self.flat is not None:
            level = (values - self.flat).abs() <= slack
            if near is not None:
                z = torch.where(level & (self.slope(near) == 0), near, z)
            elif self.bottom == -torch.inf:
                z = torch.where(level, -FAR, z)
        return z

    def _bisected(self, values: Tensor, start: float, end: float) -> Tensor:
        """Return z between `start` and `end`, towards which the function grows, where it has these values."""
        near, far = torch.full_like(values, start), torch.full_like(values, end)
        for _ in range(HALVINGS):
            middle = (near + far) / 2
            beyond = self(middle) >= values
            near, far = torch.where(beyond, near, middle), torch.where(beyond, middle, far)
        return far


def activation_of(call: Call) -> Activation | None:
    """Return the activation that a call applies; None if it is none, or has trained parameters."""
    if call.name not in ELEMENTWISE or call.parameters:
        return None
    if any(name.isdigit() for name in call.arguments):
        return None  # settings whose names are unknown
    settings = {name: value for name, value in call.arguments.items() if name != "inplace"}
    return Activation(lambda z: call.function(z, **settings))
