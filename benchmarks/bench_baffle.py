"""BAFFLE beside backpropagation: a client's memory, its time, and what the model learns.

Run: OMP_NUM_THREADS=1 python benchmarks/bench_baffle.py [memory] [time] [cost] [digits] [mnist]
One row of "digits" alone: "digits:twice K=100".
Figures go to benchmarks/results/baffle.json, with machine and date, in the form that `ppbench claims --figures` reads.
"mnist" needs the folder PPBENCH_TEST_DATA with MNIST as parquet files.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from scipy import stats
from torch import Tensor

from ppbench.base.autodiff import gradient
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params
from ppbench.defenses.baffle import Baffle, Scheme, step_seeds
from ppbench.defenses.none import NoDefense
from ppbench.federation.contract import Defense, Job
from ppbench.federation.drive import channels_last
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Batch, Data, Layout, Local, Opt, Plan
from ppbench.nets.net import OptionValue, initial, net_spec
from ppbench.run.cost import peak_bytes
from ppbench.task.user_data import open_dataset

RESULTS = Path(__file__).parent / "results" / "baffle.json"
NETWORKS, SHAPE, BATCH = ("lenet_baffle", "wrn_10_2"), (3, 32, 32), 128
ADAM = Opt("adam", 0.01, betas=(0.9, 0.99))
CPU = torch.device("cpu")
SCHEMES: tuple[Scheme, ...] = ("central", "twice")


def keep(name: str, figures: dict[str, float]) -> None:
    """Print figures and write them into the results beside what is there."""
    print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in figures.items()), flush=True)
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[name] = {**figures, "machine": platform.machine(), "torch": torch.__version__, "date": time.strftime("%F")}
    RESULTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


# -- a client's step ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Client:
    """One client's step on a batch of random images, by backpropagation or by forward passes."""

    plan: Plan
    job: Job

    @staticmethod
    def of(model: str, batch: int, shape: tuple[int, ...] = SHAPE, **options: OptionValue) -> Client:
        plan = Plan(net_spec(model, shape, 10, options), 1, Local("gradient", batch=batch))
        x = torch.rand(1, batch, *shape, generator=torch.Generator().manual_seed(0))
        batches = Batch(x, torch.eye(10)[torch.arange(batch) % 10][None], torch.ones(1, batch))
        job = Job(initial(plan.spec, 0), batches, torch.tensor(0.1), (), step_seeds(1, 1))
        return Client(plan, channels_last(job))  # as the engine lays images out

    def backpropagation(self) -> None:
        one = self.job.batches
        with torch.no_grad():  # as the engine runs a client
            gradient(lambda p: self.plan.objective(p, one.x[0], one.y[0], one.w[0]), self.job.start)

    def sliced(self, examples: int) -> None:
        """Backpropagate some examples at a time and add up, as anybody can who has little memory."""
        one, total = self.job.batches, {n: torch.zeros_like(v) for n, v in self.job.start.items()}

        def slice_loss(params: Params, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
            return self.plan.objective(params, x, y, w)

        with torch.no_grad():
            for x, y, w in zip(*(part[0].split(examples) for part in (one.x, one.y, one.w)), strict=True):
                gradients = gradient(partial(slice_loss, x=x, y=y, w=w), self.job.start)
                for name, value in total.items():
                    value.add_(gradients[name], alpha=len(x) / one.x.shape[1])

    def forward(self, defense: Baffle) -> Callable[[], object]:
        return lambda: defense.compute(self.plan, self.job)


def medians(works: dict[str, Callable[[], object]], repeats: int = 3) -> dict[str, float]:
    """Return median seconds by name of works run in turns, after one round of warming up."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(repeats + 1):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            if repeat:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(some) for name, some in times.items()}


def memory() -> None:
    """Table 4: what a step allocates at its peak beyond weights and batch; deterministic."""
    for model in NETWORKS:
        client = Client.of(model, BATCH)
        plain = peak_bytes(client.backpropagation, CPU)
        figures = {
            "weights_mb": 4 * client.plan.net.parameter_count / 1e6,
            "batch_mb": client.job.batches.x.numel() * 4 / 1e6,
            "backpropagation_mb": plain / 1e6,
        }
        for chunk in (1, 4, 16):
            peak = peak_bytes(client.forward(Baffle(k=max(chunk, 2), chunk=chunk, examples=BATCH)), CPU)
            figures |= {f"chunk{chunk}_mb": peak / 1e6, f"chunk{chunk}_ratio": peak / plain}
        for examples in (32, 8):
            peak = peak_bytes(client.forward(Baffle(k=2, chunk=1, examples=examples)), CPU)
            figures |= {f"examples{examples}_mb": peak / 1e6, f"examples{examples}_ratio": peak / plain}
            alike = peak_bytes(partial(client.sliced, examples), CPU)
            figures |= {f"sliced{examples}_mb": alike / 1e6, f"sliced{examples}_ratio": peak / alike}
        keep(f"memory {model} batch {BATCH}", figures)


def times() -> None:
    """Forward passes beside a backpropagation: in a loop, and stacks of models under vmap."""
    works = (
        ("mlp", (1, 8, 8), 14),
        ("lenet_baffle", SHAPE, 32),
        ("lenet_baffle", SHAPE, BATCH),
        ("wrn_10_2", SHAPE, 32),
    )
    for model, shape, batch in works:
        options: dict[str, OptionValue] = {"hidden": "32", "activation": "hardswish"} if model == "mlp" else {}
        client, k = Client.of(model, batch, shape, **options), 16
        runs: dict[str, Callable[[], object]] = {"backpropagation": client.backpropagation}
        runs |= {f"chunk{chunk}": client.forward(Baffle(k=k, chunk=chunk)) for chunk in (1, 4, 16)}
        took = medians(runs)
        figures = {
            "backpropagation_seconds": took["backpropagation"],
            "passes_a_backpropagation": took["backpropagation"] / (took["chunk1"] / (2 * k)),
            "vmap4_to_loop": took["chunk4"] / took["chunk1"],
            "vmap16_to_loop": took["chunk16"] / took["chunk1"],
        }
        keep(f"time {model} batch {batch}", figures)


def cost() -> None:
    """What K = 100 costs a client in time, for the paper's K / 5."""
    client = Client.of("lenet_baffle", BATCH)
    took = medians({"plain": client.backpropagation, "client": client.forward(Baffle(k=100, chunk=1))}, 1)
    keep(f"baffle lenet_baffle K=100, batch {BATCH}", {"client_ratio": took["client"] / took["plain"]})


# -- what is learnt ----------------------------------------------------------------------------------------------------


def trained(
    defense: Defense, plan: Plan, shards: dict[int, Data], test: Data, rounds: int, seed: int
) -> dict[str, float]:
    """Return accuracies of the last weights, of those delivered, and of an average whose decay is constant."""
    fed = Federation(defense, plan, shards, Seeds(seed), backend="loop")
    fed.start(initial(plan.spec, seed + 1))
    layout = Layout.of(fed.parties.server.params)
    constant = layout.pack(fed.parties.server.params)

    def average(_: int) -> None:
        constant.lerp_(layout.pack(fed.parties.server.params), 0.005)

    began = time.perf_counter()
    finished = fed.run(rounds, average)

    def accuracy(flat: Tensor) -> float:
        with torch.no_grad():
            hits = plan.net(layout.unpack(flat), test.x).argmax(1) == test.y.argmax(1)
        return float(hits.double().mean())

    return {
        "finished": float(finished),
        "last": accuracy(layout.pack(fed.parties.server.params)),
        "delivered": fed.accuracy(test),
        "constant": accuracy(constant),
        "seconds": time.perf_counter() - began,
    }


def over_seeds(name: str, runs: list[dict[str, float]]) -> None:
    """Keep means over seeds and half-widths of their 95 % t-intervals."""
    figures: dict[str, float] = {"seeds": len(runs)}
    for key in ("last", "delivered", "constant", "seconds"):
        values = [run[key] for run in runs]
        figures[key] = statistics.mean(values)
        if len(values) > 1 and key != "seconds":
            wide = float(stats.t.ppf(0.975, len(values) - 1))
            figures[f"{key}_pm"] = wide * statistics.stdev(values) / len(values) ** 0.5
    keep(name, figures)


def digits(only: str = "", seeds: int = 3) -> None:
    """Both schemes over K, and what averaging and ReLU do: an MLP of 2,410 weights, 10 clients, 200 rounds."""
    data = open_dataset("digits", seed=0)
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))
    shards = {c: data.train.take(part) for c, part in enumerate(order.chunk(10))}
    test = data.test.take(torch.arange(len(data.test)))
    baffles = {f"{s} K={k}": Baffle(k=k, scheme=s) for k in (20, 100) for s in SCHEMES}
    baffles["twice K=300"] = Baffle(k=300, scheme="twice")
    rows: dict[str, tuple[Defense, str]] = {"backpropagation": (NoDefense(), "hardswish")}
    rows |= {name: (defense, "hardswish") for name, defense in baffles.items()}
    rows["twice K=100 relu"] = (Baffle(k=100, scheme="twice"), "relu")
    for name, (defense, activation) in rows.items():
        if only not in ("", name):
            continue
        spec = net_spec("mlp", data.shape, 10, {"hidden": "32", "activation": activation})
        plan = Plan(spec, 10, Local("gradient", batch=14, opt=ADAM), server_opt=ADAM)
        over_seeds(f"digits mlp {name}", [trained(defense, plan, shards, test, 200, seed) for seed in range(seeds)])


