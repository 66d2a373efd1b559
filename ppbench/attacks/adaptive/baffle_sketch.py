"""What BAFFLE's loss differences reveal: a linear sketch s = Z g of a victim's gradient, Z known to everybody.

A loss difference along a public direction z_k is, up to O(sigma^2), sigma times a multiple of z_k . g. K of them are as
good as the gradient if K exceeds the number of pixels. Every round with the same batch gives K more. Masks leave the
sketch of the cohort's mean gradient, and of one client's where the others collude.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from ppbench.base.tree import Params
from ppbench.defenses.baffle.estimator import chunks, step_seeds
from ppbench.defenses.baffle.messages import answers_by_slot
from ppbench.defenses.baffle.protocol import Baffle
from ppbench.federation.cohort import cohorts
from ppbench.federation.evidence import Evidence, Mappable, Shared, Simulate
from ppbench.federation.optim import Layout
from ppbench.federation.view import Exchange, View
from ppbench.federation.wire import Slot

STACK = 256  # directions handled at a time
KEPT_NUMBERS = 200_000_000  # entries of all Z together that are kept; the others are drawn again at each use
SPAN_TOLERANCE = 1e-3  # relative distance from the span of the directions up to which an update is a sum of estimates


class DirectionMap:
    """The map Z [K, n] float32 of a seed, differentiable once; kept up to `room` entries (None: `KEPT_NUMBERS`)."""

    def __init__(self, seed: int, entries: int, count: int, room: int | None = None) -> None:
        self.seed, self.entries, self.count = seed, entries, count
        self.kept = list(self._drawn()) if entries * count <= (KEPT_NUMBERS if room is None else room) else None

    def _drawn(self) -> Iterator[Tensor]:
        return chunks(self.seed, self.entries, self.count, STACK)

    def stacks(self, like: Tensor) -> Iterator[Tensor]:
        """Yield the rows of Z, at most STACK at a time, with the dtype and device of `like`."""
        if self.kept is not None:
            self.kept = [stack.to(like.device) for stack in self.kept]
        for stack in self._drawn() if self.kept is None else self.kept:
            yield stack.to(like)

    def __call__(self, g: Tensor) -> Tensor:
        """Return Z g [K] of a gradient g [n], or Z G [K, m] of columns [n, m]; where Z is kept, under vmap too."""
        if self.kept is not None:
            # for a vector by `linear`, which under vmap is one product; `@` is one for each victim
            return torch.cat([linear(g, stack) if g.dim() == 1 else stack @ g for stack in self.stacks(g)])
        product: Tensor = _Product.apply(g, self)  # type: ignore[no-untyped-call]
        return product

    def transposed(self, s: Tensor) -> Tensor:
        """Return Z^T s [n] of s [K], or of columns."""
        total, done = s.new_zeros(self.entries, *s.shape[1:]), 0
        for stack in self.stacks(s):
            total += stack.T @ s[done : done + len(stack)]
            done += len(stack)
        return total


class _Product(torch.autograd.Function):
    """Z g, whose derivative needs Z alone: rows drawn on the fly are not kept for it."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, z: DirectionMap) -> Tensor:
        """Return Z g."""
        ctx.z = z
        return torch.cat([stack @ g for stack in z.stacks(g)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        """Return Z^T slope."""
        return ctx.z.transposed(slope), None


@dataclass(frozen=True)
class Equations:
    """What one round reveals, all on one device: the weights, the directions z, and s [K] float64, about Z g."""

    params: Params
    z: DirectionMap
    s: Tensor


@dataclass(frozen=True)
class Sketch:
    """All rounds' equations, oldest first, about a unit's mean gradient; shares: its slots' weights, () if equal."""

    unit: tuple[Slot, ...]
    rounds: tuple[Equations, ...]
    shares: tuple[float, ...] = ()


class DrawnDirections:
    """The directions in use, each drawn once."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int, int], DirectionMap] = {}
        self.room = KEPT_NUMBERS

    def at(self, seed: int, entries: int, count: int) -> DirectionMap:
        """Return the directions of `seed`."""
        key = (seed, entries, count)
        if key not in self.known:
            self.known[key] = DirectionMap(*key, self.room)
            self.room -= entries * count if self.known[key].kept is not None else 0
        return self.known[key]


def sketches(view: View) -> list[Sketch]:
    """Return a sketch of every client's gradient, or of every cohort's under masks; for updates see `_steps`."""
    defense = view.defense
    if not isinstance(defense, Baffle):
        return []
    by_slot, drawn = answers_by_slot(view), DrawnDirections()
    if defense.level == "epoch":
        return _steps(view, defense, by_slot, drawn)
    summed = defense.sums and not view.threat.colludes
    first = [sent[0] for sent in by_slot.values()]  # no sum but that of all clients is without masks
    units = cohorts(first, view.plan.clients) if summed else [[exchange] for exchange in first]
    return [_sketch(view, defense, [by_slot[e.slot] for e in unit], drawn) for unit in units]


def _sketch(view: View, defense: Baffle, sent: Sequence[Sequence[Exchange]], drawn: DrawnDirections) -> Sketch:
    unit, rounds = tuple(exchanges[0].slot for exchanges in sent), []
    for exchanges in zip(*sent, strict=False):  # by round
        params = exchanges[0].request.params
        seed, s = defense.sketch(*exchanges, view=view)
        device = next(iter(params.values())).device  # sums in a ring are on the CPU
        entries = sum(value.numel() for value in params.values())
        rounds.append(Equations(params, drawn.at(seed, entries, len(s)), s.to(device)))
    return Sketch(unit, tuple(rounds), _shares(view, sent[0][0], unit))


def _shares(view: View, exchange: Exchange, unit: tuple[Slot, ...]) -> tuple[float, ...]:
    """Return N_c / N where the server's state has it and they differ; () for a listener, which takes them for equal."""
    server = view.state_at(exchange)
    if server is None or len(unit) == 1:
        return ()
    counts = server.counts[[slot.client for slot in unit]].double()
    return () if bool((counts == counts[0]).all()) else tuple((counts / counts.sum()).tolist())


def _steps(view: View, defense: Baffle, by_slot: dict[Slot, list[Exchange]], drawn: DrawnDirections) -> list[Sketch]:
    """Return sketches of first updates that lie in the span of their steps' directions, one round per step."""
    known, local = [], view.plan.local
    steps = local.epochs if local.upload == "delta" else 1
    if steps > 1 and local.opt.momentum:  # in the span too, but steps would be weighted unequally
        return []
    for e in view.defense.evidence(view):
        if e.unit[0] not in by_slot:  # a colluder's own
            continue
        exchange = by_slot[e.unit[0]][0]
        params, layout = exchange.request.params, Layout.of(exchange.request.params)
        total = steps * layout.pack(e.observed).double()
        if steps * defense.count >= len(total) or (steps > 1 and len(e.unit) > 1) or not bool(total.isfinite().all()):
            continue
        seeds = step_seeds(int(exchange.request.seed), steps).tolist()
        maps = [drawn.at(seed, len(total), defense.count) for seed in seeds]
        slopes = coordinates(maps, total)
        estimates = [z.transposed(s) / z.count for z, s in zip(maps, slopes, strict=True)]
        if float((sum(estimates, -total)).norm()) > SPAN_TOLERANCE * float(total.norm()):
            continue
        rounds, rate, flat = [], local.opt.rate(exchange.round), layout.pack(params)
        for z, s, estimate in zip(maps, slopes, estimates, strict=True):
            rounds.append(Equations(layout.unpack(flat), z, s))
            flat = flat - rate * estimate.to(flat.dtype)
        known.append(Sketch(e.unit, tuple(rounds), _shares(view, exchange, e.unit)))
    return known


def coordinates(maps: Sequence[DirectionMap], total: Tensor) -> tuple[Tensor, ...]:
    """Return for each of T maps the s [K] float64 whose estimates Z^T s / K sum nearest to `total` [n]; T K < n."""
    total = total.double()
    rows = torch.cat([stack for z in maps for stack in z.stacks(total)])
    solution: Tensor = torch.linalg.solve(rows @ rows.T, rows @ total)
    return (maps[0].count * solution).chunk(len(maps))


def sketch_evidence(view: View, all_sketches: Sequence[Sketch]) -> list[Evidence]:
    """Return the sketches as evidence "s0", "s1", ... of the rounds; `params` None: no gradient at public weights."""
    shared, known = Shared(view.plan), dict[tuple[object, ...], Simulate]()
    evidence = []
    for sketch in all_sketches:
        gradients = [shared.at(r.params, sketch.shares) for r in sketch.rounds]
        maps = [r.z for r in sketch.rounds]
        key = tuple((id(g), id(z)) for g, z in zip(gradients, maps, strict=True))
        followed = all(isinstance(g, Mappable) for g in gradients) and all(z.kept is not None for z in maps)
        kind = MappedSketch if followed else Sketched
        simulate = known.setdefault(key, kind(sketch.rounds[0].params, tuple(gradients), tuple(maps)))
        observed = {f"s{i}": r.s for i, r in enumerate(sketch.rounds)}
        evidence.append(Evidence(sketch.unit, observed, simulate, channel="sketch"))
    return evidence


@dataclass(frozen=True, eq=False)
class Sketched:
    """The sketches that a client's computation has along the directions of T rounds.

    params: the weights of the first round. gradients: of each round, at its weights. maps: of each round.
    """

    params: Params
    gradients: tuple[Simulate, ...]
    maps: tuple[DirectionMap, ...]

    def __call__(self, x: Tensor, y: Tensor) -> Params:
        """Return the sketches s0, s1, ... [K] of a batch x [U, B, *shape], y [U, B, C], in the dtype of x."""
        parts = [gradient(x, y) for gradient in self.gradients]
        return {f"s{i}": z(Layout.of(p).pack(p)) for i, (z, p) in enumerate(zip(self.maps, parts, strict=True))}


@dataclass(frozen=True, eq=False)
class MappedSketch(Sketched, Mappable):
    """A sketch that vmap can follow, so that Z is read once for all victims that were sent the same directions."""

    def family(self) -> Hashable:
        """Return itself: victims share the very object, see `sketch_evidence`."""
        return MappedSketch, id(self)
