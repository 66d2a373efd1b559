"""ResNet-50 for small images without normalization (Zhang, Dauphin and Ma, Fixup Initialization, ICLR 2019).

FedPC trains it because statistics of batch normalization would leak. Bottlenecks, a 3x3 stem without pooling.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ppbench.base.errors import shown
from ppbench.nets.models import checks
from ppbench.nets.models.alexnet import kaiming_uniform
from ppbench.nets.models.resnet import Shift, conv3x3
from ppbench.nets.net import Classifier

EXPANSION = 4
"""Output channels of a bottleneck for one of its inner channels."""
STAGE_COUNT = 4


def conv1x1(inside: int, outside: int, stride: int = 1) -> nn.Conv2d:
    """Return a 1x1 convolution without bias."""
    return nn.Conv2d(inside, outside, 1, stride=stride, bias=False)


class FixupBottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolution, a scalar bias before each and each ReLU, one multiplier; plus the shortcut, ReLU.

    Where the shape changes the shortcut is a 1x1 convolution of the input, which has had the branch's first bias.
    """

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = EXPANSION * width
        self.before1, self.conv1, self.after1 = Shift(1), conv1x1(inside, width), Shift(1)
        self.before2, self.conv2, self.after2 = Shift(1), conv3x3(width, width, stride), Shift(1)
        self.before3, self.conv3, self.after3 = Shift(1), conv1x1(width, outside), Shift(1)
        self.scale = nn.Parameter(torch.ones(1))
        changes = stride != 1 or inside != outside
        self.shortcut = conv1x1(inside, outside, stride) if changes else nn.Identity()
        self.relu1, self.relu2, self.relu3 = nn.ReLU(), nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, 4 width, H', W'] for x [B, inside, H, W]."""
        shifted = self.before1(x)
        branch = self.relu1(self.after1(self.conv1(shifted)))
        branch = self.relu2(self.after2(self.conv2(self.before2(branch))))
        branch = self.after3(self.conv3(self.before3(branch)) * self.scale)
        around = x if isinstance(self.shortcut, nn.Identity) else self.shortcut(shifted)
        return self.relu3(branch + around)  # type: ignore[no-any-return]


def resnet50_fixup(
    shape: tuple[int, ...], classes: int, *, width: int = 64, blocks: str | int = "3,4,6,3"
) -> Classifier:
    """ResNet of 50 layers for small images under Fixup: scalar biases and multipliers instead of norms.

    Initial law (the paper's Section 3.2 with m = 3 convolutions a branch): Kaiming-uniform for ReLU; the first two
    convolutions of each of the L branches times L^(-1/4), the third one and the head zero; biases 0, multipliers 1: AT
    INITIALIZATION no image can be rebuilt from the gradient, which is no merit of a defense.

    Args:
        shape: (channels, height, width) of any size; the first block of stages two to four halves it.
        width: inner channels of the first stage, doubled at each of the next three. (3, 32, 32) with 10 classes has
            23,467,836 parameters; width 40, 9,172,404 (35.0 MiB in float32).
        blocks: bottlenecks of the four stages, comma-separated; L is their sum, 16.
    """
    channels, _, _ = checks.checked_image(shape)
    inside, counts = checks.checked_int("width", width, 1), checks.widths("blocks", blocks)
    if len(counts) != STAGE_COUNT:
        raise ValueError(
            f"blocks must name the bottlenecks of {STAGE_COUNT} stages, such as '3,4,6,3', not {shown(blocks)}"
        )
    layers: list[nn.Module] = [conv3x3(channels, inside), Shift(1), nn.ReLU()]
    for stage, count in enumerate(counts):
        for index in range(count):
            stride = 2 if stage > 0 and index == 0 else 1
            layers.append(FixupBottleneck(inside, width * 2**stage, stride))
            inside = EXPANSION * width * 2**stage
    layers += [nn.AdaptiveAvgPool2d(1), Shift(1), nn.Flatten()]
    model = Classifier(nn.Sequential(*layers), nn.Linear(inside, classes))
    _initialize(model, sum(counts))
    return model


def _initialize(model: Classifier, branches: int) -> None:
    kaiming_uniform(model)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, FixupBottleneck):
                layer.conv1.weight.mul_(branches**-0.25)
                layer.conv2.weight.mul_(branches**-0.25)
                layer.conv3.weight.zero_()
        model.head.weight.zero_()
