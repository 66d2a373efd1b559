"""Secure aggregation of FedPC's ternaries: whole numbers modulo 2^16 or 2^32, masks among the round's senders."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ppbench.errors import ProtocolError
from ppbench.federation import secagg
from ppbench.federation.contract import Context


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
    here = senders.to(keys.graph.device)
    pairs = keys.graph & here[:, None] & here[None]
    mask = secagg.zero_sum(replace(keys, graph=pairs), ctx, "ternary", len(trits))
    return (int(keys.counts[ctx.party]) * trits.cpu().long() + mask).to(word(keys.counts))


def wrapped(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of masked words, int64, reduced to the range of `dtype`: the sum of what was masked."""
    return total.to(dtype).long()
