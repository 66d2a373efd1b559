"""Adam for many victims and restarts at once: the loop of all attacks that follow a gradient for a fixed budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import torch
from torch import Tensor

from ppbench.adversary.attack import Guess
from ppbench.attacks.reconstruction.search.priors import Penalty, Sum, TotalVariation
from ppbench.attacks.reconstruction.search.problem import Objective, Pixels, Problem, RowValue, objective
from ppbench.attacks.reconstruction.search.starts import (
    ImageSearch,
    PosedVictim,
    Starts,
    draw,
    search_batches,
    simulation_groups,
)
from ppbench.federation.bounds import InMemoryCount, NonNegative, Positive
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.metrics.modality import modality_in

EPSILON, BETAS = 1e-8, (0.9, 0.999)

ValueFunction = Callable[[Tensor, Tensor], RowValue]
"""Maps rows z [S, n] and the start that each came from, index [S] int64, to their `RowValue`: a `Problem`."""


class SoftFunction(Protocol):
    """A `ValueFunction` of a network whose ReLUs can be smoothed."""

    def __call__(self, z: Tensor, index: Tensor) -> RowValue:
        """Return the value of rows z [S, n] of the starts `index` [S]."""

    def softened(self, width: float) -> ValueFunction:
        """Return the same with ReLUs smoothed by `width`, see `soft_kinks`."""


@dataclass(frozen=True)
class DescentSchedule:
    """The lengths of steps: `steps` gradient evaluations per row, at a rate `lr` in units of the searched numbers.

    shape: "cosine": from 1 to 0; "warm": 5 % warm-up, decay over the last 75 % (Fang et al. 2023).
    by: the input of Adam: the "slope", its "sign" (Geiping et al. 2020, Sec. 4), or a "soft" sign, tanh(slope / mean
        |slope| of the row), under which nearly settled numbers stay.
    soften: width by which ReLUs are smoothed at first, see `soft_kinks`; it falls with the rate. 0: not at all.
    """

    steps: int
    lr: float = 0.1
    shape: Literal["cosine", "warm"] = "cosine"
    by: Literal["slope", "sign", "soft"] = "slope"
    soften: float = 0.0

    def factor(self, step: int) -> float:
        """Return the factor on the learning rate in `step`, counted from 0."""
        t = step / self.steps
        if self.shape == "cosine":
            return 0.5 * (1 + math.cos(math.pi * t))
        return 0.5 * (1 - math.cos(math.pi * min(1.0, (1 - t) / 0.75))) * min(1.0, (t + 1 / self.steps) / 0.05)

    def softened(self, evaluate: ValueFunction | SoftFunction, step: int) -> ValueFunction:
        """Return what is evaluated in `step`: `evaluate` with ReLUs smoothed by the width of that step."""
        if not self.soften:
            return evaluate
        return evaluate.softened(self.soften * self.factor(step))  # type: ignore[union-attr]

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
    box, a ball); `marks` are numbers of evaluations after which the best iterates so far are recorded. With
    `schedule.soften`, `evaluate` is a `SoftFunction`.
    """
    z, best, adam, trail = start.clone(), start.clone(), Adam(start), []
    score = z.new_full((len(z),), torch.inf, dtype=torch.float64)
    live = torch.arange(len(z), device=z.device)
    counts = torch.zeros_like(live)
    for step in range(schedule.steps):
        value = schedule.softened(evaluate, step)(z[live], live)
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


# -- What attacks that descend along a gradient share: victims with one kind of evidence are searched as one
# `Problem` --

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

    def blocks(self, victims: Sequence[PosedVictim]) -> list[list[int]]:
        """Return indices of the victims with usable evidence: blocks with one simulation and at most `slots` rows."""
        size, blocks = max(1, self.slots // self.tries), []
        for rows in search_batches(victims):
            for group in simulation_groups([evidence_of(victims[i]) for i in rows]):
                places = [rows[i] for i in group]
                blocks += [places[i : i + size] for i in range(0, len(places), size)]
        return blocks

    def attack(self, victims: Sequence[PosedVictim]) -> list[Guess]:
        """Return the guesses for victims from one of `blocks`: their evidence has one simulation."""
        problem = self.problem(victims, [evidence_of(v) for v in victims], self.share)
        schedule = self.schedule(self.budget // problem.tries, victims[0].plan)
        return SearchHistory(problem.tries).add(problem, descent_of(problem, problem.start, schedule)).guesses()

    @property
    def share(self) -> int:
        """Starts per victim, at most as many as evaluations."""
        return min(self.tries, self.budget)

    def problem(
        self, victims: Sequence[PosedVictim], evidences: Sequence[Evidence], tries: int, labels: Tensor | None = None
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
        return cast(Objective, torch.compile(matching)) if self.compile else matching  # without `softened`

    def matched(self, evidence: Evidence) -> Evidence:
        """Return `evidence` with the measure that this attack compares by. Default: as it is."""
        return evidence

    def unit(self, evidences: Sequence[Evidence]) -> Tensor:
        """Return the divisor of each D [V] float32. Default: the discrepancy of an all-zero simulation."""
        return torch.stack([self.matched(e).scale() for e in evidences]).to(evidences[0].device, torch.float32)

    def penalty(self, plan: Plan) -> Penalty | None:
        """Return the prior on images, or None."""
        low, high = plan.data_range
        weight = self.tv / (high - low) if modality_in(plan).smooth else 0.0
        return Sum([TotalVariation(weight)]) if self.tv else None

    def schedule(self, steps: int, plan: Plan) -> DescentSchedule:
        """Return the schedule for `steps` evaluations per row."""
        low, high = plan.data_range
        return DescentSchedule(steps, self.lr * (high - low))


def evidence_of(victim: PosedVictim) -> Evidence:
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
