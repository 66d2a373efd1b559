"""LPIPS and feature errors: perceptual distances of two images by a network (Zhang et al. 2018).

The network is torchvision's AlexNet, its convolutions from a file of the user (nothing is downloaded; without a file
both figures are null), LPIPS' linear layers from the `lpips` package. Records name the file by its SHA-256. Images of
28 to 31 pixels a side are padded to 32 with the darkest value; smaller ones have no LPIPS.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ppbench.base.errors import UsageError, because
from ppbench.base.files import kind_of
from ppbench.base.import_guard import lpips
from ppbench.base.tensor_files import named_tensors
from ppbench.metrics.modality import modality_from

WEIGHTS_VARIABLE = "PPBENCH_WEIGHTS"
"""Environment variable that names the file of weights if no option does."""
SMALLEST_SIDE = 28
"""Smallest side, in pixels, of images that are measured."""
FRAME = 32
"""Side, in pixels, that smaller images are padded to."""
ALEXNET_SHAPES: dict[str, tuple[int, ...]] = {
    "features.0": (64, 3, 11, 11),
    "features.3": (192, 64, 5, 5),
    "features.6": (384, 192, 3, 3),
    "features.8": (256, 384, 3, 3),
    "features.10": (256, 256, 3, 3),
}
"""AlexNet's convolutions: name and shape of each weight; a bias has the first size."""
_BLOCK = 64  # images measured at a time


@dataclass(frozen=True)
class PerceptualFigures:
    """Figures of one reconstruction: LPIPS (AlexNet, version 0.1; 0 for equal images, about 0.7 for unlike ones) and
    feat_mse, the mean squared error of the last convolution's output (after its ReLU).
    """

    lpips: float
    feat_mse: float


@dataclass(frozen=True, eq=False)
class Network:
    """The feature network. name: its name in records."""

    name: str
    model: nn.Module

    def compare(
        self, guess: Tensor, truth: Tensor, data_range: tuple[float, float] = (0.0, 1.0)
    ) -> list[PerceptualFigures]:
        """Return the figures of pairs of images [N, C, H, W], clipped, C 1 or 3 (else ValueError).

        A guess that is not finite counts as mid-grey.
        """
        if guess.shape != truth.shape or guess.dim() != 4 or not measurable(tuple(guess.shape[1:])):
            raise ValueError(f"no perceptual figures of {tuple(guess.shape)} for images of {tuple(truth.shape)}")
        finite = guess.flatten(1).isfinite().all(1).reshape(-1, 1, 1, 1)
        filled = torch.where(finite, guess, sum(data_range) / 2)
        figures: list[PerceptualFigures] = []
        for start in range(0, len(guess), _BLOCK):
            pair = [_prepared(x[start : start + _BLOCK], data_range) for x in (filled, truth)]
            figures += _compared(self.model, *pair)
        return figures

    @torch.no_grad()
    def features(self, images: Tensor, data_range: tuple[float, float] = (0.0, 1.0)) -> Tensor:
        """Return the last convolution's output of images [N, C, H, W], after its ReLU, flat: [N, D] float64."""
        parts = [_last(self.model, _prepared(block, data_range)).flatten(1) for block in images.split(_BLOCK)]
        return torch.cat(parts)


def measurable(shape: tuple[int, ...]) -> bool:
    """Return whether `shape` is that of images with perceptual figures: 1 or 3 channels, at least 28 pixels a side."""
    return modality_from(shape).perceptual and shape[0] in (1, 3) and min(shape[1:]) >= SMALLEST_SIDE


