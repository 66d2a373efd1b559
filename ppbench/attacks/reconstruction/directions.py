"""Directions in the column space of a gradient that vanish on many of its rows: candidates for one example each.

`spear` defines the terms and says what the directions are for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy
import torch
from torch import Tensor

RANK_GAP = 30.0
"""Ratio of neighboring singular values that counts as the end of the rank."""
ROUNDED = 1e-15
"""Singular values below this share of the largest one are rounding in float64."""
DEAD_ROW = 1e-5
"""Rows of U below this share of the largest one belong to units that no example fires."""
LOOSE = 1e-3
"""Cosine below which a row may be orthogonal to a direction computed from few rows."""
TIGHT, LEAST = 30.0, 1e-7
"""The same for a direction computed from all its rows: in units of the rounding, and at least."""
MORE = 3
"""Rows that a direction must vanish on beyond the k - 1 that it was computed from."""
INDEPENDENT = 1e-3
"""Part of a unit vector outside the span of others that makes it independent of them."""
LEAST_SINGULAR = 1e-6
"""Smallest singular value that a basis may have."""
CORNER_DRAWS, CORNERS, SHARP = 300, 10, 2.0
"""Subsets drawn per corner, corners per round, and how strongly rows far from firing are preferred."""
SIDES = 256
"""Inequalities of the data range that a corner satisfies, at most."""
NEWTON = 20
"""Steps of the regression that separates units that fire from those that do not."""
SHUFFLES, FEW = 4, 40
"""Bases built from the candidates per round, and candidates considered for one, in units of the rank."""
PLAIN_DRAWS = 8000
"""Subsets drawn before corners are used, which take longer and are not needed for small batches."""


@dataclass(frozen=True)
class PublicLayer:
    """A layer's public values: weight [m, D] and bias [m], float64, and the range of its inputs (inf: none)."""

    weight: Tensor
    bias: Tensor
    low: float
    high: float


@dataclass(frozen=True)
class GradientSpan:
    """The gradient's singular spaces. rows: [l, k] of U, of unit length, of the l live units.

    live: [m] bool.  left: U [m, k].  right: S V^T [k, D + 1].  values: S [k].  rounding: [l], of a row, relative to it.
    firing: [k, m], the layer's outputs before the ReLU for basis vectors of the row space.
    """

    rows: Tensor
    live: Tensor
    left: Tensor
    right: Tensor
    values: Tensor
    rounding: Tensor
    firing: Tensor

    @property
    def rank(self) -> int:
        """Number k of examples that can be separated."""
        return len(self.values)

    def tolerance(self, q: Tensor) -> Tensor:
        """Return [n, l] the cosines that rounding leaves between rows and directions q [n, k] orthogonal to them."""
        size = (q / self.values).norm(dim=1, keepdim=True)
        slack: Tensor = (TIGHT * size * self.rounding).clamp(min=LEAST, max=LOOSE)
        return slack

    def zeros(self, q: Tensor) -> Tensor:
        """Return [n, l] bool: the rows that directions q [n, k] are orthogonal to."""
        return (q @ self.rows.T).abs() < self.tolerance(q)

    def orthogonal(self, zeros: Tensor) -> tuple[Tensor, Tensor]:
        """Return unit vectors [n, k] that come nearest to vanishing on rows `zeros` [n, l] bool; whether unique [n]."""
        eigen = torch.linalg.eigh((self.rows.T * zeros[:, None].to(self.rows)) @ self.rows)
        q, size = eigen.eigenvectors[:, :, 0], eigen.eigenvalues.clamp(min=0).sqrt()
        slack = self.tolerance(q).amax(1) * zeros.sum(1).clamp(min=1).sqrt()
        return q, (size[:, 0] <= slack) & (size[:, 1] > slack)

    def inputs(self, basis: Tensor) -> Tensor:
        """Return [X, 1] of the directions `basis` [k, k], as combinations [k, k] of the rows of `right`."""
        mix: Tensor = torch.linalg.inv(basis).T
        return mix / (mix @ self.right[:, -1:])


