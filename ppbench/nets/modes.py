"""What the mode of a module's layers does, found by running it: which of them draw, and what a pass writes into.

Dropout is a function call as often as a layer, and norms are written by hand: so no list of classes is asked where a
pass can show it. Modules here are copies of ours; a pass leaves their buffers, and all generators, as they were.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

_AGAIN = "no layer is computed again"
REPEATS = 8
"""Passes with other draws that must answer alike before draws count as without effect."""
_FORWARDS = (_BatchNorm.forward, _InstanceNorm.forward)
"""Of norms that are torch's own: one that is written anew may need its running statistics in training mode."""


class DrawsAlways(Exception):
    """A layer, by its name, draws in eval mode too."""


def copied(module: nn.Module) -> nn.Module:
    """Return a copy of a module; of activations, or weights made of others, that it keeps from a pass: their values."""
    inner = {id(value): value.detach().clone() for part in module.modules() for value in _computed(vars(part))}
    return copy.deepcopy(module, inner)


def _computed(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in dicts, lists and tuples that come of a computation: torch copies none that has a graph."""
    if isinstance(value, Tensor):
        yield from [] if value.is_leaf else [value]
    elif isinstance(value, dict):
        for part in value.values():
            yield from _computed(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _computed(part)


def run(module: nn.Module, x: Tensor, graph: bool = False) -> tuple[Any, frozenset[str]]:
    """Return what a module answers to a batch x, with its `graph` or none, and the names of buffers it writes into."""
    before = dict(module.named_buffers())
    buffers = {name: value.clone() for name, value in before.items()}
    with torch.set_grad_enabled(graph), sdpa_kernel(SDPBackend.MATH), unfused_attention(), kept_generators():
        out = functional_call(module, buffers, (x.clone(),))
    return out, frozenset(n for n, value in buffers.items() if value._version or not torch.equal(value, before[n]))


@contextmanager
def unfused_attention() -> Iterator[None]:
    """Compute attention layers in eval mode step by step: fused, no transform of torch.func goes through them."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


@contextmanager
def kept_generators() -> Iterator[None]:
    """Put the generators of torch, NumPy and Python back to where they were."""
    pythons, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(pythons)
            np.random.set_state(numpys)


def _generators() -> tuple[Any, ...]:
    _, keys, place, *_ = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), np.asarray(keys).tobytes(), place


def drawing(module: nn.Module, x: Tensor) -> list[str]:
    """Return the names of the layers in whose own code, not their parts', a pass draws; "" for the network itself."""
    stack, drawn, last = list[str](), dict[str, None](), _generators()

    def note() -> None:
        nonlocal last
        now = _generators()
        if now != last and stack:
            drawn[stack[-1]] = None
        last = now

    def enter(name: str) -> None:
        note()
        stack.append(name)

    def leave() -> None:
        note()
        stack.pop()

    with ExitStack() as hooks:
        for name, part in module.named_modules():
            before = part.register_forward_pre_hook(lambda _, __, name=name: enter(name))
            after = part.register_forward_hook(lambda _, __, ___: leave())
            hooks.callback(before.remove)
            hooks.callback(after.remove)
        run(module, x)
        with suppress(Exception):  # some layers draw for negative inputs alone; not every network takes them
            run(module, -x)
    return list(drawn)


def silence(module: nn.Module, x: Tensor) -> list[str]:
    """Put each layer that draws into eval mode, it alone and not its parts; return their names, in order of a pass.

    DrawsAlways: a layer draws whatever its mode and that of the layers around it.
    """
    silenced: list[str] = []
    while drawn := drawing(module, x):
        owners = {name: _in_training(module, name) for name in drawn}
        for name, owner in owners.items():
            if owner is None:
                raise DrawsAlways(name)
            if owner not in silenced:
                _switch_off(module.get_submodule(owner))
                silenced.append(owner)
    return silenced


