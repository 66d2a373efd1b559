"""Find secrets in what an adversary holds: object paths to them, for tests of ours and of a defense's author; clients'
secrets in parts of their messages; and numbers that tell two worlds apart, for `two_worlds`.

Object paths guard against accident, not malice: they see neither module globals nor values derived from a secret.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ppbench.base.tree import Tree
from ppbench.base.tree import leaves as tensors_of
from ppbench.federation.contract import Round
from ppbench.federation.wire import SERVER, Envelope

_OPAQUE = (type, types.ModuleType, str, bytes, int, float, bool, torch.dtype, torch.device, torch.Size, type(None))


def leaks(root: object, secrets: Iterable[Tensor]) -> list[str]:
    """Return one line for each path from `root` (a View, an Attack, ...) to a secret.

    That is a tensor that shares storage with a secret or holds a row of 4 or more of its values, or a generator, whose
    state allows its draws to be repeated.
    """
    hidden = [secret.detach().cpu() for secret in secrets]
    storages = {s.untyped_storage().data_ptr() for s in hidden if s.numel()}
    tables = [s.flatten(1) for s in hidden if s.dim() > 1 and s.numel() and s[0].numel() >= 4]
    rows = {row for table in tables for row in _rows(table, table.shape[1])}
    widths = {table.shape[1] for table in tables}
    paths = []
    for path, value in _walk(root):
        if isinstance(value, torch.Generator):
            paths.append(f"{path}: a generator")
        if isinstance(value, Tensor) and value.device.type != "meta" and value.numel():
            if value.untyped_storage().data_ptr() in storages:
                paths.append(f"{path}: shares storage with a secret")
            elif any(value.numel() % w == 0 and not rows.isdisjoint(_rows(value, w)) for w in widths):
                paths.append(f"{path}: holds a secret's values")
    return paths


def _rows(value: Tensor, width: int) -> Iterator[bytes]:
    """Return the float32 bytes of each `width` consecutive values."""
    data = value.detach().cpu().float().contiguous().numpy().tobytes()
    return (data[start : start + 4 * width] for start in range(0, len(data), 4 * width))


def _walk(root: object) -> Iterator[tuple[str, object]]:
    """Yield everything reachable from `root`, with the path to it; each object once."""
    seen: set[int] = set()
    alive: list[object] = []  # keeps temporaries, so that an id is never used twice
    queue: deque[tuple[str, object]] = deque([("view", root)])
    while queue:
        path, value = queue.popleft()
        if isinstance(value, _OPAQUE) or id(value) in seen:
            continue
        seen.add(id(value))
        alive.append(value)
        yield path, value
        queue.extend((f"{path}{step}", child) for step, child in _children(value))


def _history(value: Any) -> Iterator[tuple[str, object]]:
    """Yield the objects that a tensor, or a node of its autograd graph (invisible to gc), refers to."""
    if isinstance(value, Tensor):
        for name in ("grad", "grad_fn", "_base"):
            yield f".{name}", getattr(value, name) if name != "grad" or value.is_leaf else None
        yield from ((f".{key}", item) for key, item in vars(value).items())
        return
    yield ".next_functions", [node for node, _ in value.next_functions]
    yield from ((f".{name}", getattr(value, name)) for name in dir(value) if name.startswith("_saved_"))
    yield ".variable", getattr(value, "variable", None)


def _children(value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield f".<closure {name}>", cell.cell_contents
        for part in (value.__defaults__ or (), value.__kwdefaults__ or {}):
            yield ".<defaults>", part
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
        yield ".__func__", value.__func__
    elif isinstance(value, functools.partial):
        yield ".<partial>", (value.func, value.args, value.keywords)
    elif isinstance(value, Tensor) or hasattr(value, "next_functions"):
        yield from _history(value)
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif hasattr(value, "__dict__"):
        yield from ((f".{key}", item) for key, item in vars(value).items())
    else:
        yield from ((".<referent>", item) for item in gc.get_referents(value))


# -- Parts of messages, and secrets of clients in them --


class MessagePart(NamedTuple):
    """A part of a client's message: round, step, client, and the part's path in the message, as "Update.params"."""

    round: int
    step: int
    client: int
    part: str


def parts_of(message: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor and plain value in a message with its path; entries of one dict share theirs."""
    if isinstance(message, Tensor):
        yield path, message.detach().cpu().reshape(-1)
    elif isinstance(message, np.ndarray):
        yield path, torch.from_numpy(np.ascontiguousarray(message)).reshape(-1)
    elif isinstance(message, dict):
        yield path, _text_bytes(repr([*message]))
        for value in message.values():
            yield from parts_of(value, path)
    elif isinstance(message, tuple | list):
        for place, value in enumerate(message):
            yield from parts_of(value, f"{path}[{place}]")
    elif is_dataclass(message) and not isinstance(message, type):
        name = type(message).__name__
        for one in fields(message):
            yield from parts_of(getattr(message, one.name), f"{path or name}.{one.name}")
    elif message is not None:
        yield path, _text_bytes(repr(message))


