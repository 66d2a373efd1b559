"""Networks that nobody wrote for this bench: any `nn.Module` that classifies, made a `Classifier`.

The network is split at the linear layer that gives its logits. What makes the gradient of a batch another thing than a
function of weights and batch is settled here, once: draws, norms, and what layers keep between passes (`nets.modes`).
A network by its address is in training mode, but for what the options `norms` and `dropout` say, which records state;
one that somebody holds as an object is in the mode that each of its layers is in.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from ppbench.base.errors import UsageError, one_line, shown
from ppbench.base.vision import importable
from ppbench.nets import modes
from ppbench.nets.classifier import Classifier

T = TypeVar("T", bound=Classifier)
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

    head_name: what the head is called in it: "fc" for the "fc.weight" of its `state_dict`; "" if it is all there is;
    None if it has none: then `features` are its logits, and the head is constant.
    """

    def __init__(self, module: nn.Module, head: nn.Linear, head_name: str | None) -> None:
        super().__init__(_up_to_head(module, head_name is None), head)
        self.head_name = head_name

    @property
    def layers(self) -> nn.Sequential | None:
        """The layers before the head, where the module is an `nn.Sequential` that calls them one after another."""
        former = type(self.features).__mro__[1]
        hooked = any(part._forward_hooks or part._forward_pre_hooks for part in self.features.modules())
        return None if hooked else _before_tap(former, self.features)

    def own_name(self, name: str) -> str:
        """Return what the parameter `name` of this classifier is called in the network as it was written."""
        part, _, rest = name.partition(".")
        return ".".join(filter(None, (self.head_name, rest))) if part == "head" else rest


def _before_tap(kind: type[nn.Module], module: nn.Module) -> nn.Sequential | None:
    """Return the layers before the tap of a module of a `kind`; None where it does not just call one after another."""
    parts = OrderedDict(module.named_children())
    if kind.forward is not nn.Sequential.forward or not parts:
        return None
    name, last = parts.popitem()
    if isinstance(last, _Tap):
        return nn.Sequential(parts)
    inner = _before_tap(type(last), last)
    return None if inner is None else nn.Sequential(OrderedDict({**parts, name: inner}))


def _up_to_head(module: nn.Module, whole: bool) -> nn.Module:
    """Return `module`, which gives what its tap is given from now on; or, `whole`, what it gives.

    It computes attention step by step: fused, it cannot be differentiated twice. What it is given is laid out as torch
    does by default, for it may `view` it: color images lie channels-last here. Its class, not a module around it,
    says so: parameters keep their names, and who traces it finds it.
    """
    former = type(module)

    def forward(self: nn.Module, x: Tensor) -> Tensor:  # one input, by name: torch.fx must trace it
        try:
            with sdpa_kernel(SDPBackend.MATH), modes.unfused_attention():
                out: Tensor = former.forward(self, x.contiguous())
        except _Reached as reached:
            return reached.features
        if whole:
            return out
        raise RuntimeError("the network has not come to its last linear layer")

    module.__class__ = type(former.__name__, (former,), {"forward": forward, "__module__": former.__module__})
    return module


class _Unfit(UsageError):
    """Why a module is no network of ours, a clause."""


