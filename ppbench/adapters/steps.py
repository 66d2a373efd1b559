"""Observes another framework's training: its optimizer, rate and number of steps, by torch's own hook."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ppbench.base.errors import UsageError, one_line


@dataclass
class Steps:
    """The observed steps. kinds: class of the optimizer, rate and weight decay of each step."""

    kinds: list[tuple[str, float, float]] = field(default_factory=list)

    @property
    def optimizer(self) -> str:
        """The optimizer's name, in lower case."""
        return self.kinds[0][0].lower()

    @property
    def lr(self) -> float:
        """The learning rate."""
        return self.kinds[0][1]

    @property
    def words(self) -> str:
        """Optimizer and rate, for messages."""
        return f"{one_line(self.kinds[0][0], 40)} at rate {self.lr:g}"

    def checked(self, name: str, epochs: int) -> Steps:
        """Return these steps, observed on one example; UsageError unless they are plain SGD, one step per epoch."""
        right = "one step an epoch on one batch is what attacks can read"
        if len(self.kinds) != epochs:
            raise UsageError(
                f"Defense {name!r} took {len(self.kinds)} steps of torch.optim in {epochs} epochs; {right}."
            )
        if len({*self.kinds}) != 1 or self.kinds[0][2] or self.optimizer != "sgd":
            method = f"{self.words}, weight decay {self.kinds[0][2]:g}"
            raise UsageError(
                f"Defense {name!r} trains by {method}; SGD at one rate, without decay, is what attacks can read."
            )
        return self


@contextmanager
def watched() -> Iterator[Steps]:
    """Record the steps of every torch optimizer in the block."""
    steps = Steps()

    def after(optimizer: Optimizer, *_: Any) -> None:
        groups = optimizer.param_groups
        steps.kinds += {(type(optimizer).__name__, float(g["lr"]), float(g.get("weight_decay", 0))) for g in groups}

    handle = register_optimizer_step_post_hook(after)
    try:
        yield steps
    finally:
        handle.remove()
