"""Limited-memory BFGS for many independent problems at once, evaluated in one batch.

Each problem ("victim") occupies a slot until it stops; the slot is then refilled. Slots advance in lock-step, each with
its own line search: Armijo 1e-4, quadratic backtracking in [0.1, 0.5]. Directions come from the compact form (Byrd,
Nocedal and Schnabel, Math. Programming 63, 1994, Eq. 3.1). Up to rounding, victims do not affect each other's paths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

RowFunction = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
Reason = Literal["converged", "budget", "stalled", "line search", "not finite"]

ARMIJO, CURVATURE, TRIES = 1e-4, 1e-10, 20
LARGE_LOSS = 1e12
"""First loss above which a run is computed in units of it."""
CACHE, GPU_CACHE = 2**25, 2**32
"""Bytes of pairs worked on at once, on a CPU (as its cache holds) and elsewhere; fixed, for rounding depends on it."""


@dataclass(frozen=True)
class LBFGSSettings:
    """How to minimize: with `history` pairs (s, y), at most `slots` (and `CACHE` bytes of pairs) evaluated together.

    patience: evaluations within which the loss must fall by the share `progress`; 0: no limit.
    """

    history: int = 150
    slots: int = 32
    patience: int = 100
    progress: float = 1e-3

    def at_once(self, starts: Tensor) -> int:
        """Return how many of the starts [V, n] are evaluated together."""
        room = CACHE if starts.device.type == "cpu" else GPU_CACHE
        pairs = 2 * min(self.history, starts.shape[1]) * starts[:1].nbytes or 1
        return min(self.slots, len(starts), max(1, room // pairs))


@dataclass(frozen=True)
class Minima:
    """The ends of the runs. z: [V, n]; loss: [V] float64; evaluations: [V] int64; reasons: V words."""

    z: Tensor
    loss: Tensor
    evaluations: Tensor
    reasons: tuple[Reason, ...]


class Memory:
    """The pairs of S slots, scaled so that s.y = 1, and the products among them that the compact form needs.

    `inverse` [S, m, m] is the inverse of the upper triangle of S^T Y, updated a column at a time, so that no pair ever
    moves in the ring; `gram` [S, m, m] is Y^T Y; `dots` [S, 2m] are S^T g, Y^T g at the last g. `filled` [S] is the
    number of places in use in each ring. Products run over the first `used` places, the most of any slot.
    """

    def __init__(self, slots: int, history: int, like: Tensor) -> None:
        self.m = history
        self.pairs = like.new_zeros(slots, 2 * history, like.shape[1])
        self.inverse = like.new_zeros(slots, history, history, dtype=torch.float64)
        self.gram = like.new_zeros(slots, history, history, dtype=torch.float64)
        self.dots = like.new_zeros(slots, 2 * history, dtype=torch.float64)
        self.gamma = like.new_ones(slots, dtype=torch.float64)
        self.place = like.new_zeros(slots, dtype=torch.int64)
        self.filled, self.used = torch.zeros_like(self.place), 0

    def forget(self, slot: int) -> None:
        """Drop the pairs of `slot`."""
        for tensor in (self.pairs, self.inverse, self.gram, self.dots, self.place, self.filled):
            tensor[slot] = 0
        self.gamma[slot] = 1
        self.used = int(self.filled.max())

    def keep(self, slots: Tensor) -> None:
        """Keep only `slots` [S'], in this order."""
        self.pairs, self.inverse, self.gram = self.pairs[slots], self.inverse[slots], self.gram[slots]
        self.dots, self.gamma, self.place = self.dots[slots], self.gamma[slots], self.place[slots]
        self.filled = self.filled[slots]
        self.used = int(self.filled.max()) if len(slots) else 0

    def project(self, g: Tensor) -> Tensor:
        """Return (S^T g, Y^T g) [S, 2m] in float64."""
        out = g.new_zeros(len(g), 2 * self.m, dtype=torch.float64)
        for first in (0, self.m) if self.used else ():
            part = slice(first, first + self.used)
            out[:, part] = torch.bmm(g[:, None], self.pairs[:, part].transpose(1, 2))[:, 0].double()
        return out

    def add(self, rows: Tensor, s: Tensor, y: Tensor, g: Tensor, dots: Tensor) -> None:
        """Add the pairs s, y [S', n], changes of point and gradient, to the slots `rows` [S'] if they have curvature.

        g are the new gradients [S', n]; `dots` [S, 2m] the `project` of all slots, in which the new pairs' are set.
        """
        sy = (s * y).sum(1, dtype=torch.float64)
        good = sy > CURVATURE * s.norm(dim=1).double() * y.norm(dim=1).double()
        if not bool(good.all()):
            rows, s, y, g, sy = rows[good], s[good], y[good], g[good], sy[good]
        scale = sy.rsqrt()[:, None]
        j, m = self.place[rows], self.m
        products = dots - self.dots  # for all slots: selecting some would copy their matrices
        s, y = s * scale.to(s.dtype), y * scale.to(y.dtype)
        self.inverse[rows, j, :], self.inverse[rows, :, j] = 0, 0
        n, column = self.used, torch.zeros_like(products[:, :m])
        if n:
            column[:, :n] = torch.bmm(self.inverse[:, :n, :n], products[:, :n, None])[:, :, 0]
        column = column[rows]
        products = products[rows] * scale
        self.inverse[rows, :, j] = -column * scale
        self.inverse[rows, j, j] = 1
        square = (y * y).sum(1, dtype=torch.float64)
        self.gram[rows, :, j] = products[:, m:]
        self.gram[rows, j, :] = products[:, m:]
        self.gram[rows, j, j] = square
        self.gamma[rows] = 1 / square
        self.pairs[rows, j], self.pairs[rows, m + j] = s, y
        dots[rows, j], dots[rows, m + j] = (s * g).sum(1, dtype=torch.float64), (y * g).sum(1, dtype=torch.float64)
        self.place[rows] = (j + 1) % m
        self.filled[rows] = torch.maximum(self.filled[rows], j + 1)
        self.used = int(self.filled.max())

    def direction(self, g: Tensor, dots: Tensor) -> Tensor:
        """Return -H g [S, n] for gradients g [S, n] with their projections `dots` [S, 2m]."""
        n, m, gamma = self.used, self.m, self.gamma[:, None, None]
        out = self.gamma.to(g.dtype)[:, None] * g
        if n == 0:
            return -out
        p, q, inverse = dots[:, :n, None], dots[:, m : m + n, None], self.inverse[:, :n, :n]
        u = torch.bmm(inverse, p)
        a = torch.bmm(inverse.transpose(1, 2), u + gamma * (torch.bmm(self.gram[:, :n, :n], u) - q))
        for weights, first in ((a, 0), (-gamma * u, m)):
            out += torch.bmm(weights.to(g.dtype).transpose(1, 2), self.pairs[:, first : first + n])[:, 0]
        return -out


@dataclass
class SearchSlot:
    """The line search of one victim.

    loss: of the last accepted point (inf before the first); t: next trial step; slope: g.d; tries: rejected steps
    since; steepest: whether d is the negative gradient; mark: (evaluations, loss) at the last sufficient progress.
    """

    victim: int
    loss: float = float("inf")
    t: float = 0.0
    slope: float = 0.0
    tries: int = 0
    steepest: bool = True
    evaluations: int = 0
    mark: tuple[int, float] = field(default=(0, float("inf")))

    def judge(self, loss: float, finite: bool) -> bool:
        """Return whether the trial point is accepted; shorten the step if not."""
        self.evaluations += 1
        if finite and (self.loss == float("inf") or loss <= self.loss + ARMIJO * self.t * self.slope):
            self.loss, self.tries = loss, 0
            return True
        self.tries += 1
        ratio = 0.1
        if finite:
            bend = 2 * (loss - self.loss - self.t * self.slope)
            ratio = min(max(-self.slope * self.t / bend, 0.1), 0.5) if bend > 0 else 0.5
        self.t *= ratio
        return False

    def verdict(self, settings: LBFGSSettings, budget: int, stop: float) -> Reason | None:
        """Return why the run ends, or None."""
        if self.loss <= stop:
            return "converged"
        if self.loss == float("inf"):
            return "not finite"
        if self.evaluations >= budget:
            return "budget"
        if settings.patience and self.evaluations - self.mark[0] >= settings.patience:
            if self.loss > (1 - settings.progress) * self.mark[1]:
                return "stalled"
            self.mark = (self.evaluations, self.loss)
        return "line search" if self.steepest and self.tries >= TRIES else None


class Run:
    """The state of one `minimize`: the queue, the slots and their points."""

    def __init__(
        self, function: RowFunction, starts: Tensor, settings: LBFGSSettings, budget: Tensor, stop: Tensor
    ) -> None:
        self.function, self.settings = function, settings
        self.budget, self.stop = budget.tolist(), stop.tolist()
        self.starts, self.queue = starts, list(range(len(starts)))
        history, count = min(settings.history, starts.shape[1]), settings.at_once(starts)
        self.slots = [SearchSlot(self.queue.pop(0)) for _ in range(count)]
        self.z = starts[:count].clone()
        self.g, self.d = torch.zeros_like(self.z), torch.zeros_like(self.z)
        self.memory = Memory(count, history, starts)
        self.index = torch.arange(count, device=starts.device)
        self.end = starts.clone()
        self.ended: dict[int, tuple[float, int, Reason]] = {}
        self.units = [1.0] * len(starts)

    def tick(self) -> None:
        """Evaluate every slot's trial point once and move on."""
        t = self.z.new_tensor([slot.t for slot in self.slots])[:, None]
        loss, gradient, *_ = self.function(torch.addcmul(self.z, t, self.d), self.index)
        loss, gradient = self.in_units(loss, gradient)
        finite = (torch.isfinite(loss) & torch.isfinite(gradient.sum(1))).tolist()
        fresh = [slot.loss == float("inf") for slot in self.slots]
        taken = [slot.judge(*pair) for slot, *pair in zip(self.slots, loss.tolist(), finite, strict=True)]
        if any(taken):
            self.advance(taken, fresh, t, gradient)
        for i, slot in enumerate(self.slots):
            if slot.tries >= TRIES and not slot.steepest:  # the line search along a quasi-Newton direction failed
                self.restart(i)
        self.replace()

    def in_units(self, loss: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return losses and gradients in units of the first loss if that is above `LARGE_LOSS`, where squares overflow.

        So large is the mismatch at the start where a trained model fits its batch: the observed gradient is nearly 0.
        """
        if any(slot.loss == float("inf") for slot in self.slots):
            for slot, first in zip(self.slots, loss.tolist(), strict=True):
                if slot.loss == float("inf") and LARGE_LOSS < first < float("inf"):
                    self.units[slot.victim] = first
        units = [self.units[slot.victim] for slot in self.slots]
        if all(unit == 1.0 for unit in units):
            return loss, gradient
        unit = loss.new_tensor(units)
        return loss / unit, gradient / unit[:, None]

    def advance(self, taken: list[bool], fresh: list[bool], t: Tensor, gradient: Tensor) -> None:
        """Move the slots that accepted, learn from their steps and choose new directions."""
        mask = torch.tensor(taken, device=self.z.device)[:, None]
        new = torch.where(mask, gradient, self.g)
        dots = self.memory.project(new)
        step = t * self.d * mask
        steps = [i for i, (a, b) in enumerate(zip(taken, fresh, strict=True)) if a and not b]
        if steps:
            learn = torch.tensor(steps, device=self.z.device)
            g = new[learn]
            self.memory.add(learn, step[learn], g - self.g[learn], g, dots)
        self.z += step
        self.memory.dots = torch.where(mask, dots, self.memory.dots)
        self.g = new
        self.d = torch.where(mask, self.memory.direction(new, self.memory.dots), self.d)
        slopes = (self.g * self.d).sum(1).tolist()
        first = self.first_steps([i for i in range(len(taken)) if taken[i] and fresh[i]])
        for i, slot in enumerate(self.slots):
            if taken[i]:
                slot.slope, slot.t, slot.steepest = slopes[i], 1.0, fresh[i]
                if fresh[i]:
                    slot.t, slot.mark = first[i], (slot.evaluations, slot.loss)
                elif not slopes[i] < 0:
                    self.restart(i)

    def first_steps(self, slots: list[int]) -> dict[int, float]:
        """Return min(1, 1 / ||g||_1), the step along the negative gradient, of each of `slots`."""
        if not slots:
            return {}
        lengths = torch.stack([self.g[i].abs().sum() for i in slots]).tolist()  # one wait for the device
        return {i: min(1.0, 1.0 / max(length, 1e-30)) for i, length in zip(slots, lengths, strict=True)}

    def restart(self, i: int) -> None:
        """Drop the pairs of slot `i` and go down the gradient."""
        self.memory.forget(i)
        self.d[i] = -self.g[i]
        slot = self.slots[i]
        slot.slope, slot.t, slot.tries, slot.steepest = -float(self.g[i] @ self.g[i]), self.first_steps([i])[i], 0, True

    def replace(self) -> None:
        """Record the runs that ended, refill their slots from the queue, drop the slots that stay empty."""
        alive = []
        for i, slot in enumerate(self.slots):
            unit = self.units[slot.victim]
            reason = slot.verdict(self.settings, self.budget[slot.victim], self.stop[slot.victim] / unit)
            if reason is None:
                alive.append(i)
                continue
            self.end[slot.victim] = self.z[i]
            self.ended[slot.victim] = (slot.loss * unit, slot.evaluations, reason)
            if self.queue:
                self.slots[i] = SearchSlot(self.queue.pop(0))
                self.index = self.index.clone()
                self.index[i] = self.slots[i].victim
                self.memory.forget(i)
                self.z[i], self.d[i], self.g[i] = self.starts[self.slots[i].victim], 0, 0
                alive.append(i)
        if len(alive) < len(self.slots):
            rows = torch.tensor(alive, dtype=torch.int64, device=self.z.device)
            self.slots = [self.slots[i] for i in alive]
            self.z, self.g, self.d, self.index = self.z[rows], self.g[rows], self.d[rows], self.index[rows]
            self.memory.keep(rows)


def minimize(
    function: RowFunction, starts: Tensor, *, budget: Tensor, stop: Tensor, settings: LBFGSSettings | None = None
) -> Minima:
    """Return the minima of V independent functions of n variables: the last accepted points, which are the best ones.

    A start whose loss or gradient is not finite is returned as it is, with loss inf.

    Args:
        function: (z [S, n], index [S] int64) -> loss [S], gradient [S, n], maybe more; row i is of victim index[i].
        starts: [V, n] start points, float32 or float64; the search runs on their device.
        budget: [V] evaluations that a victim may spend.
        stop: [V] loss at which a victim counts as converged.
        settings: of the optimizer.
    """
    with torch.no_grad():
        run = Run(function, starts.detach(), settings or LBFGSSettings(), budget, stop)
        while run.slots:
            run.tick()
    ended = [run.ended[v] for v in range(len(starts))]
    return Minima(
        run.end,
        torch.tensor([loss for loss, _, _ in ended], dtype=torch.float64),
        torch.tensor([count for _, count, _ in ended], dtype=torch.int64),
        tuple(reason for _, _, reason in ended),
    )
