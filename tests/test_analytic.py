"""Analytic inversion of a first linear layer: exact where algebra says so, silent where it says nothing."""

import math
from dataclasses import replace

import pytest
import torch
from daily import all_but_nightly
from hypothesis import given, settings
from hypothesis import strategies as st
from observations import batch_gradient, seeded, uploads
from sklearn.datasets import load_digits
from torch import Tensor

from ppbench.adversary.attack import Attack, Challenge, Guess
from ppbench.attacks.reconstruction.analytic import (
    AnalyticInversion,
    LayerRows,
    first_layer,
    leading_direction,
    mean_image,
    recurring_rows,
)
from ppbench.base.tree import Params
from ppbench.defenses.none import NoDefense
from ppbench.federation.evidence import Evidence, simulation
from ppbench.federation.plan import Local, Plan
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER, Slot
from ppbench.nets.net import LossName, OptionValue, initial, net_spec

SLOT = Slot(0, 0)
GREY = 0.1  # how far a grey start image lies from .5, at most (5 standard deviations)


def digits(count: int) -> Tensor:
    return torch.tensor(load_digits().images[:count], dtype=torch.float32)[:, None] / 16


def color(count: int) -> Tensor:
    return torch.rand(count, 3, 32, 32, generator=seeded(1))


def plan_of(x: Tensor, loss: LossName = "cross_entropy", classes: int = 10, **options: OptionValue) -> Plan:
    return Plan(net_spec("mlp", tuple(x.shape[1:]), classes, options), 1, Local("gradient"), loss=loss)


def targets(plan: Plan, count: int) -> Tensor:
    """Return one-hot labels 0, 3, 6, ... modulo the classes, or for one output numbers."""
    if plan.spec.classes == 1:
        return torch.linspace(-1, 2, count)[:, None] if count > 1 else torch.tensor([[0.7]])
    return torch.nn.functional.one_hot(torch.arange(count) * 3 % plan.spec.classes, plan.spec.classes).float()


def gradient_of(plan: Plan, x: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Params, Params]:
    """Return initial weights and the mean gradient at them, in `dtype`."""
    params = {n: v.to(dtype) for n, v in initial(plan.spec, 0).items()}
    return params, batch_gradient(plan, params, x, targets(plan, len(x)))


def attack(view: View, batch: int = 1, seed: int = 0, y: Tensor | None = None, by: Attack | None = None) -> Guess:
    (guess,) = (by or AnalyticInversion()).run(view, [Challenge((SLOT,), batch, y=y)], seeded(seed))
    assert guess.x.shape == (batch, *view.plan.spec.shape) and guess.x.dtype == torch.float32
    assert guess.y.shape == (batch,) and guess.y.dtype == torch.int64
    assert guess.evaluations >= 1
    return guess


def invert(plan: Plan, x: Tensor, dtype: torch.dtype = torch.float64, noise: float = 0.0) -> Guess:
    params, observed = gradient_of(plan, x, dtype)
    g = seeded(9)
    noisy = {n: v + noise * torch.randn(v.shape, generator=g, dtype=dtype) for n, v in observed.items()}
    return attack(uploads(plan, params, [noisy]), len(x))


def psnr(guess: Tensor, truth: Tensor) -> float:
    """Return dB of the guess as it is, without the cap of the scorer."""
    error = float(((guess.double() - truth.double()) ** 2).mean())
    return math.inf if error == 0 else -10 * math.log10(error)


def exact(guess: Tensor, truth: Tensor, least: float = 100.0) -> int:
    """Return how many of the true images are among the guessed ones to `least` dB."""
    return sum(any(psnr(guesses, image) > least for guesses in guess) for image in truth)


def guess_of(evidence: Evidence, plan: Plan, budget: int = 2000) -> Guess:
    """Return the guess of the attack with `evidence` in place of what it would read from a view."""

    class Told(AnalyticInversion):
        def evidence(self, view: View) -> list[Evidence]:
            return [evidence]

    return attack(View("server/1", SERVER, plan, NoDefense(), (), ()), by=Told(budget=budget))


def is_grey(guess: Guess) -> bool:
    return float((guess.x - 0.5).abs().max()) < GREY and guess.confidence is None


