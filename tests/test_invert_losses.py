"""`ppbench.invert` on people's own losses, labels and outputs: a table of cases, each rebuilt or refused.

The best that is known of one image is what linear systems give, 100 dB; `best` says where a search is all there is.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from daily import every_third
from torch import Tensor, nn
from torch.nn import functional as F

import ppbench
from ppbench.base.errors import UsageError
from ppbench.federation.plan import Data
from ppbench.run.inversion_result import Inverted

SHAPE = (1, 8, 8)
WEIGHTS = torch.linspace(0.5, 2, 10)
HOT = torch.tensor([[1.0, 0, 1, 1, 0, 0, 0, 0, 0, 0]])
PAIR = torch.cat([HOT, HOT.flip(1)])
ROWS, SUM = torch.tensor([[0.5, -1.0, 2.0], [1.0, 0.0, -2.0]]), nn.MSELoss(reduction="sum")
CE, BCE, MSE = F.cross_entropy, F.binary_cross_entropy_with_logits, F.mse_loss


def lenet(classes: int = 10, *after: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    first, second = nn.Conv2d(1, 12, 5, 2, 2), nn.Conv2d(12, 12, 3, 1, 1)
    return nn.Sequential(first, nn.Sigmoid(), second, nn.Sigmoid(), nn.Flatten(), nn.Linear(192, classes), *after)


def perceptron(classes: int = 10, *after: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, classes), *after)


def focal(logits: Tensor, y: Tensor) -> Tensor:
    """Return the focal loss [B] (Lin et al. 2017) with an exponent of 2."""
    likely = logits.log_softmax(-1).gather(-1, y[:, None])[:, 0]
    return -((1 - likely.exp()) ** 2) * likely


def hinge(logits: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared hinge of labels -1 and 1, as a float32 of a mean."""
    return F.relu(1 - y * logits).square().mean()


class Answer(nn.Module):
    """A network that answers by a dict, a tuple or an object with the logits in it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = lenet(), kind

    def forward(self, x: Tensor) -> Any:
        logits = self.inner(x)
        if self.kind == "dict":
            return {"logits": logits, "loss": logits.sum()}
        if self.kind == "tuple":
            return logits.sum(), logits
        answer = nn.Module()
        answer.logits = logits
        return answer


@dataclass(frozen=True)
class Case:
    """A network, the loss behind its gradient, the labels of 1 or more digits (None: their classes), and arguments.

    best: dB that must come out at least. labels: those of the answer (True), others or none (False).
    """

    network: Callable[[], nn.Module]
    loss: Callable[[Any, Tensor], Tensor]
    y: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)
    best: float = 80.0
    labels: bool = True
    examples: int = 1
    factor: float = 1.0
    scale: float = 1.0
    decay: float = 0.0


def pooled() -> nn.Module:
    """Return a network whose head is a 1x1 convolution, its maps averaged."""
    torch.manual_seed(0)
    head = (nn.Conv2d(12, 10, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(nn.Conv2d(1, 12, 5, padding=2), nn.Sigmoid(), *head)


class Tied(nn.Module):
    """Networks whose layers share weights: an output projection that is the embedding of classes, and others.

    kind: "output", a last layer with the embedding's weight; "late", one whose weight is used before; "product", no
    last layer; "autoencoder", a decoder with the encoder's transposed weight.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.body, self.mix = kind, nn.Linear(64, 32), nn.Linear(32, 32)
        self.embed, self.out = nn.Embedding(10, 32), nn.Linear(32, 10, bias=kind == "late")
        if kind == "output":
            self.out.weight = self.embed.weight
        if kind == "autoencoder":
            self.out = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x.flatten(1)))
        if self.kind == "autoencoder":
            answer: Tensor = self.out(torch.tanh(hidden @ self.body.weight))
            return answer
        weight = self.out.weight if self.kind == "late" else self.embed.weight
        mixed = torch.tanh(self.mix(hidden + (hidden @ weight.T).softmax(1) @ weight))
        return mixed @ weight.T if self.kind == "product" else self.out(mixed)


