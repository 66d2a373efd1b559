"""PPDL: each client uploads only the largest entries of its update (Shokri and Shmatikov 2015)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.base.tree import Params, Tree, node
from ppbench.defenses.claims import paper
from ppbench.federation.bounds import Fraction, NonNegative
from ppbench.federation.contract import Claim, Context, Defense
from ppbench.federation.optim import Layout
from ppbench.federation.plan import Noise, Plan

FAN2020 = paper("fan2020")


@node
class Indexed:
    """Kept entries by place. index: [k] int32 (as uint32 on a network); value: [k] float32."""

    index: Tensor
    value: Tensor


@node
class Bitmap:
    """Kept entries by a bit each. bits: [ceil(P/8)] uint8, lowest bit first; value: [k] float32, in order of place."""

    bits: Tensor
    value: Tensor


def pack_bits(mask: Tensor) -> Tensor:
    """Return bool [P] as uint8 [ceil(P/8)], lowest bit first."""
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -len(mask) % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, count: int) -> Tensor:
    """Return the first `count` bits of uint8 `bits` as bool [count]."""
    return ((bits[:, None] >> torch.arange(8, dtype=torch.uint8, device=bits.device)) & 1).flatten()[:count].bool()


@dataclass(frozen=True)
class PPDL(Defense):
    """Uploads the round(theta P) largest entries (paper: theta .05 and .30), with Gaussian noise `sigma` on them."""

    theta: Fraction = 0.3
    sigma: NonNegative = 0.0

    name: ClassVar[str] = "ppdl"
    control: ClassVar[str] = "sigma"
    grids: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "quick": (0.0, 1e-3, 0.01),
        "paper": (1e-4, 1e-3, 0.01, 0.1, 0.5),
    }
    paper: ClassVar[str] = FAN2020.citation
    claimed: ClassVar[tuple[Claim, ...]] = FAN2020.claims("ppdl")
    epsilon_reason: ClassVar[str] = "which entries are sent depends on the data, and the sent ones are not clipped"

    def noise(self, plan: Plan) -> Noise | None:
        """Return the noise on a sent entry."""
        return Noise("gaussian", self.sigma) if self.sigma else None

    def upload(self, ctx: Context, me: Tree, result: Tree) -> Tree:
        """Encode the kept entries in whichever form is smaller: 8 bytes an entry, or 4 and a bit a parameter."""
        flat = Layout.of(result).pack(result)
        kept = max(1, round(self.theta * len(flat)))
        index = flat.abs().topk(kept).indices.sort().values
        draws = torch.randn(kept, generator=ctx.generator).to(flat.device)
        value = flat[index] + self.sigma * draws if self.sigma else flat[index]
        if 8 * kept <= 4 * kept + math.ceil(len(flat) / 8):
            return Indexed(index.int(), value)
        return Bitmap(pack_bits(torch.zeros_like(flat, dtype=torch.bool).index_fill(0, index, True)), value)

    def support(self, upload: Tree, like: Params) -> Params:
        """Return 1.0 where an entry was sent and 0.0 elsewhere, shaped as `like`: public, from the message alone."""
        layout = Layout.of(like)
        return layout.unpack(self._mask(upload, len(layout.pack(like))).float())

    def decode(self, upload: Tree, like: Params) -> Params:
        """Return the upload as parameters, zero where nothing was sent; ValueError for wrong places or values."""
        layout = Layout.of(like)
        total = len(layout.pack(like))
        mask = self._mask(upload, total)
        if int(mask.sum()) != len(upload.value):
            raise ValueError(f"{len(upload.value)} values for {int(mask.sum())} distinct places")
        flat = torch.zeros(total, dtype=upload.value.dtype, device=upload.value.device)
        return layout.unpack(flat.masked_scatter(mask, upload.value))

    @staticmethod
    def _mask(upload: Tree, total: int) -> Tensor:
        if isinstance(upload, Bitmap):
            if len(upload.bits) != math.ceil(total / 8):
                raise ValueError(f"{len(upload.bits)} bytes of bitmap for {total} parameters")
            return unpack_bits(upload.bits, total)
        index = upload.index.long()
        if len(index) and (int(index.min()) < 0 or int(index.max()) >= total):
            raise ValueError(f"an index outside 0..{total - 1}")
        if not bool((index.diff() > 0).all()):
            raise ValueError("indices that do not increase")
        mask = torch.zeros(total, dtype=torch.bool, device=index.device)
        return mask.index_fill(0, index, True)
