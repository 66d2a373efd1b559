"""Canary clients (Andrew et al., ICLR 2024): clients of an audit's target whose gradient is a random direction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ppbench.adversary.attack import Challenge
from ppbench.adversary.victims import tensors_digest
from ppbench.base.autodiff import gradient
from ppbench.base.errors import UsageError
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params
from ppbench.federation.contract import Defense
from ppbench.federation.optim import Layout
from ppbench.federation.plan import Data, Plan
from ppbench.run.experiment import Experiment


@dataclass(frozen=True)
class CanaryClients:
    """Random directions, half of which are the gradients of clients in the training.

    Attributes:
        start: [P] float32, the public initial weights.
        directions: [2k, P] float32, random unit vectors. inside: [2k] bool, the truth: which k of them take part.
        first: index of the first canary client; they come after all others. size: norm of their gradients.
        shard: the data of each of them. Its inputs are never used; its size counts in the server's mean.
    """

    start: Tensor
    directions: Tensor
    inside: Tensor
    first: int
    size: float
    shard: Data
    layout: Layout

    def plan(self, plan: Plan) -> Plan:
        """Return `plan` with the canary clients added."""
        return replace(plan, clients=self.first + int(self.inside.sum()))

    def gradients(self, device: torch.device) -> dict[int, Params]:
        """Return the gradient of each canary client, by its index."""
        rows = (self.size * self.directions[self.inside]).to(device)
        return {self.first + place: self.layout.unpack(row) for place, row in enumerate(rows)}

    def shards(self, others: Mapping[int, Data]) -> dict[int, Data]:
        """Return the shards of all clients."""
        return {**others, **dict.fromkeys(range(self.first, self.first + int(self.inside.sum())), self.shard)}

    def challenge(self) -> Challenge:
        """Return the question of which directions took part."""
        return Challenge((), 1, extra={"directions": self.directions.clone(), "start": self.start.clone()})

    def digest(self) -> str:
        """Return the hash of the question with its answers."""
        return tensors_digest(self.start, self.directions, self.inside)


def takes_canaries(defense: Defense, plan: Plan, examples: int, rounds: int) -> bool:
    """Return whether clients of `defense` upload the gradient of the plan's loss, or nothing that depends on data."""
    kind = type(defense)
    if kind.round is not Defense.round or kind.prepare is not Defense.prepare:
        return False
    return kind.compute is Defense.compute or defense.guarantee(plan, examples, rounds) == (0.0, 0.0)


def make_canary_clients(experiment: Experiment, defense: Defense, shards: Mapping[int, Data]) -> CanaryClients:
    """Return the canary clients of an audit's target whose other clients hold `shards`.

    Their gradients have the mean norm of honest clients' at the initial weights, or the defense's clipping norm
    `clip` if that is larger. Raises UsageError: the defense's clients compute something else.
    """
    task, config = experiment.task, experiment.config
    examples = max(1, round(sum(len(data.x) for data in shards.values()) / len(shards)))
    if not takes_canaries(defense, task.plan, examples, config.rounds):
        raise UsageError(
            f"Option canary_clients={config.canary_clients} cannot be used: clients of defense {defense.name!r} upload "
            "more than the gradient of a loss, so none can upload a direction; leave it out."
        )
    layout, count = Layout.of(task.params), 2 * config.canary_clients
    generator = Seeds(task.seeds.seed("audit")).generator("canary clients")
    inside = torch.zeros(count, dtype=torch.bool)
    inside[torch.randperm(count, generator=generator)[: count // 2]] = True
    start = layout.pack(task.params).float().cpu()
    drawn = torch.randn(count, len(start), generator=generator)
    norms = []
    for data in shards.values():
        ones = torch.ones(len(data.x))
        with torch.no_grad():
            slope = gradient(lambda p, d=data, w=ones: task.plan.objective(p, d.x, d.y, w), task.params)  # type: ignore[misc]
        norms.append(float(layout.pack(slope).norm()))
    size = max(sum(norms) / len(norms), float(getattr(defense, "clip", 0.0)))
    shape = next(iter(shards.values()))
    shard = Data(torch.zeros(examples, *shape.x.shape[1:]), torch.zeros(examples, *shape.y.shape[1:]))
    directions = drawn / drawn.norm(dim=1, keepdim=True)
    return CanaryClients(start, directions, inside, len(shards), size, shard, layout)
