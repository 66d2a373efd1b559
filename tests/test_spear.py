"""SPEAR: batches are exact where the algebra tells them, and what it cannot tell is said, cheaply."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from observations import batch_gradient, seeded, uploads
from sklearn.datasets import load_digits
from torch import Tensor

from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.reconstruction.directions import PublicLayer
from ppbench.attacks.reconstruction.spear import Separation, Spear, SpearFeatures, feature_bounds, separate, tapped
from ppbench.base.tree import Params
from ppbench.federation.plan import Local, Plan
from ppbench.federation.wire import Slot
from ppbench.nets.net import OptionValue, initial, net_spec

DRAWS = 40_000


def plan_of(model: str = "mlp", classes: int = 10, **options: OptionValue) -> Plan:
    return Plan(net_spec(model, (1, 8, 8), classes, options), 1, Local("gradient"))


def digits(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return images and one-hot labels, float64."""
    data = load_digits()
    some = torch.randperm(len(data.images), generator=seeded(seed))[:count]
    x = torch.tensor(data.images, dtype=torch.float64)[some, None] / 16
    return x, torch.nn.functional.one_hot(torch.tensor(data.target)[some], 10).double()


def sent(plan: Plan, x: Tensor, y: Tensor, dtype: torch.dtype, seed: int = 0) -> tuple[Params, Params]:
    """Return initial weights, and the gradient of the batch at them, in `dtype`."""
    params = {n: v.to(dtype) for n, v in initial(plan.spec, seed).items()}
    return params, batch_gradient(plan, params, x, y)


def guessed(plan: Plan, params: Params, update: Params, count: int, draws: int = DRAWS, seed: int = 0) -> Guess:
    (guess,) = Spear(draws=draws).run(uploads(plan, params, [update]), [Challenge((Slot(0, 0),), count)], seeded(seed))
    assert guess.x.shape == (count, *plan.spec.shape) and guess.x.dtype == torch.float32
    assert guess.y.shape == (count,) and guess.y.dtype == torch.int64
    return guess


def decibels(guess: Tensor, truth: Tensor) -> Tensor:
    """Return [N] dB of each true image to the nearest guess, at most 150."""
    errors = torch.cdist(truth.flatten(1).double(), guess.flatten(1).double()) ** 2 / truth[0].numel()
    return -10 * errors.min(1).values.clamp(min=1e-15).log10()


# -- the separation itself ------------------------------------------------------------------------------------------
def layer_gradient(count: int, seed: int, units: int = 96, width: int = 30) -> tuple[PublicLayer, Tensor, Tensor]:
    """Return a random layer, inputs in the unit box [B, D], and cotangents [m, B] of a random linear head."""
    g = seeded(seed)
    draw = {"generator": g, "dtype": torch.float64}
    weight, bias = torch.randn(units, width, **draw) / width**0.5, 0.3 * torch.randn(units, **draw)
    x = torch.rand(count, width, **draw)
    fires = x @ weight.T + bias > 0
    back = torch.randn(count, 10, **draw) @ torch.randn(10, units, **draw)
    return PublicLayer(weight, bias, 0.0, 1.0), x, (fires * back).T


def separated(layer: PublicLayer, x: Tensor, delta: Tensor, draws: int = DRAWS, **changes: Tensor) -> Separation | None:
    weight, bias = changes.get("weight", delta @ x), changes.get("bias", delta.sum(1))
    return separate(weight, bias, layer, len(x), seeded(), draws)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(2, 6), st.integers(0, 10_000))
def test_inputs_and_cotangents_of_small_batches_are_exact(count, seed):
    layer, x, delta = layer_gradient(count, seed)
    recovered = separated(layer, x, delta)
    assert recovered is not None and bool((recovered.agreement == 1).all())
    order = torch.cdist(x, recovered.inputs).argmin(1)
    assert sorted(order.tolist()) == list(range(count))
    assert float((recovered.inputs[order] - x).abs().max()) < 1e-6
    assert float((recovered.cotangents[:, order] - delta).abs().max()) < 1e-6 * float(delta.abs().max())