# -- one example -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("loss", ["cross_entropy", "squared"])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("images", [digits, color])
def test_one_example_and_a_layer_with_biases_is_exact(images, activation, loss):
    x = images(1)
    for hidden, dtype, least in (("64,32", torch.float64, 100), ("64,32", torch.float32, 60), ("", torch.float32, 60)):
        plan = plan_of(x, loss, hidden=hidden, activation=activation)
        guess = invert(plan, x, dtype)
        assert psnr(guess.x, x) > least
        assert guess.y.tolist() == [0]
        assert guess.confidence < 1e-10
        assert guess.evaluations <= 10


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("loss", ["cross_entropy", "squared"])
@pytest.mark.parametrize("images", [digits, lambda n: 0.3 * digits(n), color])
def test_one_example_without_biases_is_found_by_direction_and_scale(images, loss, dtype):
    x = images(1)
    guess = invert(plan_of(x, loss, hidden="64,32", bias=False), x, dtype)
    assert psnr(guess.x, x) > 60
    assert guess.y.tolist() == [0]
    assert guess.confidence < 1e-6
    assert guess.evaluations <= 400


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-1.0, 0.0)])
def test_without_biases_the_range_or_the_mismatch_gives_the_sign(low, high):
    x = digits(1) * (high - low) + low
    plan = replace(plan_of(x, "squared", hidden="64", bias=False), data_range=(low, high))
    assert psnr(invert(plan, x).x, x) > 60


def test_one_output_with_an_unknown_target():
    """With biases exact. Without any the gradient holds scale times residual: the direction is exact, nothing more."""
    x = 0.8 * digits(1)
    plan = plan_of(x, "squared", classes=1, hidden="64")
    guess = invert(plan, x)
    assert psnr(guess.x, x) > 100
    assert guess.y.tolist() == [0]
    assert guess.confidence < 1e-20
    bare = invert(plan_of(x, "squared", classes=1, hidden="64", bias=False), x)
    cosine = torch.nn.functional.cosine_similarity(bare.x.flatten().double(), x.flatten().double(), dim=0)
    assert float(1 - cosine) < 1e-12
    assert float(bare.x.max()) == pytest.approx(1.0)


def test_granted_labels_are_used():
    x = digits(1)
    plan = plan_of(x, hidden="16")
    granted = torch.nn.functional.one_hot(torch.tensor([[7]]), 10).float()
    params, observed = gradient_of(plan, x, torch.float64)
    guess = attack(uploads(plan, params, [observed]), y=granted)
    assert guess.y.tolist() == [7]
    assert guess.evaluations == 1
    assert psnr(guess.x, x) > 100


@pytest.mark.parametrize(("batch", "options", "grey"), [(4, {"activation": "tanh"}, False), (2, {"bias": False}, True)])
def test_batches_behind_smooth_activations_or_without_biases_hide_their_images(batch, options, grey):
    """Mixtures only in the first case, a start image in the second."""
    x = digits(batch)
    guess = invert(plan_of(x, hidden="512", **options), x)
    assert exact(guess.x, x, 40) == 0
    assert is_grey(guess) is grey


# -- batches ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("images", [digits, color])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_wide_layer_shows_examples_of_a_batch_exactly(images, dtype):
    x = images(4)
    guess = invert(plan_of(x, hidden="512,32"), x, dtype)
    assert exact(guess.x, x) >= 3
    assert guess.confidence is None


def test_the_rest_of_a_batch_gets_one_mean_image():
    """Twelve digits and 256 units: some are exact, the others get a mean that is nearer to them than grey is."""
    x = digits(12)
    guess = invert(plan_of(x, hidden="256"), x)
    hidden = [image for image in x if not exact(guess.x, image[None])]
    rest = [image for image in guess.x if not exact(x, image[None])]
    assert 1 <= len(rest) == len(hidden) < 12
    assert all(torch.equal(image, rest[0]) for image in rest)
    gains = [psnr(rest[0], image) - psnr(torch.full_like(image, 0.5), image) for image in hidden]
    assert sum(gains) / len(gains) > 1


def test_recurring_mixtures_of_a_single_output_are_no_examples():
    """All units that two examples fire show one mixture of them, many times: it lies between the two and is dropped."""
    x = digits(3).flatten(1).double()
    residual = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    fired = torch.tensor([[1, 1, 0]] * 9 + [[0, 1, 1]] * 9 + [[1, 1, 1]] * 9 + [[1, 0, 0], [0, 1, 0], [0, 0, 1]] * 2)
    delta = fired * residual * torch.linspace(1, 2, len(fired))[:, None]
    rows = LayerRows(delta @ x, delta.sum(1), torch.ones(len(fired), 64), torch.ones(len(fired)))
    rows = replace(rows, seen=rows.seen.double(), seen_bias=rows.seen_bias.double())
    recovered = recurring_rows(rows, 3, (0.0, 1.0))
    assert len(recovered.images) == 3
    assert exact(recovered.images, x) == 3
    assert int(recovered.members.sum()) == 6


def test_a_recurring_image_outside_the_data_range_is_no_example():
    rows = LayerRows(
        torch.tensor([[2.0, 0.5], [4.0, 1.0], [0.2, 0.4], [0.1, 0.2]]).double(),
        torch.tensor([1.0, 2.0, 1.0, 0.5]).double(),
        torch.ones(4, 2).double(),
        torch.ones(4).double(),
    )
    recovered = recurring_rows(rows, 2, (0.0, 1.0))
    assert recovered.images.tolist() == [[pytest.approx(0.2), pytest.approx(0.4)]]
    assert recovered.members.tolist() == [False, False, True, True]


