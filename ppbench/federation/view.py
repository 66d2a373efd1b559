"""One adversary's view: the part of a transcript that its threat model allows. It never includes a victim's data."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from pydantic import TypeAdapter
from torch import Tensor

from ppbench.base import tree
from ppbench.base.errors import UsageError
from ppbench.base.registry import load_plugin
from ppbench.base.secret_draws import KEY_BYTES
from ppbench.base.tree import Params, Tree
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Context, Data, Noise, Plan
from ppbench.federation.threats import ThreatModel, threat_model
from ppbench.federation.wire import SERVER, Envelope, Slot
from ppbench.nets.net import HeldSpec


class PublicDefense(Protocol):
    """The public part of a defense, as a view needs it (`contract.Defense` has it)."""

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
        """Return the update that the server decodes from one client's upload, with the secrets of its state."""

    def noise(self, plan: Plan) -> Noise | None:
        """Return the public law of the noise on an upload."""

    def clipping(self, plan: Plan) -> float | None:
        """Return the L2 norm to which gradients are clipped."""

    def predict(self, plan: Plan, message: Tree, x: Tensor) -> Tensor:
        """Return logits as a client computes them from a delivered or broadcast message."""

    def role_of(self, uploads: Sequence[Tree]) -> str:
        """Return the role of a client that sent `uploads`."""

    def evidence(self, view: View) -> list[Evidence]:
        """Return the evidence about each victim in `view`."""


@dataclass(frozen=True)
class StateRecord:
    """A party's state in one step, before that step's computation."""

    probe: int
    round: int
    step: int
    party: int
    state: Tree


@tree.node
class Begun:
    """The server's side when a round begins.

    server: its state, () if not recorded. draws: its generator's state, uint8. session: its context's. secret: the key
    of its secret draws, uint8; zeros in records of older versions.
    """

    server: Tree
    draws: Tensor
    session: str
    secret: Tensor = torch.zeros(KEY_BYTES, dtype=torch.uint8)


def tuples_of(records: Iterable[Envelope | StateRecord]) -> list[tuple[Any, ...]]:
    """Return messages or states as tuples of their fields, in order, which a tree can hold."""
    return [tuple(vars(record).values()) for record in records]


BEGUN = -1
"""The step number of a round's `Begun` in a transcript, before the first step."""


@dataclass(frozen=True)
class Exchange:
    """An upload `answer`, the message `request` that it answers, and its slot, round and step."""

    slot: Slot
    request: Tree
    answer: Tree
    round: int
    step: int


