"""What attacks that descend along a gradient share: `ig`, `gradinversion`, `likelihood`, and those through a generator.

Victims whose evidence is of one kind are searched together, as one `Problem` over one `Space`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, get_args

import torch
from torch import Tensor

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.attacks.reconstruction.search.descent import Descent, Evaluate, Schedule, descend
from ppbench.attacks.reconstruction.search.priors import Penalty, Sum, TotalVariation
from ppbench.attacks.reconstruction.search.problem import Pixels, Problem, objective
from ppbench.attacks.reconstruction.search.starts import Label, Start, Starts, Victim, batches, draw, groups, posed
from ppbench.base.errors import UsageError
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.federation.view import View

MARKS = 8
"""Points of a guess's budget curve, at most."""


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
        fading: whether priors are weighed relative to the mismatch: they guide the search, and vanish where the
            observation is explained. A fixed weight that helps on one network outweighs the data on another.
        slots: rows that are evaluated together, at most, but all of a victim's.
        compile: whether the objective goes through torch.compile. Measured on a LeNet, 8 victims, one thread of a busy
            machine: 107 s of warm-up, then 1.38 ms an evaluation against 1.04 ms as it is; hence off.
    """

    kind: ClassVar[Kind] = "reconstruction"
    threats: ClassVar[tuple[str, ...]] = ("server/1", "eavesdropper/1", "client/1", "collusion/1")

    start: Start = "grey"
    label: Label = "inferred"
    budget: int = 300
    tries: int = 1
    lr: float = 0.1
    tv: float = 1e-4
    fading: bool = False
    slots: int = 16
    compile: bool = False

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess a challenge; each victim has a generator of its own, whatever runs beside it.

        A victim without evidence, or with an observation that is zero or not finite, gets its start image and
        confidence None. Raises UsageError for an option that does not exist.
        """
        self.check()
        return self.searched(view, challenges, generator, self.attack)

    def searched(
        self,
        view: View,
        challenges: Sequence[Challenge],
        generator: torch.Generator,
        attack: Callable[[Sequence[Victim]], list[Guess]],
    ) -> list[Guess]:
        """Return one guess a challenge, by `attack` on victims that `blocks` put together."""
        victims = posed(self.evidence(view), view.plan, challenges, generator)
        guesses: dict[int, Guess] = {}
        for rows in blocks(victims, self.slots // self.tries):
            guesses |= dict(zip(rows, attack([victims[i] for i in rows]), strict=True))
        return [guesses.get(i) or victim.failure(self.start) for i, victim in enumerate(victims)]

    def suits(self, plan: Plan) -> bool:
        """Return whether targets are classes or numbers, which are searched alike; masks are not."""
        return not plan.net.pixelwise

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
        """Return what the pixels of `tries` rows a victim have to explain, from fresh starts.

        Args:
            victims: V victims that `blocks` put together; one that comes V times is drawn for V times.
            evidences: theirs, as it is to be matched.
            tries: rows a victim.
            labels: [V, N, C] where they are known already; None: granted, inferred or unknown, as `label` says.
        """
        plan, drawn = victims[0].plan, [draw(victims, self.start, self.label, torch.float32) for _ in range(tries)]
        if labels is not None:
            drawn = [Starts(starts.x, labels.to(starts.x), False) for starts in drawn]
        joint = any(starts.joint for starts in drawn)
        x, y = (torch.stack(parts, 1).flatten(0, 1) for parts in ([s.x for s in drawn], [s.y for s in drawn]))
        starts = Starts(x, y, joint, torch.stack([s.extra for s in drawn], 1).flatten(0, 1))
        matching = objective([self.matched(e) for e in evidences], plan, x.shape[1], torch.float32)
        matching = torch.compile(matching) if self.compile else matching
        space = Pixels(victims[0].size, *plan.data_range)
        return Problem(space, matching, self.unit(evidences), starts, tries, self.penalty(plan), self.fading)

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


def blocks(victims: Sequence[Victim], size: int) -> list[list[int]]:
    """Return indices of the victims with usable evidence, at most `size` (1 at least) that can be searched at once."""
    found = []
    for rows in batches(victims):
        for alike in groups([known(victims[i]) for i in rows]):
            places = [rows[i] for i in alike]
            found += [places[i : i + max(1, size)] for i in range(0, len(places), max(1, size))]
    return found


def descended(problem: Problem, z: Tensor, schedule: Schedule, evaluate: Evaluate | None = None) -> Descent:
    """Return where the search from whole rows z ended, with the marks of a budget curve; `evaluate` for `problem`."""
    return descend(evaluate or problem, z, schedule, project=problem.project, marks=marks(schedule.steps))


class Story:
    """What searches of V victims from `tries` starts each have found, one after another, whatever their spaces."""

    def __init__(self, tries: int) -> None:
        self.tries = tries
        self.ends: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self.path: list[tuple[int, Tensor]] = []
        self.score = self.best = torch.empty(0)

    def add(self, problem: Problem, descent: Descent) -> Story:
        """Take up how a search went."""
        spent = sum(int(evaluations.max()) for *_, evaluations in self.ends)
        for mark in descent.trail:
            self._improve(problem.at(mark.z).x, mark.score)
            self.path.append((self.tries * (spent + mark.evaluations), self._answer()))
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
            value, count = float(score[v, best]), int(spent[v].sum())
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
