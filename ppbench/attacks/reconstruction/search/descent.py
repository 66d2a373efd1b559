"""Adam for many victims and restarts at once: the one loop of all attacks that follow a gradient for a fixed budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ppbench.attacks.reconstruction.search.problem import Value

EPSILON, BETAS = 1e-8, (0.9, 0.999)

Evaluate = Callable[[Tensor, Tensor], Value]
"""Rows z [S, n] and which start each one came from, index [S] int64, to their `Value`: a `Problem`."""


@dataclass(frozen=True)
class Schedule:
    """How far to step: `steps` gradient evaluations a row, at a rate `lr` in units of what is searched.

    shape: "cosine": from 1 to 0; "warm": 5 % warm-up, decay over the last 75 % (Fang et al. 2023).
    by: what Adam is fed: the "slope", its "sign" (Geiping et al. 2020, Sec. 4), or a "soft" one, tanh(slope / mean
        |slope| of the row): what is nearly settled then stays where it is.
    """

    steps: int
    lr: float = 0.1
    shape: Literal["cosine", "warm"] = "cosine"
    by: Literal["slope", "sign", "soft"] = "slope"

    def factor(self, step: int) -> float:
        """Return what the learning rate is multiplied by in `step`, counted from 0."""
        t = step / self.steps
        if self.shape == "cosine":
            return 0.5 * (1 + math.cos(math.pi * t))
        return 0.5 * (1 - math.cos(math.pi * min(1.0, (1 - t) / 0.75))) * min(1.0, (t + 1 / self.steps) / 0.05)

    def fed(self, slope: Tensor) -> Tensor:
        """Return what Adam is fed for slopes [s, n]."""
        if self.by == "slope":
            return slope
        if self.by == "sign":
            return slope.sign()
        return (slope / slope.abs().mean(1, keepdim=True).clamp(min=torch.finfo(slope.dtype).tiny)).tanh()


@dataclass(frozen=True)
class Mark:
    """After so many evaluations of each of S searches: the best iterates z [S, n] so far, and their scores [S]."""

    evaluations: int
    z: Tensor
    score: Tensor


@dataclass(frozen=True)
class Descent:
    """Where S searches ended.

    z: [S, n] the best iterate of each by its score [S] float64, inf where none was finite.  end: [S, n] the last
    iterate. evaluations: [S] int64 gradient evaluations.  trail: what was best at each mark that was reached.
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
        """Return steps of length about 1 for slopes [s, n] of `rows` [s], with the bias of young moments taken out."""
        self.first[rows] = self.first[rows].lerp(slope, 1 - BETAS[0])
        self.second[rows] = self.second[rows].lerp(slope * slope, 1 - BETAS[1])
        one, two = (1 - beta ** (step + 1) for beta in BETAS)
        return self.first[rows] / one / ((self.second[rows] / two).sqrt() + EPSILON)


def descend(
    evaluate: Evaluate,
    start: Tensor,
    schedule: Schedule,
    *,
    project: Callable[[Tensor, Tensor], Tensor] = lambda z, _: z,
    marks: Sequence[int] = (),
) -> Descent:
    """Minimize from `start` [S, n], every row by itself, and keep the best iterate of each by its score.

    A row whose value or gradient is not finite stops where it was best. `project` puts iterates, with their index, back
    (a box, a ball); `marks` are numbers of evaluations after which the best iterates so far are kept.
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
