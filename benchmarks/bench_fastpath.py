"""The slope of the matching loss by a chain of layers, beside vmap over victims, which networks without a chain take.

Each test times both in one process, interleaved, as the least CPU time of an evaluation; `extra_info` holds both in
milliseconds a victim and their ratio. Chains run from their traces, as they do after a hundred and fifty evaluations.

    OMP_NUM_THREADS=1 pytest benchmarks/bench_fastpath.py --benchmark-only -s
"""

from __future__ import annotations

import time

import pytest
import torch

from ppbench.attacks.reconstruction.fastpath import chain as traces
from ppbench.attacks.reconstruction.fastpath.chain import ChainObjective
from ppbench.attacks.reconstruction.search.problem import MappedObjective, Objective, objective
from ppbench.federation.evidence import Evidence, simulation
from ppbench.federation.plan import Plan
from ppbench.federation.wire import Slot
from ppbench.nets.net import initial, net_spec

SECONDS = 1.0


def least(paths: dict[str, Objective], x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    """Return the least CPU milliseconds a victim of one evaluation, by path."""
    best = dict.fromkeys(paths, float("inf"))
    arguments = (x, y, x.new_zeros(len(x), 0), torch.arange(len(x)))
    for _ in range(4):  # the trace is made, and torch has looked at it
        paths["chain"](*arguments)
    end = time.process_time() + SECONDS * len(paths)
    while time.process_time() < end:
        for name, path in paths.items():
            begin = time.process_time()
            path(*arguments)
            best[name] = min(best[name], 1e3 * (time.process_time() - begin) / len(x))
    return best


@pytest.mark.parametrize("victims", [1, 8, 32])
@pytest.mark.parametrize("batch", [1, 4, 8])
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ("lenet", (1, 8, 8)),
        ("dlnet", (1, 28, 28)),
        ("lenet", (3, 32, 32)),
        ("dlnet", (3, 32, 32)),
        ("cnn", (3, 32, 32)),
        ("mlp", (3, 32, 32)),
    ],
)
def test_chain_beside_vmap(
    benchmark: object,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    shape: tuple[int, ...],
    batch: int,
    victims: int,
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setitem(traces.WARM, "cpu", 1)
    plan, g = Plan(net_spec(model, shape, 10), 1), torch.Generator().manual_seed(0)
    params = initial(plan.spec, 0)
    simulate, evidences = simulation(plan, params), []
    for v in range(victims):
        x, y = torch.rand(1, batch, *shape, generator=g), torch.eye(10)[None, torch.randint(10, (batch,), generator=g)]
        observed = {name: value.detach() for name, value in simulate(x, y).items()}
        evidences.append(Evidence((Slot(v, 0),), observed, simulate, params))
    x, y = torch.rand(victims, batch, *shape, generator=g), torch.rand(victims, batch, 10, generator=g).softmax(-1)
    chain = objective(evidences, plan, batch, torch.float32)
    assert isinstance(chain, ChainObjective)
    paths: dict[str, Objective] = {"chain": chain, "vmap": MappedObjective(evidences)}
    cost = benchmark.pedantic(least, (paths, x, y), rounds=1, iterations=1)  # type: ignore[attr-defined]
    ratio = cost["chain"] / cost["vmap"]
    benchmark.extra_info.update({**cost, "ratio": ratio})  # type: ignore[attr-defined]
    print(f"{model} {shape} batch {batch}, {victims} victims: {cost}, ratio {ratio:.2f}")
