"""What `ppbench.invert` says of its own answer: the factor of a gradient, a planted batch, and never more."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import gradient_cases
import numpy as np
import pytest
import torch
from daily import every_third
from gradient_cases import SHAPE, case, network
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

import ppbench
from ppbench.base.errors import UsageError
from ppbench.base.tree import Params
from ppbench.federation.plan import Data
from ppbench.nets.model_object import held_network
from ppbench.run.inversion_result import Inverted, Planted, mix_with_noise
from ppbench.run.user_gradients import scale_of


def named(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradient of a loss by name."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))


def ours(model: nn.Module, gradient: dict[str, Tensor]) -> tuple[Params, Params]:
    """Return a gradient and the weights by the bench's own names."""
    state = held_network(model, SHAPE)
    return {name: gradient[own] for name, own in state.names.items()}, dict(state.spec.start)


def answer(mismatch: float | None = 1e-10, **fields: Any) -> Inverted:
    return Inverted(torch.zeros(1, *SHAPE), torch.tensor([0]), mismatch, 10, **fields)


# -- a factor ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("factor", [2.0, 1024.0, 0.01, -0.05, 0.0371])
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_the_last_layer_tells_the_factor_of_a_gradient(batch: int, factor: float, digits: Data) -> None:
    """Of a sum, a scaled loss, a rate left in, a change of weights, clipping; with labels and without."""
    model, x, y = network("norm", 1), digits.x[10 : 10 + batch], digits.y[10 : 10 + batch].argmax(1)
    gradient, start = ours(model, named(model, cross_entropy(model(x), y)))
    scaled = {name: factor * value for name, value in gradient.items()}
    for labels in (None, one_hot(y, 10).float()):
        assert scale_of(scaled, start, batch, labels) == pytest.approx(factor, rel=1e-5)
        assert scale_of(gradient, start, batch, labels) == 1.0


@pytest.mark.parametrize("batch", [1, 3])
def test_a_gradient_that_no_factor_explains_keeps_a_factor_of_one(batch: int, digits: Data) -> None:
    """Weight decay, label smoothing, noise, pruning, another batch size, and layers that are not all trained."""
    model, x, y = network("sigmoid", 0), digits.x[:batch], digits.y[:batch].argmax(1)
    gradient, start = ours(model, named(model, cross_entropy(model(x), y)))
    smooth, _ = ours(model, named(model, cross_entropy(model(x), y, label_smoothing=0.1)))
    draws = torch.Generator().manual_seed(0)
    noisy = {n: 0.3 * (g + 1e-2 * g.std() * torch.randn(g.shape, generator=draws)) for n, g in gradient.items()}
    pruned = {n: 0.3 * torch.where(g.abs() > g.abs().median(), g, 0.0) for n, g in gradient.items()}
    decayed = {n: 0.3 * (g + 5e-4 * start[n]) for n, g in gradient.items()}
    for other in (smooth, noisy, pruned, decayed):
        assert scale_of(other, start, batch, None) is None
    half = {name: 0.5 * value for name, value in gradient.items()}
    assert scale_of(half, start, 9, None) == 1.0 == scale_of(half, start, 100, None)
    assert scale_of(half, start, batch - 1, None) == (1.0 if batch == 1 else None)  # of fewer examples than it is of
    for lacking in ("head.bias", "head.weight"):
        assert scale_of({n: g for n, g in half.items() if n != lacking}, start, batch, None) == 1.0
    assert scale_of({n: torch.zeros_like(g) for n, g in half.items()}, start, batch, None) == 1.0


@pytest.mark.nightly
@pytest.mark.parametrize(("batch", "factor"), [(6, 6.0), (7, 7.0), (8, 8.0), (8, 1.0), (8, -0.1)])
def test_of_hardly_fewer_examples_than_classes_the_factor_is_found_too(batch: int, factor: float) -> None:
    """Not every class of the batch has a negative gradient then. With noise there is none, and the summary says so."""
    torch.manual_seed(0)
    model, x, y = perceptron(), torch.rand(batch, *SHAPE), torch.arange(batch)
    gradient, start = ours(model, named(model, cross_entropy(model(x), y)))
    assert scale_of({n: factor * g for n, g in gradient.items()}, start, batch, None) == pytest.approx(factor, rel=1e-5)
    noisy = {n: factor * (g + 1e-3 * g.std() * torch.randn_like(g)) for n, g in gradient.items()}
    assert scale_of(noisy, start, batch, None) is None
    assert answer(1e-3, unexplained=True).summary.startswith("No factor was found that makes the last layer's gradient")


