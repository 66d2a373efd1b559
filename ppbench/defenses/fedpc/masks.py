"""Secure aggregation of FedPC's ternaries: whole numbers modulo 2^16 or 2^32, masks among the round's senders."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ppbench.base.errors import ProtocolError
from ppbench.defenses.evidence import others_masks
from ppbench.defenses.fedpc.messages import Command
from ppbench.federation import secagg
from ppbench.federation.contract import Context
from ppbench.federation.view import Exchange, View

PURPOSE = "ternary"  # of the masks' derivation: colluders derive theirs again under the same name


def word(counts: Tensor) -> torch.dtype:
    """Return the smallest of int16, int32, int64 that holds sum_k N_k T_k, which lies within +-sum(counts)."""
    total = int(counts.sum())
    return next(dtype for dtype in (torch.int16, torch.int32, torch.int64) if total <= torch.iinfo(dtype).max)


def masked(ctx: Context, keys: secagg.Keys, senders: Tensor, trits: Tensor) -> Tensor:
    """Return a client's N_k T_k plus its mask, words [M]; over all `senders` [N] bool masks sum to 0 modulo the word.

    Raises ProtocolError where the server names a set that is no protection: without this client, or nobody else in it.
    """
    if senders.shape != keys.counts.shape or not bool(senders[ctx.party]) or int(senders.sum()) < 2:
        raise ProtocolError(f"The server asks client {ctx.party} to mask a ternary vector for itself alone.")
    mask = secagg.zero_sum(_among(keys, senders), ctx, PURPOSE, len(trits))
    return (int(keys.counts[ctx.party]) * trits.cpu().long() + mask).to(word(keys.counts))


def wrapped(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of masked words, int64, reduced to the range of `dtype`: the sum of what was masked."""
    return total.to(dtype).long()


def peeled(view: View, exchange: Exchange) -> Tensor | None:
    """Return one client's masked ternaries, int8 [M], as all other senders tell who pool keys; else None."""
    asked: Command = exchange.asked
    words, senders = exchange.answer.words, asked.senders.nonzero()[:, 0].tolist()
    masks = others_masks(
        view, exchange, senders, lambda worker: _among(worker.keys, asked.senders), PURPOSE, len(words)
    )
    if masks is None:
        return None
    vote = wrapped(words.cpu().long() + masks, words.dtype)  # N_k T_k
    return vote.sign().to(torch.int8)


def _among(keys: secagg.Keys, senders: Tensor) -> secagg.Keys:
    """Return the keys with a graph of none but pairs of `senders` [N] bool."""
    here = senders.to(keys.graph.device)
    return replace(keys, graph=keys.graph & here[:, None] & here[None])
