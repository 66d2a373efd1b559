"""A module cut where a `Classifier` is: features before the linear layer that gives its logits, and that layer.

What a module makes of a batch, beside that, is found by running it (`nets.modes`): facts that a `Classifier` states.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ppbench.base.errors import UsageError
from ppbench.nets import modes
from ppbench.nets.classifier import Classifier

T = TypeVar("T", bound=Classifier)
ONE_VALUE = "Expected more than 1 value per channel"
"""What torch says of batch statistics of one number."""


class Unfit(UsageError):
    """Why a module is no network of ours, a clause."""


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
        hooked = any(part._forward_hooks or part._forward_pre_hooks for part in self.modules())
        return None if hooked else _before_tap(former, self.features)

    def own_name(self, name: str) -> str:
        """Return what the parameter `name` of this classifier is called in the network as it was written."""
        part, _, rest = name.partition(".")
        if part == "head":
            return ".".join(filter(None, (self.head_name, rest)))
        return rest if part == "features" else name


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

    It computes attention step by step: fused, it cannot be differentiated twice. What it is given is a copy, for it may
    write into it, laid out as torch does by default, for it may `view` it: color images lie channels-last here. Its
    class, not a module around it, says so: parameters keep their names, and who traces it finds it.
    """
    former = type(module)

    def forward(self: nn.Module, x: Tensor) -> Tensor:  # one input, by name: torch.fx must trace it
        try:
            with sdpa_kernel(SDPBackend.MATH), modes.unfused_attention():
                out: Tensor = former.forward(self, x.contiguous().clone())
        except _Reached as reached:
            return reached.features
        if whole:
            return out
        raise RuntimeError("the network has not come to its last linear layer")

    module.__class__ = type(former.__name__, (former,), {"forward": forward, "__module__": former.__module__})
    return module


def split(module: nn.Module, x: Tensor, classes: int) -> Given:
    """Return a module split at the linear layer that gives its logits of x [B, *shape]; Unfit where there is none."""
    logits, head_name = head_of(module, x)
    if not isinstance(logits, Tensor) or logits.shape != (len(x), classes):
        answer = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise Unfit(f"it answers {counted(x)} by {answer}; it must answer by logits [{len(x)}, {classes}]")
    if head_name is None:
        right = "let it end in one, outside autocast (a log_softmax may follow)"
        raise Unfit(f"its logits are not the output of an nn.Linear in float32; {right}")
    facts, head = facts_of(module, x), module.get_submodule(head_name)
    assert isinstance(head, nn.Linear)
    if head_name:
        parent, _, last = head_name.rpartition(".")
        setattr(module.get_submodule(parent), last, _Tap())
    classifier = Given(module if head_name else _Tap(), head, head_name)
    features, _ = modes.run(classifier.features, x)
    if features.dim() != 2 or not _same(modes.run(classifier.head, features)[0], logits):
        raise Unfit(f"its last linear layer, {head_name}, is used elsewhere too; let nothing else depend on it")
    return stating(classifier, facts)


def whole(module: nn.Module, x: Tensor, classes: int) -> Given:
    """Return a module whose logits are no linear layer's output: all of it is features, and the head is constant."""
    answers = modes.run(module, x)[0].float()
    if bool((answers >= 0).all()) and torch.allclose(answers.sum(1), torch.ones(len(x)), atol=1e-4):
        raise Unfit("it answers by probabilities; let it answer by logits, or their log_softmax")
    head = nn.Linear(classes, classes, bias=False).requires_grad_(False)
    head.weight.copy_(torch.eye(classes))
    return stating(Given(module, head, None), facts_of(module, x))


def head_of(module: nn.Module, x: Tensor) -> tuple[Any, str | None]:
    """Return what a module answers, and the name of the linear layer whose output that is; None: it is none's."""
    outputs: dict[str, Tensor] = {}

    def note(name: str, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        if inputs and inputs[0].dtype == out.dtype == torch.float32:  # under autocast it computes in another precision
            outputs[name] = out

    hooks = [
        part.register_forward_hook(lambda _, inputs, out, name=name: note(name, inputs, out))
        for name, part in module.named_modules()
        if _is_linear(part)
    ]
    logits, _ = modes.run(module, x)
    for hook in hooks:
        hook.remove()
    if not isinstance(logits, Tensor):
        return logits, None
    alike = (name for name, out in reversed(outputs.items()) if _same(out, logits))
    return logits, next((name for name in alike if _alone(module, name, x, logits)), None)


def _is_linear(part: nn.Module) -> bool:
    """Return whether a module is a linear layer and no more; its weight may be made of others."""
    hooks = [*part._forward_hooks.values(), *part._forward_pre_hooks.values()]
    made = all(isinstance(hook, SpectralNorm | WeightNorm) for hook in hooks)
    return isinstance(part, nn.Linear) and type(part).forward is nn.Linear.forward and made


def _alone(module: nn.Module, name: str, x: Tensor, logits: Tensor) -> bool:
    """Return whether the logits are what a layer gives, whatever that is, and no trained parameter has another say.

    Equal values do not tell: an adapter beside the layer gives 0 at first, a temperature behind it is 1.
    """
    other = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
    hook = module.get_submodule(name).register_forward_hook(lambda _, __, ___: other)
    answer, _ = modes.run(module, x, graph=True)
    hook.remove()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not answer.requires_grad or not _same(other, answer):
        return False
    with torch.enable_grad():  # whoever asks for a network may compute without
        return not trained or all(g is None for g in torch.autograd.grad(answer.sum(), trained, allow_unused=True))


class Facts(NamedTuple):
    """What a run of a module shows: see `Classifier`."""

    mixes: bool
    fewest: int
    most: int | None
    written: frozenset[str]
    single: bool


def facts_of(module: nn.Module, x: Tensor) -> Facts:
    """Return what runs of a module on x [B, *shape] show; B is 1 where it takes one input at a time."""
    fewest = 1
    try:
        modes.run(module, x[:1])
    except ValueError as cause:
        if ONE_VALUE not in str(cause):
            raise
        fewest = 2
    mixes, most = modes.mixes(module, x), 1 if len(x) == 1 else None
    answer, written = modes.run(module, x)
    single = {answer.dtype, *precisions(module)} != {torch.float32} or not modes.computes_double(module, x)
    return Facts(mixes, fewest, most, written, single)


def precisions(module: nn.Module) -> list[torch.dtype]:
    """Return the floating-point dtypes of a module's parameters and buffers, each once, in order."""
    values = (*module.parameters(), *module.buffers())
    return list(dict.fromkeys(value.dtype for value in values if value.is_floating_point()))


def counted(x: Tensor) -> str:
    """Return how many inputs a trial batch x has, in words."""
    return "one input" if len(x) == 1 else "two inputs"


def stating(classifier: T, facts: Facts, prefix: str = "features.") -> T:
    """Return a classifier of which `facts` are true; prefix: of the names of the module that they are of."""
    classifier.mixes, classifier.fewest, classifier.most = facts.mixes, facts.fewest, facts.most
    classifier.single = facts.single
    classifier.written = frozenset(prefix + buffer for buffer in facts.written)
    return classifier


def _same(out: Tensor, logits: Tensor) -> bool:
    """Return whether `out` are the logits, or log-probabilities are theirs: cross-entropy is the same of both."""
    return (out.shape, out.dtype) == (logits.shape, logits.dtype) and any(
        torch.allclose(one, logits, rtol=1e-4, atol=1e-5) for one in (out, out.log_softmax(1))
    )
