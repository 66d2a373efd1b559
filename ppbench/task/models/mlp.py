"""Multi-layer perceptrons, for tables and for flattened images."""

from __future__ import annotations

import math

from torch import nn

from ppbench.task.net import Classifier

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "hardswish": nn.Hardswish,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
}


def mlp(shape: tuple[int, ...], classes: int, *, hidden: str | int = "64", activation: str = "relu") -> Classifier:
    """Flatten, then linear layers of the `hidden` widths with an activation after each, then the head.

    Args:
        shape: any; an example is flattened to n_0 = product of it.
        classes: number of classes C.
        hidden: widths n_1, ..., n_L, comma-separated, e.g. "128,64" (one width may be a number); "" for none, which
            is logistic regression. There are sum_l (n_{l-1} + 1) n_l + (n_L + 1) C parameters: 4,810 with the default
            on (1, 8, 8) and 10 classes.
        activation: "relu", "leaky_relu" (slope .01), "hardswish", "sigmoid" or "tanh".

    Returns:
        A classifier with n_L features, initialized as torch does: U(-1/sqrt(n), 1/sqrt(n)) for n inputs.

    Raises:
        ValueError: an option is not one of the above, or the shape is empty.
    """
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(_ACTIVATIONS)}, not {activation!r}")
    width = math.prod(shape)
    if not shape or width < 1:
        raise ValueError(f"it takes examples with at least one value, not of shape {tuple(shape)}")
    layers: list[nn.Module] = [nn.Flatten()]
    for next_width in _widths(hidden):
        layers += [nn.Linear(width, next_width), _ACTIVATIONS[activation]()]
        width = next_width
    return Classifier(nn.Sequential(*layers), nn.Linear(width, classes))


def _widths(hidden: str | int) -> list[int]:
    """Return the widths in `hidden`; raises ValueError unless all are whole numbers > 0."""
    words = str(hidden).split(",") if str(hidden).strip() else []
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"hidden must be widths > 0 such as '128,64', not {hidden!r}")
    return [int(word) for word in words]
