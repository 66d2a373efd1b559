"""A network as a pure function of its parameters, split into features and head for defenses and attacks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import logsigmoid

from ppbench.base.errors import UsageError, because, shown, unknown
from ppbench.base.fence import built, check_answers
from ppbench.base.machine import check_room
from ppbench.base.registry import ADDRESSED, find, load_plugin
from ppbench.base.tensor_files import digest_of
from ppbench.base.tree import Params
from ppbench.base.vocabulary import PADDING
from ppbench.nets import user_model
from ppbench.nets.classifier import Classifier as Classifier
from ppbench.nets.classifier import UserNetwork
from ppbench.nets.modes import STATISTICS, recorded, tracked_norms, using_statistics

# -- Per-example losses with soft targets. One object for client and attacker: two losses would silently differ --

LossName = Literal["cross_entropy", "squared", "bce", "next_token"]


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy [B] of logits [B, C] against soft targets y [B, C]."""
    return -(y * torch.log_softmax(logits, dim=-1)).sum(-1)


def squared(output: Tensor, y: Tensor) -> Tensor:
    """Return half the squared distance [B] of output [B, C] and targets y [B, C]."""
    return 0.5 * ((output - y) ** 2).sum(-1)


def bce(logits: Tensor, y: Tensor) -> Tensor:
    """Return the mean over pixels [B] of the binary cross-entropy of logits [B, C, H, W] and masks y [B, C, H, W]."""
    return -(y * logsigmoid(logits) + (1 - y) * logsigmoid(-logits)).flatten(1).mean(1)


LOGITS_AT_ONCE = 2**24
"""Logits of next tokens that are computed at a time: a text has as many as it has tokens, times the vocabulary."""