def test_equal_inputs_are_one_example():
    layer, x, delta = layer_gradient(4, 1)
    x, delta = torch.cat([x, x[:1]]), torch.cat([delta, 0.5 * delta[:, :1]], 1)
    recovered = separated(layer, x, delta)
    assert recovered.inputs.shape == (4, 30)
    assert float(torch.cdist(x, recovered.inputs).min(1).values.max()) < 1e-6


def test_linearly_dependent_inputs_are_not_told():
    """The middle of two others: the gradient has rank 2, and no basis of two fires what three inputs do."""
    layer, x, delta = layer_gradient(3, 2)
    x[2] = (x[0] + x[1]) / 2
    recovered = separated(layer, x, delta, 5000)
    assert recovered is None or float(recovered.agreement.mean()) < 1


@pytest.mark.parametrize("size", [0.3, 1.0, 100.0])
def test_noise_has_no_rank_and_costs_no_draw(size):
    layer, x, delta = layer_gradient(4, 3)
    noise = size * torch.randn(delta.shape[0], 31, generator=seeded(5), dtype=torch.float64)
    weight, bias = delta @ x + noise[:, :-1], delta.sum(1) + noise[:, -1]
    assert separated(layer, x, delta, weight=weight, bias=bias) is None


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
def test_gradients_of_one_number_tell_nothing(value):
    layer, x, delta = layer_gradient(4, 4)
    full = torch.full((len(delta), 31), value, dtype=torch.float64)
    assert separated(layer, x, delta, weight=full[:, :-1], bias=full[:, -1]) is None


def test_more_examples_than_units_can_tell_end_within_the_draws():
    layer, x, delta = layer_gradient(24, 6, units=40)
    recovered = separated(layer, x, delta, 12_000)
    assert recovered is None or (recovered.draws <= 12_000 + 5_000 and float(recovered.agreement.mean()) < 1)


# -- the attack -----------------------------------------------------------------------------------------------------
@pytest.mark.nightly
@pytest.mark.parametrize(("dtype", "count", "least"), [(torch.float64, 8, 120), (torch.float32, 8, 40)])
def test_batches_of_digits_are_exact_with_their_labels(dtype, count, least):
    plan, shown, total = plan_of(), 0, 0
    for seed in range(3):
        x, y = digits(count, seed)
        guess = guessed(plan, *sent(plan, x, y, dtype, seed), count)
        assert sorted(guess.y.tolist()) == sorted(y.argmax(1).tolist())
        order = torch.cdist(x.flatten(1), guess.x.flatten(1).double()).argmin(1)
        near = decibels(guess.x, x) > least
        assert guess.y[order][near].tolist() == y.argmax(1)[near].tolist()
        shown, total = shown + int(near.sum()), total + count
    assert shown >= 0.8 * total


def test_two_hidden_layers_and_a_larger_batch():
    plan = plan_of(hidden="128,32")
    x, y = digits(12, 7)
    guess = guessed(plan, *sent(plan, x, y, torch.float32), 12)
    assert int((decibels(guess.x, x) > 40).sum()) >= 10
    assert guess.confidence < 1e-6


def test_a_duplicate_is_told_with_its_label_and_number():
    plan = plan_of()
    x, y = digits(4, 3)
    x, y = torch.cat([x, x[1:2], x[1:2]]), torch.cat([y, y[1:2], y[1:2]])
    guess = guessed(plan, *sent(plan, x, y, torch.float64), 6)
    assert float(decibels(guess.x, x).min()) > 100
    assert sorted(guess.y.tolist()) == sorted(y.argmax(1).tolist())
    copies = [int((torch.cdist(guess.x.flatten(1).double(), one.flatten()[None]) < 1e-4).sum()) for one in x]
    assert copies == [1, 3, 1, 1, 3, 3]


def test_one_seed_one_guess_and_draws_bound_it():
    plan = plan_of()
    x, y = digits(16, 1)
    params, update = sent(plan, x, y, torch.float32)
    once, again = (guessed(plan, params, update, 16, draws=5000) for _ in range(2))
    assert torch.equal(once.x, again.x) and once.confidence == again.confidence


