"""WRN-10-2: a wide residual network of ten layers (Zagoruyko and Komodakis, BMVC 2016) as BAFFLE uses it.

Batch normalization ties a loss to the statistics of its batch, which finite differences of single batches cannot
track; BAFFLE's guidelines take group normalization and Hardswish instead (Feng et al. 2023, Section 3.3).
"""

from __future__ import annotations

from torch import Tensor, nn

from ppbench.nets.models import checks
from ppbench.nets.models.lenet_baffle import BAFFLE_ACTIVATIONS
from ppbench.nets.models.resnet import conv3x3
from ppbench.nets.net import Classifier

STEM, WIDTHS, GROUPS = 16, (32, 64, 128), 8


class PreActivated(nn.Module):
    """Norm, activation, convolution, twice; the shortcut is a 1x1 convolution of the first activation's output."""

    def __init__(self, inside: int, outside: int, stride: int, activation: type[nn.Module], norm: str) -> None:
        super().__init__()
        self.norm1, self.act1, self.conv1 = _norm(norm, inside), activation(), conv3x3(inside, outside, stride)
        self.norm2, self.act2, self.conv2 = _norm(norm, outside), activation(), conv3x3(outside, outside)
        self.shortcut = nn.Conv2d(inside, outside, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, outside, H', W'] for x [B, inside, H, W]."""
        active = self.act1(self.norm1(x))
        branch: Tensor = self.conv2(self.act2(self.norm2(self.conv1(active))))
        return branch + self.shortcut(active)  # type: ignore[no-any-return]


def wrn_10_2(shape: tuple[int, ...], classes: int, *, activation: str = "hardswish", norm: str = "gn") -> Classifier:
    """A 3x3 convolution of 16 channels, one pre-activation block each of 32, 64 and 128, global average pool, head.

    The last two blocks halve the image, of any size. 128 features, and 303,706 parameters for (3, 32, 32) and 10
    classes, 315,316 for 100; initialized as torch does. activation: "hardswish" (the paper's), "relu" or "selu" (its
    ablations). norm: "gn", group normalization of 8 groups with affine part before each activation, or "none".
    """
    checks.one_of("activation", activation, BAFFLE_ACTIVATIONS)
    checks.one_of("norm", norm, ("gn", "none"))
    channels, _, _ = checks.checked_image(shape)
    layers: list[nn.Module] = [conv3x3(channels, STEM)]
    inside = STEM
    for outside in WIDTHS:
        stride = 1 if inside == STEM else 2
        layers.append(PreActivated(inside, outside, stride, BAFFLE_ACTIVATIONS[activation], norm))
        inside = outside
    layers += [_norm(norm, inside), BAFFLE_ACTIVATIONS[activation](), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return Classifier(nn.Sequential(*layers), nn.Linear(inside, classes))


def _norm(kind: str, channels: int) -> nn.Module:
    return nn.GroupNorm(GROUPS, channels) if kind == "gn" else nn.Identity()
