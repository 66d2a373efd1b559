"""Adam for many victims and restarts at once: the loop of all attacks that follow a gradient for a fixed budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ppbench.attacks.reconstruction.search.problem import RowValue

EPSILON, BETAS = 1e-8, (0.9, 0.999)

ValueFunction = Callable[[Tensor, Tensor], RowValue]
"""Maps rows z [S, n] and the start that each came from, index [S] int64, to their `RowValue`: a `Problem`."""


@dataclass(frozen=True)
class DescentSchedule:
    """The lengths of steps: `steps` gradient evaluations per row, at a rate `lr` in units of the searched numbers.

    shape: "cosine": from 1 to 0; "warm": 5 % warm-up, decay over the last 75 % (Fang et al. 2023).
    by: the input of Adam: the "slope", its "sign" (Geiping et al. 2020, Sec. 4), or a "soft" sign, tanh(slope / mean
        |slope| of the row), under which nearly settled numbers stay.
    """

    steps: int
    lr: float = 0.1
    shape: Literal["cosine", "warm"] = "cosine"
    by: Literal["slope", "sign", "soft"] = "slope"

    def factor(self, step: int) -> float:
        """Return the factor on the learning rate in `step`, counted from 0."""
        t = step / self.steps
        if self.shape == "cosine":
            return 0.5 * (1 + math.cos(math.pi * t))
        return 0.5 * (1 - math.cos(math.pi * min(1.0, (1 - t) / 0.75))) * min(1.0, (t + 1 / self.steps) / 0.05)

    def fed(self, slope: Tensor) -> Tensor:
        """Return the input of Adam for slopes [s, n]."""
        if self.by == "slope":
            return slope
        if self.by == "sign":
            return slope.sign()
        return (slope / slope.abs().mean(1, keepdim=True).clamp(min=torch.finfo(slope.dtype).tiny)).tanh()


@dataclass(frozen=True)
class Mark:
    """The best iterates z [S, n] of S searches after so many evaluations of each, and their scores [S]."""

    evaluations: int
    z: Tensor
    score: Tensor


@dataclass(frozen=True)
class Descent:
    """The results of S searches.

    z: [S, n] the best iterate of each by its score [S] float64, inf if none was finite.  end: [S, n] the last iterate.
    evaluations: [S] int64 gradient evaluations.  trail: the best iterates at each mark that was reached.
    """

    z: Tensor
    score: Tensor
    end: Tensor
    evaluations: Tensor
    trail: tuple[Mark, ...]


class Adam:
    """The moments of S rows of numbers."""

    def __init__(self, like: Tensor) -> None:
        self.first, self.second = torch.zeros_like(like), torch.zeros_like(like)

    def direction(self, rows: Tensor, slope: Tensor, step: int) -> Tensor:
        """Return steps of length about 1 for slopes [s, n] of `rows` [s], with bias-corrected moments."""
        self.first[rows] = self.first[rows].lerp(slope, 1 - BETAS[0])
        self.second[rows] = self.second[rows].lerp(slope * slope, 1 - BETAS[1])
        one, two = (1 - beta ** (step + 1) for beta in BETAS)
        return self.first[rows] / one / ((self.second[rows] / two).sqrt() + EPSILON)


def descend(
    evaluate: ValueFunction,
    start: Tensor,
    schedule: DescentSchedule,
    *,
    project: Callable[[Tensor, Tensor], Tensor] = lambda z, _: z,
    marks: Sequence[int] = (),
) -> Descent:
    """Minimize each row from `start` [S, n] separately, and keep the best iterate of each by its score.

    A row whose value or gradient is not finite stops. `project` maps iterates and their index into the feasible set (a
    box, a ball); `marks` are numbers of evaluations after which the best iterates so far are recorded.
    """
    z, best, adam, trail = start.clone(), start.clone(), Adam(start), []
    score = z.new_full((len(z),), torch.inf, dtype=torch.float64)
    live = torch.arange(len(z), device=z.device)
    counts = torch.zeros_like(live)
    for step in range(schedule.steps):
        value = evaluate(z[live], live)
        counts[live] += 1
        better = value.score.double() < score[live]
        rows = live[better]
        score[rows], best[rows] = value.score.double()[better], z[rows]
        if step + 1 in marks:
            trail.append(Mark(step + 1, best.clone(), score.clone()))
        fine = value.loss.isfinite() & value.gradient.isfinite().all(1)
        live = live[fine]
        if not len(live):
            break
        slope = schedule.fed(value.gradient[fine])
        moved = z[live] - schedule.lr * schedule.factor(step) * adam.direction(live, slope, step)
        z[live] = project(moved, live)
    return Descent(best, score, z, counts, tuple(trail))
