"""Flower's code run in this process: seeded, quiet, and with nobody to talk to but the bench."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from ppbench.adapters.running import running as seeded
from ppbench.base.errors import ProtocolError

RUN = SERVER_NODE = 1
PATIENCE = 5
"""Times that a strategy may ask who is there before it starts: one that waits for more clients asks without end."""


@contextmanager
def running(who: str, *seed: int) -> Iterator[None]:
    """Run `who`'s code as `ppbench.adapters.running` does, in a task of Flower's own."""
    identity = _identity()
    if identity is not None:
        identity.task_id, identity.run_id, identity.node_id = RUN, RUN, SERVER_NODE
    try:
        with seeded("flwr", who, *seed):
            yield
    finally:
        if identity is not None:
            identity.task_id = identity.run_id = identity.node_id = None


def _identity() -> Any:
    """Return what newer versions read the sender of a message from, None where they are told it later."""
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:
        return None
    return TaskIdentity


def node_of(client: int) -> int:
    """Return a client's node; the server's is `SERVER_NODE`."""
    return client + SERVER_NODE + 1


def client_of(message: Message) -> int:
    """Return the client that a message is for."""
    return int(message.metadata.dst_node_id) - SERVER_NODE - 1


class Nodes(Grid):
    """A grid on which a strategy sees who takes part, and sends nothing: what it would send is asked of it."""

    def __init__(self, count: int) -> None:
        self.count, self.asked = count, 0

    @property
    def run(self) -> Any:
        """No run."""
        return None

    def set_run(self, run: Any) -> None:
        """Take no run."""

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes of all clients (ProtocolError: asked again and again)."""
        self.asked += 1
        if self.asked > PATIENCE:
            raise ProtocolError(f"The strategy waits for more clients than the {self.count} that there are.")
        return [node_of(client) for client in range(self.count)]

    def create_message(self, *parts: Any, **named: Any) -> Message:
        """Return a message."""
        return Message(*parts, **named)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Refuse (ProtocolError)."""
        raise ProtocolError("The strategy sends messages by itself; only what configure_train returns is sent here.")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Refuse (ProtocolError)."""
        return self.push_messages(())  # type: ignore[return-value]  # it raises

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Refuse (ProtocolError)."""
        return self.push_messages(messages)  # type: ignore[return-value]  # it raises
