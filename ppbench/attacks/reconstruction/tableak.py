"""TabLeak: rows of tables from gradients, numbers and categories together (Vero et al., ICML 2023).

Categories are searched as softmaxes over their one-hot groups, from many starts. Their ends, sorted alike, are pooled:
the mean of categories, the median of numbers. The disagreement in the pool shows the attacker how reliable it is. With
valid categories fixed, numbers alone are then searched again. Unlike in the paper, the squared distance is minimized,
not the cosine, and L-BFGS follows Adam: then sigmoid networks at batch 4 are inverted completely.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import scipy
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Guess
from ppbench.attacks.reconstruction.search.descent import DescentSchedule, Inversion, descend, evidence_of
from ppbench.attacks.reconstruction.search.lbfgs import LBFGSSettings, minimize
from ppbench.attacks.reconstruction.search.problem import Problem, Pull, objective
from ppbench.attacks.reconstruction.search.starts import PosedVictim, Start, Starts
from ppbench.federation.bounds import InMemoryCount, NonNegative, Positive, PositiveInt, UnitInterval
from ppbench.federation.plan import Columns, Plan

NUMBERS_EXACT = 1e-10
"""Mismatch at which numbers count as exact."""
PATIENT = LBFGSSettings(patience=0)
"""For L-BFGS: a softmax that begins to decide stalls for long."""
LABEL = 1e6
"""Squared distance for different labels when the rows of two ends are paired."""


def row_columns(plan: Plan) -> Columns:
    """Return the encoding of rows; without one in the plan, all features are numbers."""
    return plan.columns or Columns(math.prod(plan.spec.shape))


@dataclass(frozen=True)
class SoftRows:
    """Rows of tables as numbers, in their box, and logits of each category. shape: (N, *shape) of N rows."""

    shape: tuple[int, ...]
    columns: Columns
    low: float
    high: float

    @property
    def size(self) -> int:
        """Return the number of features of all rows."""
        return math.prod(self.shape)

    def images(self, z: Tensor, index: Tensor) -> tuple[Tensor, Pull]:
        """Return the rows [S, N, *shape] of z [S, n], and the pull-back of slopes: through each group's softmax."""
        numbers, groups = self.columns.split(z.view(len(z), self.shape[0], -1))
        soft = [group.softmax(-1) for group in groups]

        def pull(slope: Tensor) -> Tensor:
            straight, slopes = self.columns.split(slope.view(len(z), self.shape[0], -1))
            back = [p * (g - (p * g).sum(-1, keepdim=True)) for p, g in zip(soft, slopes, strict=True)]
            return torch.cat([straight, *back], -1).flatten(1)

        return torch.cat([numbers, *soft], -1).view(-1, *self.shape), pull

    def project(self, z: Tensor, index: Tensor) -> Tensor:
        """Return z [S, n] with numbers clipped to their box."""
        cells = z.view(len(z), self.shape[0], -1)
        k = self.columns.numbers
        return torch.cat([cells[..., :k].clamp(self.low, self.high), cells[..., k:]], -1).flatten(1)


@dataclass(frozen=True)
class NumberRows:
    """Rows [S, N, *shape] with fixed categories: only numbers are searched."""

    rows: Tensor
    columns: Columns
    low: float
    high: float

    @property
    def size(self) -> int:
        """Return the count of numbers in all rows."""
        return self.rows.shape[1] * self.columns.numbers

    def images(self, z: Tensor, index: Tensor) -> tuple[Tensor, Pull]:
        """Return the rows [S, N, *shape] of z [S, n], and the pull-back of slopes."""
        k, rows = self.columns.numbers, self.rows[index]
        cells = rows.view(len(z), rows.shape[1], -1)
        x = torch.cat([z.view(len(z), rows.shape[1], k), cells[..., k:]], -1)
        return x.view_as(rows), lambda slope: slope.view_as(cells)[..., :k].flatten(1)

    def project(self, z: Tensor, index: Tensor) -> Tensor:
        """Return z clipped to the box of numbers."""
        return z.clamp(self.low, self.high)