def test_a_factor_is_divided_out_and_named(digits: Data) -> None:
    """1,024 is a power of two: the same bits as the plain gradient's, and the same picture."""
    model, x, y = network("tanh", 0), digits.x[:2], digits.y[:2].argmax(1)
    plain = named(model, cross_entropy(model(x), y))
    loud = {name: 1024 * value for name, value in plain.items()}
    options: dict[str, Any] = {"batch": 2, "budget": 20, "restarts": 0, "planted": False}
    one, other = (ppbench.invert(model, gradient, SHAPE, **options) for gradient in (plain, loud))
    assert torch.equal(one.x, other.x) and one.mismatch == other.mismatch
    assert (one.scale, other.scale) == (1.0, 1024.0)
    assert other.summary.startswith("The gradient is 1024 times that of the mean cross-entropy.")


def test_several_local_steps_are_inverted_where_their_making_is_known(digits: Data) -> None:
    model, x, y = network("mlp", 0), digits.x[:2], digits.y[:2].argmax(1)
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    steps = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        steps.zero_grad()
        cross_entropy(model(x), y).backward()
        steps.step()
    update = {name: start[name] - value.detach() for name, value in model.named_parameters()}
    model.load_state_dict(start)
    with pytest.raises(UsageError, match=re.escape('simulates several local steps; give training={"lr": 0.1')):
        ppbench.invert(model, update, SHAPE, y, "fedavg_inversion")
    training = {"lr": 0.5, "local_epochs": 3}
    inversion = ppbench.invert(model, update, SHAPE, y, "fedavg_inversion", training=training, budget=400)
    assert min(inversion.psnr(x)) > 30 and inversion.mismatch is not None and inversion.mismatch < 1e-8
    assert inversion.solved_mismatch is not None and inversion.scale == 1.0
    with pytest.raises(UsageError, match=re.escape("lacks the learning rate; give it")):
        ppbench.invert(model, update, SHAPE, y, "fedavg_inversion", training={"local_epochs": 3})


def test_steps_of_adam_certify_nothing_and_other_causes_are_those_of_steps(digits: Data) -> None:
    model, x, y = network("mlp", 0), digits.x[:1], digits.y[:1].argmax(1)
    signs = {name: 0.01 * value.sign() for name, value in named(model, cross_entropy(model(x), y)).items()}
    training = {"lr": 0.01, "optimizer": "adam"}
    inversion = ppbench.invert(model, signs, SHAPE, y, "fedavg_inversion", training=training, budget=30)
    assert inversion.solved_mismatch is None and inversion.mismatch == pytest.approx(0.0, abs=0.05)
    assert "Only the signs of the update were compared" in inversion.summary and "squared norm" not in inversion.summary
    steps = answer(1e-2, planted=SOLVED, training="sgd").summary
    for cause in (
        "end minus start instead of start minus end",
        "another lr, local_epochs, batch_size",
        "class weights",
    ):
        assert cause in steps
    assert "class weights, another loss, noise, a mask or hook" in answer(1e-2, planted=SOLVED).summary


# -- a planted batch --------------------------------------------------------------------------------------------------
def test_a_planted_batch_tells_what_a_solved_one_leaves(digits: Data) -> None:
    model, x, y = network("sigmoid", 0), digits.x[3:4], digits.y[3:4].argmax(1)
    inversion = ppbench.invert(model, named(model, cross_entropy(model(x), y)), SHAPE, attack="dlg")
    assert inversion.psnr(x)[0] > 40 and inversion.converged and inversion.budget == 1800
    assert inversion.planted is not None and inversion.planted.recovered and min(inversion.planted.psnr) > 40
    assert inversion.mismatch is not None and inversion.solved_mismatch == inversion.planted.mismatch < 1e-9
    assert "recovered" in inversion.summary and "That does not prove the inputs" in inversion.summary


