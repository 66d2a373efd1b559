"""Cost of PBPFL on ResNet20 and ResNet56, batch 32, CIFAR-10 shapes: client against FedSGD, server against client.

Run: OMP_NUM_THREADS=1 pytest benchmarks/bench_perturbation.py --benchmark-only
Ratios are medians of interleaved repetitions, printed and kept in the benchmark's extra_info; with the environment
variable PPBENCH_FIGURES=FILE.json they are also written there, with machine and date, for `ppbench claims --figures`.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ppbench.base.autodiff import gradient
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params
from ppbench.defenses.pbpfl.perturbation import perturbed_outputs, surrogates
from ppbench.defenses.pbpfl.protocol import PBPFL
from ppbench.federation.contract import Context, Server
from ppbench.federation.plan import Batch, Local, Opt, Plan
from ppbench.nets.net import initial, net_spec

REPEATS, BATCH = 7, 32


def plan_of(network: str) -> Plan:
    local = Local("gradient", batch=BATCH)
    return Plan(net_spec(network, (3, 32, 32), 10), 10, local, loss="squared", server_opt=Opt("sgd", 0.1))


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def medians(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return median seconds by name of works that are run in turns, after one round of warming up."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(REPEATS + 1):
        for name, work in works.items():
            took = seconds(work)
            if repeat:
                times[name].append(took)
    return {name: statistics.median(some) for name, some in times.items()}


def batch_of(dtype: torch.dtype) -> Batch:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(BATCH, 3, 32, 32, generator=generator, dtype=dtype).contiguous(memory_format=torch.channels_last)
    y = torch.nn.functional.one_hot(torch.arange(BATCH) % 10, 10).to(dtype)
    return Batch(x, y, torch.ones(BATCH, dtype=dtype))


def keep(benchmark: pytest.FixtureRequest, name: str, figures: dict[str, float]) -> None:
    """Print the figures, keep them in the benchmark's record and, if asked, in a file."""
    print(f"\n{name}: " + ", ".join(f"{key} {value:.3g}" for key, value in figures.items()))
    benchmark.extra_info.update(figures)
    path = os.environ.get("PPBENCH_FIGURES")
    if path:
        file = Path(path)
        known = json.loads(file.read_text()) if file.exists() else {}
        known[name] = {
            **figures,
            "machine": platform.machine(),
            "torch": torch.__version__,
            "date": time.strftime("%F"),
        }
        file.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


@pytest.mark.parametrize("network", ["resnet20", "resnet56"])
@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_pbpfl_client_and_server(benchmark, precision, network):
    """The extra cost of a client is three backward passes for one; the server's share is small."""
    torch.set_num_threads(1)
    defense, plan = PBPFL(kappa=10.0, precision=precision), plan_of(network)
    dtype, net = defense.dtype, plan.net
    params = initial(plan.spec, 0)
    server = Server(params, (), torch.full((10,), 100), ())
    ctx = Context(plan, 1, "real", -1, torch.Generator(), Seeds(1).secret("party"))
    kept, sent = defense.broadcast(ctx, server)
    batch = batch_of(dtype)
    weights: Params = {n: p.to(dtype) for n, p in params.items()}
    recovered = surrogates(net, sent.params, batch, sent.direction[None], defense.bias_masked)

    def forward() -> None:
        with torch.enable_grad():
            perturbed_outputs(net, {n: p.detach().requires_grad_() for n, p in sent.params.items()}, batch.x, True)

    with torch.no_grad():  # as the engine runs a client
        took = medians(
            {
                "forward": forward,
                "plain": lambda: gradient(lambda p: plan.objective(p, batch.x, batch.y, batch.w), weights),
                "client": lambda: surrogates(net, sent.params, batch, sent.direction[None], defense.bias_masked),
                "perturb": lambda: defense.broadcast(replace(ctx, generator=torch.Generator().manual_seed(2)), server),
                "recover": lambda: defense.recover(plan, kept, recovered),
            }
        )
    figures = {
        "client_ratio": took["client"] / took["plain"],
        "backward_ratio": (took["client"] - took["forward"]) / (took["plain"] - took["forward"]),
        "server_share": (took["perturb"] + took["recover"]) / took["client"],
        "perturb_share": took["perturb"] / took["client"],
        "recover_share": took["recover"] / took["client"],
        "client_seconds": took["client"],
    }
    keep(benchmark, f"pbpfl {network} 32x32 {precision} beside {precision}", figures)
    if precision == "float64":  # the default beside what an undefended client computes in
        half = batch_of(torch.float32)
        with torch.no_grad():
            took |= medians({"float32": lambda: gradient(lambda p: plan.objective(p, half.x, half.y, half.w), params)})
        keep(
            benchmark,
            f"pbpfl {network} 32x32 float64 beside float32",
            {"client_ratio": took["client"] / took["float32"]},
        )
    benchmark.pedantic(
        lambda: surrogates(net, sent.params, batch, sent.direction[None], defense.bias_masked), rounds=1, iterations=1
    )


def test_no_copy_of_the_model_per_sample(benchmark):
    """No tensor as large as batch x model is ever made: the profile's largest allocation says so."""
    torch.set_num_threads(1)
    defense, plan = PBPFL(), plan_of("resnet20")
    net = plan.net
    params = {n: p.double() for n, p in initial(plan.spec, 0).items()}
    batch, direction = batch_of(torch.float64), torch.rand(1, 10, dtype=torch.float64)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        surrogates(net, params, batch, direction, defense.bias_masked)
    counts = {event.key: event.count for event in profiled.key_averages()}
    largest = max(event.self_cpu_memory_usage for event in profiled.events())
    figures = {
        "largest_allocation_mb": largest / 1e6,
        "batch_times_model_mb": BATCH * net.parameter_count * 8 / 1e6,
        "forward_convolutions": float(counts.get("aten::convolution", 0)),
        "backward_convolutions": float(counts.get("aten::convolution_backward", 0)),
    }
    keep(benchmark, "pbpfl resnet20 profile", figures)
    assert largest < BATCH * net.parameter_count * 8
    assert figures["backward_convolutions"] == 3 * figures["forward_convolutions"]
    benchmark.pedantic(lambda: surrogates(net, params, batch, direction, True), rounds=1, iterations=1)
