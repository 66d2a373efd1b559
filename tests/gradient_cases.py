"""Gradients as people have them: a seeded generator over networks and losses, each with its plain twin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

SHAPE = (1, 8, 8)
NETWORKS = ("sigmoid", "tanh", "mlp", "norm", "pool")
LOSSES = ("mean", "sum", "scaled", "smoothing", "decay", "clipped", "rate", "change")
PLAIN = ("mean", "sum", "scaled", "clipped", "rate", "change")
"""Losses whose gradient is a multiple of the mean cross-entropy's."""


def network(kind: str, seed: int) -> nn.Module:
    """Return a small network for images 1 x 8 x 8 of 10 classes, in eval mode."""
    torch.manual_seed(seed)
    act: Callable[[], nn.Module] = nn.Tanh if kind == "tanh" else nn.Sigmoid
    if kind == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 40), act(), nn.Linear(40, 10)).eval()
    if kind == "pool":
        layers = [nn.Conv2d(1, 8, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, 1, 1), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)).eval()
    norm = [nn.BatchNorm2d(8)] if kind == "norm" else []
    layers = [nn.Conv2d(1, 8, 5, 2, 2), *norm, act(), nn.Conv2d(8, 8, 5, 1, 2), act()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10)).eval()


@dataclass(frozen=True)
class Case:
    """A gradient by name, the network that it is of, its truth, and the gradient in the bench's own terms.

    factor: by which it differs from that of the mean cross-entropy; None where it is no multiple of it.
    """

    name: str
    model: nn.Module
    gradient: dict[str, Tensor]
    plain: dict[str, Tensor]
    x: Tensor
    y: Tensor
    factor: float | None


def cases(seed: int, count: int, x: Tensor, y: Tensor) -> Iterator[Case]:
    """Yield cases on the images x [N, *SHAPE] and their classes y [N]."""
    draws = torch.Generator().manual_seed(seed)

    def pick(options: tuple[Any, ...]) -> Any:
        return options[int(torch.randint(len(options), (1,), generator=draws))]

    for number in range(count):
        kind, loss, size = pick(NETWORKS), LOSSES[number % len(LOSSES)], pick((1, 1, 2))
        rows = torch.randperm(len(x), generator=draws)[:size]
        yield case(kind, loss, x[rows], y[rows], number)


def case(kind: str, loss: str, x: Tensor, y: Tensor, seed: int = 0) -> Case:
    """Return one case."""
    model = network(kind, seed)
    smoothing = 0.1 if loss == "smoothing" else 0.0
    trained = dict(model.named_parameters())
    model.zero_grad()
    cross_entropy(model(x), y).backward()
    plain = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
    model.zero_grad()
    cross_entropy(model(x), y, label_smoothing=smoothing).backward()
    norm = float(torch.cat([p.grad.flatten() for p in trained.values() if p.grad is not None]).norm())
    factor = {"sum": float(len(x)), "scaled": 1024.0, "clipped": 0.1 / norm, "rate": 0.01, "change": -0.05}.get(
        loss, 1.0
    )
    for p in trained.values():
        assert p.grad is not None
        p.grad = p.grad * factor + (1e-2 * p.detach() if loss == "decay" else 0.0)
    gradient = {name: p.grad for name, p in trained.items() if p.grad is not None}
    model.zero_grad()
    return Case(f"{kind} {loss} batch {len(x)}", model, gradient, plain, x, y, factor if loss in PLAIN else None)
