"""The two-world test: whether a server receives more than a defense says.

The defense's own server and clients run from the beginning in several worlds, set-up included. Worlds agree in what the
server may learn and differ in something else:

- Equal draws and equal updates, other examples: no message may differ.
- Where the server reads sums, two clients exchange their examples, so that every sum over all is the same. Clients draw
  their secrets anew several times; the server draws what it drew. Nothing that the server receives, adds up or computes
  may tell one world from the other.
- Where a law of noise is public, all updates together differ by half of one standard deviation: so much noise hides it
  from every test, whatever the server receives.

Whatever differs is a channel. The test knows nothing of the defense. It sees neither a key behind a one-way function
nor what a client does in later rounds, in larger cohorts or with other weights alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppbench.adversary.leaks import (
    CLEAR,
    WORLD_ROUNDING,
    MessagePart,
    Runs,
    Tape,
    _Numbers,
    encodes,
    letters_of,
    part_words,
    place_of,
    sampled,
    secrets_in,
    steady_bits,
)
from ppbench.adversary.replay import explained_by, replay_refusal
from ppbench.base.device import computing
from ppbench.base.errors import first_of
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params, Tree, leaves, norm, tree_digest, tree_map
from ppbench.federation.drive import Straight, Work, client_map, compute_all, run_together
from ppbench.federation.engine import Federation, ProbeKind, probe_plan
from ppbench.federation.plan import Data, Noise, Plan
from ppbench.federation.threats import HONEST_SERVER
from ppbench.federation.view import StateRecord, Transcript
from ppbench.federation.wire import SERVER, Wire, session_of
from ppbench.records.schema import Flag

ROUNDS = 3
"""Rounds of a world: what is sent later counts, too."""
MORE_ROUNDS = 4
"""Rounds of worlds with equal draws, or with noise."""
DRAWS = 6
"""How often clients draw their secrets in each of three worlds."""
CLIENTS = 5
"""Most clients of a world; of networks of `SMALL_NETWORK` parameters or more, two fewer."""
SMALL_NETWORK = 50_000
LARGE, FEWEST, NUMBERS = 256, 12, 2**22
"""Most and fewest examples of a client in the larger of two cohorts; between, so many that with the network's
parameters they are `NUMBERS`."""
SAMPLE = 2048
"""Most numbers of a message part, or of an intermediate result of the server, that are compared."""
HIDDEN = 0.5
"""Distance of two updates under noise, in standard deviations of the noise."""

ClientCompute = Callable[[Work], Mapping[int, Tree]]


@dataclass(frozen=True)
class Channel:
    """What tells a server more than the defense says. part: of a message, or of the server's work; how: a clause."""

    part: str
    how: str

    @property
    def sentence(self) -> str:
        """The channel as a clause."""
        return f"{self.part} {self.how}"


@dataclass(frozen=True)
class WorldReport:
    """The outcome of the test, with its channels.

    refusal: why rounds cannot be run again, a clause; "" if they can. explained: whether the public law of noise
    accounts for what was seen; None without a law.
    """

    channels: tuple[Channel, ...] = ()
    refusal: str = ""
    explained: bool | None = None


@dataclass(frozen=True)
class Redrawn(Seeds):
    """Seeds with which clients draw other secrets for each `number`, and the server what it always draws."""

    number: int = 0

    def _text(self, role: str, *index: int | str) -> bytes:
        text = super()._text(role, *index)
        client = "party" in (role, *index[:1]) and index[-1] != SERVER
        return text + f"/{self.number}".encode() if self.number and client else text


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
        self, data: Mapping[int, Data], number: int, compute: ClientCompute, *, rounds: int = ROUNDS, tape: bool = False
    ) -> OneWorld:
        """Run set-up and rounds on `data`; number: of the clients' draws; compute: runs their computations.

        tape: whether the server's numbers are kept.
        """
        fed, recorder, states = self.fed, Tape(), list[StateRecord]()
        seeds, wire = Redrawn(fed.seeds.master, fed.seeds.salt, number), Wire(keep=True)
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


