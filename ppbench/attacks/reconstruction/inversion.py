"""What attacks that descend along a gradient share: victims of one kind of evidence are searched as one `Problem`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppbench.adversary.attack import Guess
from ppbench.attacks.reconstruction.search.descent import Descent, Evaluate, Schedule, descend
from ppbench.attacks.reconstruction.search.priors import Penalty, Sum, TotalVariation
from ppbench.attacks.reconstruction.search.problem import Objective, Pixels, Problem, objective
from ppbench.attacks.reconstruction.search.starts import ImageSearch, Starts, Victim, batches, draw, groups
from ppbench.federation.bounds import InMemoryCount, NonNegative, Positive
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan

MARKS = 8
"""Points of a guess's budget curve, at most."""


@dataclass(frozen=True)
class Inversion(ImageSearch):
    """Base of attacks that follow a gradient of the images for a fixed number of steps.

    Attributes (and those of `ImageSearch`):
        tries: starts a victim; they share the budget, and the best by its own mismatch counts.
        lr: learning rate, in units of the data's range.
        tv: weight of the total variation, mean |dx| + |dy| over pixels in units of the data's range.
        fading: whether priors are weighed relative to the mismatch: they guide the search, and vanish in the end.
        slots: rows that are evaluated together, at most, but all of a victim's.
        compile: whether the objective goes through torch.compile: slow to warm up, and no faster on a LeNet.
    """

    tries: InMemoryCount = 1
    lr: Positive = 0.1
    tv: NonNegative = 1e-4
    fading: bool = False
    slots: InMemoryCount = 32
    compile: bool = False

    def blocks(self, victims: Sequence[Victim]) -> list[list[int]]:
        """Return indices of the victims with usable evidence, by who shares a simulation: at most a block's rows."""
        size, found = max(1, self.slots // self.tries), []
        for rows in batches(victims):
            for alike in groups([known(victims[i]) for i in rows]):
                places = [rows[i] for i in alike]
                found += [places[i : i + size] for i in range(0, len(places), size)]
        return found

    def attack(self, victims: Sequence[Victim]) -> list[Guess]:
        """Return the guesses for victims that `blocks` put together: their evidence has one simulation."""
        problem = self.problem(victims, [known(v) for v in victims], self.share)
        schedule = self.schedule(self.budget // problem.tries, victims[0].plan)
        return Story(problem.tries).add(problem, descended(problem, problem.start, schedule)).guesses()

    @property
    def share(self) -> int:
        """Starts a victim, no more than evaluations."""
        return min(self.tries, self.budget)

    def problem(
        self, victims: Sequence[Victim], evidences: Sequence[Evidence], tries: int, labels: Tensor | None = None
    ) -> Problem:
        """Return what the pixels of `tries` fresh rows a victim explain; labels [V, N, C], None: as `label` says."""
        plan, drawn = victims[0].plan, [draw(victims, self.start, self.label, torch.float32) for _ in range(tries)]
        if labels is not None:
            drawn = [Starts(starts.x, labels.to(starts.x), False) for starts in drawn]
        joint = any(starts.joint for starts in drawn)
        x, y = (torch.stack(parts, 1).flatten(0, 1) for parts in ([s.x for s in drawn], [s.y for s in drawn]))
        starts = Starts(x, y, joint, torch.stack([s.extra for s in drawn], 1).flatten(0, 1))
        space, matching = Pixels(victims[0].size, *plan.data_range), self.matching(plan, evidences, x.shape[1])
        return Problem(space, matching, self.unit(evidences), starts, tries, self.penalty(plan), self.fading)

    def matching(self, plan: Plan, evidences: Sequence[Evidence], batch: int) -> Objective:
        """Return how far guesses of `batch` examples are from the evidence of V victims."""
        matching = objective([self.matched(e) for e in evidences], plan, batch, torch.float32)
        return torch.compile(matching) if self.compile else matching

    def matched(self, evidence: Evidence) -> Evidence:
        """Return `evidence` with the measure that this attack compares by. Default: as it is."""
        return evidence

    def unit(self, evidences: Sequence[Evidence]) -> Tensor:
        """Return what each D is divided by [V] float32. Default: the discrepancy of an all-zero simulation."""
        return torch.stack([self.matched(e).scale() for e in evidences]).to(evidences[0].device, torch.float32)

    def penalty(self, plan: Plan) -> Penalty | None:
        """Return the prior on images, or None."""
        low, high = plan.data_range
        return Sum([TotalVariation(self.tv / (high - low))]) if self.tv else None

    def schedule(self, steps: int, plan: Plan) -> Schedule:
        """Return how far to step in `steps` evaluations a row."""
        low, high = plan.data_range
        return Schedule(steps, self.lr * (high - low))


def known(victim: Victim) -> Evidence:
    """Return the victim's evidence; `blocks` holds no victims without it."""
    assert victim.evidence is not None
    return victim.evidence


def descended(problem: Problem, z: Tensor, schedule: Schedule, evaluate: Evaluate | None = None) -> Descent:
    """Return where the search of `problem`, or `evaluate`, from whole rows z ended, with marks of a budget curve."""
    marks = {max(1, round(schedule.steps ** (i / MARKS))) for i in range(1, MARKS + 1)}
    return descend(evaluate or problem, z, schedule, project=problem.project, marks=sorted(marks))


class Story:
    """What searches of V victims from `tries` starts each found, in turn, after `spent` evaluations of a victim."""

    def __init__(self, tries: int, spent: int = 0) -> None:
        self.tries, self.spent = tries, spent
        self.ends: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self.path: list[tuple[int, Tensor]] = []
        self.score = self.best = torch.empty(0)

    def add(self, problem: Problem, descent: Descent) -> Story:
        """Take up how a search went."""
        spent = sum(int(evaluations.max()) for *_, evaluations in self.ends)
        for mark in descent.trail:
            self._improve(problem.at(mark.z).x, mark.score)
            self.path.append((self.spent + self.tries * (spent + mark.evaluations), self._answer()))
        end = problem.at(descent.z)
        self._improve(end.x, descent.score)
        self.ends.append((end.x, end.labels.argmax(-1), descent.score, descent.evaluations))
        return self

    def _improve(self, x: Tensor, score: Tensor) -> None:
        """Keep the images x [V * tries, N, *shape] that are better than before."""
        if not len(self.score):
            self.best, self.score = x, score
        better = score < self.score
        self.best = torch.where(better.view(-1, *[1] * (x.dim() - 1)), x, self.best)
        self.score = torch.where(better, score, self.score)

    def _answer(self) -> Tensor:
        """Return what would be answered now, [V, N, *shape]."""
        first = torch.arange(0, len(self.score), self.tries, device=self.score.device)
        return self.best[self.score.view(-1, self.tries).argmin(1) + first]

    def guesses(self) -> list[Guess]:
        """Return each victim's best try of all searches by its score, the others beside it."""
        x, y, score, spent = (
            torch.stack(part, 1).unflatten(0, (-1, self.tries)).flatten(1, 2) for part in zip(*self.ends, strict=True)
        )
        guesses = []
        for v, best in enumerate(score.argmin(1).tolist()):
            value, count = float(score[v, best]), self.spent + int(spent[v].sum())
            guesses.append(
                Guess(
                    x=x[v, best].float(),
                    y=y[v, best],
                    confidence=value if math.isfinite(value) else None,
                    evaluations=count,
                    path=tuple((mark, images[v].float()) for mark, images in self.path if mark <= count),
                    others=tuple(other.float() for i, other in enumerate(x[v]) if i != best),
                )
            )
        return guesses
