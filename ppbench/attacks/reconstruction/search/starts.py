"""The starts of searches: victims, their evidence and random draws, and which victims are searched together."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.federation.bounds import PositiveInt
from ppbench.federation.evidence import Evidence, JointEvidence, Mappable
from ppbench.federation.plan import Plan
from ppbench.federation.view import View

Start = Literal["grey", "normal", "pattern"]
Label = Literal["joint", "inferred"]
PATCH = 8

LOGIT = 4.0
"""Unit of unknown logits in a search: they move about ten times as far as pixels."""


@dataclass(frozen=True)
class Starts:
    """The unknowns of V victims, at the start or the end of a search.

    x: images [V, N, *shape], N over all slots of a unit; its dtype is that of the search.  y: fixed labels [V, N, C]
    (also soft ones) or, if `joint`, logits of unknown ones: softmax of these, or (C = 1) the number itself.  nuisance:
    [V, E] the evidence's nuisance unknowns, flat, in its order; None if it has none.
    """

    x: Tensor
    y: Tensor
    joint: bool
    nuisance: Tensor | None = None

    @property
    def extra(self) -> Tensor:
        """The nuisance unknowns [V, E], E = 0 for none."""
        return self.x.new_zeros(len(self.x), 0) if self.nuisance is None else self.nuisance

    @property
    def labels(self) -> Tensor:
        """The labels [V, N, C], soft where unknown; a single output's unknown target as it is."""
        return torch.softmax(self.y, -1) if self.joint and self.y.shape[-1] > 1 else self.y

    def at(self, rows: Sequence[int]) -> Starts:
        """Return the unknowns of the victims `rows`."""
        keep = torch.tensor(rows, dtype=torch.int64, device=self.x.device)
        return Starts(self.x[keep], self.y[keep], self.joint, self.extra[keep])

    def to(self, dtype: torch.dtype) -> Starts:
        """Return the unknowns in `dtype`."""
        return Starts(self.x.to(dtype), self.y.to(dtype), self.joint, self.extra.to(dtype))

    def rows(self, z: Tensor) -> Tensor:
        """Return whole rows [V, n + E + ...]: z [V, n] for the images, nuisance, logits in units of `LOGIT`."""
        return self.joined(z, self.extra.to(z), self.y.to(z) / LOGIT)

    def joined(self, z: Tensor, extra: Tensor, logits: Tensor) -> Tensor:
        """Return the parts of a point, or of a gradient, in one row per victim; `logits` only if they are unknown."""
        return torch.cat([z, extra, *([logits.flatten(1)] if self.joint else [])], 1)

    def moved(self, x: Tensor, tail: Tensor, index: Tensor) -> Starts:
        """Return the starts `index` [S] with images x [S, N, *shape] and the rest of their rows `tail`."""
        extra = tail[:, : self.extra.shape[1]]
        if not self.joint:
            return Starts(x, self.y[index].to(tail), False, extra)
        return Starts(x, LOGIT * tail[:, extra.shape[1] :].view(-1, *self.y.shape[1:]), True, extra)