@dataclass(frozen=True)
class View:
    """One adversary's knowledge. plan, defense: public.

    Attributes:
        threat: whose, with the facts that it is cut by; made of a name, too (UsageError: an unknown one).
        party: whose view: SERVER, a client index, or None for an eavesdropper.
        mail: the messages that this party sent, received or overheard.
        states: its own states, and those of parties that collude with it.
        data: its own batches by probe (those of all clients in it, in their order), in the observed rounds.
        public: examples that no client holds, which every adversary may use; None where none were set apart.
        sessions: (probe, round, session) of a client's contexts, by which it derives its own masks again.
        set_up: the messages of set-up that this party sent, received or overheard; `mail` holds those of rounds.
    """

    threat: ThreatModel
    party: int | None
    plan: Plan
    defense: PublicDefense
    mail: tuple[Envelope, ...]
    states: tuple[StateRecord, ...]
    data: tuple[tuple[int, Data], ...] = ()
    public: Data | None = None
    sessions: tuple[tuple[int, int, str], ...] = ()
    set_up: tuple[Envelope, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "threat", threat_model(self.threat))

    def inside(self, client: int) -> bool:
        """Return whether a client is this adversary, or one of those who collude."""
        return client == self.party if self.threat.lone_client else self.threat.has(client)

    def exchanges(self) -> Iterator[Exchange]:
        """Yield every readable upload to the server, with the message that it answers."""
        requests: dict[tuple[int, int, int, int], Tree] = {}
        for envelope in self.mail:
            if envelope.sender == SERVER:
                requests[envelope.probe, envelope.round, envelope.step, envelope.receiver] = envelope.message
        for envelope in self.mail:
            key = (envelope.probe, envelope.round, envelope.step, envelope.sender)
            if envelope.receiver == SERVER and envelope.message is not None and requests.get(key) is not None:
                yield Exchange(
                    Slot(envelope.probe, envelope.sender),
                    requests[key],
                    envelope.message,
                    envelope.round,
                    envelope.step,
                )

    def first_uploads(self, kind: type = object) -> dict[Slot, Exchange]:
        """Return the first upload of each slot whose answer is of a `kind`, in the order of `exchanges`."""
        first: dict[Slot, Exchange] = {}
        for exchange in self.exchanges():
            if isinstance(exchange.answer, kind):
                first.setdefault(exchange.slot, exchange)
        return first

    def by_round(self) -> list[View]:
        """Return the parts of the view about single rounds, in order, for every round with uploads.

        The part of a party that sees no uploads of others also has the next broadcast, which shows their sum.
        """
        parts = []
        for number in sorted({letter.round for letter in self.mail if letter.receiver == SERVER and letter.round > 0}):
            ended = () if self.threat.sees_uploads else (number + 1, 0, SERVER)
            mail = tuple(e for e in self.mail if e.round == number or (e.round, e.step, e.sender) == ended)
            states = tuple(state for state in self.states if state.round == number)
            parts.append(dataclasses.replace(self, mail=mail, states=states))
        return parts

    def state_at(self, exchange: Exchange, party: int | None = None) -> Tree | None:
        """Return the state of `party` (this one by default) in the step of `exchange`, or None if not known."""
        key = (exchange.slot.probe, exchange.round, exchange.step, self.party if party is None else party)
        return next((s.state for s in self.states if (s.probe, s.round, s.step, s.party) == key), None)

    def begun(self, probe: int, round_: int) -> Begun | None:
        """Return the server's side when a round began, or None if this party does not know it."""
        where = (probe, round_, BEGUN, SERVER)
        return next((s.state for s in self.states if (s.probe, s.round, s.step, s.party) == where), None)

    def session(self, exchange: Exchange) -> str:
        """Return the session from which masks of this exchange derive; "" for an eavesdropper."""
        where = exchange.slot.probe, exchange.round
        if (begun := self.begun(*where)) is not None:
            return begun.session
        return next((session for *at, session in self.sessions if tuple(at) == where), "")

    def broadcasts(self, probe: int) -> list[Tree]:
        """Return the messages that this party received from the server in `probe`, in order."""
        return [m.message for m in self.mail if m.probe == probe and m.sender == SERVER and m.receiver == self.party]

    def parts(self) -> Tree:
        """Return mail, states, own data, public examples and set-up as a tree that `tree.save_tree` can write.

        Without messages of set-up their part is left out, as in older files.
        """
        set_up = [tuples_of(self.set_up)] if self.set_up else []
        return [tuples_of(self.mail), tuples_of(self.states), [list(pair) for pair in self.data], self.public, *set_up]

    def with_parts(self, parts: Any) -> View:
        """Return this view with what `parts` returned of another one (ValueError, TypeError: it is none)."""
        mail, states, data, public, *more = parts
        letters, set_up = (tuple(Envelope(*row) for row in some) for some in (mail, *(more or [[]])))
        own = tuple((probe, batch) for probe, batch in data)
        known = tuple(StateRecord(*row) for row in states)
        return dataclasses.replace(self, mail=letters, states=known, data=own, public=public, set_up=set_up)

    def save(self, folder: Path) -> None:
        """Write the view to `folder` (created): tensors as safetensors, the rest as JSON.

        UsageError: its network is an object of this process, which no file can name.
        """
        if isinstance(self.plan.spec, HeldSpec):
            problem = f"A view of the network {self.plan.spec.model!r}, which is held as an object, cannot be saved"
            raise UsageError(f"{problem}; name the network by its address, as MODULE:NAME.")
        folder.mkdir(parents=True, exist_ok=True)
        tree.save_tree(self.parts(), folder / "view.safetensors")
        about = {
            "threat": self.threat.name,
            "party": self.party,
            "plan": dataclasses.asdict(self.plan),
            "defense": {"name": self.defense.name, "parameters": dataclasses.asdict(self.defense)},
            "sessions": self.sessions,
        }
        (folder / "view.json").write_text(json.dumps(about, indent=1))

    @staticmethod
    def load(folder: Path, device: str = "cpu") -> View:
        """Return the view that `save` wrote, tensors on `device` (UsageError: no view in `folder`)."""
        if not (folder / "view.json").is_file():
            raise UsageError(f"{folder} holds no saved view; expected view.json and view.safetensors in it.")
        about: dict[str, Any] = json.loads((folder / "view.json").read_text())
        defense = load_plugin("defenses", about["defense"]["name"])(**about["defense"]["parameters"])
        plan = TypeAdapter(Plan).validate_python(about["plan"])
        parts = tree.moved(tree.load_tree(folder / "view.safetensors"), torch.device(device))
        sessions = tuple((int(probe), int(round_), str(name)) for probe, round_, name in about["sessions"])
        threat = threat_model(about["threat"])
        return View(threat, about["party"], plan, defense, (), (), sessions=sessions).with_parts(parts)


@dataclass(frozen=True)
class Transcript:
    """All messages and states of the probed rounds, and the messages of set-up. Attacks get only views of it."""

    plan: Plan
    defense: PublicDefense
    mail: tuple[Envelope, ...]
    states: tuple[StateRecord, ...]
    set_up: tuple[Envelope, ...] = ()

    def roles(self) -> dict[Slot, str]:
        """Return each client's role, by slot."""
        uploads: dict[Slot, list[Tree]] = {}
        for envelope in self.mail:
            if envelope.receiver == SERVER:
                uploads.setdefault(Slot(envelope.probe, envelope.sender), []).append(envelope.message)
        return {slot: self.defense.role_of(sent) for slot, sent in uploads.items()}

    def view(self, threat: ThreatModel | str, party: int | None = None, own: tuple[tuple[int, Data], ...] = ()) -> View:
        """Return what `threat` (or the one of this name) sees; UsageError: there is no such threat model.

        party: which client it is, if it is one alone. own: the batches of the clients in it, by probe.
        """
        threat = threat_model(threat)
        me = SERVER if threat.server else threat.client
        me = party if threat.lone_client and party is not None else me

        def inside(who: int) -> bool:
            return who == me or (threat.has(who) and not threat.lone_client)

        mail, set_up = (
            tuple(e for e in letters if threat.overhears or inside(e.sender) or inside(e.receiver))
            for letters in (self.mail, self.set_up)
        )
        states = tuple(s for s in self.states if inside(s.party))
        named = tuple((s.probe, s.round, s.state.session) for s in self.states if s.step == BEGUN)
        if me is None or (threat.server and threat.colludes):  # a listener has no masks; these two have `Begun` for it
            named = ()
        mine = own if me not in (None, SERVER) else ()
        return View(threat, me, self.plan, self.defense, mail, states, mine, sessions=named, set_up=set_up)
