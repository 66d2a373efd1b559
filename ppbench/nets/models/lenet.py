"""LeNet of the DLG release: the network that Zhu, Liu and Han's reference code attacks."""

from __future__ import annotations

from typing import Any

from ppbench.nets.models.dlnet import dlnet
from ppbench.nets.net import Classifier


def lenet(shape: tuple[int, ...], classes: int, **options: Any) -> Classifier:
    """Three 5x5 convolutions of 12 channels (strides 2, 2, 1), sigmoid after each, one linear layer.

    This is `dlnet`, with its options, without the last convolution and with weights from U(-0.5, 0.5), as in the DLG
    release. 32x32 gives 768 features and, with 3 channels and 10 classes, 15,826 parameters (85,036 with 100 classes).
    """
    return dlnet(shape, classes, nconv=3, **{"scale": 0.5, **options})


lenet.options_of = dlnet  # type: ignore[attr-defined]
