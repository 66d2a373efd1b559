"""Noise of torch's generator comes off exactly: an upload shows the generator's state where its gradient is zero.

That generator is a Mersenne twister (MT19937, Matsumoto and Nishimura 1998): every bit of its words is a sum, modulo 2,
of 19,937 bits of its state. `torch.randn` makes pairs of normal numbers of pairs of words, 24 bits of each (Box and
Muller). Some entries of a gradient are zero whatever the weights and inputs are, as those of a kernel's rim over small
maps; there the upload is the noise alone, and a pair of such entries gives both words back, up to rounding. Enough of
them give the state by elimination, the state gives all noise, and what is left is the gradient.

No defense of ppbench falls to it: they draw noise from a stream cipher (`ppbench.base.secret_draws`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.adaptive.inversion import exact_first
from ppbench.attacks.reconstruction.dlg import IDLG
from ppbench.base.autodiff import gradient
from ppbench.base.seeds import PLACE, TWISTER
from ppbench.base.tree import Params, Recent, values_digest
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Layout, Noise, Plan
from ppbench.federation.view import View
from ppbench.nets.net import initial

_Words = NDArray[np.uint32]
_Integers = NDArray[np.int64]
_Flags = NDArray[np.bool_]
_Floats = NDArray[np.float64]
_Packed = NDArray[np.uint64]

BLOCK, HALF = 16, 8
"""Numbers that `torch.randn` makes at a time; number j < 8 and number j + 8 are a pair."""
UNIFORM_BITS = 24
MIDDLE, MATRIX, TOP = 397, 0x9908B0DF, 0x80000000
SHIFTED_B, SHIFTED_C = 0x9D2C5680, 0xEFC60000
EVERY = 10
"""One in so many pairs of bare entries is kept back to check a recovered state."""
FEWEST_CHECKS = 32
"""Parity checks of known bits that must all hold before the state is solved for: chance passes one time in 2^32."""
MOST_TRIPLES = 400
"""Triples of words that the parity checks look at."""
SURPLUS = (1.05, 1.4, 9.0)
"""Equations for each unknown, at most: more where fewer leave something open, since some follow from others."""
REACH = 24
"""Times that the state is renewed, at most, to get equations."""
AGREES = 1e-5
"""Largest difference of an entry kept back from its replayed noise, in standard deviations."""


@dataclass(frozen=True)
class NoiseReplay(IDLG):
    """Recovers the state of torch's generator from bare noise in an upload, subtracts the noise, and inverts the rest.

    It reads normal float32 noise on an upload of single gradients, drawn tensor by tensor or at once, whose size the
    defense declares or an entry of it or a short decimal number gives. Where a network has no entries without gradient,
    or another generator was used, it finds nothing: in a fraction of a second, since known words of a twister satisfy
    linear relations among few of them, which are checked first. A state that other bare entries do not confirm counts
    as none.
    """

    name: ClassVar[str] = "noise_replay"
    version: ClassVar[str] = "1"
    standard: ClassVar[bool] = True
    quick: ClassVar[bool | Literal["unaware", "foreign"]] = "foreign"
    reads_alone: ClassVar[bool] = True
    threats: ClassVar[tuple[str, ...]] = ("server/1", "eavesdropper/1", "collusion/1")
    probes: ClassVar[tuple[str, ...]] = ("gradient",)
    reference: ClassVar[str] = "this project; the Mersenne twister is linear, Matsumoto and Nishimura 1998"

    def evidence(self, view: View) -> list[Evidence]:
        """Return the evidence of uploads whose noise came off, without it."""
        if not view.threat.sees_uploads:
            return []
        law = view.defense.noise(view.plan)
        scales = declared_scales(view.defense)
        cleaned = (without_noise(one, view.plan, law, scales) for one in view.defense.evidence(view))
        return [one for one in cleaned if one is not None]

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess per challenge: by linear systems, else by a search; a start image where nothing came off."""
        search = partial(self.answer, plan=view.plan, challenges=challenges, generator=generator)
        return exact_first(self.evidence(view), view.plan, challenges, search, self.budget)


