"""DLNet: the LeNet-like target of gradient-inversion papers (SPN paper, Table 6; Zhu, Liu and Han 2019)."""

from __future__ import annotations

from torch import nn

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

    Args:
        shape: (channels, height, width) of any size; 32x32 gives 768 features and, with 3 channels and 10 classes,
            19,438 parameters (88,648 with 100 classes).
        classes: number of classes.
        activation: "sigmoid" or "tanh" (the paper takes tanh for SVHN).
        init: "uniform" draws weights and biases from U(-scale, scale); "default" keeps torch's.
        scale: half-width of the uniform law; .3 in the SPN paper, .5 in the DLG release.
        nconv: number of convolutions, 4 in the paper's table; 3 in the DLG release.

    Raises:
        ValueError: an option or the shape is not one of the above.
    """
    activations = {"sigmoid": nn.Sigmoid, "tanh": nn.Tanh}
    if activation not in activations:
        raise ValueError(f"activation must be 'sigmoid' or 'tanh', not {activation!r}")
    if init not in ("uniform", "default"):
        raise ValueError(f"init must be 'uniform' or 'default', not {init!r}")
    if len(shape) != 3 or min(shape) < 1 or nconv < 2 or not scale > 0:
        raise ValueError("it takes images (channels, height, width), nconv >= 2 and scale > 0")
    channels, height, width = shape
    layers: list[nn.Module] = []
    for index in range(nconv):
        stride = 2 if index < 2 else 1
        layers += [nn.Conv2d(channels, 12, 5, stride=stride, padding=2), activations[activation]()]
        channels, height, width = 12, -(-height // stride), -(-width // stride)
    model = Classifier(nn.Sequential(*layers, nn.Flatten()), nn.Linear(12 * height * width, classes))
    if init == "uniform":
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -scale, scale)
    return model
