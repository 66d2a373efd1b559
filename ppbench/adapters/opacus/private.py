"""The parts of Opacus's training (engine, model, optimizer, loader), which a user's code makes from ppbench's."""

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

from ppbench.adapters.running import seeded_run
from ppbench.base.errors import UsageError, one_line
from ppbench.base.tree import Params
from ppbench.federation.plan import Data, Plan
from ppbench.nets.net import Net
from ppbench.nets.split import UserNetwork

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
    names = {n: net.module.own_name(n) if isinstance(net.module, UserNetwork) else n for n in like}
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