def _prepared(images: Tensor, data_range: tuple[float, float]) -> Tensor:
    """Return images in [-1, 1] with three channels, at least FRAME pixels a side, float32 on the CPU."""
    low, high = data_range
    scaled = (images.detach().cpu().double().clamp(low, high) - low) / (high - low) * 2 - 1
    down, across = (max(0, FRAME - side) for side in scaled.shape[2:])
    frame = (across // 2, across - across // 2, down // 2, down - down // 2)
    return nn.functional.pad(scaled.float().expand(-1, 3, -1, -1), frame, value=-1.0)


@torch.no_grad()
def _compared(model: Any, guess: Tensor, truth: Tensor) -> list[PerceptualFigures]:
    distance = model(guess, truth).flatten().double()
    last = [_last(model, x) for x in (guess, truth)]
    error = (last[0] - last[1]).square().flatten(1).mean(1)
    pairs = zip(distance.tolist(), error.tolist(), strict=True)
    return [PerceptualFigures(max(d, 0.0), e) for d, e in pairs]


def _last(model: Any, images: Tensor) -> Tensor:
    """Return the last convolution's output of prepared images, after its ReLU."""
    features: Tensor = model.net(model.scaling_layer(images)).relu5.double()
    return features


def weights_file(weights: str | None) -> Path | None:
    """Return the file `weights`, else that of `PPBENCH_WEIGHTS`, else one in torchvision's cache, else None.

    UsageError: a named file is missing.
    """
    for source, name in (
        ("option weights", weights),
        (f"the environment's {WEIGHTS_VARIABLE}", os.environ.get(WEIGHTS_VARIABLE)),
    ):
        if name:
            try:
                path = Path(name).expanduser()
                exists = kind_of(path) == "file"
            except (OSError, RuntimeError) as cause:  # a name too long, a folder that is closed, a home of nobody
                raise UsageError(f"The file that {source} names cannot be read ({because(cause)}).") from cause
            if not exists:
                raise UsageError(f"There is no file {path}, which {source} names; give a file of AlexNet's weights.")
            return path
    cached = sorted((Path(torch.hub.get_dir()) / "checkpoints").glob("alexnet-owt-*.pth"))
    return cached[0] if cached else None


def weights_identity(weights: str | None) -> str:
    """Return "alexnet sha256:DIGEST", or "" without a file of weights (UsageError: the file cannot be used)."""
    path = weights_file(weights)
    return "" if path is None else _checked(*_stamp(path))


def check_weights(weights: str | None, shape: tuple[int, ...]) -> None:
    """Raise UsageError for an unusable file of weights; one that is not named is checked only if `shape` needs it."""
    if weights or measurable(shape):
        weights_identity(weights)


def feature_network(weights: str | None) -> Network | None:
    """Return the feature network, or None without a file of weights (UsageError: the file cannot be used)."""
    path = weights_file(weights)
    return None if path is None else _network(*_stamp(path))


def _stamp(path: Path) -> tuple[Path, int, int]:
    status = path.stat()
    return path.absolute(), status.st_size, status.st_mtime_ns


@lru_cache(maxsize=4)
def _checked(path: Path, size: int, changed: int) -> str:
    alexnet_tensors(path)
    return f"alexnet sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


@lru_cache(maxsize=1)
def _network(path: Path, size: int, changed: int) -> Network:
    package: Any = lpips()
    with warnings.catch_warnings(), torch.device("meta"):  # random weights would use the global generator, and 240 MB
        warnings.simplefilter("ignore")
        model = package.LPIPS(net="alex", pretrained=False, pnet_rand=True, verbose=False).eval()
    path_of_heads = Path(package.__file__).parent / "weights" / "v0.1" / "alex.pth"
    linear = torch.load(path_of_heads, map_location="cpu", weights_only=True)
    backbone = {name: value.float() for name, value in alexnet_tensors(path).items()}
    # lpips cuts AlexNet into five slices and keeps torchvision's layer numbers within them.
    state = {
        f"net.slice{i}.{layer.removeprefix('features.')}.{part}": backbone[f"{layer}.{part}"]
        for i, layer in enumerate(ALEXNET_SHAPES, start=1)
        for part in ("weight", "bias")
    }
    model.load_state_dict({**linear, **state}, strict=False, assign=True)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise UsageError("This release of lpips keeps AlexNet in another form; install lpips 0.1.4.")
    return Network(_checked(path, size, changed), model.requires_grad_(False))


def alexnet_tensors(path: Path) -> Mapping[str, Tensor]:
    """Return AlexNet's ten tensors of a file (UsageError: damaged, or a tensor missing, misshapen or not finite)."""
    state = named_tensors(path)
    tensors = {}
    for layer, shape in ALEXNET_SHAPES.items():
        for name, expected in ((f"{layer}.weight", shape), (f"{layer}.bias", shape[:1])):
            value = state.get(name)
            if not isinstance(value, Tensor):
                raise UsageError(f"{path} has no tensor {name!r}; give AlexNet's convolutions (features.0 to .10).")
            if tuple(value.shape) != expected:
                raise UsageError(f"{path}: tensor {name!r} has shape {tuple(value.shape)}, AlexNet's has {expected}.")
            if not value.is_floating_point() or not bool(value.isfinite().all()):
                raise UsageError(f"{path}: tensor {name!r} holds values that are no finite numbers.")
            tensors[name] = value
    return tensors
