"""A search as a problem of its own: what rows have to explain, over a space that stands for images.

Victims are searched together, every one from several starts: a row each. The space (pixels, a generator's latent, a
feature map) is a small part of its own, so that one loop serves all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ppbench.adversary.attack import Guess
from ppbench.attacks.reconstruction.search.descent import Evaluate, Found, Schedule, Value, descend
from ppbench.attacks.reconstruction.search.matching import LOGIT, Starts
from ppbench.attacks.reconstruction.search.objectives import Objective
from ppbench.attacks.reconstruction.search.priors import Penalty

Pull = Callable[[Tensor], Tensor]
"""Slopes by images [S, N, *shape] to slopes by what is searched [S, n]."""


class Space(Protocol):
    """What is searched instead of images: rows of n numbers, and the images that they stand for."""

    @property
    def size(self) -> int:
        """Return n."""

    def images(self, z: Tensor, index: Tensor) -> tuple[Tensor, Pull]:
        """Return the images [S, N, *shape] of rows z [S, n], and how their slopes come back to z.

        Args:
            z: the rows.
            index: [S] int64, which start each one came from.
        """

    def project(self, z: Tensor, index: Tensor) -> Tensor:
        """Return z [S, n] put back to where rows may be."""


@dataclass(frozen=True)
class Pixels:
    """The images themselves, kept in the data's range.

    Attributes:
        shape: (N, *shape) of a row.
        low, high: the range.
    """

    shape: tuple[int, ...]
    low: float
    high: float

    @property
    def size(self) -> int:
        """Return the number of pixels."""
        return math.prod(self.shape)

    def images(self, z: Tensor, index: Tensor) -> tuple[Tensor, Pull]:
        """Return the rows in the shape of images; slopes come back as they are."""
        return z.view(-1, *self.shape), lambda slope: slope.flatten(1)

    def project(self, z: Tensor, index: Tensor) -> Tensor:
        """Return the rows clipped to the range."""
        return z.clamp(self.low, self.high)


@dataclass(frozen=True)
class Problem:
    """What S = V * tries rows have to explain.

    Attributes:
        matching: D of the V victims' evidence.
        unit: [V] what D is divided by.
        starts: the first images, labels and nuisance unknowns of the S rows: a victim's rows follow one another.
        tries: rows a victim.
        penalty: on the images, or None.
        fading: whether the penalty is multiplied by the present score, taken as a constant.
    """

    matching: Objective
    unit: Tensor
    starts: Starts
    tries: int
    penalty: Penalty | None
    fading: bool = False

    def rows(self, z: Tensor) -> Tensor:
        """Return whole rows: z [S, n] of a space, nuisance unknowns, logits of unknown labels in units of `LOGIT`."""
        return self.starts.joined(z, self.starts.extra.to(z), self.starts.y.to(z) / LOGIT)

    def unpacked(self, tail: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return labels [S, N, C] and nuisance unknowns [S, E] of the part of rows that is no image."""
        extra, y = tail[:, : self.starts.extra.shape[1]], self.starts.y[index]
        if not self.starts.joint:
            return y.to(tail), extra
        logits = LOGIT * tail[:, extra.shape[1] :].reshape(y.shape)
        return (logits.softmax(-1) if y.shape[-1] > 1 else logits), extra

    def evaluate(self, space: Space) -> Evaluate:
        """Return what whole rows over `space` are worth: D / unit as score, with the penalty as loss."""

        def function(z: Tensor, index: Tensor) -> Value:
            x, pull = space.images(z[:, : space.size], index)
            y, extra = self.unpacked(z[:, space.size :], index)
            victim = index // self.tries
            unit = self.unit[victim]
            score, gx, gy, gn = self.matching(x, y, extra, victim)
            score, gx, gy, gn = score / unit, gx / _wide(unit, gx), gy / _wide(unit, gy), gn / unit[:, None]
            loss = score
            if self.penalty is not None:
                more, slope = self.penalty(x, index)
                if self.fading:
                    more, slope = score * more, _wide(score, slope) * slope
                loss, gx = score + more, gx + slope
            if self.starts.joint:  # through the softmax; a single output's target is a number
                gy = LOGIT * (y * (gy - (y * gy).sum(-1, keepdim=True)) if y.shape[-1] > 1 else gy)
            return Value(loss, score, self.starts.joined(pull(gx), gn, gy))

        return function

    def search(self, space: Space, z: Tensor, schedule: Schedule, marks: Sequence[int] = ()) -> Found:
        """Return where the search from whole rows z ended; only the part that is an image is projected."""

        def project(z: Tensor, index: Tensor) -> Tensor:
            return torch.cat([space.project(z[:, : space.size], index), z[:, space.size :]], 1)

        return descend(self.evaluate(space), z, schedule, project=project, marks=marks)

    def images(self, space: Space, z: Tensor) -> Tensor:
        """Return the images [S, N, *shape] of whole rows z, one for each start."""
        return space.images(z[:, : space.size], torch.arange(len(z), device=z.device))[0].detach()

    def labels(self, space: Space, z: Tensor) -> Tensor:
        """Return the labels [S, N] int64 of whole rows z, one for each start."""
        return self.unpacked(z[:, space.size :], torch.arange(len(z), device=z.device))[0].argmax(-1)


def _wide(unit: Tensor, like: Tensor) -> Tensor:
    return unit.view(-1, *[1] * (like.dim() - 1))


@dataclass(frozen=True)
class Rebuilt:
    """What was found of V victims, from `tries` starts each.

    Attributes:
        x: [V, tries, N, *shape] images.
        y: [V, tries, N] int64 labels.
        score: [V, tries] float64 what starts are chosen by; inf where nothing finite was found.
        evaluations: [V] int64 gradient evaluations, all starts together.
        path: (evaluations, images [V, N, *shape]) that would have been answered earlier.
    """

    x: Tensor
    y: Tensor
    score: Tensor
    evaluations: Tensor
    path: tuple[tuple[int, Tensor], ...] = ()

    def guesses(self) -> list[Guess]:
        """Return each victim's best try by its score, the others beside it."""
        found = []
        for v, best in enumerate(self.score.argmin(1).tolist()):
            score = float(self.score[v, best])
            path = tuple((spent, x[v].float()) for spent, x in self.path if spent <= int(self.evaluations[v]))
            found.append(
                Guess(
                    x=self.x[v, best].float(),
                    y=self.y[v, best],
                    confidence=score if math.isfinite(score) else None,
                    evaluations=int(self.evaluations[v]),
                    path=path,
                    others=tuple(x.float() for i, x in enumerate(self.x[v]) if i != best),
                )
            )
        return found


def rebuilt(problem: Problem, space: Space, found: Found) -> Rebuilt:
    """Return what a search found, victim by victim."""

    def chosen(z: Tensor, score: Tensor) -> Tensor:
        first = torch.arange(0, len(score), problem.tries, device=score.device)
        best = score.view(-1, problem.tries).argmin(1) + first
        return problem.images(space, z)[best]

    def split(rows: Tensor) -> Tensor:
        return rows.view(-1, problem.tries, *rows.shape[1:])

    path = tuple((problem.tries * mark.evaluations, chosen(mark.z, mark.score)) for mark in found.trail)
    return Rebuilt(
        split(problem.images(space, found.z)),
        split(problem.labels(space, found.z)),
        split(found.score),
        split(found.evaluations).sum(1),
        path,
    )
