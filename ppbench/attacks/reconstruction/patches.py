"""The image that enters a vision transformer with a learned position embedding, by one least-squares problem.

The embedding of a patch is its projection plus a row of the position embedding, so that the row's gradient G_n is the
cotangent of patch n, and the projection's gradient is dW = sum_n G_n x_n^T: linear in the patches x_n.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ppbench.adversary.attack import SolvedLayer
from ppbench.attacks.reconstruction.walk import pair, walk
from ppbench.base.tree import Params
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan

SAME_SUM = 1e-4
"""Relative distance up to which the projection's bias has the summed gradient of the rows: it then is their sum."""
CUT = 1e-7
"""Singular values below this share of the largest are rounding."""
EXPLAINED = 1e-3
"""Relative residual up to which the equations count as solved."""


@dataclass(frozen=True)
class PatchEmbedding:
    """The projection of square patches that do not overlap (weight and bias), and the position embeddings it may have.

    positions: names of parameters [..., at least N, D]. rows, columns: of patches, N together.
    """

    weight: str
    bias: str | None
    positions: tuple[str, ...]
    rows: int
    columns: int

    @property
    def count(self) -> int:
        """Number of patches."""
        return self.rows * self.columns


def patch_embedding(plan: Plan, params: Params) -> PatchEmbedding | None:
    """Return the patch embedding that a network begins with; None if it begins otherwise, or positions are fixed."""
    calls = walk(plan, params)
    if not calls or calls[0].name != "conv2d" or "weight" not in calls[0].parameters:
        return None
    conv, named = calls[0], calls[0].arguments
    name = conv.parameters["weight"]
    kernel = tuple(params[name].shape[2:])
    plain = pair(named.get("padding", 0)) == (0, 0) and named.get("groups", 1) == 1 and not conv.is_frozen("bias")
    if pair(named.get("stride", 1)) != kernel or not plain or kernel == (1, 1):
        return None
    width, rows, columns = conv.outputs
    positions = tuple(
        n
        for n, value in params.items()
        if n != name
        and value.dim() > 1
        and value.shape[-1] == width
        and rows * columns <= value[..., 0].numel()
        and value.shape[-2] == value[..., 0].numel() <= rows * columns + 16
    )
    return PatchEmbedding(name, conv.parameters.get("bias"), positions, rows, columns) if positions else None


@dataclass(frozen=True)
class PatchImage:
    """An image [1, C, H, W] float64, and how well it was determined."""

    image: Tensor
    layer: SolvedLayer


def patch_image(embedding: PatchEmbedding, evidence: Evidence, middle: float) -> PatchImage | None:
    """Return the best explained image; None if no position embedding's gradient fits the projection's.

    middle: of the data range, what the image is where nothing determines it.
    """
    seen = {n: value.detach().double().cpu() for n, value in evidence.observed.items()}
    if embedding.weight not in seen or evidence.weight is not None or not bool(seen[embedding.weight].isfinite().all()):
        return None
    answers = [_solved(embedding, seen[embedding.weight], rows, middle) for rows in _cotangents(embedding, seen)]
    return min(answers, key=lambda answer: answer.layer.residual, default=None)


def _cotangents(embedding: PatchEmbedding, seen: Params) -> Iterator[Tensor]:
    """Yield the gradients [N, D] of rows that may be those of the patches: the last ones, else the first."""
    sums = None if embedding.bias is None else seen.get(embedding.bias)
    for name in embedding.positions:
        rows = seen.get(name)
        if rows is None or not bool(rows.isfinite().all()):
            continue
        rows = rows.reshape(-1, rows.shape[-1])
        for part in (rows[-embedding.count :], rows[: embedding.count])[: 1 + (len(rows) > embedding.count)]:
            if sums is None or float((part.sum(0) - sums).norm()) <= SAME_SUM * float(sums.norm()):
                yield part


def _solved(embedding: PatchEmbedding, gradient: Tensor, cotangents: Tensor, middle: float) -> PatchImage:
    """Return the image whose patches give the projection's gradient [D, C, p, q] with cotangents [N, D]."""
    left, size, right = torch.linalg.svd(cotangents.T, full_matrices=False)
    known = size > CUT * size[0].clamp(min=1e-300)
    flat = gradient.flatten(1)
    left_over = flat - middle * cotangents.sum(0)[:, None]
    step = torch.where(known[:, None], (left.T @ left_over) / size.clamp(min=1e-300)[:, None], 0.0)
    patches = middle + right.T @ step
    gap = float((cotangents.T @ patches - flat).norm() / flat.norm().clamp(min=1e-300))
    channels, high, wide = gradient.shape[1:]
    grid = patches.view(embedding.rows, embedding.columns, channels, high, wide)
    image = grid.permute(2, 0, 3, 1, 4).reshape(1, channels, embedding.rows * high, embedding.columns * wide)
    rank, numbers = int(known.sum()), channels * high * wide
    condition = float(size[0] / size[-1]) if len(size) == embedding.count and float(size[-1]) > 0 else 1e300
    layer = SolvedLayer(
        name=embedding.weight,
        unknowns=embedding.count * numbers,
        determined=rank * numbers,
        condition=min(condition, 1e300),
        residual=gap,
        exact=rank == embedding.count and gap <= EXPLAINED and len(gradient) > rank,
    )
    return PatchImage(image, layer)