def span_of(a: Tensor, layer: PublicLayer, count: int) -> GradientSpan | None:
    """Return the spaces of a = [dW, db]; None unless a gap in its singular values shows a rank of at most `count`."""
    size = a.abs().max()
    if not 0 < float(size) < math.inf or min(a.shape) < 2:
        return None
    u, s, vh = torch.linalg.svd(a / size, full_matrices=False)
    floor = s.clamp(min=ROUNDED * float(s[0]))
    ratios = floor[:-1] / floor[1:]
    rank = int(ratios[:count].argmax()) + 1
    rows, live = u[:, :rank], u[:, :rank].norm(dim=1)
    live_units = live > DEAD_ROW * live.max()
    if float(ratios[rank - 1]) < RANK_GAP or rank < 2 or int(live_units.sum()) < rank + MORE:
        return None
    rest = a / size - (rows * s[:rank]) @ vh[:rank]
    rounding = rest[live_units].norm(dim=1) / math.sqrt(max(1, a.shape[1] - rank)) / live[live_units]
    right = s[:rank, None] * vh[:rank] * size
    firing = right[:, :-1] @ layer.weight.T + right[:, -1:] * layer.bias
    unit = rows[live_units] / live[live_units][:, None]
    return GradientSpan(unit, live_units, rows, right, s[:rank], rounding.clamp(min=float(rounding.median())), firing)


