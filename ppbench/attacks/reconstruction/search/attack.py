"""What all attacks share that search images by following a gradient: who is searched, together with whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.attacks.reconstruction.search.starts import Label, Start, Victim, batches, posed
from ppbench.federation.bounds import Count
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.federation.view import View


@dataclass(frozen=True)
class ImageSearch(Attack):
    """Base of attacks that search images by following a gradient.

    Attributes:
        start: first images: "grey", "normal" or "pattern", see `Victim.image`.
        label: "inferred": from the head's gradient beforehand where that is possible; "joint": unknown logits, searched
            too. Labels that a challenge grants are used in either case.
        budget: gradient evaluations a victim, all starts together.
    """

    kind: ClassVar[Kind] = "reconstruction"
    threats: ClassVar[tuple[str, ...]] = ("server/1", "eavesdropper/1", "client/1", "collusion/1")

    start: Start = "grey"
    label: Label = "inferred"
    budget: Count = 300

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess a challenge; each victim has a generator of its own, whatever runs beside it.

        A victim with no usable evidence gets its start image, without confidence. Raises UsageError as `check` does.
        """
        return self.answer(self.evidence(view), view.plan, challenges, generator)

    def answer(
        self,
        found: Sequence[Evidence],
        plan: Plan,
        challenges: Sequence[Challenge],
        generator: torch.Generator,
        attack: Callable[[Sequence[Victim]], list[Guess]] | None = None,
    ) -> list[Guess]:
        """Return the guesses of `run` from given evidence, such as other attacks make; by `attack` for ours."""
        self.check()
        victims, guesses = posed(found, plan, challenges, generator), dict[int, Guess]()
        for rows in self.blocks(victims):
            guesses |= dict(zip(rows, (attack or self.attack)([victims[i] for i in rows]), strict=True))
        return [guesses.get(i) or victim.failure(self.start) for i, victim in enumerate(victims)]

    def suits(self, plan: Plan) -> bool:
        """Return whether targets are classes or numbers, which are searched alike; masks are not."""
        return not plan.net.pixelwise

    def blocks(self, victims: Sequence[Victim]) -> list[list[int]]:
        """Return indices of the victims with usable evidence, by who is searched together."""
        return batches(victims)

    def attack(self, victims: Sequence[Victim]) -> list[Guess]:
        """Return the guesses for victims that `blocks` put together."""
        raise NotImplementedError