# -- algebra ---------------------------------------------------------------------------------------------------------
@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 9), st.floats(0, 0.6))
@settings(max_examples=60)
def test_least_squares_finds_the_factor_of_what_is_seen(seed, units, pixels, hide):
    g = seeded(seed)
    x = torch.rand(pixels, generator=g, dtype=torch.float64) + 0.1
    bias = torch.randn(units, generator=g, dtype=torch.float64)
    weight = bias[:, None] * x
    seen_weight = (torch.rand(units, pixels, generator=g) >= hide).double()
    recovered = mean_image(LayerRows(weight * seen_weight, bias, seen_weight, torch.ones(units).double()))
    visible = seen_weight.any(0)
    if not visible.any():
        assert recovered is None
        return
    assert torch.allclose(recovered[visible], x[visible], rtol=1e-9)


@given(st.integers(0, 2**31), st.floats(0, 0.4))
@settings(max_examples=30)
def test_the_direction_is_that_of_a_singular_vector_also_with_hidden_entries(seed, hide):
    g = seeded(seed)
    x = torch.rand(40, generator=g, dtype=torch.float64) + 0.1
    left = torch.randn(20, generator=g, dtype=torch.float64)
    seen_weight = (torch.rand(20, 40, generator=g) >= hide).double()
    weight = left[:, None] * x * seen_weight
    recovered = leading_direction(LayerRows(weight, torch.zeros(20).double(), seen_weight, torch.zeros(20).double()))
    assert float((recovered @ x).abs() / x.norm()) == pytest.approx(1, abs=1e-8)


@pytest.mark.parametrize("bias", [True, False])
def test_entries_that_were_not_sent_or_are_not_finite_are_left_out(bias):
    x = digits(1)
    plan = plan_of(x, "squared", hidden="256", bias=bias)
    params, observed = gradient_of(plan, x, torch.float64)
    g = seeded()
    weight = {n: (torch.rand(v.shape, generator=g) < 0.4).double() for n, v in observed.items()}
    sent = {n: v * weight[n] for n, v in observed.items()}
    assert psnr(guess_of(Evidence((SLOT,), sent, simulation(plan, params), params, weight), plan).x, x) > 60
    observed["features.1.weight"][3, 5] = torch.nan
    observed["features.1.weight"][7] = torch.inf
    observed["head.weight"][0, 0] = torch.nan
    if bias:
        guess = attack(uploads(plan, params, [observed]))
        assert psnr(guess.x, x) > 100
        assert guess.confidence is None


# -- nulls and noise -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("classes", all_but_nightly([1, 10], [1]))
def test_null_noise_gives_no_image(bias, batch, classes):
    x = digits(1)
    plan = plan_of(x, "squared", classes=classes, hidden="32", bias=bias)
    params = initial(plan.spec, 0)
    for seed in range(20):
        g = seeded(seed)
        observed = {n: 1e-3 * torch.randn(v.shape, generator=g) for n, v in params.items()}
        assert is_grey(attack(uploads(plan, params, [observed]), batch, seed))


@pytest.mark.parametrize("bias", all_but_nightly([True, False], [False]))
def test_noise_is_averaged_over_the_units(bias):
    """More units, better image: 64 and 1024 of them, with noise of a tenth and a fifth of the layer's gradient."""
    x, result = digits(1), []
    for hidden in (64, 1024):
        plan = plan_of(x, hidden=hidden, bias=bias)
        _, observed = gradient_of(plan, x, torch.float64)
        size = float(observed["features.1.weight"].square().mean().sqrt())
        result.append([psnr(invert(plan, x, noise=share * size).x, x) for share in (0.1, 0.2)])
    assert min(wide - narrow for narrow, wide in zip(*result, strict=True)) > 4
    assert min(result[0]) > 20


# -- which networks, budget, determinism -----------------------------------------------------------------------------
def test_it_suits_networks_that_begin_with_a_linear_layer():
    x = digits(1)
    assert AnalyticInversion().suits(plan_of(x, hidden="8"))
    assert AnalyticInversion().suits(plan_of(x, hidden=""))
    assert not AnalyticInversion().suits(Plan(net_spec("dlnet", (1, 8, 8), 10), 1))
    assert not AnalyticInversion().suits(Plan(net_spec("lenet", (1, 28, 28), 10), 1))
    assert first_layer(plan_of(x, hidden="8", bias=False)).bias is None
    assert first_layer(plan_of(x, hidden="")).weight == "head.weight"
