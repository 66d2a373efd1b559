"""What attacks that descend along a gradient share: victims with one kind of evidence are searched as one `Problem`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppbench.adversary.attack import Guess
from ppbench.attacks.reconstruction.search.descent import Descent, DescentSchedule, ValueFunction, descend
from ppbench.attacks.reconstruction.search.priors import Penalty, Sum, TotalVariation
from ppbench.attacks.reconstruction.search.problem import Objective, Pixels, Problem, objective
from ppbench.attacks.reconstruction.search.starts import (
    ImageSearch,
    Starts,
    Victim,
    draw,
    search_batches,
    simulation_groups,
)
from ppbench.federation.bounds import InMemoryCount, NonNegative, Positive
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan

CURVE_MARKS = 8
"""Points of a guess's budget curve, at most."""


@dataclass(frozen=True)
class Inversion(ImageSearch):
    """Base of attacks that follow a gradient of the images for a fixed number of steps.

    Attributes (and those of `ImageSearch`):
        tries: starts per victim; they share the budget, and the best by its own mismatch counts.
        lr: learning rate, in units of the data's range.
        tv: weight of the total variation, mean |dx| + |dy| over pixels in units of the data's range.
        fading: whether priors are multiplied by the mismatch: they guide the search, and vanish in the end.
        slots: rows that are evaluated together, at most; all rows of a victim are.
        compile: whether the objective goes through torch.compile: slow to warm up, and no faster on a LeNet.
    """

    tries: InMemoryCount = 1
    lr: Positive = 0.1
    tv: NonNegative = 1e-4
    fading: bool = False
    slots: InMemoryCount = 32
    compile: bool = False

    def blocks(self, victims: Sequence[Victim]) -> list[list[int]]:
        """Return indices of the victims with usable evidence: blocks with one simulation and at most `slots` rows."""
        size, blocks = max(1, self.slots // self.tries), []
        for rows in search_batches(victims):
            for group in simulation_groups([evidence_of(victims[i]) for i in rows]):
                places = [rows[i] for i in group]
                blocks += [places[i : i + size] for i in range(0, len(places), size)]
        return blocks

    def attack(self, victims: Sequence[Victim]) -> list[Guess]:
        """Return the guesses for victims from one of `blocks`: their evidence has one simulation."""
        problem = self.problem(victims, [evidence_of(v) for v in victims], self.share)
        schedule = self.schedule(self.budget // problem.tries, victims[0].plan)
        return SearchHistory(problem.tries).add(problem, descent_of(problem, problem.start, schedule)).guesses()

    @property
    def share(self) -> int:
        """Starts per victim, at most as many as evaluations."""
        return min(self.tries, self.budget)

    def problem(
        self, victims: Sequence[Victim], evidences: Sequence[Evidence], tries: int, labels: Tensor | None = None
    ) -> Problem:
        """Return the problem over the pixels of `tries` fresh rows per victim; labels [V, N, C], None: by `label`."""
        plan, drawn = victims[0].plan, [draw(victims, self.start, self.label, torch.float32) for _ in range(tries)]
        if labels is not None:
            drawn = [Starts(starts.x, labels.to(starts.x), False) for starts in drawn]
        joint = any(starts.joint for starts in drawn)
        x, y = (torch.stack(parts, 1).flatten(0, 1) for parts in ([s.x for s in drawn], [s.y for s in drawn]))
        starts = Starts(x, y, joint, torch.stack([s.extra for s in drawn], 1).flatten(0, 1))
        space, matching = Pixels(victims[0].size, *plan.data_range), self.matching(plan, evidences, x.shape[1])
        return Problem(space, matching, self.unit(evidences), starts, tries, self.penalty(plan), self.fading)

    def matching(self, plan: Plan, evidences: Sequence[Evidence], batch: int) -> Objective:
        """Return the distance of guesses of `batch` examples from the evidence of V victims."""
        matching = objective([self.matched(e) for e in evidences], plan, batch, torch.float32)
        return torch.compile(matching) if self.compile else matching

    def matched(self, evidence: Evidence) -> Evidence:
        """Return `evidence` with the measure that this attack compares by. Default: as it is."""
        return evidence

    def unit(self, evidences: Sequence[Evidence]) -> Tensor:
        """Return the divisor of each D [V] float32. Default: the discrepancy of an all-zero simulation."""
        return torch.stack([self.matched(e).scale() for e in evidences]).to(evidences[0].device, torch.float32)

    def penalty(self, plan: Plan) -> Penalty | None:
        """Return the prior on images, or None."""
        low, high = plan.data_range
        return Sum([TotalVariation(self.tv / (high - low))]) if self.tv else None

    def schedule(self, steps: int, plan: Plan) -> DescentSchedule:
        """Return the schedule for `steps` evaluations per row."""
        low, high = plan.data_range
        return DescentSchedule(steps, self.lr * (high - low))


def evidence_of(victim: Victim) -> Evidence:
    """Return the victim's evidence; `blocks` holds no victims without it."""
    assert victim.evidence is not None
    return victim.evidence


def descent_of(
    problem: Problem, z: Tensor, schedule: DescentSchedule, evaluate: ValueFunction | None = None
) -> Descent:
    """Return the descent on `problem`, or `evaluate`, from whole rows z, with marks of a budget curve."""
    marks = {max(1, round(schedule.steps ** (i / CURVE_MARKS))) for i in range(1, CURVE_MARKS + 1)}
    return descend(evaluate or problem, z, schedule, project=problem.project, marks=sorted(marks))


class SearchHistory:
    """The results of successive searches for V victims, `tries` starts each, after `spent` evaluations per victim."""

    def __init__(self, tries: int, spent: int = 0) -> None:
        self.tries, self.spent = tries, spent
        self.ends: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self.path: list[tuple[int, Tensor]] = []
        self.score = self.best = torch.empty(0)

    def add(self, problem: Problem, descent: Descent) -> SearchHistory:
        """Add the result and trail of a search, and return self."""
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
        """Return the best images so far [V, N, *shape]."""
        first = torch.arange(0, len(self.score), self.tries, device=self.score.device)
        return self.best[self.score.view(-1, self.tries).argmin(1) + first]

    def guesses(self) -> list[Guess]:
        """Return each victim's best try over all searches by its score, with the others as `others`."""
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
