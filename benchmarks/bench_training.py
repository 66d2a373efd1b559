"""Federated training, samples a second: our engine against a plain PyTorch loop over the same clients, interleaved.

Run: OMP_NUM_THREADS=1 pytest benchmarks/bench_training.py --benchmark-only [--device cuda]
The ratio (ours over plain; 1.0 is equal) is printed and kept in the benchmark's extra_info.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ppbench.base.seeds import Seeds
from ppbench.defenses.none import NoDefense
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Data, Local, Opt, Plan
from ppbench.nets.net import Classifier, _construct, initial, net_spec

CLIENTS, EXAMPLES, PAIRS = 10, 320, 5
CASES = {
    "digits dlnet, batch 32": ("dlnet", (1, 8, 8), 32),
    "cifar dlnet, batch 32": ("dlnet", (3, 32, 32), 32),
    "cifar lenet, batch 64": ("lenet", (3, 32, 32), 64),
    "mlp, batch 32": ("mlp", (1, 8, 8), 32),
}


def plain_round(model: Classifier, shards: dict[int, Data], batch: int) -> None:
    """One FedAvg round as a person would write it: load the global weights, one epoch of Adam, average."""
    start = {n: v.clone() for n, v in model.state_dict().items()}
    mean = {n: torch.zeros_like(v) for n, v in start.items()}
    for shard in shards.values():
        model.load_state_dict(start)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        order = torch.randperm(len(shard.x)).to(shard.x.device)
        for index in order.split(batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(shard.x[index]), shard.y[index].argmax(1)).backward()
            optimizer.step()
        for name, value in model.state_dict().items():
            mean[name] += value / len(shards)
    model.load_state_dict(mean)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


@pytest.mark.parametrize("case", CASES)
def test_training_against_a_plain_loop(benchmark, case, device):
    torch.set_num_threads(1)
    name, shape, batch = CASES[case]
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(CLIENTS, EXAMPLES, *shape, generator=generator)
    y = nn.functional.one_hot(torch.randint(0, 10, (CLIENTS, EXAMPLES), generator=generator), 10).float()
    x, y = x.to(device), y.to(device)
    shards = {c: Data(x[c].clone(), y[c].clone()) for c in range(CLIENTS)}
    plan = Plan(net_spec(name, shape, 10), CLIENTS, Local(batch=batch, opt=Opt("adam", lr=1e-3)))
    ours = Federation(NoDefense(), plan, shards, Seeds(0), device)
    ours.start(initial(plan.spec, 0))
    model = _construct(plan.spec)
    model.load_state_dict(initial(plan.spec, 0))
    model.to(device)
    ours.run(1)
    plain_round(model, shards, batch)  # both are warm now
    ratios = []

    def pair() -> None:
        plain = seconds(lambda: plain_round(model, shards, batch), device)
        ratios.append(plain / seconds(lambda: ours.run(ours.round + 1), device))

    benchmark.pedantic(pair, rounds=PAIRS, iterations=1)
    benchmark.extra_info["samples/s, ours over plain"] = round(statistics.median(ratios), 2)
    print(f"\n{case}: {statistics.median(ratios):.2f} (pairs {min(ratios):.2f} to {max(ratios):.2f})")