def declared_scales(defense: object) -> tuple[float, ...]:
    """Return the numbers among a defense's parameters, any of which may be the size of its noise."""
    own = [getattr(defense, field.name) for field in fields(defense)]  # type: ignore[arg-type]  # a dataclass
    return tuple(float(value) for value in own if isinstance(value, int | float) and not isinstance(value, bool))


CLEANED: Recent[Params | None] = Recent(256)
"""What was cleaned last, by upload: evidence is asked several times."""


def without_noise(evidence: Evidence, plan: Plan, law: Noise | None, scales: tuple[float, ...]) -> Evidence | None:
    """Return the evidence of one upload without its noise; None if its noise does not come off."""
    if len(evidence.unit) > 1 or evidence.params is None or evidence.weight is not None or plan.net.pixelwise:
        return None
    if law is not None and law.law != "gaussian":
        return None
    own = evidence.observed
    if own.keys() != evidence.params.keys() or any(value.dtype != torch.float32 for value in own.values()):
        return None
    key = values_digest(own), law, plan, scales
    clean = CLEANED.of(key, partial(_cleaned, own, plan, law, scales))
    return None if clean is None else replace(evidence, observed=clean, noise=None)


def _cleaned(observed: Params, plan: Plan, law: Noise | None, scales: tuple[float, ...]) -> Params | None:
    layout = Layout.of(observed)
    flat = layout.pack(observed).cpu()
    upload, bare = flat.double().numpy(), bare_entries(plan)
    if len(bare) != len(upload) or not np.isfinite(upload).all():
        return None
    by_tensor = [value.numel() for value in observed.values()]
    draws = [by_tensor, [sum(by_tensor)]] if len(by_tensor) > 1 else [by_tensor]  # tensor by tensor, or all at once
    for scale in noise_scales(upload[bare], law, scales):
        unit = upload / _of_tensors(observed, law, scale)
        for sizes in draws:
            replayed = replayed_noise(unit, bare, sizes)
            if replayed is not None:
                noise = replayed * torch.from_numpy(_of_tensors(observed, law, scale)).float()
                return layout.unpack((flat - noise).to(next(iter(observed.values())).device))
    return None


def _of_tensors(observed: Params, law: Noise | None, scale: float) -> _Floats:
    """Return the size of the noise at each entry [P], as float32 holds it: its tensor's declared one, or `scale`."""
    sizes = [np.full(value.numel(), scale if law is None else law.of(name)) for name, value in observed.items()]
    return np.concatenate(sizes).astype(np.float32).astype(np.float64)


def noise_scales(bare: _Floats, law: Noise | None, scales: Sequence[float]) -> list[float]:
    """Return sizes that the noise may have: the declared one, else parameters and short decimals near the measured."""
    size = float(np.sqrt(np.mean(bare**2))) if len(bare) else 0.0
    if not size:
        return []
    if law is not None:
        return [law.std]
    decimals = [float(f"{size:.{digits}g}") for digits in (1, 2, 3)]
    return [scale for scale in dict.fromkeys([*scales, *decimals]) if abs(scale / size - 1) < 0.1]


