"""The network class of model plugins: features, then a head of one layer, as defenses and attacks need it."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ppbench.base.errors import UsageError, listed
from ppbench.nets import modes

HEAD_NAMES = ("head.weight", "head.bias")
"""Parameters of the last layer of every `Classifier`; the bias may be missing."""


class Classifier(nn.Module):
    """A model plugin returns one of these: `head(features(x))`, the head one layer on flat features or on maps.

    Parameters that need no gradient, and buffers, are frozen: constants of the network, the same for every party, never
    sent and never changed (norms with running statistics: in eval mode). A model that reads them from a file takes its
    path as the option `weights`; records state their digest instead.

    features: maps [B, *shape] to [B, D], or to [B, D, H, W] where pixels are classified; an `nn.Sequential` of plain
    layers lets attacks use a fast path. head: D to C: linear on flat features, a 1x1 convolution on maps.
    mixes: whether an example's output depends on the others of its batch (batch norm). fewest, most: allowed batch
    sizes; most is None for no limit. written: names of the buffers that a pass writes into; a pass gets copies of them.
    single: whether it computes only in float32, for instance because its forward pass casts. embedding: of a network of
    texts, the name of its table [V, D]: it takes token numbers [B, L], or vectors [B, L, D] in their place.
    every_token: whether it answers each token by logits of the next one, [B, L, V]; none may see those behind it.
    from_file: whether trained weights, too, start as a file has them; records then state the digest of all.
    """

    mixes: bool = False
    fewest: int = 1
    most: int | None = None
    written: frozenset[str] = frozenset()
    single: bool = False
    embedding: str = ""
    every_token: bool = False
    from_file: bool = False

    def __init__(self, features: nn.Module, head: nn.Linear | nn.Conv2d) -> None:
        super().__init__()
        self.features = features
        self.head = head

    @property
    def layers(self) -> nn.Sequential | None:
        """The layers of the features if these are a plain `nn.Sequential`, else None."""
        features = self.features
        in_order = isinstance(features, nn.Sequential) and type(features).forward is nn.Sequential.forward
        return features if in_order else None  # type: ignore[return-value]  # it is one

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, C], of pixels [B, C, H, W], for x [B, *shape]."""
        return self.head(self.features(x))  # type: ignore[no-any-return]


# -- Splits a module like a `Classifier`: features before the linear layer that gives its logits, and that layer --
# The other facts that a `Classifier` declares are determined by running the module (`nets.modes`).

AnyClassifier = TypeVar("AnyClassifier", bound=Classifier)
ONE_VALUE = "Expected more than 1 value per channel"
"""torch's message for batch statistics of one number."""


class Unfit(UsageError):
    """A module cannot be used; the message is a clause."""


class _Reached(BaseException):
    """Carries the head's input out of a network; nothing after it is run."""

    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.features = features


class _Tap(nn.Module):
    """Replaces the head: raises its input."""

    def forward(self, features: Tensor) -> Tensor:
        raise _Reached(features)


class UserNetwork(Classifier):
    """A user's network. Without its head it is `features`, whose parameters keep their names.

    head_name: the head's own name: "fc" for the "fc.weight" of its `state_dict`; "" if the network is only a head; None
    if it has none: then `features` are its logits, and the head is constant.
    """

    def __init__(self, module: nn.Module, head: nn.Linear, head_name: str | None) -> None:
        super().__init__(_up_to_head(module, head_name is None), head)
        self.head_name = head_name

    @property
    def layers(self) -> nn.Sequential | None:
        """The layers before the head if the module is a plain `nn.Sequential` without hooks, else None."""
        former = type(self.features).__mro__[1]
        hooked = any(part._forward_hooks or part._forward_pre_hooks for part in self.modules())
        return None if hooked else _before_tap(former, self.features)

    def own_name(self, name: str) -> str:
        """Return the user's name of the parameter `name` of this classifier."""
        part, _, rest = name.partition(".")
        if part == "head":
            return ".".join(filter(None, (self.head_name, rest)))
        return rest if part == "features" else name


def _before_tap(kind: type[nn.Module], module: nn.Module) -> nn.Sequential | None:
    """Return the layers before the tap of a module of class `kind`; None if it is no plain `nn.Sequential`."""
    parts = OrderedDict(module.named_children())
    if kind.forward is not nn.Sequential.forward or not parts or len(parts) < len(module._modules):
        return None  # of a layer that stands in two places, `named_children` names one
    name, last = parts.popitem()
    if isinstance(last, _Tap):
        return nn.Sequential(parts)
    inner = _before_tap(type(last), last)
    return None if inner is None else nn.Sequential(OrderedDict({**parts, name: inner}))


