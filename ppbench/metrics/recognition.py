"""Recognition: whether a reconstruction re-identifies its original among other images, or shows its class.

PSNR punishes noise that a viewer ignores: a digit under noise at 9 dB is re-identified among 1,000 others every time,
while another person's digit, at 10 dB, scores better. Both figures use a gallery of held-out images that nobody trains
on. Similarity is the correlation of centred pixels, which brightness and contrast do not change, and, if there is a
feature network, of its features.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ppbench.metrics.modality import modality_from

if TYPE_CHECKING:
    from ppbench.metrics.perceptual import Network

LARGEST_GALLERY = 1000
"""Most held-out images in a gallery."""
NEIGHBORS = 5
"""Nearest held-out images that vote on a class."""
_TIE = 1e-9  # correlations that differ by less are equal up to rounding
_FLAT = 1e-6  # root mean square, in units of the data range, below which a centred image is rounding


@dataclass(frozen=True)
class Recognized:
    """Recognition of one reconstruction. rank: number of gallery images at least as similar to it as its original, 0:
    re-identified; read: whether the class of its nearest neighbors is the true one, None without classes;
    rank_features, read_features: the same by features, None without a network.
    """

    rank: int
    read: bool | None
    rank_features: int | None = None
    read_features: bool | None = None


@dataclass(frozen=True, eq=False)
class Gallery:
    """Held-out images. x: [G, *shape] float in data_range; classes: [G] int64, or None if targets are no classes."""

    x: Tensor
    classes: Tensor | None
    data_range: tuple[float, float]
    network: Network | None = None

    @property
    def common(self) -> float | None:
        """Share of the commonest class: the best accuracy of a blind guess."""
        return None if self.classes is None else float(self.classes.bincount().max() / len(self.classes))

    @cached_property
    def _pixels(self) -> _Space:
        return _Space(_directions(self.x, self.data_range), self.classes)

    @cached_property
    def _features(self) -> _Space | None:
        if self.network is None:
            return None
        return _Space(_unit(self.network.features(self.x, self.data_range)), self.classes)

    def recognize(self, guess: Tensor, truth: Tensor, classes: Tensor | None) -> list[Recognized]:
        """Return the figures of reconstructions [N, *shape] and their originals `truth`; classes: [N], the true ones.

        Reconstructions are clipped; one that is not finite, or constant, is never recognized. Ties count as not
        re-identified. A guess that does not depend on its original has rank 0 with probability at most 1 / (G + 1), as
        originals are drawn like the gallery; with guesses matched to a batch of B originals at most B / (G + B) per
        victim. Raises ValueError if shapes differ.
        """
        if guess.shape != truth.shape or guess.shape[1:] != self.x.shape[1:]:
            raise ValueError(f"reconstructions {tuple(guess.shape)} of {tuple(truth.shape)} in {tuple(self.x.shape)}")
        guessed, true = (_directions(x, self.data_range) for x in (guess, truth))
        ranks, read = self._pixels.judge(guessed, true, classes)
        if self._features is None or self.network is None:
            return [Recognized(*one) for one in zip(ranks, read, strict=True)]
        guessed_features, true_features = (
            _unit(self.network.features(x, self.data_range)) for x in (guess.nan_to_num(), truth)
        )
        guessed_features[(guessed == 0).all(1)] = 0.0
        by_features = self._features.judge(guessed_features, true_features, classes)
        return [Recognized(*one) for one in zip(ranks, read, *by_features, strict=True)]


class _Space:
    """Directions [G, D] of a gallery, and the classifier by its nearest neighbors."""

    def __init__(self, directions: Tensor, classes: Tensor | None) -> None:
        from sklearn.neighbors import KNeighborsClassifier

        self.directions = directions
        self.reader: Any = None
        if classes is not None:
            self.reader = KNeighborsClassifier(min(NEIGHBORS, len(directions)), algorithm="brute")
            self.reader.fit(directions.numpy(), classes.numpy())

    def judge(self, guess: Tensor, truth: Tensor, classes: Tensor | None) -> tuple[list[int], list[bool | None]]:
        """Return the ranks of the originals and whether their classes are read, by directions [N, D], 0 if blank."""
        own = (guess * truth).sum(1, keepdim=True)
        ranks = ((guess @ self.directions.T) >= own - _TIE).sum(1)
        if self.reader is None or classes is None:
            return [int(rank) for rank in ranks], [None] * len(guess)
        right = torch.from_numpy(self.reader.predict(guess.numpy())) == classes
        blank = (guess == 0).all(1)
        return [int(rank) for rank in ranks], [bool(one) for one in right & ~blank]


def gallery_of(
    x: Tensor,
    y: Tensor,
    order: Tensor,
    data_range: tuple[float, float],
    classified: bool,
    network: Network | None = None,
) -> Gallery | None:
    """Return the first `LARGEST_GALLERY` in `order` of held-out images x [N, C, H, W], y [N, classes]; None: none."""
    if not modality_from(x.shape[1:]).perceptual or not len(x):
        return None
    chosen = order[:LARGEST_GALLERY]
    classes = y[chosen].argmax(1).cpu() if classified else None
    return Gallery(x[chosen].cpu(), classes, data_range, network)


def _directions(images: Tensor, data_range: tuple[float, float]) -> Tensor:
    """Return images as centred pixels of length 1 [N, D] float64; 0 for an image that is not finite or constant."""
    low, high = data_range
    flat = images.detach().cpu().double().flatten(1)
    finite = flat.isfinite().all(1, keepdim=True)
    flat = torch.where(finite, flat, 0.0).clamp(low, high)
    return _unit(flat, _FLAT * (high - low) * flat.shape[1] ** 0.5)


def _unit(rows: Tensor, least: float = 0.0) -> Tensor:
    """Return rows centred and scaled to length 1; 0 for rows whose centred length is at most `least`."""
    centred = rows - rows.mean(1, keepdim=True)
    length = centred.norm(dim=1, keepdim=True)
    return torch.where(length > least, centred / length.clamp_min(1e-300), 0.0)
