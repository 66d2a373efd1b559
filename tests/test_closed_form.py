"""The attack by linear systems: what it reads exactly, what it says of it, and that it claims nothing of noise."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from daily import every_third
from observations import batch_gradient, psnr, reached, seeded, server_sees, uploads
from sklearn.datasets import load_digits
from torch import Tensor, nn

from ppbench.adversary.attack import Challenge, Guess
from ppbench.adversary.replay import without_rounding
from ppbench.attacks.adaptive.dp import AdaptiveDP
from ppbench.attacks.adaptive.server import AdaptiveServer
from ppbench.attacks.adaptive.spn import AdaptiveSPN
from ppbench.attacks.reconstruction import closed_form
from ppbench.attacks.reconstruction.closed_form import ClosedForm, Rebuilt, rebuilt_input
from ppbench.attacks.reconstruction.linear_systems import (
    DenseInverse,
    LayerSystem,
    LinearConvolution,
    Prior,
    RowInverse,
)
from ppbench.attacks.reconstruction.stages import ConvolutionStage, Elementwise, Window
from ppbench.base.errors import UsageError
from ppbench.base.tree import Params, Recent
from ppbench.defenses.dp import DP
from ppbench.defenses.spn import SPN
from ppbench.federation.evidence import Evidence, simulation
from ppbench.federation.plan import Data, Local, Noise, Plan
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
@pytest.mark.parametrize("activation", every_third(ACTIVATIONS))
def test_every_activation_is_inverted(activation: str) -> None:
    plan, truth = plan_of("test_closed_form:plain", activation=activation), digit(7)
    guess = guessed(plan, *sent(plan, truth, 7))
    assert guess.is_exact, guess.layers
    assert psnr(guess.x, truth) > 60 and guess.y.tolist() == [7]


@pytest.mark.parametrize("kind", every_third(KINDS))
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


@pytest.mark.nightly
def test_a_transformer_narrower_than_its_patches_are_many_is_not_determined() -> None:
    plan, truth = plan_of("test_closed_form:Patches", width=12), digit(3)
    guess = guessed(plan, *sent(plan, truth))
    (layer,) = guess.layers
    assert not guess.is_exact and layer.determined <= 12 * 4 < layer.unknowns == 64


def test_a_perceptron_is_read_off_its_first_layer() -> None:
    plan, truth = plan_of("mlp"), digit(5)
    guess = guessed(plan, *sent(plan, truth))
    assert guess.is_exact and psnr(guess.x, truth) > 80


# -- how large systems are solved -------------------------------------------------------------------------------------
def large_system(step: float | None, outputs: int) -> LayerSystem:
    """Return random systems of 1,152 unknowns whose numbers have deviations from 0.001 to 1."""
    draws, window = np.random.default_rng(outputs), Window((3, 3), (2, 2), (1, 1))
    convolution = LinearConvolution(draws.standard_normal((outputs, 8, 9)), window.places(12, 12), (8, 12, 12))
    stage = ConvolutionStage("w", None, window, Elementwise(), None, False, (8, 12, 12), *[(outputs, 6, 6)] * 2)
    rows = draws.standard_normal((outputs, 36))
    return LayerSystem(
        *(stage, convolution, 100 * np.abs(rows)[:, :, None], rows, draws.standard_normal((outputs, 36))),
        *(draws.standard_normal((outputs, 8, 9)), np.full((outputs, 8, 9), 30.0), Prior(0.5, 1.0, step)),
    )


def test_a_large_system_without_an_active_row_is_solved() -> None:
    system = large_system(None, 10)
    dead = replace(system, slopes=np.zeros_like(system.slopes))
    solution = dead.solve()
    assert np.isfinite(solution.u).all() and np.abs(dead.slope(solution.u)).max() < 1e-3


@pytest.mark.parametrize(
    ("outputs", "inverse", "step"),
    [
        (10, RowInverse, None),
        (40, DenseInverse, 0.1),
        pytest.param(10, RowInverse, 0.1, marks=pytest.mark.nightly),
        pytest.param(40, DenseInverse, None, marks=pytest.mark.nightly),
    ],
)
def test_rough_inverses_lead_to_the_exact_solution_and_its_variances(
    step: float | None, outputs: int, inverse: type
) -> None:
    system = large_system(step, outputs)
    solution, whole = system.solve(), np.linalg.inv(system.normal())
    exact = -whole @ system.slope(np.zeros((8, 144))).ravel()
    assert type(solution.inverse) is inverse and np.abs(solution.u.ravel() - exact).max() < 1e-6
    assert np.allclose(solution.inverse.diagonal(), np.diagonal(whole), rtol=1e-3)
    assert solution.determined == int((np.diagonal(whole) < 0.01).sum())
    assert 0.5 < solution.condition / np.linalg.cond(whole) ** 0.5 <= 1.01


def test_a_solution_of_almost_the_same_system_is_a_start() -> None:
    system = large_system(None, 40)
    first, other = system.solve(), replace(system, values=system.values + 1, slopes=1.1 * system.slopes)
    assert other.solve(first).inverse is first.inverse
    assert np.abs(other.solve(first).u - other.solve().u).max() < 1e-6
    with pytest.raises(np.linalg.LinAlgError):
        replace(system, values=system.values * np.nan).solve(first)


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
    """At a thousandth of the gradient's size searches of the most probable image reach 37 dB, layer by layer 32."""
    plan, truth = plan_of("dlnet"), digit(6)
    params, update = sent(plan, truth)
    noisy = {n: v + 1e-4 * torch.randn(v.shape, generator=seeded(1)) for n, v in update.items()}
    guess = guessed(plan, params, noisy)
    assert psnr(guess.x, truth) > 34 and not guess.is_exact and guess.evaluations > 64
    assert all(layer.condition >= 1 and layer.residual > 0 for layer in guess.layers)


