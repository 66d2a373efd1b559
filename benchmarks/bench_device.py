"""Searches on a device beside the same searches on the CPU of one machine: victims a second, 1, 32 and 256 at once.

Run: OMP_NUM_THREADS=1 pytest benchmarks/bench_device.py --benchmark-only --device cuda
LeNet, 32 x 32, batch 1, random weights, noise for images (time does not depend on them), 40 evaluations a victim. The
pair is measured in turn, the device's first call not counted; `extra_info` holds both times and their ratio.
PPBENCH_BENCH_VICTIMS, as "1,8", changes how many are attacked together.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Attack, Challenge
from ppbench.attacks.reconstruction.dlg import IDLG
from ppbench.attacks.reconstruction.ig import IG
from ppbench.base.seeds import Seeds
from ppbench.base.tree import moved
from ppbench.defenses.none import NoDefense
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import simulation
from ppbench.federation.plan import Data, Local, Plan
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER, Envelope, Model, Slot, Update
from ppbench.nets.net import initial, net_spec

TOGETHER = [int(word) for word in os.environ.get("PPBENCH_BENCH_VICTIMS", "1,32,256").split(",")]
PAIRS = 3
ATTACKS: dict[str, Attack] = {"idlg": IDLG(budget=40, restarts=0, slots=256), "ig": IG(budget=40, slots=256)}


def seen(count: int, device: torch.device) -> View:
    """Return the server's view of `count` clients' uploads, on `device`."""
    plan = Plan(net_spec("lenet", (3, 32, 32), 10), 1, Local("gradient"))
    params, draws = initial(plan.spec, seed=0), torch.Generator().manual_seed(0)
    simulate, mail = simulation(plan, params), list[Envelope]()
    for i in range(count):
        x, y = torch.rand(1, 1, 3, 32, 32, generator=draws), one_hot(torch.tensor([[i % 10]]), 10).float()
        update = {name: value.detach() for name, value in simulate(x, y).items()}
        mail.append(Envelope(i, 1, 0, SERVER, 0, 0, moved(Model(params), device)))
        mail.append(Envelope(i, 1, 0, 0, SERVER, 0, moved(Update(update), device)))
    return View("server/1", SERVER, plan, NoDefense(), tuple(mail), ())


def seconds(attack: Attack, view: View, count: int) -> float:
    """Return how long the attack takes; its guesses lie on the CPU, so that it is over when it returns."""
    challenges = [Challenge((Slot(i, 0),), batch=1) for i in range(count)]
    began = time.perf_counter()
    attack.run(view, challenges, torch.Generator().manual_seed(0))
    return time.perf_counter() - began


@pytest.mark.parametrize("count", TOGETHER)
@pytest.mark.parametrize("name", ATTACKS)
def test_victims_a_second_beside_the_cpu(benchmark, name: str, count: int, device: torch.device) -> None:
    here, there = seen(count, torch.device("cpu")), seen(count, device)
    seconds(replace(ATTACKS[name], budget=2), there, count)
    pairs: list[tuple[float, float]] = []

    def pair() -> None:
        pairs.append((seconds(ATTACKS[name], there, count), seconds(ATTACKS[name], here, count)))

    benchmark.pedantic(pair, rounds=PAIRS, iterations=1)
    ours, cpu = (statistics.median(column) for column in zip(*pairs, strict=True))
    figures = {"device_s": round(ours, 3), "cpu_s": round(cpu, 3), "victims_a_second": round(count / ours, 2)}
    benchmark.extra_info.update(figures | {"cpu_over_device": round(cpu / ours, 2), "device": str(device)})
    print(f"\n{name}, {count} at once: {benchmark.extra_info}")


@pytest.mark.parametrize("clients", [5])
def test_a_round_of_resnet20(benchmark, clients: int, device: torch.device) -> None:
    """One FedSGD round of MP-DP's network, batches of 256; the device's peak memory in GiB where it is a GPU."""
    plan = Plan(net_spec("resnet20", (3, 32, 32), 10), clients, Local("gradient", batch=256))
    draws = torch.Generator().manual_seed(0)
    x = torch.rand(clients, 256, 3, 32, 32, generator=draws)
    y = one_hot(torch.randint(0, 10, (clients, 256), generator=draws), 10).float()

    def seconds_on(where: torch.device, rounds: int) -> float:
        shards = {c: Data(x[c].to(where), y[c].to(where)) for c in range(clients)}
        federation = Federation(NoDefense(), plan, shards, Seeds(0), where)
        federation.start(initial(plan.spec, 0))
        federation.run(1)  # its kernels are chosen now
        began = time.perf_counter()
        federation.run(rounds)
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        return (time.perf_counter() - began) / rounds

    ours = benchmark.pedantic(seconds_on, args=(device, 10), rounds=1, iterations=1)
    cpu = seconds_on(torch.device("cpu"), 1)
    memory = round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if device.type == "cuda" else None
    figures = {"device_s": round(ours, 4), "cpu_s": round(cpu, 2), "cpu_over_device": round(cpu / ours, 1)}
    benchmark.extra_info.update(figures | {"peak_gib": memory, "device": str(device)})
    print(f"\nresnet20, {clients} clients of 256: {benchmark.extra_info}")
