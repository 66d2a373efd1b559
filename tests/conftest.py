"""Shared fixtures: a small task on the embedded digits, and federations over it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ppbench.federation.contract import Defense
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Data, Local, Plan
from ppbench.seeds import Seeds
from ppbench.task.net import initial, net_spec

torch.set_num_threads(1)
CLIENTS = 4


@pytest.fixture(scope="session")
def digits() -> Data:
    from sklearn.datasets import load_digits

    raw = load_digits()
    x = torch.tensor(raw.images, dtype=torch.float32)[:, None] / 16
    return Data(x, torch.nn.functional.one_hot(torch.tensor(raw.target), 10).float())


@pytest.fixture
def plan() -> Plan:
    return Plan(net_spec("dlnet", (1, 8, 8), 10), CLIENTS, Local(batch=16))


@pytest.fixture
def shards(digits: Data) -> dict[int, Data]:
    """Four clients; the last one has fewer examples."""
    sizes = (48, 48, 48, 40)
    return {c: Data(digits.x[c * 48 :][:n].clone(), digits.y[c * 48 :][:n].clone()) for c, n in enumerate(sizes)}


@pytest.fixture
def federate(plan: Plan, shards: dict[int, Data]) -> Callable[..., Federation]:
    """Return a started federation of a defense."""

    def make(defense: Defense, plan: Plan = plan, seed: int = 0, **options: object) -> Federation:
        federation = Federation(defense, plan, shards, Seeds(seed), **options)  # type: ignore[arg-type]
        federation.start(initial(plan.spec, 1))
        return federation

    return make
