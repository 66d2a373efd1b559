"""The public description of a federation: what every party, and every adversary, is allowed to know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ppbench.base.tree import Params, node
from ppbench.federation.optim import Opt
from ppbench.nets.losses import LOSSES, LossName
from ppbench.nets.net import Net, NetSpec, build


@node
class Data:
    """One party's examples, in storage of their own (never a slice of the data set).

    x: [N, *shape] float32 in the data's range; y: [N, C] float32, one-hot, or [N, 1] numbers, or [N, 1, H, W] masks.
    """

    x: Tensor
    y: Tensor


@node
class Batch:
    """The batches of one client's round, stacked. x: [T, B, *shape]; y: [T, B, C]; w: [T, B] weights, 0 for padding."""

    x: Tensor
    y: Tensor
    w: Tensor


@dataclass(frozen=True)
class Noise:
    """A public law of noise. std: of one coordinate of the upload; `tensors`: of parameters that have another one."""

    law: Literal["gaussian", "laplace"]
    std: float
    tensors: tuple[tuple[str, float], ...] = ()

    def of(self, name: str) -> float:
        """Return the standard deviation of one coordinate of the parameter `name`."""
        return dict(self.tensors).get(name, self.std)


@dataclass(frozen=True)
class Local:
    """What a client does in a round.

    upload: "gradient" (FedSGD: the gradient of one batch) or "delta" (FedAvg: start minus end of local epochs). batch:
    examples a batch. opt: the local optimizer; its state is fresh each round.
    """

    upload: Literal["gradient", "delta"] = "delta"
    epochs: int = 1
    batch: int = 32
    opt: Opt = field(default_factory=lambda: Opt("adam", lr=1e-3))


@dataclass(frozen=True)
class Plan:
    """Everything public about a federation.

    server_opt: the server's step on the aggregated update; FedAvg is SGD with learning rate 1. schedule: "parallel", or
    "round_robin": clients one after another, a server step after each (SPN, Alg. 4). data_range: of an input's values.
    """

    spec: NetSpec
    clients: int
    local: Local = field(default_factory=Local)
    loss: LossName = "cross_entropy"
    server_opt: Opt = field(default_factory=Opt)
    schedule: Literal["parallel", "round_robin"] = "parallel"
    data_range: tuple[float, float] = (0.0, 1.0)

    @property
    def net(self) -> Net:
        """The network, built once a process."""
        return build(self.spec)

    def example_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the loss [B] of logits [B, C] against y [B, C]: THE loss, the client's and the attacker's."""
        return LOSSES[self.loss](logits, y)

    def objective(self, params: Params, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        """Return the weighted mean loss (scalar) of x [B, *shape], y [B, C] with weights w [B]."""
        return (w * self.example_loss(self.net(params, x), y)).sum() / w.sum().clamp(min=1e-12)


@dataclass(frozen=True)
class Context:
    """All that a party has at hand beside its state: the plan, where we are, and its own randomness.

    round: 0 at set-up. session: "real", or of a fork ("probe-K", "observed", "cost"); derive masks from it, or a fork
    re-uses the real round's stream. party: client index, or SERVER. generator: draws for this party in this step only.
    """

    plan: Plan
    round: int
    session: str
    party: int
    generator: torch.Generator
