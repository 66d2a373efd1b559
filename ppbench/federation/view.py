"""What ONE adversary may know, cut from a transcript by a threat model. Nothing here reaches a victim's data."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from pydantic import TypeAdapter
from torch import Tensor

from ppbench.base import tree
from ppbench.base.errors import UsageError, unknown
from ppbench.base.registry import load
from ppbench.base.tree import Params, Tree
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Context, Data, Noise, Plan
from ppbench.federation.wire import SERVER, Envelope, Slot
from ppbench.nets.net import HeldSpec

THREATS = {
    "server/1": "the honest-but-curious server: every upload, its own state and broadcasts",
    "client/1": "one curious client: the broadcasts that it received, its own state and data",
    "eavesdropper/1": "a listener on links without encryption: every message, nobody's state",
    "collusion/1": "the server and all clients but client 0: every upload, the states of all of them",
    "server-active/1": "a server that sends any weights, others to each client: every upload, its own state",
    "server-active/1/sybil": "the same server, and all clients but client 0 are its own: the states of all of them",
}
TARGET = 0
"""The client that those who collude are after, and a server that acts where it can read nobody else."""


def acts(threat: str) -> bool:
    """Return whether the server of a threat model sends other weights than the model's."""
    return threat.startswith("server-active/")


def colludes(threat: str) -> bool:
    """Return whether the server of a threat model has the states of all clients but the target."""
    return threat.startswith("collusion/") or threat.endswith("/sybil")


class Mechanism(Protocol):
    """What everybody may ask of a defense: public, and all that a view needs of it (`contract.Defense` is one)."""

    name: ClassVar[str]
    version: ClassVar[str]
    masked: ClassVar[bool]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def sums(self) -> bool:
        """Whether the server can read only sums over the cohort."""

    def decode(self, upload: Tree, like: Params) -> Params:
        """Return an upload as parameters shaped as `like`."""

    def decoded(self, ctx: Context, server: Any, client: int, upload: Tree) -> Params:
        """Return the update that the server makes of one client's upload, with the secrets of its state."""

    def noise(self, plan: Plan) -> Noise | None:
        """Return the public law of the noise on an upload."""

    def clipping(self, plan: Plan) -> float | None:
        """Return the L2 norm to which gradients are clipped."""

    def predict(self, plan: Plan, message: Tree, x: Tensor) -> Tensor:
        """Return logits as a client computes them from a delivered or broadcast message."""

    def role_of(self, uploads: Sequence[Tree]) -> str:
        """Return which part a client played that sent `uploads`."""

    def evidence(self, view: View) -> list[Evidence]:
        """Return what `view` says about each victim."""


@dataclass(frozen=True)
class StateRecord:
    """A party's state as it was in one step (before that step's computation)."""

    probe: int
    round: int
    step: int
    party: int
    state: Tree


@tree.node
class Begun:
    """What the server has when a round begins.

    server: its state, () where it is not kept. draws: its generator's state, uint8. session: as its context names it.
    """

    server: Tree
    draws: Tensor
    session: str


BEGUN = -1
"""The step under which a transcript keeps a round's `Begun`, before the first."""


@dataclass(frozen=True)
class Exchange:
    """An upload with the message that it answers, the slot it came from, and when."""

    slot: Slot
    asked: Tree
    answer: Tree
    round: int
    step: int


