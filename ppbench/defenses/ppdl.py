"""PPDL: each client uploads only the largest entries of its update (Shokri and Shmatikov 2015).

Sigma is that of `dp`: the scale of noise on one batch gradient. The SPN paper's Table 11 allows no other meaning: on
MNIST "PPDL-0.3, DP-0.1" has 97.75 % and "DP-0.1" 97.57 %, and both have 94.66 % at 0.5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ppbench.base.tree import Params, Tree, node
from ppbench.defenses.dp import law_on_gradients, unit_noise, with_noise
from ppbench.federation.bounds import Fraction, NonNegative
from ppbench.federation.contract import Context, Defense
from ppbench.federation.plan import Batch, Layout, Noise, Plan


@node
class Indexed:
    """Sent entries by index. index: [k] int32 (as uint32 on a network); value: [k] float32."""

    index: Tensor
    value: Tensor


@node
class Bitmap:
    """Sent entries by bitmap. bits: [ceil(P/8)] uint8, lowest bit first; value: [k] float32, in order of index."""

    bits: Tensor
    value: Tensor


def pack_codes(numbers: Tensor, width: int) -> Tensor:
    """Return whole numbers [P] from 0 to 2^width - 1 as uint8 [ceil(P width / 8)], lowest bits first; width: 1 to 8."""
    many = 8 // width
    rows = torch.nn.functional.pad(numbers.to(torch.uint8), (0, -len(numbers) % many)).view(-1, many)
    packed: Tensor = (rows << width * torch.arange(many, dtype=torch.uint8, device=rows.device)).sum(
        1, dtype=torch.uint8
    )
    return packed


def unpack_codes(codes: Tensor, width: int, count: int) -> Tensor:
    """Return the first `count` numbers of `pack_codes`, uint8 [count]."""
    shifts = width * torch.arange(8 // width, dtype=torch.uint8, device=codes.device)
    numbers: Tensor = (codes[:, None] >> shifts) & (2**width - 1)
    return numbers.flatten()[:count]


def cut_precision(cut: float) -> float:
    """Return 1 - v, in [0, 1], with v the variance of a standard normal variable truncated to -cut..cut."""
    if cut < 1e-6:
        return 1.0
    density = math.exp(-(cut**2) / 2) / math.sqrt(2 * math.pi)
    return 2 * cut * density / math.erf(cut / math.sqrt(2))


@dataclass(frozen=True)
class PPDL(Defense):
    """Uploads the round(theta P) largest entries (paper: theta 0.05 and 0.30) of an update with Gaussian noise.

    noise_on: "gradients": noise on each entry of every batch gradient, as in `dp`, before the largest entries of the
        noisy update are chosen. "upload": noise on the sent entries only, in units of the upload (a weight change in
        training, where it is far more noise; a gradient in a probe).
    """

    theta: Fraction = 0.3
    sigma: NonNegative = 0.0
    noise_on: Literal["gradients", "upload"] = "gradients"

    name: ClassVar[str] = "ppdl"
    version: ClassVar[str] = "3"
    control: ClassVar[str] = "sigma"
    grids: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "quick": (0.0, 1e-3, 0.01),
        "paper": (1e-4, 1e-3, 0.01, 0.1, 0.5),
    }
    paper: ClassVar[str] = "Fan et al., Rethinking Privacy Preserving Deep Learning, 2020 (arXiv 2006.11601)"
    epsilon_reason: ClassVar[str] = "which entries are sent depends on the data, and the sent ones are not clipped"

    def noise(self, plan: Plan) -> Noise | None:
        """Return the noise on an entry before the choice, or on a sent entry; see `noise_on`.

        Chosen entries are no sample of the first law. Yet the density of a message is the product of the law's density
        at the sent values and, for each unsent entry, the probability to be below the smallest of them: so this law is
        correct for sent entries, and `precision` gives the information in the others.
        """
        if self.noise_on == "gradients":
            return law_on_gradients(plan, self.sigma)
        return Noise("gaussian", self.sigma) if self.sigma else None

    def copies(self, plan: Plan, clients: int, examples: int) -> int:
        """As the base class, and the noise of a step if it is on gradients."""
        noisy = self.sigma > 0 and self.noise_on == "gradients"
        return super().copies(plan, clients, examples) + clients * noisy

    def draw(self, ctx: Context, params: Params, steps: int) -> Tree:
        """Return noise of scale 1 for every local step if it is on gradients, else ()."""
        return unit_noise(ctx, params, steps) if self.sigma and self.noise_on == "gradients" else ()

    def local_gradient(self, plan: Plan, params: Params, batch: Batch, own: Tree, noise: Tree) -> Params:
        """Return the batch gradient, plus sigma times noise if it is on gradients."""
        clean = super().local_gradient(plan, params, batch, own, ())
        return with_noise(clean, self.sigma, noise) if noise else clean

    def upload(self, ctx: Context, me: Tree, result: Tree) -> Tree:
        """Encode the largest entries in the smaller form: 8 bytes per entry, or 4 plus one bit per parameter."""
        flat = Layout.of(result).pack(result)
        kept = max(1, round(self.theta * len(flat)))
        index = flat.abs().topk(kept).indices.sort().values
        value = flat[index]
        if self.sigma and self.noise_on == "upload":
            value = value + self.sigma * ctx.secret.normal((kept,)).to(flat.device)
        if 8 * kept <= 4 * kept + math.ceil(len(flat) / 8):
            return Indexed(index.int(), value)
        return Bitmap(pack_codes(torch.zeros_like(flat, dtype=torch.bool).index_fill(0, index, True), 1), value)

    def support(self, upload: Tree, like: Params) -> Params:
        """Return 1.0 for sent entries and 0.0 for others, shaped as `like`: public, from the message alone."""
        layout = Layout.of(like)
        return layout.unpack(self._mask(upload, len(layout.pack(like))).float())

    def precision(self, plan: Plan, upload: Tree, like: Params) -> Params:
        """Return the precision of each entry as an observation of the clean one, relative to a noisy sent entry.

        Shaped as `like`; 1 for sent entries. An unsent entry was below the smallest sent value t. Under noise s on
        gradients, -log P(|g + n| < t) is flat at g = 0 except for its curvature, (1 - v / s^2) / s^2, with v the
        variance of the noise truncated at t: a noisy observation of 0 with precision 1 - v / s^2. Without noise, or
        with noise after the choice, an unsent entry has precision 0.
        """
        sent, law = self.support(upload, like), self.noise(plan)
        if law is None or self.noise_on == "upload":
            return sent
        unsent = cut_precision(float(upload.value.abs().min()) / law.std)
        return {name: mask + unsent * (1 - mask) for name, mask in sent.items()}

    def decode(self, upload: Tree, like: Params) -> Params:
        """Return the upload as parameters, unsent entries 0 (ValueError: wrong indices or number of values)."""
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
            return unpack_codes(upload.bits, 1, total).bool()
        index = upload.index.long()
        if len(index) and (int(index.min()) < 0 or int(index.max()) >= total):
            raise ValueError(f"an index outside 0..{total - 1}")
        if not bool((index.diff() > 0).all()):
            raise ValueError("indices that do not increase")
        mask = torch.zeros(total, dtype=torch.bool, device=index.device)
        return mask.index_fill(0, index, True)
