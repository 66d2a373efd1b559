"""Networks that nobody wrote for this bench: any `nn.Module` that classifies, made a `Classifier`.

The network is split at the linear layer that gives its logits. What makes the gradient of a batch another thing than a
function of weights and batch is settled here, once: draws, norms, and what layers keep between passes (`nets.modes`).
A network by its address is in training mode, but for what the options `norms` and `dropout` say, which records state;
one that somebody holds as an object is in the mode that each of its layers is in.
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
from ppbench.base.vision import importable
from ppbench.nets import modes
from ppbench.nets.classifier import Classifier
from ppbench.nets.split import Unfit, counted, facts_of, head_of, precisions, split, stating, whole

Options = Mapping[str, str | int | float | bool]
NORMS = ("batch", "running")
DROPOUT = ("refused", "off")
_CLASSES = ("classes", "num_classes", "n_classes", "num_labels")
_SHAPE = ("shape", "input_shape")
_CHANNELS = ("channels", "in_channels", "in_chans")


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
                raise Unfit(f"{option} must be {' or '.join(known)}, not {shown(value)}")
        if isinstance(factory, nn.Module):
            raise Unfit("it is a network itself; name its class, or a function that returns it")
        arguments = {**_arguments(factory, shape, classes), **own}
        module = importable(lambda: factory(**arguments))
        if isinstance(module, Classifier):
            return module
        if not isinstance(module, nn.Module):
            raise Unfit(f"it gave {one_line(type(module).__name__, 60)}; it must give an nn.Module")
        x = _examples(shape)
        _check_precision(module.train(), x)
        return split(_in_training(module.float(), x, str(norms), str(dropout)), x, classes)
    except Unfit as cause:
        raise UsageError(f"Model {shown(name)} cannot be used for inputs {shape}: {cause}.") from cause


def take(name: str, module: nn.Module, x: Tensor, when: str) -> Classifier:
    """Return a module of somebody's as a classifier in the mode that each of its layers is in.

    module, x: as `fitting` gives them. when: eval mode would be right, as sentences have it: "" or " before ...".
    UsageError: it draws in that mode, or is no classifier.
    """
    shape = tuple(x.shape[1:])
    try:
        logits = _answer(module, x, when)
        if logits.dim() != 2 or len(logits) != len(x) or logits.shape[1] < 2:
            right = f"it must answer by logits [{len(x)}, classes]"
            raise Unfit(f"it answers {counted(x)} by {tuple(logits.shape)}; {right}")
        module = _without_draws(module, x, when=when)
        if not modes.steady(module, x):
            calm = modes.steady(modes.copied(module).eval(), x)
            remedy = f"put it into eval mode{when}" if calm else "let it move that in training mode alone"
            raise Unfit(f"what it answers depends on what the pass before left in it; {remedy}")
        if isinstance(module, Classifier):
            return stating(module, facts_of(module, x), prefix="")
        cut = split if head_of(module, x)[1] is not None else whole
        return cut(module, x, logits.shape[1])
    except Unfit as cause:
        raise UsageError(f"Model {shown(name)} cannot be used for inputs {shape}: {cause}.") from cause


def fitting(module: nn.Module, shape: tuple[int, ...], data_range: tuple[float, float]) -> tuple[nn.Module, Tensor]:
    """Return a copy of a module, prepared and on the CPU, and inputs in `data_range` that it takes: two, or else one.

    It is float32 or, where its forward pass counts on the precision of its parameters, as it is. Where it takes no such
    inputs, what its pass on two raises is raised.
    """
    causes: list[Exception] = []
    for count in (2, 1):
        for single in (True, False):
            copy, x = modes.copied(module).cpu(), _examples(shape, data_range)[:count]
            modes.prepare(copy)
            try:
                copy = copy.float() if single else copy
                modes.run(modes.copied(copy), x)
                return copy, x
            except Exception as cause:  # noqa: BLE001  # whatever somebody's forward pass raises
                causes.append(cause)
    raise causes[0]


_COUNTS = (2, 1, 3, 4, 5, 6, 7, 8, 10, 16, 32)
"""Sizes of batches that are tried before a shape is called wrong."""


def runs_as_it_is(module: nn.Module, shape: tuple[int, ...], data_range: tuple[float, float]) -> str:
    """Return on what batch a module runs as it is, on its own device and in a precision of its own; "" for none."""
    values = (*module.parameters(), *module.buffers())
    for dtype in dict.fromkeys([torch.float32, *precisions(module)]):
        for count in _COUNTS:
            one = _examples(shape, data_range)[:1].to(values[0].device if values else "cpu", dtype)
            with suppress(Exception), torch.no_grad(), modes.kept_generators():
                modes.copied(module)(one.expand(count, *shape).clone())
                return f"a batch of {count} in {str(dtype).removeprefix('torch.')} on {one.device}"
    return ""


def _examples(shape: tuple[int, ...], data_range: tuple[float, float] = (0.0, 1.0)) -> Tensor:
    low, high = data_range
    return low + (high - low) * torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))


def _check_precision(module: nn.Module, x: Tensor) -> None:
    """Refuse a network that runs, but not in float32 or not on two inputs (Unfit); one that does not raises."""
    copy, taken = fitting(module, tuple(x.shape[1:]), (0.0, 1.0))
    if len(taken) < len(x):
        raise Unfit("it takes one input at a time; let it take batches of any size")
    if own := [str(dtype) for dtype in precisions(copy) if dtype != torch.float32]:
        raise Unfit(f"its forward pass counts on parameters that are {' and '.join(own)}; let it compute in float32")


def _arguments(factory: Callable[..., Any], shape: tuple[int, ...], classes: int) -> dict[str, Any]:
    """Return what a factory asks for by name; one that hands all on (**kwargs) is given num_classes."""
    parameters = inspect.signature(factory).parameters
    found: dict[str, Any] = {}
    for names, value in ((_CLASSES, classes), (_SHAPE, shape), (_CHANNELS, shape[0])):
        found |= {name: value for name in names if name in parameters}
    hands_on = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return {"num_classes": classes, **found} if hands_on and not {*_CLASSES} & {*found} else found


def _in_training(module: nn.Module, x: Tensor, norms: str, dropout: str) -> nn.Module:
    """Return a module in training mode, but for what `build` says; Unfit: it draws, and that is not switched off."""
    module.train()
    if norms == "running":
        if any(isinstance(part, _BatchNorm) and part.running_mean is None for part in module.modules()):
            raise Unfit("it has a batch norm without running statistics; take the option norms=batch")
        modes.use_running_statistics(module, x)
    modes.prepare(module)
    module.float()
    if not isinstance(modes.run(module, x)[0], Tensor):
        module.training = False
        _answer(module, x)
    return _without_draws(module, x, off=dropout == "off")


def _answer(module: nn.Module, x: Tensor, when: str = "") -> Tensor:
    """Return the logits of examples; Unfit: a module answers by something else."""
    logits, _ = modes.run(module, x)
    if isinstance(logits, Tensor):
        return logits
    kind, training = one_line(type(logits).__name__, 60), module.training
    module.training = False
    if training and isinstance(modes.run(module, x)[0], Tensor):
        remedy = f"its auxiliary heads have a say in the gradient, so put it into eval mode{when}"
        raise Unfit(f"it answers by {kind} in training mode; {remedy}")
    raise Unfit(f"it answers by {kind}; it must answer by logits [batch, classes]")


def _without_draws(module: nn.Module, x: Tensor, off: bool | None = None, when: str = "") -> nn.Module:
    """Return a module that draws nothing: as it is, or with the layers that draw in eval mode.

    off: whether these are put there, or refused (Unfit). None: they are refused by whom the module's mode comes from.
    """
    if modes.run(module, x)[0].isnan().any():
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
    if silenced and not off and not modes.alike(module, quiet, x):
        remedy = "take the option dropout=off" if off is not None else f"put it into eval mode{when}"
        raise Unfit(f"{_layer(module, silenced[0])} draws at random in each pass in training mode; {remedy}")
    if modes.recomputes(quiet, x):
        raise Unfit("it computes layers again in the backward pass (torch.utils.checkpoint); switch that off")
    if not torch.equal(modes.run(quiet, x)[0], modes.run(quiet, x)[0]):
        raise Unfit(
            "it answers equal inputs otherwise in each pass; let it draw from torch's own generator, or not at all"
        )
    return quiet


def _layer(module: nn.Module, name: str) -> str:
    kind = type(module.get_submodule(name)).__name__
    return f"its layer {name} ({kind})" if name else f"the network itself ({kind})"
