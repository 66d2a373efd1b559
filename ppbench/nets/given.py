"""Networks that nobody wrote for this bench: any `nn.Module` that classifies, made a `Classifier`.

The network is split at the linear layer that gives its logits. What makes the gradient of a batch another thing than a
function of weights and batch is settled here, once: draws, norms, and what layers keep between passes (`nets.modes`).
A network by its address is in training mode, but for what the options `norms` and `dropout` say, which records state;
one that somebody holds as an object is in the mode that each of its layers is in.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ppbench.base.errors import UsageError, one_line, shown
from ppbench.base.vision import importable
from ppbench.nets import modes
from ppbench.nets.classifier import Classifier
from ppbench.nets.split import Unfit, facts_of, head_of, split, stating, whole

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
        arguments = {**_arguments(factory, shape, classes), **own}
        module = importable(lambda: factory(**arguments))
        if isinstance(module, Classifier):
            return module
        if not isinstance(module, nn.Module):
            raise Unfit(f"it gave {one_line(type(module).__name__, 60)}; it must give an nn.Module")
        return split(_in_training(module, _examples(shape), str(norms), str(dropout)), _examples(shape), classes)
    except Unfit as cause:
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
            raise Unfit(f"it answers two inputs by {tuple(logits.shape)}; it must answer by logits [2, classes]")
        module = _without_draws(module, x)
        if not modes.steady(module, x):
            reason = "what it answers depends on what the pass before left in it"
            raise Unfit(f"{reason}; put it into eval mode before the gradient is taken")
        if isinstance(module, Classifier):
            return stating(module, facts_of(module, x), prefix="")
        cut = split if head_of(module, x)[1] is not None else whole
        return cut(module, x, logits.shape[1])
    except Unfit as cause:
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
    """Return a module in training mode, but for what `build` says; Unfit: it draws, and that is not switched off."""
    module.train()
    if norms == "running":
        if any(isinstance(part, _BatchNorm) and part.running_mean is None for part in module.modules()):
            raise Unfit("it has a batch norm without running statistics; take the option norms=batch")
        modes.use_running_statistics(module, x)
    modes.prepare(module)
    if not isinstance(modes.run(module, x)[0], Tensor):
        module.training = False
    return _without_draws(module, x, off=dropout == "off")


def _answer(module: nn.Module, x: Tensor) -> Tensor:
    """Return the logits of examples; Unfit: a module answers by something else."""
    logits, _ = modes.run(module, x)
    if isinstance(logits, Tensor):
        return logits
    kind, training = one_line(type(logits).__name__, 60), module.training
    module.training = False
    if training and isinstance(modes.run(module, x)[0], Tensor):
        remedy = "its auxiliary heads have a say in the gradient, so put it into eval mode before that is taken"
        raise Unfit(f"it answers by {kind} in training mode; {remedy}")
    raise Unfit(f"it answers by {kind}; it must answer by logits [batch, classes]")


def _without_draws(module: nn.Module, x: Tensor, off: bool | None = None) -> nn.Module:
    """Return a module that draws nothing: as it is, or with the layers that draw in eval mode.

    off: whether these are put there, or refused (Unfit). None: they are refused by whom the module's mode comes from.
    """
    quiet = modes.copied(module) if modes.drawing(module, x) else module
    try:
        silenced = modes.silence(quiet, x)
    except modes.DrawsAlways as cause:
        raise Unfit(
            f"{_layer(module, str(cause))} draws at random in each pass, in eval mode too; let it do so in "
            "training mode alone, by `training=self.training`"
        ) from cause
    if silenced and not off and not modes.alike(module, quiet, x):
        remedy = (
            "take the option dropout=off" if off is not None else "put it into eval mode before the gradient is taken"
        )
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
