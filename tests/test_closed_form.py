"""The attack by linear systems: what it reads exactly, what it says of it, and that it claims nothing of noise."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from observations import batch_gradient, psnr, seeded, uploads
from sklearn.datasets import load_digits
from torch import Tensor, nn

from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.reconstruction.closed_form import ClosedForm
from ppbench.base.tree import Params
from ppbench.federation.plan import Local, Plan
from ppbench.federation.wire import Slot
from ppbench.nets.net import initial, net_spec

sys.path.insert(0, str(Path(__file__).parent))
ACTIVATIONS = {
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "softplus": lambda: nn.Softplus(beta=2.0),
    "leaky_relu": lambda: nn.LeakyReLU(0.1),
    "elu": nn.ELU,
    "selu": nn.SELU,
    "celu": lambda: nn.CELU(0.5),
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
    "mish": nn.Mish,
    "relu": nn.ReLU,
    "hardswish": nn.Hardswish,
    "log_sigmoid": nn.LogSigmoid,
    "none": nn.Identity,
}


def plain(activation: str = "sigmoid") -> nn.Module:
    act = ACTIVATIONS[activation]
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), act(), nn.Conv2d(8, 20, 3, 2, 1), act()),
        *(nn.Flatten(), nn.Linear(320, 20), nn.ReLU(), nn.Linear(20, 10)),
    )


def layered(kind: str) -> nn.Module:
    """Return a small network whose second layer is of a kind."""
    act = nn.Tanh()
    parts: dict[str, list[nn.Module]] = {
        "stride 3, no bias": [nn.Conv2d(8, 32, 4, 3, (2, 1), bias=False), act],
        "dilation": [nn.Conv2d(8, 16, 3, 1, 2, dilation=2), act],
        "oblong": [nn.Conv2d(8, 24, (1, 5), (1, 2), (0, 2)), act],
        "pooled before": [nn.Conv2d(8, 32, 3, 1, 1), nn.AvgPool2d(2), act],
        "pooled behind": [nn.Conv2d(8, 32, 3, 1, 1), act, nn.AvgPool2d(2)],
        "overlapping pools": [nn.Conv2d(8, 24, 3, 1, 1), act, nn.AvgPool2d(3, 1)],
        "adaptive pool": [nn.Conv2d(8, 32, 3, 1, 1), act, nn.AdaptiveAvgPool2d(4)],
        "nothing behind": [nn.Conv2d(8, 16, 3, 1, 1)],
    }
    first = nn.Sequential(nn.Conv2d(1, 8, 3, 1, 1), nn.Tanh(), *parts[kind], nn.Flatten())
    width = first(torch.zeros(1, 1, 8, 8)).shape[1]
    return nn.Sequential(first, nn.Linear(width, 10))


KINDS = ["stride 3, no bias", "dilation", "oblong", "pooled before", "pooled behind", "overlapping pools",
         "adaptive pool", "nothing behind"]  # fmt: skip


def plan_of(model: str, shape: tuple[int, int, int] = (1, 8, 8), **options: str | int) -> Plan:
    return Plan(net_spec(model, shape, 10, options), 1, Local("gradient"))


def digit(place: int) -> Tensor:
    return torch.tensor(load_digits().images[place] / 16)[None, None].float()


def sent(plan: Plan, x: Tensor, label: int = 3, seed: int = 0) -> tuple[Params, Params]:
    """Return initial weights, and the gradient of one example at them, float32."""
    params = initial(plan.spec, seed)
    return params, batch_gradient(plan, params, x, F.one_hot(torch.tensor([label]), 10).float())


def guessed(plan: Plan, params: Params, update: Params, attack: ClosedForm | None = None) -> Guess:
    view = uploads(plan, params, [update])
    (guess,) = (attack or ClosedForm()).run(view, [Challenge((Slot(0, 0),), 1)], seeded())
    return guess


# -- what it reads exactly --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_is_inverted(activation: str) -> None:
    plan, truth = plan_of("test_closed_form:plain", activation=activation), digit(7)
    guess = guessed(plan, *sent(plan, truth, 7))
    assert guess.is_exact, guess.layers
    assert psnr(guess.x, truth) > 60 and guess.y.tolist() == [7]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_is_inverted(kind: str) -> None:
    plan, truth = plan_of("test_closed_form:layered", kind=kind), digit(11)
    guess = guessed(plan, *sent(plan, truth, 1))
    assert guess.is_exact, guess.layers
    assert psnr(guess.x, truth) > 60
