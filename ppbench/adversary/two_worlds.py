"""The two-world test: whether a server receives more than a defense says.

The defense's own server and clients run from the beginning in several worlds, set-up included. Worlds agree in what the
server may learn and differ in something else:

- Equal draws and equal updates, other examples: no message may differ.
- Where the server reads sums, two clients exchange their examples, so that every sum over all is the same. Clients draw
  their secrets anew several times; the server draws what it drew. Nothing that the server receives, adds up or computes
  may tell one world from the other.
- Where a law of noise is public, all updates together differ by half of one standard deviation: so much noise hides it
  from every test, whatever the server receives. And where clients' updates are less by what their noise is more, so
  that their uploads are equal, nothing else may differ: who knows the noise, or its seed, can take it off.

Whatever differs is a channel. The test knows nothing of the defense. It sees neither a key of masks behind a one-way
function nor what a client does in later rounds, in larger cohorts or with other weights alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ppbench.adversary.leaks import (
    CLEAR,
    WORLD_ROUNDING,
    MessagePart,
    Runs,
    _Numbers,
    encodes,
    part_words,
    place_of,
    sampled,
    secrets_in,
    steady_bits,
    unmasked,
)
from ppbench.adversary.replay import evidence_numbers, explained_by, replay_refusal
from ppbench.adversary.worlds import (
    CLIENTS,
    FEWER_ROUNDS,
    FEWEST,
    GENERATOR,
    LARGE,
    MORE_ROUNDS,
    NUMBERS,
    ROUNDS,
    SMALL_NETWORK,
    Cohort,
    ComputedOnce,
    OneWorld,
    computed,
)
from ppbench.base.errors import first_of
from ppbench.base.tree import Params, leaves, norm
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Noise
from ppbench.federation.threats import HONEST_SERVER
from ppbench.records.schema import Flag

DRAWS = 6
"""How often clients draw their secrets in each of three worlds."""
SAMPLE = 2048
"""Most numbers of a message part, or of an intermediate result of the server, that are compared."""
HIDDEN = 0.5
"""Distance of two updates under noise, in standard deviations of the noise."""


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
        elif few := unmasked(names, members):
            who = ", ".join(map(str, few))
            channels.append(Channel(f"the sum of {part_words(part)} of clients {who} in round {round_}", "has no mask"))
    return channels


def _computed(series: Series) -> Iterator[Channel]:
    """Yield a channel if a number that the server's code computes tells the worlds apart."""
    tapes = [[run.tape for run in world] for world in series]
    length = min(len(tape) for world in tapes for tape in world)
    for place in range(length):
        numbers = [[tape[place] for tape in world] for world in tapes]
        first, *others = itertools.chain(*numbers)
        if all(torch.equal(first, other) for other in others):  # as most of what the server draws by itself
            continue
        runs = Runs.of(numbers)
        if runs is not None and runs.apart(WORLD_ROUNDING):
            yield Channel("what the server's code computes", "says more than the sum of all updates")
            return


def _escrowed(worlds: Sequence[OneWorld]) -> list[Channel]:
    """Return the parts of messages in which clients send secrets of their states."""
    worlds = worlds[: DRAWS + 2]  # eight numbers tell a secret's moves from all others'
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
        once = ComputedOnce(cohort.recorded)  # that computing repeats itself needs no second, larger cohort
        ways = (cohort.recorded, computed) if cohort is small else (once, once)
        first, again = (cohort.world(cohort.data.first, 0, way, rounds=rounds) for way in ways)
        if odd := differing(first, again):
            return WorldReport(refusal=f"{place_of(odd[0])} is another one when it is sent again")
        channels = _of_examples(cohort, first, rounds)
        reason = replay_refusal(first.transcript.view(HONEST_SERVER))
        if channels or reason:
            return WorldReport(tuple(channels), reason)
    if fed.defense.sums:
        return WorldReport(tuple(_of_sums(small, ROUNDS) or _of_sums(large, FEWER_ROUNDS)))
    if small.law is not None:
        report = _of_noise(small, small.law)
        if report.channels:
            return report
        large = replace(large, kind="gradient")
        more = _of_noise(large, large.law or small.law)
        return replace(more, explained=report.explained and more.explained)
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


