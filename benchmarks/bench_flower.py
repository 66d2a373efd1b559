"""A round of a Flower app as the bench records it, beside Flower's own simulation: same app, clients, data, in one run.

FedAvg over an app that trains a small network on random images: by Flower's simulation on Ray, as `flwr run` does by
default; on the bench's grid, every message kept; and as a plain loop, without messages, which says what of a round is
training. The three take turns, round by round: a simulated round is from its `configure_train` to the end of its
`aggregate_train`, and before the next one begins the same process runs a round the other two ways, while Ray's workers
wait. The first WARM rounds are left out, in which the workers load torch. Needs: pip install 'flwr[simulation]'.

    OMP_NUM_THREADS=1 python benchmarks/bench_flower.py [--clients 10] [--examples 320] [--rounds 20] [--repeats 3]
        [--cpus 1]  # that Ray keeps for a client, of two: 2 for one client at a time, as the other two ways have it
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ppbench.base import registry
from ppbench.base.registry import load_plugin
from ppbench.base.seeds import Seeds
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Data, Local, Opt, Plan
from ppbench.nets.net import initial, net_spec

BATCH, LR, WARM = 32, 0.1, 2
TASK = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.hidden, self.out = nn.Conv2d(3, 8, 5, stride=2), nn.Linear(8 * 14 * 14, 32), nn.Linear(32, 10)
    def forward(self, x):
        return self.out(torch.relu(self.hidden(torch.relu(self.conv(x)).flatten(1))))
def load_data(partition, partitions, batch):
    draws = torch.Generator().manual_seed(partition)
    x, y = torch.rand(EXAMPLES, 3, 32, 32, generator=draws), torch.randint(0, 10, (EXAMPLES,), generator=draws)
    return DataLoader(TensorDataset(x, y), batch_size=batch, shuffle=True), None
"""
CLIENT = f"""
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from timed_app.task import Net, load_data
app = ClientApp()
def local(start, loader):
    net = Net()
    net.load_state_dict(start)
    optimizer = torch.optim.SGD(net.parameters(), lr={LR})
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net.state_dict()
@app.train()
def train(msg, context):
    torch.set_num_threads(1)
    place = context.node_config
    loader, _ = load_data(place["partition-id"], place["num-partitions"], {BATCH})
    found = local(msg.content["arrays"].to_torch_state_dict(), loader)
    metrics = MetricRecord({{"num-examples": len(loader.dataset)}})
    return Message(RecordDict({{"arrays": ArrayRecord(found), "metrics": metrics}}), reply_to=msg)
"""
SERVER = """
import logging
import time
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from timed_app.task import Net
app = ServerApp()
ROUNDS, TOOK, BETWEEN, BEGUN, TURN = [1], [], [], [0.0], []
class Timed(FedAvg):
    def configure_train(self, *args, **named):
        if not TURN:
            BEGUN[0] = time.perf_counter()
        return super().configure_train(*args, **named)
    def aggregate_train(self, server_round, replies):
        found = super().aggregate_train(server_round, replies)
        if not TURN:  # the bench's grid runs this strategy too, in its turn
            TURN.append(server_round)
            TOOK.append([time.perf_counter() - BEGUN[0]])
            TOOK[-1] += [call(server_round) for call in BETWEEN]
            TURN.clear()
        return found
@app.main()
def main(grid, context):
    logging.getLogger("flwr").setLevel(logging.ERROR)
    strategy = Timed(fraction_evaluate=0.0)
    strategy.start(grid=grid, initial_arrays=ArrayRecord(Net().state_dict()), num_rounds=ROUNDS[0])
"""
PROJECT = """
[tool.flwr.app.components]
serverapp = "timed_app.server:app"
clientapp = "timed_app.client:app"
[tool.ppbench]
network = "timed_app.task:Net"
data = "timed_app.task:load_data"
"""


def written(folder: Path, examples: int) -> None:
    """Write the app, with so many examples a client."""
    package = folder / "timed_app"
    package.mkdir()
    for name, text in (
        ("__init__", ""),
        ("task", f"EXAMPLES = {examples}{TASK}"),
        ("client", CLIENT),
        ("server", SERVER),
    ):
        (package / f"{name}.py").write_text(text)
    (folder / "pyproject.toml").write_text(PROJECT)


