"""Secure aggregation of FedPC's ternaries: whole numbers modulo 2^16 or 2^32, masks among the round's senders."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ppbench.base.errors import ProtocolError
from ppbench.defenses.evidence import others_masks
from ppbench.defenses.fedpc.messages import Command, Worker
from ppbench.federation import secagg
from ppbench.federation.contract import Context
from ppbench.federation.view import Exchange, View

PURPOSE = "ternary"  # of the masks' derivation: colluders derive theirs again under the same name


def word(counts: Tensor) -> torch.dtype:
    """Return the smallest of int16, int32, int64 that holds sum_k N_k T_k, which lies within +-sum(counts)."""
    total = int(counts.sum())
    return next(dtype for dtype in (torch.int16, torch.int32, torch.int64) if total <= torch.iinfo(dtype).max)


def masked(ctx: Context, keys: secagg.Keys, senders: Tensor, trits: Tensor) -> Tensor:
    """Return a client's N_k T_k plus its mask, words [M]; over all `senders` the masks sum to 0 modulo the word.

    Args:
        ctx: the client's; masks are those of its session and round.
        keys: its keys; it knows all N_k from the roster.
        senders: [N] bool, who sends ternaries in this round, this client among them.
        trits: its ternary vector, int8 [M].

    Raises:
        ProtocolError: the server names a set that is no protection: without this client, or nobody else in it.
    """
    if senders.shape != keys.counts.shape or not bool(senders[ctx.party]) or int(senders.sum()) < 2:
        raise ProtocolError(f"The server asks client {ctx.party} to mask a ternary vector for itself alone.")
    mask = secagg.zero_sum(_among(keys, senders), ctx, PURPOSE, len(trits))
    return (int(keys.counts[ctx.party]) * trits.cpu().long() + mask).to(word(keys.counts))


def wrapped(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of masked words, int64, reduced to the range of `dtype`: the sum of what was masked."""
    return total.to(dtype).long()


def peeled(view: View, exchange: Exchange) -> Tensor | None:
    """Return one client's masked ternaries, int8 [M], as all other senders tell who pool keys; None where they do not.

    Args:
        view: of colluding parties.
        exchange: the client's answer to its command, and when.
    """
    asked: Command = exchange.asked
    client, senders = exchange.slot.client, asked.senders
    others = [c for c in senders.nonzero()[:, 0].tolist() if c != client]
    states = {c: state for c in others if isinstance(state := view.state_at(exchange, c), Worker)}
    if len(states) < max(1, len(others)):
        return None
    keys = {c: _among(state.keys, senders) for c, state in states.items()}
    masks = others_masks(view, exchange, keys, PURPOSE, len(exchange.answer.words))
    vote = wrapped(exchange.answer.words.cpu().long() + masks, exchange.answer.words.dtype)  # N_k T_k
    return vote.sign().to(torch.int8)


def _among(keys: secagg.Keys, senders: Tensor) -> secagg.Keys:
    """Return the keys with a graph of none but pairs of `senders` [N] bool."""
    here = senders.to(keys.graph.device)
    return replace(keys, graph=keys.graph & here[:, None] & here[None])
