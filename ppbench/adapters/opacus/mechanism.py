"""Opacus's private training in a client: ppbench supplies network, data, rate and epochs, a user's code the rest.

A client's round: its network with the received weights, SGD and a loader are made private and trained for the plan's
local epochs; it sends the change of its weights. A probe runs the same code on a victim's batch, all made anew: the
loader has one batch, so its Poisson sample of rate 1 is the whole batch, and the gradient's sum is divided by its size,
the expected one. Engines are made anew each round too; a client's state is its accountants' history.

secure_mode is off, the default: it needs torchcsprng, which no current torch has; noise comes from torch's generator.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import metadata
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from opacus import PrivacyEngine
from opacus.accountants import RDPAccountant
from opacus.optimizers import AdaClipDPOptimizer, DPOptimizer, DPPerLayerOptimizer
from opacus.utils.batch_memory_manager import BatchSplittingSampler
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, TensorDataset

from ppbench.adapters.framework import Grids, check_plan
from ppbench.adapters.user_code import as_usage_error, description, seeded_run, user_function, watched
from ppbench.base.errors import UsageError, one_line
from ppbench.base.tree import Params, Tree, node, tree_map
from ppbench.federation.bounds import LARGEST_NUMBER, OpenShare, Positive, between
from ppbench.federation.contract import Context, Defense, Job, Server
from ppbench.federation.plan import Data, Noise, Plan, all_at_once
from ppbench.federation.wire import Hello, Model
from ppbench.nets.classifier import UserNetwork
from ppbench.nets.net import Net, initial

# -- The parts of Opacus's training (engine, model, optimizer, loader), which a user's code makes from ppbench's --

WRAPPER_PREFIX = "_module."
"""Opacus's prefix of parameter names in a network that it wraps."""
RETURN_FORM = "(engine, model, optimizer, loader)"


class Public(NamedTuple):
    """A client's training before it is made private: network, optimizer, and loader of its examples."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: DataLoader[Any]


class Private(NamedTuple):
    """The private training, as the user's code returns it."""

    engine: Any
    model: nn.Module
    optimizer: Any
    loader: Any


@contextmanager
def running_opacus(who: str, *seed: int) -> Iterator[None]:
    """Run Opacus's code as `seeded_run` does, without its warnings (secure_mode is off; inputs need no gradient; the
    accountant's last order).
    """
    with warnings.catch_warnings(), seeded_run("opacus", who, *seed):
        warnings.filterwarnings("ignore", module=r"opacus\b")
        warnings.filterwarnings("ignore", message=".*[Ff]ull backward hook")
        yield


def public_training(plan: Plan, params: Params, data: Data, lr: float) -> Public:
    """Return a client's training: weights `params`, SGD at rate `lr`, batches of the plan's size, shuffled.

    The loader's items are pairs of an input and its one-hot target; its last batch may be smaller.
    """
    model = module_with(plan.net, params)
    optimizer = torch.optim.SGD(model.parameters(), lr, plan.local.opt.momentum)
    return Public(model, optimizer, DataLoader(TensorDataset(data.x, data.y), plan.local.batch, shuffle=True))


def blank_data(plan: Plan, count: int) -> Data:
    """Return `count` equal examples in the memory of one, for counting steps."""
    x = torch.rand(1, *plan.spec.shape, generator=torch.Generator().manual_seed(0))
    y = torch.eye(plan.spec.classes)[:1]
    return Data(x.expand(count, *x.shape[1:]), y.expand(count, -1))


def module_with(net: Net, params: Params) -> nn.Module:
    """Return the network as a separate module on the CPU, with copies of `params` as weights.

    A user's network is put together again as it was: user code may look for its layers, and Opacus pickles its class.
    """
    module = copy.deepcopy(net.module).to_empty(device="cpu")
    known = {**net.frozen, **params}
    with torch.no_grad():
        for name, value in [*module.named_parameters(), *module.named_buffers()]:
            value.copy_(known[name])
    if not isinstance(module, UserNetwork):
        return module
    if module.head_name == "":
        return module.head
    inner = module.features
    inner.__class__ = type(inner).__mro__[1]
    if module.head_name is None:
        return inner
    parent, _, last = module.head_name.rpartition(".")
    setattr(inner.get_submodule(parent), last, module.head)
    return inner


def weights_of(model: nn.Module, net: Net, like: Mapping[str, Tensor], name: str) -> Params:
    """Return copies of a private network's weights by ppbench's names; UsageError: it is another network."""
    weights = {n.removeprefix(WRAPPER_PREFIX): value for n, value in model.named_parameters() if value.requires_grad}
    names = {n: net.own_name(n) for n in like}
    if {n: v.shape for n, v in weights.items()} != {names[n]: v.shape for n, v in like.items()}:
        raise UsageError(
            f"Defense {name!r} trains a network of other parameters than it was given; it must keep their names and "
            "shapes (a network that must be mended for Opacus is given mended, by --model)."
        )
    return {n: weights[own].detach().clone() for n, own in names.items()}