def tied_layers(kind: str) -> nn.Module:
    """Return a network with one weight in two layers, or one layer in two places."""
    torch.manual_seed(0)
    first, last = nn.Linear(64, 64), nn.Linear(64, 10)
    second = first if kind == "places" else nn.Linear(64, 64)
    second.weight = first.weight
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), second, nn.Tanh(), last)


def tied_convolutions() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 12, 5, 2, 2), *(nn.Conv2d(12, 12, 3, 1, 1) for _ in "ab")]
    layers[2].weight = layers[1].weight
    return nn.Sequential(
        *(part for layer in layers for part in (layer, nn.Sigmoid())), nn.Flatten(), nn.Linear(192, 10)
    )


TIED = {
    **{kind: partial(Tied, kind) for kind in ("output", "late", "product", "autoencoder")},
    **{kind: partial(tied_layers, kind) for kind in ("weights", "places")},
    "convolutions": tied_convolutions,
}


def mean(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda z, y: function(z, y).mean()


def smooth(z: Tensor, y: Tensor) -> Tensor:
    return CE(z, y, label_smoothing=0.1)


def weighted(z: Tensor, y: Tensor) -> Tensor:
    return CE(z, y, weight=WEIGHTS)


def one_hot_error(z: Tensor, y: Tensor) -> Tensor:
    return MSE(z, F.one_hot(y, 10).float())


def flat() -> nn.Module:
    return perceptron(1, nn.Flatten(0))


def logarithmic() -> nn.Module:
    return perceptron(10, nn.LogSoftmax(-1))


BOTH = nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2)
REBUILT = {
    "cross-entropy": Case(lenet, CE),
    "smoothing": Case(lenet, smooth, options={"label_smoothing": 0.1}),
    "smoothing, a sum of logs": Case(perceptron, smooth, options={"label_smoothing": 0.1}),
    "smoothing times 3": Case(perceptron, smooth, options={"label_smoothing": 0.1}, factor=3.0, scale=3.0),
    "smoothing, start minus end": Case(perceptron, smooth, options={"label_smoothing": 0.1}, factor=-0.1, scale=-0.1),
    "smoothing, undeclared": Case(lenet, smooth),
    "smoothing, batch of 2": Case(
        lenet, smooth, options={"label_smoothing": 0.1, "batch": 2, "budget": 300}, best=40.0, examples=2
    ),
    "smoothing, batch of 2 behind ReLU": Case(
        perceptron, smooth, options={"label_smoothing": 0.1, "batch": 2}, examples=2
    ),
    "class weights": Case(lenet, weighted, options={"class_weights": WEIGHTS}),
    "class weights as a list": Case(perceptron, weighted, options={"class_weights": WEIGHTS.tolist()}),
    "class weights, batch of 3": Case(perceptron, weighted, options={"class_weights": WEIGHTS, "batch": 3}, examples=3),
    "class weights, a sum": Case(
        lenet, lambda z, y: CE(z, y, weight=WEIGHTS, reduction="sum"), options={"class_weights": WEIGHTS}, scale=0.5
    ),
    "torch's object": Case(lenet, BOTH, options={"loss": BOTH}),
    "torch's function": Case(perceptron, CE, options={"loss": CE}),
    "nll": Case(logarithmic, F.nll_loss, options={"loss": "nll"}),
    "nll, torch's object": Case(logarithmic, F.nll_loss, options={"loss": nn.NLLLoss()}),
    "nll behind cross-entropy's name": Case(logarithmic, F.nll_loss),
    "nll with weights": Case(
        logarithmic, lambda z, y: F.nll_loss(z, y, weight=WEIGHTS), options={"loss": "nll", "class_weights": WEIGHTS}
    ),
    "bce, labels inferred": Case(lenet, BCE, HOT, {"loss": "bce"}),
    "bce, labels known": Case(lenet, BCE, HOT, {"loss": "bce", "labels": HOT}),
    "bce, one row of labels": Case(perceptron, BCE, HOT, {"loss": "bce", "labels": HOT[0].tolist()}),
    "bce, a sum": Case(lenet, lambda z, y: BCE(z, y, reduction="sum"), HOT, {"loss": "bce"}, scale=10.0),
    "bce, start minus end": Case(perceptron, BCE, HOT, {"loss": "bce"}, factor=-0.5, scale=-0.5),
    "bce, torch's object": Case(perceptron, BCE, HOT, {"loss": nn.BCEWithLogitsLoss()}),
    "bce, soft labels": Case(perceptron, BCE, HOT * 0.8, {"loss": "bce", "labels": HOT * 0.8}),
    "bce, batch of 2": Case(lenet, BCE, PAIR, {"loss": "bce", "labels": PAIR, "budget": 300}, 40.0, examples=2),
    "bce, one output": Case(lambda: perceptron(1), BCE, torch.ones(1, 1), {"loss": "bce"}),
    "bce, one output of a LeNet": Case(lambda: lenet(1), BCE, torch.zeros(1, 1), {"loss": "bce", "budget": 300}, 40.0),
    "bce, outputs [B]": Case(flat, BCE, torch.ones(1), {"loss": "bce", "budget": 300}, 40.0),
    "mse, a number inferred": Case(lambda: perceptron(1), MSE, torch.tensor([[2.5]]), {"loss": "mse"}),
    "mse, a number known": Case(lambda: perceptron(1), MSE, torch.tensor([[2.5]]), {"loss": "mse", "labels": [2.5]}),
    "mse, outputs [B]": Case(flat, MSE, torch.tensor([2.5]), {"loss": "mse", "labels": [2.5], "budget": 300}, 40.0),
    "mse, three numbers": Case(lambda: lenet(3), MSE, torch.tensor([[0.5, -1.0, 2.0]]), {"loss": "mse"}),
    "mse, torch's sum of a batch": Case(
        lambda: perceptron(3), SUM, ROWS, {"loss": SUM, "labels": ROWS}, examples=2, scale=6.0
    ),
    "mse of classes": Case(lenet, one_hot_error, options={"loss": "mse"}, labels=False),
    "mse behind log_softmax": Case(logarithmic, one_hot_error, options={"loss": "mse"}, labels=False),
    "a function, classes known": Case(lenet, mean(focal), options={"loss": focal, "labels": [0]}),
    "a function, classes unknown": Case(lenet, mean(focal), options={"loss": focal}, labels=False),
    "a function, batch of 2": Case(
        perceptron, mean(focal), options={"loss": focal, "labels": [0, 1]}, examples=2
    ),
    "a function of rows": Case(lenet, hinge, 2 * HOT - 1, {"loss": hinge, "labels": 2 * HOT - 1}),
    "a function in float32": Case(perceptron, weighted, options={"loss": weighted, "labels": [0]}),
    "weight decay, known": Case(lenet, CE, decay=5e-4, options={"weight_decay": 5e-4}),
    "weight decay, fitted": Case(lenet, CE, decay=5e-4, options={"weight_decay": None}),
    "weight decay, fitted, batch of 2": Case(
        lenet, CE, decay=5e-4, options={"weight_decay": None, "batch": 2}, examples=2
    ),
    "weight decay under bce": Case(perceptron, BCE, HOT, {"loss": "bce", "weight_decay": None}, decay=1e-3),
    "a dict": Case(lambda: Answer("dict"), lambda z, y: CE(z["logits"], y), options={"output": "logits"}),
    "a head of a 1x1 convolution": Case(pooled, CE, options={"budget": 400}, best=20.0),
    "a tuple": Case(lambda: Answer("tuple"), lambda z, y: CE(z[1], y), options={"output": 1}),
    "an object": Case(lambda: Answer("object"), lambda z, y: CE(z.logits, y), options={"output": "logits"}),
}  # fmt: skip