def build(name: str, factory: Callable[..., Any], shape: tuple[int, ...], classes: int, options: Options) -> Classifier:
    """Return what `factory` makes, as a classifier in training mode; UsageError where it is none.

    factory: called with what it names of classes, num_classes, shape, in_channels and their like, and with `options`.
    Of these, `norms` is "batch" (norms use the statistics of the batch, in training and in use) or "running" (layers
    that keep running statistics use those that the module comes with, which never change), and `dropout` may be "off":
    the layers that draw in training mode, each alone, are in eval mode; else they are refused. A network that answers
    by more than its logits in training mode (auxiliary heads) is itself in eval mode, its layers are not.
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
        return _split(_in_training(module, _examples(shape), str(norms), str(dropout)), _examples(shape), classes)
    except _Unfit as cause:
        raise UsageError(f"Model {shown(name)} cannot be used for inputs {shape}: {cause}.") from cause


def take(name: str, module: nn.Module, shape: tuple[int, ...]) -> Classifier:
    """Return a module of somebody's, a copy of ours, as a classifier in the mode that each of its layers is in.

    UsageError: it draws in that mode, or is no classifier.
    """
    try:
        x = _examples(shape)
        modes.prepare(module)
        logits = _answer(module, x)
        if logits.dim() != 2 or len(logits) != 2 or logits.shape[1] < 2:
            raise _Unfit(f"it answers two inputs by {tuple(logits.shape)}; it must answer by logits [2, classes]")
        module = _without_draws(module, x)
        if isinstance(module, Classifier):
            return _with(module, _facts(module, x), prefix="")
        cut = _split if _head(module, x)[1] is not None else _whole
        return cut(module, x, logits.shape[1])
    except _Unfit as cause:
        raise UsageError(f"Model {shown(name)} cannot be used for inputs {shape}: {cause}.") from cause


def _examples(shape: tuple[int, ...]) -> Tensor:
    return torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))


def _arguments(factory: Callable[..., Any], shape: tuple[int, ...], classes: int) -> dict[str, Any]:
    """Return what a factory asks for by name; one that hands all on (**kwargs) is given num_classes."""
    parameters = inspect.signature(factory).parameters
    found: dict[str, Any] = {}
    for names, value in ((_CLASSES, classes), (_SHAPE, shape), (_CHANNELS, shape[0])):
        found |= {name: value for name in names if name in parameters}
    hands_on = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return {"num_classes": classes, **found} if hands_on and not {*_CLASSES} & {*found} else found


def _in_training(module: nn.Module, x: Tensor, norms: str, dropout: str) -> nn.Module:
    """Return a module in training mode, but for what `build` says; _Unfit: it draws, and that is not switched off."""
    module.train()
    if norms == "running":
        if any(isinstance(part, _BatchNorm) and part.running_mean is None for part in module.modules()):
            raise _Unfit("it has a batch norm without running statistics; take the option norms=batch")
        modes.use_running_statistics(module, x)
    modes.prepare(module)
    if not isinstance(modes.run(module, x)[0], Tensor):
        module.training = False
    return _without_draws(module, x, off=dropout == "off")


def _answer(module: nn.Module, x: Tensor) -> Tensor:
    """Return the logits of examples; _Unfit: a module answers by something else."""
    logits, _ = modes.run(module, x)
    if isinstance(logits, Tensor):
        return logits
    reason = f"it answers by {one_line(type(logits).__name__, 60)}"
    if module.training:
        reason += " in training mode; if that holds the logits of auxiliary heads, put it into eval mode before the "
        raise _Unfit(reason + "gradient is taken")
    raise _Unfit(f"{reason}; it must answer by logits [batch, classes]")


def _without_draws(module: nn.Module, x: Tensor, off: bool | None = None) -> nn.Module:
    """Return a module that draws nothing: as it is, or with the layers that draw in eval mode.

    off: whether these are put there, or refused (_Unfit). None: they are refused by whom the module's mode comes from.
    """
    quiet = copy.deepcopy(module)
    try:
        silenced = modes.silence(quiet, x)
    except modes.DrawsAlways as cause:
        raise _Unfit(
            f"{_layer(module, str(cause))} draws at random in each pass, in eval mode too; let it do so in "
            "training mode alone, by `training=self.training`"
        ) from cause
    if silenced and not off and not modes.alike(module, quiet, x):
        remedy = (
            "take the option dropout=off" if off is not None else "put it into eval mode before the gradient is taken"
        )
        raise _Unfit(f"{_layer(module, silenced[0])} draws at random in each pass in training mode; {remedy}")
    if not torch.equal(modes.run(quiet, x)[0], modes.run(quiet, x)[0]):
        raise _Unfit(
            "it answers equal inputs otherwise in each pass; let it draw from torch's own generator, or not at all"
        )
    return quiet


def _layer(module: nn.Module, name: str) -> str:
    kind = type(module.get_submodule(name)).__name__
    return f"its layer {name} ({kind})" if name else f"the network itself ({kind})"


def _split(module: nn.Module, x: Tensor, classes: int) -> Given:
    """Return a module split at the linear layer that gives its logits of x [2, *shape]; _Unfit where there is none."""
    logits, head_name = _head(module, x)
    if not isinstance(logits, Tensor) or logits.shape != (2, classes):
        answer = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise _Unfit(f"it answers two inputs by {answer}; it must answer by logits [2, {classes}]")
    if head_name is None:
        raise _Unfit("its logits are not the output of an nn.Linear; let it end in one (a log_softmax may follow)")
    facts, head = _facts(module, x), module.get_submodule(head_name)
    assert isinstance(head, nn.Linear)
    if head_name:
        parent, _, last = head_name.rpartition(".")
        setattr(module.get_submodule(parent), last, _Tap())
    classifier = Given(module if head_name else _Tap(), head, head_name)
    features, _ = modes.run(classifier.features, x)
    if features.dim() != 2 or not _same(modes.run(classifier.head, features)[0], logits):
        raise _Unfit(f"its last linear layer, {head_name}, is used elsewhere too; let nothing else depend on it")
    return _with(classifier, facts)


def _whole(module: nn.Module, x: Tensor, classes: int) -> Given:
    """Return a module whose logits are no linear layer's output: all of it is features, and the head is constant."""
    answers, _ = modes.run(module, x)
    if bool((answers >= 0).all()) and torch.allclose(answers.sum(1), torch.ones(2), atol=1e-4):
        raise _Unfit("it answers by probabilities; let it answer by logits, or their log_softmax")
    head = nn.Linear(classes, classes, bias=False).requires_grad_(False)
    head.weight.copy_(torch.eye(classes))
    return _with(Given(module, head, None), _facts(module, x))


