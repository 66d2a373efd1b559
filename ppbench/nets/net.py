"""A network as a pure function of its parameters, split where defenses and attacks need it: features, then head."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ppbench.base.blame import guard, refuse, stranger
from ppbench.base.errors import UsageError, because, shown, unknown
from ppbench.base.machine import check_room
from ppbench.base.registry import ADDRESSED, find, load
from ppbench.base.tree import Params
from ppbench.nets import given
from ppbench.nets.classifier import Classifier as Classifier
from ppbench.nets.split import Given

Option = str | int | float | bool


@dataclass(frozen=True)
class NetSpec:
    """What names a network: enough to build it again elsewhere. shape: of one input, without the batch axis."""

    model: str
    shape: tuple[int, ...]
    classes: int
    options: tuple[tuple[str, Option], ...] = ()


def net_spec(model: str, shape: tuple[int, ...], classes: int, options: Mapping[str, Option] | None = None) -> NetSpec:
    """Return the spec of a network, options sorted."""
    return NetSpec(model, tuple(shape), classes, tuple(sorted((options or {}).items())))


class Net:
    """A network as a function of explicit parameters; of weights it holds the frozen ones alone, on CPU.

    module, names, parameter_count: layers on the meta device; the (trainable) parameters in order; their entries.
    frozen, frozen_parameters: constants by name, buffers too; the names of those that are parameters. feature_count: D,
    the width of the head's input. pixelwise: whether pixels are classified: features and outputs are maps. head_bias:
    whether the head has a bias, trained or not. mixes, fewest, most: as the module's.

    UsageError: no parameter is trained.
    """

    def __init__(self, spec: NetSpec, module: Classifier) -> None:
        head = module.head
        every = dict(module.named_parameters(remove_duplicate=False))
        trained = {name: value for name, value in every.items() if value.requires_grad}
        if not trained:
            raise UsageError(
                f"Model {spec.model!r} has no parameter that requires a gradient; leave one to be trained."
            )
        self.spec = spec
        self.frozen = {name: value.detach() for name, value in every.items() if name not in trained}
        self.frozen_parameters = tuple(self.frozen)
        self.frozen |= {name: value.detach() for name, value in module.named_buffers(remove_duplicate=False)}
        self._dtypes = {name: value.dtype for name, value in every.items()}
        self._dtypes |= {name: value.dtype for name, value in self.frozen.items()}
        self.module = module.to("meta")
        self.names = tuple(trained)
        self.parameter_count = sum(value.numel() for value in trained.values())
        self.pixelwise = isinstance(head, nn.Conv2d)
        self.feature_count = head.in_channels if isinstance(head, nn.Conv2d) else head.in_features
        self.head_bias = head.bias is not None
        self.mixes, self.fewest, self.most = module.mixes, module.fewest, module.most
        self._written, self._single = module.written, module.single

    def own_name(self, name: str) -> str:
        """Return what the parameter or layer `name` is called in the network as somebody wrote it."""
        return self.module.own_name(name) if isinstance(self.module, Given) else name

    @cached_property
    def frozen_sha256(self) -> str:
        """The SHA-256, in hex, of the frozen tensors: names, dtypes, shapes and bytes."""
        digest = hashlib.sha256()
        for name, value in sorted(self.frozen.items()):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
            digest.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())  # NumPy has no bfloat16
        return digest.hexdigest()

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """Return logits [B, C], of pixels [B, C, H, W], of x [B, *shape] under `params`."""
        return self.head(params, self.features(params, x))

    def features(self, params: Params, x: Tensor) -> Tensor:
        """Return the head's input [B, D], of pixels [B, D, H, W], of x [B, *shape]."""
        if self.most is not None and len(x) > self.most:
            raise UsageError(f"Model {self.spec.model!r} takes one input at a time; let batches have one example.")
        return self._call(self.module.features, self._known("features.", params, x), x)

    def _known(self, prefix: str, params: Params, x: Tensor) -> Params:
        """Return parameters and frozen tensors of a part of the module by their names in it, as `x` needs them.

        Anew, for what is made inside vmap must not outlive it. What a pass writes into is a copy, mapped by vmap where
        `x` or `params` are: it may become another for each.
        """
        found = {n: v for n, v in self.frozen.items() if n.startswith(prefix)}
        floats = {n for n, v in found.items() if v.is_floating_point() and not self._single}
        found = {n: v.to(x.device, x.dtype if n in floats else v.dtype) for n, v in found.items()}
        if written := self._written & found.keys():
            mapped = (torch.zeros_like(value.detach().flatten()[0]) for value in (x, next(iter(params.values()))))
            nothing = torch.stack([*mapped]).sum()
            found |= {n: found[n] + nothing.to(found[n].dtype) for n in written}
        own = self._dtypes if self._single else {}
        found |= {n: v.to(own.get(n, v.dtype)) for n, v in params.items() if n.startswith(prefix)}
        return {n.removeprefix(prefix): value for n, value in found.items()}

    def _call(self, part: nn.Module, known: Params, x: Tensor) -> Tensor:
        # Every name is in `known`: no trained parameter has two (`check_untied`), a constant is there under each.
        out: Tensor = functional_call(part, known, (x.float() if self._single else x,), tie_weights=False)
        return out.to(x.dtype) if self._single else out

    def flat_features(self, params: Params, x: Tensor) -> Tensor:
        """Return the output [B, F] of the first Flatten layer, behind the convolutions; UsageError without one."""
        return self._part(slice(None, self.flat_at + 1), params, x)

    def behind_flat(self, params: Params, flat: Tensor) -> Tensor:
        """Return the head's input [B, D] of the first Flatten layer's output [B, F]; UsageError without one."""
        return self._part(slice(self.flat_at + 1, None), params, flat)

    @property
    def flat_at(self) -> int:
        """Place of the first Flatten layer among the features' layers; UsageError without one."""
        index = [isinstance(layer, nn.Flatten) for layer in self.module.layers or ()]
        if True not in index:
            raise UsageError(f"Model {self.spec.model!r} has no Flatten layer to tap; use phi_tap='head'.")
        return index.index(True)

    def _part(self, which: slice, params: Params, x: Tensor) -> Tensor:
        assert self.module.layers is not None  # `flat_at` has raised
        part = self.module.layers[which]
        own = {name for name, _ in [*part.named_parameters(), *part.named_buffers()]}
        known = self._known("features.", params, x)
        return self._call(part, {name: value for name, value in known.items() if name in own}, x)

    def head(self, params: Params, features: Tensor) -> Tensor:
        """Return logits [B, C] of features [B, D], or [B, C, H, W] of [B, D, H, W]."""
        return self._call(self.module.head, self._known("head.", params, features), features)


