"""How well a guess explains an observation layer by layer: a measure that a few poisoned layers cannot spoil.

Every layer counts alike, by the logarithm of its own 1 - cosine: a right guess explains all layers but the poisoned
ones, a wrong one explains none by more than chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.attacks.reconstruction.search.problem import simulated
from ppbench.attacks.reconstruction.search.starts import Start, Victim
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
    """Return the mean over layers of log(1 - cosine): the smaller, the better; inf for nothing finite.

    Of images x [N, *shape], labels y [N, C] and flat nuisance unknowns [E]. Entries that are exactly 0 in the
    observation do not count: they may be hidden. One gradient evaluation.
    """
    with torch.no_grad():
        found = simulated(evidence, x, y, x.new_zeros(0) if extra is None else extra)
    sums = {key: torch.zeros(3, dtype=torch.float64) for key in layers(evidence)}
    for name, s in found.items():
        o, s = evidence.observed[name].detach().double().cpu(), s.detach().double().cpu()
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
    """Return labels [V, 1, C] that explain best on a start image, and the evaluations that this took a victim.

    One for each class: a poisoned head hides its label from `Victim.labels`, not from the layers before it. None where
    labels are granted, for batches (there are too many), for a single output, and where there are nuisance unknowns.
    """
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
