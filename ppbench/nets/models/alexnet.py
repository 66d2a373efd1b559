"""AlexNet for 32x32 inputs (SPN paper, Table 4: "modified AlexNet")."""

from __future__ import annotations

from torch import nn

from ppbench.nets.models.checks import checked_image
from ppbench.nets.net import Classifier


def alexnet(shape: tuple[int, ...], classes: int) -> Classifier:
    """Five convolutions (64 and 192 of 5x5; 384, 256, 256 of 3x3) with ReLU, three 2x2 max pools, two linear layers.

    Images of at least 8x8; (3, 32, 32) with 10 classes gives 3,502,666 parameters. 256 features; weights are
    Kaiming-uniform for ReLU, biases 0.
    """
    channels, height, width = checked_image(shape, 8)
    layers: list[nn.Module] = []
    for maps, kernel, pooled in ((64, 5, True), (192, 5, True), (384, 3, False), (256, 3, False), (256, 3, True)):
        layers += [nn.Conv2d(channels, maps, kernel, padding=kernel // 2), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if pooled else []
        channels = maps
    flat = channels * (height // 8) * (width // 8)
    model = Classifier(nn.Sequential(*layers, nn.Flatten(), nn.Linear(flat, 256), nn.ReLU()), nn.Linear(256, classes))
    kaiming_uniform(model)
    return model


def kaiming_uniform(model: nn.Module) -> None:
    """Draw the weights of convolutions and linear layers, in place, from torch's global generator; biases become 0.

    He et al. 2015, for ReLU: U(-b, b) with b = sqrt(6 / fan_in).
    """
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