def inverted(case: Case, digits: Data, planted: bool = False) -> tuple[Inverted, Tensor, Tensor]:
    """Return the result on a case's gradient by plain torch, its inputs and its labels."""
    model, x = case.network(), digits.x[: case.examples]
    y = digits.y[: case.examples].argmax(1) if case.y is None else case.y
    lengths = [value.square().sum() for value in model.parameters()]
    total = case.loss(model(x), y) + case.decay / 2 * torch.stack(lengths).sum()
    gradient = [case.factor * value for value in torch.autograd.grad(total, list(model.parameters()))]
    return ppbench.invert(model, gradient, SHAPE, planted=planted, **case.options), x, y


@pytest.mark.parametrize("name", every_third(REBUILT))
def test_what_people_train_with_is_rebuilt(name: str, digits: Data) -> None:
    case = REBUILT[name]
    result, x, y = inverted(case, digits)
    assert min(result.psnr(x)) >= case.best, (result.attack, result.psnr(x))
    assert result.scale == pytest.approx(case.scale, rel=1e-3)
    if case.labels:
        assert result.y is not None and result.mismatch is not None
        answered, true = (value.flatten().double().sort().values for value in (result.y, y))
        torch.testing.assert_close(answered, true, rtol=1e-4, atol=1e-4)
        assert result.mismatch < (0.1 if "undeclared" in name else 1e-8)


