"""Worlds: a defense's own server and clients, run from the beginning on examples, draws and updates of our choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ppbench.adversary.leaks import MessagePart, Tape, letters_of
from ppbench.base.device import computing
from ppbench.base.secret_draws import SecretDraws
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params, Tree, tree_digest, tree_map
from ppbench.federation.drive import Straight, Work, client_map, compute_all, run_together
from ppbench.federation.engine import Federation, ProbeKind, probe_plan
from ppbench.federation.plan import Data, Noise, Plan
from ppbench.federation.view import StateRecord, Transcript
from ppbench.federation.wire import SERVER, Wire, session_of

ROUNDS = 3
"""Rounds of a world: what is sent later counts, too."""
FEWER_ROUNDS, MORE_ROUNDS = 2, 4
"""Rounds of sums in the larger cohort; of worlds with equal draws in the smaller, and with noise."""
CLIENTS = 5
"""Most clients of a world; of networks of `SMALL_NETWORK` parameters or more, two fewer."""
SMALL_NETWORK = 50_000
LARGE, FEWEST, NUMBERS = 256, 12, 2**22
"""Most and fewest examples of a client in the larger of two cohorts; between, so many that with the network's
parameters they are `NUMBERS`."""

ClientCompute = Callable[[Work], Mapping[int, Tree]]


class SplicedDraws(SecretDraws):
    """Draws of one key, but in `calls`, by number, those of another."""

    def __init__(self, key: bytes, other: bytes, calls: Set[int]) -> None:
        super().__init__(key)
        self._keys, self._other_calls = (key, other), calls

    def _words(self, count: int) -> Iterator[NDArray[np.uint64]]:
        self._key = self._keys[self._calls in self._other_calls]
        words = super()._words(count)
        self._key = self._keys[0]
        return words


GENERATOR = -1
"""In `Redrawn.calls`: what a party draws by torch."""


@dataclass(frozen=True)
class Redrawn(Seeds):
    """Seeds with which clients draw other secrets for each `number`, and the server what it always draws.

    later: another number, of the draws in rounds; 0 for the same. calls: of a client's later draws in a step those that
    are redrawn, by number or `GENERATOR`; None for all.
    """

    number: int = 0
    later: int = 0
    calls: Set[int] | None = None

    def generator(self, role: str, *index: int | str) -> torch.Generator:
        """As the base class; redrawn in rounds if `GENERATOR` is one of `calls`."""
        every = self.calls is None or GENERATOR in self.calls
        return Seeds.generator(self if every else replace(self, later=0), role, *index)

    def secret(self, role: str, *index: int | str) -> SecretDraws:
        """As the base class; in rounds of two keys if `calls` says so."""
        key, other = (bytes(Seeds.secret(one, role, *index).key.tolist()) for one in (replace(self, later=0), self))
        return SecretDraws(other) if self.calls is None else SplicedDraws(key, other, self.calls)

    def _text(self, role: str, *index: int | str) -> bytes:
        text, words = super()._text(role, *index), (role, *index)
        if "party" not in words[:2] or words[-1] == SERVER:
            return text
        _, _, round_, _, _ = words[-5:]
        number = self.later if self.later and int(round_) else self.number
        return text + f"/{number}".encode() if number else text


@dataclass(frozen=True)
class OneWorld:
    """One run. letters: message parts to the server; secrets: by client, its state after set-up; tape: numbers that the
    server computed, a sample of each; transcript: of the rounds."""

    letters: Mapping[MessagePart, Tensor]
    secrets: Sequence[Tree]
    tape: Sequence[Tensor]
    transcript: Transcript


@dataclass(frozen=True)
class ProbeExamples:
    """Examples by client. others: some of them blank; exchanged: each has those of the next; changed: others."""

    first: Mapping[int, Data]
    others: Mapping[int, Data]
    exchanged: Mapping[int, Data]
    changed: Mapping[int, Data]

    @staticmethod
    def of(fed: Federation, clients: int, size: int) -> ProbeExamples:
        """Return examples of a federation's clients, dealt anew; they repeat where there are too few."""
        x, y = (torch.cat([getattr(shard, name).cpu() for shard in fed.shards.values()]) for name in ("x", "y"))
        places = torch.arange(2 * clients * size).view(2, clients, size) % len(x)
        own, more = ([Data(x[some], y[some]) for some in half] for half in places)
        low = fed.plan.data_range[0]
        unlike = [Data(one.x if c % 2 else torch.full_like(one.x, low), one.y) for c, one in enumerate(more)]
        worlds = own, unlike, [*own[1:], own[0]], more
        return ProbeExamples(*(dict(enumerate(world)) for world in worlds))


