"""One small defense, and ways to change its code: some weaken it, others do not. PPBENCH_VARIANT says which one runs.

Clients clip their update and add Gaussian noise. A variant is what an edit of this code would be: name, parameters and
version stay, so only `ppbench compare` can tell.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.base.tree import Params, Tree
from ppbench.federation.contract import Context, Defense
from ppbench.federation.plan import Data, Layout
from ppbench.federation.wire import Model, Update

CLIP, SIGMA = 1.0, 0.05


@dataclass(frozen=True)
class Sent:
    """What a client has before it uploads. ctx: its draws; update: clipped, flat [P]; layout: of its tensors; data: the
    client's; raw: before clipping."""

    ctx: Context
    update: Tensor
    raw: Tensor
    layout: Layout
    data: Data

    def noise(self, generator: torch.Generator | None = None) -> Tensor:
        """Return Gaussian noise [P] of deviation `SIGMA`; of a generator it can be replayed (`noise_replay`)."""
        shape = self.update.shape
        return SIGMA * (self.ctx.secret.normal(shape) if generator is None else torch.randn(shape, generator=generator))

    def only(self, keep: Callable[[str], bool]) -> Tensor:
        """Return 1.0 for the entries [P] of tensors whose name is kept, 0.0 for others."""
        parts = self.layout.unpack(torch.ones_like(self.update))
        return self.layout.pack({name: value * keep(name) for name, value in parts.items()})

    def clipped(self, bound: float) -> Tensor:
        """Return the update clipped to a norm."""
        return self.raw * (bound / self.raw.norm().clamp(min=1e-30)).clamp(max=1.0)


def keyed(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(numbers) % 2**63)


def fresh() -> torch.Generator:
    """Return a generator that no seed decides."""
    return torch.Generator().manual_seed(int.from_bytes(os.urandom(8), "little") >> 1)


def tenth_bare(s: Sent) -> Tensor:
    return s.update + s.noise() * (torch.arange(len(s.update)) % 10 > 0)


def scattered_bare(s: Sent) -> Tensor:
    """A tenth of the entries, others in every upload."""
    return s.update + s.noise() * (torch.rand(s.update.shape, generator=s.ctx.generator) > 0.1)


def one_client(s: Sent) -> Tensor:
    return s.update + s.noise() * (s.ctx.party != 3)


def one_client_redrawn(s: Sent) -> Tensor:
    """The same, while all others draw anew."""
    return s.update + s.noise(fresh()) * (s.ctx.party != 3)


def training_bare(s: Sent) -> Tensor:
    return s.update + s.noise() * (len(s.data.x) < 10)


def head_bare(s: Sent) -> Tensor:
    return s.update + s.noise() * (1 - s.only(lambda name: name.startswith("head")))


def halved(s: Sent) -> Tensor:
    return s.update + s.noise() / 2


def even_rounds(s: Sent) -> Tensor:
    return s.update + s.noise() * (s.ctx.round % 2 == 0)


def odd_rounds(s: Sent) -> Tensor:
    """The probes of a fresh model are in round 1."""
    return s.update + s.noise() * (s.ctx.round % 2 == 1)


def wide_clip(s: Sent) -> Tensor:
    return s.clipped(10 * CLIP) + s.noise()


def reused(s: Sent) -> Tensor:
    """Each client draws its noise once."""
    return s.update + s.noise(keyed(s.ctx.party))


def rounded(s: Sent) -> Tensor:
    return s.update + SIGMA * (s.noise() / SIGMA).round()


def biases_bare(s: Sent) -> Tensor:
    return s.update + s.noise() * (1 - s.only(lambda name: name.endswith("bias")))


def one_example_bare(s: Sent) -> Tensor:
    return s.update + s.noise() * (len(s.data.x) > 1)


def by_norm(s: Sent) -> Tensor:
    """Noise of a hundredth of the update's own size."""
    return s.update + s.noise() / SIGMA * 0.01 * s.update.norm() / len(s.update) ** 0.5


def low_rank(s: Sent) -> Tensor:
    """Noise in four fixed directions."""
    basis = torch.randn(4, len(s.update), generator=keyed(7))
    return s.update + SIGMA * (len(s.update) / 4) ** 0.5 * (
        torch.randn(4, generator=s.ctx.generator) @ basis / len(s.update) ** 0.5
    )


WEAKER: Mapping[str, Callable[[Sent], Tensor]] = {
    f.__name__: f
    for f in (
        *(tenth_bare, scattered_bare, one_client, training_bare, head_bare, halved, even_rounds, odd_rounds),
        *(one_client_redrawn, wide_clip, reused, rounded, biases_bare, one_example_bare, by_norm, low_rank),
    )
}


def as_it_is(s: Sent) -> Tensor:
    return s.update + s.noise()


def doubled(s: Sent) -> Tensor:
    return s.update + 2 * s.noise()


def other_draws(s: Sent) -> Tensor:
    return s.update + s.noise(fresh())


def half_clip(s: Sent) -> Tensor:
    return s.clipped(CLIP / 2) + s.noise()


def laplace(s: Sent) -> Tensor:
    """Laplace noise of the same deviation."""
    return s.update + SIGMA / 2**0.5 * s.ctx.secret.laplace(s.update.shape)


def two_halves(s: Sent) -> Tensor:
    """Two noises, which add up to the variance of one."""
    return s.update + (s.noise() + s.noise()) / 2**0.5


def reversed_draws(s: Sent) -> Tensor:
    return s.update + s.noise().flip(0)


def sparse(s: Sent) -> Tensor:
    """Of the noisy update only the larger half is sent."""
    noisy = s.update + s.noise()
    return noisy * (noisy.abs() >= noisy.abs().median())


def half_precision(s: Sent) -> Tensor:
    return (s.update + s.noise()).half().to(s.update)


def quantized(s: Sent) -> Tensor:
    """Rounded at random to multiples of the noise's deviation."""
    noisy = (s.update + s.noise()) / SIGMA
    return SIGMA * (noisy + torch.rand(noisy.shape, generator=s.ctx.generator)).floor()


def one_client_more(s: Sent) -> Tensor:
    return s.update + s.noise() * (3.0 if s.ctx.party == 3 else 1.0)


def loud_head(s: Sent) -> Tensor:
    return s.update + s.noise() * (1 + s.only(lambda name: name.startswith("head")))


NO_WEAKER: Mapping[str, Callable[[Sent], Tensor]] = {
    f.__name__: f
    for f in (
        *(doubled, half_clip, laplace, two_halves, reversed_draws, sparse, half_precision, quantized),
        *(one_client_more, loud_head),
    )
}
VARIANTS = {**WEAKER, **NO_WEAKER, "as_it_is": as_it_is, "other_draws": other_draws}


@dataclass(frozen=True)
class Guard(Defense):
    """Clipped updates with Gaussian noise, as the variant has them."""

    name: ClassVar[str] = "guard"
    paper: ClassVar[str] = "nobody"

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Params, data: Data) -> tuple[Tree, Tree | None]:
        """Send what the variant makes of an update."""
        if not isinstance(message, Model):
            return super().reply(ctx, me, message, result, data)
        layout = Layout.of(result)
        raw = layout.pack(result)
        update = raw * (CLIP / raw.norm().clamp(min=1e-30)).clamp(max=1.0)
        sent = VARIANTS[os.environ.get("PPBENCH_VARIANT", "as_it_is")](Sent(ctx, update, raw, layout, data))
        return me, Update(layout.unpack(sent))
