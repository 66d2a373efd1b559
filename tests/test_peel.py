"""The layer-by-layer attack: what it reads off a network, inner activations exact, images beyond what searches find."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from observations import batch_gradient, seeded, uploads
from sklearn.datasets import load_digits
from torch import Tensor, nn

from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.reconstruction.dlg import IDLG
from ppbench.attacks.reconstruction.ig import IG
from ppbench.attacks.reconstruction.peel import (
    RECTIFIED,
    ConvBlock,
    KnownOutput,
    Peel,
    PeeledLayer,
    Spectrum,
    chain_of,
    cut_small,
    inner_inputs,
    opponent_variation,
    opponents,
    tiled,
    untiled,
)
from ppbench.attacks.reconstruction.stages import Window
from ppbench.base.tree import Params
from ppbench.federation.plan import Local, Plan
from ppbench.federation.wire import Slot
from ppbench.nets.net import initial, net_spec

sys.path.insert(0, str(Path(__file__).parent))
SLOT = Slot(0, 0)


class Quick(nn.Module):
    """The network of Flower's quickstart, its layers called one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.pool, self.conv2 = nn.Conv2d(3, 6, 5), nn.MaxPool2d(2, 2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x))).view(-1, 400)
        out: Tensor = self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))
        return out


class Skips(Quick):
    """Adds its first layer's output to itself, shifted: no chain."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = self.pool(x + x.roll(1, 2))
        out: Tensor = self.fc3(F.relu(self.fc2(F.relu(self.fc1(self.pool(F.relu(self.conv2(x))).view(-1, 400))))))
        return out


class Overlaps(Quick):
    """Its windows overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(3, 2, padding=1)


def plan_of(model: str, shape: tuple[int, int, int] = (3, 32, 32)) -> Plan:
    return Plan(net_spec(model, shape, 10, {}), 1, Local("gradient"))


def sent(plan: Plan, x: Tensor, label: int) -> tuple[Params, Params]:
    """Return initial weights, and the gradient of one example at them, float32."""
    params = initial(plan.spec, 0)
    y = F.one_hot(torch.tensor([label]), 10).float()
    return params, batch_gradient(plan, params, x, y)


def smooth(seed: int) -> Tensor:
    """Return an image [1, 3, 32, 32] in the range 0 to 1, as smooth as photographs are."""
    rows, columns = torch.fft.fftfreq(32)[:, None], torch.fft.rfftfreq(32)
    falls = 1 / (rows.square() + columns.square()).sqrt().clamp(min=1 / 32) ** 2
    grey, color = (
        torch.fft.irfft2(torch.fft.rfft2(torch.randn(k, 32, 32, generator=seeded(seed + k))) * falls, s=(32, 32))
        for k in (1, 3)
    )
    image = grey / grey.std() + 0.3 * color / color.std()
    return (0.5 + 0.2 * image).clamp(0, 1)[None]


def decibels(guess: Guess, truth: Tensor) -> float:
    return float(-10 * (guess.x - truth).square().mean().log10())


# -- what it reads off a network ---------------------------------------------------------------------------------------
def test_a_network_whose_layers_are_called_one_by_one_is_read_as_it_runs() -> None:
    chain = chain_of(plan := plan_of("test_peel:Quick"), initial(plan.spec, 0))
    assert chain is not None and chain.weight == "features.fc1.weight"
    first, second = chain.stages
    assert (first.inputs, first.outputs, first.side) == ((3, 32, 32), (6, 14, 14), 2)
    assert (second.inputs, second.outputs, second.name) == ((6, 14, 14), (16, 5, 5), "features.conv2.weight")


def test_layers_in_a_sequence_are_read_the_same_way() -> None:
    chain = chain_of(plan := plan_of("cnn", (1, 8, 8)), initial(plan.spec, 0))
    assert chain is not None and [block.window.padding for block in chain.stages] == [(1, 1), (1, 1)]
    assert (chain.weight, chain.bias) == ("head.weight", "head.bias")