def recorded(folder: Path, clients: int, examples: int) -> Callable[[int], float]:
    """Return what runs a round on the bench's grid, every message kept, and says its seconds."""
    name = f"flower:{folder}"
    registry.admit(name)
    defense = load_plugin("defenses", name)()
    plan = Plan(net_spec("timed_app.task:Net", (3, 32, 32), 10, {}), clients, Local("delta", 1, BATCH, Opt("sgd", LR)))
    run = Federation(defense, plan, {client: _data(client, examples) for client in range(clients)}, Seeds(0))
    run.start(initial(plan.spec, 0))
    run.wire.keep = True

    def step(number: int) -> None:
        with _identity():
            assert run.run(number)

    return lambda number: _seconds(lambda: step(number))


def plain(loads: Callable[..., Any], clients: int) -> Callable[[int], float]:
    """Return what runs a round of the same training in a loop, on what `loads` gives, and says its seconds."""
    from timed_app import client, task

    shared = [task.Net().state_dict()]

    def step() -> None:
        results = [client.local(shared[0], loads(c, clients, BATCH)[0]) for c in range(clients)]
        shared[0] = {name: sum(state[name] for state in results) / clients for name in shared[0]}

    return lambda _: _seconds(step)


def rounds(folder: Path, loads: Callable[..., Any], args: argparse.Namespace) -> list[list[float]]:
    """Return the seconds of each round: simulated, recorded, plain (RuntimeError: the simulation did not end)."""
    from flwr.simulation import run_simulation
    from timed_app import client, server  # type: ignore[import-not-found]  # written above

    server.ROUNDS[0] = args.rounds + WARM
    server.TOOK.clear()
    server.BETWEEN[:] = [recorded(folder, args.clients, args.examples), plain(loads, args.clients)]
    resources: Any = {"num_cpus": args.cpus, "num_gpus": 0.0}
    ray: Any = {"num_cpus": 2, "object_store_memory": 200_000_000, "include_dashboard": False}
    config: Any = {"client_resources": resources, "init_args": ray}
    run_simulation(server.app, client.app, args.clients, backend_config=config)
    if len(server.TOOK) != args.rounds + WARM:
        raise RuntimeError(f"{len(server.TOOK)} of {args.rounds + WARM} rounds came to an end")
    return [*server.TOOK[WARM:]]


@contextmanager
def _identity() -> Iterator[None]:
    """Put back afterwards who Flower says is running, which the bench's grid takes away at its end."""
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:  # older versions are told it otherwise
        yield
        return
    before = TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id
    try:
        yield
    finally:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = before


def _seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _data(client: int, examples: int) -> Data:
    draws = torch.Generator().manual_seed(client)
    x, y = torch.rand(examples, 3, 32, 32, generator=draws), torch.randint(0, 10, (examples,), generator=draws)
    return Data(x, torch.nn.functional.one_hot(y, 10).float())


def main() -> int:
    """Time all three, `repeats` times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--examples", type=int, default=320, help="of a client, in batches of 32")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cpus", type=float, default=1.0, help="of two, that Ray keeps for a client")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, list[float]] = {"simulated beside recorded": [], "recorded beside plain": []}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        written(folder, args.examples)
        sys.path.insert(0, made)
        # Ray's workers look for the app where the environment says, not where this process has it from.
        os.environ["PYTHONPATH"] = os.pathsep.join([made, *filter(None, [os.environ.get("PYTHONPATH")])])
        from timed_app.task import load_data  # the app's own: the bench puts its data in its place

        for _ in range(args.repeats):
            rows = rounds(folder, load_data, args)
            for at, ratios in enumerate(results.values()):
                ratios.append(median(row[at] / row[at + 1] for row in rows))
            middles = [median(row[at] for row in rows) for at in range(3)]
            print("seconds a round: simulated {:.3f}, recorded {:.3f}, plain {:.3f}".format(*middles), flush=True)
    for words, ratios in results.items():
        print(f"{words}: {median(ratios):.2f} [{min(ratios):.2f} to {max(ratios):.2f}], {args.clients} clients")
    return 0


if __name__ == "__main__":
    sys.exit(main())