BYTES = 4 * 4
"""Of a parameter while it is trained, at the least: float32 weight, gradient and an optimizer's two."""


def _construct(spec: NetSpec) -> Classifier:
    factory, plugin = load("models", spec.model), find("models", spec.model)
    foreign = plugin is not None and plugin.distribution == ADDRESSED
    if not foreign:
        _check_options(spec, factory)
    try:
        if plugin is not None and plugin.ours:
            _check_size(spec, factory)
        with guard("models", spec.model):
            if foreign:
                module = given.build(spec.model, factory, spec.shape, spec.classes, dict(spec.options))
            else:
                module = factory(spec.shape, spec.classes, **dict(spec.options))
    except (TypeError, ValueError, RuntimeError, MemoryError, OverflowError) as cause:
        raise UsageError(
            f"Model {spec.model!r} cannot be built for inputs {spec.shape}: {because(cause, 400)}."
        ) from cause
    if not isinstance(module, Classifier):
        raise UsageError(f"Model {spec.model!r} returned {type(module).__name__}; it must return a Classifier.")
    if isinstance(module.head, nn.Conv2d) and module.head.kernel_size != (1, 1):
        raise UsageError(f"Model {spec.model!r} has a head of {module.head.kernel_size}; on maps it must be 1x1.")
    check_untied(spec.model, module)
    if stranger("models", spec.model):
        with guard("models", spec.model):
            refuse("models", spec.model, _faults(module, spec))
    return module


def check_untied(name: str, module: nn.Module) -> None:
    """Refuse a network, called `name`, that has one trained parameter under two names (UsageError)."""
    trained = [p for _, p in module.named_parameters(remove_duplicate=False) if p.requires_grad]
    if len({id(parameter) for parameter in trained}) != len(trained):
        raise UsageError(f"Model {name!r} uses one parameter under two names; give each layer its own.")


