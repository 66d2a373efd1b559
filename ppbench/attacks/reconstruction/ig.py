"""Inverting gradients (Geiping, Bauermeister, Droege and Moeller, NeurIPS 2020).

Minimize 1 - cos(grad loss(net(x), y), g*) over all parameters + tv * TV(x) by Adam on signs with a decaying step, with
x in the data's range and y recovered beforehand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Final, Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Attack, Guess
from ppbench.attacks.reconstruction.dlg import match_gradients
from ppbench.attacks.reconstruction.search.descent import (
    Descent,
    DescentSchedule,
    Inversion,
    SearchHistory,
    ValueFunction,
    descend,
    descent_of,
    evidence_of,
)
from ppbench.attacks.reconstruction.search.problem import Problem, objective
from ppbench.attacks.reconstruction.search.starts import PosedVictim, Start, Starts
from ppbench.base.errors import UsageError
from ppbench.federation.bounds import NonNegative, NonNegativeInt, Positive, between, whole_number
from ppbench.federation.evidence import Evidence, JointEvidence, Measure
from ppbench.federation.plan import Plan
from ppbench.nets.channels import has_kinks

SOFT_PRIOR, SMOOTH_SIDE = 3.0, 28
"""Factor on the weight of the total variation where kinks are rounded, on images of at least so many pixels a side.
Without it 32 pixels a side lose up to 3 dB, with it 16 lose up to 4 dB and 8 more."""
NEARLY, FINISHED = 1e-4, 1e-14
"""Mismatch from which L-BFGS is tried in the end, and the squared one, relative to the observation, at which it stops.
"""
Zero = Annotated[float, between(0, 0, "0")]
NoEvaluations = Annotated[int, whole_number(0, 0)]
"""The `soften` and `finish` of attacks that are related to `ig` but were not measured with rounded kinks."""
TV_FACTORS = (0.3, 3.0)
"""Factors on the weight of the total variation for tuning."""


@dataclass(frozen=True)
class IG(Inversion):
    """Inverting gradients: cosine of the gradients, total variation, Adam on signs, a box; rounded kinks.

    tv: weight of the total variation: 1 pulls a start image as hard as the observation does, see `Problem.balanced`,
        and so suits digits and photographs. Where kinks are rounded, it pulls `SOFT_PRIOR` times as hard on images of
        at least `SMOOTH_SIDE` pixels a side.
    soft: whether signs are softened, see `DescentSchedule`, as in the authors' later code (breaching), with its rate.
        The paper's setting is soft=false, fading=false, tv=1e-4, soften=0.
    soften: width by which ReLUs of convolutional networks are rounded at first, see `soft_kinks`; 0: not at all.
    finish: evaluations of the budget that L-BFGS gets in the end where kinks were rounded, see `finished`. At equal
        budgets it gives more exact digits of 8 x 8 pixels, and nothing on photographs.
    """

    name: ClassVar[str] = "ig"
    next_token: ClassVar[bool] = True
    version: ClassVar[str] = "4"
    reference: ClassVar[str] = "Geiping et al., Inverting Gradients, NeurIPS 2020"

    lr: Positive = 0.1
    tv: NonNegative = 1.0
    fading: bool = True
    soft: bool = True
    soften: NonNegative = 0.1
    finish: NonNegativeInt = 0

    def attack(self, victims: Sequence[PosedVictim]) -> list[Guess]:
        """Return the guesses for victims from one of `blocks`; weighting the prior costs one of the evaluations."""
        problem, steps, spent = self.problem(victims, [evidence_of(v) for v in victims], self.share), self.budget, 0
        plan = victims[0].plan
        if self.fading and self.tv and steps > problem.tries:
            problem, spent = problem.balanced(self.pull(plan)), problem.tries
        last = min(self.finish, steps - spent - problem.tries) // problem.tries if self.width(plan) else 0
        schedule = self.schedule((steps - spent) // problem.tries - max(0, last), plan)
        descent = descent_of(problem, problem.start, schedule, self.evaluated(problem, victims))
        descent = self.finished(problem, victims, descent, last)
        return SearchHistory(problem.tries, spent).add(problem, descent).guesses()

    def finished(self, problem: Problem, victims: Sequence[PosedVictim], descent: Descent, budget: int) -> Descent:
        """Return `descent` with nearly explained rows continued by L-BFGS in float64, in `budget` evaluations each.

        Where rounded kinks ended in the right pattern of active units, the mismatch is smooth around the images, which
        are then computed to rounding. The prior of images plays no part.
        """
        evidences = [evidence_of(victims[row // problem.tries]) for row in range(len(descent.z))]
        near = [i for i, score in enumerate(descent.score.tolist()) if score < NEARLY and is_exact(evidences[i])]
        if not near or budget < 1:
            return descent
        starts = problem.at(descent.z).at(near).to(torch.float64)
        budgets, stop = torch.full((len(near),), budget), torch.full((len(near),), FINISHED, dtype=torch.float64)
        ends = match_gradients([evidences[i] for i in near], starts, victims[0].plan, budget=budgets, stop=stop)
        rows = torch.tensor(near, device=descent.z.device)
        z, score, evaluations = descent.z.clone(), descent.score.clone(), descent.evaluations.clone()
        z[rows] = ends.ends.rows(ends.ends.x.flatten(1)).to(z)
        score[rows] = torch.minimum(score[rows], ends.mismatch.to(score))
        evaluations[rows] += ends.evaluations.to(rows.device)
        return replace(descent, z=z, score=score, evaluations=evaluations)

    def width(self, plan: Plan) -> float:
        """Return the width by which kinks are rounded at first; 0 where there are none, or all is compiled."""
        return self.soften if self.soften and not self.compile and has_kinks(plan.net) else 0.0

    def pull(self, plan: Plan) -> float:
        """Return how hard the total variation pulls a start image, relative to the observation."""
        smooth = min(plan.spec.shape[-2:]) >= SMOOTH_SIDE
        return self.tv * (SOFT_PRIOR if smooth and self.width(plan) else 1.0)

    def evaluated(self, problem: Problem, victims: Sequence[PosedVictim]) -> ValueFunction:
        """Return what is minimized of the `problem` of `victims`. Default: the problem."""
        return problem

    def matched(self, evidence: Evidence) -> Evidence:
        """Return `evidence` compared by the cosine; signs alone stay compared as signs."""
        return evidence if evidence.measure == "hinge" else replace(evidence, measure="cosine")

    def schedule(self, steps: int, plan: Plan) -> DescentSchedule:
        """Return a schedule of sign steps with cosine-decayed length."""
        by: Literal["soft", "sign"] = "soft" if self.soft else "sign"
        return replace(super().schedule(steps, plan), by=by, soften=self.width(plan))

    def variants(self) -> Sequence[Attack]:
        """Return this attack with several weights of the total variation, its own first."""
        return [self, *(replace(self, tv=factor * self.tv) for factor in TV_FACTORS)]


# -- Inverting gradients of which an unknown part was masked in an unknown way: several hypotheses are tried --
# Soteria zeroes columns of one layer's gradient, other defenses drown layers in noise, scale each tensor, send signs
# or spoil some entries; the rest still determines the image (Balunovic et al. 2022 ignore the defended layer). Which
# layers remain need not be tried: a geometric mean over tensors is dominated by those that can be explained. What
# was done to entries is tried: a few hypotheses are searched for a while, and for each victim the search continues
# under the one whose image explains most of the observation (`unexplained`), without the truth.

MEASURES: Final[tuple[Measure, ...]] = ("tensors", "poisoned", "bounded")
"""The hypotheses: tensors have unknown scales; some tensors are poisoned; some entries are, or only signs are known."""
SCOUT = 0.5
"""Share of the budget for trying hypotheses."""
FEWEST_STEPS = 8
"""Fewest steps per hypothesis for a trial; with fewer, the first one is taken."""
FLOORS = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
"""Successive values of 1 - cosine at which a tensor counts as explained: high ones guide, low ones finish."""
BETTER_FIT = 0.95
"""Another hypothesis replaces the first if it leaves less than this share of the first's mismatch unexplained."""


