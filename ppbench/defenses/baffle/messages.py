"""BAFFLE's messages, the server's state, checks of answers, and masks.

Masked numbers are fixed point in a ring, where masks cancel exactly: rounding of floats would destroy a difference of
1e-4. Every entry has its own mask: a common scalar would reveal every difference of two entries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ppbench.base.errors import Overflow, ProtocolError
from ppbench.base.tree import Params, Tree, node
from ppbench.defenses.evidence import others_masks
from ppbench.federation import secagg
from ppbench.federation.contract import Context
from ppbench.federation.messages import Model, Update
from ppbench.federation.optim import Layout
from ppbench.federation.threats import TARGET
from ppbench.federation.view import Exchange, View
from ppbench.federation.wire import Slot


@node
class Evaluate(Model):
    """Server to client (4n + 4 bytes): evaluate the model around `params`. seed: int32 scalar, of the directions."""

    seed: Tensor


@node
class Differences:
    """Client to server. value: [K], of forward differences [2K]; float32, or masked int64 or int32."""

    value: Tensor


@node
class Own:
    """The server's own state. seed: int32 scalar, of the round; average: Params or (); steps: int64 scalar."""

    seed: Tensor
    average: Tree
    steps: Tensor


def numbers_of(client: int, upload: Tree, params: Params, count: int | None, ring: torch.dtype | None) -> Tensor:
    """Return the numbers of a client's answer, flat (ProtocolError: wrong kind, length or dtype, or not finite).

    count: of loss differences; None for an update like `params`. ring: dtype of masked numbers, None for floats.
    """
    expected = Update if count is None else Differences
    if not isinstance(upload, expected):
        raise ProtocolError(f"Client {client} answered with {type(upload).__name__}, not {expected.__name__}.")
    layout = Layout.of(params)
    if isinstance(upload, Update) and Layout.of(upload.params) != layout:
        raise ProtocolError(f"Client {client} sent an update whose names or shapes are not the model's.")
    numbers = flat_answer(upload)
    if count is not None and numbers.shape != (count,):
        raise ProtocolError(f"Client {client} sent numbers of shape {tuple(numbers.shape)}; ({count},) is right.")
    dtype = ring or (torch.float32 if count is not None else layout.pack(params).dtype)
    if numbers.dtype != dtype:
        raise ProtocolError(f"Client {client} sent numbers of type {numbers.dtype}; {dtype} is right.")
    if not bool(numbers.isfinite().all()):
        raise ProtocolError(f"Client {client} sent a number that is not finite; all must be.")
    return numbers


def flat_answer(upload: Tree) -> Tensor:
    """Return the numbers of an answer as one vector: differences, or an update's entries in the model's order."""
    return upload.value if isinstance(upload, Differences) else Layout.of(upload.params).pack(upload.params)


def answers_by_slot(view: View) -> dict[Slot, list[Exchange]]:
    """Return the clients' answers in a view by slot, oldest first: colluders' of the target only, a client's none."""
    answers: dict[Slot, list[Exchange]] = defaultdict(list)
    for exchange in view.exchanges() if view.threat.sees_uploads else ():
        is_target = exchange.slot.client == TARGET or not view.threat.colludes
        if is_target and isinstance(exchange.request, Evaluate):
            answers[exchange.slot].append(exchange)
    return dict(answers)


Masks = Literal["none", "ring64", "ring32"]


@dataclass(frozen=True)
class Ring:
    """Fixed-point numbers modulo the range of `dtype`. limit: larger magnitudes are refused."""

    dtype: torch.dtype
    fraction_bits: int
    limit: float


# Weighted means must stay in the ring: below 2^23 and 2. `to_ring` itself refuses from 2^22.
RINGS: Mapping[str, Ring] = {"ring64": Ring(torch.int64, 40, 2.0**22), "ring32": Ring(torch.int32, 30, 1.0)}
ANSWER_MASKS = "answer"  # of the masks' derivation: colluders derive theirs again under the same name


def mask_numbers(ctx: Context, me: secagg.Keys, numbers: Tensor, masks: Masks) -> Tensor:
    """Return N_c / N times `numbers` [k] in fixed point plus this client's mask, int64 or int32 [k] (Overflow)."""
    ring, flat = RINGS[masks], numbers.cpu()
    if not bool((flat.abs() < ring.limit).all()):
        raise Overflow(
            f"Client {ctx.party} has the number {float(flat.abs().max()):.3g} to mask; masks={masks!r} holds finite "
            f"numbers below {ring.limit:g}."
        )
    share = int(me.counts[ctx.party]) / int(me.counts.sum())
    fixed = secagg.to_ring(flat, ring.fraction_bits, share) + secagg.zero_sum(me, ctx, ANSWER_MASKS, len(flat))
    return fixed.to(ring.dtype)  # drops the upper half for 2^32: what is 0 modulo 2^64 is 0 modulo 2^32 too


def unmasked_mean(answers_by_slot: Sequence[Tensor], masks: Masks) -> Tensor:
    """Return the N_c / N-weighted mean [k] float64 of all clients' masked numbers."""
    ring = RINGS[masks]
    return secagg.from_ring(torch.stack(list(answers_by_slot)).sum(0, dtype=ring.dtype), ring.fraction_bits)


def unmasked_answer(view: View, exchange: Exchange, answer: Tensor, masks: Masks) -> Tensor | None:
    """Return one client's unmasked numbers [k] float64, from all others' keys; None if the view lacks some."""
    server, client = view.state_at(exchange), exchange.slot.client
    missing = others_masks(view, exchange, range(view.plan.clients), lambda keys: keys, ANSWER_MASKS, len(answer))
    if missing is None or server is None:
        return None
    ring, counts = RINGS[masks], server.counts
    fixed = (answer.to(torch.int64) + missing).to(ring.dtype)
    return secagg.from_ring(fixed, ring.fraction_bits) / (int(counts[client]) / int(counts.sum()))
