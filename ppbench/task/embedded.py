"""Data sets that are part of a required library: no download, no file."""

from __future__ import annotations

from pathlib import Path

import torch

from ppbench.task.dataset import Dataset, Split, no_argument
from ppbench.task.partition import hold_out


def digits(argument: str, *, seed: int, root: Path) -> Dataset:
    """Handwritten digits, 8x8 grey, 10 classes, 1437 + 360 images; comes with scikit-learn, no download.

    The optical digits of UCI (Alpaydin and Kaynak 1998); pixels are counts 0..16, given as count / 16. The stratified
    split 80 : 20 is fixed and does not depend on `seed`.
    """
    from sklearn.datasets import load_digits

    no_argument("digits", argument)
    raw = load_digits()
    x = torch.tensor(raw.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(raw.target, dtype=torch.int64)
    train, test = (Split(x[index], y[index], 10) for index in hold_out(y, 5, seed=0))
    return Dataset("digits", train, test, classes=10, shape=(1, 8, 8), data_range=(0.0, 1.0), kind="image")