def _text_bytes(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def letters_of(mail: Sequence[Envelope]) -> dict[MessagePart, Tensor]:
    """Return the parts of all messages to the server, tensors of one path and dtype joined."""
    joined: dict[MessagePart, list[Tensor]] = {}
    for letter in mail:
        if letter.receiver == SERVER:
            for path, value in parts_of(letter.message):
                name = f"{path or type(letter.message).__name__}|{value.dtype}"
                joined.setdefault(MessagePart(letter.round, letter.step, letter.sender, name), []).append(value)
    return {where: torch.cat(values) for where, values in joined.items()}


def part_words(part: str) -> str:
    """Return the path of a part without its dtype."""
    return part.partition("|")[0]


def place_of(name: MessagePart) -> str:
    """Return a part of a message in words."""
    when = f"in round {name.round}" if name.round else "at set-up"
    return f"{part_words(name.part)} of client {name.client} {when}"


def secrets_in(letters: Sequence[Mapping[MessagePart, Tensor]], states: Sequence[Sequence[Tree]]) -> list[MessagePart]:
    """Return the parts of messages that hold secrets of their sender, by several runs with other draws.

    letters: by run, as `letters_of`; states: by run and client, after set-up. A secret number is taken for sent where a
    number of a message moves with it over all draws: plus, times or xor a constant, whole or byte by byte.
    """
    clients = range(len(states[0]))
    every = [zip(*(tensors_of(run[client]) for run in states), strict=True) for client in clients]
    known = [_KnownMoves.of([_moves(leaf) for leaf in own]) for own in every]
    names = []
    for name in letters[0]:
        values = [value for run in letters if (value := run.get(name)) is not None]
        own = known[name.client]
        if not len(own.hashes) or len(values) < len(letters):
            continue
        if max(own.shared(some) for some in (values, *_halves(values))) >= min(ESCROWED, len(own.hashes)):
            names.append(name)
    return names


@dataclass(frozen=True)
class _KnownMoves:
    """Hashes by `_moves` of a client's secrets, ascending. begun, possible: whether a hash with these bits is known.

    Nearly all numbers of a message are no secrets: the tables say so sooner than a search, the small one soonest.
    """

    hashes: NDArray[np.int64]
    begun: NDArray[np.bool_]
    possible: NDArray[np.bool_]

    @staticmethod
    def of(parts: Sequence[NDArray[np.int64]]) -> _KnownMoves:
        """Return the hashes of some tensors."""
        hashes = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *parts]))
        tables = [np.zeros(size, dtype=bool) for size in (SMALL_TABLE, HASH_TABLE)]
        for table in tables:
            table[_bits(hashes, len(table))] = True
        return _KnownMoves(hashes, *tables)

    def near(self, move: np.ufunc, octets: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the columns of bytes [runs, n] whose first three moves are a secret's, and few others."""
        for table, runs, dtype in ((self.begun, 3, np.uint32), (self.possible, 4, np.int64)):
            octets = octets[:, table[_bits(_words_of(move, octets[:runs], dtype), len(table))]]
        return octets

    def shared(self, values: Sequence[Tensor]) -> int:
        """Return how many of the hashes are among those of `values`, a part of a message in each run."""
        sent = _moves(values, self)
        near = self.hashes[np.searchsorted(self.hashes, sent).clip(max=len(self.hashes) - 1)]
        return len({*sent[near == sent].tolist()})


def _bits(hashes: NDArray[Any], size: int) -> NDArray[Any]:
    """Return the bits of hashes by which a table of `size` entries knows them: of a byte's, its first moves."""
    return np.asarray(hashes >> 8 & (size - 1))


SMALL_TABLE, HASH_TABLE = 2**16, 2**22
"""Entries of tables by some bits of hashes: 64 kB, which a processor keeps near; 4 MB, in which few secrets meet."""


def _halves(values: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the first half of whole numbers xor, and plus, the second one: two shares of a secret."""
    if not values[0].is_floating_point() and values[0].dtype != torch.bool and len(values[0]) <= MOST_SEARCHED:
        pairs = [value.chunk(2) for value in values if len(value) % 2 == 0]
        if len(pairs) == len(values):
            yield [one ^ two for one, two in pairs]
            yield [one + two for one, two in pairs]


ESCROWED = 8
"""Fewest secret numbers of a client that must be found in one part of a message."""
MOST_SEARCHED = 2**16
"""Most numbers of a part in which secrets are looked for."""


def _moves(values: Sequence[Tensor], known: _KnownMoves | None = None) -> NDArray[np.int64]:
    """Return a hash of how each number and each byte moves over the draws: equal where they differ by a constant.

    values: a tensor's value in each run. Numbers that take few values are left out, and what is certainly none of the
    `known`.
    """
    if len({v.shape for v in values}) > 1 or not values[0].numel():
        return np.empty(0, dtype=np.int64)
    some = torch.stack([v.detach().cpu().reshape(-1)[:MOST_SEARCHED] for v in values]).contiguous()
    octets = some.view(torch.uint8).reshape(len(some), -1).numpy()
    numbers = np.nan_to_num(some.double().numpy()) if some.is_floating_point() else some.double().numpy()
    hashes = [_kept(_number_hashes(numbers), numbers, known)]
    for move in (np.bitwise_xor, np.subtract):
        near = octets if known is None else known.near(move, octets)
        hashes.append(_kept(_words_of(move, near[:8]), near, known))  # seven moves of a byte are their own hash
    return np.concatenate(hashes)


def _kept(hashes: NDArray[np.int64], values: NDArray[Any], known: _KnownMoves | None) -> NDArray[np.int64]:
    """Return the hashes of columns of values [runs, n] that may be known, if `known` says, and take many values."""
    near: Any = slice(None) if known is None else np.flatnonzero(known.possible[_bits(hashes, HASH_TABLE)])
    kept: NDArray[np.int64] = hashes[near][_varied(values[:, near])]
    return kept


def _number_hashes(numbers: _Numbers) -> NDArray[np.int64]:
    """Return a hash of how each column of numbers [runs, n] moves, as shares of its largest move, up to their sign."""
    steps = numbers[1:] - numbers[0]
    most = np.abs(steps).max(0)
    scales = np.copysign(1e4, steps[-1]) / np.where(most > 0, most, np.inf)
    factors = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, len(numbers))[1:]
    hashes = np.zeros(numbers.shape[1], dtype=np.int64)
    for factor, row in zip(factors, steps, strict=True):  # a product of whole numbers would read column by column
        hashes += factor * np.rint(row * scales).astype(np.int64)
    return hashes


def _words_of(move: np.ufunc, octets: NDArray[np.uint8], dtype: type[np.integer[Any]] = np.int64) -> NDArray[Any]:
    """Return the moves of bytes [runs, n] from the first run, one after another, as words [n]."""
    words: NDArray[Any] = np.zeros(octets.shape[1], dtype=dtype)
    for run, row in enumerate(octets[1:], 1):
        words |= move(row, octets[0]).astype(dtype) << 8 * run
    return words


def _varied(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which columns of [runs, n] have the values of the first three runs hardly ever again."""
    again = [(values == values[run]).sum(0, dtype=np.uint8) for run in range(min(3, len(values)))]
    return np.asarray(np.max(again, axis=0) <= 2)


# -- Whether numbers tell two worlds apart, by several runs of each --

_Numbers = NDArray[np.float64]
CLEAR = 6.0
"""Standard deviations by which two worlds must differ, beside all other ways to divide their runs into two halves."""
WORLD_ROUNDING = 1e-3
"""A difference below this share of that of another sum is rounding (of squared distances)."""
FEW = 0.05
"""Share of numbers that must differ by more than rounding: of a few, the other sum may differ as little by chance."""


def sampled(values: Tensor, most: int) -> Tensor:
    """Return at most `most` entries of a tensor at equal distances, flat, on the CPU, in storage of their own."""
    flat = torch.view_as_real(values.detach()).reshape(-1) if values.is_complex() else values.detach().reshape(-1)
    return (flat if flat.numel() <= most else flat[:: -(-flat.numel() // most)]).cpu().clone()


class Tape(TorchFunctionMode):
    """Keeps a sample of every tensor that the server's code computes, once where it changes the shape alone."""

    MOST, SIZE = 4000, 512
    RESHAPED = frozenset({"view", "reshape", "flatten", "detach", "clone"})

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Run an operation and keep a sample of its result."""
        result = func(*args, **(kwargs or {}))
        computed = isinstance(result, Tensor) and result.numel() and func.__name__ not in self.RESHAPED
        if computed and len(self.samples) < self.MOST:
            self.samples.append(sampled(result, self.SIZE))
        return result

    def watched(self, coroutine: Round) -> Round:
        """Return a server's coroutine that runs under the tape."""
        answers: Mapping[int, Tree] | None = None
        while True:
            with self:
                try:
                    step = coroutine.send(answers)  # type: ignore[arg-type]  # None starts a coroutine
                except StopIteration as stop:
                    return stop.value  # type: ignore[no-any-return]
            answers = yield step


@dataclass(frozen=True)
class Runs:
    """Numbers of one kind in each run of three worlds. same, other: alike in what the server may learn; changed: not.

    Each is [runs, n], float64, or int64, where sums wrap around.
    """

    same: NDArray[np.generic]
    other: NDArray[np.generic]
    changed: NDArray[np.generic]

    @staticmethod
    def of(worlds: Sequence[Sequence[Tensor | None]]) -> Runs | None:
        """Return the runs of one part, by world; None where shapes differ or nothing is there."""
        values = [value for world in worlds for value in world if value is not None]
        if len(values) < sum(map(len, worlds)) or len({v.shape for v in values}) > 1 or not values[0].numel():
            return None
        arrays: list[NDArray[Any]] = [_array(torch.stack([v for v in world if v is not None])) for world in worlds]
        if arrays[0].dtype == np.int64:  # numbers below 2^b may be sums modulo 2^b
            least, most = min(int(a.min()) for a in arrays), max(int(a.max()) for a in arrays)
            spare = 64 - most.bit_length() if least >= 0 else 63 - max(most.bit_length(), (-least - 1).bit_length())
            arrays = [a << max(spare, 0) for a in arrays]
        return Runs(*arrays)

    @property
    def whole(self) -> bool:
        """Whether the numbers are whole and sums wrap around."""
        return self.same.dtype == np.int64

    def plus(self, other: Runs, factor: float) -> Runs:
        """Return these numbers plus `factor` times others."""
        times: float = int(factor) if self.whole and other.whole else factor
        pairs = ((self.same, other.same), (self.other, other.other), (self.changed, other.changed))
        return Runs(*(one + times * two for one, two in pairs))  # type: ignore[operator]

    @functools.cached_property
    def centered(self) -> _Numbers:
        """The numbers of the first two worlds less their world's mean, flat."""
        return np.concatenate([(w - w.mean(0)).ravel() for w in (self.same.astype(float), self.other.astype(float))])

    def apart(self, rounding: float = 0.0) -> bool:
        """Return whether the first two worlds can be told apart.

        rounding: share of the distance (squared) of the third world up to which a number's distance is rounding.

        The squared distance of their means must stand out among those of all other halves of all runs.
        """
        same, other, changed = (self._from_first(w) for w in (self.same, self.other, self.changed))
        effect, scale = ((same.mean(0) - w.mean(0)) ** 2 for w in (other, changed))
        unlike = effect > rounding * scale
        if not unlike.any():
            return False
        both = np.concatenate([same, other])
        both = both - both.mean(0)
        spread = both.std(0)
        clear = (spread > 0) & unlike
        if not clear.any() or clear.sum() < FEW * (spread > 0).sum():
            return False
        both = both[:, clear] / spread[clear]
        ways = _splits(len(same))
        true, *rest = ((ways @ (both @ both.T)) * ways).sum(1)
        return bool(true > max(rest) * (1 + 1e-9) and true > np.mean(rest) + CLEAR * np.std(rest))

    def _from_first(self, world: NDArray[np.generic]) -> _Numbers:
        """Return whole numbers less those of the first run, which wrap around; others as they are."""
        moved: Any = world
        if self.whole:
            moved = moved - self.same[0]
        return np.asarray(moved, dtype=float)


def unmasked(names: Sequence[MessagePart], members: Sequence[Runs]) -> list[int]:
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


def _array(values: Tensor) -> NDArray[np.generic]:
    """Return numbers as int64 if they are whole, else as float64, not finite ones as 0."""
    if values.is_floating_point():
        return np.asarray(values.double().nan_to_num(posinf=0.0, neginf=0.0).numpy())
    return np.asarray(values.to(torch.int64).numpy())


def steady_bits(runs: Sequence[Sequence[Tensor | None]]) -> bool:
    """Return whether more bits are fixed within two worlds' runs, and not the same in both, than by chance."""
    values = [value for world in runs[:2] for value in world]
    if any(v is None or not v.numel() or v.shape != values[0].shape for v in values):  # type: ignore[union-attr]
        return False
    one, two = ([_words(value) for value in world if value is not None] for world in runs[:2])
    moved = np.zeros_like(one[0])
    for world in (one, two):
        for words in world[1:]:
            moved |= words ^ world[0]
    fixed = ~moved
    unlike = (one[0] ^ two[0]) & fixed
    unlike = unlike[unlike != 0]  # one in a thousand words
    odd = np.unpackbits(unlike.view(np.uint8).reshape(-1, unlike.itemsize), axis=1).sum(0)
    chance = len(fixed) * 2.0 ** (1 - 2 * len(one))
    return bool((odd > chance + CLEAR * math.sqrt(chance) + 4).any())


def _words(values: Tensor) -> NDArray[np.uint64]:
    """Return the words of a tensor's numbers, unsigned."""
    numbers = values.numpy()
    words: NDArray[np.uint64] = np.ascontiguousarray(numbers).view(f"u{numbers.dtype.itemsize}")
    return words


@functools.lru_cache
def _splits(runs: int) -> _Numbers:
    """Return all ways to divide two worlds' runs into halves as signs [ways, 2 runs]; the true one is first."""
    halves = [half for half in itertools.combinations(range(2 * runs), runs) if half[0] == 0]
    return np.array([[1.0 if run in half else -1.0 for run in range(2 * runs)] for half in halves])


def encodes(codes: Sequence[Tensor], numbers: Sequence[Tensor]) -> bool:
    """Return whether some bit of the words of `codes` goes with the number at the same place, over several runs.

    A key stream only turns bits over, so that the correlation's square stays. codes: whole numbers, by run.
    """
    count, size = len(numbers[0]), codes[0].element_size() * len(codes[0])
    if not count or size % count or not 1 <= size // count <= 8 or len(numbers) < 4:
        return False
    few = slice(0, SAMPLED)
    words = torch.stack([*codes]).contiguous().view(torch.uint8).view(len(codes), count, -1)[:, few].numpy()
    bits = np.unpackbits(words, axis=2).astype(float)
    values = torch.stack([*numbers])[:, few, None].double().numpy()
    bits, values = (part - part.mean(0) for part in (bits, values))
    scale = (bits**2).sum(0) * (values**2).sum(0)
    square = np.divide((bits * values).sum(0) ** 2, scale, out=np.zeros_like(scale), where=scale > 0)
    expected = 1 / (len(numbers) - 1)
    return bool((square.mean(0) > expected + CLEAR * math.sqrt(2 / len(square)) * expected * 1.5).any())


SAMPLED = 1024
"""Numbers of a part whose bits are compared with another part's."""
