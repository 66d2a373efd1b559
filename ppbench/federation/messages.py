"""Messages that most protocols share. A defense may define its own with `@node`; every leaf has its network dtype."""

from __future__ import annotations

from torch import Tensor

from ppbench.federation.tree import Params, node


@node
class Hello:
    """Server to client at set-up: who takes part? Carries nothing."""


@node
class Join:
    """Client to server at set-up. count: int64 scalar, the client's number of examples N_k (8 bytes)."""

    count: Tensor


@node
class Model:
    """Server to client. params: public weights, float32."""

    params: Params


@node
class Update:
    """Client to server. params: always oriented as a gradient, i.e. a gradient or start minus end."""

    params: Params
