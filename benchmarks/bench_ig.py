"""What an iteration of inverting gradients costs: `ig` on 32 victims at once against a plain loop, one at a time.

The plain loop is what one writes first: a double backward through autograd's graph, Adam on soft signs, a clamp, one
image. Both compute the same objective in the same process on one core, in turn, so that a busy machine slows both;
times are of whole runs of STEPS iterations, ours with labels, starts and choice included. `extra_info` holds iterations
a second (one victim, one step) of both, their ratio in each round and its median, and the bytes that a victim takes.

    OMP_NUM_THREADS=1 PPBENCH_TEST_DATA=... pytest benchmarks/bench_ig.py --benchmark-only

Networks: (a) `cnn` with widths 32, 64, 128 and average pooling, 113,738 parameters; (b) `lenet`, 15,826. Images: see
`bench_dlg.py`. PPBENCH_BENCH_OUT names a folder to which the figures are written as JSON too.
"""

from __future__ import annotations

import json
import os
import runpy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Challenge
from ppbench.attacks.reconstruction.ig import IG
from ppbench.base.tree import Params
from ppbench.defenses.none import NoDefense
from ppbench.federation.evidence import simulation
from ppbench.federation.plan import Local, Plan
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER, Envelope, Model, Slot, Update
from ppbench.nets.net import initial, net_spec
from ppbench.run.cost import peak_bytes

VICTIMS, STEPS, ROUNDS = 32, 20, 5
SAMPLE = 4  # victims that the plain loop attacks in a round
os.environ.setdefault("PPBENCH_BENCH_VICTIMS", str(VICTIMS))
images: Callable[[], tuple[Tensor, Tensor, str]] = runpy.run_path(str(Path(__file__).with_name("bench_dlg.py")))[
    "images"
]


@dataclass(frozen=True)
class World:
    """A network, and what a server sees of the victims' gradients."""

    plan: Plan
    params: Params
    view: View
    observed: list[Params]
    labels: Tensor
    source: str


def world(model: str, options: dict[str, str]) -> World:
    x, labels, source = images()
    x, labels = x[:VICTIMS], labels[:VICTIMS] % 10
    spec = net_spec(model, (3, 32, 32), 10, options)
    plan, params = Plan(spec, 1, Local("gradient")), initial(spec, seed=0)
    simulate, y = simulation(plan, params), one_hot(labels, 10).float()
    observed, mail = [], []
    for i in range(len(x)):
        observed.append({n: v.detach() for n, v in simulate(x[i][None, None], y[i][None, None]).items()})
        mail.append(Envelope(i, 1, 0, SERVER, 0, 0, Model(params)))
        mail.append(Envelope(i, 1, 0, 0, SERVER, 0, Update(observed[i])))
    return World(plan, params, View("server/1", SERVER, plan, NoDefense(), tuple(mail), ()), observed, labels, source)


def plain(world: World, row: int, attack: IG) -> Tensor:
    """Return the image of one victim by the loop that one writes first."""
    weights = {n: v.clone().requires_grad_() for n, v in world.params.items()}
    flat = torch.cat([v.flatten() for v in world.observed[row].values()])
    label = world.observed[row]["head.bias"].argmin()[None]
    x = (
        0.5 + 0.02 * torch.randn(1, *world.plan.spec.shape, generator=torch.Generator().manual_seed(row))
    ).requires_grad_()
    optimizer = torch.optim.Adam([x], lr=attack.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, attack.budget)
    for _ in range(attack.budget):
        loss = torch.nn.functional.cross_entropy(world.plan.net(weights, x), label)
        gradient = torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, list(weights.values()), create_graph=True)]
        )
        distance = 1 - torch.nn.functional.cosine_similarity(gradient, flat, dim=0)
        distance = distance + attack.tv * (x.diff(dim=-1).abs().mean() + x.diff(dim=-2).abs().mean())
        (slope,) = torch.autograd.grad(distance, x)
        x.grad = (slope / slope.abs().mean()).tanh()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            x.clamp_(0, 1)
    return x.detach()


def ours(world: World, attack: IG, count: int = VICTIMS) -> None:
    attack.run(world.view, [Challenge((Slot(i, 0),), 1) for i in range(count)], torch.Generator().manual_seed(0))


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def compare(world: World, attack: IG) -> list[tuple[float, float]]:
    """Return iterations a second of ours and of the plain loop, in each round."""
    pairs = []
    for turn in range(ROUNDS):
        mine = VICTIMS * STEPS / seconds(lambda: ours(world, attack))
        rows = [(turn * SAMPLE + i) % VICTIMS for i in range(SAMPLE)]
        theirs = SAMPLE * STEPS / seconds(lambda rows=rows: [plain(world, row, attack) for row in rows])  # type: ignore[misc]
        pairs.append((mine, theirs))
    return pairs


def measured(benchmark: object, name: str, model: str, options: dict[str, str], least: float) -> None:
    torch.set_num_threads(1)
    seen, attack = world(model, options), IG(budget=STEPS)
    ours(seen, IG(budget=2))
    plain(seen, 0, IG(budget=2))
    pairs = benchmark.pedantic(compare, (seen, attack), rounds=1, iterations=1)  # type: ignore[attr-defined]
    ratios = [mine / theirs for mine, theirs in pairs]
    few, device = IG(budget=2), torch.device("cpu")
    results = {
        "network": name,
        "parameters": sum(v.numel() for v in seen.params.values()),
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(r, 2) for r in ratios],
        "ours_iterations_per_second": round(statistics.median(m for m, _ in pairs), 1),
        "plain_iterations_per_second": round(statistics.median(t for _, t in pairs), 1),
        "ours_bytes_per_victim": peak_bytes(lambda: ours(seen, few), device) // VICTIMS,
        "plain_bytes_per_victim": peak_bytes(lambda: plain(seen, 0, few), device),
        "victims": VICTIMS,
        "steps": STEPS,
        "images": seen.source,
    }
    benchmark.extra_info.update(results)  # type: ignore[attr-defined]
    print(results, flush=True)
    if "PPBENCH_BENCH_OUT" in os.environ:
        Path(os.environ["PPBENCH_BENCH_OUT"], f"ig_{model}.json").write_text(json.dumps(results, indent=1) + "\n")
    assert results["ratio"] >= least


def test_convnet_32_victims_at_once_are_no_slower_than_one_by_one(benchmark: object) -> None:
    measured(benchmark, "cnn 32,64,128 avg", "cnn", {"widths": "32,64,128", "pool": "avg"}, 1.0)


def test_lenet_32_victims_at_once_are_3_5_times_as_fast(benchmark: object) -> None:
    measured(benchmark, "lenet", "lenet", {}, 3.5)
