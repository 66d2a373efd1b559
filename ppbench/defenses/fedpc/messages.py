"""FedPC's messages and states, the server's checks of answers, and masks on ternaries.

Masked ternaries are whole numbers modulo 2^16 or more, with masks among the round's senders.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ppbench.base.errors import ProtocolError
from ppbench.base.tree import Params, Tree, node
from ppbench.defenses.evidence import others_masks
from ppbench.defenses.fedpc.ternary import Packing, decoded
from ppbench.federation import secagg
from ppbench.federation.contract import Context
from ppbench.federation.view import Exchange, View

SEND_MODEL, SEND_TERNARY = 1, 2


@node
class Cost:
    """Client to server. value: float32 scalar, the mean loss of its trained model on all its examples (4 bytes)."""

    value: Tensor


@node
class Command:
    """Server to client: how to answer the round, SEND_MODEL or SEND_TERNARY (uint8 scalar).

    senders: [N] bool, the clients whose masks cancel in the sum; empty (no byte) without masks.
    """

    code: Tensor
    senders: Tensor


@node
class Weights:
    """The pilot to server. params: its trained model Q, float32."""

    params: Params


@node
class Ternary:
    """Any other client to server. packed: uint8, its ternary vector, followed by zeros if messages are padded."""

    packed: Tensor


@node
class Masked:
    """Any other client to server, with masks. words: [M] int16, int32 or int64, N_k T_k plus a mask."""

    words: Tensor


@node
class Trained:
    """A client's result. params: its trained model Q; cost: float32 scalar."""

    params: Params
    cost: Tensor


@node
class Worker:
    """A client's state: its secrets batch and epochs (int64 scalars) and rate (float32, a factor on the plan's).

    last, before: P^{t-1} and P^{t-2}; trained: its Q^t; `{}` if there is none yet. keys: `secagg.Keys`, or `()`.
    """

    batch: Tensor
    epochs: Tensor
    rate: Tensor
    last: Params
    before: Params
    trained: Params
    keys: Tree


@node
class Ledger:
    """The server's own state. before: P^{t-2}, `{}` in round 1; costs: [N] float32, last round; pilots: [t-1] int64."""

    before: Params
    costs: Tensor
    pilots: Tensor


# -- the server's checks of answers: a malformed one is a ProtocolError that names its client --------------------------
def cost_of(client: int, answer: Tree | None) -> Tensor:
    """Return the client's cost, a float32 scalar: finite and >= 0."""
    value: Tensor = _expected(client, answer, Cost).value
    if value.dtype != torch.float32 or value.dim() or not bool(value.isfinite()) or bool(value < 0):
        raise ProtocolError(f"Client {client} told the cost {value.tolist()}, not one finite float32 number >= 0.")
    return value


def pilot_model(client: int, upload: Tree | None, like: Params) -> Params:
    """Return the pilot's model: names, shapes and dtypes of `like`, all values finite."""
    params: Params = _expected(client, upload, Weights).params
    forms, expected = ({n: (p.shape, p.dtype) for n, p in tree.items()} for tree in (params, like))
    if forms != expected:
        raise ProtocolError(f"Client {client} sent a model whose names, shapes or dtypes are not the global model's.")
    for name, value in params.items():
        if not bool(value.isfinite().all()):
            raise ProtocolError(f"Client {client} sent a model with values in {name!r} that are not finite.")
    return params


def ternary_of(client: int, upload: Tree | None, count: int, packing: Packing, padded: bool) -> Tensor:
    """Return the client's ternary vector, int8 [count]."""
    try:
        return decoded(_expected(client, upload, Ternary).packed, count, packing, padded)
    except ValueError as cause:
        raise ProtocolError(f"Client {client} sent a ternary vector that cannot be read: {cause}.") from cause


def masked_of(client: int, upload: Tree | None, count: int, words: torch.dtype) -> Tensor:
    """Return the client's masked ternary vector, [count] of the dtype `words`."""
    sent: Tensor = _expected(client, upload, Masked).words
    if (sent.dtype, sent.shape) != (words, (count,)):
        actual = f"{sent.dtype} of shape {tuple(sent.shape)}"
        raise ProtocolError(f"Client {client} sent masked ternaries as {actual}, not {words} of shape ({count},).")
    return sent


def _expected(client: int, upload: Tree | None, kind: type) -> Tree:
    if not isinstance(upload, kind):
        sent = "nothing" if upload is None else type(upload).__name__
        raise ProtocolError(f"Client {client} was asked for {kind.__name__} and sent {sent}.")
    return upload


TERNARY_MASKS = "ternary"  # of the masks' derivation: colluders derive theirs again under the same name


def word_dtype(counts: Tensor) -> torch.dtype:
    """Return the smallest of int16, int32, int64 that holds sum_k N_k T_k, which lies within +-sum(counts)."""
    total = int(counts.sum())
    return next(dtype for dtype in (torch.int16, torch.int32, torch.int64) if total <= torch.iinfo(dtype).max)


def mask_ternary(ctx: Context, keys: secagg.Keys, senders: Tensor, trits: Tensor) -> Tensor:
    """Return a client's N_k T_k plus its mask, words [M]; over all `senders` [N] bool masks sum to 0 modulo the word.

    ProtocolError: `senders` protects nothing, because this client is not in it, or nobody else is.
    """
    if senders.shape != keys.counts.shape or not bool(senders[ctx.party]) or int(senders.sum()) < 2:
        raise ProtocolError(f"The server asks client {ctx.party} to mask a ternary vector for itself alone.")
    mask = secagg.zero_sum(_among(keys, senders), ctx, TERNARY_MASKS, len(trits))
    return (int(keys.counts[ctx.party]) * trits.cpu().long() + mask).to(word_dtype(keys.counts))


def wrapped(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of masked words, int64, reduced to the range of `dtype`: the unmasked sum."""
    return total.to(dtype).long()


def unmasked_ternary(view: View, exchange: Exchange) -> Tensor | None:
    """Return one client's unmasked ternaries, int8 [M], by all other senders' keys; None if the view lacks some."""
    command: Command = exchange.request
    words, senders = exchange.answer.words, command.senders.nonzero()[:, 0].tolist()
    masks = others_masks(
        view, exchange, senders, lambda worker: _among(worker.keys, command.senders), TERNARY_MASKS, len(words)
    )
    if masks is None:
        return None
    vote = wrapped(words.cpu().long() + masks, words.dtype)  # N_k T_k
    return vote.sign().to(torch.int8)


def _among(keys: secagg.Keys, senders: Tensor) -> secagg.Keys:
    here = senders.to(keys.graph.device)
    return replace(keys, graph=keys.graph & here[:, None] & here[None])
