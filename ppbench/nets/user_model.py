"""Users' networks: converts any classifying `nn.Module` to a `Classifier`.

The network is split at the linear layer that gives its logits. Whatever would make the gradient depend on more than
weights and batch is settled here: random draws, norms, and layers' state between passes (`nets.modes`). A network given
by its address is in training mode, except for the options `norms` and `dropout`, which are recorded; a network given as
an object keeps the mode of each of its layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ppbench.base.errors import UsageError, one_line, shown
from ppbench.base.import_guard import importable
from ppbench.base.vocabulary import PADDING
from ppbench.nets import modes
from ppbench.nets.classifier import (
    Classifier,
    Unfit,
    answers_tokens,
    batch_words,
    dtypes_of,
    head_of,
    names_of_parts,
    observed_facts,
    split_at_head,
    with_facts,
    without_head,
)

FactoryArguments = Mapping[str, str | int | float | bool]
NORM_OPTIONS = ("batch", "running", "tracked")
DROPOUT_OPTIONS = ("refused", "off")
_CLASSES = ("classes", "num_classes", "n_classes", "num_labels")
_SHAPE = ("shape", "input_shape")
_CHANNELS = ("channels", "in_channels", "in_chans")


def build_user_network(
    name: str, factory: Callable[..., Any], shape: tuple[int, ...], classes: int, options: FactoryArguments
) -> Classifier:
    """Return the network of `factory` as a classifier in training mode (UsageError: it is none).

    factory: called with those of classes, num_classes, shape, in_channels and the like that it accepts, and `options`.
    Two options are ours: `norms` is "batch" (norms use the batch's statistics, in training and in use), "running"
    (layers with running statistics use the module's, which never change) or "tracked" (batch norms use the batch's in
    training, and in use running ones, which travel with the weights, as where frameworks send a whole state dict);
    `dropout` is "off" (each layer that draws in training mode is put into eval mode) or "refused". If a network returns
    more than logits in training mode (auxiliary heads), the network itself is put into eval mode, but not its layers.
    """
    remaining = dict(options)
    norms, dropout = remaining.pop("norms", NORM_OPTIONS[0]), remaining.pop("dropout", DROPOUT_OPTIONS[0])
    try:
        for option, value, known in (("norms", norms, NORM_OPTIONS), ("dropout", dropout, DROPOUT_OPTIONS)):
            if value not in known:
                raise Unfit(f"{option} must be {' or '.join(known)}, not {shown(value)}")
        if isinstance(factory, nn.Module):
            raise Unfit("it is a network itself; name its class, or a function that returns it")
        arguments = {**factory_arguments(factory, shape, classes), **remaining}
        module = importable(lambda: factory(**arguments))
        if isinstance(module, Classifier):
            return module
        if not isinstance(module, nn.Module):
            raise Unfit(f"it gave {one_line(type(module).__name__, 60)}; it must give an nn.Module")
        x, module = _examples(shape), modes.with_single_names(module)
        table = table_of(module, shape)
        module = taking_texts(module, table) if table else module
        _check_precision(module.train(), x)
        classifier = split_at_head(_in_training(module.float(), x, str(norms), str(dropout)), x, classes)
        classifier.embedding = f"features.{table}.weight" if table else ""
        return classifier
    except Unfit as cause:
        raise UsageError(f"Model {shown(name)} cannot be used for inputs {shape}: {cause}.") from cause


# -- Networks of texts: token numbers come as floats [B, L], or vectors [B, L, D] take the place of their embeddings --


def table_of(module: nn.Module, shape: tuple[int, ...]) -> str:
    """Return the name of the embedding that gets a module's input, token numbers [B, L], as it is; "" if none does."""
    if len(shape) != 1:
        return ""
    numbers, reading = 1 + torch.arange(2 * shape[0]).view(2, -1) % 2, list[str]()  # no positions, no padding
    copy = modes.copied(module)
    for name, part in copy.named_modules():
        if isinstance(part, nn.Embedding):
            part.register_forward_pre_hook(
                lambda _, inputs, name=name: reading.append(name) if torch.equal(inputs[0], numbers) else None
            )
    with suppress(Exception), torch.no_grad(), modes.kept_generators():
        copy(numbers, **_mask_for(copy, type(copy), numbers))
    return reading[0] if reading else ""


BLOCKED = -1e9
"""Added to a score that attention must not see; finite, so that a text of padding alone gives no NaN."""


def _mask_for(
    module: nn.Module,
    kind: type[nn.Module],
    numbers: Tensor,
    dtype: torch.dtype = torch.float32,
    continues: bool = False,
) -> dict[str, Tensor]:
    """Return which tokens of numbers [B, L] are no padding, as the argument `attention_mask`, if a module takes it.

    Networks of `transformers` get what is added to scores, [B, 1, L, L]: of [B, L] they make it by code that
    transforms of torch.func cannot handle. kind: the module's own class. continues: whether later tokens are
    hidden, as such networks do themselves where they make it.
    """
    if "attention_mask" not in inspect.signature(kind.forward).parameters:
        return {}
    real = (numbers != PADDING).long()
    if not _is_of_transformers(module):
        return {"attention_mask": real}
    length = numbers.shape[1]
    hidden = (1 - real).to(dtype)[:, None, None, :].expand(-1, 1, length, -1)
    if continues:
        later = torch.ones(length, length, dtype=dtype, device=numbers.device).triu(1)
        hidden = torch.maximum(hidden, later)
    return {"attention_mask": BLOCKED * hidden}


def _is_of_transformers(module: nn.Module) -> bool:
    """Return whether a network is one of `transformers`, or wraps one, as those of `peft` do."""
    return hasattr(module, "get_input_embeddings")


def taking_texts(module: nn.Module, name: str) -> nn.Module:
    """Return a module that takes token numbers as floats [B, L], or vectors [B, L, D] in the place of embeddings.

    name: of the embedding. The module gets the padding as `attention_mask` if it takes one; vectors are no padding. An
    answer with a part `logits`, as `transformers` gives it, is replaced by that part. Done by the classes of module and
    embedding, so that parameters keep their names. Unfit: the embedding changes in a pass.
    """
    table, former = module.get_submodule(name), type(module)
    if not isinstance(table, nn.Embedding) or table.max_norm is not None:
        raise Unfit(f"its embedding {name} renormalizes rows in each pass (max_norm); leave that out")
    rows, continues = table.num_embeddings, _continues(module)
    _replaceable(table)

    def forward(self: nn.Module, x: Tensor) -> Any:
        known = x.dim() == 2
        numbers = x.round().long().clamp(0, rows - 1) if known else torch.full_like(x[..., 0], PADDING + 1).long()
        layer: Any = self.get_submodule(name)
        layer.vectors = None if known else x
        try:
            answer = former.forward(self, numbers, **_mask_for(self, former, numbers, x.dtype, continues))
        finally:
            layer.vectors = None
        return getattr(answer, "logits", answer)

    module.__class__ = type(former.__name__, (former,), {"forward": forward, "__module__": former.__module__})
    return module


def _continues(module: nn.Module) -> bool:
    """Return whether a network of `transformers` answers a token by what stands before it, without a mask."""
    if not _is_of_transformers(module):
        return False
    numbers = torch.tensor([[1, 1, 1], [1, 1, 2]])
    with torch.no_grad(), modes.kept_generators(), suppress(Exception):
        logits = modes.copied(module).eval()(numbers).logits
        return bool(answers_tokens(logits, numbers) and torch.equal(*logits[:, 1]))
    return False


def _replaceable(table: nn.Embedding) -> None:
    """Let an embedding answer by its attribute `vectors` where this is set."""
    former = type(table)

    def forward(self: Any, numbers: Tensor) -> Tensor:
        vectors: Tensor | None = self.vectors
        return former.forward(self, numbers) if vectors is None else vectors

    attributes = {"forward": forward, "vectors": None, "__module__": former.__module__}
    table.__class__ = type(former.__name__, (former,), attributes)


def as_classifier(name: str, module: nn.Module, x: Tensor, when: str, any_output: bool = False) -> Classifier:
    """Return a user's module as a classifier, each layer in its current mode.

    module, x: from `runnable_copy`. when: for errors, when to switch to eval mode: "" or " before ...". any_output:
    whether one output, and probabilities, will do, as for losses other than cross-entropy.
    UsageError: the module draws in that mode, or is no classifier.
    """
    shape = tuple(x.shape[1:])
    try:
        logits = _answer(module, x, when)
        every = answers_tokens(logits, x)
        if logits.dim() != 2 + every or len(logits) != len(x) or logits.shape[-1] < (1 if any_output else 2):
            right = f"it must answer by logits [{len(x)}, classes]"
            right += "; one output goes with loss='bce' or loss='mse'" if when and logits.numel() == len(x) else ""
            raise Unfit(f"it answers {batch_words(x)} by {tuple(logits.shape)}; {right}")
        module = _without_draws(module, x, when=when)
        if not modes.steady(module, x):
            steady_in_eval = modes.steady(modes.copied(module).eval(), x)
            remedy = f"put it into eval mode{when}" if steady_in_eval else "let it move that in training mode alone"
            raise Unfit(f"what it answers depends on what the pass before left in it; {remedy}")
        if isinstance(module, Classifier):
            return with_facts(module, observed_facts(module, x), prefix="")
        if head_of(module, x)[1] is None:
            return without_head(module, x, logits.shape[-1], any_output)
        return split_at_head(module, x, logits.shape[-1])
    except Unfit as cause:
        raise UsageError(f"Model {shown(name)} cannot be used for inputs {shape}: {cause}.") from cause


def runnable_copy(
    module: nn.Module, shape: tuple[int, ...], data_range: tuple[float, float], tracked: bool = False
) -> tuple[nn.Module, Tensor]:
    """Return a copy of a module on the CPU, prepared (`modes.prepare`), and inputs in `data_range`: two, else one.

    The copy is float32, or keeps its dtypes if its forward pass needs them. If it accepts neither, the exception of its
    pass on two inputs is raised.
    """
    causes: list[Exception] = []
    for count in (2, 1):
        for single in (True, False):
            copy, x = modes.copied(module).cpu(), _examples(shape, data_range)[:count]
            modes.prepare(copy, tracked)
            try:
                copy = copy.float() if single else copy
                modes.run_module(modes.copied(copy), x)
                return copy, x
            except Exception as cause:  # noqa: BLE001  # whatever somebody's forward pass raises
                causes.append(cause)
    raise causes[0]


_COUNTS = (2, 1, 3, 4, 5, 6, 7, 8, 10, 16, 32)
"""Batch sizes to try before a shape is refused."""


def batch_it_runs_on(module: nn.Module, shape: tuple[int, ...], data_range: tuple[float, float]) -> str:
    """Return, in words, a batch on which a module runs on its own device and in its own precision; "" if none."""
    values = (*module.parameters(), *module.buffers())
    for dtype in dict.fromkeys([torch.float32, *dtypes_of(module)]):
        for count in _COUNTS:
            example = _examples(shape, data_range)[:1].to(values[0].device if values else "cpu", dtype)
            with suppress(Exception), torch.no_grad(), modes.kept_generators():
                modes.copied(module)(example.expand(count, *shape).clone())
                return f"a batch of {count} in {str(dtype).removeprefix('torch.')} on {example.device}"
    return ""


def _examples(shape: tuple[int, ...], data_range: tuple[float, float] = (0.0, 1.0)) -> Tensor:
    low, high = data_range
    return low + (high - low) * torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))


