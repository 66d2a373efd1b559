"""What a defense costs a client: the peak memory of its computation, and its time beside an undefended client's.

One client's part of the first round is run again, alone and in a loop. Memory is counted from the allocator's events,
the same on every run. Time is measured in pairs with an undefended client, in turn, and kept beside the records.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.metadata import version

import scipy
import torch

from ppbench.base.device import device_name
from ppbench.base.errors import Overflow
from ppbench.base.registry import load_plugin
from ppbench.base.tree import Params, Tree, moved, tree_map
from ppbench.federation.contract import Ciphering, Defense, Job
from ppbench.federation.drive import Drive, channels_last, client_map
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Data
from ppbench.federation.wire import SERVER, Wire
from ppbench.records.run_files import ClientTime, EncryptionTime

# -- How long real encryption takes: each operation once with a library, times how often a round does it --
# The rounds of ppbench encrypt nothing (`defenses/encrypted`). Libraries are those of the extra "crypto": python-
# paillier and gmpy2, pymife. Operations on one ciphertext take equally long whatever it holds, so one of each is
# enough.

TIMINGS = 3
"""Times each operation is done; the median counts."""
NO_LIBRARY = "not timed: install ppbench-fl[crypto]"


@dataclass(frozen=True)
class Seconds:
    """Seconds of one operation on one ciphertext. partial: a client's part of a decryption, 0 where there is none.

    decrypt: the server's, of one sum: adding up and decrypting.
    """

    encrypt: float
    partial: float
    decrypt: float
    library: str


def encryption_time(form: Ciphering | None) -> EncryptionTime | None:
    """Return the time that encryption adds to a round; None without encryption; only a reason without the libraries."""
    if form is None:
        return None
    try:
        seconds = time_operations(form.scheme, form.bits, form.clients, form.threshold)
    except ImportError:
        return EncryptionTime(client=None, server=None, library="", reason=NO_LIBRARY)
    return round_times(seconds, form)


def round_times(seconds: Seconds, form: Ciphering) -> EncryptionTime:
    """Return the times of one client and of the server: seconds per ciphertext times the number of ciphertexts."""
    blocks = form.blocks(form.values)
    return EncryptionTime(
        client=blocks * (seconds.encrypt + seconds.partial),
        server=blocks * seconds.decrypt,
        library=seconds.library,
        reason="",
    )


@lru_cache
def time_operations(scheme: str, bits: int, clients: int, threshold: int) -> Seconds:
    """Return the seconds of one operation of each kind, measured once per process (ImportError: no library)."""
    return _paillier(bits, clients, threshold) if scheme == "paillier" else _functional(clients)


def _paillier(bits: int, clients: int, threshold: int) -> Seconds:
    """Time python-paillier's encryption; a partial decryption is a power c^(2 D s) mod n^2 (Damgard and Jurik 2001).

    s, a share of the secret, is as long as n^2, and D = N!. The server multiplies N ciphertexts and then raises each
    of `threshold` parts to a Lagrange coefficient times 2 D.
    """
    import gmpy2
    from phe import paillier

    public, _ = paillier.generate_paillier_keypair(n_length=bits)
    square, factorial = gmpy2.mpz(public.nsquare), gmpy2.mpz(2 * math.factorial(clients))
    cipher, share = gmpy2.mpz(public.raw_encrypt(1)), gmpy2.mpz(public.nsquare // 3)
    encrypt = _median(lambda: public.raw_encrypt(7))
    partial = _median(lambda: gmpy2.powmod(cipher, factorial * share, square))
    multiply = _median(lambda: cipher * cipher % square)
    power = _median(lambda: gmpy2.powmod(cipher, factorial, square))
    library = f"phe {version('phe')}, gmpy2 {version('gmpy2')}"
    return Seconds(encrypt, partial, (clients - 1 + threshold) * multiply + threshold * power, library)


def _functional(clients: int) -> Seconds:
    """Time pymife's multi-input scheme over Curve25519, without the discrete logarithm that reads a sum out."""
    from mife.data.curve25519 import Curve25519
    from mife.multi.damgard import FeDamgardMulti

    key = FeDamgardMulti.generate(clients, 1, Curve25519())
    inputs = [key.get_enc_key(client) for client in range(clients)]
    encrypt = _median(lambda: FeDamgardMulti.encrypt([0], inputs[0]))
    sent = [FeDamgardMulti.encrypt([0], one) for one in inputs]
    function, public = FeDamgardMulti.keygen([[1]] * clients, key), key.get_public_key()
    decrypt = _median(lambda: FeDamgardMulti.decrypt(sent, public, function, (0, 1)))
    return Seconds(encrypt, 0.0, decrypt, f"pymife {version('pymife')}")


def _median(call: Callable[[], object]) -> float:
    return statistics.median(timeit.repeat(call, number=1, repeat=TIMINGS))


# The profiler's backend announces every start and stop on stderr, amid progress bars; it reads this when first used.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

MEASURED_STEPS = 2
"""Local steps that memory is measured over: from the second on, all of an optimizer's state is there."""
PAIRS = 9
"""Pairs of times at least; the second smallest and the second largest of nine bound the median at 96 %."""
ENOUGH_S = 0.3
"""Seconds for which very short pairs are repeated."""
BUDGET_S = 5.0
"""Seconds after which no further pair is begun, nine or not; one is always measured."""


@dataclass(frozen=True)
class ClientCost:
    """Memory and time of a client's part of a round; None if the first round overflows what can be sent."""

    memory_peak: int | None
    time: ClientTime | None


@dataclass(frozen=True)
class Turn:
    """A message that a client answers in a round: in which step, and its state before it."""

    step: int
    state: Tree
    message: Tree