def _in_training(module: nn.Module, name: str) -> str | None:
    """Return the layer `name`, or else the nearest one around it, that is in training mode; None for none."""
    parts = name.split(".") if name else []
    around = (".".join(parts[:depth]) for depth in range(len(parts), -1, -1))
    return next((own for own in around if module.get_submodule(own).training), None)


def _switch_off(part: nn.Module) -> None:
    """Let a layer draw no more; those of torch not in training mode either, which others' code may call for later."""
    part.training = False
    if isinstance(part, _DropoutNd):
        part.p = 0.0
    elif isinstance(part, nn.MultiheadAttention | nn.RNNBase):
        part.dropout = 0.0


def alike(module: nn.Module, other: nn.Module, x: Tensor) -> bool:
    """Return whether `module` answers as `other`, which draws nothing, whatever it draws (noise of size 0, say)."""
    expected, _ = run(other, x)
    for seed in range(REPEATS):
        with kept_generators():
            random.seed(seed)
            np.random.seed(seed)
            torch.default_generator.manual_seed(seed)
            out, _ = run(module, x)
        if not torch.equal(out, expected):
            return False
    return True


def prepare(module: nn.Module) -> None:
    """Let a module be differentiated twice, and keep what its layers hold between passes as it is.

    Norms in training mode need no running statistics. Spectral norms stay at the singular vectors that the last pass
    left, which a gradient taken in that pass was computed with: iterating on, in training mode, would be another pass.
    Tensors that are plain attributes become buffers, in their dtype, which are handed on as a computation needs them.
    """
    for part in module.modules():
        if isinstance(getattr(part, "inplace", None), bool):
            part.inplace = False  # type: ignore[assignment]  # what is overwritten cannot be differentiated twice
        if isinstance(part, _BatchNorm | _InstanceNorm) and part.training and type(part).forward in _FORWARDS:
            part.running_mean = part.running_var = part.num_batches_tracked = None
            part.track_running_stats = False
        for one in (part, *part._forward_pre_hooks.values()):
            if isinstance(one, _SpectralNorm | SpectralNorm):
                one.n_power_iterations = 0
        for name in [name for name, value in vars(part).items() if isinstance(value, Tensor)]:
            part.register_buffer(name, vars(part).pop(name).detach().cpu(), persistent=False)


def steady(module: nn.Module, x: Tensor) -> bool:
    """Return whether a pass after a pass answers alike: whether nothing that a pass leaves behind has a say in it."""
    moved = copied(module)
    with torch.no_grad(), kept_generators():
        first, second = moved(x.clone()), moved(x.clone())
    return torch.allclose(first, second, rtol=1e-4, atol=1e-6, equal_nan=True)


def recomputes(module: nn.Module, x: Tensor) -> bool:
    """Return whether a module computes layers again in the backward pass (checkpointing), at the weights of then."""
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks(_AGAIN):
            run(module, x, graph=True)
    except RuntimeError as cause:
        if _AGAIN in str(cause):
            return True
        raise
    return False


def computes_double(module: nn.Module, x: Tensor) -> bool:
    """Return whether a module computes in double precision too, as mismatches are; one that casts does not."""
    try:
        out, _ = run(copied(module).double(), x.double())
    except RuntimeError:
        return False
    return bool(out.dtype == torch.float64)


def use_running_statistics(module: nn.Module, x: Tensor) -> None:
    """Put the layers that update running statistics in a pass into eval mode, each alone."""
    for name in run(module, x)[1]:
        module.get_submodule(name.rpartition(".")[0]).training = False


def mixes(module: nn.Module, x: Tensor) -> bool:
    """Return whether what a module answers to an example depends on the others of its batch x [B, *shape], B 1 or 2.

    A batch norm's scale may be 0 at first, which hides it from who runs it.
    """
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
    if any(part.training or part.running_mean is None for part in norms):
        return True
    if len(x) == 1:
        return False
    mirrored = x.min() + x.max() - x[1]  # stays in the range that inputs have
    one, other = (run(module, torch.stack([x[0], second]))[0] for second in (x[1], mirrored))
    return not torch.allclose(one[0], other[0], rtol=1e-4, atol=1e-6, equal_nan=True)
