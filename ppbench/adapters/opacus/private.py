"""What of Opacus trains: its engine, model, optimizer and loader, made by somebody's code of what the bench holds."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from opacus import PrivacyEngine
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ppbench.adapters.running import running as seeded
from ppbench.base.errors import UsageError, one_line
from ppbench.base.tree import Params
from ppbench.federation.plan import Data, Plan
from ppbench.nets.net import Net
from ppbench.nets.split import Given

BEFORE = "_module."
"""What Opacus puts before the names of a network that it wraps."""
FORM = "(engine, model, optimizer, loader)"


class Public(NamedTuple):
    """What is made private: a network with its weights, its optimizer, and the loader of a client's examples."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: DataLoader[Any]


class Private(NamedTuple):
    """What was made of it."""

    engine: Any
    model: nn.Module
    optimizer: Any
    loader: Any


@contextmanager
def running(who: str, *seed: int) -> Iterator[None]:
    """Run `who`'s code as `ppbench.adapters.running` does, without Opacus's warnings: of its random numbers, that
    secure_mode is off; of torch's hooks, that inputs need no gradient; of its accountant, at which order it ended.
    """
    with warnings.catch_warnings(), seeded("opacus", who, *seed):
        warnings.filterwarnings("ignore", module=r"opacus\b")
        warnings.filterwarnings("ignore", message=".*[Ff]ull backward hook")
        yield


def public(plan: Plan, params: Params, data: Data, lr: float) -> Public:
    """Return what a client trains with: weights `params`, SGD at rate `lr`, batches of the plan's size, shuffled.

    The loader's items are pairs of an input and its one-hot target; its last batch may be smaller.
    """
    model = module_of(plan.net, params)
    optimizer = torch.optim.SGD(model.parameters(), lr, plan.local.opt.momentum)
    return Public(model, optimizer, DataLoader(TensorDataset(data.x, data.y), plan.local.batch, shuffle=True))


def blank(plan: Plan, count: int) -> Data:
    """Return so many examples in the memory of one: for counts of steps, of which examples do not matter."""
    x = torch.rand(1, *plan.spec.shape, generator=torch.Generator().manual_seed(0))
    y = torch.eye(plan.spec.classes)[:1]
    return Data(x.expand(count, *x.shape[1:]), y.expand(count, -1))


def module_of(net: Net, params: Params) -> nn.Module:
    """Return the network as a module of its own on the CPU, with copies of `params` for weights.

    Somebody's is put together again as he wrote it: his code may look for its layers, and Opacus pickles its class.
    """
    module = copy.deepcopy(net.module).to_empty(device="cpu")
    known = {**net.frozen, **params}
    with torch.no_grad():
        for name, value in [*module.named_parameters(), *module.named_buffers()]:
            value.copy_(known[name])
    if not isinstance(module, Given):
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
    """Return copies of a private network's weights by the bench's names; UsageError: it is another network."""
    found = {n.removeprefix(BEFORE): value for n, value in model.named_parameters() if value.requires_grad}
    names = {n: net.module.own_name(n) if isinstance(net.module, Given) else n for n in like}
    if {n: v.shape for n, v in found.items()} != {names[n]: v.shape for n, v in like.items()}:
        raise UsageError(
            f"Defense {name!r} trains a network of other parameters than it was given; it must keep their names and "
            "shapes (a network that must be mended for Opacus is given mended, by --model)."
        )
    return {n: found[own].detach().clone() for n, own in names.items()}


def checked(made: object, name: str) -> Private:
    """Return what somebody's code made, if it is private (UsageError: it is something else, or not)."""
    if not isinstance(made, tuple | list) or len(made) != len(Private._fields):
        count = f" of {len(made)}" if isinstance(made, tuple | list) else ""
        raise UsageError(f"Defense {name!r} gave a {one_line(type(made).__name__, 60)}{count}; it must give {FORM}.")
    found = Private(*made)
    for part, kind in zip(found, (PrivacyEngine, nn.Module, DPOptimizer, DataLoader), strict=True):
        if not isinstance(part, kind):
            told = one_line(type(part).__name__, 60)
            raise UsageError(f"Defense {name!r} gave a {told} where a {kind.__name__} must be, in {FORM}.")
    if not {id(p) for p in found.model.parameters() if p.requires_grad} <= {id(p) for p in found.optimizer.params}:
        raise UsageError(f"Defense {name!r} gave an optimizer of other weights than its model's.")
    return found
