"""Inverting gradients of which a part was masked: which part, and how, is a hypothesis that is tried, not known.

Soteria zeroes columns of one layer's gradient, other defenses drown layers in noise, scale each tensor, send signs or
spoil some entries; what is left still gives the image (Balunovic et al. 2022 leave the defended layer out). Which
layers are left need not be tried one by one: a geometric mean over tensors goes by those that can be explained. What is
done to entries is tried: a few hypotheses are searched for a while, and for each victim the one whose image explains
most of what was observed (`unexplained`) is searched on, without any truth.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Attack, Guess
from ppbench.attacks.reconstruction.ig import IG
from ppbench.attacks.reconstruction.inversion import Story, descended, known
from ppbench.attacks.reconstruction.search.descent import Evaluate, descend
from ppbench.attacks.reconstruction.search.problem import Problem, objective
from ppbench.attacks.reconstruction.search.starts import Start, Starts, Victim
from ppbench.base.errors import UsageError
from ppbench.federation.bounds import NonNegative, Positive
from ppbench.federation.evidence import Evidence, Measure
from ppbench.federation.plan import Plan

MEASURES: Final[tuple[Measure, ...]] = ("tensors", "poisoned", "bounded")
"""What is tried: that tensors are of unknown scales, that some are poisoned, that entries are, or signs alone known."""
SCOUT = 0.5
"""Share of the budget for trying hypotheses."""
FEWEST = 8
"""Steps without which trying a hypothesis says nothing; with less, the first one alone is tried."""
FLOORS = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
"""At which 1 - cosine a tensor counts as explained, in turn: high to find the way, low not to stop short of the end."""
MARGIN = 0.95
"""What is left unexplained under another hypothesis than the first, beside it, for that one to be taken."""


@dataclass(frozen=True)
class IGMasked(IG):
    """Inverting gradients tensor by tensor: of unknown scale, some poisoned, or some entries of them, or signs alone.

    Labels of single images are tried out too, instead of read off the head.
    """

    name: ClassVar[str] = "ig_masked"
    version: ClassVar[str] = "1"
    reference: ClassVar[str] = (
        "Geiping et al., Inverting Gradients, NeurIPS 2020; Balunovic et al., Bayesian Framework for Gradient Leakage, "
        "ICLR 2022 (leaving the defended layer out)"
    )

    lr: Positive = 0.05
    tv: NonNegative = 0.1

    def variants(self) -> Sequence[Attack]:
        """Return this one alone: hypotheses are chosen victim by victim, and the prior fades by itself."""
        return (self,)

    def check(self) -> None:
        """Refuse parameters out of range, and several starts (UsageError)."""
        super().check()
        if self.tries != 1:
            raise UsageError(f"Attack {self.name!r}: tries={self.tries} cannot be used; hypotheses are its starts: 1.")

    def matched(self, evidence: Evidence) -> Evidence:
        """Return `evidence` as it is: each hypothesis has a measure of its own."""
        return evidence

    def attack(self, victims: Sequence[Victim]) -> list[Guess]:
        """Return the guesses for victims of one block, each under the hypothesis that explains it best."""
        evidences, labels, spent = [known(v) for v in victims], None, 0
        if self.budget > victims[0].plan.spec.classes:
            labels, spent = tried_labels(victims, evidences, self.start)
        left = self.budget - spent
        choices = [*zip(*map(hypotheses, evidences), strict=True)]
        steps = int(SCOUT * left) // len(choices) - 1
        scouts = [self.scouted(victims, choice, labels, steps) for choice in choices if steps >= FEWEST]
        left -= len(scouts) * (steps + 1)
        best = chosen(evidences, scouts, victims[0].plan)
        found: dict[int, Guess] = {}
        for b in sorted(set(best)):
            rows = [i for i, own in enumerate(best) if own == b]
            some, given = [victims[i] for i in rows], None if labels is None else labels[rows]
            theirs = [choices[b][i] for i in rows]
            problem = self.weighed(some, theirs, given)
            z = scouts[b].z[rows] if scouts else problem.start
            schedule = self.schedule(left - 1, some[0].plan)
            descent = descended(problem, z, schedule, self.lowered(problem, some[0].plan, theirs, schedule.steps))
            guesses = Story(1, self.budget - left + 1).add(problem, descent).guesses()
            for i, guess in zip(rows, guesses, strict=True):
                others = tuple(scout.ends.x[i] for turn, scout in enumerate(scouts) if turn != b)
                found[i] = replace(guess, others=others)
        return [found[i] for i in range(len(victims))]

    def weighed(self, victims: Sequence[Victim], evidences: Sequence[Evidence], labels: Tensor | None) -> Problem:
        """Return what fresh rows explain under one hypothesis, the prior weighed at the start; one evaluation each."""
        return self.problem(victims, evidences, 1, labels).balanced(self.tv)

    def lowered(self, problem: Problem, plan: Plan, evidences: Sequence[Evidence], steps: int) -> Evaluate:
        """Return `problem` with floors that fall, see `FLOORS`, while it is asked `steps` times."""
        batch, count = problem.starts.x.shape[1], itertools.count()
        lower = [self.matching(plan, [replace(e, floor=floor) for e in evidences], batch) for floor in FLOORS[1:]]
        stages = [problem, *(replace(problem, matching=matching) for matching in lower)]
        return lambda z, index: stages[min(next(count) * len(stages) // steps, len(stages) - 1)](z, index)

    def scouted(
        self, victims: Sequence[Victim], evidences: Sequence[Evidence], labels: Tensor | None, steps: int
    ) -> Scout:
        """Return where `steps` evaluations under one hypothesis lead."""
        problem = self.weighed(victims, evidences, labels)
        z = descend(problem, problem.start, self.schedule(steps, victims[0].plan), project=problem.project).z
        return Scout(z, problem.at(z))


@dataclass(frozen=True)
class Scout:
    """Where the search under one hypothesis ended: rows z [V, n], and what they stand for."""

    z: Tensor
    ends: Starts


def chosen(evidences: Sequence[Evidence], scouts: Sequence[Scout], plan: Plan) -> list[int]:
    """Return which of the hypotheses each victim's observation speaks for: the first, unless one explains it better."""
    if not scouts:
        return [0] * len(evidences)
    scores = torch.stack([unexplained(evidences, scout.ends, plan) for scout in scouts])
    return torch.where(scores.amin(0) < MARGIN * scores[0], scores.argmin(0), 0).tolist()


