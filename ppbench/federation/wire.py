"""The wire: the only channel between parties. It counts bytes, and keeps messages for adversaries' views."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ppbench.base.errors import ProtocolError
from ppbench.base.tree import Params, Tree, detached, nbytes, node

# -- Messages that most protocols share. A defense may define its own with `@node`; leaves have the dtype sent --

MAX_EXAMPLES = 2**40
"""Largest number of examples of one client: sums over clients stay far from the end of int64."""


@node(name="ppbench.federation.messages.Hello")
class Hello:
    """Server to client at set-up: an empty request to join."""


@node(name="ppbench.federation.messages.Join")
class Join:
    """Client to server at set-up. count: int64 scalar, the client's number of examples N_k (8 bytes)."""

    count: Tensor


def checked_count(client: int, count: Tensor) -> Tensor:
    """Return a client's number of examples, int64 scalar from 1 to `MAX_EXAMPLES` (ProtocolError: any other)."""
    if count.dtype != torch.int64 or count.dim() or not 1 <= int(count) <= MAX_EXAMPLES:
        raise ProtocolError(f"Client {client} told {count.tolist()} examples, not one int64 from 1 to 2^40.")
    return count


@node(name="ppbench.federation.messages.Model")
class Model:
    """Server to client. params: public weights, float32."""

    params: Params


@node(name="ppbench.federation.messages.Update")
class Update:
    """Client to server. params: always oriented as a gradient, i.e. a gradient or start minus end."""

    params: Params


SERVER = -1


class Slot(NamedTuple):
    """One client in one probe: the address of a victim's batch."""

    probe: int
    client: int


def session_of(probe: int) -> str:
    """Return the session name of a probe, or (-1) of the observed round."""
    return f"probe-{probe}" if probe >= 0 else "observed"


@dataclass(frozen=True)
class Envelope:
    """One message on the wire. message: None if its reader cannot decrypt it (an eavesdropper on an encrypted link).

    probe: -1 in the real run. round: 0 is set-up. sender, receiver: client index or SERVER.
    """

    probe: int
    round: int
    step: int
    sender: int
    receiver: int
    nbytes: int
    message: Tree | None


@dataclass
class Wire:
    """Carries messages. keep: whether they are kept for a transcript in `mail`. up, down: bytes from and to clients."""

    keep: bool = False
    up: int = 0
    down: int = 0
    mail: list[Envelope] = field(default_factory=list)

    def post(self, probe: int, round_: int, step: int, sender: int, to: Iterable[int], message: Tree) -> Tree:
        """Deliver `message` to each of `to` and return their copy, one object whose bytes count for each."""
        copy = detached(message)
        size = nbytes(copy)
        for receiver in to:
            if sender == SERVER:
                self.down += size
            else:
                self.up += size
            if self.keep:
                self.mail.append(Envelope(probe, round_, step, sender, receiver, size, copy))
        return copy

    def take(self, other: Wire) -> None:
        """Add another wire's counts and, if this one keeps mail, its mail."""
        self.up, self.down = self.up + other.up, self.down + other.down
        self.mail += other.mail if self.keep else []