def token_losses(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of each token of texts but the first, and its weight, both [..., L - 1].

    A token is predicted by the logits [..., L, V] at the place before it. Padding is none: its loss and weight are 0.

    y: the texts themselves, token numbers [Q, L]; or, with as many axes as the logits, shares of tokens [..., L, V], as
        a search over vectors makes them (`Plan.nearness`).
    """
    log_p = torch.log_softmax(logits[..., :-1, :], -1)
    if y.dim() == logits.dim():
        shares = y[..., 1:, :] * (torch.arange(y.shape[-1], device=y.device) != PADDING)
        return -(shares * log_p).sum(-1), shares.sum(-1)
    tokens = y[..., 1:].round().long().expand(log_p.shape[:-1])
    real = (tokens != PADDING).to(log_p.dtype)
    return -log_p.gather(-1, tokens[..., None])[..., 0] * real, real


def next_token(logits: Tensor, y: Tensor) -> Tensor:
    """Return the mean of `token_losses` over a text [...]: each text counts alike, however long; 0 without any token.

    Over a batch it is the mean of its examples' losses, as clipping example by example and sums of clients need it;
    trainers often take the mean over the batch's tokens, which is the same for texts of one length.
    """
    losses, weights = token_losses(logits, y)
    return losses.sum(-1) / weights.sum(-1).clamp(min=1e-12)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": cross_entropy,
    "squared": squared,
    "bce": bce,
    "next_token": next_token,
}


@dataclass(frozen=True, eq=False)
class OwnLoss:
    """A loss given as an object (`ppbench.invert`), known only in this process: what a name in `LOSSES` is otherwise.

    Attributes:
        name: in messages.
        function: maps outputs [B, C] and targets [B, C] to losses [B], or to their mean; differentiable twice.
        classes: whether targets are one-hot classes; else rows of any numbers, which attacks must be granted.
        smoothing, weights: of a cross-entropy with label smoothing and class weights [C] (None: all 1), as in
            `torch.nn.CrossEntropyLoss`: the sum of losses is divided by the sum of the weights of the batch's labels.
        by: returns, of targets, what stands in the place of such weights.
    """

    name: str
    function: Callable[[Tensor, Tensor], Tensor]
    classes: bool = False
    smoothing: float = 0.0
    weights: Tensor | None = None
    by: Callable[[Tensor], Tensor] | None = None

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: object) -> Any:
        """Return the schema of a file's plan, which names its loss: an object is never read."""
        from pydantic_core import core_schema  # here, because pydantic is slow to import

        return core_schema.is_instance_schema(cls)

    def shares(self, y: Tensor) -> Tensor | None:
        """Return the weights [B] by whose sum losses under targets y [B, C] are divided; None if all are 1."""
        if self.by is not None:
            return self.by(y)
        return None if self.weights is None else (y * self.weights.to(y)).sum(-1)

    def counts(self, excess: Tensor) -> Tensor:
        """Return the share [C] of each class in a batch, from mean prediction minus the bias's gradient [C].

        Exact for smoothing alone; with weights for predictions that are alike.
        """
        if not self.classes:
            return excess
        plain = (excess - self.smoothing / len(excess)) / (1 - self.smoothing)
        plain = plain if self.weights is None else plain / self.weights.to(plain)
        return plain / plain.sum()


def softened_cross_entropy(smoothing: float, weights: Tensor | None) -> OwnLoss:
    """Return the cross-entropy with label smoothing (0 to below 1) and class weights [C], positive (None: all 1)."""

    def losses(logits: Tensor, y: Tensor) -> Tensor:
        soft = (1 - smoothing) * y + smoothing / y.shape[-1]
        return cross_entropy(logits, soft if weights is None else soft * weights.to(y))

    traits = [*(["label smoothing"] if smoothing else []), *([] if weights is None else ["class weights"])]
    return OwnLoss(f"cross-entropy with {' and '.join(traits)}", losses, True, smoothing, weights)


def next_token_of_batches() -> OwnLoss:
    """Return the next-token loss whose mean over a batch is that over its tokens, as trainers of decoders take it."""

    def total(logits: Tensor, y: Tensor) -> Tensor:
        return token_losses(logits, y)[0].sum(-1)

    def count(y: Tensor) -> Tensor:
        real = 1 - y[..., 1:, PADDING] if y.dim() > 2 else (y[..., 1:].round() != PADDING).to(y.dtype)
        return real.sum(-1)

    return OwnLoss("next_token", total, by=count)


OptionValue = str | int | float | bool


@dataclass(frozen=True)
class NetSpec:
    """The name of a network, enough to build it elsewhere. shape: of one input, without the batch axis."""

    model: str
    shape: tuple[int, ...]
    classes: int
    options: tuple[tuple[str, OptionValue], ...] = ()


def net_spec(
    model: str, shape: tuple[int, ...], classes: int, options: Mapping[str, OptionValue] | None = None
) -> NetSpec:
    """Return the spec of a network, options sorted."""
    return NetSpec(model, tuple(shape), classes, tuple(sorted((options or {}).items())))


def of_texts(
    model: str, options: Mapping[str, OptionValue], size: int, every_token: bool = False
) -> Mapping[str, OptionValue]:
    """Return the options of a network of texts with those that follow from the data and the loss, where it has them.

    size: number of tokens, if none is given. every_token: whether the loss needs an answer to every token.
    """
    has = inspect.signature(load_plugin("models", model)).parameters
    own: dict[str, OptionValue] = {"vocabulary": size} if "vocabulary" in has else {}
    if every_token and "every_token" in has:
        own["every_token"] = True
    return {**own, **options}


class Net:
    """A network as a function of explicit parameters; it stores only frozen weights, on the CPU.

    module: layers on the meta device. names, parameter_count: the trainable parameters in order, then the `statistics`;
    their entries. statistics: by the name of a running mean or variance that is an entry of the parameters
    (`modes.TrackedNorm`), the share of the way to a batch's that it moves in a step (torch's momentum). frozen:
    constants by name, buffers too; frozen_parameters: the names of the parameters among them. feature_count: D, the
    width of the head's input. pixelwise: whether pixels are classified, so that features and outputs are maps.
    head_bias: whether the head has a bias, trained or not. mixes, fewest, most, embedding, every_token: as in
    `Classifier`.

    UsageError: no parameter is trained.
    """

    def __init__(self, spec: NetSpec, module: Classifier) -> None:
        head = module.head
        parameters = dict(module.named_parameters(remove_duplicate=False))
        trained: Params = {name: value for name, value in parameters.items() if value.requires_grad}
        if not trained:
            raise UsageError(
                f"Model {spec.model!r} has no parameter that requires a gradient; leave one to be trained."
            )
        self.spec = spec
        self._norms = tracked_norms(module)
        self.statistics = {f"{name}.{end}": norm.momentum for name, norm in self._norms.items() for end in STATISTICS}
        trained |= {name: module.get_buffer(name) for name in self.statistics}
        self.frozen = {name: value.detach() for name, value in parameters.items() if name not in trained}
        self.frozen_parameters = tuple(self.frozen)
        buffers = dict(module.named_buffers(remove_duplicate=False))
        self.frozen |= {name: value.detach() for name, value in buffers.items() if name not in trained}
        self._dtypes = {name: value.dtype for name, value in parameters.items()}
        self._dtypes |= {name: value.dtype for name, value in self.frozen.items()}
        self.module = module.to("meta")
        self.names = tuple(trained)
        self.parameter_count = sum(value.numel() for value in trained.values())
        self.pixelwise = isinstance(head, nn.Conv2d)
        self.feature_count = head.in_channels if isinstance(head, nn.Conv2d) else head.in_features
        self.head_bias = head.bias is not None
        self.mixes, self.fewest, self.most = module.mixes, module.fewest, module.most
        self._written, self._single = module.written, module.single
        self.embedding, self.every_token = module.embedding, module.every_token

    @property
    def rows(self) -> int:
        """Number of tokens of a network of texts, else 0."""
        return int(self.module.get_parameter(self.embedding).shape[0]) if self.embedding else 0

    def own_name(self, name: str) -> str:
        """Return the user's name of the parameter or layer `name`."""
        return self.module.own_name(name) if isinstance(self.module, UserNetwork) else name

    @cached_property
    def weights_sha256(self) -> str:
        """The SHA-256, in hex, of the weights that no seed draws: frozen ones, and trained ones that a file starts."""
        return digest_of(self.frozen | (initial(self.spec, 0) if self.module.from_file else {}))

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """Return logits [B, C], of pixels [B, C, H, W], of tokens [B, L, C], of x [B, *shape] as in a training step."""
        return self.head(params, self.features(params, x))

    def in_use(self, params: Params, x: Tensor) -> Tensor:
        """Return logits as in use: tracked norms normalize by their running statistics; other networks do the same."""
        with using_statistics(self._norms.values()):
            return self(params, x)

    def with_statistics(self, params: Params, x: Tensor) -> tuple[Tensor, Params]:
        """Return logits as in a training step, and the batch's mean and unbiased variance of each tracked norm.

        UsageError: a norm is passed twice, so that its running statistics move twice in a step.
        """
        if not self._norms:
            return self(params, x), {}
        batch = dict[str, Tensor]()
        with recorded(self._norms.values()):
            logits = self(params, x)
            for name, norm in self._norms.items():
                if len(notes := norm.notes or []) > 1:
                    words = f"Model {self.spec.model!r} passes its norm {self.own_name(name)!r} twice"
                    raise UsageError(f"{words}; give each place its own, or take norms=batch.")
                batch |= {f"{name}.{end}": value for note in notes for end, value in zip(STATISTICS, note, strict=True)}
        return logits, batch

    def features(self, params: Params, x: Tensor) -> Tensor:
        """Return the head's input [B, D], of pixels [B, D, H, W], of tokens [B, L, D], of x [B, *shape]."""
        if self.most is not None and len(x) > self.most:
            raise UsageError(f"Model {self.spec.model!r} takes one input at a time; let batches have one example.")
        return self._call(self.module.features, self._known("features.", params, x), x)

    def _known(self, prefix: str, params: Params, x: Tensor) -> Params:
        """Return parameters and frozen tensors of a part of the module by their names in it, on the device of `x`.

        They are made anew each time, because tensors made inside vmap must not outlive it. Buffers that a pass writes
        into are copies, mapped by vmap if `x` or `params` are, since they may differ between examples.
        """
        tensors = {n: v for n, v in self.frozen.items() if n.startswith(prefix)}
        floats = {n for n, v in tensors.items() if v.is_floating_point() and not self._single}
        tensors = {n: v.to(x.device, x.dtype if n in floats else v.dtype) for n, v in tensors.items()}
        if written := self._written & tensors.keys():
            mapped = (torch.zeros_like(value.detach().flatten()[0]) for value in (x, next(iter(params.values()))))
            nothing = torch.stack([*mapped]).sum()
            tensors |= {n: tensors[n] + nothing.to(tensors[n].dtype) for n in written}
        own = self._dtypes if self._single else {}
        tensors |= {n: v.to(own.get(n, v.dtype)) for n, v in params.items() if n.startswith(prefix)}
        return {n.removeprefix(prefix): value for n, value in tensors.items()}

    def _call(self, part: nn.Module, known: Params, x: Tensor) -> Tensor:
        # Every name is in `known`: no trained parameter has two names (`check_untied`), constants have all of theirs.
        out: Tensor = functional_call(part, known, (x.float() if self._single else x,), tie_weights=False)
        return out.to(x.dtype) if self._single else out

    def flat_features(self, params: Params, x: Tensor) -> Tensor:
        """Return the output [B, F] of the first Flatten layer, after the convolutions (UsageError: there is none)."""
        return self._part(slice(None, self.flat_at + 1), params, x)

    def behind_flat(self, params: Params, flat: Tensor) -> Tensor:
        """Return the head's input [B, D] from the first Flatten layer's output [B, F] (UsageError: there is none)."""
        return self._part(slice(self.flat_at + 1, None), params, flat)

    @property
    def flat_at(self) -> int:
        """Index of the first Flatten layer among the features' layers (UsageError: there is none)."""
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
"""Least memory of a parameter in training: float32 weight, gradient and an optimizer's two."""


def _construct(spec: NetSpec) -> Classifier:
    factory, plugin = load_plugin("models", spec.model), find("models", spec.model)
    foreign = plugin is not None and plugin.distribution == ADDRESSED
    if not foreign:
        _check_options(spec, factory)

    def build(factory: Callable[..., Any]) -> Any:
        options = dict(spec.options)
        if foreign:
            return user_model.build_user_network(spec.model, factory, spec.shape, spec.classes, options)
        return factory(spec.shape, spec.classes, **options)

    try:
        if plugin is not None and plugin.ours:
            _check_size(spec, factory)
        module = built("models", spec.model, build)
    except (TypeError, ValueError, RuntimeError, MemoryError, OverflowError) as cause:
        raise UsageError(
            f"Model {spec.model!r} cannot be built for inputs {spec.shape}: {because(cause, 400)}."
        ) from cause
    if not isinstance(module, Classifier):
        raise UsageError(f"Model {spec.model!r} returned {type(module).__name__}; it must return a Classifier.")
    if isinstance(module.head, nn.Conv2d) and module.head.kernel_size != (1, 1):
        raise UsageError(f"Model {spec.model!r} has a head of {module.head.kernel_size}; on maps it must be 1x1.")
    check_untied(spec.model, module)
    check_answers("models", spec.model, lambda: _network_faults(module, spec))
    return module


def check_untied(name: str, module: nn.Module) -> None:
    """Raise UsageError if the network `name` has a trained parameter under two names."""
    trained = [p for _, p in module.named_parameters(remove_duplicate=False) if p.requires_grad]
    if len({id(parameter) for parameter in trained}) != len(trained):
        raise UsageError(f"Model {name!r} uses one parameter under two names; give each layer its own.")


def _network_faults(module: Classifier, spec: NetSpec) -> Iterator[str]:
    """Yield the faults of a plugin's network, run on two inputs of zeros."""
    for name, value in module.named_parameters():
        if value.dtype != torch.float32 or value.device.type != "cpu" or not value.isfinite().all():
            yield f"makes the parameter {name}, which is not float32, finite and on the CPU"
    if not isinstance(module.head, nn.Linear | nn.Conv2d):
        yield f"makes a head that is a {type(module.head).__name__}; it must be a linear layer or a 1x1 convolution"
    with torch.no_grad():
        out = module(torch.zeros(2, *spec.shape))
    expected = (2, *spec.shape, spec.classes) if module.every_token else (2, spec.classes)
    if not isinstance(out, Tensor) or out.shape[: len(expected)] != expected or not out.isfinite().all():
        actual = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        yield f"makes a network that answers {actual} to two inputs; it must be finite and {list(expected)}"


def _check_options(spec: NetSpec, factory: Callable[..., Any]) -> None:
    """Raise UsageError for options that the model does not have; it may take any if it has **options."""
    known = inspect.signature(factory).parameters
    option_names = [name for name, parameter in known.items() if parameter.kind is parameter.KEYWORD_ONLY]
    free = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    for name, _ in spec.options:
        if name not in option_names and not free:
            raise unknown(f"option of model {spec.model!r}", name, option_names or ["(it has none)"])


def _check_size(spec: NetSpec, factory: Callable[..., Any]) -> None:
    """Raise UsageError for a network too large for memory."""
    if (count := _counted(spec, factory)) is not None:
        check_room(BYTES * count, f"Model {spec.model!r} with {count:,} parameters", "use a smaller one")


def _counted(spec: NetSpec, factory: Callable[..., Any]) -> int | None:
    """Return a network's parameter count, without allocating them; None if it depends on a file."""
    if any(name == "weights" and value for name, value in spec.options) or spec.model == "frozen_backbone":
        return None
    with torch.device("meta"):
        module: nn.Module = factory(spec.shape, spec.classes, **dict(spec.options))
    return sum(value.numel() for value in module.parameters())


def parameters_of(spec: NetSpec) -> int | None:
    """Return the parameter count of a shipped network, without allocating them; None for others, or from a file.

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
    """A network given as an object (`nets.model_object`), known only in this process.

    net: the network, by which two such specs compare. start: its original trainable weights.
    """

    net: Net = field(kw_only=True)
    start: Params = field(kw_only=True, compare=False, repr=False)


def build(spec: NetSpec) -> Net:
    """Return the network of `spec` (UsageError: an unknown model, or one that refuses shape or options)."""
    return spec.net if isinstance(spec, HeldSpec) else _built(spec)


@lru_cache
def _built(spec: NetSpec) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # frozen weights are the same in every process, drawn or not
        return Net(spec, _construct(spec))


def initial(spec: NetSpec, seed: int) -> Params:
    """Return initial float32 values of the trainable parameters; a function of `spec` and `seed` alone.

    A network given as an object keeps its weights, whatever the seed.
    """
    if isinstance(spec, HeldSpec):
        return {name: value.clone() for name, value in spec.start.items()}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` formats its call stack for later accelerators
        return trainable(_construct(spec))


def trainable(module: nn.Module) -> Params:
    """Return float32 copies of a module's trained parameters, then of its tracked norms' running statistics."""
    trained: Params = {name: value for name, value in module.named_parameters() if value.requires_grad}
    for norm in tracked_norms(module):
        trained |= {f"{norm}.{end}": module.get_buffer(f"{norm}.{end}") for end in STATISTICS}
    return {name: value.detach().clone().float() for name, value in trained.items()}
