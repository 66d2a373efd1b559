"""LeNet of the DLG release: the network that Zhu, Liu and Han's reference code attacks."""

from __future__ import annotations

from ppbench.nets.models.dlnet import dlnet
from ppbench.nets.net import Classifier


def lenet(
    shape: tuple[int, ...],
    classes: int,
    *,
    activation: str = "sigmoid",
    init: str = "uniform",
    scale: float = 0.5,
) -> Classifier:
    """Three 5x5 convolutions of 12 channels (strides 2, 2, 1), sigmoid after each, one linear layer.

    This is `dlnet` without its last convolution, and with weights from U(-.5, .5) as the DLG release draws them.

    Args:
        shape: (channels, height, width) of any size; 32x32 gives 768 features and, with 3 channels and 10 classes,
            15,826 parameters (85,036 with 100 classes).
        classes: number of classes.
        activation: "sigmoid" or "tanh".
        init: "uniform" draws weights and biases from U(-scale, scale); "default" keeps torch's.
        scale: half-width of the uniform law.

    Raises:
        ValueError: an option or the shape is not one of the above.
    """
    return dlnet(shape, classes, activation=activation, init=init, scale=scale, nconv=3)
