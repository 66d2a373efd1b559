"""Multi-layer perceptrons, for tables and for flattened images."""

from __future__ import annotations

import math

from torch import nn

from ppbench.base.errors import shown
from ppbench.nets.models.checks import ACTIVATIONS, DEEPEST, checked_flag, checked_int, one_of, widths
from ppbench.nets.net import Classifier


def mlp(
    shape: tuple[int, ...],
    classes: int,
    *,
    hidden: str | int = "64",
    activation: str = "relu",
    layers: int = 0,
    bias: bool = True,
) -> Classifier:
    """Flatten, then linear layers of the `hidden` widths with an activation after each, then the head.

    Args:
        hidden: widths, comma-separated, e.g. "128,64" (one width may be a number); "" for none, which is logistic
            regression. The default has 4,810 parameters on (1, 8, 8) with 10 classes, 4,736 without biases.
        activation: "relu", "leaky_relu" (slope 0.01), "hardswish", "sigmoid" or "tanh".
        layers: number of linear layers, the head among them, all hidden ones of the one width in `hidden`
            ("MLP-5" is layers=5: four hidden layers and the head); 0 takes the widths as `hidden` lists them.
        bias: whether the linear layers, the head among them, have biases.
    """
    one_of("activation", activation, ACTIVATIONS)
    checked_flag("bias", bias)
    width = math.prod(shape)
    if not shape or width < 1:
        raise ValueError(f"it takes examples with at least one value, not of shape {tuple(shape)}")
    stack: list[nn.Module] = [nn.Flatten()]
    for next_width in _hidden(hidden, checked_int("layers", layers, 0, DEEPEST)):
        stack += [nn.Linear(width, next_width, bias=bias), ACTIVATIONS[activation]()]
        width = next_width
    return Classifier(nn.Sequential(*stack), nn.Linear(width, classes, bias=bias))


def _hidden(hidden: str | int, layers: int) -> list[int]:
    listed = widths("hidden", hidden)
    if layers and len(listed) != 1:
        raise ValueError(f"hidden must be one width, such as 64, where layers={layers} is given, not {shown(hidden)}")
    return listed * (layers - 1) if layers else listed
