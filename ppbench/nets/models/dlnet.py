"""DLNet: the LeNet-like target of gradient-inversion papers (SPN paper, Table 6; Zhu, Liu and Han 2019)."""

from __future__ import annotations

from torch import nn

from ppbench.base.errors import shown
from ppbench.nets.models.checks import ACTIVATIONS, DEEPEST, checked_image, checked_int, one_of
from ppbench.nets.net import Classifier


def dlnet(
    shape: tuple[int, ...],
    classes: int,
    *,
    activation: str = "sigmoid",
    init: str = "uniform",
    scale: float = 0.3,
    nconv: int = 4,
) -> Classifier:
    """Four 5x5 convolutions of 12 channels (strides 2, 2, 1, 1), sigmoid after each, one linear layer.

    Images of any size: 32x32 gives 768 features and, with 3 channels and 10 classes, 19,438 parameters (88,648 with
    100 classes). activation: "sigmoid" or "tanh" (the paper takes tanh for SVHN). init: "uniform" draws weights and
    biases from U(-scale, scale), 0.3 in the SPN paper and 0.5 in the DLG release; "default" keeps torch's law. nconv:
    number of convolutions, 4 in the paper's table; 3 in the DLG release.
    """
    one_of("activation", activation, ("sigmoid", "tanh"))
    one_of("init", init, ("uniform", "default"))
    channels, height, width = checked_image(shape)
    checked_int("nconv", nconv, 2, DEEPEST)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale <= 1e6:
        raise ValueError(f"scale must be > 0, at most 1e6, not {shown(scale)}")
    layers: list[nn.Module] = []
    for index in range(nconv):
        stride = 2 if index < 2 else 1
        layers += [nn.Conv2d(channels, 12, 5, stride=stride, padding=2), ACTIVATIONS[activation]()]
        channels, height, width = 12, -(-height // stride), -(-width // stride)
    model = Classifier(nn.Sequential(*layers, nn.Flatten()), nn.Linear(12 * height * width, classes))
    if init == "uniform":
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -scale, scale)
    return model
