"""What attacks that descend along a gradient share: `ig`, `gradinversion`, `likelihood`, and those through a generator.

Victims whose evidence is of one kind are searched together, every one from several starts: a row each. The space that
is searched (pixels, a generator's latent, a feature map) is a small part of its own, so that one loop serves all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, get_args

import torch
from torch import Tensor

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.adversary.evidence import Evidence
from ppbench.adversary.view import View
from ppbench.attacks.reconstruction.descend import Evaluate, Found, Schedule, Value, descend
from ppbench.attacks.reconstruction.matching import LOGIT, Starts, groups
from ppbench.attacks.reconstruction.objectives import Objective, objective
from ppbench.attacks.reconstruction.priors import Penalty, Sum, TotalVariation
from ppbench.attacks.reconstruction.starts import Label, Start, Victim, batches, draw
from ppbench.errors import UsageError
from ppbench.federation.plan import Plan

MARKS = 8
"""Points of a guess's budget curve, at most."""

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
    """

    matching: Objective
    unit: Tensor
    starts: Starts
    tries: int
    penalty: Penalty | None

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
        return space.images(z[:, : space.size], torch.arange(len(z)))[0].detach()

    def labels(self, space: Space, z: Tensor) -> Tensor:
        """Return the labels [S, N] int64 of whole rows z, one for each start."""
        return self.unpacked(z[:, space.size :], torch.arange(len(z)))[0].argmax(-1)


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
        best = score.view(-1, problem.tries).argmin(1) + torch.arange(0, len(score), problem.tries)
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


def marks(steps: int, count: int = MARKS) -> list[int]:
    """Return at most `count` numbers of evaluations up to `steps`, about evenly spaced on a logarithmic scale."""
    return sorted({max(1, round(steps ** (i / count))) for i in range(1, count + 1)})


@dataclass(frozen=True)
class Inversion(Attack):
    """Base of attacks that follow a gradient of the images for a fixed number of steps.

    Attributes:
        start: first images: "grey", "normal" or "pattern", see `Victim.image`.
        label: "inferred" from the head's gradient before the search where that is possible, or "joint": unknown
            logits. Labels that a challenge grants are used in either case.
        budget: gradient evaluations a victim, all starts together.
        tries: starts a victim; they share the budget, and the best by its own mismatch counts.
        lr: learning rate, in units of the data's range.
        tv: weight of the total variation, mean |dx| + |dy| over pixels in units of the data's range.
        slots: rows that are evaluated together, at most, but all of a victim's.
    """

    kind: ClassVar[Kind] = "reconstruction"
    threats: ClassVar[tuple[str, ...]] = ("server/1", "eavesdropper/1", "client/1", "collusion/1")

    start: Start = "grey"
    label: Label = "inferred"
    budget: int = 300
    tries: int = 1
    lr: float = 0.1
    tv: float = 1e-4
    slots: int = 32

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess a challenge; each victim has a generator of its own, whatever runs beside it.

        A victim without evidence, or with an observation that is zero or not finite, gets its start image and
        confidence None. Raises UsageError for an option that does not exist.
        """
        self.check()
        seeds = torch.randint(2**62, (len(challenges),), generator=generator).tolist()
        evidence = {frozenset(e.unit): e for e in reversed(self.evidence(view))}
        victims = [
            Victim(evidence.get(frozenset(c.unit)), c, view.plan, torch.Generator().manual_seed(seed))
            for c, seed in zip(challenges, seeds, strict=True)
        ]
        guesses: dict[int, Guess] = {}
        for rows in blocks(victims, self.slots // self.tries):
            guesses |= dict(zip(rows, self.attack([victims[i] for i in rows]), strict=True))
        return [guesses.get(i) or victim.failure(self.start) for i, victim in enumerate(victims)]

    def suits(self, plan: Plan) -> bool:
        """Return whether targets are classes or numbers, which are searched alike; masks are not."""
        return not plan.net.pixelwise

    def attack(self, victims: Sequence[Victim]) -> list[Guess]:
        """Return the guesses for victims that `blocks` put together: their evidence has one simulation."""
        problem, space = self.problem(victims, [known(v) for v in victims], self.share), pixels(victims[0])
        schedule = self.schedule(self.budget // problem.tries, victims[0].plan)
        z = problem.rows(problem.starts.x.flatten(1))
        return rebuilt(problem, space, problem.search(space, z, schedule, marks(schedule.steps))).guesses()

    @property
    def share(self) -> int:
        """Starts a victim, no more than evaluations."""
        return min(self.tries, self.budget)

    def problem(self, victims: Sequence[Victim], evidences: Sequence[Evidence], tries: int) -> Problem:
        """Return what `tries` rows a victim have to explain, from fresh starts.

        Args:
            victims: V victims that `blocks` put together.
            evidences: theirs, as it is to be matched.
            tries: rows a victim.
        """
        plan, drawn = victims[0].plan, [draw(victims, self.start, self.label, torch.float32) for _ in range(tries)]
        joint = any(starts.joint for starts in drawn)
        x, y = (torch.stack(parts, 1).flatten(0, 1) for parts in ([s.x for s in drawn], [s.y for s in drawn]))
        size = sum(math.prod(shape) for shape in evidences[0].nuisance.values())
        starts = Starts(x, y, joint, x.new_zeros(len(x), size))
        matching = objective([self.matched(e) for e in evidences], plan, x.shape[1], torch.float32)
        return Problem(matching, self.unit(evidences), starts, tries, self.penalty(plan))

    def matched(self, evidence: Evidence) -> Evidence:
        """Return `evidence` with the measure that this attack compares by. Default: as it is."""
        return evidence

    def unit(self, evidences: Sequence[Evidence]) -> Tensor:
        """Return what each D is divided by [V] float32. Default: the discrepancy of an all-zero simulation."""
        return torch.stack([self.matched(e).scale() for e in evidences]).float()

    def penalty(self, plan: Plan) -> Penalty | None:
        """Return the prior on images, or None."""
        low, high = plan.data_range
        return Sum([TotalVariation(self.tv / (high - low))]) if self.tv else None

    def schedule(self, steps: int, plan: Plan) -> Schedule:
        """Return how far to step in `steps` evaluations a row."""
        low, high = plan.data_range
        return Schedule(steps, self.lr * (high - low))

    def check(self) -> None:
        """Raise UsageError for an option that does not exist or a number out of range."""
        for field, allowed in (("start", Start), ("label", Label)):
            if getattr(self, field) not in get_args(allowed):
                right = " or ".join(map(repr, get_args(allowed)))
                raise UsageError(f"Attack {self.name!r}: {field}={getattr(self, field)!r} is unknown; use {right}.")
        for field in ("budget", "tries", "slots"):
            if getattr(self, field) < 1:
                raise UsageError(f"Attack {self.name!r}: {field}={getattr(self, field)} is too small; use 1 or more.")
        if not 0 < self.lr < math.inf:
            raise UsageError(f"Attack {self.name!r}: lr={self.lr} cannot be used; it must be a finite number above 0.")
        if not 0 <= self.tv < math.inf:
            raise UsageError(f"Attack {self.name!r}: tv={self.tv} cannot be used; it must be a finite number >= 0.")


def known(victim: Victim) -> Evidence:
    """Return the victim's evidence; `blocks` holds no victims without it."""
    assert victim.evidence is not None
    return victim.evidence


def pixels(victim: Victim) -> Pixels:
    """Return the space of images of the victim's size, in its data's range."""
    return Pixels(victim.size, *victim.plan.data_range)


def blocks(victims: Sequence[Victim], size: int) -> list[list[int]]:
    """Return indices of the victims with usable evidence, at most `size` (1 at least) that can be searched at once."""
    found = []
    for rows in batches(victims):
        for alike in groups([known(victims[i]) for i in rows]):
            places = [rows[i] for i in alike]
            found += [places[i : i + max(1, size)] for i in range(0, len(places), max(1, size))]
    return found
