"""Messages that most protocols share. A defense may define its own with `@node`; leaves have the dtype that is sent."""

from __future__ import annotations

import torch
from torch import Tensor

from ppbench.base.errors import ProtocolError
from ppbench.base.tree import Params, node

MAX_EXAMPLES = 2**40
"""Largest number of examples of one client: sums over clients stay far from the end of int64."""


@node
class Hello:
    """Server to client at set-up: an empty request to join."""


@node
class Join:
    """Client to server at set-up. count: int64 scalar, the client's number of examples N_k (8 bytes)."""

    count: Tensor


def checked_count(client: int, count: Tensor) -> Tensor:
    """Return a client's number of examples, int64 scalar from 1 to `MAX_EXAMPLES` (ProtocolError: any other)."""
    if count.dtype != torch.int64 or count.dim() or not 1 <= int(count) <= MAX_EXAMPLES:
        raise ProtocolError(f"Client {client} told {count.tolist()} examples, not one int64 from 1 to 2^40.")
    return count


@node
class Model:
    """Server to client. params: public weights, float32."""

    params: Params


@node
class Update:
    """Client to server. params: always oriented as a gradient, i.e. a gradient or start minus end."""

    params: Params
