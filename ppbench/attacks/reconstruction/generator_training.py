"""Trains a decoder on public images, the half of an autoencoder that attackers keep; seconds to minutes on a core.

The map before every block is searched too, so each is trained to be a code: a step decodes from one stage, whose code
is blurred by noise. Codes are scaled to mean square 1 at the end, so that one learning rate fits all stages.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import conv2d, leaky_relu, linear, mse_loss

from ppbench.attacks.reconstruction.generator import (
    FORMAT,
    SLOPE,
    Architecture,
    Decoder,
    Generator,
    Provenance,
    architecture,
    cache_folder,
    cached,
    file_name,
    fingerprints,
    initial_weights,
)
from ppbench.base.tree import Params

LATENT_NOISE = 0.05
MEASURED, CLOSEST, REFINED = 500, 16, 200
"""Held-out images, at most; those whose best latent is searched; and the steps of that search."""


@dataclass(frozen=True)
class Training:
    """How a generator is trained: `steps` of Adam with a cosine-decayed rate, on `batch` images each.

    noise: standard deviation of the noise on maps; penalty: weight of their mean square, which limits codes.
    """

    steps: int = 4000
    batch: int = 32
    lr: float = 2e-3
    noise: float = 0.5
    penalty: float = 1e-3
    seed: int = 0


def trained_generator(
    images: Tensor,
    data_range: tuple[float, float],
    training: Training,
    split: str = "public examples",
    folder: Path | None = None,
) -> Generator:
    """Return a decoder trained on images [N, *shape]: from the cache `folder`, or now; deterministic on one machine.

    A tenth, at most 500, is held out; `split` describes the images. UsageError: below 8x8 pixels, or not writable.
    """
    plan = architecture(tuple(images.shape[1:]))
    data = images_digest(images)
    name = file_name(data, split, data_range, asdict(plan), asdict(training))
    path = (cache_folder() if folder is None else folder) / name
    return cached(path, lambda: fresh(images, data, plan, data_range, training, split))


def images_digest(images: Tensor) -> str:
    """Return the SHA-256 of the shape and pixels of images, in hexadecimal."""
    hashed = hashlib.sha256(repr((tuple(images.shape), str(images.dtype))).encode())
    hashed.update(images.detach().cpu().contiguous().numpy().tobytes())
    return hashed.hexdigest()


def fresh(
    images: Tensor, data: str, plan: Architecture, data_range: tuple[float, float], training: Training, split: str
) -> Generator:
    """Return a newly trained generator, on one thread: sums in another order would give another file."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        generator = torch.Generator().manual_seed(training.seed)
        order = torch.randperm(len(images), generator=generator)
        count = min(MEASURED, max(1, len(images) // 10)) if len(images) > 1 else 0
        left_out, kept = images[order[:count]].float(), images[order[count:]].float()
        low, high = map(float, data_range)
        pair = Autoencoder(plan, low, high, generator)
        pair.fit(kept, training, generator)
        decoder, encode = pair.finished(kept[: 4 * MEASURED])
        test = left_out if count else kept
        ceiling, best = measured(decoder, encode(test), test)
    finally:
        torch.set_num_threads(before)
    about = Provenance(
        FORMAT, plan, (low, high), data, split, len(kept), training.steps, training.batch, training.lr,
        training.noise, training.seed, ceiling, best, count,
    )  # fmt: skip
    return Generator(decoder, about, fingerprints(kept, low, high))


def measured(decoder: Decoder, latents: Tensor, images: Tensor) -> tuple[float, float]:
    """Return the median PSNR in decibels of images decoded from latents [N, L], and from optimized ones nearby."""
    peak = decoder.high - decoder.low

    def quality(z: Tensor, x: Tensor) -> Tensor:
        return -10 * torch.log10(((decoder.decode(z) - x) / peak).square().flatten(1).mean(1).clamp(min=1e-10))

    z, x = latents[:CLOSEST].clone().requires_grad_(), images[:CLOSEST]
    adam = torch.optim.Adam([z], lr=0.05)
    with torch.enable_grad():
        for _ in range(REFINED):
            adam.zero_grad()
            (-quality(z, x).sum()).backward()
            adam.step()
    with torch.no_grad():
        return float(quality(latents, images).median()), float(quality(z, x).median())


class Autoencoder:
    """A decoder and its encoder in training. Images are padded to a multiple of the smallest map."""

    def __init__(self, plan: Architecture, low: float, high: float, generator: torch.Generator) -> None:
        self.plan, self.low, self.high = plan, low, high
        self.params = initial_weights(plan, generator)
        self.encoder = Params()
        wide = (*plan.widths, plan.shape[0])
        for k, (out, into) in enumerate(zip(plan.widths, wide[1:], strict=True), start=1):
            self._layer(f"down{k}", (out, into, 4, 4), generator)
            self._layer(f"code{k}", (out, out, 1, 1), generator)
        self._layer("code0", (plan.latent, math.prod(plan.size(1))), generator)

    def _layer(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> None:
        spread = math.sqrt(2 / math.prod(shape[1:]))
        self.encoder[f"{name}.weight"] = torch.randn(shape, generator=generator) * spread
        self.encoder[f"{name}.bias"] = torch.zeros(shape[0])

    def encode(self, images: Tensor, stage: int) -> Tensor:
        """Return the codes [S, *size(stage)] of images [S, *shape]."""
        params, factor = self.encoder, 2 ** len(self.plan.widths)
        grown = [side * factor - size for side, size in zip(self.plan.base, self.plan.shape[1:], strict=True)]
        h = 2 * (images - self.low) / (self.high - self.low) - 1
        h = torch.nn.functional.pad(h, (0, grown[1], 0, grown[0]))
        for k in range(len(self.plan.widths), max(stage, 1) - 1, -1):
            h = conv2d(h, params[f"down{k}.weight"], params[f"down{k}.bias"], stride=2, padding=1)
            if k == stage:
                return conv2d(h, params[f"code{k}.weight"], params[f"code{k}.bias"])
            h = leaky_relu(h, SLOPE)
        code: Tensor = linear(h.flatten(1), params["code0.weight"], params["code0.bias"])
        return code

    def loss(self, images: Tensor, stage: int, training: Training, generator: torch.Generator) -> Tensor:
        """Return the mean squared error, in units of the range, through the noisy code of one stage, plus a penalty."""
        code = self.encode(images, stage)
        noise = torch.randn(code.shape, generator=generator) * (training.noise if stage else LATENT_NOISE)
        decoded = Decoder(self.plan, self.params, self.low, self.high).decode(code + noise, stage)
        weight = training.penalty if stage else 0.01 * training.penalty
        scale = self.high - self.low
        return mse_loss(decoded / scale, images / scale) + weight * code.square().mean()

    def fit(self, images: Tensor, training: Training, generator: torch.Generator) -> None:
        """Train both halves; stages alternate."""
        leaves = [value.requires_grad_() for tree in (self.params, self.encoder) for value in tree.values()]
        adam = torch.optim.Adam(leaves, lr=training.lr)
        with torch.enable_grad():
            for step in range(training.steps):
                decay = 0.5 * (1 + math.cos(math.pi * step / training.steps)) * min(1.0, (step + 1) / 100)
                adam.param_groups[0]["lr"] = training.lr * decay
                rows = torch.randint(len(images), (training.batch,), generator=generator)
                adam.zero_grad()
                self.loss(images[rows], step % self.plan.blocks, training, generator).backward()
                adam.step()
        for leaf in leaves:
            leaf.requires_grad_(False)

    def finished(self, images: Tensor) -> tuple[Decoder, Callable[[Tensor], Tensor]]:
        """Return the decoder for latents of mean 0, variance 1 and maps of mean square 1 on images, and its encoder."""
        codes = self.encode(images, 0).double()
        mean = codes.mean(0)
        values, vectors = torch.linalg.eigh((codes - mean).T @ (codes - mean) / len(codes))
        spread = values.clamp(min=1e-6 * float(values[-1])).sqrt()
        params = {key: value.clone() for key, value in self.params.items()}
        weight = params["block0.weight"].double()
        params["block0.bias"] += (weight @ mean).float()
        params["block0.weight"] = (weight @ (vectors * spread)).float()

        def encode(x: Tensor) -> Tensor:
            latents: Tensor = (self.encode(x, 0).double() - mean) @ vectors / spread
            return latents.float()

        decoder, h = Decoder(self.plan, params, self.low, self.high), encode(images)
        for k in range(self.plan.blocks - 1):
            h = decoder.block(k, h)
            size = h.square().mean().sqrt().clamp(min=1e-6)
            h = h / size
            for part in ("weight", "bias"):
                params[f"block{k}.{part}"] /= size
            params[f"block{k + 1}.weight"] *= size
        return decoder, encode
