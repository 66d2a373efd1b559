"""What FedPC's parties send each other and keep: messages, a worker's state, the server's ledger."""

from __future__ import annotations

from torch import Tensor

from ppbench.base.tree import Params, Tree, node

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

    batch, epochs: int64 scalars, and rate: float32 scalar (a factor on the plan's learning rate): its secrets.
    last, before: the latest two broadcasts P^{t-1} and P^{t-2}, trained: its Q^t; each `{}` until there is one.
    keys: `secagg.Keys` in secure aggregation, else `()`.
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