def _up_to_head(module: nn.Module, without_head: bool) -> nn.Module:
    """Return `module`, which gives what its tap is given from now on; or, `whole`, what it gives.

    Attention is unfused, because fused attention is not twice differentiable. The input is a copy, because the module
    may write into it, in torch's default layout, because it may `view` it (our color images are channels-last). This is
    done by its class, not by a wrapper, so that parameters keep their names and tracing sees the module.
    """
    former = type(module)

    def forward(self: nn.Module, x: Tensor) -> Tensor:  # one input, by name: torch.fx must trace it
        try:
            with sdpa_kernel(SDPBackend.MATH), modes.unfused_attention():
                out: Tensor = former.forward(self, x.contiguous().clone())
        except _Reached as reached:
            return reached.features
        if without_head:
            return out
        raise RuntimeError("the network has not come to its last linear layer")

    module.__class__ = type(former.__name__, (former,), {"forward": forward, "__module__": former.__module__})
    return module


OutputName = str | int
"""Key, index or attribute of the part of a network's answer that the loss takes."""


def with_output(module: nn.Module, output: OutputName | None, flat: bool) -> nn.Module:
    """Return `module`, which answers by one part of what it answered before.

    output: the part; None for the answer itself. flat: whether an answer [B] is one number an input, and becomes
    [B, 1]. Done by the module's class, so that parameters keep their names. Unfit, in a pass: there is no such part.
    """
    former = type(module)

    def forward(self: nn.Module, x: Tensor) -> Any:  # one input, by name: torch.fx must trace it
        answer = former.forward(self, x)
        part = answer if output is None else named_part(answer, output)
        return part[:, None] if flat and isinstance(part, Tensor) and part.dim() == 1 else part

    module.__class__ = type(former.__name__, (former,), {"forward": forward, "__module__": former.__module__})
    return module


def named_part(answer: Any, output: OutputName) -> Any:
    """Return the part of an answer by its key, index or attribute (Unfit: there is none)."""
    try:
        if isinstance(output, str) and not isinstance(answer, Mapping):
            return getattr(answer, output)
        return answer[output]
    except (KeyError, IndexError, AttributeError, TypeError) as cause:
        named = f"; it has {listed(parts)}" if (parts := names_of_parts(answer)) else ""
        raise Unfit(f"it answers by {type(answer).__name__} without a part output={output!r}{named}") from cause


def names_of_parts(answer: Any) -> list[str]:
    """Return the names of the tensors in an answer, as `output=` takes them; none of a tensor itself."""
    if isinstance(answer, Tensor):
        return []
    if isinstance(answer, Mapping):
        return [repr(name) for name, part in answer.items() if isinstance(part, Tensor)]
    if isinstance(answer, tuple | list):
        return [str(place) for place, part in enumerate(answer) if isinstance(part, Tensor)]
    return [repr(name) for name, part in getattr(answer, "__dict__", {}).items() if isinstance(part, Tensor)]


def split_at_head(module: nn.Module, x: Tensor, classes: int) -> UserNetwork:
    """Return a module split at the linear layer that gives its logits of x [B, *shape] (Unfit: there is none)."""
    logits, head_name = head_of(module, x)
    every = answers_tokens(logits, x)
    if not isinstance(logits, Tensor) or logits.shape != (*x.shape[: 1 + every], classes):
        answer = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise Unfit(f"it answers {batch_words(x)} by {answer}; it must answer by logits [{len(x)}, {classes}]")
    if every and head_name is None:
        return without_head(module, x, classes)
    if head_name is None:
        right = "let it end in one, outside autocast (a log_softmax may follow)"
        raise Unfit(f"its logits are not the output of an nn.Linear in float32; {right}")
    facts, head = observed_facts(module, x), module.get_submodule(head_name)
    assert isinstance(head, nn.Linear)
    if head_name:
        parent, _, last = head_name.rpartition(".")
        setattr(module.get_submodule(parent), last, _Tap())
    classifier = UserNetwork(module if head_name else _Tap(), head, head_name)
    features, _ = modes.run_module(classifier.features, x)
    classifier.every_token = every
    if features.dim() != 2 + every or not _same(modes.run_module(classifier.head, features)[0], logits):
        raise Unfit(f"its last linear layer, {head_name}, is used elsewhere too; let nothing else depend on it")
    return with_facts(classifier, facts)


def answers_tokens(logits: Any, x: Tensor) -> bool:
    """Return whether logits [B, L, V] are an answer to each token of texts x [B, L]."""
    return isinstance(logits, Tensor) and x.dim() == 2 and logits.dim() == 3 and logits.shape[:2] == x.shape


