"""Two defenses of no worth, which an oblivious bench ranks best: some attack of the portfolio undoes each.

Soteria-like: columns of one layer's gradient are zeroed, those that say most about the example. Last-layer noise:
thirty times the layer's own size, under a public law. Images are 8x8 digits, the network DLNet at initialization.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import pytest
import torch
from daily import every_third
from observations import Seen, reached, seeded, server_sees

from ppbench.adversary.attack import Attack
from ppbench.attacks.reconstruction.dlg import IDLG
from ppbench.attacks.reconstruction.ig import IG, IGMasked
from ppbench.attacks.reconstruction.likelihood import Likelihood
from ppbench.base.tree import Tree
from ppbench.defenses.none import NoDefense
from ppbench.federation.contract import Context, Defense
from ppbench.federation.plan import Data, Noise, Plan

VICTIMS = 3
EXACT = 54.0
"""PSNR in dB at which an image is wrong by half a grey level of eight bits: what is nearer counts as that."""
OBLIVIOUS = (IDLG(budget=60), IG(budget=80))
PORTFOLIO = (OBLIVIOUS[1], IGMasked(budget=300), Likelihood(budget=60))


@dataclass(frozen=True)
class Columns(Defense):
    """Zeroes the share of the columns of one layer's weight gradient that are the largest, example by example."""

    layer: str = "head"
    share: float = 0.8

    def upload(self, ctx: Context, me: Tree, result: Tree) -> Tree:
        """Return the gradient with the columns zeroed."""
        weight = result[f"{self.layer}.weight"]
        size = weight.flatten(2).norm(dim=(0, 2)) if weight.dim() > 2 else weight.norm(dim=0)
        drop = size.topk(round(self.share * len(size))).indices
        kept = torch.ones_like(size).index_fill(0, drop, 0.0)
        shape = (1, -1, *[1] * (weight.dim() - 2))
        return super().upload(ctx, me, {**result, f"{self.layer}.weight": weight * kept.view(shape)})


@dataclass(frozen=True)
class LastLayerNoise(Defense):
    """Adds Gaussian noise of one public deviation to the head's gradient."""

    std: float = 1.0

    def noise(self, plan: Plan) -> Noise:
        """Return the law: the head's tensors alone have noise."""
        return Noise("gaussian", 0.0, (("head.weight", self.std), ("head.bias", self.std)))

    def upload(self, ctx: Context, me: Tree, result: Tree) -> Tree:
        """Return the gradient with noise on the head."""
        noisy = {}
        for name in ("head.weight", "head.bias"):
            noisy[name] = result[name] + self.std * torch.randn(result[name].shape, generator=ctx.generator)
        return super().upload(ctx, me, {**result, **noisy})


@dataclass(frozen=True)
class Leak:
    """Median PSNR in dB by the scorer: of each oblivious attack, and of the portfolio's best on each victim."""

    oblivious: tuple[float, ...]
    worst: float


def clipped(seen: Seen, attack: Attack) -> list[float]:
    return [min(decibels, EXACT) for decibels in reached(seen, attack)[0]]


def leak(seen: Seen) -> Leak:
    results = {attack: clipped(seen, attack) for attack in {*OBLIVIOUS, *PORTFOLIO}}
    best = [max(row) for row in zip(*(results[attack] for attack in PORTFOLIO), strict=True)]
    return Leak(tuple(median(results[attack]) for attack in OBLIVIOUS), median(best))


@pytest.fixture(scope="module")
def undefended(digits: Data) -> float:
    """Return what the weaker of the oblivious attacks makes of no defense."""
    seen = sees(digits, NoDefense())
    return min(median(clipped(seen, attack)) for attack in OBLIVIOUS)


@pytest.fixture(scope="module")
def noisy(digits: Data) -> Seen:
    """Return what a server sees under noise of thirty times the root mean square of the head's gradient."""
    view, _ = sees(digits, NoDefense())
    heads = [e.observed[n].flatten() for e in view.defense.evidence(view) for n in ("head.weight", "head.bias")]
    return sees(digits, LastLayerNoise(30 * float(torch.cat(heads).square().mean().sqrt())))


def sees(digits: Data, defense: Defense) -> Seen:
    return server_sees(digits, defense, count=VICTIMS, first=1000, nconv=2)


def test_undefended_digits_are_broken_by_the_oblivious_too(undefended):
    assert undefended > 50


@pytest.mark.parametrize("hidden", every_third([Columns("head"), Columns("features.2"), "noise"]))
def test_zeroed_columns_and_noise_on_the_last_layer_are_undone(hidden, digits, noisy, undefended):
    leakage = leak(noisy if hidden == "noise" else sees(digits, hidden))
    assert leakage.worst > undefended - 1
    assert max(leakage.oblivious) < undefended - 5


@pytest.mark.parametrize("attack", [IGMasked(budget=20), Likelihood(budget=20)], ids=["ig_masked", "likelihood"])
def test_either_knows_labels_that_a_noisy_head_hides(attack, noisy):
    view, victims = noisy
    true = [int(victims.truth(unit).y.argmax()) for unit in victims.units]
    for attacker, right in ((attack, True), (IG(budget=1), False)):
        guesses = attacker.run(view, victims.challenges(), seeded())
        assert ([int(g.y[0]) for g in guesses] == true) is right