def test_a_number_or_rows_that_are_inferred_explain_the_gradient_and_a_function_of_unknown_labels_has_none(
    digits: Data,
) -> None:
    result, _, y = inverted(REBUILT["mse of classes"], digits)
    assert result.y is not None and torch.allclose(result.y, F.one_hot(y, 10).float(), atol=1e-4)
    assert inverted(REBUILT["a function, classes unknown"], digits)[0].y is None


ROWS = torch.tensor([[1.0, 0, 1], [0, 0, 0], [0, 1, 1], [1, 1, 0]])


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("loss", ["bce", "mse"])
def test_labels_of_a_batch_that_are_no_classes_are_read_off_its_inputs(
    loss: str, outputs: int, known: bool, digits: Data
) -> None:
    """Known labels are of no use where units separate the inputs: a search by them ends at 7 to 23 dB of one output."""
    y = ROWS[:, :outputs] if loss == "bce" else 2 * ROWS[:, :outputs] - 0.3 * torch.arange(4.0)[:, None]
    options = {"loss": loss, "batch": 4} | ({"labels": y} if known else {})
    case = Case(lambda: perceptron(outputs), BCE if loss == "bce" else MSE, y, options, examples=4)
    result, x, _ = inverted(case, digits)
    assert min(result.psnr(x)) > 80 and result.attack == "spear" and result.y is not None
    nearest = torch.cdist(x.flatten(1), result.x.flatten(1)).argmin(1)
    torch.testing.assert_close(result.y.reshape(4, -1)[nearest], y, rtol=1e-3, atol=1e-3)


def test_a_planted_batch_is_separated_too_and_noise_shows_no_labels(digits: Data) -> None:
    case = Case(perceptron, BCE, PAIR, {"loss": "bce", "batch": 2}, examples=2)
    assert inverted(case, digits, planted=True)[0].solved_mismatch is not None
    noise = [torch.randn(value.shape) for value in perceptron().parameters()]
    with pytest.raises(UsageError, match="the gradient separates its inputs; give labels="):
        ppbench.invert(perceptron(), noise, SHAPE, loss="bce", batch=2)


@pytest.mark.parametrize("examples", [1, 2])
@pytest.mark.parametrize("kind", TIED)
def test_networks_whose_layers_share_weights_are_rebuilt(kind: str, examples: int, digits: Data) -> None:
    case = Case(TIED[kind], CE, options={"batch": examples}, examples=examples)
    result, x, y = inverted(case, digits)
    assert min(result.psnr(x)) > 40 and result.y is not None and sorted(result.y.tolist()) == sorted(y.tolist())
    assert result.mismatch is not None and result.mismatch < 1e-8


