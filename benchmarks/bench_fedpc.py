"""FedPC beside its baselines on digits: what the ternaries are worth, which sign, how accuracy falls with N, who leads.

Run: python benchmarks/bench_fedpc.py [--seeds 12] [--rounds 30] [--out benchmarks/results/fedpc.json]
About ten minutes on one core. All methods of a seed share the partition, the initial weights and each client's draw
of batch size and local epochs, so that differences are paired; accuracy is the mean over the last five rounds.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params, Tree
from ppbench.defenses.baselines import Central, Phong
from ppbench.defenses.fedpc.protocol import FedPC
from ppbench.defenses.none import NoDefense
from ppbench.federation.contract import Context, Defense, Job
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Data, Local, Opt, Plan
from ppbench.nets.net import initial, net_spec
from ppbench.task.partition import partition
from ppbench.task.user_data import open_dataset

LAST = 5
BUDGETS = FedPC(rates="1")  # as in the paper, where every worker starts from one learning rate
Floats = NDArray[np.float64]


class _Budgets(Defense):
    """Clients that train with the private batch sizes and epochs that FedPC's clients draw."""

    def init_client(self, ctx: Context, params: Params) -> Tree:
        return BUDGETS.init_client(ctx, params)

    def prepare(self, ctx: Context, me: Tree, message: Tree, data: Data) -> Job | None:
        return BUDGETS.prepare(ctx, me, message, data)


@dataclass(frozen=True)
class FedAvg(_Budgets, NoDefense):
    """FedAvg with FedPC's local budgets."""


@dataclass(frozen=True)
class Chain(_Budgets, Phong):
    """Weight transmission with FedPC's local budgets."""


@dataclass(frozen=True)
class Outcome:
    """One training. accuracy: mean of the last rounds; pilots: [R] of FedPC; sizes: [N] examples; bytes: of a round."""

    accuracy: float
    pilots: list[int]
    sizes: list[int]
    bytes: float


def trained(defense: Defense, clients: int, split: str, seed: int, rounds: int) -> Outcome:
    dataset, seeds = open_dataset("digits", seed=0), Seeds(seed)
    parts = partition(split, dataset.train.strata, clients, seeds.seed("partition"))
    shards = {client: dataset.train.take(index) for client, index in enumerate(parts)}
    spec = net_spec("mlp", dataset.shape, dataset.classes, {"hidden": "48"})
    plan = Plan(spec, clients, Local(batch=64, opt=Opt("sgd", 0.03, 0.9)))
    run = Federation(defense, plan, shards, seeds)
    run.start(initial(spec, seeds.seed("model")))
    test, curve = dataset.test.take(torch.arange(len(dataset.test))), list[float]()
    finished = run.run(rounds, lambda r: curve.append(run.accuracy(test)) if r > rounds - LAST else None)
    pilots = run.parties.server.own.pilots.tolist() if isinstance(defense, FedPC) else []
    size = (run.wire.up + run.wire.down - run.setup_up - run.setup_down) / max(1, run.round)
    return Outcome(
        float(np.mean(curve)) if finished else float("nan"), pilots, [len(s.x) for s in shards.values()], size
    )


def interval(values: Floats) -> tuple[float, float]:
    """Return the mean and the half-width of its 95 % t interval."""
    return float(values.mean()), float(stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5)


def methods(beta: float) -> dict[str, Callable[[], Defense]]:
    signs = {s: (lambda s=s: FedPC(beta=beta, ternary_sign=s, rates="1")) for s in ("plus", "none", "minus")}
    return {
        "central": Central,
        "phong": Chain,
        "fedavg": FedAvg,
        **signs,
        "secret_rates": lambda: FedPC(beta=beta),
    }


def compared(clients: int, split: str, beta: float, seeds: int, rounds: int) -> dict[str, float]:
    """Return each method's accuracy with its half-width, and paired differences to the pilot alone (sign none)."""
    accuracy = {}
    for name, make in methods(beta).items():
        accuracy[name] = np.array([trained(make(), clients, split, s, rounds).accuracy for s in range(seeds)])
    figures = {}
    for name, values in accuracy.items():
        figures[name], figures[f"{name}_half"] = interval(values)
    for name in ("plus", "minus", "fedavg"):
        figures[f"{name}_less_none"], figures[f"{name}_less_none_half"] = interval(accuracy[name] - accuracy["none"])
    return figures


def falling(seeds: int, rounds: int) -> dict[str, float]:
    """Return FedPC's accuracy at beta .2 by number of clients, and the paired fall from 3 to 10 clients."""
    by = {n: [trained(FedPC(rates="1"), n, "imbalanced", s, rounds) for s in range(seeds)] for n in range(3, 11)}
    figures = {}
    for clients, runs in by.items():
        figures[f"n{clients}"], figures[f"n{clients}_half"] = interval(np.array([r.accuracy for r in runs]))
        figures[f"n{clients}_bytes"] = runs[0].bytes
    ends = [np.array([r.accuracy for r in by[n]]) for n in (3, 10)]
    figures["fall"], figures["fall_half"] = interval(ends[0] - ends[1])
    return figures


def leading(seeds: int, rounds: int) -> dict[str, float]:
    """Return who is pilot with 5 clients: rounds led, by rank of size (1 is the largest), and repeats in a row."""
    runs = [trained(FedPC(rates="1"), 5, "imbalanced", s, rounds) for s in range(seeds)]
    share, never, again = np.zeros(5), 0, 0
    for run in runs:
        order = np.argsort(run.sizes)[::-1]
        led = np.bincount(run.pilots, minlength=5)
        share += led[order] / rounds / seeds
        never += int((led == 0).sum())
        again += int((np.diff(run.pilots) == 0).sum())
    return {
        **{f"share_of_rounds_size_rank_{rank + 1}": float(value) for rank, value in enumerate(share)},
        "clients_never_pilot": never / seeds,
        "same_pilot_twice_in_a_row": again / seeds / (rounds - 1),
    }


def write(path: Path, results: Mapping[str, Mapping[str, float]], seeds: int, rounds: int) -> None:
    about = {
        "seeds": seeds,
        "rounds": rounds,
        "machine": platform.machine(),
        "torch": torch.__version__,
        "date": time.strftime("%F"),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({k: {**v, **about} for k, v in results.items()}, indent=1, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "fedpc.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for clients, split, beta in ((5, "imbalanced", 0.2), (10, "imbalanced", 0.8), (10, "dirichlet:0.5", 0.8)):
        name = f"fedpc mlp, {clients} clients, {split}, beta {beta:g}"
        results[name] = compared(clients, split, beta, options.seeds, options.rounds)
        print(name, json.dumps(results[name], indent=1), flush=True)
    results["fedpc mlp, by clients, beta 0.2"] = falling(options.seeds, options.rounds)
    results["fedpc mlp, pilots, 5 clients"] = leading(options.seeds, options.rounds)
    for name in list(results)[-2:]:
        print(name, json.dumps(results[name], indent=1), flush=True)
    write(options.out, results, options.seeds, options.rounds)


if __name__ == "__main__":
    main()
