"""Inverting gradients where some layers are poisoned: which ones, is a hypothesis that is tried, not known.

Soteria zeroes columns of one layer's gradient, other defenses drown one layer in noise; without that layer the others
give the image (Balunovic et al. 2022). All hypotheses are searched for a while; the one under which the found image
explains most layers (`explained`), those left out too, is searched on: another one for each victim, and no truth used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Attack, Guess
from ppbench.attacks.reconstruction.ig import IG
from ppbench.attacks.reconstruction.inversion import Story, descended, known
from ppbench.attacks.reconstruction.search.descent import descend
from ppbench.attacks.reconstruction.search.problem import Problem, simulated
from ppbench.attacks.reconstruction.search.starts import Start, Victim
from ppbench.base.errors import UsageError
from ppbench.federation.bounds import Count
from ppbench.federation.evidence import Evidence

FLOOR = 1e-4
"""A layer is explained at this 1 - cosine: one that is fitted much closer does not make up for another one."""


def layer(name: str) -> str:
    """Return the layer of a parameter, e.g. "features.0" of "features.0.weight"."""
    return name.rpartition(".")[0] or name


def layers(evidence: Evidence) -> list[str]:
    """Return the layers that are observed, in order."""
    return list(dict.fromkeys(layer(name) for name in evidence.observed))


def explained(evidence: Evidence, x: Tensor, y: Tensor, extra: Tensor | None = None) -> float:
    """Return the mean over layers of log(1 - cosine) of x [N, *shape], y [N, C], extra [E]; inf if not finite."""
    with torch.no_grad():
        found = simulated(evidence, x, y, x.new_zeros(0) if extra is None else extra)
    sums = {key: torch.zeros(3, dtype=torch.float64) for key in layers(evidence)}
    for name, s in found.items():
        o, s = evidence.observed[name].detach().double().cpu(), s.detach().double().cpu()
        # entries that are exactly 0 may be hidden: they do not count
        w = (o != 0).double() * (1.0 if evidence.weight is None else evidence.weight[name].double().cpu())
        sums[layer(name)] += torch.stack([(w * s * o).sum(), (w * s * s).sum(), (w * o * o).sum()])
    logs = [math.log(_apart(*row.tolist())) for row in sums.values() if float(row[2]) > 0]
    mean = sum(logs) / len(logs) if logs else math.inf
    return mean if math.isfinite(mean) else math.inf


def _apart(product: float, s: float, o: float) -> float:
    """Return 1 - cosine, at least FLOOR; 1 where a gradient is zero, 2 (opposite) where it is not finite."""
    if not math.isfinite(product + s + o):
        return 2.0
    return max(FLOOR, 1 - product / math.sqrt(s * o)) if s * o > 0 else 1.0


def tried_labels(victims: Sequence[Victim], evidences: Sequence[Evidence], start: Start) -> tuple[Tensor | None, int]:
    """Return labels [V, 1, C] that explain best, evaluations spent; None: granted, batches, one output, nuisance."""
    classes = victims[0].plan.spec.classes
    if any(v.size[0] > 1 or v.challenge.y is not None for v in victims) or classes == 1 or evidences[0].nuisance:
        return None, 0
    found, every = [], one_hot(torch.arange(classes), classes).float()
    for victim, evidence in zip(victims, evidences, strict=True):
        x = victim.image(start).to(evidence.device)
        scores = torch.tensor([explained(evidence, x, y[None].to(x)) for y in every])
        found.append(every[scores.argmin()][None])
    return torch.stack(found), classes


def masked(evidence: Evidence, keep: Sequence[str], zeros: bool = True) -> Evidence:
    """Return `evidence` with only the layers `keep` visible, and entries that are exactly 0 only where `zeros`."""
    weight = {}
    for name, value in evidence.observed.items():
        own = torch.ones((), device=value.device) if evidence.weight is None else evidence.weight[name]
        own = own if layer(name) in keep else torch.zeros_like(own)
        weight[name] = own if zeros else own * (value != 0)
    return replace(evidence, weight=weight)


SCOUT = 0.5
"""Share of the budget for trying hypotheses."""
MARGIN = 0.3
"""By how much a hypothesis must explain better than that nothing is poisoned, in logarithms of a layer's 1 - cosine."""
FEWEST = 8
"""Steps without which trying a hypothesis says nothing; with less, the first hypotheses alone are tried."""


