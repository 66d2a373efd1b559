"""Other people's code as a defense: a function, the state that its objects keep, the steps of its optimizer."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import logging
import random
import re
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ppbench.base.declarations import SCALARS, is_scalar
from ppbench.base.errors import ProtocolError, UsageError, one_line, shown
from ppbench.base.import_guard import error_text, within
from ppbench.base.registry import imported
from ppbench.base.tree import Tree, node
from ppbench.federation.contract import Defense
from ppbench.federation.plan import Context
from ppbench.nets.modes import kept_generators

# -- Runs a framework's code in this process: seeded, quiet, with its errors as ours --


@contextmanager
def seeded_run(framework: str, who: str, *seed: int) -> Iterator[None]:
    """Run code with the global generators of Python, NumPy and torch seeded; restore their states afterwards.

    Mechanisms draw from them. framework: its top package, of whose log only errors pass; who: for the error.
    ProtocolError: the code raises anything.
    """
    log, level = logging.getLogger(framework), logging.getLogger(framework).level
    words = np.random.SeedSequence(seed).generate_state(4)
    log.setLevel(logging.ERROR)
    try:
        with kept_generators():
            random.seed(int(words[0]))
            np.random.seed(words[:3])
            torch.default_generator.manual_seed(int(words[3]))
            yield
    except (ProtocolError, UsageError):
        raise
    except BaseException as cause:
        # What Flower raises to end an app is no Exception in its older versions.
        if isinstance(cause, Exception) or within(type(cause).__module__, framework):
            raise ProtocolError(f"{who} raised {error_text(cause)}.") from cause
        raise
    finally:
        log.setLevel(level)


def context_seed(ctx: Context) -> int:
    """Return the seed of a party's draws in this step: from its generator's seed, not its position, and the session."""
    return int.from_bytes(hashlib.sha256(f"{ctx.generator.initial_seed()} {ctx.session}".encode()).digest()[:8], "big")


def description(defense: Defense) -> str:
    """Return a defense and its parameters in words, for errors that its code raises."""
    parameters = ", ".join(f"{name}={value}" for name, value in asdict(defense).items()) or "no parameters"
    return f"Defense {defense.name!r}, made of {parameters},"


@contextmanager
def as_usage_error() -> Iterator[None]:
    """Turn a ProtocolError into a UsageError: before a run starts, bad input is its cause."""
    try:
        yield
    except ProtocolError as cause:
        raise UsageError(str(cause)) from cause


# -- Snapshots of a user's object between rounds, restored into a new object. Nothing is pickled --

_CODE = (
    *(type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
    *(logging.Logger, re.Pattern, type(threading.Lock()), type(threading.RLock())),
)
"""Attributes that a snapshot leaves out: a new object has them too."""


@node(name="ppbench.adapters.held.Numpy")
class Numpy:
    """A NumPy array."""

    values: Tensor


@node(name="ppbench.adapters.held.Pairs")
class Pairs:
    """A dict. keys: str, int, float, bool or None; values: their snapshots."""

    keys: tuple[Any, ...]
    values: tuple[Any, ...]


@node(name="ppbench.adapters.held.Sequence")
class Sequence:
    """A list or a tuple. kind: which of them; items: their snapshots."""

    kind: str
    items: tuple[Any, ...]


@node(name="ppbench.adapters.held.Thing")
class Thing:
    """An object of another class. kind: its qualified name; names, values: its attributes except code."""

    kind: str
    names: tuple[str, ...]
    values: tuple[Any, ...]


Converter = Callable[[Any], Any]
"""Converts a framework's own values to trees, or back; None for all others."""


def snapshot(value: Any, where: str, convert: Converter = lambda value: None) -> Tree:
    """Return a tree of copies of all that an object holds, except code (ProtocolError: a value cannot be copied)."""
    if (tree := convert(value)) is not None:
        return tree
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        return Numpy(torch.from_numpy(np.array(value)))
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        values = tuple(snapshot(item, f"{where}[{key!r}]", convert) for key, item in value.items())
        return Pairs(tuple(value), values)
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return Sequence(kind, tuple(snapshot(item, f"{where}[{i}]", convert) for i, item in enumerate(value)))
    if not hasattr(value, "__dict__") or isinstance(value, random.Random):
        raise ProtocolError(f"{where} is a {one_line(type(value).__name__, 60)}, of which no probe can have a copy.")
    attributes = {n: v for n, v in vars(value).items() if not isinstance(v, _CODE)}
    return Thing(
        type(value).__qualname__,
        tuple(attributes),
        tuple(snapshot(v, f"{where}.{n}", convert) for n, v in attributes.items()),
    )