def check_private(made: object, name: str) -> Private:
    """Return a user's result as `Private` (UsageError: it has other parts, or is not private)."""
    if not isinstance(made, tuple | list) or len(made) != len(Private._fields):
        count = f" of {len(made)}" if isinstance(made, tuple | list) else ""
        raise UsageError(
            f"Defense {name!r} gave a {one_line(type(made).__name__, 60)}{count}; it must give {RETURN_FORM}."
        )
    private = Private(*made)
    for part, kind in zip(private, (PrivacyEngine, nn.Module, DPOptimizer, DataLoader), strict=True):
        if not isinstance(part, kind):
            actual = one_line(type(part).__name__, 60)
            raise UsageError(f"Defense {name!r} gave a {actual} where a {kind.__name__} must be, in {RETURN_FORM}.")
    if not {id(p) for p in private.model.parameters() if p.requires_grad} <= {id(p) for p in private.optimizer.params}:
        raise UsageError(f"Defense {name!r} gave an optimizer of other weights than its model's.")
    return private


# -- The privacy cost of a client's training by the engine's own accountant, of the steps taken, not by a formula --

History = list[tuple[float, float, int]]
"""An accountant's history: (noise multiplier, sample rate, steps)."""
LARGEST_NUMERICAL_EPSILON = 50.0
"""The largest epsilon for which a numerical accountant is used: its memory grows with epsilon."""


RELEASE = tuple(int(part) for part in metadata.version("opacus").split(".")[:2])
"""Opacus's release: major, minor."""
ADJUSTS = RELEASE >= (1, 6)
"""Whether an adaptive optimizer's multiplier covers gradient and count together, as the accountant assumes."""


@dataclass(frozen=True)
class RoundCost:
    """The privacy cost of one round of a client. why_not: a clause, why there is no epsilon; "" if there is one."""

    history: tuple[tuple[float, float, int], ...]
    why_not: str


def history_tensor(history: History) -> Tensor:
    """Return a history as float64 [K, 3]."""
    return torch.tensor([tuple(map(float, entry)) for entry in history], dtype=torch.float64).view(-1, 3)


def joined_history(before: Tensor, more: Tensor) -> Tensor:
    """Return the history `before` followed by `more`; consecutive equal entries are merged."""
    rows: list[list[float]] = []
    for noise, rate, steps in torch.cat([before, more]).tolist():
        if rows and rows[-1][:2] == [noise, rate]:
            rows[-1][2] += steps
        else:
            rows.append([noise, rate, steps])
    return torch.tensor(rows, dtype=torch.float64).view(-1, 3)


def round_cost(private: Private, epochs: int) -> RoundCost:
    """Return the cost of `epochs` over the loader: the optimizer steps on zero gradients while the engine counts."""
    rate = sample_rate(private.loader)
    with watched() as steps:
        for _ in range(epochs):
            for _ in private.loader:
                private.optimizer.zero_grad()
                for parameter in private.optimizer.params:
                    parameter.grad_sample = torch.zeros(1, *parameter.shape)
                private.optimizer.step()
    if isinstance(private.optimizer, AdaClipDPOptimizer) and not ADJUSTS:
        return RoundCost((), "its accountant, before Opacus 1.6, does not count what the clipping norm is moved by")
    history = tuple((float(n), float(q), int(s)) for n, q, s in private.engine.accountant.history)
    return RoundCost(history, _why_not(history, len(steps.kinds), rate))


def _why_not(history: tuple[tuple[float, float, int], ...], steps: int, rate: float | None) -> str:
    counted = sum(count for _, _, count in history)
    if counted != steps:
        return f"its engine's accountant counts {counted} of the {steps} steps of a round"
    if any(noise == 0 for noise, _, _ in history):
        return "its noise multiplier is 0"
    if rate is None:
        return "its batches are no Poisson samples, of which alone the accountant's epsilon is"
    if any(rate > sampled * (1 + 1e-9) for _, sampled, _ in history):
        return f"examples are sampled at rate {rate:g}, and its accountant counts {min(q for _, q, _ in history):g}"
    return ""


def noise_of(optimizer: Any) -> float:
    """Return the standard deviation of the noise on a sum of clipped gradients; 0 without noise."""
    multiplier = float(optimizer.noise_multiplier)
    if multiplier and ADJUSTS and isinstance(optimizer, AdaClipDPOptimizer):  # the rest is on the count
        multiplier = (multiplier**-2 - (2 * optimizer.unclipped_num_std) ** -2) ** -0.5
    return multiplier * float(optimizer.max_grad_norm)


def sample_rate(loader: Any) -> float | None:
    """Return the rate of a loader's Poisson sampling, None if it samples otherwise."""
    sampler = loader.batch_sampler
    while isinstance(sampler, BatchSplittingSampler):
        sampler = sampler.sampler
    return float(sampler.sample_rate) if isinstance(sampler, UniformWithReplacementSampler) else None


