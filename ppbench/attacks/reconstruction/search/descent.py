"""Adam for many victims and restarts at once: the one loop of all attacks that follow a gradient for a fixed budget.

What is searched is a row of numbers: pixels, a generator's latent, a feature map. `evaluate` says what a row is worth
and which way it improves; the loop knows nothing of images.
"""

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
    """How far to step.

    Attributes:
        steps: gradient evaluations a row.
        lr: base learning rate, in units of what is searched.
        shape: "cosine": from 1 down to 0; "warm": 5 % warm-up, cosine decay over the last 75 % (Fang et al. 2023).
        signed: whether Adam is fed the sign of the gradient (Geiping et al. 2020, Sec. 4).
    """

    steps: int
    lr: float = 0.1
    shape: Literal["cosine", "warm"] = "cosine"
    signed: bool = False

    def factor(self, step: int) -> float:
        """Return what the learning rate is multiplied by in `step`, counted from 0."""
        t = step / self.steps
        if self.shape == "cosine":
            return 0.5 * (1 + math.cos(math.pi * t))
        return 0.5 * (1 - math.cos(math.pi * min(1.0, (1 - t) / 0.75))) * min(1.0, (t + 1 / self.steps) / 0.05)


@dataclass(frozen=True)
class Mark:
    """How far S searches were after a number of evaluations each.

    Attributes:
        evaluations: of each row.
        z: [S, n] the best iterates so far.
        score: [S] float64 their scores.
    """

    evaluations: int
    z: Tensor
    score: Tensor


@dataclass(frozen=True)
class Descent:
    """Where S searches ended.

    Attributes:
        z: [S, n] the best iterate of each, by its score.
        score: [S] float64 its score; inf where no iterate had a finite one.
        end: [S, n] the last iterate: where a next stage goes on.
        evaluations: [S] int64 gradient evaluations.
        trail: what was best at each mark that was reached.
    """

    z: Tensor
    score: Tensor
    end: Tensor
    evaluations: Tensor
    trail: tuple[Mark, ...]


def descend(
    evaluate: Evaluate,
    start: Tensor,
    schedule: Schedule,
    *,
    project: Callable[[Tensor, Tensor], Tensor] | None = None,
    marks: Sequence[int] = (),
) -> Descent:
    """Minimize from `start` [S, n], every row by itself, and keep the best iterate of each by its score.

    A row whose value or gradient is not finite stops where it was best; the others go on.

    Args:
        evaluate: the function.
        start: first iterates; the search runs where they lie.
        schedule: number and size of steps.
        project: iterates [s, n] and their index [s] to where they are put back after every step (a box, a ball).
        marks: numbers of evaluations after which the best iterates so far are kept.
    """
    z, best = start.clone(), start.clone()
    score = z.new_full((len(z),), torch.inf, dtype=torch.float64)
    counts = z.new_zeros(len(z), dtype=torch.int64)
    first, second = torch.zeros_like(z), torch.zeros_like(z)
    live, trail = torch.arange(len(z), device=z.device), []
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
        slope = value.gradient[fine]
        slope = slope.sign() if schedule.signed else slope
        first[live] = first[live].lerp(slope, 1 - BETAS[0])
        second[live] = second[live].lerp(slope * slope, 1 - BETAS[1])
        moved = z[live] - schedule.lr * schedule.factor(step) * _direction(first[live], second[live], step)
        z[live] = moved if project is None else project(moved, live)
    return Descent(best, score, z, counts, tuple(trail))


def _direction(first: Tensor, second: Tensor, step: int) -> Tensor:
    """Return Adam's step of length about 1, with the bias of its young moments taken out."""
    one, two = (1 - beta ** (step + 1) for beta in BETAS)
    return first / one / ((second / two).sqrt() + EPSILON)