@dataclass(frozen=True)
class IGMasked(IG):
    """Inverting gradients tensor by tensor: of unknown scale, with poisoned tensors or entries, or signs alone.

    Labels of single images are tried too, instead of read off the head. Beside an attack that knows the defense it
    changed no count of images above 20 dB in any of 14 settings of the default evaluation, at a fifth of its time.
    """

    name: ClassVar[str] = "ig_masked"
    next_token: ClassVar[bool] = False
    version: ClassVar[str] = "1"
    quick: ClassVar[Literal["unaware"]] = "unaware"
    reference: ClassVar[str] = (
        "Geiping et al., Inverting Gradients, NeurIPS 2020; Balunovic et al., Bayesian Framework for Gradient Leakage, "
        "ICLR 2022 (leaving the defended layer out)"
    )

    lr: Positive = 0.05
    tv: NonNegative = 0.1
    soften: Zero = 0.0
    finish: NoEvaluations = 0

    def variants(self) -> Sequence[Attack]:
        """Return this attack alone: hypotheses are chosen per victim, and the prior fades by itself."""
        return (self,)

    def check(self) -> None:
        """Refuse parameters out of range, and several starts (UsageError)."""
        super().check()
        if self.tries != 1:
            raise UsageError(f"Attack {self.name!r}: tries={self.tries} cannot be used; hypotheses are its starts: 1.")

    def matched(self, evidence: Evidence) -> Evidence:
        """Return `evidence` as it is: each hypothesis has its own measure."""
        return evidence

    def attack(self, victims: Sequence[PosedVictim]) -> list[Guess]:
        """Return the guesses for victims of one block, each under the hypothesis that explains it best."""
        evidences, labels, spent = [evidence_of(v) for v in victims], None, 0
        if self.budget > victims[0].plan.spec.classes:
            labels, spent = tried_labels(victims, evidences, self.start)
        left = self.budget - spent
        choices = [*zip(*map(hypotheses, evidences), strict=True)]
        steps = int(SCOUT * left) // len(choices) - 1
        scouts = [self.scouted(victims, choice, labels, steps) for choice in choices if steps >= FEWEST_STEPS]
        left -= len(scouts) * (steps + 1)
        best = chosen_hypotheses(evidences, scouts, victims[0].plan)
        answers: dict[int, Guess] = {}
        for b in sorted(set(best)):
            rows = [i for i, own in enumerate(best) if own == b]
            group, their_labels = [victims[i] for i in rows], None if labels is None else labels[rows]
            hypothesis = [choices[b][i] for i in rows]
            problem = self.weighed(group, hypothesis, their_labels)
            z = scouts[b].z[rows] if scouts else problem.start
            schedule = self.schedule(left - 1, group[0].plan)
            evaluate = self.lowered(problem, group[0].plan, hypothesis, schedule.steps)
            descent = descent_of(problem, z, schedule, evaluate)
            guesses = SearchHistory(1, self.budget - left + 1).add(problem, descent).guesses()
            for i, guess in zip(rows, guesses, strict=True):
                others = tuple(scout.ends.x[i] for turn, scout in enumerate(scouts) if turn != b)
                answers[i] = replace(guess, others=others)
        return [answers[i] for i in range(len(victims))]

    def weighed(self, victims: Sequence[PosedVictim], evidences: Sequence[Evidence], labels: Tensor | None) -> Problem:
        """Return the problem of fresh rows under one hypothesis, with a balanced prior; costs one evaluation each."""
        return self.problem(victims, evidences, 1, labels).balanced(self.tv)

    def lowered(self, problem: Problem, plan: Plan, evidences: Sequence[Evidence], steps: int) -> ValueFunction:
        """Return `problem` with falling `FLOORS` over `steps` evaluations."""
        batch, count = problem.starts.x.shape[1], itertools.count()
        lower = [self.matching(plan, [replace(e, floor=floor) for e in evidences], batch) for floor in FLOORS[1:]]
        stages = [problem, *(replace(problem, matching=matching) for matching in lower)]
        return lambda z, index: stages[min(next(count) * len(stages) // steps, len(stages) - 1)](z, index)

    def scouted(
        self, victims: Sequence[PosedVictim], evidences: Sequence[Evidence], labels: Tensor | None, steps: int
    ) -> Scout:
        """Return the end of a search of `steps` evaluations under one hypothesis."""
        problem = self.weighed(victims, evidences, labels)
        z = descend(problem, problem.start, self.schedule(steps, victims[0].plan), project=problem.project).z
        return Scout(z, problem.at(z))


@dataclass(frozen=True)
class Scout:
    """The end of the search under one hypothesis: rows z [V, n], and the guesses that they encode."""

    z: Tensor
    ends: Starts


def chosen_hypotheses(evidences: Sequence[Evidence], scouts: Sequence[Scout], plan: Plan) -> list[int]:
    """Return the hypothesis for each victim: the first, unless another one explains its observation better."""
    if not scouts:
        return [0] * len(evidences)
    scores = torch.stack([unexplained(evidences, scout.ends, plan) for scout in scouts])
    return torch.where(scores.amin(0) < BETTER_FIT * scores[0], scores.argmin(0), 0).tolist()


def unexplained(evidences: Sequence[Evidence], guess: Starts, plan: Plan) -> Tensor:
    """Return how much of V victims' evidence a guess of each leaves unexplained [V], independent of what was masked.

    The measure "bounded" without entries that are exactly 0, which may be hidden. From its floor to 2; inf if not
    finite.
    """
    fair = [replace(under(evidence, zeros=False), measure="bounded") for evidence in evidences]
    batch, index = guess.x.shape[1], torch.arange(len(guess.x), device=guess.x.device)
    value = objective(fair, plan, batch, guess.x.dtype)(guess.x, guess.labels, guess.extra, index)[0]
    return torch.where(value.isfinite(), value, math.inf).cpu()


def tried_labels(
    victims: Sequence[PosedVictim], evidences: Sequence[Evidence], start: Start
) -> tuple[Tensor | None, int]:
    """Return the labels [V, 1, C] that explain best, or None, and evaluations spent.

    None for granted labels, batches, a single output or nuisance unknowns.
    """
    plan = victims[0].plan
    classes = plan.spec.classes
    if any(v.size[0] > 1 or v.challenge.y is not None for v in victims) or classes == 1 or evidences[0].nuisance:
        return None, 0
    every = one_hot(torch.arange(classes), classes).float()
    x = torch.stack([victim.image(start).to(evidences[0].device) for victim in victims])
    guesses = [Starts(x, y.to(x).expand(len(x), 1, classes), False, x.new_zeros(len(x), 0)) for y in every]
    scores = torch.stack([unexplained(evidences, guess, plan) for guess in guesses])
    return every[scores.argmin(0)][:, None], classes


def is_exact(evidence: Evidence) -> bool:
    """Return whether what is seen of the gradient has no noise, no unknown scale and no unknown draw."""
    weights = {} if evidence.weight is None else evidence.weight
    seen = all(bool(((weight == 0) | (weight == 1)).all()) for weight in weights.values())
    plain = evidence.noise is None and not evidence.nuisance and not isinstance(evidence, JointEvidence)
    return plain and seen and evidence.measure == "squares"


def under(evidence: Evidence, zeros: bool) -> Evidence:
    """Return `evidence`, without entries that are exactly 0 unless `zeros`."""
    if zeros or not any(bool((value == 0).any()) for value in evidence.observed.values()):
        return evidence
    ones = {n: torch.ones_like(v) for n, v in evidence.observed.items()} if evidence.weight is None else evidence.weight
    return replace(evidence, weight={n: ones[n] * (v != 0) for n, v in evidence.observed.items()})


def hypotheses(evidence: Evidence) -> list[Evidence]:
    """Return the evidence under each hypothesis, see `MEASURES`; evidence of signs is returned as it is.

    Hidden entries may be sent as zeros, so these are ignored except under the first hypothesis.
    """
    if evidence.measure == "hinge":
        return [evidence]
    return [replace(under(evidence, measure == MEASURES[0]), measure=measure) for measure in MEASURES]
