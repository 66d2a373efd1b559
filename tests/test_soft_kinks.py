"""Rounded kinks: what is smoothed, that it ends at the network itself, and that `ig` gains by it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from observations import observation, reached, seeded, server_sees
from torch import Tensor, nn

import ppbench
from ppbench.adversary.attack import Challenge
from ppbench.attacks.reconstruction.fastpath.chain import ChainObjective
from ppbench.attacks.reconstruction.fastpath.soft_kinks import SoftKinks
from ppbench.attacks.reconstruction.gifd import GIFD
from ppbench.attacks.reconstruction.ig import IG, SMOOTH_SIDE, SOFT_PRIOR, IGMasked
from ppbench.attacks.reconstruction.search.problem import Problem
from ppbench.attacks.reconstruction.search.starts import posed
from ppbench.base.errors import UsageError
from ppbench.defenses.none import NoDefense
from ppbench.federation.plan import Local, Plan
from ppbench.nets.net import initial, net_spec

PHOTO = (3, 16, 16)


class Called(nn.Module):
    """Two convolutions with a kink behind each, called as `kink` calls it."""

    def __init__(self, kink: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.kink = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2, padding=1), kink
        self.last = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.kink(self.second(self.kink(self.first(x)))).flatten(1))


KINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "function": F.relu,
    "function of torch": torch.relu,
    "method": lambda x: x.relu(),
    "module": nn.ReLU(),
    "in place": nn.ReLU(inplace=True),
    "leaky": nn.LeakyReLU(0.2),
    "leaky function": lambda x: F.leaky_relu(x, 0.2),
    "clipped": nn.ReLU6(),
    "clipped on both sides": nn.Hardtanh(-1.5, 2.0),
}


@pytest.mark.parametrize("name", KINKS)
def test_kinks_are_smoothed_however_they_are_called(name):
    """The smoothed one has a slope that rises everywhere, and differs from the kinked one near its kinks alone."""
    x, kink = torch.linspace(-3, 3, 601), KINKS[name]
    with SoftKinks(0.1):
        soft = kink(x.clone())
    hard = kink(x.clone())
    bend = soft.diff().diff().abs()
    assert bend.max() < 0.3 * hard.diff().diff().abs().max()
    assert 0.02 < (soft - hard).abs().max() < 0.2
    assert (soft - hard).abs().median() < 0.005
    with SoftKinks(1e-5):
        assert torch.allclose(kink(x.clone()), hard, atol=1e-4)


def test_what_has_no_kink_and_pools_stay():
    x = torch.randn(2, 3, 4, 4, generator=seeded())
    for function in (torch.sigmoid, torch.tanh, F.gelu, nn.MaxPool2d(2)):
        with SoftKinks(0.5):
            soft = function(x)
        assert torch.equal(soft, function(x))


def problem_of(model: str, shape: tuple[int, ...], **options: str) -> Problem:
    """Return the problem of two images of noise on a network with random weights."""
    plan = Plan(net_spec(model, shape, 10, options), 1, Local("gradient"))
    x, params = torch.rand(2, *shape, generator=seeded(3)), initial(plan.spec, 0)
    evidence = [observation(plan, params, x[i : i + 1], torch.eye(10)[i : i + 1]) for i in range(2)]
    victims = posed(evidence, plan, [Challenge(e.unit, 1) for e in evidence], seeded())
    return IG().problem(victims, evidence, 1)


@pytest.mark.parametrize("options", [{}, {"widths": "4", "pool": "avg"}])
def test_a_narrower_kink_is_nearer_to_the_networks_own(options):
    """Of the chain: the mismatch comes nearer with the width, slopes once no input is that near to a kink."""
    problem = problem_of("cnn", (1, 8, 8), **options)
    assert isinstance(problem.matching, ChainObjective)
    z, index = problem.start, torch.arange(2)
    hard = problem(z, index)
    softened = [problem.softened(width)(z, index) for width in (0.3, 0.03, 1e-8)]
    wide, narrow, last = (float((value.score - hard.score).abs().max()) for value in softened)
    assert wide > 2 * narrow > 1000 * last
    assert torch.allclose(softened[-1].gradient, hard.gradient, atol=1e-4 * float(hard.gradient.abs().max()))
    assert torch.equal(problem(z, index).gradient, hard.gradient), "the softened one is a copy"


@pytest.mark.parametrize("attack", [IG(budget=20), IG(budget=20, tries=2), IG(budget=20, soft=False)], ids=str)
def test_without_kinks_the_guesses_are_those_of_no_softening_to_the_bit(digits, attack):
    seen = server_sees(digits, NoDefense(), count=3)
    smooth, hard = (reached(seen, one)[1] for one in (attack, replace(attack, soften=0.0)))
    for one, other in zip(smooth, hard, strict=True):
        assert torch.equal(one.x, other.x) and one.confidence == other.confidence


def test_the_schedule_softens_kinked_convolutions_alone_and_ends_at_the_network():
    def width(model: str, **parameters: Any) -> float:
        return IG(**parameters).schedule(10, Plan(net_spec(model, PHOTO, 10), 1)).soften

    assert width("cnn") == IG().soften > 0
    assert width("dlnet") == width("mlp") == width("cnn", compile=True) == width("cnn", soften=0.0) == 0
    schedule, widths = IG().schedule(50, Plan(net_spec("cnn", PHOTO, 10), 1)), list[float]()
    problem = problem_of("cnn", (1, 8, 8))
    watching = replace(problem, matching=copy.copy(problem.matching))
    watching.matching.softened = lambda width: widths.append(width) or problem.matching  # type: ignore[method-assign]
    for step in range(50):
        schedule.softened(watching, step)
    assert widths == sorted(widths, reverse=True)
    assert widths[0] == IG().soften and widths[-1] < 1e-3 * IG().soften


@pytest.mark.parametrize("attack", [IGMasked(soften=0.1), GIFD(soften=0.1)], ids=type)
def test_attacks_that_were_not_measured_with_it_refuse_it(attack):
    with pytest.raises(UsageError, match=r"soften=0\.1 cannot be used; it must be 0"):
        attack.check()
    replace(attack, soften=0.0).check()


@pytest.mark.parametrize("name", [name for name in KINKS if name != "clipped on both sides"])
def test_a_users_network_is_softened_however_it_calls_its_kinks(name, digits):
    torch.manual_seed(0)
    model, x, y = Called(KINKS[name]), digits.x[:1], digits.y[:1].argmax(1)
    gradient = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    soft, hard = (
        ppbench.invert(model, gradient, (1, 8, 8), y, "ig", budget=12, planted=False, **parameters)
        for parameters in ({}, {"soften": 0.0})
    )
    assert soft.evaluations == hard.evaluations == 12
    assert not torch.allclose(soft.x, hard.x, atol=1e-3)


# -- what it gains -----------------------------------------------------------------------------------------------------
def test_rounded_kinks_rebuild_more_of_batches_of_digits(digits):
    """The schedule alone differs: images of 8 pixels a side have the same prior."""
    seen = server_sees(digits, NoDefense(), batch=4, count=4, kinks=True)
    soft, hard = (reached(seen, attack)[0] for attack in (IG(budget=200), IG(budget=200, soften=0.0)))
    assert fmean(soft) > fmean(hard) + 1


def test_the_prior_is_stronger_on_large_images_of_kinked_convolutions_alone():
    def pull(model: str, side: int, **parameters: Any) -> float:
        return IG(tv=0.5, **parameters).pull(Plan(net_spec(model, (3, side, side), 10), 1))

    assert pull("cnn", SMOOTH_SIDE) == 0.5 * SOFT_PRIOR
    assert pull("cnn", SMOOTH_SIDE - 1) == pull("dlnet", SMOOTH_SIDE) == 0.5
    assert pull("cnn", SMOOTH_SIDE, soften=0.0) == pull("cnn", SMOOTH_SIDE, compile=True) == 0.5


@pytest.mark.parametrize("attack", ["ig", "ig_features"])
def test_what_is_nearly_explained_is_finished_to_rounding(attack, digits):
    """A third of the evaluations for L-BFGS, and exact; noise is not explained, and so nothing is finished."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 12, 5, 2, 2), nn.ReLU(), nn.Conv2d(12, 12, 5, 1, 2), nn.ReLU(), nn.Flatten(),
                          nn.Linear(192, 10))  # fmt: skip
    x, y = digits.x[7:8], digits.y[7:8].argmax(1)
    gradient = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))

    def decibels(gradient, **more):
        result = ppbench.invert(model, gradient, (1, 8, 8), y, attack, planted=False, budget=150, **more)
        return result.psnr(x)[0]

    assert decibels(gradient, finish=50) > 95 and decibels(gradient) < 75
    noisy = [g + 0.1 * g.square().mean().sqrt() * torch.randn(g.shape, generator=seeded(1)) for g in gradient]
    assert decibels(noisy, finish=50) < 40
