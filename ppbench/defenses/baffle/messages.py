"""What BAFFLE's parties send, what its server keeps, and which answers it refuses."""

from __future__ import annotations

import torch
from torch import Tensor

from ppbench.base.errors import ProtocolError
from ppbench.base.tree import Params, Tree, node
from ppbench.federation.messages import Model, Update
from ppbench.federation.optim import Layout


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


def numbers_of(client: int, upload: Tree, params: Params, count: int | None, ring: torch.dtype | None) -> Tensor:
    """Return the numbers of a client's answer, flat (ProtocolError: of another kind, length or dtype, or not finite).

    Args:
        params: the model, for names, shapes and dtype of an update.
        count: of loss differences, or None where an update is due.
        ring: dtype of masked numbers; None for floats, then differences are float32.
    """
    right = Update if count is None else Differences
    if not isinstance(upload, right):
        raise ProtocolError(f"Client {client} answered with {type(upload).__name__}, not {right.__name__}.")
    layout = Layout.of(params)
    if isinstance(upload, Update) and Layout.of(upload.params) != layout:
        raise ProtocolError(f"Client {client} sent an update whose names or shapes are not the model's.")
    numbers = flat(upload)
    if count is not None and numbers.shape != (count,):
        raise ProtocolError(f"Client {client} sent numbers of shape {tuple(numbers.shape)}; ({count},) is right.")
    dtype = ring or (torch.float32 if count is not None else layout.pack(params).dtype)
    if numbers.dtype != dtype:
        raise ProtocolError(f"Client {client} sent numbers of type {numbers.dtype}; {dtype} is right.")
    if not bool(numbers.isfinite().all()):
        raise ProtocolError(f"Client {client} sent a number that is not finite; all must be.")
    return numbers


def flat(upload: Tree) -> Tensor:
    """Return the numbers of an answer as one vector: differences, or an update's entries in the model's order."""
    return upload.value if isinstance(upload, Differences) else Layout.of(upload.params).pack(upload.params)
