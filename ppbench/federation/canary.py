"""A canary client, whose update is a given direction: its loss is linear in the weights; the defense's code runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields

from torch import Tensor

from ppbench.base.tree import Params
from ppbench.federation.plan import Plan


@dataclass(frozen=True, eq=False)
class Straight(Plan):
    """The plan with the inner product of weights and `direction` as every example's loss.

    The gradient of every example at all weights is the direction, so a defense's treatment of gradients and updates
    (clipping, noise, sparsity, local steps) applies to it too.
    """

    direction: Params = field(default_factory=dict)

    @staticmethod
    def of(plan: Plan, direction: Params) -> Straight:
        """Return `plan` with that loss; direction: shaped as the weights."""
        return Straight(**{f.name: getattr(plan, f.name) for f in fields(Plan)}, direction=direction)

    @property
    def net(self) -> Callable[[Params, Tensor], Tensor]:  # type: ignore[override]  # no modules to be walked
        """The "network": weights and x [B, *shape] to the loss [B, 1]."""
        return self._product

    def _product(self, params: Params, x: Tensor) -> Tensor:
        total = sum((params[name] * value.to(params[name])).sum() for name, value in self.direction.items())
        return total.expand(len(x), 1)  # type: ignore[union-attr]  # the sum of no tensors

    def example_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the "outputs" [B, 1] themselves, as [B]."""
        return logits[:, 0]
