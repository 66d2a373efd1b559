"""Federations behind the adapters of Flower, NVFlare and Opacus, as their tests share them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ppbench.base import registry
from ppbench.base.registry import load_plugin
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Data, Local, Opt, Plan
from ppbench.federation.view import View
from ppbench.federation.wire import Slot
from ppbench.nets.net import initial, net_spec


def data(count: int, seed: int) -> Data:
    """Return drawn examples: x [count, 1, 8, 8] within 0 and 1, y one of ten classes."""
    draws = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=draws)
    return Data(torch.rand(count, 1, 8, 8, generator=draws), torch.nn.functional.one_hot(labels, 10).float())


@dataclass(frozen=True)
class Setting:
    """Clients that train a small network by SGD, each on its own number of examples."""

    sizes: tuple[int, ...] = (20, 24, 28)
    lr: float = 0.1
    batch: int = 8

    @property
    def plan(self) -> Plan:
        spec = net_spec("mlp", (1, 8, 8), 10, {"hidden": "16"})
        return Plan(spec, len(self.sizes), Local("delta", 1, self.batch, Opt("sgd", self.lr)))

    def shards(self, sizes: tuple[int, ...] | None = None) -> dict[int, Data]:
        return {client: data(size, client) for client, size in enumerate(sizes or self.sizes)}

    def federation(
        self, name: str, plan: Plan | None = None, shards: Mapping[int, Data] | None = None, seed: int = 0,
        **parameters: Any,
    ) -> Federation:  # fmt: skip
        """Return a started federation of a defense at an address, with its parameters."""
        plan = plan or self.plan
        registry.admit(name)
        defense = load_plugin("defenses", name)(**parameters)
        defense.check(plan)
        run = Federation(defense, plan, shards or self.shards(), Seeds(seed))
        run.start(initial(plan.spec, 0))
        return run

    def trained(self, name: str, plan: Plan | None = None, rounds: int = 2, **options: Any) -> Params:
        run = self.federation(name, plan, **options)
        assert run.run(rounds)
        return run.parties.server.params  # type: ignore[no-any-return]

    def restored(self, run: Federation, folder: Any) -> Federation:
        """Return a federation that goes on from the checkpoint of another."""
        run.save(folder)
        again = Federation(run.defense, run.plan, run.shards, Seeds(0))
        again.restore(folder, initial(run.plan.spec, 0))
        return again

    def victims(self, count: int = 1) -> dict[Slot, Data]:
        """Return `count` examples of each client, which it does not train on."""
        return {Slot(0, client): data(count, 50 + client) for client in range(len(self.sizes))}

    def seen(self, run: Federation, count: int = 1) -> View:
        """Return what the server sees of a probe with these victims."""
        return run.probe(self.victims(count)).view("server/1")
