"""A frozen image network of torchvision under a trained head: transfer learning (BAFFLE trains MobileNet like this)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from ppbench.base.errors import because, shown
from ppbench.base.files import kind_of
from ppbench.base.import_guard import torchvision
from ppbench.base.tensor_files import named_tensors
from ppbench.nets.models import checks
from ppbench.nets.net import Classifier

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""ImageNet's per-channel statistics, by which torchvision normalized inputs in training."""


class FrozenBackbone(nn.Module):
    """A torchvision network in eval mode with constant weights, on inputs in [0, 1]; grey ones are repeated to RGB."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        for layer in network.modules():
            if hasattr(layer, "inplace"):  # attacks differentiate twice through what would be overwritten
                setattr(layer, "inplace", False)  # noqa: B010 - a plain flag, but nn.Module declares tensors
        self.network = network.eval().requires_grad_(False)
        self.register_buffer("mean", torch.tensor(MEAN)[:, None, None])
        self.register_buffer("std", torch.tensor(STD)[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        """Return features [B, D] of x [B, 1 or 3, H, W]."""
        return self.network((x - self.mean) / self.std)  # type: ignore[no-any-return]


def frozen_backbone(
    shape: tuple[int, ...],
    classes: int,
    *,
    backbone: str = "resnet18",
    weights: str = "",
    backbone_seed: int = 0,
) -> Classifier:
    """A torchvision network whose last linear layer alone is trained; all others are frozen, public, in eval mode.

    Args:
        shape: (1 or 3, height, width); values in [0, 1] are normalized as for ImageNet.
        backbone: a classification network of torchvision.models; 512 features by default, 5,130 parameters with 10
            classes.
        weights: a local file with the state as torchvision distributes it, .safetensors or .pth (tensors only, no
            code), with or without the last layer. "" draws random weights, to try things out: those of mobilenets let
            no signal through in eval mode.
        backbone_seed: of random weights.
    """
    channels, _, _ = checks.checked_image(shape)
    if channels not in (1, 3):
        raise ValueError(f"it takes images with 1 or 3 channels, not {channels}")
    network = _network(backbone, checks.checked_int("backbone_seed", backbone_seed, 0, 2**63 - 1))
    last = [(name, layer.in_features) for name, layer in network.named_modules() if isinstance(layer, nn.Linear)][-1:]
    if not last:
        raise ValueError(f"backbone {shown(backbone)} does not end in a linear layer; take another")
    name, width = last[0]
    network.set_submodule(name, nn.Identity())
    if weights:
        _fill(network, name, str(weights))
    features = FrozenBackbone(network)
    _check_shape(features, backbone, shape, width)
    return Classifier(features, nn.Linear(width, classes))


def _network(backbone: str, seed: int) -> nn.Module:
    models = torchvision().models
    known = models.list_models(module=models)
    if backbone not in known:
        raise ValueError(
            f"backbone {shown(backbone)} is none of torchvision.models, such as mobilenet_v3_small or resnet18"
        )
    with torch.random.fork_rng(devices=[]):  # the head's draws must not depend on the backbone's
        torch.default_generator.manual_seed(seed)
        made: nn.Module = models.get_model(backbone, weights=None)
    return made


def _fill(network: nn.Module, last: str, file: str) -> None:
    path = Path(file).expanduser()
    if kind_of(path) != "file":
        raise ValueError(f"there is no file of weights {path.absolute()}")
    try:
        state = named_tensors(path)
        network.load_state_dict({n: v for n, v in state.items() if not n.startswith(f"{last}.")})
    except Exception as cause:  # a damaged file makes its reader raise anything
        raise ValueError(f"the weights in {path} are not those of this backbone ({because(cause, 300)})") from cause


def _check_shape(features: FrozenBackbone, backbone: str, shape: tuple[int, ...], width: int) -> None:
    try:
        with torch.no_grad():
            feature_shape = features(torch.zeros(1, *shape)).shape
    except (RuntimeError, AssertionError, ValueError) as cause:
        size = f"{shape[1]}x{shape[2]}"
        raise ValueError(f"backbone {shown(backbone)} cannot take images of {size} ({because(cause)})") from cause
    if feature_shape != (1, width):
        actual = tuple(feature_shape[1:])
        raise ValueError(f"backbone {shown(backbone)} makes features of shape {actual} instead of ({width},)")