@dataclass
class Cohort:
    """The federation of the worlds: that under test with fewer clients, and equally many examples for each.

    clients, size: how many, and examples of each; kind: of a probe. work: the results of `recorded`, by call.
    """

    fed: Federation
    params: Params
    clients: int
    size: int
    kind: ProbeKind
    work: list[Mapping[int, Tree]] = field(default_factory=list)

    @property
    def plan(self) -> Plan:
        """The plan of set-up."""
        return replace(self.fed.plan, clients=self.clients, sample=0, schedule="parallel")

    @property
    def probe(self) -> Plan:
        """The plan of the rounds."""
        return probe_plan(self.plan, self.fed.defense, self.size, self.kind, ROUNDS, whole=True)

    @property
    def law(self) -> Noise | None:
        """The public law of noise on an upload."""
        return self.fed.defense.noise(self.probe)

    @cached_property
    def data(self) -> ProbeExamples:
        """The examples of all worlds."""
        return ProbeExamples.of(self.fed, self.clients, self.size)

    def world(
        self,
        data: Mapping[int, Data],
        number: int,
        compute: ClientCompute,
        *,
        rounds: int = ROUNDS,
        tape: bool = False,
        later: int = 0,
        calls: Set[int] | None = None,
    ) -> OneWorld:
        """Run set-up and rounds on `data`; compute: runs the clients' computations.

        number, later, calls: of their draws (`Redrawn`); tape: whether the server's numbers are kept.
        """
        fed, recorder, states = self.fed, Tape(), list[StateRecord]()
        seeds, wire = Redrawn(fed.seeds.master, fed.seeds.salt, number, later, calls), Wire(keep=True)
        run = Federation(fed.defense, self.plan, data, seeds, fed.device, "loop", wire=wire, tf32=fed.tf32)
        run.start(self.params)
        secrets, set_up = list(run.parties.clients), len(wire.mail)
        with computing(fed.tf32):
            for round_ in range(fed.round + 1, fed.round + rounds + 1):
                drive = run.drive(self.probe, session_of(0), 0, round_, wire, run.parties, run.shards)
                coroutine = drive.begin(range(self.clients))
                work = drive.working(recorder.watched(coroutine) if tape else coroutine)
                run_together([work], lambda pieces: {key: compute(piece) for key, piece in pieces.items()})
                states += drive.states
        transcript = Transcript(self.probe, fed.defense, tuple(wire.mail[set_up:]), tuple(states))
        return OneWorld(letters_of(wire.mail), secrets, recorder.samples, transcript)

    def recorded(self, work: Work) -> Mapping[int, Tree]:
        """ClientCompute, and keep the results for `repeated`."""
        self.work.append(computed(work))
        return {client: tree_map(torch.clone, result) for client, result in self.work[-1].items()}

    def repeated(self, work: Work) -> Mapping[int, Tree]:
        """Return the next results of `recorded`, once each: updates are equal, whatever the examples."""
        return self.work.pop(0)

    def prescribed(
        self, data: Mapping[int, Data], numbers: Iterable[int], updates: Sequence[Params], **options: Any
    ) -> list[OneWorld] | None:
        """Return worlds in which clients' gradients are `updates`, in turn; None if the defense needs its own network.

        options: of `world`.
        """
        try:
            once = ComputedOnce(partial(prescribed_results, updates))
            return [self.world(data, number, once, **options) for number in numbers]
        except Exception:  # noqa: BLE001 - any code may fail on a loss that it does not expect
            return None

    def each_round(self, updates: Sequence[Sequence[Params]], **options: Any) -> OneWorld | None:
        """Return as `prescribed` one world, whose updates are by round and client."""
        rounds = Counter[int]()

        def compute(work: Work) -> Mapping[int, Tree]:
            results: dict[int, Tree] = {}
            for client, job in work.jobs.items():
                results |= prescribed_results(updates[rounds[client]], replace(work, jobs={client: job}))
                rounds[client] += 1
            return results

        try:
            return self.world(self.data.first, 1, compute, **options)
        except Exception:  # noqa: BLE001 - as above
            return None


def computed(work: Work) -> Mapping[int, Tree]:
    """Return what the clients compute."""
    return compute_all({0: work})[0]


@dataclass(frozen=True)
class ComputedOnce:
    """ClientCompute that computes equal work of a client once: by contract the result follows from the work alone.

    Of one world with several draws, the first draw's results are kept. Clients get copies: their code may write there.
    """

    compute: ClientCompute
    results: dict[tuple[int, bytes], Tree] = field(default_factory=dict)

    def __call__(self, work: Work) -> Mapping[int, Tree]:
        """Return what the clients compute."""
        keys = {client: (client, tree_digest(job)) for client, job in work.jobs.items()}
        fresh = {client: job for client, job in work.jobs.items() if keys[client] not in self.results}
        made = self.compute(replace(work, jobs=fresh))
        if len(self.results) < MORE_ROUNDS * CLIENTS:
            self.results.update({keys[client]: result for client, result in made.items()})
        every = {c: made[c] if c in made else self.results[key] for c, key in keys.items()}
        return {client: tree_map(torch.clone, result) for client, result in every.items()}


def prescribed_results(updates: Sequence[Params], work: Work) -> Mapping[int, Tree]:
    """Return what clients' code computes on a loss whose gradient is one of `updates`, in turn, for every example."""
    results: dict[int, Tree] = {}
    for client, job in work.jobs.items():
        plan = Straight.of(work.plan, updates[client % len(updates)])
        results.update(client_map("loop", work.defense, plan, {client: job}))
    return results
