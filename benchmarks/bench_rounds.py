"""What a round takes a client and the server under MP-DP and the encrypted protocols that its paper compares it with.

Run: OMP_NUM_THREADS=1 PPBENCH_FIGURES=results/rounds.json pytest bench_rounds.py --benchmark-only -s
(in benchmarks/, with the extra `crypto`). ResNet20 on CIFAR-10's shapes, ResNet56 on CIFAR-100's, 5 and 100 clients,
each beside FedSGD in one run (Tables 1 and 5 of the MP-DP paper). Pixels are random: no time depends on them. One
client is timed, on a batch of 32, in pairs with an undefended one; the server on the messages of all clients, of which
one was computed. Encryption is timed operation by operation, and counted (`ppbench.run.cost`). A paper's epoch ends
in one upload, our rounds are single batches: ratios are given for both, an upload a batch of 256 and an upload an epoch
of 10,000 examples.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from bench_perturbation import keep

from ppbench.base.seeds import Seeds
from ppbench.base.tree import Tree, leaves
from ppbench.defenses.encrypted.protocols import PILE, TPSMC, HybridAlpha
from ppbench.defenses.mpdp.protocol import MPDP
from ppbench.federation import secagg
from ppbench.federation.contract import Context, Defense, Round, Step
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Data, Local, Opt, Plan
from ppbench.federation.wire import SERVER, Wire
from ppbench.nets.net import initial, net_spec
from ppbench.run.cost import UNDEFENDED, encryption_time, measured_client, relative_time

BATCH, ROUNDS = 32, 3
UPLOADS = {"batch": 256, "epoch": 10_000}
"""Examples of a client from one upload to the next."""
DEFENSES: dict[str, Defense] = {
    "mpdp vector gamma": MPDP(precision="float32"),
    "mpdp scalar gamma": MPDP(precision="float32", gamma="scalar"),
    "tp_smc": TPSMC(),
    "hybridalpha": HybridAlpha(),
    "pile": PILE(fraction_bits=32),  # of ResNet56 untrained, more leave no room for the numbers; a time is the same
}


@dataclass(frozen=True)
class Noiseless(MPDP):
    """MP-DP without the noise, for the time that drawing takes."""

    def added(self, ctx: Context, me: secagg.Keys, words: int) -> torch.Tensor:
        """Return zeros, float64 [words]."""
        return torch.zeros(words, dtype=torch.float64)


NETWORKS = {"resnet20": 10, "resnet56": 100}
CLIENTS = 5, 100
LEAST = 3
"""Clients of the federation whose client is timed: how many there are is nothing to it."""
HEAVY = 6e9
"""Bytes of uploads in one round beyond which it is not run: MP-DP's of a hundred classes and clients are 35 GB."""


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("gamma", ["vector", "scalar"])
def test_training(benchmark, network, gamma):
    """What a client takes without drawing noise, beside an undefended one (Table 5, Train)."""
    torch.set_num_threads(1)
    with torch.no_grad():
        defense = Noiseless(precision="float32", gamma=gamma)
        mine, plain = (measured_client(started(d, network, LEAST)) for d in (defense, UNDEFENDED))
        pair = relative_time(mine, plain)
        keep(benchmark, f"mpdp {network} {gamma} gamma without noise", {"training_ratio": pair.ratio})
    benchmark.pedantic(plain.act, rounds=1, iterations=1)


@dataclass
class Timed:
    """A coroutine of a server, and the seconds that it took."""

    round: Round
    seconds: float = 0.0

    def send(self, replies: Mapping[int, Tree] | None) -> Step:
        """Do what the wrapped coroutine does, timed."""
        began = time.perf_counter()
        try:
            return self.round.send(replies)  # type: ignore[arg-type]  # None starts a coroutine
        finally:
            self.seconds += time.perf_counter() - began


def started(defense: Defense, network: str, clients: int) -> Federation:
    """Return a federation in which every client holds the same batch."""
    generator = torch.Generator().manual_seed(0)
    classes = NETWORKS[network]
    spec = net_spec(network, (3, 32, 32), classes, {"head_bias": False})
    plan = Plan(spec, clients, Local("gradient", batch=BATCH), loss="squared", server_opt=Opt("sgd", 0.1))
    data = Data(
        torch.rand(BATCH, 3, 32, 32, generator=generator),
        torch.nn.functional.one_hot(torch.arange(BATCH) % classes, classes).float(),
    )
    federation = Federation(defense, plan, dict.fromkeys(range(clients), data), Seeds(0), backend="loop")
    federation.start(initial(spec, 0))
    return federation


def server_seconds(federation: Federation, result: Tree) -> float:
    """Return how long the server computes in a round, where every client computes `result`."""
    defense, taken = federation.defense, []
    for number in range(ROUNDS):
        parties = federation.parties.fork()
        drive = federation.drive(federation.plan, "cost", -1, number, Wire(keep=False), parties, federation.shards)
        server = Timed(defense.round(drive.context(SERVER, 0), parties.server, range(federation.plan.clients)))
        working = drive.working(server)  # type: ignore[arg-type]  # `send` is all that it uses
        results: dict[int, Tree] | None = None
        while True:
            try:
                work = working.send(results)  # type: ignore[arg-type]  # None starts a generator
            except StopIteration:
                break
            results = dict.fromkeys(work.jobs, result)
        taken.append(server.seconds)
    return statistics.median(taken)


def nbytes(tree: Tree) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))


@pytest.fixture(scope="module")
def undefended() -> dict[tuple[str, int], float]:
    """Return the seconds of an undefended server by network and clients, once computed."""
    return {}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", DEFENSES)
def test_round(benchmark, network, name, undefended):
    """Ratios of a client, of the server and of both, for each number of clients and each amount between uploads."""
    torch.set_num_threads(1)
    defense = DEFENSES[name]
    with torch.no_grad():
        few, plain = (measured_client(started(d, network, LEAST)) for d in (defense, UNDEFENDED))
        pair = relative_time(few, plain)
        result, raw = few.computed(next(few.jobs())), plain.computed(next(plain.jobs()))
        for clients in CLIENTS:
            if nbytes(result) * clients > HEAVY:
                print(
                    f"\n{name} {network} {clients} clients: not run, {nbytes(result) * clients / 1e9:.0f} GB of uploads"
                )
                continue
            federation = started(defense, network, clients)
            if (network, clients) not in undefended:
                undefended[network, clients] = server_seconds(started(UNDEFENDED, network, clients), raw)
            mine, theirs = server_seconds(federation, result), undefended[network, clients]
            coded = encryption_time(defense.ciphering(federation.plan))
            assert coded is None or not coded.reason, coded.reason  # install the extra `crypto`
            at_client, at_server = (0.0, 0.0) if coded is None else (coded.client, coded.server)
            for until, examples in UPLOADS.items():
                one, other = (seconds * examples / BATCH for seconds in (pair.seconds, pair.undefended_seconds))
                figures = {
                    "clients": float(clients),
                    "client_ratio": (one + at_client) / other,
                    "server_ratio": (mine + at_server) / theirs,
                    "epoch_ratio": (one + at_client + mine + at_server) / (other + theirs),
                    "client_seconds": one + at_client,
                    "client_encryption_seconds": at_client,
                    "server_seconds": mine + at_server,
                    "server_encryption_seconds": at_server,
                }
                identity, _, variant = name.partition(" ")
                about = [identity, network, variant, f"{clients} clients", f"upload a {until}"]
                keep(benchmark, " ".join(filter(None, about)), figures)
    benchmark.pedantic(few.act, rounds=1, iterations=1)
