"""Opacus's private training in a client: ppbench supplies network, data, rate and epochs, a user's code the rest.

A client's round: its network with the received weights, SGD and a loader are made private and trained for the plan's
local epochs; it sends the change of its weights. A probe runs the same code on a victim's batch, all made anew: the
loader has one batch, so its Poisson sample of rate 1 is the whole batch, and the gradient's sum is divided by its size,
the expected one. Engines are made anew each round too; a client's state is its accountants' history.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from opacus.optimizers import DPPerLayerOptimizer
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ppbench.adapters.framework import check_plan
from ppbench.adapters.opacus.ledger import RoundCost, epsilon, history_tensor, joined_history, noise_of, round_cost
from ppbench.adapters.opacus.private import (
    Private,
    Public,
    blank_data,
    check_private,
    public_training,
    running_opacus,
    weights_of,
)
from ppbench.adapters.running import as_usage_error, description
from ppbench.adapters.steps import watched
from ppbench.base.errors import UsageError
from ppbench.base.tree import Params, Tree, node, tree_map
from ppbench.federation.contract import Context, Defense, Job, Server
from ppbench.federation.messages import Hello, Model
from ppbench.federation.plan import Data, Noise, Plan, all_at_once
from ppbench.nets.net import initial


@node(name="ppbench.adapters.opacus.mechanism.Noted")
class AccountedState:
    """A client's state. history: float64 [K, 3], its accountants' entries: noise multiplier, rate, steps."""

    history: Tensor


@node(name="ppbench.adapters.opacus.mechanism.Trained")
class PrivateChange:
    """A client's result. change: start minus end of its weights; history: of its accountant in this round."""

    change: Params
    history: Tensor


