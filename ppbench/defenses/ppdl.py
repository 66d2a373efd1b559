"""PPDL: each client uploads only the largest entries of its update (Shokri and Shmatikov 2015).

Sigma is that of `dp`: the scale of noise on one batch gradient. The SPN paper's Table 11 can come from no other: on
MNIST "PPDL-0.3, DP-0.1" has 97.75 % beside 97.57 % of "DP-0.1", and both have 94.66 % at .5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ppbench.base.tree import Params, Tree, node
from ppbench.defenses.claims import paper
from ppbench.defenses.dp import law_on_gradients, unit_noise, with_noise
from ppbench.federation.bounds import Fraction, NonNegative
from ppbench.federation.contract import Claim, Context, Defense
from ppbench.federation.optim import Layout
from ppbench.federation.plan import Batch, Noise, Plan

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


def cut_precision(cut: float) -> float:
    """Return 1 - v, with v the variance of a standard normal variable known to lie within -cut..cut: from 1 to 0."""
    if cut < 1e-6:
        return 1.0
    density = math.exp(-(cut**2) / 2) / math.sqrt(2 * math.pi)
    return 2 * cut * density / math.erf(cut / math.sqrt(2))


@dataclass(frozen=True)
class PPDL(Defense):
    """Uploads the round(theta P) largest entries (paper: theta .05 and .30) of an update under Gaussian noise.

    noise_on: "gradients": sigma is on each entry of every batch gradient, as in `dp`, and the largest entries of the
        noisy update are sent. "upload": on sent entries, chosen before, in units of the upload (a weight change in
        training, where it is far more; a gradient in a probe).
    """

    theta: Fraction = 0.3
    sigma: NonNegative = 0.0
    noise_on: Literal["gradients", "upload"] = "gradients"

    name: ClassVar[str] = "ppdl"
    version: ClassVar[str] = "2"
    control: ClassVar[str] = "sigma"
    grids: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "quick": (0.0, 1e-3, 0.01),
        "paper": (1e-4, 1e-3, 0.01, 0.1, 0.5),
    }
    paper: ClassVar[str] = FAN2020.citation
    claimed: ClassVar[tuple[Claim, ...]] = FAN2020.claims("ppdl")
    epsilon_reason: ClassVar[str] = "which entries are sent depends on the data, and the sent ones are not clipped"

    def noise(self, plan: Plan) -> Noise | None:
        """Return the noise on an entry before the largest are chosen, or on a sent one; see `noise_on`.

        Chosen entries are no sample of the first law. Yet the density of a message under it is the product of the law's
        at the sent values and, for each unsent entry, of the probability to be below the least of them: so this law is
        right for sent entries, and `precision` says what the others add.
        """
        if self.noise_on == "gradients":
            return law_on_gradients(plan, self.sigma)
        return Noise("gaussian", self.sigma) if self.sigma else None

    def copies(self, plan: Plan, clients: int, examples: int) -> int:
        """As its base, and the noise of a step, where it is on gradients."""
        noisy = self.sigma > 0 and self.noise_on == "gradients"
        return super().copies(plan, clients, examples) + clients * noisy

    def draw(self, ctx: Context, params: Params, steps: int) -> Tree:
        """Return noise of scale 1 for every local step, where it is on gradients."""
        return unit_noise(ctx, params, steps) if self.sigma and self.noise_on == "gradients" else ()

    def local_gradient(self, plan: Plan, params: Params, batch: Batch, own: Tree, noise: Tree) -> Params:
        """Return the batch gradient, plus sigma times noise where it is on gradients."""
        clean = super().local_gradient(plan, params, batch, own, ())
        return with_noise(clean, self.sigma, noise) if noise else clean

    def upload(self, ctx: Context, me: Tree, result: Tree) -> Tree:
        """Encode the kept entries in whichever form is smaller: 8 bytes an entry, or 4 and a bit a parameter."""
        flat = Layout.of(result).pack(result)
        kept = max(1, round(self.theta * len(flat)))
        index = flat.abs().topk(kept).indices.sort().values
        value = flat[index]
        if self.sigma and self.noise_on == "upload":
            value = value + self.sigma * torch.randn(kept, generator=ctx.generator).to(flat.device)
        if 8 * kept <= 4 * kept + math.ceil(len(flat) / 8):
            return Indexed(index.int(), value)
        return Bitmap(pack_bits(torch.zeros_like(flat, dtype=torch.bool).index_fill(0, index, True)), value)

    def support(self, upload: Tree, like: Params) -> Params:
        """Return 1.0 where an entry was sent and 0.0 elsewhere, shaped as `like`: public, from the message alone."""
        layout = Layout.of(like)
        return layout.unpack(self._mask(upload, len(layout.pack(like))).float())

    def precision(self, plan: Plan, upload: Tree, like: Params) -> Params:
        """Return what each entry tells of the clean one, relative to an entry under the noise alone, shaped as `like`.

        1 where it was sent. An unsent one was below the least sent value, which is exact knowledge under noise s on
        gradients: -log P(|g + n| < t) is flat at g = 0 but for its curvature, (1 - v / s^2) / s^2, with v the variance
        of the noise cut off at t. That is a noisy observation of 0 with precision 1 - v / s^2. Without noise, or where
        it came after the choice, an unsent entry counts 0.
        """
        sent, law = self.support(upload, like), self.noise(plan)
        if law is None or self.noise_on == "upload":
            return sent
        unsent = cut_precision(float(upload.value.abs().min()) / law.std)
        return {name: mask + unsent * (1 - mask) for name, mask in sent.items()}

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
