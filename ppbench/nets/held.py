"""Networks that somebody holds as objects: an `nn.Module` with its weights, in the mode that it is in.

A copy is made a `Classifier` by `nets.given`; the module itself is left as it is. What its mode means is read off
the layers in question: batch norm in training mode takes the statistics of the batch, in eval mode its running ones.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel

from ppbench.base.errors import UsageError, because, shown
from ppbench.nets import given
from ppbench.nets.given import Given
from ppbench.nets.net import HeldSpec, Net, NetSpec, check_untied, trainable


@dataclass(frozen=True)
class Held:
    """A network of somebody's, and its spec.

    names: of its trained parameters in it, by their names here, in the order of its `parameters()`.
    """

    spec: HeldSpec
    names: Mapping[str, str]


def held(module: nn.Module, shape: tuple[int, ...]) -> Held:
    """Return somebody's network as one of ours, float32 and on the CPU, for inputs of `shape` (without a batch).

    UsageError: it is no `nn.Module`, cannot be copied or run on such inputs, draws, or is none that `nets.given` takes.
    """
    if not isinstance(module, nn.Module):
        right = "a torch.nn.Module that answers a batch of inputs by logits"
        raise UsageError(f"The model is {shown(module, 60)}; it must be {right}.")
    module = unwrapped(module)
    name = type(module).__name__
    if any(value.is_meta for value in (*module.parameters(), *module.buffers())):
        raise UsageError(f"Model {name!r} lies on the meta device, without values; give one that has weights.")
    options = {"norms": _norms(name, module), "dropout": "off"}
    check_untied(name, module)
    with torch.random.fork_rng(devices=[]):
        try:
            classes = _classes(name, copy.deepcopy(module).cpu().float().eval(), shape)
            found = given.build(name, lambda: copy.deepcopy(module).cpu().float(), shape, classes, options)
        except (TypeError, ValueError, RuntimeError, IndexError, AssertionError) as cause:
            if embedding := _embedding(module, str(cause)):
                told = f"Model {name!r} has an embedding of tokens ({embedding}), which takes whole numbers"
                raise UsageError(f"{told}; inputs are floats here, token inputs are not supported yet.") from cause
            told = f"{because(cause, 300)}; shape must be that of one input, without the batch"
            raise UsageError(f"Model {name!r} cannot be run on inputs of shape {shape}: {told}.") from cause
    start, net = trainable(found), Net(NetSpec(name, shape, classes), found)
    net.spec = spec = HeldSpec(name, shape, classes, net=net, start=start)
    ours = {found.own_name(n) if isinstance(found, Given) else n: n for n in start}
    return Held(spec, {ours[n]: n for n, value in module.named_parameters() if value.requires_grad})


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the network in torch's own wrappers, parallel or compiled: the same function of the same parameters."""
    while True:
        compiled = getattr(module, "_orig_mod", None)  # by name: to import torch's compiler takes seconds
        if isinstance(compiled, nn.Module):
            module = compiled
        elif isinstance(module, nn.DataParallel | DistributedDataParallel):
            module = module.module
        else:
            return module


def _embedding(module: nn.Module, message: str) -> str:
    """Return the name of an embedding that floats were given to, as torch's message tells; "" for none."""
    names = [name for name, part in module.named_modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    return names[0] if names and "argument #1 'indices'" in message else ""


def _classes(name: str, module: nn.Module, shape: tuple[int, ...]) -> int:
    with torch.no_grad():
        logits = module(torch.zeros(2, *shape))
    if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != 2 or logits.shape[1] < 2:
        told = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise UsageError(f"Model {name!r} answers two inputs by {told}; it must answer by logits [2, classes].")
    return logits.shape[1]


def _norms(name: str, module: nn.Module) -> str:
    """Return which statistics batch norm takes, one of `given.NORMS`; UsageError: some these, some those; or dropout.

    Without running statistics it takes the batch's in either mode.
    """
    drawing = [n for n, m in module.named_modules() if m.training and isinstance(m, _DropoutNd) and m.p]
    drawing += [n for n, m in module.named_modules() if m.training and given.attention_draws(m)]
    if drawing:
        told = f"Model {name!r} has dropout in training mode ({drawing[0]}), which draws in every pass"
        raise UsageError(f"{told}; put it into eval mode before the gradient is taken.")
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
    modes = {part.training or part.running_mean is None for part in norms}
    if len(modes) > 1:
        told = f"Model {name!r} has batch norms in training and in eval mode"
        raise UsageError(f"{told}; put all of them into the same mode before the gradient is taken.")
    return given.NORMS[0] if True in modes else given.NORMS[1]