@lru_cache(maxsize=8)
def bare_entries(plan: Plan) -> _Flags:
    """Return which entries of a gradient [P] are zero at random weights and inputs, so whatever these are.

    Weights and inputs have either sign, and are many: a unit that is off for some is not off for all.
    """
    draws, count = torch.Generator().manual_seed(0), 16
    moved: _Flags | None = None
    for seed in range(6):
        params = initial(plan.spec, seed)
        params = {n: v + 0.1 * torch.randn(v.shape, generator=draws) for n, v in params.items()}
        half = torch.randn(count // 2, *plan.spec.shape, generator=draws)
        labels = torch.randint(plan.spec.classes, (count,), generator=draws)
        x, y, w = torch.cat([half, -half]), one_hot(labels, plan.spec.classes).float(), torch.ones(count)
        one = gradient(lambda p, x=x, y=y, w=w: plan.objective(p, x, y, w), params)  # type: ignore[misc]
        some = Layout.of(one).pack(one).detach().numpy() != 0
        moved = some if moved is None else moved | some
    return ~moved if moved is not None else np.zeros(0, dtype=bool)


# -- From noise to words --


@dataclass(frozen=True)
class KnownWords:
    """Words of the generator that are known in part.

    at: [M] their places in its stream, ascending; values: [M] 24-bit numbers; sure: [M] how many of their leading bits
    are known; entries: [M, 2] the pair of entries that shows each.
    """

    at: _Integers
    values: _Integers
    sure: _Integers
    entries: _Integers

    def some(self, which: _Flags | _Integers) -> KnownWords:
        """Return the words `which`."""
        return KnownWords(self.at[which], self.values[which], self.sure[which], self.entries[which])


def word_pairs(sizes: Sequence[int]) -> tuple[_Integers, _Integers]:
    """Return, for draws of `sizes` numbers one after another, entries [M, 2] of pairs, and their words' places [M, 2].

    Draws of fewer than 16 numbers are made otherwise, and only move the others' places: two numbers of four words.
    """
    entries, places, entry, word, odd = [], [], 0, 0, False
    for size in sizes:
        if size < BLOCK:
            new = size - odd
            word, odd = word + 4 * -(-new // 2), bool(new % 2)
        else:
            rest = size % BLOCK
            first = np.arange(size // BLOCK * BLOCK).reshape(-1, BLOCK)
            numbers = np.stack([first[:, :HALF].ravel(), first[:, HALF:].ravel()], 1)
            if rest:  # the last block is drawn again, over the end
                numbers = numbers[numbers[:, 1] < size - BLOCK]
                last = np.arange(HALF)[:, None] + np.array([0, HALF])
                entries.append(entry + size - BLOCK + last)
                places.append(word + size + last)
            entries.append(entry + numbers)
            places.append(word + numbers)
            word += size + (BLOCK if rest else 0)
        entry += size
    none = np.zeros((0, 2), dtype=np.int64)
    return np.concatenate([none, *entries]), np.concatenate([none, *places])


def known_words(noise: _Floats, entries: _Integers, places: _Integers) -> KnownWords:
    """Return the words behind pairs of normal numbers: noise [P] of size 1 at `entries` [M, 2].

    A pair is sqrt(-2 ln u) (cos, sin)(2 pi v), with u = 1 - first / 2^24 and v = second / 2^24, in float32; so numbers
    are known up to its rounding, and of a word the leading bits that all numbers within it share.
    """
    one, two = noise[entries[:, 0]], noise[entries[:, 1]]
    square, angle = one**2 + two**2, np.arctan2(two, one) % (2 * math.pi)
    steps = 2.0**UNIFORM_BITS
    radial = _leading_bits(-steps * np.expm1(-square / 2), 0.1 + 4 * square * np.exp(-square / 2))
    turn = steps / (2 * float(np.float32(math.pi)))
    angular = _leading_bits(angle * turn, 0.1 + (angle + 4) / (2 * math.pi), wraps=True)
    at = places.T.ravel()
    order = np.argsort(at, kind="stable")
    values, sure = (np.concatenate(pair) for pair in zip(radial, angular, strict=True))
    return KnownWords(at, values, sure, np.concatenate([entries, entries])).some(order)


def _leading_bits(numbers: _Floats, error: _Floats, *, wraps: bool = False) -> tuple[_Integers, _Integers]:
    """Return integers near `numbers`, and how many leading bits all integers within `error` share; 0 for none."""
    end = 2**UNIFORM_BITS
    low, high = np.ceil(numbers - error).astype(np.int64), np.floor(numbers + error).astype(np.int64)
    outside = (low < 0) | (high >= end) if wraps else np.zeros(len(low), dtype=bool)
    low, high = low.clip(0, end - 1), high.clip(0, end - 1)
    open_bits = np.ceil(np.log2((low ^ high) + 1.0)).astype(np.int64)
    return low, np.where(outside | (low > high), 0, UNIFORM_BITS - open_bits)


def replayed_noise(noise: _Floats, bare: _Flags, sizes: Sequence[int]) -> torch.Tensor | None:
    """Return all noise, float32 [P], that the generator made in draws of `sizes`; None if it was not this generator.

    noise: [P] of size 1 where `bare`. Entries that were kept back must confirm the state.
    """
    entries, places = word_pairs(sizes)
    shown = bare[entries].all(1)
    entries, places = entries[shown], places[shown]
    kept_back = np.arange(len(entries)) % EVERY == 0
    known = densest(known_words(noise, entries[~kept_back], places[~kept_back]))
    if not passes_parity(known):
        return None
    solved = solved_state(known)
    if solved is None:
        return None
    generator = generator_before(*solved)
    replay = torch.cat([torch.randn(size, generator=generator, dtype=torch.float32) for size in sizes])
    checked = entries[kept_back].ravel()
    apart = np.abs(replay.double().numpy()[checked] - noise[checked])
    return replay if len(checked) and bool((apart < AGREES).mean() > 0.99) else None


def densest(known: KnownWords) -> KnownWords:
    """Return the words of the stretch, `REACH` times 624 places long, in which most bits are known."""
    if not len(known.at):
        return known
    total = np.concatenate([[0], np.cumsum(known.sure)])
    ends = np.searchsorted(known.at, known.at + REACH * TWISTER)
    first = int(np.argmax(total[ends] - total[:-1]))
    return known.some(np.arange(first, ends[first]))


# -- The twister: its words, and linear relations among them --


@lru_cache(maxsize=1)
def _relation_rows() -> tuple[int, ...]:
    """Return 31 relations of outputs k + 1, k + 397 and k + 624, as 96 bits: which bits of the three each adds up.

    They are the bits of word k + 624, without bit 30, which word k decides.
    """
    rows = symbolic_outputs(np.ones((3, 32), dtype=bool), np.zeros((3, 32), dtype=np.uint32))
    _untemper(rows)
    one, middle, last = rows[:, None]
    _twist(last, np.zeros_like(one), one)
    relations = enumerate((last ^ middle)[0].tolist())
    return tuple(low | high << 64 for bit, (low, high, _) in relations if bit != 30)


@lru_cache(maxsize=4096)
def parity_checks(sure: tuple[int, int, int]) -> tuple[int, ...]:
    """Return sums of relations in which only known bits take part, if so many leading bits of 24 are known."""
    rows = list(_relation_rows())
    for word, bits in enumerate(sure):
        for bit in (*range(UNIFORM_BITS - bits), *range(UNIFORM_BITS, 32)):
            place = 1 << (32 * word + bit)
            pivot = next((row for row in rows if row & place), None)
            if pivot is not None:
                rows.remove(pivot)
                rows = [row ^ pivot if row & place else row for row in rows]
    return tuple(rows)


def passes_parity(known: KnownWords) -> bool:
    """Return whether known words satisfy all relations among three of them, `FEWEST_CHECKS` or more."""
    place = {int(at): i for i, at in enumerate(known.at)}
    checked = triples = 0
    for first, i in place.items():
        j, k = place.get(first + MIDDLE - 1), place.get(first + TWISTER - 1)
        if j is None or k is None:
            continue
        bits = sum(int(known.values[n]) << 32 * word for word, n in enumerate((i, j, k)))
        for check in parity_checks((int(known.sure[i]), int(known.sure[j]), int(known.sure[k]))):
            if (check & bits).bit_count() % 2:
                return False
            checked += 1
        triples += 1
        if triples == MOST_TRIPLES:
            break
    return checked >= FEWEST_CHECKS


def words_before(words: _Words, count: int) -> _Words:
    """Return the `count` state words before 624 consecutive ones, of whose first only the highest bit need be right."""
    stream = np.concatenate([np.zeros(count, dtype=np.uint32), words])
    # Words k + 623 and k + 396 give the highest bit of word k - 1 and all others of word k.
    for end in range(count, -1, -(MIDDLE - 1)):
        begin = max(end - MIDDLE + 2, 0)
        k = np.arange(begin, end + 1)
        mixed = stream[k + TWISTER - 1] ^ stream[k + MIDDLE - 1]
        odd = mixed >> np.uint32(31)
        mixed = ((mixed ^ odd * np.uint32(MATRIX)) << np.uint32(1)) | odd
        stream[k] = (stream[k] & np.uint32(TOP)) | (mixed & np.uint32(TOP - 1))
        inside = k > 0
        stream[k[inside] - 1] = (stream[k[inside] - 1] & np.uint32(TOP - 1)) | (mixed[inside] & np.uint32(TOP))
    return stream[:count]


def generator_before(at: int, words: _Words) -> torch.Generator:
    """Return a generator that begins where the stream does, of 624 state words from place `at` on."""
    generator = torch.Generator().manual_seed(0)  # it renews its words before the first number
    state = generator.get_state()
    before = words_before(words, at + TWISTER)[:TWISTER].astype(np.uint64)
    state[PLACE : PLACE + 8 * TWISTER] = torch.from_numpy(before.view(np.uint8))
    return generator.set_state(state)


# -- The state by elimination --


def solved_state(known: KnownWords) -> tuple[int, _Words] | None:
    """Return a place in the stream and the 624 state words from there; None if known words do not determine them.

    Of the first word only the highest bit is determined, and needed.
    """
    start = int(known.at[0])
    values, sure = np.zeros((2, TWISTER), dtype=np.int64)
    inside = known.at < start + TWISTER
    values[known.at[inside] - start], sure[known.at[inside] - start] = known.values[inside], known.sure[inside]
    bit = np.arange(32)
    is_open = ~((bit >= UNIFORM_BITS - sure[:, None]) & (bit < UNIFORM_BITS))
    bits = (values[:, None] >> bit & 1).astype(np.uint32)
    unknowns, idle = int(is_open.sum()), int(is_open[0].sum())
    for surplus in SURPLUS:
        equations = _equations(symbolic_outputs(is_open, bits), known, start, surplus * unknowns)
        pivots = _eliminate(equations, unknowns)
        if equations[len(pivots) :].any():
            return None  # they contradict each other: it was another generator
        if all(column < idle for column in set(range(unknowns)) - set(pivots)):
            bits[is_open] = solution_of(equations, pivots, unknowns)
            _untemper(bits[..., None])
            return start, (bits << bit.astype(np.uint32)).sum(1, dtype=np.uint32)
    return None


def symbolic_outputs(is_open: _Flags, bits: _Words) -> _Packed:
    """Return the bits of 624 outputs as sums of unknown ones: packed rows [624, 32, W], the last word of each for 1.

    is_open: [624, 32], which bits are unknown; bits: the others' values.
    """
    count = int(is_open.sum())
    rows = np.zeros((*is_open.shape, -(-count // 64) + 1), dtype=np.uint64)
    column = np.arange(count)
    rows[(*np.nonzero(is_open), column // 64)] = np.uint64(1) << (column % 64).astype(np.uint64)
    rows[..., -1] = np.where(is_open, 0, bits)
    return rows


def _equations(outputs: _Packed, known: KnownWords, start: int, most: float) -> _Packed:
    """Return some `most` sums of unknown bits that are 0, [R, W] packed, from known words after the first 624.

    They are of bits drawn from all words: whole words would often follow from others, by the relations of three.
    """
    rows, equations = outputs, [np.zeros((0, outputs.shape[-1]), dtype=np.uint64)]
    _untemper(rows)
    later = known.some(known.at >= start + TWISTER)
    bit = np.arange(32)
    usable = (bit >= UNIFORM_BITS - later.sure[:, None]) & (bit < UNIFORM_BITS)
    lots = np.random.default_rng(0).random(usable.shape)
    usable &= lots < most / max(1, usable.sum())
    for block in range(1, REACH):
        _renew(rows)
        first = start + block * TWISTER
        here = (later.at >= first) & (later.at < first + TWISTER)
        words = rows[later.at[here] - first]
        _temper(words)
        some = words[usable[here]]
        some[:, -1] ^= (later.values[here, None] >> bit & 1)[usable[here]].astype(np.uint64)
        equations.append(some)
    return np.concatenate(equations)


def _temper(rows: _Packed) -> None:
    """Temper the bits [M, 32, W] of words, in place."""
    for bit in range(32 - 11):
        rows[:, bit] ^= rows[:, bit + 11]
    for shift, mask in ((7, SHIFTED_B), (15, SHIFTED_C)):
        for bit in range(31, shift - 1, -1):
            if mask >> bit & 1:
                rows[:, bit] ^= rows[:, bit - shift]
    for bit in range(32 - 18):
        rows[:, bit] ^= rows[:, bit + 18]


def _untemper(rows: NDArray[np.unsignedinteger[Any]]) -> None:
    """Undo `_temper`, in place."""
    for bit in range(32 - 18):
        rows[:, bit] ^= rows[:, bit + 18]
    for shift, mask in ((15, SHIFTED_C), (7, SHIFTED_B)):
        for bit in range(shift, 32):
            if mask >> bit & 1:
                rows[:, bit] ^= rows[:, bit - shift]
    for bit in range(31 - 11, -1, -1):
        rows[:, bit] ^= rows[:, bit + 11]


def _renew(rows: _Packed) -> None:
    """Replace the bits [624, 32, W] of 624 words by those of the next 624, in place."""
    late = TWISTER - MIDDLE
    for begin, end in ((0, late), (late, 2 * late), (2 * late, TWISTER - 1), (TWISTER - 1, TWISTER)):
        middle, after = (begin + MIDDLE) % TWISTER, (begin + 1) % TWISTER
        new = rows[middle : middle + end - begin].copy()
        _twist(new, rows[begin:end], rows[after : after + end - begin])
        rows[begin:end] = new


def _twist(middle: _Packed, upper: _Packed, lower: _Packed) -> None:
    """Make the bits [M, 32, W] of words k + 397 those of words k + 624, by those of words k and k + 1, in place."""
    middle[:, :30] ^= lower[:, 1:31]
    middle[:, 30] ^= upper[:, 31]
    middle[:, [bit for bit in range(32) if MATRIX >> bit & 1]] ^= lower[:, :1]


def solution_of(rows: _Packed, pivots: Sequence[int], unknowns: int) -> NDArray[np.uint32]:
    """Return the unknowns, 0 or 1, of equations in echelon form; those without a pivot are 0."""
    solution = np.zeros(rows.shape[1], dtype=np.uint64)
    solution[-1] = 1
    for row, column in zip(rows[: len(pivots)][::-1], reversed(pivots), strict=True):
        if int(np.bitwise_xor.reduce(row & solution)).bit_count() % 2:
            solution[column // 64] |= np.uint64(1 << column % 64)
    bits = np.unpackbits(solution.view(np.uint8), bitorder="little")
    return bits[:unknowns].astype(np.uint32)


CHUNK = 512
"""Rows that are updated at a time, so that they stay in a core's cache."""


def _eliminate(rows: _Packed, unknowns: int) -> list[int]:
    """Bring equations [R, W] to echelon form, in place, eight columns at a time; return the columns of the pivots.

    All sums of a block's pivot rows are tabulated, so a row takes one addition for eight columns ("Four Russians").
    """
    columns, pivots = rows.view(np.uint8), list[int]()
    for byte in range(-(-unknowns // 8)):
        top, at = len(pivots), byte // 8
        chosen, sums, pivot_bits = _block_pivots(columns[top:, byte].copy(), min(8, unknowns - 8 * byte))
        table = np.zeros((1, rows.shape[1] - at), dtype=np.uint64)
        for pick, earlier in zip(chosen, sums[chosen].tolist(), strict=True):
            table = np.concatenate([table, table ^ (rows[top + pick, at:] ^ table[earlier])])
        sums[chosen] = 0
        for first in range(0, len(sums) if chosen else 0, CHUNK):
            part = slice(top + first, top + min(first + CHUNK, len(sums)))
            rows[part, at:] ^= table[sums[first : first + CHUNK]]
        count = len(chosen)
        displaced = [place for place in range(count) if place not in chosen]
        rows[[top + pick for pick in chosen if pick >= count]] = rows[[top + place for place in displaced]]
        for place in range(count):
            rows[top + place, at:] = table[1 << place]
        pivots += [8 * byte + bit for bit in pivot_bits]
    return pivots


def _block_pivots(column: NDArray[np.uint8], bits: int) -> tuple[list[int], NDArray[np.uint8], list[int]]:
    """Return the pivot rows of eight columns, packed as `column` [R], which of them each row adds up, their bits."""
    sums, chosen, pivot_bits = np.zeros(len(column), dtype=np.uint8), list[int](), list[int]()
    for bit in range(bits):
        rows = np.flatnonzero(column & np.uint8(1 << bit))
        if len(rows):
            pick = int(rows[0])
            column[rows[1:]] ^= column[pick]
            sums[rows[1:]] |= np.uint8(1 << len(chosen))
            column[pick] = 0
            chosen.append(pick)
            pivot_bits.append(bit)
    return chosen, sums, pivot_bits
