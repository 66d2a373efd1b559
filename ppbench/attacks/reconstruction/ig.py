"""Inverting gradients (Geiping, Bauermeister, Droege and Moeller, NeurIPS 2020).

Minimize 1 - cos(grad loss(net(x), y), g*) over all parameters + tv * TV(x) by Adam on signs with a decaying step, with
x in the data's range and y recovered beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ppbench.adversary.attack import Attack, Guess
from ppbench.attacks.reconstruction.inversion import Inversion, SearchHistory, descent_of, evidence_of
from ppbench.attacks.reconstruction.search.descent import DescentSchedule
from ppbench.attacks.reconstruction.search.starts import Victim
from ppbench.federation.bounds import NonNegative, Positive
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan

TV_FACTORS = (0.3, 3.0)
"""Factors on the weight of the total variation for tuning."""


@dataclass(frozen=True)
class IG(Inversion):
    """Inverting gradients: cosine of the gradients, total variation, Adam on signs, a box.

    tv: weight of the total variation: 1 pulls a start image as hard as the observation does, see `Problem.balanced`,
        and so suits digits and photographs, smooth networks and others.
    soft: whether signs are softened, see `DescentSchedule`, as in the authors' later code (breaching), with its rate.
        The paper's setting is soft=false, fading=false, tv=1e-4.
    """

    name: ClassVar[str] = "ig"
    version: ClassVar[str] = "3"
    reference: ClassVar[str] = "Geiping et al., Inverting Gradients, NeurIPS 2020"

    lr: Positive = 0.1
    tv: NonNegative = 1.0
    fading: bool = True
    soft: bool = True

    def attack(self, victims: Sequence[Victim]) -> list[Guess]:
        """Return the guesses for victims from one of `blocks`; weighting the prior costs one of the evaluations."""
        problem, steps, spent = self.problem(victims, [evidence_of(v) for v in victims], self.share), self.budget, 0
        if self.fading and self.tv and steps > problem.tries:
            problem, spent = problem.balanced(self.tv), problem.tries
        schedule = self.schedule((steps - spent) // problem.tries, victims[0].plan)
        return SearchHistory(problem.tries, spent).add(problem, descent_of(problem, problem.start, schedule)).guesses()

    def matched(self, evidence: Evidence) -> Evidence:
        """Return `evidence` compared by the cosine; signs alone stay compared as signs."""
        return evidence if evidence.measure == "hinge" else replace(evidence, measure="cosine")

    def schedule(self, steps: int, plan: Plan) -> DescentSchedule:
        """Return a schedule of sign steps with cosine-decayed length."""
        return replace(super().schedule(steps, plan), by="soft" if self.soft else "sign")

    def variants(self) -> Sequence[Attack]:
        """Return this attack with several weights of the total variation, its own first."""
        return [self, *(replace(self, tv=factor * self.tv) for factor in TV_FACTORS)]