def _head(module: nn.Module, x: Tensor) -> tuple[Any, str | None]:
    """Return what a module answers, and the name of the linear layer whose output that is; None: it is none's."""
    outputs: dict[str, Tensor] = {}
    hooks = [
        part.register_forward_hook(lambda _, __, out, name=name: outputs.__setitem__(name, out))
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) and type(part).forward is nn.Linear.forward
    ]
    logits, _ = modes.run(module, x)
    for hook in hooks:
        hook.remove()
    if not isinstance(logits, Tensor):
        return logits, None
    return logits, next((name for name, out in reversed(outputs.items()) if _same(out, logits)), None)


class _Facts(NamedTuple):
    """What a run of a module shows: see `Classifier`."""

    mixes: bool
    fewest: int
    written: frozenset[str]
    single: bool


def _facts(module: nn.Module, x: Tensor) -> _Facts:
    fewest = 1
    try:
        modes.run(module, x[:1])
    except ValueError as cause:
        if ONE_VALUE not in str(cause):
            raise
        fewest = 2
    return _Facts(modes.mixes(module, x), fewest, modes.run(module, x)[1], not modes.computes_double(module, x))


def _with(classifier: T, facts: _Facts, prefix: str = "features.") -> T:
    """Return a classifier of which `facts` are true; prefix: of the names of the module that they are of."""
    classifier.mixes, classifier.fewest, classifier.single = facts.mixes, facts.fewest, facts.single
    classifier.written = frozenset(prefix + buffer for buffer in facts.written)
    return classifier


def _same(out: Tensor, logits: Tensor) -> bool:
    """Return whether `out` are the logits, or log-probabilities are theirs: cross-entropy is the same of both."""
    return out.shape == logits.shape and any(
        torch.allclose(one, logits, rtol=1e-4, atol=1e-5) for one in (out, out.log_softmax(1))
    )
