"""A network as a pure function of its parameters, split where defenses and attacks need it: features, then head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ppbench.errors import UsageError
from ppbench.federation.tree import Params
from ppbench.registry import load

Option = str | int | float | bool


class Classifier(nn.Module):
    """A model plugin returns one of these: `head(features(x))`, the head one linear layer on flat features.

    Attributes:
        features: maps [B, *shape] to [B, D]; an `nn.Sequential` of plain layers lets attacks use a fast path.
        head: the last linear layer, D to C.
    """

    def __init__(self, features: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.features = features
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, C] for x [B, *shape]."""
        return self.head(self.features(x))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class NetSpec:
    """What names a network: enough to build it again in another process.

    Attributes:
        model: a name in the entry-point group `ppbench.models`.
        shape: shape of one input, without the batch axis.
        classes: number of classes C.
        options: the model's keyword options as sorted (name, value) pairs.
    """

    model: str
    shape: tuple[int, ...]
    classes: int
    options: tuple[tuple[str, Option], ...] = ()


def net_spec(model: str, shape: tuple[int, ...], classes: int, options: Mapping[str, Option] | None = None) -> NetSpec:
    """Return the spec of a network, options sorted."""
    return NetSpec(model, tuple(shape), classes, tuple(sorted((options or {}).items())))


class Net:
    """A network as a function of explicit parameters; holds no weights of its own.

    Attributes:
        spec: what it was built from.
        module: the layers, on the meta device.
        names: names of the parameters, in order.
        parameter_count: their number of entries.
        feature_count: D, the width of the head's input.
        head_bias: whether the head has a bias, the parameter "head.bias".
    """

    def __init__(self, spec: NetSpec, module: Classifier) -> None:
        self.spec = spec
        self.module = module.to("meta")
        self.names = tuple(name for name, _ in module.named_parameters())
        self.parameter_count = sum(parameter.numel() for parameter in module.parameters())
        self.feature_count = module.head.in_features
        self.head_bias = module.head.bias is not None

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """Return logits [B, C] of x [B, *shape] under `params`."""
        return self.head(params, self.features(params, x))

    def features(self, params: Params, x: Tensor) -> Tensor:
        """Return the head's input [B, D] of x [B, *shape]."""
        inner = {n[len("features.") :]: p for n, p in params.items() if n.startswith("features.")}
        return functional_call(self.module.features, inner, (x,))  # type: ignore[no-any-return]

    def flat_features(self, params: Params, x: Tensor) -> Tensor:
        """Return the output [B, F] of the first Flatten layer: what the convolutions hand to the linear layers.

        Raises:
            UsageError: the model's features are no Sequential with a Flatten in it.
        """
        layers = self.module.features
        index = [isinstance(layer, nn.Flatten) for layer in layers] if isinstance(layers, nn.Sequential) else []
        if True not in index:
            raise UsageError(f"Model {self.spec.model!r} has no Flatten layer to tap; use phi_tap='head'.")
        part = layers[: index.index(True) + 1]  # type: ignore[index]  # a Sequential, or the list is empty
        wanted = {name for name, _ in part.named_parameters()}
        inner = {n[len("features.") :]: p for n, p in params.items()}
        return functional_call(part, {n: inner[n] for n in wanted}, (x,))  # type: ignore[no-any-return]

    def head(self, params: Params, features: Tensor) -> Tensor:
        """Return logits [B, C] of features [B, D]."""
        bias = params["head.bias"] if self.head_bias else None
        return nn.functional.linear(features, params["head.weight"], bias)


def _construct(spec: NetSpec) -> Classifier:
    factory = load("models", spec.model)
    try:
        module = factory(spec.shape, spec.classes, **dict(spec.options))
    except (TypeError, ValueError) as cause:
        raise UsageError(f"Model {spec.model!r} cannot be built for inputs {spec.shape}: {cause}.") from cause
    if not isinstance(module, Classifier):
        raise UsageError(f"Model {spec.model!r} returned {type(module).__name__}; it must return a Classifier.")
    if len(list(module.parameters())) != len(list(module.named_parameters(remove_duplicate=False))):
        raise UsageError(f"Model {spec.model!r} uses one parameter under two names; give each layer its own.")
    return module


@lru_cache
def build(spec: NetSpec) -> Net:
    """Return the network that `spec` names.

    Raises:
        UsageError: unknown model, or one that refuses the shape or an option.
    """
    with torch.random.fork_rng(devices=[]):
        return Net(spec, _construct(spec))


def initial(spec: NetSpec, seed: int) -> Params:
    """Return initial float32 parameters; a function of `spec` and `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return {name: p.detach().clone() for name, p in _construct(spec).named_parameters()}
