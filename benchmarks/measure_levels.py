"""What images under noise and blur give away, beside their PSNR: the table of docs/levels.md.

Run: PPBENCH_TEST_DATA=FOLDER python benchmarks/measure_levels.py   (without the folder: digits alone)
FOLDER holds mnist/ and cifar10/ as parquet. Each row damages 200 originals in one way and tells the median PSNR, how
many are found again among the gallery, and of how many the class is read (`ppbench.metrics.recognition`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from sklearn.svm import SVC
from torch import Tensor
from torch.nn.functional import conv2d, pad

from ppbench.metrics.recognition import Gallery, gallery_of
from ppbench.task.user_data import open_dataset

VICTIMS, SIDE = 200, 28
NOISE, BLUR = (0.1, 0.3, 0.5, 1.0, 2.0), (1.5, 4.0)


def blurred(x: Tensor, sigma: float) -> Tensor:
    """Return images [N, C, H, W] under a Gaussian blur of `sigma` pixels, edges repeated."""
    reach = min(int(4 * sigma + 0.5), x.shape[-1] - 1)
    at = torch.arange(-reach, reach + 1, dtype=x.dtype)
    line = torch.exp(-(at**2) / (2 * sigma**2))
    kernel = (line / line.sum()).expand(x.shape[1], 1, 1, -1)
    wide = conv2d(pad(x, (reach, reach, 0, 0), "replicate"), kernel, groups=x.shape[1])
    return conv2d(pad(wide, (0, 0, reach, reach), "replicate"), kernel.transpose(2, 3), groups=x.shape[1])


def damages(x: Tensor, classes: Tensor, gallery: Gallery, draw: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Yield what is done to originals [N, C, H, W], in words, and what comes of it."""
    assert gallery.classes is not None
    for scale in NOISE:
        yield f"s = {scale:g}", x + scale * torch.randn(x.shape, generator=draw)
    for sigma in BLUR:
        yield f"blurred by {sigma:g} of {SIDE} pixels", blurred(x, sigma * x.shape[-1] / SIDE)
    yield "the mean image", gallery.x.mean(0, keepdim=True).expand_as(x)
    yield "another's image", gallery.x[torch.randint(len(gallery.x), (len(x),), generator=draw)]
    yield "uniform noise", torch.rand(x.shape, generator=draw)
    means = torch.stack([gallery.x[gallery.classes == k].mean(0) for k in range(10)])
    yield "the mean of the true class", means[classes]


def decibels(guess: Tensor, truth: Tensor) -> float:
    """Return the median PSNR in dB of clipped images in [0, 1]."""
    return float((-10 * (guess.clamp(0, 1) - truth).square().flatten(1).mean(1).log10()).median())


def machine_reads(
    gallery: Gallery, guess: Tensor, classes: Tensor, noise: float | None, draw: torch.Generator
) -> float:
    """Return the share of classes that a support vector machine reads; noise: also trained on images under it."""
    x, y = gallery.x, gallery.classes
    assert y is not None
    if noise is not None:
        x, y = torch.cat([x, (x + noise * torch.randn(x.shape, generator=draw)).clamp(0, 1)]), torch.cat([y, y])
    fitted = SVC().fit(x.flatten(1).numpy(), y.numpy())
    return float((torch.from_numpy(fitted.predict(guess.clamp(0, 1).flatten(1).numpy())) == classes).double().mean())


def measure(name: str, source: str) -> None:
    """Print the rows of one data set."""
    data, draw = open_dataset(source, seed=0), torch.Generator().manual_seed(0)
    held_out = data.test.take(torch.randperm(len(data.test), generator=draw))
    gallery = gallery_of(held_out.x, held_out.y, torch.arange(len(held_out.x)), (0.0, 1.0), True)
    assert gallery is not None
    some = data.train.take(torch.randperm(len(data.train), generator=draw)[:VICTIMS])
    truth, classes = some.x, some.y.argmax(1)
    print(f"{name}: {len(truth)} originals, gallery of {len(gallery.x)}")
    row: Callable[[Tensor], str] = lambda guess: figures_of(gallery, guess, truth, classes)  # noqa: E731
    for words, guess in damages(truth, classes, gallery, draw):
        print(f"  {words:<30} {row(guess)}")
    noisy = truth + 0.5 * torch.randn(truth.shape, generator=draw)
    clean, hardened = (machine_reads(gallery, noisy, classes, noise, draw) for noise in (None, 0.5))
    print(f"  a support vector machine reads at s = 0.5: {clean:.0%}, trained on noisy images too {hardened:.0%}")


def figures_of(gallery: Gallery, guess: Tensor, truth: Tensor, classes: Tensor) -> str:
    """Return median dB, the share found again and the share read."""
    result = gallery.recognize(guess.clamp(0, 1), truth, classes)
    again, read = (sum(some) / len(result) for some in ([f.rank == 0 for f in result], [bool(f.read) for f in result]))
    return f"{decibels(guess, truth):5.1f} dB, found {again:4.0%}, read {read:4.0%}"


def main() -> None:
    """Measure all data sets that are at hand."""
    measure("digits", "digits")
    if place := os.environ.get("PPBENCH_TEST_DATA"):
        for name, folder in (("MNIST", "mnist"), ("CIFAR-10", "cifar10")):
            measure(name, f"parquet:{Path(place) / folder}")


if __name__ == "__main__":
    main()