@dataclass(frozen=True)
class TabLeak(Inversion):
    """Rows of tables: categories by softmax, an ensemble that is pooled, then numbers again.

    The pool and the ensemble's best end are both rounded and searched again; the one with the smaller mismatch is the
    answer. Its confidence is the pool's disagreement, 0 to 1: the mean of the entropies of categories, relative to the
    uniform one's, and of the standard deviations of numbers (whose columns have 1), at most 1. For single rows it is
    meaningless: even noise has one best explanation, to which all starts lead.

    Attributes (and those of `Inversion`):
        settle: share of the budget for searching numbers with the categories fixed.
    """

    name: ClassVar[str] = "tableak"
    standard: ClassVar[bool] = False
    reference: ClassVar[str] = "Vero et al., TabLeak: Tabular Data Leakage in Federated Learning, ICML 2023"

    start: Start = "normal"
    budget: PositiveInt = 6000
    tries: InMemoryCount = 8
    lr: Positive = 0.06
    tv: NonNegative = 0.0
    slots: InMemoryCount = 32
    settle: UnitInterval = 0.2

    def suits(self, plan: Plan) -> bool:
        """Return whether inputs are table rows with a public encoding."""
        return super().suits(plan) and plan.columns is not None

    def attack(self, victims: Sequence[PosedVictim]) -> list[Guess]:
        """Return the guesses for victims from one of `blocks`: their evidence has one simulation."""
        plan, tries = victims[0].plan, self.share
        rest = int(self.settle * self.budget)
        rest = rest if rest >= 2 and self.budget - rest >= tries else 0
        pixels = self.problem(victims, [evidence_of(v) for v in victims], tries)
        problem = replace(pixels, space=SoftRows(victims[0].size, row_columns(plan), *plan.data_range))
        z, loss, spent = self.searched(problem, (self.budget - rest) // tries)
        ends, pools = problem.at(z), []
        for rows in torch.arange(len(ends.x)).view(-1, tries).tolist():
            pools.append(pooled_ends(ends.at(rows), loss[rows], row_columns(plan)))
        spent = spent.view(-1, tries).sum(1)
        x, more = self.settled(victims, ends, pools, rest)
        return [
            Guess(
                x=x[v].float(),
                y=ends.labels[v * tries + pool.best].argmax(-1),
                confidence=pool.disagreement,
                evaluations=int(spent[v]) + int(more[v]),
                others=tuple(ends.x[v * tries : (v + 1) * tries].float()),
            )
            for v, pool in enumerate(pools)
        ]

    def searched(self, problem: Problem, steps: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return soft rows z [S, n], their mismatches and evaluations [S]: Adam in the box, L-BFGS from its best."""
        descent = descend(problem, problem.start, DescentSchedule(-(-steps // 2), self.lr), project=problem.project)
        limit = torch.full((len(descent.z),), steps // 2)
        if steps < 2:
            return descent.z, descent.score.cpu(), descent.evaluations.cpu()
        ends = minimize(problem, descent.z, budget=limit, stop=torch.full(limit.shape, NUMBERS_EXACT), settings=PATIENT)
        return ends.z, ends.loss, ends.evaluations + descent.evaluations.cpu()

    def settled(
        self, victims: Sequence[PosedVictim], ends: Starts, pools: Sequence[EnsemblePool], budget: int
    ) -> tuple[Tensor, Tensor]:
        """Return the rows [V, N, *shape] of each victim's better candidate, and the evaluations [V] spent.

        The candidates are the pool and the best end, made valid; without a `budget` the pool is the answer.
        """
        plan, columns = victims[0].plan, row_columns(victims[0].plan)
        tries = len(ends.x) // len(pools)
        best = [v * tries + pool.best for v, pool in enumerate(pools)]
        pool, own = torch.stack([pool.x for pool in pools]), columns.rounded(ends.x[best].flatten(2))
        if not budget:
            return pool, torch.zeros(len(pools), dtype=torch.int64)
        x = torch.stack([pool.flatten(2), own], 1).flatten(0, 1).view(-1, *victims[0].size)
        evidences, fixed = [evidence_of(v) for v in victims], ends.at([row for row in best for _ in range(2)])
        y = fixed.labels
        y = one_hot(y.argmax(-1), y.shape[-1]).to(y) if y.shape[-1] > 1 else y
        unit = torch.stack([e.scale() for e in evidences]).to(x)
        space = NumberRows(x, columns, *plan.data_range)
        matching = objective(evidences, plan, x.shape[1], x.dtype)
        problem = Problem(space, matching, unit, Starts(x, y, False, fixed.extra), 2)
        z = problem.starts.rows(columns.split(x.flatten(2))[0].flatten(1))
        if not z.shape[1]:  # nothing is left to search
            value = problem(z, torch.arange(len(z), device=z.device)).score.double().cpu()
            return better_rows(x, value), torch.full((len(pools),), 2)
        limits = torch.full((len(z),), budget // 2), torch.full((len(z),), NUMBERS_EXACT)
        minima = minimize(problem, z, budget=limits[0], stop=limits[1])
        rows = problem.at(problem.project(minima.z, torch.arange(len(z), device=z.device))).x
        return better_rows(rows, minima.loss), minima.evaluations.view(-1, 2).sum(1)


def better_rows(x: Tensor, mismatch: Tensor) -> Tensor:
    """Return the one of each two in x [2 * V, N, *shape] whose `mismatch` [2 * V] is smaller, [V, N, *shape]."""
    take = mismatch.nan_to_num(nan=math.inf).view(-1, 2).argmin(1)
    return x[torch.arange(len(take)) * 2 + take]


@dataclass(frozen=True)
class EnsemblePool:
    """The consensus of an ensemble: valid rows x [N, *shape], the index of its best end, its disagreement."""

    x: Tensor
    best: int
    disagreement: float | None


def pooled_ends(ends: Starts, score: Tensor, columns: Columns) -> EnsemblePool:
    """Return the pool of an ensemble's `ends` with their scores [M]; those without a finite score are ignored."""
    best, rows = int(score.argmin()), ends.x.flatten(2)
    voters = [m for m in range(len(rows)) if m == best or bool(score[m].isfinite())]
    aligned = torch.stack([rows[m][paired_rows(rows[best], rows[m], ends.y[best], ends.y[m])] for m in voters])
    numbers, groups = columns.split(aligned)
    x = torch.cat([numbers.median(0).values, *(group.mean(0) for group in groups)], -1)
    doubt = [numbers.std(0, correction=0).clamp(max=1.0)] if columns.numbers else []
    for group in groups:
        mean = group.mean(0)
        doubt.append((torch.special.entr(mean).sum(-1) / math.log(max(2, mean.shape[-1])))[:, None])
    value = float(torch.cat(doubt, 1).mean())
    return EnsemblePool(columns.rounded(x).view(ends.x.shape[1:]), best, value if math.isfinite(value) else None)


def paired_rows(one: Tensor, other: Tensor, labels: Tensor, others: Tensor) -> Tensor:
    """Return the row [N] of `other` [N, D] that belongs to each of `one`, by least squared distance and equal label."""
    differ = labels.argmax(-1)[:, None] != others.argmax(-1)[None]
    cost = torch.cdist(one.double(), other.double()).square() + LABEL * differ
    return torch.from_numpy(scipy.optimize.linear_sum_assignment(cost.nan_to_num(nan=LABEL).cpu().numpy())[1])