@dataclass(frozen=True)
class PosedVictim:
    """One challenge, the evidence about it (or None), and a generator for this victim alone.

    gradient: the same observation taken for one gradient, for reading labels; None: `evidence` is one.
    """

    evidence: Evidence | None
    challenge: Challenge
    plan: Plan
    generator: torch.Generator
    gradient: Evidence | None = None

    @property
    def size(self) -> tuple[int, ...]:
        """Shape (N, *shape) of the answer: N examples over all slots of the unit."""
        return (len(self.challenge.unit) * self.challenge.batch, *self.plan.spec.shape)

    def image(self, start: Start) -> Tensor:
        """Return a start image [N, *shape] float32.

        "grey": the middle of the data range plus 0.02 N(0, 1) of its width; "normal": N(0, 1); "pattern": one such
        patch of 8 x 8 pixels per image, tiled ("normal" if inputs are no images).
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
        """Return start logits [N, C] float32: 0.1 N(0, 1)."""
        return 0.1 * torch.randn(self.size[0], self.plan.spec.classes, generator=self.generator)

    def labels(self, label: Label) -> Tensor | None:
        """Return one-hot labels [N, C] float32, granted or inferred as in `attacks.labels`; None if unknown.

        Of several observations they are read off the mean. Texts that are their own targets have none: [N, 1], unused.
        """
        if self.plan.next_token:
            return torch.zeros(self.size[0], 1)
        if self.challenge.y is not None:
            return self.challenge.y.flatten(0, 1).float()
        evidence, classes = self.gradient or self.evidence, self.plan.spec.classes
        if label == "joint" or evidence is None or classes == 1:
            return None
        from ppbench.attacks.labels import recover_labels, single_label

        evidence = evidence.mean if isinstance(evidence, JointEvidence) else evidence
        weight, bias = evidence.observed.get("head.weight"), evidence.observed.get("head.bias")
        if weight is None and bias is None:
            return None
        if evidence.params is not None:
            recovered = recover_labels(self.plan, evidence.params, weight, bias, self.size[0], self.generator)
            return one_hot(recovered, classes).float()
        signal = weight.sum(1) if bias is None and weight is not None else bias
        if signal is None or self.size[0] > 1 or self.plan.loss != "cross_entropy":
            return None
        return one_hot(single_label(signal, positive=bias is not None), classes).float()


def posed(
    evidence: Sequence[Evidence], plan: Plan, challenges: Sequence[Challenge], generator: torch.Generator
) -> list[PosedVictim]:
    """Return a victim for each challenge, with the first evidence about its unit and its own generator."""
    seeds = torch.randint(2**62, (len(challenges),), generator=generator).tolist()
    known = {frozenset(e.unit): e for e in reversed(evidence)}
    return [
        PosedVictim(known.get(frozenset(c.unit)), c, plan, torch.Generator().manual_seed(seed))
        for c, seed in zip(challenges, seeds, strict=True)
    ]


def usable(evidence: Evidence) -> bool:
    """Return whether the observation is finite and not zero."""
    finite = all(bool(torch.isfinite(value).all()) for value in evidence.observed.values())
    return finite and float(evidence.scale()) > 0


def search_batches(victims: Sequence[PosedVictim]) -> list[list[int]]:
    """Return indices of the victims with usable evidence, grouped by N, granted labels and shapes of nuisance."""
    by_shape: dict[Hashable, list[int]] = {}
    for i, victim in enumerate(victims):
        if victim.evidence is not None and usable(victim.evidence):
            shapes = tuple(victim.evidence.nuisance.values())
            by_shape.setdefault((victim.size[0], victim.challenge.y is not None, shapes), []).append(i)
    return list(by_shape.values())


def simulation_groups(evidences: Sequence[Evidence]) -> list[list[int]]:
    """Return groups of indices of evidence that can be simulated in one batch, in order of first appearance."""
    by_family: dict[Hashable, list[int]] = {}
    for i, evidence in enumerate(evidences):
        by_family.setdefault(_family(evidence), []).append(i)
    return list(by_family.values())


def _family(e: Evidence) -> Hashable:
    if isinstance(e, JointEvidence):
        return tuple(map(_family, e.parts))
    family = e.simulate.family() if isinstance(e.simulate, Mappable) else id(e.simulate)
    return family, id(e.params), e.weight is None, e.measure, len(e.unit), tuple(e.statistics)


def draw(victims: Sequence[PosedVictim], start: Start, label: Label, dtype: torch.dtype) -> Starts:
    """Return fresh starts for one of `search_batches`, on the evidence's device; labels are joint if any is unknown."""
    device = next(victim.evidence.device for victim in victims if victim.evidence is not None)
    x = torch.stack([victim.image(start) for victim in victims]).to(device, dtype)
    known = [victim.labels(label) for victim in victims]
    granted = [y for y in known if y is not None]
    joint = len(granted) < len(victims)
    y = torch.stack([victim.logits() for victim in victims] if joint else granted).to(device, dtype)
    shapes = () if victims[0].evidence is None else victims[0].evidence.nuisance.values()
    return Starts(x, y, joint, x.new_zeros(len(x), sum(math.prod(shape) for shape in shapes)))


@dataclass(frozen=True)
class ImageSearch(Attack):
    """Base of attacks that search images by following a gradient.

    Attributes:
        start: first images: "grey", "normal" or "pattern", see `PosedVictim.image`.
        label: "inferred": from the head's gradient beforehand, if possible; "joint": unknown logits, searched too.
            Labels that a challenge grants are used in either case.
        budget: gradient evaluations per victim, all starts together.
    """

    kind: ClassVar[Kind] = "reconstruction"
    threats: ClassVar[tuple[str, ...]] = ("server/1", "eavesdropper/1", "client/1", "collusion/1")

    start: Start = "grey"
    label: Label = "inferred"
    budget: PositiveInt = 300

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess per challenge, a start image without usable evidence; UsageError as `check`."""
        return self.answer(self.evidence(view), view.plan, challenges, generator)

    def answer(
        self,
        evidence: Sequence[Evidence],
        plan: Plan,
        challenges: Sequence[Challenge],
        generator: torch.Generator,
        attack: Callable[[Sequence[PosedVictim]], list[Guess]] | None = None,
    ) -> list[Guess]:
        """Return the guesses of `run` from given evidence, for instance another attack's; `attack` replaces the own."""
        self.check()
        victims, guesses = posed(evidence, plan, challenges, generator), dict[int, Guess]()
        for rows in self.blocks(victims):
            guesses |= dict(zip(rows, (attack or self.attack)([victims[i] for i in rows]), strict=True))
        return [guesses.get(i) or Guess(x=victim.image(self.start)) for i, victim in enumerate(victims)]

    def suits(self, plan: Plan) -> bool:
        """Return whether targets are classes or numbers, not masks."""
        return not plan.net.pixelwise

    def blocks(self, victims: Sequence[PosedVictim]) -> list[list[int]]:
        """Return indices of the victims with usable evidence, grouped by joint search."""
        return search_batches(victims)

    def attack(self, victims: Sequence[PosedVictim]) -> list[Guess]:
        """Return the guesses for victims from one of `blocks`."""
        raise NotImplementedError