@dataclass(frozen=True)
class OpacusDefense(Defense):
    """Opacus's private training as a defense."""

    kin: ClassVar[str] = "dp_sgd"
    sends: ClassVar[Literal["weights"]] = "weights"
    mappable: ClassVar[bool] = False
    setting: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        preset: {"optimizer": "sgd", "lr": 0.1, "decay_at": ()} for preset in ("quick", "paper")
    }

    def parts(self, training: Public) -> Any:
        """Return the private (engine, model, optimizer, loader) of a training."""
        raise NotImplementedError

    # -- public checks -------------------------------------------------------------------------------------------
    def check(self, plan: Plan) -> None:
        """As the base class; also refuse networks that Opacus refuses, and training that no attack reads (UsageError).

        To check, the code runs on one random example.
        """
        super().check(plan)
        if plan.net.mixes or any(isinstance(part, _BatchNorm) for part in plan.net.module.modules()):
            raise UsageError(
                f"Defense {self.name!r} clips each example's gradient, which batch norm in model {plan.spec.model!r} "
                "makes depend on the others, and Opacus refuses it with running statistics too; use group norm, which "
                "ModuleValidator.fix makes of it in the function that gives the model."
            )
        check_plan(self.name, plan, "the change of their weights", parallel=False)
        with watched() as steps:
            self.trained_on_one(plan, 0)
        steps.checked(self.name, plan.local.epochs)
        if steps.lr != (lr := plan.local.opt.rate(1)):
            raise UsageError(f"Defense {self.name!r} trains by {steps.words}; it must keep the plan's rate {lr:g}.")

    def check_data(self, plan: Plan, counts: Any) -> None:
        """As the base class; also refuse numbers of examples of which Opacus expects none in a batch (UsageError)."""
        super().check_data(plan, counts)
        for count in sorted({*counts}):
            if _private.__wrapped__(self, plan, count).optimizer.expected_batch_size == 0:
                raise UsageError(
                    f"Of {count} examples in batches of {plan.local.batch}, Opacus expects int({count} * (1 / "
                    f"{-(-count // plan.local.batch)})) = 0 in a batch, by which it divides; give another --batch-size."
                )

    def trained_on_one(self, plan: Plan, seed: int) -> Params:
        """Return the weights after local training on one example (UsageError: the code raises)."""
        with as_usage_error():
            start, lr = initial(plan.spec, 0), plan.local.opt.rate(1)
            return self._trained(plan, start, blank_data(plan, 1), lr, description(self), seed)[0]

    def guarantee(self, plan: Plan, examples: int, rounds: int) -> tuple[float, float] | None:
        """Return (epsilon, 1/examples) of an example by the engine's own accountant, for the steps of all rounds."""
        cost = _round_cost(self, plan, examples)
        if cost.why_not or not rounds:
            return None
        with running_opacus(f"The accountant of {self.name!r}", 0):
            value = epsilon(_private(self, plan, examples).engine, cost, rounds, 1 / examples)
        return None if value is None else (value, 1 / examples)

    def why_no_epsilon(self, plan: Plan, server: Server | None = None, rounds: int = 1) -> str:
        """Return why there is no epsilon, for the clients' numbers of examples (without `server`: four batches)."""
        counts = [4 * plan.local.batch] if server is None else sorted({*server.counts.tolist()})
        reasons = (_round_cost(self, plan, count).why_not for count in counts)
        return next((reason for reason in reasons if reason), "its accountant gives no finite epsilon")

    def noise(self, plan: Plan) -> Noise | None:
        """Return the optimizer's noise on an update of one step per epoch, in units of a gradient.

        None if momentum weights the noise of several steps.
        """
        opt, epochs = _private(self, plan, plan.local.batch).optimizer, plan.local.epochs
        std = noise_of(opt) / (opt.expected_batch_size if opt.loss_reduction == "mean" else 1)
        if not std or (epochs > 1 and plan.local.opt.momentum):
            return None
        return Noise("gaussian", std / epochs**0.5)

    def clipping(self, plan: Plan) -> float | None:
        """Return the norm to which each example's gradient is clipped; None if each tensor has its own."""
        opt = _private(self, plan, plan.local.batch).optimizer
        return None if isinstance(opt, DPPerLayerOptimizer) else float(opt.max_grad_norm)

    # -- a client ------------------------------------------------------------------------------------------------
    def init_client(self, ctx: Context, params: Params) -> Tree:
        """Return an empty history."""
        return AccountedState(history_tensor([]))

    def prepare(self, ctx: Context, me: AccountedState, message: Tree, data: Data) -> Job | None:
        """Return a job of the weights, all examples, and a seed for the training's draws."""
        if not isinstance(message, Model):
            return None
        seed = torch.randint(0, 2**62, (1,), generator=ctx.generator)
        lr = torch.tensor(ctx.plan.local.opt.rate(ctx.round), dtype=torch.float64)
        return Job(message.params, all_at_once(data), lr, torch.tensor(ctx.party), seed)

    def compute(self, plan: Plan, job: Job) -> Tree:
        """Return the change of the weights by the plan's epochs of private training, on the CPU."""
        start, device = tree_map(lambda leaf: leaf.cpu(), job.start), job.batches.x.device
        data = Data(job.batches.x[0].cpu(), job.batches.y[0].cpu())
        who = f"The training of client {int(job.own)}"
        end, history = self._trained(plan, start, data, float(job.lr), who, int(job.noise))
        change = {name: (value - end[name]).to(device) for name, value in start.items()}
        return PrivateChange(change, history_tensor(history).to(device))

    def reply(
        self, ctx: Context, me: AccountedState, message: Tree, result: Tree, data: Data
    ) -> tuple[Tree, Tree | None]:
        """As the base class; the client's state is extended by its accountant's history."""
        if isinstance(message, Hello):
            return super().reply(ctx, me, message, result, data)
        return AccountedState(joined_history(me.history, result.history)), self.upload(ctx, me, result.change)

    def _trained(
        self, plan: Plan, start: Params, data: Data, lr: float, who: str, seed: int
    ) -> tuple[Params, list[tuple[float, float, int]]]:
        """Return the weights after the plan's local epochs, and the accountant's history."""
        with running_opacus(who, seed), torch.enable_grad():
            private = check_private(self.parts(public_training(plan, start, data, lr)), self.name)
            for _ in range(plan.local.epochs):
                for x, y in private.loader:
                    private.optimizer.zero_grad()
                    losses = plan.example_loss(private.model(x), y)
                    mean = private.optimizer.loss_reduction == "mean"
                    (losses.sum() / max(1, len(losses) if mean else 1)).backward()
                    private.optimizer.step()
            return weights_of(private.model, plan.net, start, self.name), list(private.engine.accountant.history)


@lru_cache(maxsize=2)  # a network each
def _private(defense: OpacusDefense, plan: Plan, count: int) -> Private:
    """Return the private training of a client with `count` examples (UsageError: the code raises, or makes none)."""
    with as_usage_error(), running_opacus(description(defense), 0):
        training = public_training(plan, initial(plan.spec, 0), blank_data(plan, count), plan.local.opt.rate(1))
        return check_private(defense.parts(training), defense.name)


@lru_cache(maxsize=1024)
def _round_cost(defense: OpacusDefense, plan: Plan, count: int) -> RoundCost:
    """Return the privacy cost of one round of a client with `count` examples."""
    private = _private.__wrapped__(defense, plan, count)
    with running_opacus(f"The accountant of {defense.name!r}", 0):
        cost = round_cost(private, plan.local.epochs)
    if cost.why_not:
        return cost
    one, other = (defense.trained_on_one(plan, seed) for seed in (1, 2))
    if all(torch.equal(one[name], other[name]) for name in one):
        return RoundCost(
            (), "its noise is the same whenever it is run: its code seeds it, and who knows the seed takes it off"
        )
    return cost
