"""TabLeak: rows of tables from gradients, numbers and categories together (Vero et al., ICML 2023).

Categories are searched as softmaxes over their one-hot groups, from many starts whose ends, put in one order, are
pooled: the mean of categories, the median of numbers. How far the pool disagrees tells the attacker what to believe.
With its categories made valid, numbers alone are then searched again. Unlike the paper, the squared distance is
minimized, not the cosine, and L-BFGS follows Adam: sigmoid networks at batch 4 then come out whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Guess
from ppbench.attacks.reconstruction.inversion import Inversion, known
from ppbench.attacks.reconstruction.search.descent import Schedule, descend
from ppbench.attacks.reconstruction.search.lbfgs import Settings, minimize
from ppbench.attacks.reconstruction.search.problem import Problem, Pull, objective
from ppbench.attacks.reconstruction.search.starts import Start, Starts, Victim
from ppbench.federation.bounds import InMemoryCount, NonNegative, Positive, PositiveInt, UnitInterval
from ppbench.federation.plan import Columns, Plan

EXACT = 1e-10
"""Mismatch at which numbers count as found."""
PATIENT = Settings(patience=0)
"""Of L-BFGS: a softmax that begins to decide stalls for long."""
LABEL = 1e6
"""Squared distance that a differing label counts as, where the rows of two ends are paired."""


def columns_of(plan: Plan) -> Columns:
    """Return how rows are encoded; where the plan does not say, all features are numbers."""
    return plan.columns or Columns(math.prod(plan.spec.shape))


@dataclass(frozen=True)
class SoftRows:
    """Rows of tables by numbers, in their box, and logits of each category: n of N rows `shape` (N, *shape)."""

    shape: tuple[int, ...]
    columns: Columns
    low: float
    high: float

    @property
    def size(self) -> int:
        """Return the number of features of all rows."""
        return math.prod(self.shape)

    def images(self, z: Tensor, index: Tensor) -> tuple[Tensor, Pull]:
        """Return the rows [S, N, *shape] of z [S, n], and how slopes come back: through each group's softmax."""
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
    """Rows whose categories are settled: of rows [S, N, *shape] only numbers are searched."""

    rows: Tensor
    columns: Columns
    low: float
    high: float

    @property
    def size(self) -> int:
        """Return how many numbers all rows have."""
        return self.rows.shape[1] * self.columns.numbers

    def images(self, z: Tensor, index: Tensor) -> tuple[Tensor, Pull]:
        """Return the rows [S, N, *shape] of z [S, n], and how slopes come back."""
        k, rows = self.columns.numbers, self.rows[index]
        cells = rows.view(len(z), rows.shape[1], -1)
        x = torch.cat([z.view(len(z), rows.shape[1], k), cells[..., k:]], -1)
        return x.view_as(rows), lambda slope: slope.view_as(cells)[..., :k].flatten(1)

    def project(self, z: Tensor, index: Tensor) -> Tensor:
        """Return z clipped to the box of numbers."""
        return z.clamp(self.low, self.high)


