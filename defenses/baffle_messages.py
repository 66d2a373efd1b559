"""What BAFFLE's parties send, what its server keeps, and which answers it refuses."""

from __future__ import annotations

import torch
from torch import Tensor

from ppbench.errors import ProtocolError
from ppbench.federation.messages import Model
from ppbench.federation.tree import Tree, node


@node
class Evaluate(Model):
    """Server to client: evaluate the model around `params` (float32). seed: int32 scalar, of the directions; 4n + 4."""

    seed: Tensor


@node
class Differences:
    """Client to server. value: [K] or, of forward differences, [2K]; float32, or of masked ones int64 or int32."""

    value: Tensor


@node
class Own:
    """The server's own state. seed: int32 scalar, of the round; average: Params, or () without; steps: int64 scalar."""

    seed: Tensor
    average: Tree
    steps: Tensor


def checked(client: int, numbers: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Return the `numbers` that `client` sent.

    Raises:
        ProtocolError: they are not `length` finite numbers of `dtype`.
    """
    if numbers.shape != (length,):
        raise ProtocolError(f"Client {client} sent numbers of shape {tuple(numbers.shape)}; ({length},) is right.")
    if numbers.dtype != dtype:
        raise ProtocolError(f"Client {client} sent numbers of type {numbers.dtype}; {dtype} is right.")
    if not bool(numbers.isfinite().all()):
        raise ProtocolError(f"Client {client} sent a number that is not finite; all must be.")
    return numbers