def mnist(rounds: int = 100, seeds: int = 1) -> None:
    """The LeNet on MNIST: two clients of batch 32, K = 100, against backpropagation for as many rounds."""
    folder = os.environ.get("PPBENCH_TEST_DATA")
    if not folder:
        print("mnist is left out: PPBENCH_TEST_DATA names no folder.")
        return
    data = open_dataset(f"parquet:{folder}/mnist", seed=0)
    shards = {c: data.train.take(torch.arange(c * 3000, (c + 1) * 3000)) for c in range(2)}
    test = data.test.take(torch.arange(2000))
    plan = Plan(net_spec("lenet_baffle", data.shape, 10), 2, Local("gradient", batch=32, opt=ADAM), server_opt=ADAM)
    slower = replace(ADAM, lr=0.003)
    rows: dict[str, tuple[Defense, Plan]] = {
        "backpropagation": (NoDefense(), plan),
        "backpropagation lr=.003": (NoDefense(), replace(plan, server_opt=slower)),
        "twice K=100": (Baffle(k=100, scheme="twice"), plan),
    }
    for name, (defense, one) in rows.items():
        runs = [trained(defense, one, shards, test, rounds, seed) for seed in range(seeds)]
        over_seeds(f"mnist lenet_baffle {name}, {rounds} rounds", runs)


PARTS: dict[str, Callable[..., None]] = {
    "memory": memory,
    "time": times,
    "cost": cost,
    "digits": digits,
    "mnist": mnist,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for part in sys.argv[1:] or PARTS:
        name, _, row = part.partition(":")
        PARTS[name](*([row] if row else []))