@pytest.mark.parametrize("loss", ["decay", "smoothing"])
def test_what_else_is_in_a_gradient_leaves_far_more_than_a_solved_batch(loss: str, digits: Data) -> None:
    own = case("tanh", loss, digits.x[3:4], digits.y[3:4].argmax(1))
    inversion = ppbench.invert(own.model, own.gradient, SHAPE)
    assert inversion.solved_mismatch is not None and inversion.mismatch is not None
    assert inversion.mismatch > 1e4 * inversion.solved_mismatch
    assert ", less: either" in inversion.summary and "weight decay, label smoothing" in inversion.summary


def test_where_a_planted_batch_is_not_recovered_no_mismatch_tells(digits: Data) -> None:
    """A ReLU network that pools: 1e-3 is left of a picture at 11 dB."""
    own = case("pool", "mean", digits.x[3:4], digits.y[3:4].argmax(1))
    inversion = ppbench.invert(own.model, own.gradient, SHAPE)
    assert inversion.mismatch is not None and inversion.mismatch < 0.05 and inversion.psnr(own.x)[0] < 20
    assert inversion.planted is not None and inversion.solved_mismatch is None
    assert "no mismatch tells here" in inversion.summary and "as much" not in inversion.summary


class Part(nn.Module):
    """What a network sees of its inputs: some rows, or the mean of the channels."""

    def __init__(self, part: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


class Adapted(nn.Linear):
    """A frozen layer and a trained update of rank 2, which is zero at first."""

    def __init__(self) -> None:
        super().__init__(64, 16)
        self.requires_grad_(False)
        self.down, self.up = nn.Parameter(0.1 * torch.randn(2, 64)), nn.Parameter(torch.zeros(16, 2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.down.T @ self.up.T


def trained(*names: str) -> nn.Module:
    model = perceptron()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
    return model


def perceptron(size: int = 64, *first: nn.Module) -> nn.Module:
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(size, 16), nn.Sigmoid(), nn.Linear(16, 10))


def convolutional(size: int, *first: nn.Module) -> nn.Module:
    return nn.Sequential(*first, nn.Sigmoid(), nn.Flatten(), nn.Linear(size, 10))


BLIND: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "pooled first": (lambda: convolutional(128, nn.AvgPool2d(2), nn.Conv2d(1, 8, 3, padding=1)), 1, 1),
    "first layer frozen": (lambda: trained("3.weight", "3.bias"), 1, 1),
    "first layer frozen, of two": (lambda: trained("3.weight", "3.bias"), 1, 2),
    "an adapter": (lambda: nn.Sequential(nn.Flatten(), Adapted(), nn.Sigmoid(), nn.Linear(16, 10)), 1, 1),
    "biases alone": (lambda: trained("1.bias", "3.bias"), 1, 1),
    "ten numbers": (lambda: trained("3.bias"), 1, 1),
    "pixels skipped": (lambda: convolutional(24, nn.Conv2d(1, 6, 2, stride=4)), 1, 1),
    "half cut off": (lambda: perceptron(32, Part(lambda x: x[:, :, :4])), 1, 1),
    "a row cut off": (lambda: perceptron(56, Part(lambda x: x[:, :, 1:])), 1, 1),
    "gray": (lambda: perceptron(64, Part(lambda x: x.mean(1))), 3, 1),
    "one channel of three": (lambda: convolutional(64, nn.Conv2d(3, 1, 1)), 3, 1),
    "mean and contrast": (lambda: perceptron(64, nn.InstanceNorm2d(1)), 1, 1),
}


@pytest.mark.parametrize("name", every_third(BLIND))
def test_inputs_that_the_gradient_does_not_depend_on_are_never_called_solved(name: str) -> None:
    """The answer has its start values there; a second start would find these again, and call them recovered."""
    build, channels, batch = BLIND[name]
    torch.manual_seed(1)
    model, x, y = build(), torch.rand(batch, channels, 8, 8), torch.arange(batch)
    inversion = ppbench.invert(
        model, named(model, cross_entropy(model(x), y)), (channels, 8, 8), batch=batch, budget=100
    )
    assert inversion.planted is not None and inversion.solved_mismatch is None
    assert "no mismatch tells here" in inversion.summary


@pytest.mark.parametrize("seed", [0, 1])
def test_of_inputs_that_the_network_normalizes_no_brightness_is_called_solved(seed: int) -> None:
    """At seed 0 the planted norm was near that of a start, and the answer at 9 dB was called recovered."""
    torch.manual_seed(seed)
    unit = Part(lambda x: x / x.flatten(1).norm(dim=1)[:, None, None, None])
    model, x, y = perceptron(64, unit), torch.rand(1, *SHAPE), torch.tensor([0])
    inversion = ppbench.invert(model, named(model, cross_entropy(model(x), y)), SHAPE, budget=150)
    assert inversion.solved_mismatch is None and "as much" not in inversion.summary


@pytest.mark.parametrize("attack", every_third(["dlg", "idlg", "ig", "feature_inversion"]))
def test_inputs_that_the_gradient_determines_are_still_recovered_with_noise(attack: str) -> None:
    torch.manual_seed(0)
    model, x, y = convolutional(512, nn.Conv2d(1, 8, 3, padding=1)), torch.rand(1, *SHAPE), torch.tensor([3])
    options: dict[str, Any] = {} if attack == "feature_inversion" else {"budget": 600}
    inversion = ppbench.invert(model, named(model, cross_entropy(model(x), y)), SHAPE, attack=attack, **options)
    assert inversion.psnr(x)[0] > 60 and inversion.solved_mismatch is not None and "as much" in inversion.summary


def test_what_is_planted_is_half_the_answer_and_half_noise_in_the_data_range() -> None:
    x = torch.randn(40, *SHAPE, generator=torch.Generator().manual_seed(0))
    own = mix_with_noise(x, (-0.5, 1.0), torch.Generator().manual_seed(1))
    noise = own - 0.5 * x.clamp(-0.5, 1.0)
    assert float(own.min()) >= -0.5 and float(own.max()) <= 1.0
    assert sorted({round(float(v), 4) for v in noise.flatten()}) == [-0.25, 0.5]
    shares = (noise > 0).flatten(1).float().mean(1)
    assert float(shares.min()) < 0.35 and float(shares.max()) > 0.65


def test_the_planted_batch_moves_nothing_of_the_answer_and_may_be_left_out(digits: Data) -> None:
    own = case("mlp", "mean", digits.x[:1], digits.y[:1].argmax(1))
    whole, bare = (ppbench.invert(own.model, own.gradient, SHAPE, planted=planted) for planted in (True, False))
    assert torch.equal(whole.x, bare.x) and (whole.mismatch, whole.evaluations) == (bare.mismatch, bare.evaluations)
    assert bare.planted is None is bare.solved_mismatch and "No planted batch was attacked" in bare.summary
    again = ppbench.invert(own.model, own.gradient, SHAPE)
    assert again.planted == whole.planted


def test_a_search_that_its_budget_cut_off_says_so(digits: Data) -> None:
    own = case("sigmoid", "mean", digits.x[3:4], digits.y[3:4].argmax(1))
    inversion = ppbench.invert(own.model, own.gradient, SHAPE, attack="dlg", budget=20, restarts=0)
    assert inversion.converged is False and "spent its budget of 20 gradients; a larger one may" in inversion.summary
    fixed = ppbench.invert(own.model, own.gradient, SHAPE, attack="ig", budget=30, planted=False)
    assert fixed.converged is False  # takes all that it is given
    features = ppbench.invert(own.model, own.gradient, SHAPE, attack="feature_inversion", planted=False)
    assert features.converged is None and "budget" not in features.summary


SOLVED = Planted(1e-10, (52.0,), (11.0,), 40)


@pytest.mark.parametrize(
    ("mismatch", "planted", "solved", "words"),
    [
        (1e-10, SOLVED, 1e-10, "as much"),
        (1e-8, SOLVED, 1e-10, ", less: either"),
        (9e-10, SOLVED, 1e-10, "as much"),
        (6.4e-10, Planted(1e-10, (26.1,), (9.7,), 40), 1e-10, ", less: either"),  # 8 dB worse is none any more
        (float("inf"), SOLVED, 1e-10, ", less: either"),
        (1e-13, Planted(1e-15, (99.0,), (11.0,), 1), 1e-15, "as much"),  # both are rounding
        (8.9e-11, Planted(3.4e-13, (99.0,), (11.0,), 1, 1e-10), 3.4e-13, "as much"),  # both ended at the attack's stop
        (8.9e-9, Planted(3.4e-13, (99.0,), (11.0,), 1, 1e-10), 3.4e-13, ", less: either"),
        (1e-10, Planted(1e-10, (52.0, 20.9), (11.0, 11.0), 40), None, "not recovered"),  # one of two
        (1e-10, Planted(1e-10, (34.0,), (25.0,), 40), None, "not recovered"),  # a constant image is as good
        (1e-2, Planted(1e-2, (30.0,), (11.0,), 40), None, "not recovered"),  # nothing can be compared with so much
        (1e-10, Planted(float("nan"), (52.0,), (11.0,), 40), None, "not recovered"),
        (1e-10, None, None, "No planted batch"),
        (None, SOLVED, 1e-10, "names no labels"),
        (float("nan"), SOLVED, 1e-10, ", less: either"),
    ],
)
def test_what_a_mismatch_is_worth(mismatch: Any, planted: Any, solved: Any, words: str) -> None:
    result = answer(mismatch, planted=planted)
    assert result.solved_mismatch == solved and words in result.summary
    assert ("as much" in result.summary) == (words == "as much")


# -- a seeded generator of gradients ----------------------------------------------------------------------------------
def test_gradients_of_other_losses_are_those_in_the_benchs_own_terms_up_to_a_factor(
    digits: Data, pytestconfig: pytest.Config
) -> None:
    """The first of a seeded generator's: the very search, or a sentence that claims nothing. `-s` names them."""
    count = 24 if pytestconfig.getoption("--battery") == "whole" else 6
    x, y = digits.x[:40], digits.y[:40].argmax(1)
    for own in gradient_cases.cases(0, count, x, y):
        options: dict[str, Any] = {"attack": "dlg", "batch": len(own.x), "budget": 25, "restarts": 0, "planted": False}
        inversion = ppbench.invert(own.model, own.gradient, SHAPE, **options)
        if own.factor is None:
            assert inversion.scale == 1.0, own.name
            continue
        assert inversion.scale == pytest.approx(own.factor, rel=1e-4), own.name
        plain = ppbench.invert(own.model, own.plain, SHAPE, **options)
        for a, b in zip(inversion.psnr(own.x), plain.psnr(own.x), strict=True):
            assert a == pytest.approx(b, abs=1.0), own.name


# -- the truth --------------------------------------------------------------------------------------------------------
TRUTH = torch.rand(1, *SHAPE, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("truth", "words"),
    [
        (
            4 * TRUTH - 2,
            "The truth has values from -1.911 to 1.988, outside of data_range=(0, 1); give invert the range",
        ),
        (255 * TRUTH, "outside of data_range=(0, 1); give invert the range of the network's inputs, as data_range=("),
        ((255 * TRUTH).byte(), "The truth holds uint8; give floats from 0 to 1"),
        (TRUTH > 0.5, "The truth holds bool; give floats"),
        (TRUTH.to(torch.complex64), "The truth holds complex64"),
        (TRUTH * torch.nan, "The truth holds a value that is not finite"),
        (TRUTH[0], "The truth has shape (1, 8, 8); it must be (1, 1, 8, 8)"),
        (TRUTH[:0], "The truth has shape (0, 1, 8, 8)"),
        (TRUTH.to("meta"), "it must be a tensor of shape (1, 1, 8, 8)"),
        (None, "The truth is None; it must be a tensor"),
        ("x", "The truth is 'x'; it must be a tensor"),
    ],
)
def test_a_truth_that_cannot_be_compared_is_refused(truth: Any, words: str) -> None:
    with pytest.raises(UsageError) as error:
        answer().psnr(truth)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_truth_in_the_data_range_is_compared_whatever_holds_it() -> None:
    result = Inverted(TRUTH, torch.tensor([0]), 1e-10, 10)
    for truth in (TRUTH, TRUTH.double(), TRUTH.numpy(), TRUTH.tolist(), TRUTH.clone().requires_grad_()):
        assert result.psnr(truth) == [100.0]
    assert result.psnr(TRUTH.half())[0] > 60 and answer().psnr(torch.zeros(1, *SHAPE)) == [100.0]
    assert answer().psnr(torch.ones(1, *SHAPE) + 1e-6) == [pytest.approx(0.0, abs=1e-3)]  # rounding
    wide = Inverted(TRUTH, torch.tensor([0]), 1e-10, 10, data_range=(0.0, 255.0))
    with pytest.raises(UsageError, match="a hundredth of data_range"):
        wide.psnr(TRUTH)
    assert wide.psnr(np.zeros((1, *SHAPE), dtype=np.float32))[0] > 0