@dataclass(frozen=True)
class IGLayers(IG):
    """Inverting gradients with one layer left out, or only the first or last ones matched, each victim by what fits.

    At most `hypotheses` are tried. Labels of single images are tried out too, instead of read off the head.
    """

    name: ClassVar[str] = "ig_layers"
    standard: ClassVar[bool] = False
    reference: ClassVar[str] = (
        "Geiping et al., Inverting Gradients, NeurIPS 2020; Balunovic et al., Bayesian Framework for Gradient Leakage, "
        "ICLR 2022 (leaving the defended layer out)"
    )

    budget: Count = 900
    hypotheses: Count = 16

    def variants(self) -> Sequence[Attack]:
        """Return this one alone: hypotheses are chosen victim by victim, and the prior fades by itself."""
        return (self,)

    def check(self) -> None:
        """Refuse parameters out of range, and several starts (UsageError)."""
        super().check()
        if self.tries != 1:
            raise UsageError(f"Attack {self.name!r}: tries={self.tries} cannot be used; hypotheses are its starts: 1.")

    def attack(self, victims: Sequence[Victim]) -> list[Guess]:
        """Return the guesses for victims of one block; entries of exactly 0 are one hypothesis more: those go apart."""
        zeros = [hidden([known(v)]) for v in victims]
        found: dict[int, Guess] = {}
        for kind in sorted(set(zeros)):
            rows = [i for i, own in enumerate(zeros) if own == kind]
            found |= dict(zip(rows, self.tried([victims[i] for i in rows]), strict=True))
        return [found[i] for i in range(len(victims))]

    def tried(self, victims: Sequence[Victim]) -> list[Guess]:
        """Return the guesses for victims with as many hypotheses: labels, hypotheses, then the best one further."""
        evidences, labels, spent = [known(v) for v in victims], None, 0
        if self.budget > victims[0].plan.spec.classes:
            labels, spent = tried_labels(victims, evidences, self.start)
        left = self.budget - spent
        choices = [hypotheses(e, self.hypotheses, hidden(evidences)) for e in evidences]
        count = min(len(choices[0]), int(SCOUT * left) // (FEWEST + 1))
        if count < 2:
            problem = self.problem(victims, [mine[0] for mine in choices], 1, labels)
            return self.finished(victims, problem, problem.start, left, [[]] * len(victims))
        steps, scouts = int(SCOUT * left) // count - 1, []
        for turn in range(count):
            problem = self.problem(victims, [mine[turn] for mine in choices], 1, labels)
            schedule = self.schedule(steps, victims[0].plan)
            scouts.append(descend(problem, problem.start, schedule, project=problem.project).z)
        scores = torch.tensor([fits(problem, evidences, z) for z in scouts])
        best = torch.where(scores.amin(0) < scores[0] - MARGIN, scores.argmin(0), 0).tolist()
        images = torch.stack([problem.at(z).x for z in scouts], 1)
        others = [[x for turn, x in enumerate(row) if turn != b] for row, b in zip(images, best, strict=True)]
        problem = self.problem(victims, [mine[b] for mine, b in zip(choices, best, strict=True)], 1, labels)
        z = torch.stack([scouts[b][v] for v, b in enumerate(best)])
        return self.finished(victims, problem, z, left - count * (steps + 1), others)

    def finished(
        self, victims: Sequence[Victim], problem: Problem, z: Tensor, left: int, others: Sequence[Sequence[Tensor]]
    ) -> list[Guess]:
        """Return what `left` more evaluations make of rows z, with the images that hypotheses given up had."""
        schedule = self.schedule(left, victims[0].plan)
        story = Story(1, self.budget - left).add(problem, descended(problem, z, schedule))
        return [replace(g, others=tuple(given_up)) for g, given_up in zip(story.guesses(), others, strict=True)]


def fits(problem: Problem, evidences: Sequence[Evidence], z: Tensor) -> list[float]:
    """Return how well the rows z, one for each piece of evidence, explain all layers of it: the smaller the better."""
    end = problem.at(z)
    return [explained(e, end.x[v], end.labels[v], end.extra[v]) for v, e in enumerate(evidences)]


def hidden(evidences: Sequence[Evidence]) -> bool:
    """Return whether any observation has entries that are exactly 0."""
    return any(bool((value == 0).any()) for e in evidences for value in e.observed.values())


def hypotheses(evidence: Evidence, most: int, zeros: bool) -> list[Evidence]:
    """Return the evidence under each hypothesis about what is poisoned, at most `most`.

    First nothing, then, where `zeros`, entries that are exactly 0; then each layer; then all but the first, or last, k.
    """
    names = layers(evidence)
    sound = [[n for n in names if n != name] for name in names] if len(names) > 1 else []
    for k in range(len(names) - 2, 0, -1):
        sound += [names[:k], names[-k:]]
    nothing = [masked(evidence, names), *([masked(evidence, names, zeros=False)] if zeros else [])]
    return [*nothing, *(masked(evidence, keep) for keep in sound)][:most]
