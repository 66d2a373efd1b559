"""Searches one after another over several spaces, told as one: what was best so far, whatever space it came from."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ppbench.attacks.reconstruction.inversion import marks
from ppbench.attacks.reconstruction.search.descent import Found, Schedule, Value, descend
from ppbench.attacks.reconstruction.search.problem import Problem, Rebuilt, Space


def searched(problem: Problem, space: Space, z: Tensor, schedule: Schedule, spread: float = 0.0) -> Found:
    """Return where the search of one stage ended.

    Args:
        problem: what the rows have to explain.
        space: what is searched.
        z: first rows [S, n + E], nuisance unknowns and logits included.
        schedule: how far to step.
        spread: weight of the mean square of the n numbers, which are drawn to N(0, 1) by it, in units of the present
            mismatch, so that it vanishes where all is explained; no part of the score.
    """
    steps = marks(schedule.steps)
    if not spread:
        return problem.search(space, z, schedule, steps)
    function = problem.evaluate(space)

    def evaluate(z: Tensor, index: Tensor) -> Value:
        value, own = function(z, index), z[:, : space.size]
        slope, weight = value.gradient.clone(), spread * value.score
        slope[:, : space.size] += 2 * weight[:, None] / space.size * own
        return replace(value, loss=value.loss + weight * own.square().mean(1), gradient=slope)

    return descend(evaluate, z, schedule, marks=steps)


class Story:
    """What the stages of a search of S = V * tries rows have found, in their order."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.ends: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self.path: list[tuple[int, Tensor]] = []
        self.score: Tensor | None = None
        self.best: Tensor | None = None

    def add(self, space: Space, found: Found) -> None:
        """Take up where the next stage ended."""
        spent = sum(int(evaluations.max()) for *_, evaluations in self.ends)
        for mark in found.trail:
            images = self._better(self.problem.images(space, mark.z), mark.score)
            self.path.append((self.problem.tries * (spent + mark.evaluations), images))
        images, labels = self.problem.images(space, found.z), self.problem.labels(space, found.z)
        self._better(images, found.score)
        self.ends.append((images, labels, found.score, found.evaluations))

    def _better(self, images: Tensor, score: Tensor) -> Tensor:
        """Keep what is better than before, row by row; return each victim's best row, [V, N, *shape]."""
        if self.best is None or self.score is None:
            self.best, self.score = images.clone(), score.clone()
        else:
            rows = score < self.score
            self.best, self.score = self.best.clone(), self.score.clone()
            self.best[rows], self.score[rows] = images[rows], score[rows]
        tries = self.problem.tries
        chosen = self.score.view(-1, tries).argmin(1) + torch.arange(0, len(self.score), tries)
        return self.best[chosen]

    def told(self) -> Rebuilt:
        """Return all stages of all tries as so many tries."""
        x, y, score, spent = (torch.stack(part, 1) for part in zip(*self.ends, strict=True))

        def split(rows: Tensor) -> Tensor:
            return rows.reshape(-1, self.problem.tries * rows.shape[1], *rows.shape[2:])

        return Rebuilt(split(x), split(y), split(score), split(spent).sum(1), tuple(self.path))