def _check_precision(module: nn.Module, x: Tensor) -> None:
    """Raise Unfit if a network does not run in float32, or not on two inputs; its own exception if it never runs."""
    copy, trial = runnable_copy(module, tuple(x.shape[1:]), (0.0, 1.0))
    if len(trial) < len(x):
        raise Unfit("it takes one input at a time; let it take batches of any size")
    if other_dtypes := [str(dtype) for dtype in dtypes_of(copy) if dtype != torch.float32]:
        raise Unfit(
            f"its forward pass counts on parameters that are {' and '.join(other_dtypes)}; let it compute in float32"
        )


def factory_arguments(factory: Callable[..., Any], shape: tuple[int, ...], classes: int) -> dict[str, Any]:
    """Return the arguments that a factory accepts by name; num_classes if it has only **kwargs."""
    parameters = inspect.signature(factory).parameters
    arguments: dict[str, Any] = {}
    for names, value in ((_CLASSES, classes), (_SHAPE, shape), (_CHANNELS, shape[0])):
        arguments |= {name: value for name in names if name in parameters}
    has_kwargs = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {"num_classes": classes, **arguments} if has_kwargs and not {*_CLASSES} & {*arguments} else arguments


def _in_training(module: nn.Module, x: Tensor, norms: str, dropout: str) -> nn.Module:
    """Return a module in training mode with the options of `build_user_network` (Unfit: it still draws)."""
    module.train()
    bare = any(isinstance(part, _BatchNorm) and part.running_mean is None for part in module.modules())
    if norms != "batch" and bare:
        raise Unfit("it has a batch norm without running statistics; take the option norms=batch")
    if norms == "running":
        modes.use_running_statistics(module, x)
    if norms == "tracked" and not modes.moving_statistics(module):
        raise Unfit("it has no batch norm that moves running statistics by a momentum; take the option norms=batch")
    modes.prepare(module, norms == "tracked")
    module.float()
    if not isinstance(modes.run_module(module, x)[0], Tensor):
        module.training = False
        _answer(module, x)
    return _without_draws(module, x, off=dropout == "off")


