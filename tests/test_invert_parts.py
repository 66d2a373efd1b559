"""`ppbench.invert` where the attacker has the gradients of some layers alone: a head, all but the head, no biases."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from repeated_search import best_of_seeds
from torch import Tensor, nn

import ppbench
from ppbench.base.errors import UsageError
from ppbench.federation.evidence import PartGradient, PlainGradient
from ppbench.federation.plan import Data, Plan
from ppbench.nets.net import initial, net_spec

SHAPE = (1, 8, 8)
PLACES = [7, 3, 12, 40]


def network(activation: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    first, second = nn.Conv2d(1, 12, 5, 2, 2), nn.Conv2d(12, 12, 5, 1, 2)
    return nn.Sequential(first, activation(), second, activation(), nn.Flatten(), nn.Linear(192, 10))


def whole_gradient(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    loss = nn.functional.cross_entropy(model(x), y)
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))


PARTS: dict[str, Callable[[str], bool]] = {
    "head": lambda name: name.startswith("5"),
    "all but the head": lambda name: not name.startswith("5"),
    "weights": lambda name: name.endswith("weight"),
    "all but the first layer": lambda name: not name.startswith("0"),
    "first layer": lambda name: name.startswith("0"),
}
# least dB that must come out, of 1, 2 and 4 images; of whole gradients it is 100 dB everywhere
CASES = [
    (nn.Sigmoid, "head", (95, 60, 95)),
    (nn.Sigmoid, "all but the head", (80, 75, 75)),
    (nn.Sigmoid, "weights", (65, 60, 60)),
    (nn.Sigmoid, "all but the first layer", (95, 80, 85)),
    (nn.Sigmoid, "first layer", (90,)),
    (nn.ReLU, "head", (38, 20, 20)),
    (nn.ReLU, "all but the head", (60, 24, 17)),
    (nn.ReLU, "weights", (65, 70, 19)),
    (nn.ReLU, "all but the first layer", (95, 60, 18)),
]


@pytest.mark.parametrize(
    ("activation", "part", "batch", "best"),
    [
        (activation, part, count, least)
        for activation, part, bests in CASES
        for count, least in zip((1, 2, 4), bests, strict=False)
    ],
)
def test_what_some_layers_alone_give_away(
    activation: type[nn.Module], part: str, batch: int, best: float, digits: Data
) -> None:
    model, x, y = network(activation), digits.x[PLACES[:batch]], digits.y[PLACES[:batch]].argmax(1)
    gradient = {name: value for name, value in whole_gradient(model, x, y).items() if PARTS[part](name)}
    result = best_of_seeds(
        lambda seed: ppbench.invert(model, gradient, SHAPE, batch=batch, planted=False, seed=seed), x, best
    )
    assert min(result.psnr(x)) > best and sorted(result.y.tolist()) == sorted(y.tolist())  # type: ignore[union-attr]
    assert set(result.unseen) == {name for name, _ in model.named_parameters()} - gradient.keys()
    assert f"{len(result.unseen)} tensors unseen" in repr(result)


def test_an_unseen_tensor_is_unknown_and_not_zero(digits: Data) -> None:
    """Zeros instead of missing tensors are believed, and explain another image."""
    model, x, y = network(nn.Sigmoid), digits.x[PLACES[:1]], digits.y[PLACES[:1]].argmax(1)
    whole = whole_gradient(model, x, y)
    seen = {name: value for name, value in whole.items() if PARTS["first layer"](name)}
    zeros = {name: seen.get(name, torch.zeros_like(value)) for name, value in whole.items()}
    missing = ppbench.invert(model, seen, SHAPE, planted=False)
    believed = ppbench.invert(model, zeros, SHAPE, planted=False)
    assert missing.psnr(x)[0] > 90 and believed.psnr(x)[0] < 40 and not believed.unseen


def test_the_planted_batch_is_seen_in_part_too(digits: Data) -> None:
    model, x, y = network(nn.Sigmoid), digits.x[PLACES[:1]], digits.y[PLACES[:1]].argmax(1)
    seen = {name: value for name, value in whole_gradient(model, x, y).items() if PARTS["head"](name)}
    result = ppbench.invert(model, seen, SHAPE)
    assert result.planted is not None and result.planted.recovered
    broken = {
        name: torch.randn(value.shape, generator=torch.Generator().manual_seed(1)) for name, value in seen.items()
    }
    assert max(ppbench.invert(model, broken, SHAPE, labels=y, planted=False).psnr(x)) < 20  # null: noise shows nothing


def test_every_search_runs_on_a_part(digits: Data) -> None:
    """No attack reads a tensor that is not there."""
    model, x, y = network(nn.ReLU), digits.x[PLACES[:1]], digits.y[PLACES[:1]].argmax(1)
    for part in ("head", "all but the head", "all but the first layer"):
        seen = {name: value for name, value in whole_gradient(model, x, y).items() if PARTS[part](name)}
        for attack in ("closed_form", "peel", "dlg", "idlg", "ig", "ig_features", "feature_inversion", "likelihood"):
            budget = {} if attack in ("closed_form", "peel", "feature_inversion") else {"budget": 3}
            result = ppbench.invert(model, seen, SHAPE, attack=attack, labels=y, planted=False, **budget)
            assert result.x.shape == x.shape and bool(result.x.isfinite().all())


def test_a_part_of_an_update_of_several_steps_is_refused(digits: Data) -> None:
    model, x, y = network(nn.Sigmoid), digits.x[PLACES], digits.y[PLACES].argmax(1)
    seen = {name: value for name, value in whole_gradient(model, x, y).items() if PARTS["head"](name)}
    with pytest.raises(UsageError, match=r"must have each trained parameter; '0.weight' is missing\.$"):
        ppbench.invert(model, seen, SHAPE, batch=4, training={"lr": 0.1, "local_epochs": 2, "batch_size": 2})


def test_the_part_of_a_gradient_is_that_of_the_whole_one() -> None:
    plan = Plan(net_spec("mlp", (1, 8, 8), 10), clients=1)
    params = initial(plan.spec, 0)
    x, y = torch.rand(1, 2, 1, 8, 8), torch.eye(10)[[3, 4]][None]
    names = frozenset(list(params)[1:])
    part, whole = PartGradient(params, plan, names)(x, y), PlainGradient(params, plan)(x, y)
    assert part.keys() == names and all(torch.equal(part[name], whole[name]) for name in names)


# -- adapters of a vision transformer, the rest frozen ----------------------------------------------------------------
class Adapter(nn.Module):
    """LoRA around a frozen layer, as it starts: y = W x + b + up down x, with up = 0."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * base.in_features**-0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return out


