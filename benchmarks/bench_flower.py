"""A round of a Flower app as the bench records it, beside Flower's own simulation: same app, clients, data, in one run.

Both run FedAvg over an app that trains a small network on random images; the second simulates on Ray, as `flwr run`
does by default. What both do once (imports, Ray's start) is taken off by a run of one round. Prints seconds a round and
their ratio; needs Flower's extra: pip install 'flwr[simulation]'.

    OMP_NUM_THREADS=1 python benchmarks/bench_flower.py [--clients 10] [--rounds 6] [--repeats 3]
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ppbench.base import registry
from ppbench.base.registry import load
from ppbench.base.seeds import Seeds
from ppbench.federation.engine import Federation
from ppbench.federation.optim import Opt
from ppbench.federation.plan import Data, Local, Plan
from ppbench.nets.net import initial, net_spec

EXAMPLES, BATCH, LR = 320, 32, 0.1
TASK = f"""
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
    x, y = torch.rand({EXAMPLES}, 3, 32, 32, generator=draws), torch.randint(0, 10, ({EXAMPLES},), generator=draws)
    return DataLoader(TensorDataset(x, y), batch_size=batch, shuffle=True), None
"""
CLIENT = """
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from timed_app.task import Net, load_data
app = ClientApp()
@app.train()
def train(msg, context):
    torch.set_num_threads(1)
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    place = context.node_config
    loader, _ = load_data(place["partition-id"], place["num-partitions"], 32)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(loader.dataset)})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=msg)
"""
SERVER = """
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from timed_app.task import Net
app = ServerApp()
ROUNDS = [1]
@app.main()
def main(grid, context):
    FedAvg(fraction_evaluate=0.0).start(grid=grid, initial_arrays=ArrayRecord(Net().state_dict()), num_rounds=ROUNDS[0])
"""
PROJECT = """
[tool.flwr.app.components]
serverapp = "timed_app.server:app"
clientapp = "timed_app.client:app"
[tool.ppbench]
network = "timed_app.task:Net"
data = "timed_app.task:load_data"
"""


def written(folder: Path) -> None:
    """Write the app."""
    package = folder / "timed_app"
    package.mkdir()
    for name, text in (("__init__", ""), ("task", TASK), ("client", CLIENT), ("server", SERVER)):
        (package / f"{name}.py").write_text(text)
    (folder / "pyproject.toml").write_text(PROJECT)


def simulated(clients: int, rounds: int) -> float:
    """Return the seconds of rounds by Flower's own simulation, its start among them."""
    from flwr.simulation import run_simulation
    from timed_app import client, server  # type: ignore[import-not-found]  # written above

    server.ROUNDS[0] = rounds
    begun = time.perf_counter()
    run_simulation(
        server.app, client.app, clients, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    )
    return time.perf_counter() - begun


def recorded(folder: Path, clients: int, rounds: int) -> float:
    """Return the seconds of rounds on the bench's grid, every message kept."""
    name = f"flower:{folder}"
    registry.admit(name)
    defense = load("defenses", name)()
    plan = Plan(net_spec("timed_app.task:Net", (3, 32, 32), 10, {}), clients, Local("delta", 1, BATCH, Opt("sgd", LR)))
    run = Federation(defense, plan, {client: _data(client) for client in range(clients)}, Seeds(0))
    run.start(initial(plan.spec, 0))
    run.wire.keep = True
    begun = time.perf_counter()
    run.run(rounds)
    return time.perf_counter() - begun


def _data(client: int) -> Data:
    draws = torch.Generator().manual_seed(client)
    labels = torch.randint(0, 10, (EXAMPLES,), generator=draws)
    return Data(torch.rand(EXAMPLES, 3, 32, 32, generator=draws), torch.nn.functional.one_hot(labels, 10).float())


def main() -> int:
    """Time both, one after the other, `repeats` times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        written(folder)
        sys.path.insert(0, made)
        rows: list[tuple[float, float]] = []
        for _ in range(args.repeats):
            rows.append(tuple(_round(way, args.clients, args.rounds) for way in _ways(folder)))  # type: ignore[arg-type]
            print("seconds a round: recorded {:.3f}, simulated {:.3f}".format(*rows[-1]), flush=True)
    ratios = sorted(theirs / ours for ours, theirs in rows)
    print(
        f"recorded {median(r[0] for r in rows):.3f} s a round, simulated {median(r[1] for r in rows):.3f}: "
        f"{median(ratios):.2f} times as long [{ratios[0]:.2f} to {ratios[-1]:.2f}], {args.clients} clients"
    )
    return 0


def _ways(folder: Path) -> tuple[Any, Any]:
    return (lambda clients, rounds: recorded(folder, clients, rounds)), simulated


def _round(way: Any, clients: int, rounds: int) -> float:
    once, all_ = way(clients, 1), way(clients, rounds + 1)
    return float(all_ - once) / rounds


if __name__ == "__main__":
    sys.exit(main())
