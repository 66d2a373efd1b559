"""The attack by linear systems: what it reads exactly, what it says of it, and that it claims nothing of noise."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from observations import batch_gradient, psnr, reached, seeded, server_sees, uploads
from sklearn.datasets import load_digits
from torch import Tensor, nn

from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.reconstruction.closed_form import ClosedForm
from ppbench.base.errors import UsageError
from ppbench.base.tree import Params
from ppbench.defenses.spn import SPN
from ppbench.federation.evidence import Evidence, simulation
from ppbench.federation.plan import Data, Local, Plan
from ppbench.federation.wire import Slot
from ppbench.nets.net import initial, net_spec
from ppbench.questions.image_metrics import ImageScore
from ppbench.questions.images import score_images
from ppbench.run.invert import invert

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


class Patches(nn.Module):
    """A transformer of two layers with a class token and a learned position embedding."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.project = nn.Conv2d(1, width, 2, 2)
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(0.1 * torch.randn(1, 17, width))
        layer = nn.TransformerEncoderLayer(width, 4, 64, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.project(x).flatten(2).transpose(1, 2)
        rows = torch.cat([self.token.expand(len(x), -1, -1), rows], 1) + self.places
        out: Tensor = self.head(self.layers(rows)[:, 0])
        return out


def test_patches_of_a_transformer_with_learned_positions_are_read() -> None:
    plan, truth = plan_of("test_closed_form:Patches"), digit(3)
    guess = guessed(plan, *sent(plan, truth))
    assert guess.is_exact and psnr(guess.x, truth) > 50


def test_a_transformer_narrower_than_its_patches_are_many_is_not_determined() -> None:
    plan, truth = plan_of("test_closed_form:Patches", width=12), digit(3)
    guess = guessed(plan, *sent(plan, truth))
    (layer,) = guess.layers
    assert not guess.is_exact and layer.determined <= 12 * 4 < layer.unknowns == 64


def test_a_perceptron_is_read_off_its_first_layer() -> None:
    plan, truth = plan_of("mlp"), digit(5)
    guess = guessed(plan, *sent(plan, truth))
    assert guess.is_exact and psnr(guess.x, truth) > 80


# -- what no loss and no scale changes --------------------------------------------------------------------------------
def lossy(plan: Plan, params: Params, x: Tensor, loss: str) -> Params:
    """Return the gradient of another loss than the plan's."""
    weights = {name: value.clone().requires_grad_() for name, value in params.items()}
    logits = plan.net(weights, x)
    losses = {
        "smoothed labels": F.cross_entropy(logits, torch.tensor([3]), label_smoothing=0.3),
        "temperature": F.cross_entropy(logits / 4, torch.tensor([3])),
        "hinge": F.multi_margin_loss(logits, torch.tensor([3])),
        "a clipped gradient": 1e-3 * F.cross_entropy(logits, torch.tensor([3])),
    }
    return dict(zip(weights, torch.autograd.grad(losses[loss], list(weights.values())), strict=True))


@pytest.mark.parametrize("loss", ["smoothed labels", "temperature", "hinge", "a clipped gradient"])
def test_an_unknown_loss_or_factor_changes_nothing(loss: str) -> None:
    plan, truth = plan_of("dlnet"), digit(9)
    params = initial(plan.spec, 0)
    guess = guessed(plan, params, lossy(plan, params, truth, loss))
    assert guess.is_exact and psnr(guess.x, truth) > 80


@pytest.mark.parametrize("alpha2", [0.01, 0.5])
def test_a_secret_part_of_the_loss_is_an_unknown_of_the_same_systems(digits: Data, alpha2: float) -> None:
    values, guesses = reached(server_sees(digits, SPN(alpha2=alpha2), count=3), ClosedForm())
    assert all(guess.is_exact for guess in guesses) and min(values) > 80


def test_hidden_entries_are_left_out_of_the_equations() -> None:
    plan, truth = plan_of("dlnet"), digit(2)
    params, update = sent(plan, truth)
    seen = {n: (torch.rand(v.shape, generator=seeded(1)) < 0.7).float() for n, v in update.items()}
    masked = {n: v * seen[n] for n, v in update.items()}
    whole = Evidence((Slot(0, 0),), masked, simulation(plan, params), params)
    guess, blind = (
        ClosedForm().answer([e], plan, [Challenge((Slot(0, 0),), 1)], seeded())[0]
        for e in (replace(whole, weight=seen), whole)
    )
    assert guess.is_exact and psnr(guess.x, truth) > 60 and not blind.is_exact


# -- what it does not claim -------------------------------------------------------------------------------------------
def test_of_noise_it_claims_nothing() -> None:
    plan, truth = plan_of("dlnet"), digit(4)
    params, update = sent(plan, truth)
    rms = float(torch.cat([v.flatten() for v in update.values()]).square().mean().sqrt())
    for size in (1e-3 * rms, rms, 100 * rms):
        noisy = {n: v + size * torch.randn(v.shape, generator=seeded(1)) for n, v in update.items()}
        assert not guessed(plan, params, noisy).is_exact
    noise = {n: torch.randn(v.shape, generator=seeded(2)) for n, v in update.items()}
    guess = guessed(plan, params, noise)
    assert not guess.is_exact and not guess.layers and psnr(guess.x, truth) < 15


def test_noise_in_the_convolutions_alone_is_seen_by_their_residuals() -> None:
    plan, truth = plan_of("dlnet"), digit(4)
    params, update = sent(plan, truth)
    false = {n: torch.randn(v.shape, generator=seeded(1)) if "features.0" in n else v for n, v in update.items()}
    guess = guessed(plan, params, false)
    assert [layer.exact for layer in guess.layers] == [True] * 4 + [False]
    assert guess.layers[-1].residual > 0.1


def test_little_noise_costs_little() -> None:
    """At a thousandth of the gradient's size searches of the most probable image reach 37 dB."""
    plan, truth = plan_of("dlnet"), digit(6)
    params, update = sent(plan, truth)
    noisy = {n: v + 1e-4 * torch.randn(v.shape, generator=seeded(1)) for n, v in update.items()}
    guess = guessed(plan, params, noisy)
    assert psnr(guess.x, truth) > 30 and not guess.is_exact
    assert all(layer.condition >= 1 and layer.residual > 0 for layer in guess.layers)


def test_one_image_that_passes_for_two_is_not_claimed() -> None:
    plan = plan_of("dlnet")
    params, update = sent(plan, digit(1))
    (guess,) = ClosedForm().run(uploads(plan, params, [update]), [Challenge((Slot(0, 0),), 2)], seeded())
    assert guess.x.shape == (2, 1, 8, 8) and guess.y.shape == (2,) and not guess.is_exact


@pytest.mark.parametrize("model", ["resnet20", "vgg16", "densenet", "cnn"])
def test_what_is_no_chain_of_such_layers_is_not_attacked(model: str) -> None:
    assert not ClosedForm().suits(plan_of(model, (3, 32, 32)))


def test_another_network_is_refused_in_one_sentence() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(144, 4))
    update = [torch.ones_like(p) for p in model.parameters()]
    with pytest.raises(UsageError, match="Attack 'closed_form' has no use for a network such as 'Sequential'"):
        invert(model, update, (1, 8, 8), attack="closed_form")


def test_one_gradient_gives_one_image_with_two_evaluations() -> None:
    plan, truth = plan_of("dlnet"), digit(8)
    one, other = (guessed(plan, *sent(plan, truth)) for _ in range(2))
    assert torch.equal(one.x, other.x) and one.layers == other.layers and one.evaluations == 2


def test_a_record_keeps_how_well_each_layer_was_determined(digits: Data) -> None:
    view, victims = server_sees(digits, SPN(alpha2=0.1), count=1)
    guesses = ClosedForm().run(view, victims.challenges(), seeded())
    (score,) = score_images(victims, guesses, {}, {}, (0.0, 1.0)).victims
    again = ImageScore.model_validate_json(score.model_dump_json())
    assert [layer.name for layer in again.layers][:2] == ["head.weight", "features.6.weight"]
    assert all(layer.exact and layer.condition >= 1 for layer in again.layers)
    assert "layers" not in score.model_copy(update={"layers": []}).model_dump()