@dataclass(frozen=True)
class View:
    """One adversary's knowledge under `threat`, a key of `THREATS`. plan, defense: public.

    Attributes:
        party: whose view: SERVER, a client index, or None for an eavesdropper.
        mail: the messages that this party sent, received or overheard.
        states: its own states, and those of parties that collude with it.
        data: its own batches by probe (a client's), in the observed rounds.
        public: examples that no client holds, which every adversary may use; None where none were set apart.
        sessions: (probe, round, session) of a client's contexts, by which it derives its own masks again.
    """

    threat: str
    party: int | None
    plan: Plan
    defense: Mechanism
    mail: tuple[Envelope, ...]
    states: tuple[StateRecord, ...]
    data: tuple[tuple[int, Data], ...] = ()
    public: Data | None = None
    sessions: tuple[tuple[int, int, str], ...] = ()

    def exchanges(self) -> Iterator[Exchange]:
        """Yield every upload to the server that can be read, with the message that it answers."""
        asked: dict[tuple[int, int, int, int], Tree] = {}
        for letter in self.mail:
            if letter.sender == SERVER:
                asked[letter.probe, letter.round, letter.step, letter.receiver] = letter.message
        for letter in self.mail:
            key = (letter.probe, letter.round, letter.step, letter.sender)
            if letter.receiver == SERVER and letter.message is not None and asked.get(key) is not None:
                yield Exchange(Slot(letter.probe, letter.sender), asked[key], letter.message, letter.round, letter.step)

    def state_at(self, exchange: Exchange, party: int | None = None) -> Tree | None:
        """Return the state of `party` (this one by default) in the step of `exchange`, or None if not known."""
        key = (exchange.slot.probe, exchange.round, exchange.step, self.party if party is None else party)
        return next((s.state for s in self.states if (s.probe, s.round, s.step, s.party) == key), None)

    def begun(self, probe: int, round_: int) -> Begun | None:
        """Return what the server had when a round began, or None if this party does not know."""
        where = (probe, round_, BEGUN, SERVER)
        return next((s.state for s in self.states if (s.probe, s.round, s.step, s.party) == where), None)

    def session(self, exchange: Exchange) -> str:
        """Return what masks of this exchange derive from; "" to a listener, who takes none off."""
        where = exchange.slot.probe, exchange.round
        if (begun := self.begun(*where)) is not None:
            return begun.session
        return next((session for *at, session in self.sessions if tuple(at) == where), "")

    def broadcasts(self, probe: int) -> list[Tree]:
        """Return the messages that this party received from the server in `probe`, in order."""
        return [m.message for m in self.mail if m.probe == probe and m.sender == SERVER and m.receiver == self.party]

    def parts(self) -> Tree:
        """Return mail, states, own data and public examples as a tree, which files hold."""
        mail = [(e.probe, e.round, e.step, e.sender, e.receiver, e.nbytes, e.message) for e in self.mail]
        states = [(s.probe, s.round, s.step, s.party, s.state) for s in self.states]
        return [mail, states, [list(pair) for pair in self.data], self.public]

    def save(self, folder: Path) -> None:
        """Write the view to `folder` (created): tensors as safetensors, the rest as JSON.

        UsageError: its network is known in this process alone, so that no file can name it.
        """
        if isinstance(self.plan.spec, HeldSpec):
            told = f"A view of the network {self.plan.spec.model!r}, which is held as an object, cannot be saved"
            raise UsageError(f"{told}; name the network by its address, as MODULE:NAME.")
        folder.mkdir(parents=True, exist_ok=True)
        tree.save(self.parts(), folder / "view.safetensors")
        about = {
            "threat": self.threat,
            "party": self.party,
            "plan": dataclasses.asdict(self.plan),
            "defense": {"name": self.defense.name, "parameters": dataclasses.asdict(self.defense)},
            "sessions": self.sessions,
        }
        (folder / "view.json").write_text(json.dumps(about, indent=1))

    @staticmethod
    def load(folder: Path, device: str = "cpu") -> View:
        """Read what `save` wrote, its tensors onto `device`. Raises UsageError where `folder` holds no view."""
        if not (folder / "view.json").is_file():
            raise UsageError(f"{folder} holds no saved view; expected view.json and view.safetensors in it.")
        about: dict[str, Any] = json.loads((folder / "view.json").read_text())
        defense = load("defenses", about["defense"]["name"])(**about["defense"]["parameters"])
        plan = TypeAdapter(Plan).validate_python(about["plan"])
        mail, states, data, public = tree.moved(tree.load(folder / "view.safetensors"), torch.device(device))
        return View(
            about["threat"],
            about["party"],
            plan,
            defense,
            tuple(Envelope(*letter) for letter in mail),
            tuple(StateRecord(*record) for record in states),
            tuple((probe, own) for probe, own in data),
            public,
            tuple((int(probe), int(round_), str(name)) for probe, round_, name in about["sessions"]),
        )


@dataclass(frozen=True)
class Transcript:
    """All messages and states of the probed rounds. Stays with the harness; attacks get views of it."""

    plan: Plan
    defense: Mechanism
    mail: tuple[Envelope, ...]
    states: tuple[StateRecord, ...]

    def roles(self) -> dict[Slot, str]:
        """Return which part each client played, by slot."""
        uploads: dict[Slot, list[Tree]] = {}
        for letter in self.mail:
            if letter.receiver == SERVER:
                uploads.setdefault(Slot(letter.probe, letter.sender), []).append(letter.message)
        return {slot: self.defense.role_of(sent) for slot, sent in uploads.items()}

    def view(self, threat: str, party: int | None = None, own: tuple[tuple[int, Data], ...] = ()) -> View:
        """Return what `threat` may know (UsageError); of "client/1" with its index and its `own` batches by probe."""
        if threat not in THREATS:
            raise unknown("threat model", threat, THREATS)
        if threat == "eavesdropper/1":
            return View(threat, None, self.plan, self.defense, self.mail, ())
        if colludes(threat):
            states = tuple(s for s in self.states if s.party != TARGET)
            return View(threat, SERVER, self.plan, self.defense, self.mail, states)
        me = SERVER if threat.startswith("server") else (party or 0)
        mail = tuple(e for e in self.mail if me in (e.sender, e.receiver))
        states = tuple(s for s in self.states if s.party == me)
        named = tuple((s.probe, s.round, s.state.session) for s in self.states if s.step == BEGUN)
        return View(threat, me, self.plan, self.defense, mail, states, own if me != SERVER else (), sessions=named)