def _faults(module: Classifier, spec: NetSpec) -> Iterator[str]:
    """Yield why a stranger's network is none that can be trained: asked with two inputs of zeros."""
    for name, value in module.named_parameters():
        if value.dtype != torch.float32 or value.device.type != "cpu" or not value.isfinite().all():
            yield f"makes the parameter {name}, which is not float32, finite and on the CPU"
    if not isinstance(module.head, nn.Linear | nn.Conv2d):
        yield f"makes a head that is a {type(module.head).__name__}; it must be a linear layer or a 1x1 convolution"
    with torch.no_grad():
        out = module(torch.zeros(2, *spec.shape))
    if not isinstance(out, Tensor) or out.shape[:2] != (2, spec.classes) or not out.isfinite().all():
        told = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        yield f"makes a network that answers {told} to two inputs; it must be finite and [2, {spec.classes}]"


def _check_options(spec: NetSpec, factory: Callable[..., Any]) -> None:
    """Refuse options that the model does not have (UsageError); one that hands them on is asked what it hands on to."""
    known = dict(inspect.signature(factory).parameters)
    if any(one.kind is one.VAR_KEYWORD for one in known.values()):
        known = {**known, **inspect.signature(getattr(factory, "options_of", factory)).parameters}
    own = [name for name, one in known.items() if one.kind is one.KEYWORD_ONLY]
    free = any(one.kind is one.VAR_KEYWORD for one in known.values()) and not hasattr(factory, "options_of")
    for name, _ in spec.options:
        if name not in own and not free:
            raise unknown(f"option of model {spec.model!r}", name, own or ["(it has none)"])


def _check_size(spec: NetSpec, factory: Callable[..., Any]) -> None:
    """Refuse a network that memory cannot hold (UsageError)."""
    if (count := _counted(spec, factory)) is not None:
        check_room(BYTES * count, f"Model {spec.model!r} with {count:,} parameters", "use a smaller one")


def _counted(spec: NetSpec, factory: Callable[..., Any]) -> int | None:
    """Return a network's parameters, counted on a device that holds no numbers; None where a file here decides."""
    if any(name == "weights" and value for name, value in spec.options) or spec.model == "frozen_backbone":
        return None
    with torch.device("meta"):
        made: nn.Module = factory(spec.shape, spec.classes, **dict(spec.options))
    return sum(value.numel() for value in made.parameters())


def parameters_of(spec: NetSpec) -> int | None:
    """Return how many parameters a network of ours has, none of them allocated, None of a stranger's or a file's.

    UsageError: it cannot be built.
    """
    plugin = find("models", spec.model)
    if plugin is None or not plugin.ours:
        return None
    _check_options(spec, plugin.loaded)
    try:
        return _counted(spec, plugin.loaded)
    except (TypeError, ValueError, RuntimeError, OverflowError, ArithmeticError, LookupError) as cause:
        raise UsageError(
            f"Model {spec.model!r} cannot be built for inputs {shown(spec.shape)}: {because(cause, 100)}."
        ) from cause


@dataclass(frozen=True)
class HeldSpec(NetSpec):
    """A network that somebody holds as an object (`nets.held`): it is known in this process alone, by no name.

    net: the network, and what two such specs are told apart by. start: its trainable weights as it came.
    """

    net: Net = field(kw_only=True)
    start: Params = field(kw_only=True, compare=False, repr=False)


def build(spec: NetSpec) -> Net:
    """Return the network that `spec` names; UsageError for an unknown model, or one that refuses shape or options."""
    return spec.net if isinstance(spec, HeldSpec) else _built(spec)


@lru_cache
def _built(spec: NetSpec) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # what is frozen is the same in every process, drawn or not
        return Net(spec, _construct(spec))


def initial(spec: NetSpec, seed: int) -> Params:
    """Return initial float32 values of the trainable parameters; a function of `spec` and `seed` alone.

    Of a network that somebody holds: its weights as they came, whatever the seed.
    """
    if isinstance(spec, HeldSpec):
        return {name: value.clone() for name, value in spec.start.items()}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` formats its call stack for later accelerators
        return trainable(_construct(spec))


def trainable(module: nn.Module) -> Params:
    """Return copies, float32, of the parameters of a module that are trained."""
    return {name: p.detach().clone().float() for name, p in module.named_parameters() if p.requires_grad}
