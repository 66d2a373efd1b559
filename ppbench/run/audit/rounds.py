"""The mail of all rounds of a training, or of evenly spaced ones: a defense must face more than one round."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from ppbench.base import tree
from ppbench.base.tree import Tree, leaves, nbytes
from ppbench.federation.engine import Federation
from ppbench.federation.view import BEGUN, StateRecord, Transcript
from ppbench.federation.wire import SERVER, Envelope

LIMIT = 512 * 2**20
"""Bytes of mail and server states that a transcript may have."""


@dataclass
class Recorder:
    """Keeps rounds of a just started federation up to `last`: pass it to `Federation.run` as `after`.

    limit: bytes, of which the first round's size tells how many rounds fit; rounds: those kept.
    """

    federation: Federation
    last: int
    limit: int = LIMIT
    rounds: tuple[int, ...] = ()
    mail: list[Envelope] = field(default_factory=list)
    states: list[StateRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.federation.wire.keep = True

    def __call__(self, round_: int) -> None:
        """Take over the mail of `round_` and the server's states, and set whether the next round is kept."""
        fed = self.federation
        self.mail += fed.wire.mail
        self.states += [_light(state) for state in fed.states if state.party == SERVER]
        fed.wire.mail.clear()
        fed.states.clear()
        if not self.rounds:
            size = _size([letter.message for letter in self.mail] + [state.state for state in self.states])
            self.rounds = spaced_rounds(self.last, self.limit // max(1, size))
        fed.wire.keep = round_ + 1 in self.rounds

    def save(self, path: Path) -> None:
        """Write the kept rounds, then the delivered model as one more broadcast, to `path`."""
        fed = self.federation
        final = [replace(letter, round=fed.round + 1) for letter in fed.release().mail]
        mail = [(e.probe, e.round, e.step, e.sender, e.receiver, e.nbytes, e.message) for e in self.mail + final]
        states = [(s.probe, s.round, s.step, s.party, s.state) for s in self.states]
        tree.save(_once((mail, states)), path)


def spaced_rounds(last: int, count: int) -> tuple[int, ...]:
    """Return `count` of the rounds 1 to `last`, evenly spaced with both ends; all if there are no more, (1,) for 0."""
    if count >= last:
        return tuple(range(1, last + 1))
    if count < 2:
        return (1,)
    return tuple(1 + round(index * (last - 1) / (count - 1)) for index in range(count))


def load_recorded(fed: Federation, path: Path) -> Transcript:
    """Return the transcript that a `Recorder` of `fed` wrote to `path`. Raises UsageError where it cannot be read."""
    mail, states = tree.load(path)
    letters, records = (Envelope(*letter) for letter in mail), (StateRecord(*record) for record in states)
    return Transcript(fed.plan, fed.defense, tuple(letters), tuple(records))


def _size(trees: list[Tree]) -> int:
    return nbytes(list({id(leaf): leaf for one in trees for leaf in leaves(one)}.values()))


def _once(value: Tree) -> Tree:
    """Return `value` with tensors of equal bytes made one object: a broadcast equals the state that it came from."""
    seen: dict[tuple[object, ...], Tensor] = {}

    def first(leaf: Tensor) -> Tensor:
        content = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return seen.setdefault((hashlib.sha256(content).digest(), leaf.dtype, tuple(leaf.shape)), leaf)

    return tree.tree_map(first, value)


def _light(record: StateRecord) -> StateRecord:
    """Return a state in the form that is kept: only the session at a round's beginning, as its first step has the
    weights."""
    if record.step != BEGUN:
        return record
    return replace(record, state=replace(record.state, server=(), draws=record.state.draws[:0]))
