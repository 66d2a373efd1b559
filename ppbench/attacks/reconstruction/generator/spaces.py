"""What is searched through a generator: latents, feature maps in an l1 ball, or the generator's own weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vjp, vmap

from ppbench.attacks.reconstruction.generator.net import Decoder
from ppbench.attacks.reconstruction.search.problem import Pull
from ppbench.federation.optim import Layout


def project_l1(z: Tensor, radius: Tensor) -> Tensor:
    """Return the points of the l1 balls of `radius` [S] that are nearest to z [S, n] (Duchi et al. 2008, Fig. 1)."""
    size = z.abs()
    outside = torch.nonzero(size.sum(1) > radius).flatten()
    if not len(outside):
        return z
    rows, limit = size[outside], radius[outside].clamp(min=0)[:, None]
    ordered = rows.sort(1, descending=True).values
    places = torch.arange(1, z.shape[1] + 1, dtype=z.dtype, device=z.device)
    threshold = (ordered.double().cumsum(1) - limit.double()) / places.double()
    last = ((ordered > threshold) * places).argmax(1, keepdim=True)
    shrunk = (rows - threshold.gather(1, last).to(z)).clamp(min=0)
    shrunk = torch.where(limit > 0, shrunk, 0.0)
    return z.index_copy(0, outside, z[outside].sign() * shrunk)


@dataclass(frozen=True, eq=False)
class Maps:
    """The input of one block, N = `count` maps a row: the latent (stage 0), or maps that stay near where they began.

    center: [S, N, n] where each start's maps began.  rho: radius of the l1 balls around it, image by image, in units of
    its l1 norm; of no account in stage 0.
    """

    decoder: Decoder
    stage: int
    count: int
    center: Tensor
    rho: float

    @property
    def size(self) -> int:
        """Return the numbers of N maps."""
        return self.count * math.prod(self.decoder.plan.size(self.stage))

    def maps(self, z: Tensor) -> Tensor:
        """Return the rows as maps [S * N, *size]."""
        return z.reshape(-1, *self.decoder.plan.size(self.stage))

    def images(self, z: Tensor, index: Tensor) -> tuple[Tensor, Pull]:
        """Return the images that the rest of the generator makes, and the product with its Jacobian's transpose."""
        leaf = self.maps(z).detach().requires_grad_()
        with torch.enable_grad():
            made = self.decoder.decode(leaf, self.stage)

        def pull(slope: Tensor) -> Tensor:
            (back,) = torch.autograd.grad(made, leaf, slope.reshape(made.shape))
            return back.view(len(z), -1)

        return made.detach().view(len(z), self.count, *self.decoder.plan.shape), pull

    def project(self, z: Tensor, index: Tensor) -> Tensor:
        """Return the maps put back into their balls."""
        if self.stage == 0:
            return z
        center = self.center[index].flatten(0, 1)
        moved = project_l1(z.reshape(center.shape) - center, self.rho * center.abs().sum(1))
        return (center + moved).view_as(z)

    def following(self, z: Tensor) -> Tensor:
        """Return what the next block begins with, [S, N, n]: maps, or in the end images."""
        with torch.no_grad():
            return self.decoder.block(self.stage, self.maps(z)).view(len(z), self.count, -1)


@dataclass(frozen=True, eq=False)
class Weights:
    """The generator's weights, a copy for each row, at latents [S, N, L] that stay (Jeon et al. 2021)."""

    decoder: Decoder
    latents: Tensor

    @property
    def size(self) -> int:
        """Return the number of weights."""
        return sum(value.numel() for value in self.decoder.params.values())

    def start(self) -> Tensor:
        """Return rows [S, n] of the weights as they were trained."""
        row = Layout.of(self.decoder.params).pack(self.decoder.params)
        return row.expand(len(self.latents), -1).contiguous()

    def _made(self, row: Tensor, latents: Tensor) -> Tensor:
        return self.decoder.decode(latents, 0, Layout.of(self.decoder.params).unpack(row))

    def images(self, z: Tensor, index: Tensor) -> tuple[Tensor, Pull]:
        """Return the images [S, N, *shape] that each row's generator makes of its latents, and how slopes come back."""
        latents = self.latents[index]
        made, back, *_ = vjp(lambda rows: vmap(self._made)(rows, latents), z.detach())

        def pull(slope: Tensor) -> Tensor:
            slopes: Tensor = back(slope.reshape(made.shape))[0]
            return slopes

        return made.detach(), pull

    def project(self, z: Tensor, index: Tensor) -> Tensor:
        """Return the rows as they are."""
        return z
