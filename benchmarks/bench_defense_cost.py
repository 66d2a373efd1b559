"""What each registered defense costs a client, beside an undefended client of the same federation, on digits.

Run: OMP_NUM_THREADS=1 pytest benchmarks/bench_defense_cost.py --benchmark-only -s
Every installed defense, other people's too, in the federation that its setting asks for (`testing.small_federation`).
Bytes are those of the whole first round, exact anywhere, and asserted equal to benchmarks/results/defense_cost.json.
Peak memory is that of one client's `compute`, the same on every run of one machine and version of torch: a change is
printed. Time is the median over pairs, in turn with `none`, and is never asserted: it is printed, and in extra_info
with its interval. Where PPBENCH_KEEP is set the file is written anew.
benchmarks/README.md says how a CI finds regressions with it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch

from ppbench.base.registry import load_all
from ppbench.base.seeds import Seeds
from ppbench.federation.contract import Defense
from ppbench.federation.engine import Federation
from ppbench.nets.net import initial
from ppbench.run.cost import UNDEFENDED, Client, measured_client, peak_memory, relative_time
from ppbench.testing.small_federation import DefenseTrial, shards_for

KEPT = Path(__file__).parent / "results/defense_cost.json"
DEFENSES = [name for name in load_all("defenses") if name != "none"]


@dataclass(frozen=True)
class Exact:
    """What is the same on every run, in bytes: what travels in the first round, and a client's peak memory."""

    up: int
    down: int
    none_up: int
    none_down: int
    memory: int
    none_memory: int


@dataclass(frozen=True)
class Pair:
    """A client under a defense, its undefended twin, and what both take exactly."""

    client: Client
    twin: Client
    exact: Exact


def started(defense: Defense, like: Defense) -> Federation:
    """Return a federation of `defense` in the plan, and on the shards, that `like` asks for."""
    plan = DefenseTrial(like).plan
    federation = Federation(defense, plan, shards_for(like, plan), Seeds(0), backend="loop")
    federation.start(initial(plan.spec, 1))
    return federation


def first_round(defense: Defense, like: Defense) -> tuple[int, int]:
    """Return the bytes up and down of the first round, without set-up."""
    run = started(defense, like)
    run.run(1)
    return run.wire.up - run.setup_up, run.wire.down - run.setup_down


def measured(defense: Defense) -> Pair:
    client, twin = (measured_client(started(one, defense)) for one in (defense, UNDEFENDED))
    up, down = first_round(defense, defense)
    none_up, none_down = first_round(UNDEFENDED, defense)
    return Pair(client, twin, Exact(up, down, none_up, none_down, peak_memory(client), peak_memory(twin)))


def kept() -> dict[str, dict[str, int]]:
    content = json.loads(KEPT.read_text()) if KEPT.is_file() else {}
    assert isinstance(content, dict)
    return content


@pytest.mark.parametrize("name", DEFENSES)
def test_what_a_client_pays(benchmark, name: str) -> None:
    torch.set_num_threads(1)
    pair = measured(load_all("defenses")[name]())
    time = relative_time(pair.client, pair.twin)
    benchmark.pedantic(pair.client.act, rounds=5, iterations=1, warmup_rounds=1)
    exact = pair.exact
    ratios = {
        "time": round(time.ratio, 2),
        "bytes up": round(exact.up / exact.none_up, 3),
        "bytes down": round(exact.down / exact.none_down, 3),
        "memory": round(exact.memory / exact.none_memory, 3),
    }
    ends = [None if end is None else round(end, 2) for end in (time.low, time.high)]
    benchmark.extra_info.update({**ratios, "time interval": ends, "pairs": time.pairs, **asdict(exact)})
    print(f"\n{name}: " + ", ".join(f"{what} x{ratio:g}" for what, ratio in ratios.items()) + f" (time in {ends})")
    if os.environ.get("PPBENCH_KEEP"):
        KEPT.write_text(json.dumps(dict(sorted({**kept(), name: asdict(exact)}.items())), indent=1) + "\n")
        return
    before = kept().get(name)
    if before is None:
        return  # somebody else's defense
    now = asdict(exact)
    if now["memory"] != before["memory"]:
        print(f"{name}: a client's peak memory was {before['memory']} and is {now['memory']} bytes")
    travels = ("up", "down", "none_up", "none_down")
    assert {n: now[n] for n in travels} == {n: before[n] for n in travels}, "bytes changed; PPBENCH_KEEP=1 accepts it"