# -- what the whole gradient adds to its layers -----------------------------------------------------------------------
def narrow(channels: int = 2, activation: str = "sigmoid") -> nn.Module:
    """Return a network whose first layer gives fewer numbers than it reads."""
    act = ACTIVATIONS[activation]
    return nn.Sequential(
        *(nn.Conv2d(1, channels, 3, 2, 1), act(), nn.Conv2d(channels, channels, 3, 1, 1), act()),
        *(nn.Flatten(), nn.Linear(16 * channels, 10)),
    )


def by_layers(plan: Plan, params: Params, update: Params) -> Guess:
    evidence = Evidence((Slot(0, 0),), update, simulation(plan, params), params)
    (guess,) = ClosedForm().answer([evidence], plan, [Challenge((Slot(0, 0),), 1)], seeded())
    return guess


@pytest.mark.parametrize(
    ("channels", "activation"), [(2, "sigmoid"), pytest.param(4, "relu", marks=pytest.mark.nightly)]
)
def test_the_whole_gradient_tells_of_a_null_space_of_a_layer(channels: int, activation: str) -> None:
    plan = plan_of("test_closed_form:narrow", channels=channels, activation=activation)
    gains = []
    for place in (1000, 1001, 1005):
        truth = digit(place)
        case = sent(plan, truth, 3, 1)
        first, guess = by_layers(plan, *case), guessed(plan, *case)
        assert not guess.is_exact and guess.layers == first.layers and guess.evaluations > first.evaluations == 2
        gains.append(psnr(guess.x, truth) - psnr(first.x, truth))
    assert min(gains) > -0.5 and sum(gains) / len(gains) > 2


@pytest.mark.nightly
def test_under_little_noise_it_is_as_good_as_the_attack_that_knows_its_law(digits: Data) -> None:
    seen = server_sees(digits, DP(sigma=1e-3), count=3)
    values, _ = reached(seen, ClosedForm())
    others, _ = reached(seen, AdaptiveDP())
    assert sum(values) > sum(others) - 2


def test_an_image_that_does_not_explain_the_gradient_is_not_taken() -> None:
    """The loss is another than the plan's, and the layers leave a null space."""
    plan, truth = plan_of("test_closed_form:narrow"), digit(5)
    params = initial(plan.spec, 1)
    update = lossy(plan, params, truth, "temperature")
    guess, first = guessed(plan, params, update), by_layers(plan, params, update)
    assert torch.equal(guess.x, first.x) and guess.evaluations > 2
    assert guessed(plan, params, update).evaluations == guess.evaluations


def pooled() -> nn.Module:
    """Return a network whose second convolution reads more numbers than it and its gradient give equations."""
    first, second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
    return nn.Sequential(*(first, nn.ReLU(), second, nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16 * 256, 10)))


def test_a_large_layer_with_too_few_equations_is_not_solved_for_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    def solve(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(LayerSystem, "solve", solve)
    plan = plan_of("test_closed_form:pooled", (3, 32, 32))
    guess = guessed(plan, *sent(plan, torch.rand(1, 3, 32, 32, generator=seeded())))
    assert guess.x.shape == (1, 3, 32, 32) and not guess.layers


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


def test_attacks_on_one_view_solve_each_gradient_once(digits: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also `adaptive_server`, which gets the same numbers in float64; another gradient or law is another question."""
    view, victims = server_sees(digits, SPN(alpha2=0.1), count=2)
    alone = AdaptiveServer().run(view, victims.challenges(), seeded())
    solved: list[Evidence] = []

    def counted(evidence: Evidence, plan: Plan) -> Rebuilt | None:
        solved.append(evidence)
        return rebuilt_input(evidence, plan)

    monkeypatch.setattr(closed_form, "SOLVED_INPUTS", Recent(8))
    monkeypatch.setattr(closed_form, "rebuilt_input", counted)
    every = [a.run(view, victims.challenges(), seeded()) for a in (ClosedForm(), AdaptiveSPN(), AdaptiveServer())]
    assert len(solved) == 2
    for guesses in every:
        assert all(torch.equal(g.x, a.x) and g.layers == a.layers for g, a in zip(guesses, alone, strict=True))
    noisy = [replace(e, noise=Noise("gaussian", 1e-3)) for e in view.defense.evidence(view)]
    ClosedForm().answer(noisy, view.plan, victims.challenges(), seeded())
    assert len(solved) == 4


def test_the_rounding_of_a_replay_alone_is_taken_off(digits: Data) -> None:
    """The server's step on its messages is the gradient that is sent, up to float64; what differs more stays."""
    view, _ = server_sees(digits, SPN(alpha2=0.1), count=2)
    stated = {e.unit: e for e in view.defense.evidence(view)}
    for size, same in ((1e-9, True), (1e-6, False)):
        numbers = {n: v.double() * (1 + size) for n, v in stated[Slot(0, 0),].observed.items()}
        (near,) = without_rounding([replace(stated[Slot(0, 0),], observed=numbers)], view)
        assert (near.observed is stated[Slot(0, 0),].observed) is same
    other = replace(stated[Slot(0, 0),], unit=(Slot(9, 0),))
    assert without_rounding([other], view) == [other]
