"""A plain convolutional network: blocks of convolution, activation and pooling, then linear layers."""

from __future__ import annotations

from torch import nn

from ppbench.nets.models import checks
from ppbench.nets.models.alexnet import kaiming_uniform
from ppbench.nets.net import Classifier

_POOLS: dict[str, type[nn.MaxPool2d] | type[nn.AvgPool2d]] = {"max": nn.MaxPool2d, "avg": nn.AvgPool2d}


def cnn(
    shape: tuple[int, ...],
    classes: int,
    *,
    widths: str | int = "32,32",
    hidden: str | int = "",
    pool: str = "max",
    activation: str = "relu",
    bias: bool = True,
) -> Classifier:
    """One block a width: 3x3 convolution (padding 1), activation, 2x2 pool; then linear layers, then the head.

    Args:
        shape: at least 2 to the number of blocks high and wide; (3, 32, 32) and 10 classes have 30,634 parameters.
        widths: channels of the blocks, comma-separated, one at least.
        hidden: widths of linear layers between the blocks and the head, with the activation after each; "" for none.
        pool, activation: "max" or "avg"; "relu", "leaky_relu" (slope 0.01) or "tanh".
        bias: of all layers and the head; at first they are 0, weights Kaiming-uniform.
    """
    checks.one_of("pool", pool, _POOLS)
    checks.one_of("activation", activation, ("relu", "leaky_relu", "tanh"))
    blocks = checks.widths("widths", widths)
    if not blocks:
        raise ValueError("widths must name one block at least; without convolutions use the model 'mlp'")
    channels, height, width = checks.checked_image(shape, 2 ** len(blocks))
    layers: list[nn.Module] = []
    for maps in blocks:
        convolution = nn.Conv2d(channels, maps, 3, padding=1, bias=checks.checked_flag("bias", bias))
        layers += [convolution, checks.ACTIVATIONS[activation](), _POOLS[pool](2)]
        channels, height, width = maps, height // 2, width // 2
    layers.append(nn.Flatten())
    flat = channels * height * width
    for units in checks.widths("hidden", hidden):
        layers += [nn.Linear(flat, units, bias=bias), checks.ACTIVATIONS[activation]()]
        flat = units
    model = Classifier(nn.Sequential(*layers), nn.Linear(flat, classes, bias=bias))
    kaiming_uniform(model)
    return model
