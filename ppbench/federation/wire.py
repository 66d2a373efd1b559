"""The wire: the only channel between parties. It counts bytes, and keeps messages for adversaries' views."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ppbench.base.tree import Tree, detached, nbytes

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