def unexplained(evidences: Sequence[Evidence], guess: Starts, plan: Plan) -> Tensor:
    """Return what of V victims' evidence a guess at each leaves unexplained [V], whatever was masked of it.

    By "bounded", entries that are exactly 0 left out: these may be hidden. From its floor to 2; infinite if not finite.
    """
    fair = [replace(under(evidence, zeros=False), measure="bounded") for evidence in evidences]
    batch, index = guess.x.shape[1], torch.arange(len(guess.x), device=guess.x.device)
    value = objective(fair, plan, batch, guess.x.dtype)(guess.x, guess.labels, guess.extra, index)[0]
    return torch.where(value.isfinite(), value, math.inf).cpu()


def tried_labels(victims: Sequence[Victim], evidences: Sequence[Evidence], start: Start) -> tuple[Tensor | None, int]:
    """Return labels [V, 1, C] that explain best, evaluations spent; None: granted, batches, one output, nuisance."""
    plan = victims[0].plan
    classes = plan.spec.classes
    if any(v.size[0] > 1 or v.challenge.y is not None for v in victims) or classes == 1 or evidences[0].nuisance:
        return None, 0
    every = one_hot(torch.arange(classes), classes).float()
    x = torch.stack([victim.image(start).to(evidences[0].device) for victim in victims])
    guesses = [Starts(x, y.to(x).expand(len(x), 1, classes), False, x.new_zeros(len(x), 0)) for y in every]
    scores = torch.stack([unexplained(evidences, guess, plan) for guess in guesses])
    return every[scores.argmin(0)][:, None], classes


def hidden(evidences: Sequence[Evidence]) -> bool:
    """Return whether any observation has entries that are exactly 0."""
    return any(bool((value == 0).any()) for e in evidences for value in e.observed.values())


def under(evidence: Evidence, zeros: bool) -> Evidence:
    """Return `evidence` with entries that are exactly 0 only where `zeros`."""
    if zeros or not hidden([evidence]):
        return evidence
    ones = {n: torch.ones_like(v) for n, v in evidence.observed.items()} if evidence.weight is None else evidence.weight
    return replace(evidence, weight={n: ones[n] * (v != 0) for n, v in evidence.observed.items()})


def hypotheses(evidence: Evidence) -> list[Evidence]:
    """Return the evidence under each hypothesis, see `MEASURES`; signs that are said to be signs stay such.

    What hides something may do so by zeros: these are left out, but where all is as it is said to be.
    """
    if evidence.measure == "hinge":
        return [evidence]
    return [replace(under(evidence, measure == MEASURES[0]), measure=measure) for measure in MEASURES]
