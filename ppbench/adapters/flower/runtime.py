"""Runs Flower's code in this process: seeded, quiet, and without a network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from ppbench.adapters.user_code import seeded_run
from ppbench.base.errors import ProtocolError

RUN = SERVER_NODE = 1
MAX_NODE_QUERIES = 5
"""How often a strategy may ask for the nodes: one that waits for more clients asks without end."""


@contextmanager
def running_flower(who: str, *seed: int) -> Iterator[None]:
    """Run Flower's code as `seeded_run` does, with the identity of a Flower task."""
    identity = _identity()
    if identity is not None:
        identity.task_id, identity.run_id, identity.node_id = RUN, RUN, SERVER_NODE
    try:
        with seeded_run("flwr", who, *seed):
            yield
    finally:
        if identity is not None:
            identity.task_id = identity.run_id = identity.node_id = None


def _identity() -> Any:
    """Return the object from which newer versions read a message's sender; None for older ones."""
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:
        return None
    return TaskIdentity


def node_of(client: int) -> int:
    """Return a client's node id; the server's is `SERVER_NODE`."""
    return client + SERVER_NODE + 1


def receiver_of(message: Message) -> int:
    """Return the client that a message is for."""
    return int(message.metadata.dst_node_id) - SERVER_NODE - 1


class Nodes(Grid):
    """A grid that lists all clients' nodes and sends nothing: `configure_train` returns the messages."""

    def __init__(self, count: int) -> None:
        self.count, self.queries = count, 0

    @property
    def run(self) -> Any:
        """No run."""
        return None

    def set_run(self, run: Any) -> None:
        """Take no run."""

    def get_node_ids(self) -> Iterable[int]:
        """Return the node ids of all clients (ProtocolError: asked more than `MAX_NODE_QUERIES` times)."""
        self.queries += 1
        if self.queries > MAX_NODE_QUERIES:
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
