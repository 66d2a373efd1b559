"""Threat models: who attacks, and what they have of a round. Files and options hold the name, the program the object.

A new one is one more instance, here or in a module that calls `register`. Views (`Transcript.view`), victims and
reports follow from its facts, so that nothing else asks for its name. This module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ppbench.base.errors import UsageError, shown, unknown

TARGET = 0
"""The client that colluders are after, and a server that acts where it can read nobody else's upload."""
NAME = re.compile(r"[a-z][a-z-]*/[0-9]+(/[a-z][a-z-]*)?")


@dataclass(frozen=True)
class ThreatModel:
    """One kind of adversary. What it sees of a round is what the parties in it sent, received and keep as state.

    name: with its version, as "server/1". sees: what it sees, a clause for people.
    server: whether the server is in it. clients: the clients that are in it, the first of whom it is named after.
    colludes: whether all clients but TARGET are in it; TARGET is the only victim then.
    overhears: whether it reads every message, as on links without encryption.
    acts: whether its server sends other weights than the model's. It is honest but curious otherwise.
    attacked_as: threat models of this kind of view: attacks that can use those can use this one, too.
    """

    name: str
    sees: str
    server: bool = False
    clients: tuple[int, ...] = ()
    colludes: bool = False
    overhears: bool = False
    acts: bool = False
    attacked_as: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def short(self) -> str:
        """The name up to the first slash, for tables."""
        return self.name.partition("/")[0]

    @property
    def sees_uploads(self) -> bool:
        """Whether other clients' uploads reach it; else it learns of their sum by the models that it is sent."""
        return self.server or self.overhears

    @property
    def client(self) -> int | None:
        """The client that it is named after, None if no client is in it."""
        return self.clients[0] if self.clients else TARGET + 1 if self.colludes else None

    @property
    def lone_server(self) -> bool:
        """Whether it is the honest-but-curious server alone."""
        return self.server and self.client is None and not self.acts

    @property
    def lone_client(self) -> bool:
        """Whether it is one curious client alone, who stands for everybody who is sent the model."""
        return len(self.clients) == 1 and not (self.colludes or self.sees_uploads)

    @property
    def fewest(self) -> int:
        """The fewest clients with which all that are in it exist, and one that is not."""
        return max(len(self.clients), *self.clients, 0) + 1

    @property
    def querier(self) -> str:
        """Who of it queries a delivered model, as the subject of a sentence."""
        several = len(self.clients) > 1
        return f"A coalition of {len(self.clients)} clients that queries" if several else "A client who queries"

    def has(self, client: int) -> bool:
        """Return whether a client is in it."""
        return client in self.clients or (self.colludes and 0 <= client != TARGET)

    def among(self, names: tuple[str, ...]) -> bool:
        """Return whether an attack that can use views of `names` (`Attack.threats`) can use its views."""
        return not {self.name, *self.attacked_as}.isdisjoint(names)


THREATS: dict[str, ThreatModel] = {}
"""The registered threat models, by name."""


def register(threat: ThreatModel) -> ThreatModel:
    """Return `threat`, known by its name from now on. UsageError: contradicting facts, or a name that is taken."""
    for fault in _faults(threat):
        raise UsageError(f"The threat model {shown(threat.name, 60)} cannot be registered: {fault}.")
    return THREATS.setdefault(threat.name, threat)


def _faults(threat: ThreatModel) -> Iterator[str]:
    """Yield what is wrong with the facts of a threat model, a clause each."""
    if NAME.fullmatch(threat.name) is None:
        yield "a name is words and a version, as client/1 or client/1/word"
    if THREATS.get(threat.name, threat) != threat:
        yield "another one has this name"
    if not threat.sees:
        yield "it does not say what it sees"
    if threat.client is None and not threat.sees_uploads:
        yield "nobody is in it"
    if min(threat.clients, default=0) < 0 or len(set(threat.clients)) < len(threat.clients):
        yield "its clients must be numbers from 0 on, each once"
    if threat.colludes and TARGET in threat.clients:
        yield f"client {TARGET} is the victim of colluders, not one of them"
    if threat.acts and not threat.server:
        yield "it acts without a server"
    for name in set(threat.attacked_as) - set(THREATS):
        yield f"no threat model is called {shown(name, 60)}"


def threat_model(named: str | ThreatModel) -> ThreatModel:
    """Return the registered threat model of a name, or what is one already. UsageError: there is none of this name."""
    if isinstance(named, ThreatModel):
        return named
    if named not in THREATS:
        raise unknown("threat model", named, THREATS)
    return THREATS[named]


def recorded_threat(name: str) -> ThreatModel:
    """Return the threat model of a name that others wrote; one in which nobody is if it is not registered here."""
    return THREATS.get(name) or ThreatModel(name, "")


HONEST_SERVER = register(
    ThreatModel("server/1", "the honest-but-curious server: every upload, its own state and broadcasts", server=True)
)
"""The one that is meant where none is named."""
CURIOUS_CLIENT = register(
    ThreatModel("client/1", "one curious client: the broadcasts that it received, its own state and data", clients=(0,))
)
EAVESDROPPER = register(
    ThreatModel(
        "eavesdropper/1", "a listener on links without encryption: every message, nobody's state", overhears=True
    )
)
COLLUSION = register(
    ThreatModel(
        "collusion/1",
        "the server and all clients but client 0: every upload, the states of all of them",
        server=True,
        colludes=True,
    )
)
ACTIVE_SERVER = register(
    ThreatModel(
        "server-active/1",
        "a server that sends any weights, others to each client: every upload, its own state",
        server=True,
        acts=True,
    )
)
ACTIVE_SYBILS = register(
    ThreatModel(
        "server-active/1/sybil",
        "the same server, and all clients but client 0 are its own: the states of all of them",
        server=True,
        colludes=True,
        acts=True,
    )
)
