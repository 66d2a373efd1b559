"""What FedPC's parties send each other and keep, and which answers its server refuses."""

from __future__ import annotations

import torch
from torch import Tensor

from ppbench.base.errors import ProtocolError
from ppbench.base.tree import Params, Tree, node
from ppbench.defenses.fedpc.ternary import Packing, decoded

SEND_MODEL, SEND_TERNARY = 1, 2


@node
class Cost:
    """Client to server. value: float32 scalar, the mean loss of its trained model on all its examples (4 bytes)."""

    value: Tensor


@node
class Command:
    """Server to client: how to answer the round.

    code: uint8 scalar, SEND_MODEL or SEND_TERNARY. senders: [N] bool, the clients whose masks cancel in the sum; empty
    (no byte) where nothing is masked.
    """

    code: Tensor
    senders: Tensor


@node
class Weights:
    """The pilot to server. params: its trained model Q, float32."""

    params: Params


@node
class Ternary:
    """Any other client to server. packed: uint8, its ternary vector, with zeros behind where messages are padded."""

    packed: Tensor


@node
class Masked:
    """Any other client to server, in secure aggregation. words: [M] int16, int32 or int64, N_k T_k plus a mask."""

    words: Tensor


@node
class Trained:
    """What a client computes. params: its trained model Q; cost: float32 scalar."""

    params: Params
    cost: Tensor


@node
class Worker:
    """A client's state.

    batch, epochs: int64 scalars, and rate: float32 scalar (a factor on the plan's rate): its secrets. last, before:
    P^{t-1} and P^{t-2}, trained: its Q^t; each `{}` until there is one. keys: `secagg.Keys` in secure aggregation, else
    `()`.
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
    """The server's own. before: P^{t-2}, `{}` in round 1; costs: [N] float32 of the last round; pilots: [t-1] int64."""

    before: Params
    costs: Tensor
    pilots: Tensor


# -- answers, as the server reads them: a malformed one is a ProtocolError that names its client -----------------------
def cost_of(client: int, answer: Tree | None) -> Tensor:
    """Return the client's cost, a float32 scalar: finite and >= 0."""
    value: Tensor = _expected(client, answer, Cost).value
    if value.dtype != torch.float32 or value.dim() or not bool(value.isfinite()) or bool(value < 0):
        raise ProtocolError(f"Client {client} told the cost {value.tolist()}, not one finite float32 number >= 0.")
    return value


def model_of(client: int, upload: Tree | None, like: Params) -> Params:
    """Return the pilot's model: names, shapes and dtypes of `like`, all values finite."""
    params: Params = _expected(client, upload, Weights).params
    found, right = ({n: (p.shape, p.dtype) for n, p in tree.items()} for tree in (params, like))
    if found != right:
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
        found = f"{sent.dtype} of shape {tuple(sent.shape)}"
        raise ProtocolError(f"Client {client} sent masked ternaries as {found}, not {words} of shape ({count},).")
    return sent


def _expected(client: int, upload: Tree | None, kind: type) -> Tree:
    if not isinstance(upload, kind):
        sent = "nothing" if upload is None else type(upload).__name__
        raise ProtocolError(f"Client {client} was asked for {kind.__name__} and sent {sent}.")
    return upload
