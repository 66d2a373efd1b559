"""Opacus's private training as a client's: the bench brings network, data, rate and epochs, somebody's code the rest.

A client's round: its network with the weights that it was sent, SGD and a loader are made private, and trained for the
plan's local epochs; it sends the change of its weights. A probe is that very code on a victim's batch, all of it made
anew: the loader holds one batch, so its Poisson sample of rate 1 is the whole batch, and the gradient's sum is divided
by its size, which is the expected one. Engines are made anew each round too; a client keeps what accountants noted.
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
from ppbench.adapters.opacus.ledger import Spent, counted, epsilon, joined, kept, noise_of
from ppbench.adapters.opacus.private import Private, Public, blank, checked, public, running, weights_of
from ppbench.adapters.running import refused, words_of
from ppbench.adapters.steps import watched
from ppbench.base.errors import UsageError
from ppbench.base.tree import Params, Tree, node, tree_map
from ppbench.federation.contract import Context, Defense, Job, Server
from ppbench.federation.messages import Hello, Model
from ppbench.federation.plan import Data, Noise, Plan, all_at_once
from ppbench.nets.net import initial


@node
class Noted:
    """What a client keeps. history: float64 [K, 3], what its accountants noted: noise multiplier, rate, steps."""

    history: Tensor


@node
class Trained:
    """What a client computes. change: start minus end of its weights; history: of its accountant in this round."""

    change: Params
    history: Tensor


@dataclass(frozen=True)
class Mechanism(Defense):
    """What a function makes private, as a defense; its parameters are those of the function."""

    kin: ClassVar[str] = "dp_sgd"
    sends: ClassVar[Literal["weights"]] = "weights"
    mappable: ClassVar[bool] = False
    setting: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        preset: {"optimizer": "sgd", "lr": 0.1, "decay_at": ()} for preset in ("quick", "paper")
    }

    def parts(self, given: Public) -> Any:
        """Return (engine, model, optimizer, loader), private, of what is given."""
        raise NotImplementedError

    # -- public checks -------------------------------------------------------------------------------------------
    def check(self, plan: Plan) -> None:
        """As its base; also refuse networks that Opacus cannot take, and a training that no attack reads (UsageError).

        The code is run for that on one random example.
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
        steps.told(self.name, plan.local.epochs)
        if steps.lr != (lr := plan.local.opt.rate(1)):
            raise UsageError(f"Defense {self.name!r} trains by {steps.words}; it must keep the plan's rate {lr:g}.")

    def check_data(self, plan: Plan, counts: Any) -> None:
        """As its base; also refuse numbers of examples of which Opacus expects none in a batch (UsageError)."""
        super().check_data(plan, counts)
        for count in sorted({*counts}):
            if _made.__wrapped__(self, plan, count).optimizer.expected_batch_size == 0:
                raise UsageError(
                    f"Of {count} examples in batches of {plan.local.batch}, Opacus expects int({count} * (1 / "
                    f"{-(-count // plan.local.batch)})) = 0 in a batch, by which it divides; give another --batch-size."
                )

    def trained_on_one(self, plan: Plan, seed: int) -> Params:
        """Return the weights after a local part on one example (UsageError: the code raises)."""
        with refused():
            start, lr = initial(plan.spec, 0), plan.local.opt.rate(1)
            return self._trained(plan, start, blank(plan, 1), lr, words_of(self), seed)[0]

    def guarantee(self, plan: Plan, examples: int, rounds: int) -> tuple[float, float] | None:
        """Return (epsilon, 1/examples) of an example by the engine's own accountant, for the steps of all rounds."""
        spent = _spent(self, plan, examples)
        if spent.why_not or not rounds:
            return None
        with running(f"The accountant of {self.name!r}", 0):
            found = epsilon(_made(self, plan, examples).engine, spent, rounds, 1 / examples)
        return None if found is None else (found, 1 / examples)

    def why_no_epsilon(self, plan: Plan, server: Server | None = None, rounds: int = 1) -> str:
        """Return why the engine's epsilon is none of what is run, of the clients' numbers of examples, or of many."""
        counts = [4 * plan.local.batch] if server is None else sorted({*server.counts.tolist()})
        found = (_spent(self, plan, count).why_not for count in counts)
        return next((reason for reason in found if reason), "its accountant gives no finite epsilon")

    def noise(self, plan: Plan) -> Noise | None:
        """Return the noise on an update of one step an epoch that is taken for a gradient, as the optimizer has it.

        None where momentum weighs the noise of several steps.
        """
        opt, epochs = _made(self, plan, plan.local.batch).optimizer, plan.local.epochs
        std = noise_of(opt) / (opt.expected_batch_size if opt.loss_reduction == "mean" else 1)
        if not std or (epochs > 1 and plan.local.opt.momentum):
            return None
        return Noise("gaussian", std / epochs**0.5)

    def clipping(self, plan: Plan) -> float | None:
        """Return the norm to which each example's gradient is clipped, None where each tensor has one of its own."""
        opt = _made(self, plan, plan.local.batch).optimizer
        return None if isinstance(opt, DPPerLayerOptimizer) else float(opt.max_grad_norm)

    # -- a client ------------------------------------------------------------------------------------------------
    def init_client(self, ctx: Context, params: Params) -> Tree:
        """Return an empty history."""
        return Noted(kept([]))

    def prepare(self, ctx: Context, me: Noted, message: Tree, data: Data) -> Job | None:
        """Return weights, all examples, and what the training's draws are seeded with."""
        if not isinstance(message, Model):
            return None
        seed = torch.randint(0, 2**62, (1,), generator=ctx.generator)
        lr = torch.tensor(ctx.plan.local.opt.rate(ctx.round), dtype=torch.float64)
        return Job(message.params, all_at_once(data), lr, torch.tensor(ctx.party), seed)

    def compute(self, plan: Plan, job: Job) -> Tree:
        """Return what a private training of the plan's epochs changes, computed on the CPU."""
        start, device = tree_map(lambda leaf: leaf.cpu(), job.start), job.batches.x.device
        data = Data(job.batches.x[0].cpu(), job.batches.y[0].cpu())
        who = f"The training of client {int(job.own)}"
        end, history = self._trained(plan, start, data, float(job.lr), who, int(job.noise))
        change = {name: (value - end[name]).to(device) for name, value in start.items()}
        return Trained(change, kept(history).to(device))

    def reply(self, ctx: Context, me: Noted, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """As its base; the client keeps what its accountant noted."""
        if isinstance(message, Hello):
            return super().reply(ctx, me, message, result, data)
        return Noted(joined(me.history, result.history)), self.upload(ctx, me, result.change)

    def _trained(
        self, plan: Plan, start: Params, data: Data, lr: float, who: str, seed: int
    ) -> tuple[Params, list[tuple[float, float, int]]]:
        """Return the weights after the plan's local epochs, and what the accountant noted."""
        with running(who, seed), torch.enable_grad():
            made = checked(self.parts(public(plan, start, data, lr)), self.name)
            for _ in range(plan.local.epochs):
                for x, y in made.loader:
                    made.optimizer.zero_grad()
                    losses = plan.example_loss(made.model(x), y)
                    mean = made.optimizer.loss_reduction == "mean"
                    (losses.sum() / max(1, len(losses) if mean else 1)).backward()
                    made.optimizer.step()
            return weights_of(made.model, plan.net, start, self.name), list(made.engine.accountant.history)


@lru_cache(maxsize=2)  # a network each
def _made(defense: Mechanism, plan: Plan, count: int) -> Private:
    """Return what is made private of a client with `count` examples; UsageError: the code raises, or gives no such."""
    with refused(), running(words_of(defense), 0):
        given = public(plan, initial(plan.spec, 0), blank(plan, count), plan.local.opt.rate(1))
        return checked(defense.parts(given), defense.name)


@lru_cache(maxsize=1024)
def _spent(defense: Mechanism, plan: Plan, count: int) -> Spent:
    """Return what a round of a client with `count` examples spends."""
    made = _made.__wrapped__(defense, plan, count)
    with running(f"The accountant of {defense.name!r}", 0):
        spent = counted(made, plan.local.epochs)
    if spent.why_not:
        return spent
    one, other = (defense.trained_on_one(plan, seed) for seed in (1, 2))
    if all(torch.equal(one[name], other[name]) for name in one):
        return Spent(
            (), "its noise is the same whenever it is run: its code seeds it, and who knows the seed takes it off"
        )
    return spent