@dataclass(frozen=True)
class Client:
    """One client of a federation, ready to do its part of the next round again and again; nothing real moves."""

    index: int
    data: Data
    turns: tuple[Turn, ...]
    drive: Drive

    def jobs(self) -> Iterator[Job]:
        """Yield the client's jobs of the round, drawn anew."""
        for turn in self.turns:
            job = self._prepare(turn)
            if job is not None:
                yield job

    def act(self) -> None:
        """Do the client's whole part of the round: prepare, compute and reply."""
        for turn in self.turns:
            job = self._prepare(turn)
            result = () if job is None else self.compute(job)
            context = self.drive.context(self.index, turn.step)
            self.drive.defense.reply(context, turn.state, turn.message, result, self.data)

    def compute(self, job: Job) -> Tree:
        """Return the result of `job` on the client."""
        return client_map("loop", self.drive.defense, self.drive.plan, {self.index: job})[self.index]

    def _prepare(self, turn: Turn) -> Job | None:
        fed, context = self.drive, self.drive.context(self.index, turn.step)
        job = fed.defense.prepare(context, turn.state, turn.message, self.data)
        return None if job is None else moved(job, fed.device)


def measured_client(fed: Federation, index: int = 0) -> Client:
    """Return a client of a started federation with its messages of the next round, which runs on a fork.

    As many clients take part as in a round of training; the others hold one batch of their examples each: only this
    client is measured.
    """
    size, every = fed.plan.local.batch, range(fed.plan.clients)
    cohort = sorted([index, *[c for c in every if c != index][: fed.plan.sample - 1]]) if fed.plan.sample else every
    data = {c: fed.shards[c] for c in cohort}
    data = {c: shard if c == index else Data(shard.x[:size], shard.y[:size]) for c, shard in data.items()}
    wire, parties = Wire(keep=True), fed.parties.fork()
    drive = fed.drive(fed.plan, "cost", -1, fed.round + 1, wire, parties, data)
    drive.run(fed.defense.round(drive.context(SERVER, 0), parties.server, cohort))
    states = {record.step: record.state for record in drive.states if record.party == index}
    turns = tuple(Turn(m.step, states[m.step], m.message) for m in wire.mail if m.receiver == index)
    return Client(index, data[index], turns, drive)


def peak_memory(client: Client, steps: int = MEASURED_STEPS) -> int:
    """Return the most bytes that the client's `compute` holds at a time beyond its inputs, its result included.

    Of the first `steps` local steps: the others hold as much. 0 where a client computes nothing.
    """
    device, peak = client.drive.device, 0
    for job in client.jobs():
        part = channels_last(first_steps(job, steps))  # laid out before: no client lays its own examples out anew
        peak = max(peak, peak_bytes(partial(client.compute, part), device))
    return peak


def first_steps(job: Job, steps: int) -> Job:
    """Return the first `steps` local steps of `job`."""
    batches, noise = (tree_map(lambda leaf: leaf[:steps], tree) for tree in (job.batches, job.noise))
    return replace(job, batches=batches, noise=noise)


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes that `call` allocates at a time on `device`, over what was allocated before it.

    On a CPU of all that torch allocates and frees; on a GPU of the second call: libraries take their workspaces at
    first.
    """
    if device.type == "cuda":
        call()
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    collecting = gc.isenabled()
    gc.disable()  # when cycles are collected, older ones too, would depend on what ran before
    try:
        with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profile:
            call()
    finally:
        if collecting:
            gc.enable()
    events = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def relative_time(client: Client, beside: Client) -> ClientTime:
    """Return how long `client` takes over how long `beside` takes: median and interval by order statistics.

    The first pair warms up and does not count where there are others.
    """
    pairs: list[tuple[float, float]] = []
    began = time.perf_counter()
    while not pairs or time.perf_counter() - began < (BUDGET_S if len(pairs) <= PAIRS else ENOUGH_S):
        pairs.append((_seconds(client), _seconds(beside)))
    counted = pairs[1:] or pairs
    ratios = sorted(mine / other for mine, other in counted)
    low, high = median_interval(ratios)
    device = client.drive.device
    return ClientTime(
        ratio=statistics.median(ratios),
        low=low,
        high=high,
        pairs=len(ratios),
        seconds=statistics.median(mine for mine, _ in counted),
        undefended_seconds=statistics.median(other for _, other in counted),
        machine=device_name(device),
        threads=torch.get_num_threads(),
    )


def _seconds(client: Client) -> float:
    began = time.perf_counter()
    client.act()
    if client.drive.device.type == "cuda":
        torch.cuda.synchronize(client.drive.device)
    return time.perf_counter() - began


def median_interval(ordered: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the order statistics that bound the median of the population with 95 % or more; (None, None) below six."""
    rank = int(scipy.stats.binom.ppf(0.025, len(ordered), 0.5))
    return (ordered[rank - 1], ordered[-rank]) if rank else (None, None)


def client_cost(fed: Federation, params: Params) -> ClientCost:
    """Return what round 1 takes the first client of `fed`, a federation just started from `params`; it stays so."""
    undefended: Defense = load_plugin("defenses", "none")()
    plain = Federation(undefended, fed.plan, fed.shards, fed.seeds, fed.device, fed.backend)
    plain.start(params)
    try:
        client, beside = measured_client(fed), measured_client(plain)
        encrypted = encryption_time(fed.defense.ciphering(fed.plan))
        taken = relative_time(client, beside).model_copy(update={"encryption": encrypted})
        return ClientCost(peak_memory(client), taken)
    except Overflow:
        return ClientCost(None, None)