class Unchanged(nn.Linear):
    """The head of a network that answers every token without one, as its embedding is the head: it changes nothing.

    It has no weights: an identity of 50,257 tokens would take 10 GB.
    """

    def __init__(self, classes: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's, of a tensor without elements
            super().__init__(0, classes, bias=False)
        self.in_features = classes
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x."""
        return x


def without_head(module: nn.Module, x: Tensor, classes: int, any_output: bool = False) -> UserNetwork:
    """Return a network without a linear head: the whole module is features, and the head is a constant identity.

    any_output: whether the loss may take probabilities.
    """
    answers = modes.run_module(module, x)[0].float()
    ones = torch.ones(answers.shape[:-1])
    if not any_output and bool((answers >= 0).all()) and torch.allclose(answers.sum(-1), ones, atol=1e-4):
        raise Unfit("it answers by probabilities; let it answer by logits, or their log_softmax")
    if every := answers_tokens(answers, x):
        head: nn.Linear = Unchanged(classes)
    else:
        head = nn.Linear(classes, classes, bias=False).requires_grad_(False)
        head.weight.copy_(torch.eye(classes))
    classifier = with_facts(UserNetwork(module, head, None), observed_facts(module, x))
    classifier.every_token = every
    return classifier


def head_of(module: nn.Module, x: Tensor) -> tuple[Any, str | None]:
    """Return a module's output, and the name of the linear layer that computes it, None if there is none."""
    outputs: dict[str, Tensor] = {}

    def note(name: str, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        if inputs and inputs[0].dtype == out.dtype == torch.float32:  # under autocast the precision differs
            outputs[name] = out

    hooks = [
        part.register_forward_hook(lambda _, inputs, out, name=name: note(name, inputs, out))
        for name, part in module.named_modules()
        if _is_linear(part)
    ]
    logits, _ = modes.run_module(module, x)
    for hook in hooks:
        hook.remove()
    if not isinstance(logits, Tensor):
        return logits, None
    candidates = (name for name, out in reversed(outputs.items()) if _same(out, logits))
    return logits, next((name for name in candidates if _alone(module, name, x, logits)), None)


def _is_linear(part: nn.Module) -> bool:
    """Return whether a module is a plain linear layer; its weight may be derived (spectral or weight norm)."""
    hooks = [*part._forward_hooks.values(), *part._forward_pre_hooks.values()]
    made = all(isinstance(hook, SpectralNorm | WeightNorm) for hook in hooks)
    return isinstance(part, nn.Linear) and type(part).forward is nn.Linear.forward and made


def _alone(module: nn.Module, name: str, x: Tensor, logits: Tensor) -> bool:
    """Return whether the logits are exactly a layer's output, and depend on trained parameters only through it.

    Equal values do not suffice: an adapter beside the layer may give 0 at first, a temperature after it may be 1. Nor
    may the layer's parameters have another use (tied weights): its input would depend on them.
    """
    other = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
    layer, inputs = module.get_submodule(name), list[Tensor]()

    def replaced(_: nn.Module, taken: tuple[Tensor, ...], __: Tensor) -> Tensor:
        inputs.append(taken[0])
        return other

    hook = layer.register_forward_hook(replaced)
    answer, _ = modes.run_module(module, x, graph=True)
    hook.remove()
    if hasattr(layer, "_tied") or _depends(inputs[0], [*layer.parameters()]):
        return False
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not answer.requires_grad or not _same(other, answer):
        return False
    with torch.enable_grad():  # the caller may have disabled gradients
        return not trained or all(g is None for g in torch.autograd.grad(answer.sum(), trained, allow_unused=True))


def _depends(value: Tensor, parameters: list[nn.Parameter]) -> bool:
    """Return whether a value with a graph depends on one of some parameters."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained or not value.requires_grad:
        return False
    with torch.enable_grad():
        return any(
            g is not None for g in torch.autograd.grad(value.sum(), trained, retain_graph=True, allow_unused=True)
        )


class ModuleFacts(NamedTuple):
    """Facts about a module, determined by running it; see `Classifier`."""

    mixes: bool
    fewest: int
    most: int | None
    written: frozenset[str]
    single: bool


def observed_facts(module: nn.Module, x: Tensor) -> ModuleFacts:
    """Return the facts about a module by runs on x [B, *shape]; B is 1 if it accepts only one input at a time."""
    fewest = 1
    try:
        modes.run_module(module, x[:1])
    except ValueError as cause:
        if ONE_VALUE not in str(cause):
            raise
        fewest = 2
    mixes, most = modes.mixes(module, x), 1 if len(x) == 1 else None
    answer, written = modes.run_module(module, x)
    single = {answer.dtype, *dtypes_of(module)} != {torch.float32} or not modes.computes_double(module, x)
    return ModuleFacts(mixes, fewest, most, written, single)


def dtypes_of(module: nn.Module) -> list[torch.dtype]:
    """Return the floating-point dtypes of a module's parameters and buffers, each once, in order."""
    values = (*module.parameters(), *module.buffers())
    return list(dict.fromkeys(value.dtype for value in values if value.is_floating_point()))


def batch_words(x: Tensor) -> str:
    """Return the number of inputs of a trial batch x, in words."""
    return "one input" if len(x) == 1 else "two inputs"


def with_facts(classifier: AnyClassifier, facts: ModuleFacts, prefix: str = "features.") -> AnyClassifier:
    """Set `facts` on a classifier and return it; prefix: of the names of buffers."""
    classifier.mixes, classifier.fewest, classifier.most = facts.mixes, facts.fewest, facts.most
    classifier.single = facts.single
    classifier.written = frozenset(prefix + buffer for buffer in facts.written)
    return classifier


def _same(out: Tensor, logits: Tensor) -> bool:
    """Return whether `out`, or its log_softmax, equals the logits: cross-entropy is the same for both."""
    return (out.shape, out.dtype) == (logits.shape, logits.dtype) and any(
        torch.allclose(one, logits, rtol=1e-4, atol=1e-5) for one in (out, out.log_softmax(-1))
    )
