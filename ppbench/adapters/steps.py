"""How somebody else's training steps: its optimizer, rate and number of steps, as torch's own hook tells them."""

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
    """What was seen. kinds: class of the optimizer, rate and weight decay, of each step."""

    kinds: list[tuple[str, float, float]] = field(default_factory=list)

    @property
    def optimizer(self) -> str:
        """The optimizer's name, in lower case."""
        return self.kinds[0][0].lower()

    @property
    def lr(self) -> float:
        """The rate."""
        return self.kinds[0][1]

    @property
    def words(self) -> str:
        """For sentences."""
        return f"{one_line(self.kinds[0][0], 40)} at rate {self.lr:g}"

    def told(self, name: str, epochs: int) -> Steps:
        """Return itself, seen at one example (UsageError: no step, other than one an epoch, several laws, a decay)."""
        right = "one step an epoch on one batch is what attacks can read"
        if len(self.kinds) != epochs:
            raise UsageError(
                f"Defense {name!r} took {len(self.kinds)} steps of torch.optim in {epochs} epochs; {right}."
            )
        if len({*self.kinds}) != 1 or self.kinds[0][2] or self.optimizer != "sgd":
            found = f"{self.words}, weight decay {self.kinds[0][2]:g}"
            raise UsageError(
                f"Defense {name!r} trains by {found}; SGD at one rate, without decay, is what attacks can read."
            )
        return self


@contextmanager
def watched() -> Iterator[Steps]:
    """See the steps of every optimizer of torch meanwhile."""
    steps = Steps()

    def after(optimizer: Optimizer, *_: Any) -> None:
        groups = optimizer.param_groups
        steps.kinds += {(type(optimizer).__name__, float(g["lr"]), float(g.get("weight_decay", 0))) for g in groups}

    handle = register_optimizer_step_post_hook(after)
    try:
        yield steps
    finally:
        handle.remove()