def restored(fresh: Any, tree: Tree, where: str, convert: Converter = lambda tree: None) -> Any:
    """Return the value of a snapshot; the attributes of an object are set on `fresh`, a new object of its class."""
    if (converted := convert(tree)) is not None:
        return converted
    if isinstance(tree, Numpy):
        values = tree.values.cpu().numpy().copy()
        return values if values.ndim or not isinstance(fresh, np.generic | int | float) else values[()]
    if isinstance(tree, Pairs):
        known = fresh if isinstance(fresh, dict) else {}
        updated = {k: restored(known.get(k), v, where, convert) for k, v in zip(tree.keys, tree.values, strict=True)}
        known.clear()  # a dict of a class of its own stays one
        known.update(updated)
        return known
    if isinstance(tree, Sequence):
        before = fresh if isinstance(fresh, list | tuple) else ()
        items = [
            restored(before[i] if i < len(before) else None, item, where, convert) for i, item in enumerate(tree.items)
        ]
        return items if tree.kind == "list" else tuple(items)
    if isinstance(tree, Thing):
        if type(fresh).__qualname__ != tree.kind:
            problem = f"a {tree.kind} that it was not made with"
            raise ProtocolError(f"{where} keeps {problem}, of which no probe can have a copy; make it from the start.")
        for name, value in zip(tree.names, tree.values, strict=True):
            setattr(fresh, name, restored(getattr(fresh, name, None), value, f"{where}.{name}", convert))
        return fresh
    return tree.clone() if isinstance(tree, Tensor) else tree


# -- Observes another framework's training: its optimizer, rate and number of steps, by torch's own hook --


@dataclass
class Steps:
    """The observed steps. kinds: class of the optimizer, rate and weight decay of each step."""

    kinds: list[tuple[str, float, float]] = field(default_factory=list)

    @property
    def optimizer(self) -> str:
        """The optimizer's name, in lower case."""
        return self.kinds[0][0].lower()

    @property
    def lr(self) -> float:
        """The learning rate."""
        return self.kinds[0][1]

    @property
    def words(self) -> str:
        """Optimizer and rate, for messages."""
        return f"{one_line(self.kinds[0][0], 40)} at rate {self.lr:g}"

    def checked(self, name: str, epochs: int) -> Steps:
        """Return these steps, observed on one example; UsageError unless they are plain SGD, one step per epoch."""
        right = "one step an epoch on one batch is what attacks can read"
        if len(self.kinds) != epochs:
            raise UsageError(
                f"Defense {name!r} took {len(self.kinds)} steps of torch.optim in {epochs} epochs; {right}."
            )
        if len({*self.kinds}) != 1 or self.kinds[0][2] or self.optimizer != "sgd":
            method = f"{self.words}, weight decay {self.kinds[0][2]:g}"
            raise UsageError(
                f"Defense {name!r} trains by {method}; SGD at one rate, without decay, is what attacks can read."
            )
        return self


@contextmanager
def watched() -> Iterator[Steps]:
    """Record the steps of every torch optimizer in the block."""
    steps = Steps()

    def after(optimizer: Optimizer, *_: Any) -> None:
        groups = optimizer.param_groups
        steps.kinds += {(type(optimizer).__name__, float(g["lr"]), float(g.get("weight_decay", 0))) for g in groups}

    handle = register_optimizer_step_post_hook(after)
    try:
        yield steps
    finally:
        handle.remove()


# -- A user's function as a defense: it returns a framework's mechanism, and its parameters become the defense's --

T = TypeVar("T")


class UserFunction(NamedTuple):
    """A user's function. fields: its own parameters, as `make_dataclass` takes them; accepts: the parameters that it
    takes of those that ppbench supplies; about: class attributes of the defense: name, control, grids, docstring.
    """

    call: Callable[..., Any]
    fields: list[tuple[str, Any, Any]]
    accepts: frozenset[str]
    about: dict[str, Any]

    def defense(self, base: type[T], **attributes: Any) -> type[T]:
        """Return a subclass of `base` with these parameters.

        UsageError: a parameter has the name of an attribute of defenses, such as `noise`.
        """
        if taken := next((name for name, *_ in self.fields if hasattr(base, name)), None):
            problem = "which means something else of a defense; call it another name"
            raise UsageError(f"The defense {self.about['name']!r} has the parameter {taken!r}, {problem}.")
        about = {**self.about, **attributes}
        return dataclasses.make_dataclass("Yours", self.fields, bases=(base,), namespace=about, frozen=True)


def user_function(address: str, name: str, supplied: tuple[str, ...]) -> UserFunction:
    """Return the function at MODULE:OBJECT for the defense `name`; ppbench supplies the parameters `supplied`.

    UsageError: it is no function, or another parameter has no default that is a number, a string or a bool.
    """
    call: Callable[..., Any] = imported(metadata.EntryPoint(name, address, ""))
    if not callable(call):
        right = ", ".join((*supplied, "**parameters"))
        raise UsageError(f"The defense {name!r} is {shown(call, 60)}; it must be a function ({right}).")
    fields: list[tuple[str, Any, Any]] = []
    parameters = inspect.signature(call).parameters
    for parameter in (p for p in parameters.values() if p.name not in supplied and p.kind is not p.VAR_KEYWORD):
        if parameter.default is parameter.empty or not is_scalar(parameter.default):
            raise UsageError(f"The defense {name!r} has the parameter {parameter.name} without a default; {SCALARS}.")
        fields.append((parameter.name, type(parameter.default), dataclasses.field(default=parameter.default)))
    numbers = [n for n, _, f in fields if isinstance(f.default, int | float) and not isinstance(f.default, bool)]
    control = numbers[0] if numbers else None
    usual = tuple(float(f.default) for n, _, f in fields if n == control)
    about = {
        "name": name, "control": control, "grids": {"quick": usual, "paper": usual},
        "__doc__": inspect.getdoc(call) or "", "__module__": getattr(call, "__module__", __name__),
    }  # fmt: skip
    return UserFunction(call, fields, frozenset(parameters) & {*supplied}, about)