@pytest.mark.parametrize("model", ["test_peel:Skips", "test_peel:Overlaps", "lenet", "mlp", "resnet20", "vgg16"])
def test_what_is_no_chain_of_blocks_is_not_attacked(model: str) -> None:
    """Sums of layers, overlapping windows, nothing that linear systems cannot solve, no convolutions, batch norm."""
    assert not Peel().suits(plan_of(model))
    assert Peel().suits(plan_of("test_peel:Quick"))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(1, 3), st.integers(3, 9), st.integers(3, 9), st.integers(0, 99))
def test_tiles_hold_what_pooling_sees_and_go_back_to_their_places(side: int, high: int, wide: int, seed: int) -> None:
    z = torch.randn(2, 3, high, wide, generator=seeded(seed))
    block = ConvBlock(
        "w", None, Window((1, 1), (1, 1)), side, (1, high, wide), (3, high, wide), (3, high // side, wide // side)
    )
    tiles = tiled(block, z)
    assert torch.equal(tiles.amax(-1), F.max_pool2d(z, side))
    inside = torch.zeros_like(z)
    inside[..., : high // side * side, : wide // side * side] = 1
    assert torch.equal(untiled(block, tiles, (high, wide)), z * inside)


# -- its parts ----------------------------------------------------------------------------------------------------
def second_layer(image: Tensor) -> tuple[PeeledLayer, Tensor]:
    """Return the second block of the quick network with what an attacker knows of it, and its true input."""
    plan = plan_of("test_peel:Quick")
    params, update = sent(plan, image, 3)
    chain = chain_of(plan, params)
    assert chain is not None
    first, block = chain.stages
    whole = {name: value.double() for name, value in params.items()}
    given_ = F.max_pool2d(F.relu(F.conv2d(image.double(), whole[first.name], whole[str(first.bias)])), 2)
    values = F.max_pool2d(F.relu(F.conv2d(given_, whole[block.name], whole[str(block.bias)])), 2)
    back = (update["features.fc1.bias"].double() @ whole["features.fc1.weight"]).view_as(values)
    known = KnownOutput(values, back, torch.ones_like(values, dtype=torch.bool))
    slope = update[block.name].double().flatten(1)[None]
    return PeeledLayer(block, whole[block.name], whole[str(block.bias)], known, slope, RECTIFIED), given_


def test_at_the_truth_nothing_is_left_and_the_simulated_gradient_is_torchs() -> None:
    layer, truth = second_layer(smooth(0))
    assert float(layer.mismatch(truth, torch.tensor([0]), 0)) < 1e-10
    assert float(layer.mismatch(truth.roll(1, -1), torch.tensor([0]), 0)) > 0.1


@pytest.mark.nightly
def test_inner_activations_are_exact() -> None:
    """1,176 numbers of which no place is known, from 2,400 entries of a gradient and 400 features."""
    layer, truth = second_layer(smooth(1))
    result, seen, spent = inner_inputs(layer, seeded(), 1000)
    assert float(((result - truth) * seen).norm() / truth.norm()) < 1e-4
    assert float(seen.double().mean()) > 0.9 and int(spent) <= 1000


def test_a_cotangent_below_is_what_autograd_sends_there() -> None:
    layer, truth = second_layer(smooth(2))
    leaf = truth.clone().requires_grad_()
    out = F.max_pool2d(F.relu(layer.convolved(leaf)), 2)
    (expected,) = torch.autograd.grad((out * layer.known.cotangents).sum(), leaf)
    below = layer.below(truth, torch.ones_like(truth, dtype=torch.bool))
    assert torch.allclose(below.cotangents, expected, atol=1e-12)
    assert torch.equal(below.fires, truth > 1e-6 * truth.max())


def test_small_outputs_are_cut_victim_by_victim() -> None:
    values = torch.tensor([[1.0, 0.2, 0.0], [10.0, 0.2, 5.0]]).view(2, 1, 1, 3)
    assert cut_small(values, torch.tensor([0.1, 0.1])).flatten(1).tolist() == [
        [1.0, pytest.approx(0.2), 0.0],
        [10.0, 0.0, 5.0],
    ]


def test_axes_of_color_are_orthogonal_and_flat_images_do_not_vary() -> None:
    assert torch.allclose(opponents(3) @ opponents(3).T, torch.eye(3, dtype=torch.float64))
    flat = torch.full((1, 3, 8, 8), 0.7, dtype=torch.float64)
    assert float(opponent_variation(flat, 1.0)) < float(opponent_variation(smooth(0).double(), 1.0))


def test_every_image_has_a_spectrum() -> None:
    """The parametrization rules nothing out: of random numbers, images of full rank."""
    space = Spectrum((1, 4, 4), 0.5, 1.0)
    basis = torch.eye(64, dtype=torch.float64).view(64, *space.start)
    made = (space.images(basis) - 0.5).flatten(1)
    assert int(torch.linalg.matrix_rank(made)) == 16


# -- the whole ----------------------------------------------------------------------------------------------------
def guessed(attack: Peel | IDLG | IG, plan: Plan, params: Params, update: Params) -> Guess:
    (guess,) = attack.run(uploads(plan, params, [update]), [Challenge((SLOT,), 1)], seeded())
    return guess


@pytest.mark.nightly
def test_an_image_in_flowers_quickstart_network_is_rebuilt_where_searches_fail() -> None:
    plan, truth = plan_of("test_peel:Quick"), smooth(3)
    params, update = sent(plan, truth, 7)
    guess = guessed(Peel(budget=1400), plan, params, update)
    assert guess.y.tolist() == [7]
    value, others = decibels(guess, truth), [guessed(a(budget=200), plan, params, update) for a in (IDLG, IG)]
    assert value > 25
    assert max(decibels(other, truth) for other in others) < value - 6


def test_a_digit_in_a_sequence_of_layers_is_rebuilt() -> None:
    plan = plan_of("cnn", (1, 8, 8))
    truth = torch.tensor(load_digits().images[11] / 16)[None, None].float()
    guess = guessed(Peel(budget=1000), plan, *sent(plan, truth, 1))
    assert decibels(guess, truth) > 20


class Rising(nn.Module):
    """Two blocks whose activations rise everywhere, with the pooling before or behind them."""

    def __init__(self, activation: str = "tanh", pool_first: bool = False) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for inputs in (1, 32):
            pair = [{"tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "leaky_relu": nn.LeakyReLU}[activation](), nn.MaxPool2d(2)]
            parts += [nn.Conv2d(inputs, 32, 3, padding=1), *(pair[::-1] if pool_first else pair)]
        self.layers = nn.Sequential(*parts, nn.Flatten(), nn.Linear(128, 10))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


@pytest.mark.nightly
@pytest.mark.parametrize("activation", ["tanh", "sigmoid", "leaky_relu"])
def test_units_that_always_fire_are_read_too(activation: str) -> None:
    spec = net_spec("test_peel:Rising", (1, 8, 8), 10, {"activation": activation, "pool_first": activation == "tanh"})
    plan, truth = Plan(spec, 1, Local("gradient")), torch.tensor(load_digits().images[11] / 16)[None, None].float()
    assert decibels(guessed(Peel(budget=1000), plan, *sent(plan, truth, 1)), truth) > 20


def test_noise_and_hidden_layers_and_batches_get_a_guess_all_the_same() -> None:
    plan, truth = plan_of("cnn", (1, 8, 8)), torch.rand(1, 1, 8, 8, generator=seeded())
    params, update = sent(plan, truth, 1)
    noise = {name: torch.randn(value.shape, generator=seeded(1)) for name, value in update.items()}
    hidden = {name: value for name, value in update.items() if name != "features.0.weight"}
    for some in (noise, hidden):
        guess = guessed(Peel(budget=50), plan, params, some)
        assert guess.x.shape == (1, 1, 8, 8) and bool(guess.x.isfinite().all())
    (guess,) = Peel().run(uploads(plan, params, [update]), [Challenge((SLOT,), 2)], seeded())
    assert guess.x.shape == (2, 1, 8, 8) and guess.y.shape == (2,)
