"""Images by their contents, 64 bits each: whether two sets have images in common, without keeping either."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def fingerprints(images: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Return the sorted fingerprints [M] int64 of images [N, *shape], each content once (M <= N).

    A content is the shape and the pixels in 256 steps of [low, high]: what an 8-bit file keeps. Two different contents
    share a fingerprint with probability 2^-64.
    """
    scaled = (images.detach().double() - low) * (255 / (high - low))
    pixels = scaled.nan_to_num(0.0).round().clamp(0, 255).to(torch.uint8).flatten(1).cpu().contiguous().numpy()
    salt = repr(tuple(images.shape[1:])).encode()
    keys = [hashlib.blake2b(row.tobytes() + salt, digest_size=8).digest() for row in pixels]
    numbers = sorted({int.from_bytes(key, "big", signed=True) for key in keys})
    return torch.tensor(numbers, dtype=torch.int64)


def common(known: Tensor, images: Tensor, low: float = 0.0, high: float = 1.0) -> int:
    """Return how many of images [N, *shape] have a fingerprint in `known` [M] (sorted); each copy counts."""
    if not len(known) or not len(images):
        return 0
    own = [fingerprints(image[None], low, high) for image in images]
    return int(torch.isin(torch.cat(own), known).sum())
