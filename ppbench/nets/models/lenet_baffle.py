"""The small LeNet that BAFFLE's figures fit: 27,242 parameters on 28x28 grey images."""

from __future__ import annotations

from torch import nn

from ppbench.nets.models import checks
from ppbench.nets.net import Classifier

BAFFLE_ACTIVATIONS: dict[str, type[nn.Module]] = {"hardswish": nn.Hardswish, "relu": nn.ReLU, "selu": nn.SELU}
MAPS, HIDDEN = (6, 16), 60


def lenet_baffle(
    shape: tuple[int, ...], classes: int, *, activation: str = "hardswish", norm: str = "none"
) -> Classifier:
    """Two 5x5 convolutions of 6 and 16 channels with 2x2 average pools, then a linear layer of 60, then the head.

    The paper (Feng et al. 2023) gives a LeNet of 2.7e4 parameters and no more. This one has 27,242 on (1, 28, 28) and
    on (1, 32, 32), 27,542 on (3, 32, 32) with 10 classes and 33,032 there with 100.

    shape: at least 12x12; images of up to 28 rows or columns are padded by 2, to 400 features as those of 32x32.
    activation: "hardswish" (the paper's), "relu" or "selu" (its ablations). norm: "none", or "gn": group normalization
    before both convolutional activations, of two channels a group.
    """
    checks.one_of("activation", activation, BAFFLE_ACTIVATIONS)
    checks.one_of("norm", norm, ("none", "gn"))
    channels, height, width = checks.checked_image(shape, 12)
    padding = 2 if min(height, width) <= 28 else 0
    layers: list[nn.Module] = []
    for maps in MAPS:
        layers += [nn.Conv2d(channels, maps, 5, padding=padding)]
        layers += [nn.GroupNorm(maps // 2, maps)] if norm == "gn" else []
        layers += [BAFFLE_ACTIVATIONS[activation](), nn.AvgPool2d(2)]
        height, width = (height + 2 * padding - 4) // 2, (width + 2 * padding - 4) // 2
        channels, padding = maps, 0
    layers += [nn.Flatten(), nn.Linear(channels * height * width, HIDDEN), BAFFLE_ACTIVATIONS[activation]()]
    return Classifier(nn.Sequential(*layers), nn.Linear(HIDDEN, classes))