def accounted_epsilon(engine: Any, cost: RoundCost, rounds: int, delta: float) -> float | None:
    """Return the epsilon of `rounds` rounds by the engine's own accountant; None if it is not finite.

    From `LARGEST_NUMERICAL_EPSILON` on, the RDP bound is returned: the numerical accountant would take gigabytes, or
    overflow.
    """
    bounding = RDPAccountant()  # type: ignore[no-untyped-call]  # Opacus's
    for accountant in (bounding, engine.accountant):
        accountant.history = [(noise, rate, steps * rounds) for noise, rate, steps in cost.history]
    if delta >= 1:
        return 0.0
    bound = float(bounding.get_epsilon(delta))
    value = bound if bound >= LARGEST_NUMERICAL_EPSILON else float(engine.get_epsilon(delta))
    return value if math.isfinite(value) else None


@node
class AccountedState:
    """A client's state. history: float64 [K, 3], its accountants' entries: noise multiplier, rate, steps."""

    history: Tensor


@node
class PrivateChange:
    """A client's result. change: start minus end of its weights; history: of its accountant in this round."""

    change: Params
    history: Tensor


@dataclass(frozen=True)
class OpacusDefense(Defense):
    """Opacus's private training as a defense."""

    version: ClassVar[str] = f"1+opacus{metadata.version('opacus')}"
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
            value = accounted_epsilon(_private(self, plan, examples).engine, cost, rounds, 1 / examples)
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
            (),
            "its noise is the same whenever it is run: its code seeds it, and whoever knows the seed can subtract it",
        )
    return cost


# -- A user's function that makes a training private, as a defense --


def defense(address: str, name: str) -> type[OpacusDefense]:
    """Return the defense of the function at MODULE:OBJECT; UsageError: there is no such function."""
    function = user_function(address, name, Public._fields)

    def parts(self: OpacusDefense, training: Public) -> Any:
        arguments = {part: value for part, value in training._asdict().items() if part in function.accepts}
        return function.call(**arguments, **asdict(self))

    return function.defense(OpacusDefense, parts=parts)


@dataclass(frozen=True)
class OpacusDPSGD(OpacusDefense):
    """Opacus's DP-SGD: each example's gradient clipped to `max_grad_norm`, noise in units of it.

    accountant: Opacus's accountant of epsilon: "prv" (its default, numerical) or "rdp" (a bound, for any noise).
    """

    noise_multiplier: Annotated[float, between(1e-12, LARGEST_NUMBER, zero=True)] = 0.5
    max_grad_norm: Positive = 1.0
    poisson_sampling: bool = True
    accountant: Literal["prv", "rdp"] = "rdp"

    name: ClassVar[str] = "opacus:stock/dp_sgd"
    control: ClassVar[str] = "noise_multiplier"
    grids: ClassVar[Grids] = {"quick": (0.01, 0.1, 1.0), "paper": (0.001, 0.01, 0.1, 0.5, 1.0, 2.0)}
    paper: ClassVar[str] = "Yousefpour et al., Opacus: User-Friendly Differential Privacy Library in PyTorch, 2021"

    def settings(self, training: Public) -> dict[str, Any]:
        """Return further arguments of `make_private`."""
        return {"max_grad_norm": self.max_grad_norm}

    def parts(self, training: Public) -> Any:
        """Return the engine, and what it makes of the training."""
        engine = PrivacyEngine(accountant=self.accountant, secure_mode=False)
        made = engine.make_private(
            module=training.model,
            optimizer=training.optimizer,
            data_loader=training.loader,
            noise_multiplier=self.noise_multiplier,
            poisson_sampling=self.poisson_sampling,
            **self.settings(training),
        )
        return engine, *made


@dataclass(frozen=True)
class PerLayer(OpacusDPSGD):
    """As dp_sgd, but each tensor's gradient is clipped by itself, all alike, to `max_grad_norm` together."""

    name: ClassVar[str] = "opacus:stock/dp_sgd_per_layer"

    def settings(self, training: Public) -> dict[str, Any]:
        """Return the kind of clipping, and each tensor's norm."""
        count = len(list(training.model.parameters()))
        return {"clipping": "per_layer", "max_grad_norm": [self.max_grad_norm / count**0.5] * count}


@dataclass(frozen=True)
class Adaptive(OpacusDPSGD):
    """As dp_sgd, but the norm follows a quantile of the gradients' norms from step to step, by a noisy count.

    Each round begins at `max_grad_norm` again, as the optimizer is made anew.
    """

    quantile: OpenShare = 0.5
    clip_rate: Positive = 0.2
    least_norm: Positive = 0.01
    most_norm: Positive = 100.0
    count_std: Positive = 10.0

    name: ClassVar[str] = "opacus:stock/dp_sgd_adaptive"

    def settings(self, training: Public) -> dict[str, Any]:
        """Return the kind of clipping, and how the norm moves."""
        moving = {"target_unclipped_quantile": self.quantile, "clipbound_learning_rate": self.clip_rate}
        ends = {"min_clipbound": self.least_norm, "max_clipbound": self.most_norm}
        return {
            **super().settings(training), **moving, **ends, "clipping": "adaptive", "unclipped_num_std": self.count_std,
        }  # fmt: skip


OPACUS_STOCK: tuple[type[OpacusDPSGD], ...] = (OpacusDPSGD, PerLayer, *((Adaptive,) if RELEASE >= (1, 5) else ()))
"""Before 1.5 `make_private` does not pass on the adaptive optimizer's settings."""
