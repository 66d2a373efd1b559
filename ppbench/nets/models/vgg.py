"""VGG16 with group normalization, for 32x32 inputs (SPN paper, Table 5: "modified VGG16")."""

from __future__ import annotations

from torch import nn

from ppbench.base.errors import shown
from ppbench.nets.models.alexnet import kaiming_uniform
from ppbench.nets.models.checks import checked_image
from ppbench.nets.net import Classifier

_BLOCKS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def vgg16(shape: tuple[int, ...], classes: int, *, groups: int = 32, late_stride: int = 2) -> Classifier:
    """Thirteen 3x3 convolutions, each with group normalization and ReLU, in five pooled blocks; two linear layers.

    The paper's table prints sizes that contradict each other after the third pool. By default all five pools halve the
    image; `late_stride=1` makes the last two 3x3 pools that keep its size (32x32 ends at 4x4, the size printed last).

    Args:
        shape: (channels, height, width), at least 32x32 (8x8 with late_stride 1); (3, 32, 32) with 10 classes gives
            14,857,034 parameters (16,823,114 with late_stride 1).
        groups: groups of each normalization, a divisor of 64; the paper gives none, 32 is Wu and He's (2018).
        late_stride: stride of pools 4 and 5, 2 or 1.

    256 features; weights are Kaiming-uniform for ReLU, biases 0.
    """
    if isinstance(late_stride, bool) or late_stride not in (1, 2):
        raise ValueError(f"late_stride must be 1 or 2, not {shown(late_stride)}")
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1 or 64 % groups:
        raise ValueError(f"groups must divide 64, not be {shown(groups)}")
    shrink = 32 if late_stride == 2 else 8
    channels, height, width = checked_image(shape, shrink)
    layers: list[nn.Module] = []
    for block, widths in enumerate(_BLOCKS):
        for maps in widths:
            layers += [nn.Conv2d(channels, maps, 3, padding=1), nn.GroupNorm(groups, maps), nn.ReLU()]
            channels = maps
        layers.append(nn.MaxPool2d(2) if block < 3 or late_stride == 2 else nn.MaxPool2d(3, stride=1, padding=1))
    flat = channels * (height // shrink) * (width // shrink)
    features = nn.Sequential(*layers, nn.Flatten(), nn.Linear(flat, 256), nn.ReLU())
    model = Classifier(features, nn.Linear(256, classes))
    kaiming_uniform(model)
    return model
