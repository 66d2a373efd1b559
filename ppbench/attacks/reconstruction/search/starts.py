"""What a reconstruction attack begins with: one victim's evidence, question and random draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.reconstruction.search.matching import Starts, usable
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan

Start = Literal["grey", "normal", "pattern"]
Label = Literal["joint", "inferred"]
PATCH = 8


@dataclass(frozen=True)
class Victim:
    """One challenge, the evidence on it (None where there is none), and a generator for this victim alone.

    gradient: the same observation taken for one gradient, which labels are read off; None: `evidence` is one.
    """

    evidence: Evidence | None
    challenge: Challenge
    plan: Plan
    generator: torch.Generator
    gradient: Evidence | None = None

    @property
    def size(self) -> tuple[int, ...]:
        """Shape (N, *shape) of what is asked: N examples over all slots of the unit."""
        return (len(self.challenge.unit) * self.challenge.batch, *self.plan.spec.shape)

    def image(self, start: Start) -> Tensor:
        """Return a start image [N, *shape] float32: "grey", "normal" N(0, 1), or "pattern".

        Grey is the middle of the data range plus .02 N(0, 1) of its width.
        A pattern is one N(0, 1) patch of 8 x 8 pixels an image, tiled; inputs that are no images get "normal".
        """
        if start == "pattern" and len(self.size) == 4:
            rows, columns = self.size[2:]
            patch = torch.randn(*self.size[:2], PATCH, PATCH, generator=self.generator)
            tiles = patch.repeat(1, 1, -(-rows // PATCH), -(-columns // PATCH))
            return tiles[:, :, :rows, :columns].contiguous()
        noise = torch.randn(self.size, generator=self.generator)
        low, high = self.plan.data_range
        return (low + high) / 2 + 0.02 * (high - low) * noise if start == "grey" else noise

    def logits(self) -> Tensor:
        """Return start logits [N, C] float32: .1 N(0, 1)."""
        return 0.1 * torch.randn(self.size[0], self.plan.spec.classes, generator=self.generator)

    def labels(self, label: Label) -> Tensor | None:
        """Return one-hot labels [N, C] float32 that are granted, or inferred when asked for; None: unknown.

        Inferred as `ppbench.attacks.label.recovery` does: for one example the label is the only negative entry of the
        head's bias gradient (iDLG), for a batch the classes are counted. An update that is no gradient at known weights
        tells the label of one example under cross-entropy. The target of a regression is no class: unknown.
        """
        if self.challenge.y is not None:
            return self.challenge.y.flatten(0, 1).float()
        evidence, classes = self.gradient or self.evidence, self.plan.spec.classes
        if label == "joint" or evidence is None or classes == 1:
            return None
        from ppbench.attacks.label.recovery import recover_labels, single_label

        weight, bias = evidence.observed.get("head.weight"), evidence.observed.get("head.bias")
        if evidence.params is not None and weight is not None:
            found = recover_labels(self.plan, evidence.params, weight, bias, self.size[0], self.generator)
            return one_hot(found, classes).float()
        signal = bias if bias is not None or weight is None else weight.sum(1)
        if signal is None or self.size[0] > 1 or self.plan.loss != "cross_entropy":
            return None
        return one_hot(single_label(signal, positive=bias is not None), classes).float()

    def failure(self, start: Start) -> Guess:
        """Return the guess of an attacker who has nothing to match: a start image."""
        return Guess(x=self.image(start))


def posed(
    evidence: Sequence[Evidence], plan: Plan, challenges: Sequence[Challenge], generator: torch.Generator
) -> list[Victim]:
    """Return a victim for each challenge, with the first evidence about its unit and a generator of its own."""
    seeds = torch.randint(2**62, (len(challenges),), generator=generator).tolist()
    known = {frozenset(e.unit): e for e in reversed(evidence)}
    return [
        Victim(known.get(frozenset(c.unit)), c, plan, torch.Generator().manual_seed(seed))
        for c, seed in zip(challenges, seeds, strict=True)
    ]


def batches(victims: Sequence[Victim]) -> list[list[int]]:
    """Return indices of the victims with usable evidence, by what must agree for one search: N, labels granted."""
    found: dict[tuple[int, bool, tuple[tuple[int, ...], ...]], list[int]] = {}
    for i, victim in enumerate(victims):
        if victim.evidence is not None and usable(victim.evidence):
            shapes = tuple(victim.evidence.nuisance.values())
            found.setdefault((victim.size[0], victim.challenge.y is not None, shapes), []).append(i)
    return list(found.values())


def draw(victims: Sequence[Victim], start: Start, label: Label, dtype: torch.dtype) -> Starts:
    """Return fresh starts for victims of one of `batches`, where their evidence lies.

    All that a search begins with is drawn on the CPU, so that one seed has one result on every device, and moved here:
    whatever follows lies where its starts do.

    Labels are unknowns for all of them as soon as one victim's cannot be inferred. Nuisance unknowns start at zero.
    """
    device = next(victim.evidence.device for victim in victims if victim.evidence is not None)
    x = torch.stack([victim.image(start) for victim in victims]).to(device, dtype)
    known = [victim.labels(label) for victim in victims]
    given = [y for y in known if y is not None]
    joint = len(given) < len(victims)
    y = torch.stack([victim.logits() for victim in victims] if joint else given).to(device, dtype)
    return Starts(x, y, joint)
