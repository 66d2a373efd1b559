"""The small federation of the batteries: four clients with 48 digits each (the last one 40), a DLNet, seed 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from ppbench.adversary.victims import Victims, choose_victims
from ppbench.base import registry
from ppbench.base.errors import UsageError, unknown
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Tree, leaves
from ppbench.federation.contract import Defense
from ppbench.federation.engine import Federation
from ppbench.federation.optim import Opt
from ppbench.federation.plan import Data, Local, Plan
from ppbench.federation.threats import HONEST_SERVER, ThreatModel
from ppbench.nets.net import initial, net_spec

SCENE_CLIENTS = 4
SHARD = 48
SHAPE, CLASSES = (1, 8, 8), 10

TensorChange = Callable[[Tensor], Tensor]


@lru_cache
def all_digits() -> Data:
    """Return all 1797 digits in scikit-learn's order, x [N, 1, 8, 8] in 0..1, y one-hot."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    x = torch.tensor(raw.images, dtype=torch.float32)[:, None] / 16
    return Data(x, torch.nn.functional.one_hot(torch.tensor(raw.target), CLASSES).float())


def base_plan() -> Plan:
    """Return the default plan: DLNet of two convolutions, Adam, batches of 16."""
    return Plan(net_spec("dlnet", SHAPE, CLASSES, {"nconv": 2}), SCENE_CLIENTS, Local(batch=16))


def plan_for(defense: Defense, plan: Plan) -> Plan:
    """Return `plan` with the loss, network and federation of the defense's own setting."""
    setting = defense.setting.get("quick", {})
    if not setting:
        return plan
    opt = Opt("adam", 1e-3)  # small steps: learning is not tested, and noise must not make training diverge
    spec = net_spec(setting.get("model", plan.spec.model), SHAPE, CLASSES, setting.get("model_options"))
    local = Local(setting.get("upload", "delta"), setting.get("local_epochs", 1), 16, opt)
    return replace(
        plan,
        spec=spec,
        clients=setting.get("clients", plan.clients),
        local=local,
        loss=setting.get("loss", plan.loss),
        server_opt=opt if local.upload == "gradient" else plan.server_opt,
        schedule=setting.get("schedule", plan.schedule),
    )


def shards_for(defense: Defense, plan: Plan) -> dict[int, Data]:
    """Return 48 examples per client, and 40 for the last one unless the defense refuses shards of unequal sizes."""
    sizes = [SHARD] * (plan.clients - 1) + [SHARD - 8]
    try:
        defense.check_data(plan, sizes)
    except UsageError:
        sizes = [SHARD] * plan.clients
    return digit_shards(sizes)


def digit_shards(sizes: Sequence[int]) -> dict[int, Data]:
    """Return by client c the first sizes[c] of the c-th block of 48 digits, in storage of their own."""
    x, y = all_digits().x.split(SHARD), all_digits().y.split(SHARD)
    return {c: Data(x[c][:n].clone(), y[c][:n].clone()) for c, n in enumerate(sizes)}


@dataclass(frozen=True)
class DefenseTrial:
    """A defense under test. off: parameters at which it does nothing, by name; None if there are none."""

    defense: Defense
    off: tuple[tuple[str, Any], ...] | None = None

    @property
    def plan(self) -> Plan:
        """The plan of the test federation."""
        return plan_for(self.defense, base_plan())

    def federate(self, seed: int = 0, start: bool = True, **changes: Any) -> Federation:
        """Return a federation of the defense, started unless `start` is False, with `changes` of its plan."""
        own = self.plan
        federation = Federation(self.defense, replace(own, **changes), shards_for(self.defense, own), Seeds(seed))
        if start:
            federation.start(initial(federation.plan.spec, 1))
        return federation


def with_parameters(defense: Defense, changes: Mapping[str, Any]) -> Defense:
    """Return `defense` with `changes`, converted as in an evaluation; UsageError: an unknown name or a wrong type."""
    known = {field.name: getattr(defense, field.name) for field in fields(defense)}
    for name in changes:
        if name not in known:
            raise unknown(f"parameter of defense {defense.name!r}", name, known)
    try:
        return TypeAdapter(type(defense)).validate_python({**known, **changes})
    except ValidationError as error:
        first = error.errors()[0]
        where = f"{'.'.join(map(str, first['loc']))}={first['input']!r}"
        raise UsageError(f"The defense {defense.name!r} refuses {where}: {first['msg'].lower()}.") from error


def scene_victims(
    run: Federation, threat: ThreatModel | str = HONEST_SERVER, batch: int = 2, count: int = 8
) -> Victims:
    """Return `count` victims of a federation for the adversary of `threat`."""
    return choose_victims(run.shards, threat, batch, count, Seeds(0), sums=run.defense.sums)


def same_tensors(a: Tree, b: Tree) -> bool:
    """Return whether two trees hold the same tensors, bit for bit."""
    return len(leaves(a)) == len(leaves(b)) and all(map(torch.equal, leaves(a), leaves(b)))


def largest_difference(a: Tree, b: Tree) -> float:
    """Return the largest difference between the tensors of two trees, infinite if shapes differ."""
    if [leaf.shape for leaf in leaves(a)] != [leaf.shape for leaf in leaves(b)]:
        return float("inf")
    pairs = zip(leaves(a), leaves(b), strict=True)
    return max((float((x.double() - y.double()).abs().max()) for x, y in pairs if x.numel()), default=0.0)


@contextmanager
def registered(group: registry.PluginGroup, plugin: type) -> Iterator[None]:
    """Register a class by its name in the block, because views on disk name their defense."""
    name = str(getattr(plugin, "name", plugin.__name__))
    entry = cast(Any, SimpleNamespace(load=lambda: plugin))
    shown = registry.Plugin(group, name, f"{plugin.__module__}:{plugin.__qualname__}", registry.TESTED, entry)
    with patch.dict(registry.plugins(group), {name: shown}):
        yield


@contextmanager
def empty_folder() -> Iterator[Path]:
    """Yield an empty folder that is removed after the block."""
    with TemporaryDirectory(prefix="ppbench-testing-") as path:
        yield Path(path)