@dataclass(frozen=True)
class TabLeak(Inversion):
    """Rows of tables: categories by softmax, an ensemble that is pooled, then numbers once more.

    The pool and the ensemble's best end are both rounded and searched again; the smaller mismatch is the answer. Its
    confidence is the pool's disagreement, 0 to 1: the mean of the entropies of categories, of the uniform one's, and of
    the standard deviations of numbers (whose columns have 1), at most 1.
    Of single rows it says nothing: there is one best explanation even of noise, which all starts find.

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
        """Return whether inputs are table rows of which it is public how they are encoded."""
        return super().suits(plan) and plan.columns is not None

    def attack(self, victims: Sequence[Victim]) -> list[Guess]:
        """Return the guesses for victims that `blocks` put together: their evidence has one simulation."""
        plan, tries = victims[0].plan, self.share
        rest = int(self.settle * self.budget)
        rest = rest if rest >= 2 and self.budget - rest >= tries else 0
        pixels = self.problem(victims, [known(v) for v in victims], tries)
        problem = replace(pixels, space=SoftRows(victims[0].size, columns_of(plan), *plan.data_range))
        z, loss, spent = self.searched(problem, (self.budget - rest) // tries)
        ends, pools = problem.at(z), []
        for rows in torch.arange(len(ends.x)).view(-1, tries).tolist():
            pools.append(pooled(ends.at(rows), loss[rows], columns_of(plan)))
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
        near = descend(problem, problem.start, Schedule(-(-steps // 2), self.lr), project=problem.project)
        limit = torch.full((len(near.z),), steps // 2)
        if steps < 2:
            return near.z, near.score.cpu(), near.evaluations.cpu()
        ends = minimize(problem, near.z, budget=limit, stop=torch.full(limit.shape, EXACT), settings=PATIENT)
        return ends.z, ends.loss, ends.evaluations + near.evaluations.cpu()

    def settled(
        self, victims: Sequence[Victim], ends: Starts, pools: Sequence[Pool], budget: int
    ) -> tuple[Tensor, Tensor]:
        """Return the rows [V, N, *shape] of each victim's better candidate, and the evaluations [V] that it took.

        The candidates are the pool and the best end, made valid; without a `budget` the pool is the answer.
        """
        plan, columns = victims[0].plan, columns_of(victims[0].plan)
        tries = len(ends.x) // len(pools)
        best = [v * tries + pool.best for v, pool in enumerate(pools)]
        pool, own = torch.stack([pool.x for pool in pools]), columns.rounded(ends.x[best].flatten(2))
        if not budget:
            return pool, torch.zeros(len(pools), dtype=torch.int64)
        x = torch.stack([pool.flatten(2), own], 1).flatten(0, 1).view(-1, *victims[0].size)
        evidences, fixed = [known(v) for v in victims], ends.at([row for row in best for _ in range(2)])
        y = fixed.labels
        y = one_hot(y.argmax(-1), y.shape[-1]).to(y) if y.shape[-1] > 1 else y
        unit = torch.stack([e.scale() for e in evidences]).to(x)
        space = NumberRows(x, columns, *plan.data_range)
        matching = objective(evidences, plan, x.shape[1], x.dtype)
        problem = Problem(space, matching, unit, Starts(x, y, False, fixed.extra), 2)
        z = problem.starts.rows(columns.split(x.flatten(2))[0].flatten(1))
        if not z.shape[1]:  # nothing is left to search
            value = problem(z, torch.arange(len(z), device=z.device)).score.double().cpu()
            return chosen(x, value), torch.full((len(pools),), 2)
        limits = torch.full((len(z),), budget // 2), torch.full((len(z),), EXACT)
        minima = minimize(problem, z, budget=limits[0], stop=limits[1])
        rows = problem.at(problem.project(minima.z, torch.arange(len(z), device=z.device))).x
        return chosen(rows, minima.loss), minima.evaluations.view(-1, 2).sum(1)


def chosen(x: Tensor, mismatch: Tensor) -> Tensor:
    """Return of x [2 * V, N, *shape] the one of each two whose `mismatch` [2 * V] is smaller, [V, N, *shape]."""
    take = mismatch.nan_to_num(nan=math.inf).view(-1, 2).argmin(1)
    return x[torch.arange(len(take)) * 2 + take]


@dataclass(frozen=True)
class Pool:
    """What an ensemble agrees on: valid rows x [N, *shape], which of its ends is `best`, how far it disagrees."""

    x: Tensor
    best: int
    disagreement: float | None


def pooled(ends: Starts, score: Tensor, columns: Columns) -> Pool:
    """Return the pool of an ensemble's `ends` with their scores [M]; those without a finite one have no say."""
    best, rows = int(score.argmin()), ends.x.flatten(2)
    voters = [m for m in range(len(rows)) if m == best or bool(score[m].isfinite())]
    aligned = torch.stack([rows[m][paired(rows[best], rows[m], ends.y[best], ends.y[m])] for m in voters])
    numbers, groups = columns.split(aligned)
    x = torch.cat([numbers.median(0).values, *(group.mean(0) for group in groups)], -1)
    doubt = [numbers.std(0, correction=0).clamp(max=1.0)] if columns.numbers else []
    for group in groups:
        mean = group.mean(0)
        doubt.append((torch.special.entr(mean).sum(-1) / math.log(max(2, mean.shape[-1])))[:, None])
    value = float(torch.cat(doubt, 1).mean())
    return Pool(columns.rounded(x).view(ends.x.shape[1:]), best, value if math.isfinite(value) else None)


def paired(one: Tensor, other: Tensor, labels: Tensor, others: Tensor) -> Tensor:
    """Return which row [N] of `other` [N, D] belongs to each of `one`, by least squared distance; labels keep apart."""
    differ = labels.argmax(-1)[:, None] != others.argmax(-1)[None]
    cost = torch.cdist(one.double(), other.double()).square() + LABEL * differ
    return torch.from_numpy(linear_sum_assignment(cost.nan_to_num(nan=LABEL).cpu().numpy())[1])