def _answer(module: nn.Module, x: Tensor, when: str = "") -> Tensor:
    """Return the logits of examples (Unfit: the module returns something else)."""
    logits, _ = modes.run_module(module, x)
    if isinstance(logits, Tensor):
        return logits
    kind, training, parts = one_line(type(logits).__name__, 60), module.training, names_of_parts(logits)
    module.training = False
    if training and isinstance(modes.run_module(module, x)[0], Tensor):
        remedy = f"its auxiliary heads have a say in the gradient, so put it into eval mode{when}"
        raise Unfit(f"it answers by {kind} in training mode; {remedy}")
    named = f"; say which part is them, as output={parts[0]}" if when and parts else ""
    raise Unfit(f"it answers by {kind}; it must answer by logits [batch, classes]{named}")


def _without_draws(module: nn.Module, x: Tensor, off: bool | None = None, when: str = "") -> nn.Module:
    """Return a module that draws nothing: unchanged, or with its drawing layers in eval mode.

    off: whether drawing layers are put into eval mode, else refused (Unfit). None: refused, for a module whose mode the
    user chose.
    """
    if modes.run_module(module, x)[0].isnan().any():
        tried = f"inputs between {float(x.min()):.3g} and {float(x.max()):.3g}"
        raise Unfit(f"it answers {tried} by NaN; let it be finite there, or give the range that its inputs have")
    quiet = modes.copied(module) if modes.drawing(module, x) else module
    try:
        silenced = modes.silence(quiet, x)
    except modes.DrawsAlways as cause:
        raise Unfit(
            f"{_layer(module, str(cause))} draws at random in each pass, in eval mode too; let it do so in "
            "training mode alone, by `training=self.training`"
        ) from cause
    if silenced and not off and not modes.answers_alike(module, quiet, x):
        remedy = "take the option dropout=off" if off is not None else f"put it into eval mode{when}"
        raise Unfit(f"{_layer(module, silenced[0])} draws at random in each pass in training mode; {remedy}")
    if modes.recomputes(quiet, x):
        raise Unfit("it computes layers again in the backward pass (torch.utils.checkpoint); switch that off")
    if not torch.equal(modes.run_module(quiet, x)[0], modes.run_module(quiet, x)[0]):
        raise Unfit(
            "it answers equal inputs otherwise in each pass; let it draw from torch's own generator, or not at all"
        )
    return quiet


def _layer(module: nn.Module, name: str) -> str:
    kind = type(module.get_submodule(name)).__name__
    return f"its layer {name} ({kind})" if name else f"the network itself ({kind})"
