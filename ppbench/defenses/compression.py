"""Gradient compression, which is often taken for protection: quantized entries, signs, and the largest entries."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from ppbench.base.tree import Params, Tree, node
from ppbench.defenses.ppdl import PPDL, pack_codes, unpack_codes
from ppbench.federation.bounds import Bound, Fraction
from ppbench.federation.contract import Context, Defense
from ppbench.federation.plan import Data, Layout, Noise
from ppbench.federation.wire import Hello

Width = Annotated[int, Bound(lambda value: value in (2, 4, 8), "2, 4 or 8", (2, 8))]
"""Bits of a quantized entry, which fill bytes."""


@node
class Levels:
    """An upload as multiples of a step per tensor. codes: [ceil(P bits / 8)] uint8; step: [tensors] float32."""

    codes: Tensor
    step: Tensor


@node
class Signs:
    """Signs of an upload, one bit each (1: not negative), and a size per tensor. bits: [ceil(P / 8)]; size: float32."""

    bits: Tensor
    size: Tensor


def by_entry(values: Tensor, layout: Layout) -> Tensor:
    """Return the value of each entry [P] from that of each tensor (ValueError: another number of tensors)."""
    if len(values) != len(layout.shapes):
        raise ValueError(f"{len(values)} values for {len(layout.shapes)} tensors")
    counts = torch.tensor([math.prod(shape) for shape in layout.shapes], device=values.device)
    return values.repeat_interleave(counts)


@dataclass(frozen=True)
class QSGD(Defense):
    """Rounds each entry of an update, at random and without bias, to a multiple of its tensor's largest entry.

    bits: of an entry; 2^(bits - 1) - 1 multiples of a step on either side of 0 (2 bits: -1, 0, 1, as in TernGrad).
    """

    bits: Width = 8

    name: ClassVar[str] = "qsgd"
    control: ClassVar[str] = "bits"
    grids: ClassVar[Mapping[str, tuple[float, ...]]] = {"quick": (8, 4, 2), "paper": (8, 4, 2)}
    paper: ClassVar[str] = "Alistarh et al., QSGD, NeurIPS 2017 (arXiv 1610.02132)"
    epsilon_reason: ClassVar[str] = "rounding is bounded noise whose size depends on the data"

    @property
    def most(self) -> int:
        """The largest multiple of the step."""
        return int(2 ** (self.bits - 1) - 1)

    def upload(self, ctx: Context, me: Tree, result: Tree) -> Tree:
        """Return the multiples, with the step of each tensor."""
        layout = Layout.of(result)
        sizes = torch.stack([value.abs().max() for value in result.values()])
        step = (sizes / self.most).float()
        flat = layout.pack(result) / by_entry(step.clamp(min=1e-38), layout)
        draws = ctx.secret.uniform(flat.shape).to(flat)
        levels = (flat + draws).floor().clamp(-self.most, self.most)
        return Levels(pack_codes((levels + self.most).to(torch.uint8), self.bits), step)

    def decode(self, upload: Tree, like: Params) -> Params:
        """Return the multiples times their steps (ValueError: another number of entries or tensors)."""
        layout = Layout.of(like)
        step = by_entry(upload.step, layout)
        if len(upload.codes) != math.ceil(len(step) * self.bits / 8):
            raise ValueError(f"{len(upload.codes)} bytes for {len(step)} entries of {self.bits} bits")
        return layout.unpack((unpack_codes(upload.codes, self.bits, len(step)).long() - self.most) * step)

    def law(self, upload: Tree, like: Params) -> Noise:
        """Return the law of the rounding error, about: mean variance step^2 / 6, by tensor, public from the message."""
        stds = (upload.step.double() / math.sqrt(6)).tolist()
        counts = [value.numel() for value in like.values()]
        power = sum(count * std**2 for count, std in zip(counts, stds, strict=True)) / sum(counts)
        return Noise("gaussian", math.sqrt(power), tuple(zip(like, stds, strict=True)))


@dataclass(frozen=True)
class SignSGD(Defense):
    """Uploads the sign of each entry of an update and the mean size of each tensor's entries."""

    name: ClassVar[str] = "sign"
    paper: ClassVar[str] = "Bernstein et al., signSGD, ICML 2018 (arXiv 1802.04434)"
    epsilon_reason: ClassVar[str] = "signs are functions of the data, without noise"

    def upload(self, ctx: Context, me: Tree, result: Tree) -> Tree:
        """Return the signs and each tensor's mean size."""
        flat = Layout.of(result).pack(result)
        return Signs(pack_codes(flat >= 0, 1), torch.stack([value.abs().mean() for value in result.values()]).float())

    def decode(self, upload: Tree, like: Params) -> Params:
        """Return signs times sizes (ValueError: another number of entries or tensors)."""
        layout = Layout.of(like)
        sizes = by_entry(upload.size, layout)
        if len(upload.bits) != math.ceil(len(sizes) / 8):
            raise ValueError(f"{len(upload.bits)} bytes for {len(sizes)} signs")
        return layout.unpack(torch.where(unpack_codes(upload.bits, 1, len(sizes)).bool(), sizes, -sizes))


@dataclass(frozen=True)
class TopK(PPDL):
    """Uploads the largest entries of an update plus what earlier rounds left out: `ppdl` with error feedback.

    Attacks take the sum for an update: what is left out of earlier rounds, which they do not know, is noise to them.
    """

    theta: Fraction = 0.01

    name: ClassVar[str] = "top_k"
    version: ClassVar[str] = "1"
    control: ClassVar[str] = "theta"
    grids: ClassVar[Mapping[str, tuple[float, ...]]] = {"quick": (0.1, 0.01, 0.001), "paper": (0.1, 0.01, 0.001)}
    paper: ClassVar[str] = "Lin et al., Deep Gradient Compression, ICLR 2018 (arXiv 1712.01887)"
    kin: ClassVar[str] = "ppdl"

    def init_client(self, ctx: Context, params: Params) -> Tree:
        """Return what was left out so far: nothing."""
        return {name: torch.zeros_like(value) for name, value in params.items()}

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Return what is left out now, and the largest entries."""
        if isinstance(message, Hello):
            return super().reply(ctx, me, message, result, data)
        whole = {name: value + me[name] for name, value in result.items()}
        answer = self.upload(ctx, me, whole)
        sent = self.decode(answer, whole)
        return {name: value - sent[name] for name, value in whole.items()}, answer