def test_a_shared_weight_is_one_parameter_of_the_copy_and_an_update_may_name_it_twice(digits: Data) -> None:
    model, x, y = tied_layers("weights"), digits.x[:1], digits.y[:1].argmax(1)
    after = trained(model, x, y, 0.05, 1, 1)
    assert {"1.weight", "3.weight"} <= after.state_dict().keys() and model[3].weight is model[1].weight
    result = ppbench.invert(model, (model.state_dict(), after.state_dict()), SHAPE, planted=False)
    assert result.psnr(x)[0] > 40 and result.scale == pytest.approx(0.05, rel=1e-3)
    planted = inverted(Case(partial(Tied, "output"), CE), digits, planted=True)[0]
    assert planted.solved_mismatch is not None


@pytest.mark.parametrize("name", ["bce, labels inferred", "a function, classes unknown", "class weights"])
def test_a_planted_batch_goes_through_the_same_loss(name: str, digits: Data) -> None:
    result, *_ = inverted(REBUILT[name], digits, planted=True)
    assert result.solved_mismatch is not None and result.planted is not None and min(result.planted.psnr) > 60
    assert "as much. That does not prove the inputs" in result.summary


def test_what_is_given_in_vain_is_seen_in_the_mismatch(digits: Data) -> None:
    """Another smoothing than the gradient's leaves what the true one does not, and no factor mends it."""
    wrong = Case(perceptron, smooth, options={"label_smoothing": 0.3})
    result, *_ = inverted(wrong, digits)
    right, *_ = inverted(REBUILT["smoothing, a sum of logs"], digits)
    assert result.mismatch is not None and right.mismatch is not None and result.mismatch > 1e6 * right.mismatch
    assert result.unexplained and not right.unexplained
    assert "one of the mean cross-entropy with label smoothing;" in result.summary