def _of_sums(cohort: Cohort, rounds: int) -> list[Channel]:
    """Return the channels of a defense whose server reads sums: clients exchange their examples.

    Where they hold many, updates are prescribed in their place, if the defense allows that.
    """
    data, count = cohort.data, cohort.clients
    own, more = ([_direction(cohort.params, c + first) for c in range(count)] for first in (0, count))
    worlds = (data.first, own, DRAWS), (data.exchanged, [*own[1:], own[0]], DRAWS), (data.changed, more, 1)
    options: dict[str, Any] = {"rounds": rounds, "tape": True}

    def series(first: int) -> Series:
        numbers, runs = itertools.count(first), list[Sequence[OneWorld]]()
        for examples, updates, draws in worlds:
            chosen = [*itertools.islice(numbers, draws)]
            made = cohort.prescribed(examples, chosen, updates, **options) if cohort.size > FEW_EXAMPLES else None
            once = ComputedOnce(computed)
            runs.append(made or [cohort.world(examples, number, once, **options) for number in chosen])
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
    channels = [*channels, *_escrowed([*runs[0], *runs[1]])] or _of_equal_uploads(cohort, updates[0])
    return WorldReport(tuple(channels), "", explained_by(law, [world.transcript for world in runs[0]]))


@dataclass(frozen=True)
class _Uploads:
    """What clients send in a world: evidence about them, [numbers] by round and client, and all parts of messages."""

    evidence: Mapping[tuple[int, int], NDArray[np.float64]]
    letters: Mapping[MessagePart, Tensor]

    @staticmethod
    def of(world: OneWorld) -> _Uploads:
        """Return the uploads of a world."""
        evidence = evidence_numbers(world.transcript)
        return _Uploads({key: np.concatenate([*one.values()]) for key, one in evidence.items()}, world.letters)

    def moved(self, other: _Uploads) -> float:
        """Return the distance of the evidence of two worlds."""
        if {k: v.shape for k, v in self.evidence.items()} != {k: v.shape for k, v in other.evidence.items()}:
            return math.inf
        return math.sqrt(sum(float(((one - other.evidence[k]) ** 2).sum()) for k, one in self.evidence.items()))

    def part_moved(self, other: _Uploads, name: MessagePart) -> float:
        """Return how far a part of a message moves: a distance of numbers, and how many whole numbers differ."""
        one, two = self.letters.get(name), other.letters.get(name)
        if one is None or two is None or one.shape != two.shape:
            return math.inf
        return float((one.double() - two.double()).norm() if one.is_floating_point() else (one != two).sum())

    def less_noise(self, other: _Uploads, updates: Sequence[Sequence[Params]]) -> list[list[Params]] | None:
        """Return `updates`, by round and client, plus this world's noise less that of `other`.

        None where evidence is not of all of them, or of other numbers.
        """
        made = list[list[Params]]()
        for round_, clients in enumerate(updates):
            made.append([])
            for client, update in enumerate(clients):
                sizes = [value.numel() for value in update.values()]
                if len(mine := self.evidence.get((round_, client), np.empty(0))) != sum(sizes):
                    return None
                steps = torch.from_numpy(mine - other.evidence[round_, client]).split(sizes)
                pairs = zip(update.items(), steps, strict=True)
                made[-1].append({name: value + step.view_as(value).to(value) for (name, value), step in pairs})
        return made

    def salts(self, names: Sequence[MessagePart], redrawn: Sequence[_Uploads], rounding: float) -> set[MessagePart]:
        """Return the parts that some draws change, but none that the noise is made of; redrawn: by single draws."""
        moves = {n: [self.moved(one) for one in redrawn if self.part_moved(one, n)] for n in names}
        return {name for name, some in moves.items() if some and max(some) <= rounding}


def _of_equal_uploads(cohort: Cohort, update: Params) -> list[Channel]:
    """Return the parts of messages that move with the noise though what is read of uploads does not.

    In the third world, clients have other noise than in the first and updates that make up for it.
    """

    def uploads(updates: Sequence[Sequence[Params]], **options: Any) -> _Uploads | None:
        world = cohort.each_round(updates, rounds=MORE_ROUNDS, **options)
        return None if world is None else _Uploads.of(world)

    plain = [[update] * cohort.clients] * MORE_ROUNDS
    first, second = uploads(plain), uploads(plain, later=2)
    if first is None or second is None or not 0 < (noise := first.moved(second)) < math.inf:
        return []
    if (updates := first.less_noise(second, plain)) is None or (equal := uploads(updates, later=2)) is None:
        return []
    if first.moved(equal) > EQUAL * noise:
        return []
    names = [
        name
        for name, part in first.letters.items()
        if first.part_moved(equal, name) > (EQUAL if part.is_floating_point() else 0.5) * first.part_moved(second, name)
    ]
    spliced = [uploads(plain, later=2, calls={call}) for call in range(GENERATOR, CALLS)] if names else []
    salts = first.salts(names, [one for one in spliced if one], EQUAL * noise)
    return [Channel(place_of(name), "says what the noise of uploads is") for name in names if name not in salts]


EQUAL = 0.01
"""Share of the distance of two worlds that is rounding where they are made equal."""
CALLS = 6
"""Most draws of a client in a step of which it is asked what they change."""


FAR_UPDATE = 4.0
"""Distance that noise of n numbers does not hide, in its standard deviations, by the fourth root of n."""
