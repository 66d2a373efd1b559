"""Networks that nobody wrote for this bench: any `nn.Module` that classifies, made a `Classifier`.

The network is split at the linear layer that gives its logits. What makes the gradient of a batch another thing than a
function of weights and batch is settled here, once, by two options that records state: batch norm (`norms`), dropout.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import replace_all_batch_norm_modules_
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ppbench.base.errors import UsageError, one_line, shown
from ppbench.base.vision import importable
from ppbench.nets.classifier import Classifier

Options = Mapping[str, str | int | float | bool]
NORMS = ("batch", "running")
DROPOUT = ("refused", "off")
_CLASSES = ("classes", "num_classes", "n_classes", "num_labels")
_SHAPE = ("shape", "input_shape")
_CHANNELS = ("channels", "in_channels", "in_chans")
ONE_VALUE = "Expected more than 1 value per channel"
"""What torch says of batch statistics of one number."""


class _Reached(BaseException):
    """What the head is given, on its way out of a network: nothing behind the head is run."""

    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.features = features


class _Tap(nn.Module):
    """Stands where the head was."""

    def forward(self, features: Tensor) -> Tensor:
        raise _Reached(features)


class Given(Classifier):
    """A network of somebody else's. Without its head it is `features`, whose parameters keep their names.

    head_name: what the head is called in it: "fc" for the "fc.weight" of its `state_dict`; "" if it is all there is.
    """

    def __init__(self, module: nn.Module, head: nn.Linear, head_name: str) -> None:
        super().__init__(_up_to_head(module), head)
        self.head_name = head_name

    def own_name(self, name: str) -> str:
        """Return what the parameter `name` of this classifier is called in the network as it was written."""
        part, _, rest = name.partition(".")
        return ".".join(filter(None, (self.head_name, rest))) if part == "head" else rest


def _up_to_head(module: nn.Module) -> nn.Module:
    """Return `module`, which gives what its tap is given from now on.

    It computes attention step by step: fused, it cannot be differentiated twice. What it is given is laid out as torch
    does by default, for it may `view` it: color images lie channels-last here. Its class, not a module around it,
    says so: parameters keep their names, and who traces it finds it.
    """
    former = type(module)

    def forward(self: nn.Module, x: Tensor) -> Tensor:  # one input, by name: torch.fx must trace it
        try:
            with sdpa_kernel(SDPBackend.MATH):
                former.forward(self, x.contiguous())
        except _Reached as reached:
            return reached.features
        raise RuntimeError("the network has not come to its last linear layer")

    module.__class__ = type(former.__name__, (former,), {"forward": forward, "__module__": former.__module__})
    return module


class _Unfit(UsageError):
    """Why a module is no network of ours, a clause."""


def build(name: str, factory: Callable[..., Any], shape: tuple[int, ...], classes: int, options: Options) -> Classifier:
    """Return what `factory` makes, as a classifier; UsageError where it is none.

    factory: called with what it names of classes, num_classes, shape, in_channels and their like, and with `options`.
    Of these, `norms` is "batch" (batch norm uses the statistics of the batch, in training and in use) or "running" (it
    uses those that the module comes with, which never change), and `dropout` may be "off"; else dropout is refused.
    """
    own = dict(options)
    norms, dropout = own.pop("norms", NORMS[0]), own.pop("dropout", DROPOUT[0])
    try:
        for option, value, known in (("norms", norms, NORMS), ("dropout", dropout, DROPOUT)):
            if value not in known:
                raise _Unfit(f"{option} must be {' or '.join(known)}, not {shown(value)}")
        arguments = {**_arguments(factory, shape, classes), **own}
        module = importable(lambda: factory(**arguments))
        if isinstance(module, Classifier):
            return module
        if not isinstance(module, nn.Module):
            raise _Unfit(f"it gave {one_line(type(module).__name__, 60)}; it must give an nn.Module")
        mixes = _settle(module, str(norms), str(dropout))
        found = _split(module, shape, classes)
    except _Unfit as cause:
        raise UsageError(f"Model {shown(name)} cannot be used for inputs {shape}: {cause}.") from cause
    found.mixes = mixes
    return found


def _arguments(factory: Callable[..., Any], shape: tuple[int, ...], classes: int) -> dict[str, Any]:
    """Return what a factory asks for by name; one that hands all on (**kwargs) is given num_classes."""
    parameters = inspect.signature(factory).parameters
    found: dict[str, Any] = {}
    for names, value in ((_CLASSES, classes), (_SHAPE, shape), (_CHANNELS, shape[0])):
        found |= {name: value for name in names if name in parameters}
    hands_on = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return {"num_classes": classes, **found} if hands_on and not {*_CLASSES} & {*found} else found


def _settle(module: nn.Module, norms: str, dropout: str) -> bool:
    """Make of a module a function of its weights and a batch, and return whether its examples depend on one another.

    _Unfit: it draws, and that is not switched off.
    """
    module.train()
    parts = dict(module.named_modules())
    drawing = [n for n, m in parts.items() if (isinstance(m, _DropoutNd) and m.p) or attention_draws(m)]
    if drawing and dropout != "off":
        raise _Unfit(f"it has dropout ({drawing[0]}), which draws in every pass; take the option dropout=off")
    for part in parts.values():
        if isinstance(part, _DropoutNd):
            part.p = 0.0
        elif isinstance(part, nn.MultiheadAttention):
            part.dropout = 0.0
        elif isinstance(part, _BatchNorm) and norms == "running":
            if part.running_mean is None:
                raise _Unfit("it has a batch norm without running statistics; take the option norms=batch")
            part.eval()
        elif isinstance(getattr(part, "inplace", None), bool):
            part.inplace = False  # what is overwritten cannot be differentiated twice
    if norms == "batch":
        replace_all_batch_norm_modules_(module)
    return norms == "batch" and any(isinstance(part, _BatchNorm) for part in parts.values())


def attention_draws(module: nn.Module) -> bool:
    """Return whether a module is attention with dropout in it."""
    return isinstance(module, nn.MultiheadAttention) and module.dropout > 0


def _split(module: nn.Module, shape: tuple[int, ...], classes: int) -> Given:
    """Return a module split at the linear layer that gives its logits; _Unfit where there is none."""
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
    outputs: dict[str, Tensor] = {}
    linear = {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    hooks = [
        part.register_forward_hook(lambda _, __, out, name=name: outputs.__setitem__(name, out))
        for name, part in linear.items()
    ]
    with torch.no_grad():
        logits, again = module(x), module(x)
    for hook in hooks:
        hook.remove()
    if not isinstance(logits, Tensor) or logits.shape != (2, classes):
        told = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise _Unfit(f"it answers two inputs by {told}; it must answer by logits [2, {classes}]")
    if not torch.equal(logits, again):
        raise _Unfit("it draws in its forward pass, outside of nn.Dropout; let it draw nothing")
    name = next((n for n, out in reversed(outputs.items()) if _same(out, logits)), None)
    if name is None:
        raise _Unfit("its logits are not the output of an nn.Linear; let it end in one (a log_softmax may follow)")
    if name:
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, _Tap())
    found = Given(module if name else _Tap(), linear[name], name)
    with torch.no_grad():
        features = found.features(x)
        if features.dim() != 2 or not _same(found.head(features), logits):
            raise _Unfit(f"its last linear layer, {name}, is used elsewhere too; let nothing else depend on it")
        found.fewest = _fewest(found, x)
    return found


def _same(out: Tensor, logits: Tensor) -> bool:
    """Return whether `out` are the logits, or log-probabilities are theirs: cross-entropy is the same of both."""
    return out.shape == logits.shape and any(
        torch.allclose(one, logits, rtol=1e-4, atol=1e-5) for one in (out, out.log_softmax(1))
    )


def _fewest(found: Given, x: Tensor) -> int:
    try:
        found.features(x[:1])
    except ValueError as cause:
        if ONE_VALUE not in str(cause):
            raise
        return 2
    return 1