def test_noise_and_hidden_entries_get_what_the_analytic_attack_says():
    plan = plan_of()
    x, y = digits(8)
    params, update = sent(plan, x, y, torch.float32)
    g = seeded(3)
    noisy = {n: v + 0.1 * torch.randn(v.shape, generator=g) for n, v in update.items()}
    masked = {n: torch.where(torch.rand(v.shape, generator=g) < 0.1, v, torch.nan) for n, v in update.items()}
    for bad in (noisy, masked, {n: v * torch.nan for n, v in update.items()}):
        guess = guessed(plan, params, bad, 8)
        assert guess.confidence is None
        assert not bool((decibels(guess.x, x) > 30).any())


def test_where_it_suits():
    assert Spear().suits(plan_of()) and Spear().suits(plan_of(hidden="32,16"))
    for plan in (plan_of(activation="tanh"), plan_of(activation="leaky_relu"), plan_of(hidden=""), plan_of("dlnet")):
        assert not Spear().suits(plan)


def test_layers_without_biases_are_left_to_the_analytic_attack():
    plan = plan_of(bias=False)
    x, y = digits(4)
    guess = guessed(plan, *sent(plan, x, y, torch.float64), 4)
    assert guess.confidence is None and guess.evaluations == 1


def test_inputs_in_another_range():
    plan = replace(plan_of(), data_range=(-1.0, 1.0))
    x, y = digits(6, 2)
    x = 2 * x - 1
    guess = guessed(plan, *sent(plan, x, y, torch.float32), 6)
    assert int((decibels(guess.x, x) > 40).sum()) == 6


# -- features behind convolutions -----------------------------------------------------------------------------------
def test_features_behind_convolutions_are_exact_and_give_images():
    """Photographs' smoothness stood in for by low frequencies; four at once, float32, from noise-free uploads."""
    spec = net_spec("cnn", (3, 16, 16), 10, {"widths": "32", "hidden": "64", "pool": "avg"})
    plan = Plan(spec, 1, Local("gradient"))
    coarse = torch.rand(4, 3, 4, 4, generator=seeded(2), dtype=torch.float64)
    x = torch.nn.functional.interpolate(coarse, size=16, mode="bicubic").clamp(0, 1)
    y = torch.nn.functional.one_hot(torch.tensor([3, 1, 4, 1]), 10).double()
    params, update = sent(plan, x, y, torch.float32)
    layer = tapped(plan)
    known = PublicLayer(params[layer.weight].double(), params[layer.bias].double(), 0.0, math.inf)
    recovered = separate(update[layer.weight], update[layer.bias], known, 4, seeded(), DRAWS)
    flat = plan.net.flat_features({n: v.double() for n, v in params.items()}, x)
    assert float((torch.cdist(flat, recovered.inputs).min(1).values / flat.norm(dim=1)).max()) < 1e-4
    view = uploads(plan, params, [update])
    (guess,) = SpearFeatures(budget=80).run(view, [Challenge((Slot(0, 0),), 4)], seeded())
    assert float(decibels(guess.x, x).min()) > 20
    assert sorted(guess.y.tolist()) == [1, 1, 3, 4] and guess.evaluations <= 88


def test_features_are_bounded_by_what_comes_before():
    assert feature_bounds(plan_of("cnn", hidden="16")) == (0.0, math.inf)
    assert feature_bounds(plan_of("cnn", hidden="16", activation="tanh")) == (-math.inf, math.inf)
    assert SpearFeatures().suits(plan_of("cnn", hidden="16"))
    for plan in (plan_of(), plan_of("cnn"), plan_of("dlnet"), plan_of("cnn", hidden="16", activation="tanh")):
        assert not SpearFeatures().suits(plan)


def test_behind_flat_completes_flat_features():
    net, plan = plan_of("cnn", hidden="16,8").net, plan_of("cnn", hidden="16,8")
    params, x = initial(plan.spec, 0), torch.rand(2, 1, 8, 8, generator=seeded())
    assert torch.equal(net.behind_flat(params, net.flat_features(params, x)), net.features(params, x))
