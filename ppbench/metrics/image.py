"""Image similarity: PSNR, relative RMSE and SSIM of one reconstruction, and the matching of a batch.

In float64, on the reconstruction clipped to the data range, with the raw relative RMSE beside it. A reconstruction that
is not finite has failed: its figures are None, and aggregates count it as 0 dB and relative RMSE 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import scipy

from ppbench.metrics.intervals import Floats

if TYPE_CHECKING:
    from torch import Tensor

PSNR_CAP = 100.0
"""Largest PSNR in dB, also of an exact reconstruction; keeps means finite."""
RMSE_RAW_CAP = 1e12
"""Largest raw relative RMSE; keeps means finite."""
SSIM_WINDOW = 7
"""Side in pixels of SSIM's uniform window; smaller images have no SSIM."""

DataRange = tuple[float, float]


@dataclass(frozen=True)
class ImageFigures:
    """Figures of one reconstruction; all None if it is not finite, ssim also if the image is too small.

    psnr: dB, clipped, at most PSNR_CAP.  rmse: ||clip(guess) - x|| / ||x|| ("recon/1").  rmse_raw: ||guess - x|| /
    ||x||, at most RMSE_RAW_CAP.  ssim: mean structural similarity, clipped, in [-1, 1].  mse: mean squared error,
    clipped, in units of the squared range: 0 to 1 (the MP-DP paper's Test-MSE).
    """

    psnr: float | None
    rmse: float | None
    rmse_raw: float | None
    ssim: float | None
    mse: float | None = None


def _array(image: Tensor) -> Floats:
    return np.asarray(image.detach().cpu().double().numpy())


def _relative(guess: Floats, truth: Floats, data_range: DataRange) -> float:
    """Return ||guess - truth|| / ||truth|| without overflow; an all-zero truth counts as one 8-bit level everywhere."""
    error = guess - truth
    peak = float(np.abs(error).max(initial=0.0))
    if peak == 0.0:
        return 0.0
    floor = (data_range[1] - data_range[0]) / 255 * math.sqrt(truth.size)
    size = float(np.linalg.norm(truth)) or floor
    ratio = float(np.linalg.norm(error / peak)) * (peak / size)
    return min(ratio, RMSE_RAW_CAP)


def psnr(guess: Tensor, truth: Tensor, data_range: DataRange = (0.0, 1.0)) -> float | None:
    """Return the PSNR of the clipped `guess` in dB, at most PSNR_CAP; None if it is not finite."""
    mse = _mse(*_pair(guess, truth), data_range)
    return None if mse is None else _decibel(mse)


def _pair(guess: Tensor, truth: Tensor) -> tuple[Floats, Floats]:
    if guess.shape != truth.shape:
        raise ValueError(f"reconstruction of shape {tuple(guess.shape)} for an image of {tuple(truth.shape)}")
    return _array(guess), _array(truth)


def _mse(raw: Floats, target: Floats, data_range: DataRange) -> float | None:
    """Return the mean squared error of the clipped reconstruction over the squared range; None if not finite."""
    if not np.isfinite(raw).all():
        return None
    return float(np.mean((raw.clip(*data_range) - target) ** 2)) / (data_range[1] - data_range[0]) ** 2


def _decibel(mse: float) -> float:
    return PSNR_CAP if mse == 0 else min(-10 * math.log10(mse), PSNR_CAP)


def image_figures(guess: Tensor, truth: Tensor, data_range: DataRange = (0.0, 1.0)) -> ImageFigures:
    """Return all figures of one reconstruction [*shape], [C, H, W] for SSIM; ValueError if the shapes differ."""
    raw, target = _pair(guess, truth)
    mse = _mse(raw, target, data_range)
    if mse is None:
        return ImageFigures(None, None, None, None)
    clipped, span = raw.clip(*data_range), data_range[1] - data_range[0]
    return ImageFigures(
        _decibel(mse),
        _relative(clipped, target, data_range),
        _relative(raw, target, data_range),
        _ssim(clipped, target, span),
        mse,
    )


def _ssim(guess: Floats, truth: Floats, span: float) -> float | None:
    """Return the mean SSIM over channels and windows of [C, H, W] images; None below the window's size.

    Wang et al. 2004 with a uniform 7 x 7 window, K1 = 0.01, K2 = 0.03, sample covariances and data range `span`;
    each channel by itself, then their mean. Only whole windows count: 2 x 2 of an 8 x 8 image.
    """
    if truth.ndim != 3 or min(truth.shape[1:]) < SSIM_WINDOW:
        return None
    from skimage.metrics import structural_similarity  # 0.3 s to import, and only images need it

    similarity: Callable[..., float] = structural_similarity  # skimage has no type hints
    return float(similarity(truth, guess, win_size=SSIM_WINDOW, data_range=span, channel_axis=0))


def match(guess: Tensor, truth: Tensor, data_range: DataRange = (0.0, 1.0)) -> list[int]:
    """Return for each true image the index of its reconstruction, by least squares; failed ones are matched last.

    Both are [B, *shape]; ValueError if the shapes differ.
    """
    if guess.shape != truth.shape:
        raise ValueError(f"reconstructions of shape {tuple(guess.shape)} for a batch of {tuple(truth.shape)}")
    raw, target = _array(guess).reshape(len(guess), -1), _array(truth).reshape(len(truth), -1)
    finite = np.isfinite(raw).all(axis=1)
    cost = ((target[:, None] - raw.clip(*data_range)[None]) ** 2).sum(axis=2)
    # All pairs of a failed reconstruction cost the same, so that it changes no other pair.
    cost[:, ~finite] = float(cost[:, finite].max(initial=0.0)) + 1.0
    return assigned(cost)


def assigned(cost: Floats) -> list[int]:
    """Return each row's column, by the assignment of least total cost [N, N]."""
    rows, columns = scipy.optimize.linear_sum_assignment(cost)
    return [int(column) for _, column in sorted(zip(rows, columns, strict=True))]
