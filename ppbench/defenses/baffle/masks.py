"""Masks on what BAFFLE's clients upload: fixed-point numbers in a ring, where pairwise masks cancel exactly.

Floating-point masks that hide a difference of 1e-4 would eat it by their rounding; in a ring nothing is rounded. Every
entry has a mask of its own: one scalar for all would bare every difference of two entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ppbench.base.errors import Overflow
from ppbench.defenses.evidence import others_masks
from ppbench.federation import secagg
from ppbench.federation.contract import Context
from ppbench.federation.view import Exchange, View

Masks = Literal["none", "ring64", "ring32"]


@dataclass(frozen=True)
class Ring:
    """Fixed-point numbers that wrap. dtype: fixes the modulus. limit: magnitudes from which on a number is refused."""

    dtype: torch.dtype
    fraction_bits: int
    limit: float


# Weighted means must stay in the ring: below 2^23 and 2. `to_ring` itself refuses from 2^22.
RINGS: Mapping[str, Ring] = {"ring64": Ring(torch.int64, 40, 2.0**22), "ring32": Ring(torch.int32, 30, 1.0)}
PURPOSE = "answer"  # of the masks' derivation: colluders derive theirs again under the same name


def masked(ctx: Context, me: secagg.Keys, numbers: Tensor, masks: Masks) -> Tensor:
    """Return N_c / N times `numbers` [k] in fixed point plus this client's mask, int64 or int32 [k] (Overflow)."""
    ring, flat = RINGS[masks], numbers.cpu()
    if not bool((flat.abs() < ring.limit).all()):
        raise Overflow(
            f"Client {ctx.party} has the number {float(flat.abs().max()):.3g} to mask; masks={masks!r} holds finite "
            f"numbers below {ring.limit:g}."
        )
    share = int(me.counts[ctx.party]) / int(me.counts.sum())
    fixed = secagg.to_ring(flat, ring.fraction_bits, share) + secagg.zero_sum(me, ctx, PURPOSE, len(flat))
    return fixed.to(ring.dtype)  # drops the upper half for 2^32: what is 0 modulo 2^64 is 0 modulo 2^32 too


def unmasked(answers: Sequence[Tensor], masks: Masks) -> Tensor:
    """Return the N_c / N-weighted mean [k] float64 of what all clients masked; sums wrap as the ring does."""
    ring = RINGS[masks]
    return secagg.from_ring(torch.stack(list(answers)).sum(0, dtype=ring.dtype), ring.fraction_bits)


def peeled(view: View, exchange: Exchange, answer: Tensor, masks: Masks) -> Tensor | None:
    """Return what one client masked, [k] float64, as all others tell who pool their keys; None where they do not."""
    server, client = view.state_at(exchange), exchange.slot.client
    missing = others_masks(view, exchange, range(view.plan.clients), lambda keys: keys, PURPOSE, len(answer))
    if missing is None or server is None:
        return None
    ring, counts = RINGS[masks], server.counts
    fixed = (answer.to(torch.int64) + missing).to(ring.dtype)
    return secagg.from_ring(fixed, ring.fraction_bits) / (int(counts[client]) / int(counts.sum()))