class Vision(nn.Module):
    """A vision transformer on patches of 2 x 2 pixels, frozen but for its head and adapters in each MLP."""

    def __init__(self, rank: int, places: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.places = nn.Conv2d(1, 32, 2, 2), nn.Parameter(places * torch.randn(1, 16, 32))
        layers = [
            nn.TransformerEncoderLayer(32, 4, 96, 0.0, nn.GELU(), batch_first=True, norm_first=True) for _ in "ab"
        ]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(32, 10)
        self.requires_grad_(False).head.requires_grad_(True)
        for layer in layers:
            layer.linear1, layer.linear2 = Adapter(layer.linear1, rank), Adapter(layer.linear2, rank)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.project(x).flatten(2).transpose(1, 2) + self.places).mean(1))
        return out


def adapter_gradient(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    loss = nn.functional.cross_entropy(model(x), y)
    return dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))


@pytest.mark.parametrize("rank", [2, 4])
def test_low_rank_adapters_of_a_vision_transformer_give_their_image_away(rank: int, digits: Data) -> None:
    """At their start, where the gradient of every `down` is 0."""
    model, x, y = Vision(rank), digits.x[PLACES[:1]], digits.y[PLACES[:1]].argmax(1)
    gradient = adapter_gradient(model, x, y)
    assert not any(bool(value.any()) for name, value in gradient.items() if "down" in name)
    result = ppbench.invert(model, gradient, SHAPE, planted=False)
    assert result.attack == "gauss_newton" and result.y is not None and result.y.tolist() == y.tolist()
    assert result.psnr(x)[0] > 80
    if rank == 4:
        by_first_order = ppbench.invert(model, gradient, SHAPE, attack="dlg", planted=False)
        assert result.psnr(x)[0] > by_first_order.psnr(x)[0] + 20


def test_gauss_and_newton_find_nothing_in_noise_and_leave_batches_grey(digits: Data) -> None:
    model, x, y = Vision(2), digits.x[PLACES[:2]], digits.y[PLACES[:2]].argmax(1)
    gradient, draws = adapter_gradient(model, x, y), torch.Generator().manual_seed(1)
    noise = {name: torch.randn(value.shape, generator=draws) for name, value in gradient.items()}
    result = ppbench.invert(model, noise, SHAPE, y[:1], attack="gauss_newton", planted=False)
    assert result.mismatch is not None and result.mismatch > 0.5 and result.psnr(x[:1])[0] < 20
    grey = ppbench.invert(model, gradient, SHAPE, attack="gauss_newton", batch=2, planted=False)
    assert float((grey.x - 0.5).abs().max()) < 0.2