# -- How worlds are compared --


def differing(first: OneWorld, second: OneWorld) -> list[MessagePart]:
    """Return the parts that two worlds do not have bit for bit, in the order of the first."""
    names = dict.fromkeys([*first.letters, *second.letters])
    return [name for name in names if not _identical(first.letters.get(name), second.letters.get(name))]


def _identical(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return False
    return bool(torch.equal(one.view(torch.uint8), other.view(torch.uint8)))


Series = Sequence[Sequence[OneWorld]]
"""The runs of three worlds: two that are alike in what the server may learn, and one that is not."""


def told_apart(series: Series, sums: bool) -> list[Channel]:
    """Return the channels by which the first two worlds of `series` can be told apart.

    sums: whether no single message may say anything; what messages add up to, and what the server computes, then
    counts, too.
    """
    whole = {n: [[run.letters.get(n) for run in world] for world in series] for n in series[0][0].letters}
    every = {
        n: Runs.of([[None if v is None else sampled(v, SAMPLE) for v in w] for w in runs]) for n, runs in whole.items()
    }
    parts = {name: runs for name, runs in every.items() if runs is not None}
    rounding = WORLD_ROUNDING if sums else 0.0
    channels = [
        Channel(place_of(name), "says more than it may" if sums else "has less noise than the law")
        for name, runs in parts.items()
        if runs.apart(rounding) or steady_bits(whole[name])
    ]
    if channels:
        return channels
    pairs = [*itertools.islice(itertools.combinations(parts, 2), CLIENT_PAIRS)]
    for (one, two), factors in zip(pairs, _factors(parts, pairs), strict=True):
        if any(parts[one].plus(parts[two], factor).apart(rounding) for factor in factors):
            channels.append(Channel(f"{place_of(one)} with {place_of(two)}", "removes noise or masks"))
    if sums and not channels:
        channels = [*_partial_sums(parts), *_computed(series)]
    if sums or channels:
        return channels
    every_number = {name: runs for name in parts if (runs := Runs.of(whole[name])) is not None}
    return [*_echoes(every_number), *_codes(parts, {name: [*runs[0], *runs[1]] for name, runs in whole.items()})]


CLIENT_PAIRS = 4000
"""Most pairs of parts that are compared."""


def _factors(
    parts: Mapping[MessagePart, Runs], pairs: Sequence[tuple[MessagePart, MessagePart]]
) -> Iterator[Sequence[float]]:
    """Yield the factors with which the second part of each pair may remove from the first what both share.

    No factor if they share nothing. Whole numbers may be added or subtracted.
    """
    by_shape: dict[tuple[int, ...], list[MessagePart]] = {}
    for name, runs in parts.items():
        by_shape.setdefault(runs.same.shape, []).append(name)
    place = {name: (shape, row) for shape, names in by_shape.items() for row, name in enumerate(names)}
    products = {}
    for shape, names in by_shape.items():
        rows = np.stack([parts[name].centered for name in names])
        products[shape] = rows @ rows.T
    for one, two in pairs:
        (shape, i), (other, j) = place[one], place[two]
        if shape != other:
            yield ()
        elif parts[one].whole and parts[two].whole:
            yield (1, -1)
        else:
            across, size, least = products[shape][i, j], products[shape][j, j], CLEAR / math.sqrt(2 * math.prod(shape))
            shared = abs(across) > least * math.sqrt(products[shape][i, i] * size)
            yield (-across / size,) if shared else ()


def _echoes(parts: Mapping[MessagePart, Runs]) -> list[Channel]:
    """Return the parts that hold another part's noise, in whatever order, and nothing of the update.

    Runs lie at equal distances from one another in both then, as orders, signs and rotations keep distances.
    """
    noisy = {
        name: runs for name, runs in parts.items() if ECHO <= runs.same.shape[1] <= LONG_PART and runs.centered.any()
    }
    distances = {name: _distances(runs) for name, runs in noisy.items()}
    pads = [name for name, runs in noisy.items() if not replace(runs, other=runs.changed).apart()]
    return [
        Channel(place_of(pad), f"repeats the noise of {place_of(name)}")
        for pad in pads
        for name in noisy
        if name != pad and name not in pads and float(distances[pad] @ distances[name]) > ALIKE
    ]


ECHO = 32
"""Fewest numbers of a part whose distances between runs are compared."""
LONG_PART = 2**18
"""Most numbers of such a part."""
ALIKE = 0.9
"""Correlation of the distances between runs from which on two parts hold the same noise."""


def _codes(
    parts: Mapping[MessagePart, Runs], letters: Mapping[MessagePart, Sequence[Tensor | None]]
) -> Iterator[Channel]:
    """Yield the whole numbers in which a client sends the bits of another part's noise, under whatever key stream."""
    for code, noisy in itertools.permutations(letters, 2):
        values, numbers = ([v for v in letters[name] if v is not None] for name in (code, noisy))
        pair = code in parts and noisy in parts and code.client == noisy.client and not values[0].is_floating_point()
        if pair and numbers[0].is_floating_point() and encodes(values, numbers):
            yield Channel(place_of(code), f"has the bits of the noise of {place_of(noisy)}")


def _distances(runs: Runs) -> _Numbers:
    """Return the inner products of runs of one world, less its mean, as a vector of mean 0 and length 1."""
    above = np.triu_indices(len(runs.same), 1)
    worlds = runs.centered.reshape(2, len(runs.same), -1)
    products: _Numbers = np.concatenate([(rows @ rows.T)[above] for rows in worlds])
    products = products - products.mean()
    return products / max(float(np.linalg.norm(products)), 1e-300)


def _partial_sums(parts: Mapping[MessagePart, Runs]) -> list[Channel]:
    """Return the channels in sums over some or all clients of one part: masks that cancel among few, a block each."""
    channels = []
    together: dict[tuple[int, int, str], list[MessagePart]] = {}
    for name in parts:
        together.setdefault((name.round, name.step, name.part), []).append(name)
    for (round_, _, part), names in together.items():
        members = [parts[name] for name in names]
        if len(names) < 2 or len({one.same.shape for one in members}) > 1:
            continue
        total = members[0]
        for one in members[1:]:
            total = total.plus(one, 1)
        if total.apart(WORLD_ROUNDING):
            channels.append(Channel(f"the sum of {part_words(part)} in round {round_}", "keeps clients apart"))
        elif few := _unmasked(names, members):
            who = ", ".join(map(str, few))
            channels.append(Channel(f"the sum of {part_words(part)} of clients {who} in round {round_}", "has no mask"))
    return channels


def _unmasked(names: Sequence[MessagePart], members: Sequence[Runs]) -> list[int]:
    """Return the smallest group of clients, fewer than all, whose sum does not move with draws; [] without any."""
    few = slice(None, None, -(-members[0].same.shape[1] // 32))
    values = np.stack([one.same[:, few] for one in members])  # [clients, runs, n]
    values = values - values[:, :1]  # what draws change, modulo 2^64
    groups = [g for size in range(1, len(names)) for g in itertools.combinations(range(len(names)), size)]
    member = np.array([[int(c in group) for c in range(len(names))] for group in groups], dtype=values.dtype)
    sums = np.abs((member @ values.reshape(len(names), -1)).astype(float)).reshape(len(groups), -1).max(1)
    size = np.abs(values.astype(float)).max()
    steady = [group for group, most in zip(groups, sums, strict=True) if most < STEADY * size]
    moving = [c for c in range(len(names)) if np.abs(values[c].astype(float)).max() >= STEADY * size]
    return next(([names[c].client for c in g] for g in steady if set(g) & set(moving)), [])


STEADY = 1e-5
"""A sum that changes by less than this share of a mask, whatever clients draw, has no mask."""


def _computed(series: Series) -> Iterator[Channel]:
    """Yield a channel if a number that the server's code computes tells the worlds apart."""
    tapes = [[run.tape for run in world] for world in series]
    length = min(len(tape) for world in tapes for tape in world)
    for place in range(length):
        runs = Runs.of([[tape[place] for tape in world] for world in tapes])
        if runs is not None and runs.apart(WORLD_ROUNDING):
            yield Channel("what the server's code computes", "says more than the sum of all updates")
            return


def _escrowed(worlds: Sequence[OneWorld]) -> list[Channel]:
    """Return the parts of messages in which clients send secrets of their states."""
    names = secrets_in([world.letters for world in worlds], [world.secrets for world in worlds])
    return [Channel(place_of(name), "holds secrets of the client's state") for name in names]


# -- The test --


def world_flags(fed: Federation, params: Params, size: int) -> tuple[Flag, ...]:
    """Return the flags of `world_report`, for records; code that fails in other worlds cannot be run again."""
    try:
        report = world_report(fed, params, size)
    except Exception as cause:  # noqa: BLE001 - another package's defense may raise anything
        report = WorldReport(refusal=f"its code fails in the two-world test ({type(cause).__name__}: {cause})")
    flags = []
    if report.channels:
        sentences = [channel.sentence for channel in report.channels]
        detail = f"the server receives more than the defense says: {first_of(sentences)}"
        flags.append(Flag(code="channel", severity="warning", detail=detail))
    if report.refusal:
        flags.append(Flag(code="not_replayable", severity="warning", detail=f"cannot be replayed: {report.refusal}"))
    if report.explained and not report.channels:
        detail = "the public law of noise accounts for uploads of prescribed updates"
        flags.append(Flag(code="law_explains", severity="info", detail=detail))
    return tuple(flags)


def world_report(fed: Federation, params: Params, size: int) -> WorldReport:
    """Return what the server of a federation receives beyond what its defense says.

    params: weights from which the worlds start; size: examples of a client in a probe. A larger cohort is tested, too,
    with local steps: clients may do otherwise there. Where the defense fails with few clients, all of them take part.
    """
    most = fed.plan.clients
    fewer = min(most, CLIENTS if sum(value.numel() for value in params.values()) < SMALL_NETWORK else CLIENTS - 2)
    try:
        return _report_of(fed, params, fewer, size)
    except Exception:  # another package's defense may raise anything
        if fewer == most:
            raise
    return _report_of(fed, params, most, size)


def _report_of(fed: Federation, params: Params, clients: int, size: int) -> WorldReport:
    largest = max(len(shard.x) for shard in fed.shards.values())
    count = min(largest, LARGE, max(FEWEST, NUMBERS // max(1, sum(value.numel() for value in params.values()))))
    small = Cohort(fed, params, clients, size, "gradient")
    large = Cohort(fed, params, clients, max(count, size), "local")
    for cohort, rounds in ((small, MORE_ROUNDS), (large, ROUNDS)):
        first, again = (cohort.world(cohort.data.first, 0, way, rounds=rounds) for way in (cohort.recorded, computed))
        if odd := differing(first, again):
            return WorldReport(refusal=f"{place_of(odd[0])} is another one when it is sent again")
        channels = _of_examples(cohort, first, rounds)
        reason = replay_refusal(first.transcript.view(HONEST_SERVER))
        if channels or reason:
            return WorldReport(tuple(channels), reason)
    if fed.defense.sums:
        return WorldReport(tuple(_of_sums(small) or _of_sums(large)))
    if small.law is not None:
        reports = [_of_noise(cohort, cohort.law or small.law) for cohort in (small, replace(large, kind="gradient"))]
        return WorldReport(tuple(c for r in reports for c in r.channels), "", all(r.explained for r in reports))
    if not leaves(first.secrets):
        return WorldReport()
    return WorldReport(
        tuple(_escrowed([small.world(small.data.first, number, computed) for number in range(DRAWS + 2)]))
    )


def _of_examples(cohort: Cohort, first: OneWorld, rounds: int) -> list[Channel]:
    """Return the parts that differ with the examples though the updates, and all draws, are equal."""
    data = cohort.data
    names = differing(first, cohort.world(data.others, 0, cohort.repeated, rounds=rounds))
    if not names:
        update = [_direction(cohort.params)]
        one, two = (cohort.prescribed(some, [0], update, rounds=rounds) for some in (data.first, data.others))
        if one and two and _same_account(one[0], two[0]):
            names = differing(one[0], two[0])
    return [Channel(place_of(name), "differs with the examples where updates are equal") for name in names]


def _direction(params: Params, number: int = 0) -> Params:
    """Return a random direction of length 1, shaped as `params`; number: of the draw."""
    draws = torch.Generator().manual_seed(number)
    drawn = {name: torch.randn(value.shape, generator=draws).to(value) for name, value in params.items()}
    length = norm(drawn)
    return {name: value / length for name, value in drawn.items()}


def _same_account(one: OneWorld, two: OneWorld) -> bool:
    """Return whether the defense's own evidence is the same in both worlds; else it says itself that more is sent."""
    observed = [
        leaves([e.observed for e in w.transcript.defense.evidence(w.transcript.view(HONEST_SERVER))])
        for w in (one, two)
    ]
    return len(observed[0]) == len(observed[1]) and all(map(torch.equal, *observed))


def _of_sums(cohort: Cohort) -> list[Channel]:
    """Return the channels of a defense whose server reads sums: clients exchange their examples.

    Where they hold many, updates are prescribed in their place, if the defense allows that.
    """
    data, count = cohort.data, cohort.clients
    own, more = ([_direction(cohort.params, c + first) for c in range(count)] for first in (0, count))
    worlds = (data.first, own, DRAWS), (data.exchanged, [*own[1:], own[0]], DRAWS), (data.changed, more, 2)

    def series(first: int) -> Series:
        numbers, runs = itertools.count(first), list[Sequence[OneWorld]]()
        for examples, updates, draws in worlds:
            chosen = [*itertools.islice(numbers, draws)]
            made = cohort.prescribed(examples, chosen, updates, tape=True) if cohort.size > FEW_EXAMPLES else None
            once = ComputedOnce(computed)
            runs.append(made or [cohort.world(examples, number, once, tape=True) for number in chosen])
        return runs

    runs = series(1)
    return [
        *_confirmed(told_apart(runs, True), lambda: told_apart(series(101), True)),
        *_escrowed([*runs[0], *runs[1]]),
    ]


FEW_EXAMPLES = 8
"""Most examples of a client whose gradient is computed for each draw."""


def _confirmed(channels: Sequence[Channel], again: Callable[[], Sequence[Channel]]) -> list[Channel]:
    """Return the channels that other draws show, too."""
    known = set(again()) if channels else set()
    return [channel for channel in channels if channel in known]


def _of_noise(cohort: Cohort, law: Noise) -> WorldReport:
    """Return the report on a defense with a public law of noise: updates differ by less than the noise hides."""
    unit = {name: law.of(name) * value for name, value in _direction(cohort.params).items()}
    far = FAR_UPDATE * sum(value.numel() for value in unit.values()) ** 0.25
    clip = cohort.fed.defense.clipping(cohort.probe)
    size = 1.0 if clip is None else min(1.0, 0.4 * clip / (far * max(norm(unit), 1e-300)))
    updates = [{name: (far + step) * size * value for name, value in unit.items()} for step in (0.0, HIDDEN, far)]

    def series(first: int) -> Series | None:
        worlds = [
            cohort.prescribed(
                cohort.data.first, range(first + at * DRAWS, first + (at + 1) * DRAWS), [update], rounds=MORE_ROUNDS
            )
            for at, update in enumerate(updates)
        ]
        return None if any(world is None for world in worlds) else worlds  # type: ignore[return-value]

    runs = series(1)
    if runs is None:
        return WorldReport(explained=False)
    channels = _confirmed(told_apart(runs, False), lambda: told_apart(series(101) or runs, False))
    return WorldReport(
        (*channels, *_escrowed([*runs[0], *runs[1]])), "", explained_by(law, [world.transcript for world in runs[0]])
    )


FAR_UPDATE = 4.0
"""Distance that noise of n numbers does not hide, in its standard deviations, by the fourth root of n."""