class DirectionCandidates:
    """Candidates for the columns of Q, collected over draws."""

    def __init__(self, span: GradientSpan, layer: PublicLayer, generator: torch.Generator) -> None:
        self.span, self.layer, self.generator = span, layer, generator
        self.draws = 0
        self.directions = span.rows.new_zeros(0, span.rank)
        self.zeros = torch.zeros(0, len(span.rows), dtype=torch.bool)
        self.seen: set[bytes] = set()
        scale = span.values[:, None]
        right, dead = span.right / scale, (span.firing / scale)[:, ~span.live]
        ends = ((sign, end) for sign, end in ((-1.0, layer.low), (1.0, layer.high)) if math.isfinite(end))
        bounds = [sign * (right[:, :-1] - end * right[:, -1:]) for sign, end in ends]
        sides = torch.cat([*bounds, dead], 1).T
        self.sides = sides[torch.randperm(len(sides), generator=generator)[:SIDES]].numpy()
        self.one = right[:, -1][None]

    def more(self) -> None:
        """Draw again: at first any rows, later those that corners do not fire."""
        units = len(self.span.rows)
        if self.draws < PLAIN_DRAWS:
            odds = torch.zeros(max(1, 2**18 // units), units, dtype=torch.float64)
        else:
            odds = torch.cat([self._odds() for _ in range(CORNERS)])
        self.take(odds)

    def _odds(self) -> Tensor:
        """Return log odds [CORNER_DRAWS, l] of rows from a corner: the input with the least entry in a direction."""
        span, rank = self.span, self.span.rank
        direction = torch.randn(rank, generator=self.generator, dtype=torch.float64)
        others = independent(self.sparsest(FEW * rank))
        others = others / span.values
        chosen = torch.rand(len(others), generator=self.generator) < torch.rand(1, generator=self.generator)
        one = torch.cat([self.one, others[chosen] / others[chosen].norm(dim=1, keepdim=True)])
        corner = scipy.optimize.linprog(
            direction.numpy(),
            A_ub=self.sides,
            b_ub=np.full(len(self.sides), 1e-7),
            A_eq=one.numpy(),
            b_eq=np.eye(len(one))[0],
            bounds=(None, None),
            method="highs-ds",
        ).x
        if corner is None:
            return torch.zeros(CORNER_DRAWS, len(span.rows), dtype=torch.float64)
        fires = (torch.from_numpy(corner) / span.values @ span.firing)[span.live]
        return (-SHARP * fires / fires.std()).clamp(-6, 3).expand(CORNER_DRAWS, -1)

    def sparsest(self, count: int | None = None, jitter: Tensor | float = 0.0) -> Tensor:
        """Return the candidates [n, k] with most zeros first, at most `count`; jitter: [n] added to their numbers."""
        zeros = self.zeros.sum(1).double() + jitter
        return self.directions[zeros.argsort(descending=True, stable=True)[:count]]

    def take(self, odds: Tensor) -> None:
        """Add the directions that vanish on rows drawn by log odds [n, l], and on others."""
        span, rank = self.span, self.span.rank
        self.draws += len(odds)
        draw = torch.rand(odds.shape, generator=self.generator, dtype=torch.float64).clamp(min=1e-300)
        rows = span.rows[(odds - (-draw.log()).log()).topk(rank - 1, dim=1).indices]
        last = torch.randn(len(odds), 1, rank, generator=self.generator, dtype=torch.float64)
        goal = torch.zeros(rank, 1, dtype=torch.float64)
        goal[-1] = 1.0
        q = torch.linalg.solve_ex(torch.cat([rows, last], 1), goal.expand(len(odds), -1, -1))[0][..., 0]
        self.add(q)

    def add(self, q: Tensor) -> None:
        """Add, refined, those of the directions q [n, k] that vanish on `MORE` rows beyond k - 1."""
        span, rank = self.span, self.span.rank
        q = q / q.norm(dim=1, keepdim=True)
        zeros = (q @ span.rows.T).abs() < LOOSE
        zeros = zeros[(zeros.sum(1) >= rank - 1 + MORE) & q.isfinite().all(1)]
        for _ in range(2):
            q, only = span.orthogonal(zeros)
            zeros = span.zeros(q)
        keep = only & (zeros.sum(1) >= rank - 1 + MORE)
        self._keep(q[keep], zeros[keep])

    def _keep(self, q: Tensor, zeros: Tensor) -> None:
        keys = [row.tobytes() for row in np.packbits(zeros.numpy(), axis=1)]
        new = [i for i, key in enumerate(keys) if key not in self.seen and not self.seen.add(key)]  # type: ignore[func-returns-value]
        if new:
            q, zeros = q[new], zeros[new]
            right = self.possible(zeros)
            self.directions, self.zeros = torch.cat([self.directions, q[right]]), torch.cat([self.zeros, zeros[right]])

    def possible(self, zeros: Tensor) -> Tensor:
        """Return [n] bool: which of `zeros` [n, l] may be one example's.

        Default: those where some input of the row space fires all other live units, and no dead one. By logistic
        regression with a tiny penalty, which separates all separable units.
        """
        span = self.span
        sign = torch.full((len(zeros), len(span.live) + 1), -1.0, dtype=torch.float64)
        sign[:, :-1][:, span.live] = torch.where(zeros, -1.0, 1.0).double()
        sign[:, -1] = 1.0  # the input's own last entry is 1
        points = torch.cat([span.firing, span.right[:, -1:]], 1) / span.values[:, None]
        points = (points / points.norm(dim=0).clamp(min=1e-300)).T
        at = torch.zeros(len(zeros), span.rank, dtype=torch.float64)
        ridge = 1e-6 * torch.eye(span.rank, dtype=torch.float64)
        right = torch.zeros(len(zeros), dtype=torch.bool)
        for _ in range(NEWTON):
            wrong = torch.sigmoid(-sign * (at @ points.T))
            slope = -(wrong * sign) @ points + 1e-6 * at
            curve = (points.T * (wrong * (1 - wrong))[:, None]) @ points + ridge
            at = at - torch.linalg.solve_ex(curve, slope[..., None])[0][..., 0].nan_to_num()
            right = right | (sign * (at @ points.T) > 0).all(1)
        return right

    def bases(self) -> list[Tensor]:
        """Return bases [k, k] of the candidates with most zeros, and of shuffled ones; none from too few."""
        count, bases = len(self.zeros), []
        for i in range(SHUFFLES if count else 0):
            jitter = i * torch.rand(count, generator=self.generator, dtype=torch.float64)
            basis = independent(self.sparsest(FEW * self.span.rank, jitter))
            if len(basis) < self.span.rank - 1:
                break
            bases.append(basis if len(basis) == self.span.rank else completed(basis))
        return bases


def independent(q: Tensor) -> Tensor:
    """Return the rows of q [n, k], in order, that are independent of the rows before."""
    span, kept = q.new_zeros(0, q.shape[1]), []
    for i in range(len(q)):
        rest = q[i] - (q[i] @ span.T) @ span
        rest = rest - (rest @ span.T) @ span
        if float(rest.norm()) > INDEPENDENT:
            kept.append(i)
            span = torch.cat([span, (rest / rest.norm())[None]])
        if len(kept) == q.shape[1]:
            break
    return q[kept]


def completed(basis: Tensor) -> Tensor:
    """Return k - 1 directions and one orthogonal to them, so that the last input depends on the k - 1 alone."""
    return torch.cat([basis, torch.linalg.svd(basis).Vh[-1:]])