REFUSED: dict[str, tuple[Case, str]] = {
    "an unknown name": (Case(lenet, CE, options={"loss": "focal"}), "it must be 'cross_entropy', 'nll', 'bce', 'mse'"),
    "no name": (Case(lenet, CE, options={"loss": 3}), "loss=3 cannot be used; it must be 'cross_entropy'"),
    "log-probabilities": (Case(lenet, CE, options={"loss": "nll"}), "takes log-probabilities, and the network answers"),
    "smoothing of 1": (Case(lenet, CE, options={"label_smoothing": 1.0}), "it must be a number from 0 to below 1"),
    "three weights": (Case(lenet, CE, options={"class_weights": [1, 2, 3]}), "has 3 numbers; the network has 10"),
    "no weights": (Case(lenet, CE, options={"class_weights": [0.0] * 10}), "give one positive number a class"),
    "local steps on a sum": (
        Case(lenet, CE, options={"loss": nn.CrossEntropyLoss(reduction="sum"), "training": {"lr": 0.1}}),
        "are simulated on the mean loss; give it, and lr times the size of a batch",
    ),
    "smoothed bce": (
        Case(lenet, BCE, HOT, {"loss": "bce", "label_smoothing": 0.1}), "are of cross-entropy; loss='bce' has none"
    ),
    "weights for a function": (
        Case(lenet, mean(focal), options={"loss": focal, "class_weights": WEIGHTS}), "put them into the function"
    ),
    "labels of a batch": (
        Case(lenet, BCE, PAIR, {"loss": "bce", "batch": 2}, examples=2), "begins with nn.Flatten, nn.Linear and nn.ReLU"
    ),
    "labels without a last linear layer": (
        Case(lambda: nn.Sequential(lenet(), nn.Tanh()), MSE, HOT, {"loss": "mse"}), "give labels="
    ),
    "labels out of range": (Case(lenet, BCE, HOT, {"loss": "bce", "labels": 2 * HOT}), "an example from 0 to 1"),
    "labels of another width": (
        Case(lenet, BCE, HOT, {"loss": "bce", "labels": HOT[:, :4]}), "have shape (1, 4); they must be one row"
    ),
    "labels and batch": (
        Case(lenet, BCE, HOT, {"loss": "bce", "labels": HOT, "batch": 2}), "batch=2 cannot be used; there are 1 labels"
    ),
    "a function of other labels": (
        Case(lenet, mean(focal), options={"loss": focal, "labels": torch.ones(1, 10)}), "loss= fails, or cannot be"
    ),
    "a function that does not depend on outputs": (
        Case(lenet, CE, options={"loss": lambda z, y: (0 * z).sum(), "labels": [0]}), "has no gradient by the outputs"
    ),
    "a function of a matrix": (
        Case(lenet, CE, options={"loss": lambda z, y: z, "labels": [0]}), "of shape (2, 10) for 2 examples; it must"
    ),
    "exact attacks of a batch": (
        Case(lenet, smooth, options={"label_smoothing": 0.1, "batch": 2, "attack": "closed_form"}, examples=2),
        "separates the examples of a batch by classes under plain cross-entropy",
    ),
    "one output": (
        Case(lambda: lenet(1), BCE, torch.ones(1, 1)), "one output goes with loss='bce' or loss='mse'"
    ),
    "negative decay": (Case(lenet, CE, options={"weight_decay": -1.0}), "it must be 0 or more, or None if it is"),
    "decay of steps": (
        Case(lenet, CE, options={"weight_decay": 0.1, "training": {"lr": 0.1}}), "several local steps with it are not"
    ),
    "decay that is not seen": (
        Case(lambda: lenet(3), CE, torch.tensor([0, 1, 2, 0]), {"weight_decay": None, "batch": 4}, examples=4),
        "of fewer examples than classes",
    ),
    "a dict": (Case(lambda: Answer("dict"), lambda z, y: CE(z["logits"], y)), "say which part is them, as output="),
    "another key": (
        Case(lambda: Answer("dict"), lambda z, y: CE(z["logits"], y), options={"output": "logit"}),
        "without a part output='logit'; it has 'logits', 'loss'.",
    ),
    "another index": (
        Case(lambda: Answer("tuple"), lambda z, y: CE(z[1], y), options={"output": 2}), "output=2; it has 0, 1."
    ),
    "no key": (Case(lenet, CE, options={"output": 1.5}), "output=1.5 cannot be used; give the key, index or attribute"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why_and_what_would_work(name: str, digits: Data) -> None:
    case, words = REFUSED[name]
    with pytest.raises(UsageError) as error:
        inverted(case, digits)
    sentence = str(error.value)
    assert words in sentence and "\n" not in sentence and sentence.endswith((".", "?")) and len(sentence) < 400


# -- updates ----------------------------------------------------------------------------------------------------------
def trained(model: nn.Module, x: Tensor, y: Tensor, lr: float, epochs: int, size: int) -> nn.Module:
    """Return a copy of a model after plain SGD in order, by torch's own optimizer."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for start in [i for _ in range(epochs) for i in range(0, len(x), size)]:
        optimizer.zero_grad()
        CE(model(x[start : start + size]), y[start : start + size]).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("prefix", ["", "module."])
def test_two_state_dicts_are_a_step_of_any_rate_at_the_first_ones_weights(prefix: str, digits: Data) -> None:
    model, x, y = lenet(), digits.x[:1], digits.y[:1].argmax(1)
    after = trained(model, x, y, 0.05, 1, 1)
    pair = tuple({prefix + n: v for n, v in m.state_dict().items()} for m in (model, after))
    torch.manual_seed(1)
    other = copy.deepcopy(model).apply(lambda layer: layer.reset_parameters() if hasattr(layer, "bias") else None)
    kept = copy.deepcopy(other.state_dict())
    result = ppbench.invert(other, pair, SHAPE, planted=False)
    assert result.psnr(x)[0] > 40 and result.scale == pytest.approx(0.05, rel=1e-3) and torch.equal(result.y, y)
    assert all(torch.equal(value, kept[name]) for name, value in other.state_dict().items())


@pytest.mark.parametrize("form", ["pair", "start minus end", "end minus start", "end minus start, labels known"])
def test_an_update_of_several_steps_has_its_sign_found(form: str, digits: Data) -> None:
    model, x, y = lenet(), digits.x[:2], digits.y[:2].argmax(1)
    after = trained(model, x, y, 0.1, 3, 2)
    before_, after_ = model.state_dict(), after.state_dict()
    sign = -1.0 if form.startswith("end") else 1.0
    change = {name: sign * (value - after_[name]) for name, value in before_.items()}
    training: dict[str, Any] = {"lr": 0.1, "local_epochs": 3, "batch_size": 2}
    options = {"training": training, "batch": 2, "planted": False, "budget": 300}
    known = y if form.endswith("known") else None
    result = ppbench.invert(model, (before_, after_) if form == "pair" else change, SHAPE, known, **options)
    assert min(result.psnr(x)) > 25 and result.scale == sign and result.attack == "fedavg_inversion"
    assert ("end minus start; its sign was changed" in result.summary) == (sign < 0)


def test_an_update_is_refused_with_what_to_give(digits: Data) -> None:
    model = lenet()
    pair = (model.state_dict(), trained(model, digits.x[:1], digits.y[:1].argmax(1), 0.1, 1, 1).state_dict())
    cases: tuple[tuple[Any, dict[str, Any], str], ...] = (
        (pair, {"attack": "fedavg_inversion"}, 'simulates several local steps; give training={"lr": 0.1, '),
        (pair, {"training": {"local_epochs": 2}}, "leave out training= for one step, whose rate is fitted"),
        (
            (pair[0], {"0.weight": pair[0]["0.weight"]}),
            {},
            "one lacks '0.bias' or has another shape; give both as state",
        ),
        ((pair[0], {"0.wieght": 1.0}), {}, "did you mean '0.weight'"),
        ((pair[0], pair[0]), {}, "The gradient is zero in all parameters"),
    )
    for update, options, words in cases:
        with pytest.raises(UsageError) as error:
            ppbench.invert(model, update, SHAPE, **options)
        assert words in str(error.value) and "\n" not in str(error.value), str(error.value)


# -- what comes back --------------------------------------------------------------------------------------------------
def test_a_result_is_one_line_and_a_picture_of_matched_images(digits: Data) -> None:
    case = Case(perceptron, CE, options={"batch": 2}, examples=2)
    result, x, _ = inverted(case, digits)
    pattern = r"<Inverted 2 inputs of \(1, 8, 8\) by 'spear', labels \[\d, \d\], mismatch \S+ \(blind \S+\)>"
    assert re.fullmatch(pattern, repr(result))
    assert result.blind_mismatch is not None and result.mismatch is not None
    assert result.mismatch < 1e-10 < 0.1 < result.blind_mismatch
    assert f"by the best constant image {result.blind_mismatch:.1e}." in result.summary
    assert result._repr_png_() is not None and result._repr_png_()[:4] == b"\x89PNG"
    pixels = torch.from_numpy(np.array(result.show(x.flip(0)))).double() / 255
    assert pixels.shape == (2 * 96 + 4, 2 * 96 + 4, 3)
    above, below = pixels[:96, :, 0], pixels[100:, :, 0]
    assert torch.allclose(above, below, atol=2 / 255) and not torch.allclose(above, below.flip(1), atol=0.5)
    assert torch.allclose(above[::12, :96:12], x[1, 0].double(), atol=1 / 255)


def test_what_is_no_image_is_not_shown(digits: Data) -> None:
    model = nn.Sequential(nn.Linear(64, 10))
    gradient = torch.autograd.grad(CE(model(digits.x[:1].flatten(1)), torch.tensor([3])), list(model.parameters()))
    result = ppbench.invert(model, gradient, (64,), planted=False)
    assert result._repr_png_() is None
    with pytest.raises(UsageError, match=re.escape("Inputs of shape (64,) cannot be shown; only images (1, H, W)")):
        result.show()


@pytest.mark.parametrize(("examples", "batch"), [(3, 3), (3, 1), (1, 1), (2, 1)])
def test_a_larger_batch_than_stated_is_said(examples: int, batch: int, digits: Data) -> None:
    case = Case(perceptron, CE, options={"batch": batch, "attack": "analytic"}, examples=examples)
    result, *_ = inverted(case, digits)
    assert result.least_batch == examples
    assert (f"gradient is that of {examples} examples or more: the batch is larger" in result.summary) == (
        batch < examples
    )
