"""Reference runs of an audit: 8 federations in lockstep (`run_many`) against the same 8 one after the other, in pairs.

Run: OMP_NUM_THREADS=1 pytest benchmarks/bench_references.py --benchmark-only -s
Both sides of a pair run in turn in one process on one thread, so that what else the machine does hits both. Times the
ratio (one after the other over at once; above 1 lockstep is faster) and the peak of memory that a round allocates; both
are printed, and written to benchmarks/results/references.json where PPBENCH_KEEP is set.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from ppbench.base.seeds import Seeds
from ppbench.defenses.dp import DP
from ppbench.defenses.none import NoDefense
from ppbench.federation.contract import Defense
from ppbench.federation.engine import Federation, run_many
from ppbench.federation.plan import Data, Local, Opt, Plan
from ppbench.nets.net import initial, net_spec
from ppbench.run.cost import peak_bytes

RUNS, CLIENTS, EXAMPLES, ROUNDS, PAIRS = 8, 10, 72, 10, 5
CASES: dict[str, tuple[Defense, str, str]] = {
    "digits mlp, parallel": (NoDefense(), "mlp", "parallel"),
    "digits mlp, round robin": (NoDefense(), "mlp", "round_robin"),
    "digits dlnet, parallel": (NoDefense(), "dlnet", "parallel"),
    "digits dlnet, round robin": (NoDefense(), "dlnet", "round_robin"),
    "digits dlnet under dp, parallel": (DP(), "dlnet", "parallel"),
}
RESULTS = Path(__file__).parent / "results" / "references.json"


def federations(case: str, backend: str = "auto") -> list[Federation]:
    """Return the started federations of a case: as many images a client as half of the digits gives ten clients."""
    defense, model, schedule = CASES[case]
    plan = Plan(net_spec(model, (1, 8, 8), 10), CLIENTS, Local(batch=32, opt=Opt("adam", lr=1e-3)), schedule=schedule)
    generator, made = torch.Generator().manual_seed(0), []
    for run in range(RUNS):
        x = torch.rand(CLIENTS, EXAMPLES, 1, 8, 8, generator=generator)
        y = nn.functional.one_hot(torch.randint(0, 10, (CLIENTS, EXAMPLES), generator=generator), 10).float()
        shards = {c: Data(x[c].clone(), y[c].clone()) for c in range(CLIENTS)}
        fed = Federation(defense, plan, shards, Seeds(run), backend=backend)
        fed.start(initial(plan.spec, 0))
        made.append(fed)
    return made


def alone(runs: list[Federation], rounds: int) -> None:
    for fed in runs:
        fed.run(fed.round + rounds)


def at_once(runs: list[Federation], rounds: int) -> None:
    run_many(runs, runs[0].round + rounds)


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def keep(case: str, figures: dict[str, float]) -> None:
    """Write a case's figures into the results, beside those of the others."""
    content = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    content["machine"] = f"{platform.machine()}, torch {torch.__version__}, 1 thread"
    content["runs"], content["clients"], content["examples a client"] = RUNS, CLIENTS, EXAMPLES
    content.setdefault("cases", {})[case] = figures
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")


@pytest.mark.parametrize("case", CASES)
def test_references_at_once_against_one_after_the_other(benchmark, case):
    torch.set_num_threads(1)
    one, many = federations(case), federations(case)
    alone(one, 1)
    at_once(many, 1)  # both are warm now
    ratios: list[float] = []
    times: list[float] = []

    def pair() -> None:
        slow = seconds(partial(alone, one, ROUNDS))
        times.append(seconds(partial(at_once, many, ROUNDS)))
        ratios.append(slow / times[-1])

    benchmark.pedantic(pair, rounds=PAIRS, iterations=1)
    cpu = torch.device("cpu")
    memory = [peak_bytes(partial(work, runs, 1), cpu) / 2**20 for work, runs in ((alone, one), (at_once, many))]
    figures = {
        "ratio": round(statistics.median(ratios), 2),
        "ratio_low": round(min(ratios), 2),
        "ratio_high": round(max(ratios), 2),
        "seconds_a_round_at_once": round(statistics.median(times) / ROUNDS, 4),
        "memory_alone_mib": round(memory[0], 1),
        "memory_at_once_mib": round(memory[1], 1),
    }
    benchmark.extra_info.update(figures)
    print(f"\n{case}: {figures}")
    if os.environ.get("PPBENCH_KEEP"):
        keep(case, figures)
