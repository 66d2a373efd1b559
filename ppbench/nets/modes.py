"""Effects of the mode of a module's layers, determined by running it: which layers draw, what a pass writes into.

Dropout may be a function call instead of a layer, and norms may be written by hand, so a pass is more reliable than a
list of classes. Modules here are copies; a pass leaves their buffers, and all generators, unchanged.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

_AGAIN = "no layer is computed again"
DRAW_REPEATS = 8
"""Passes with different draws that must agree before draws count as without effect."""
_FORWARDS = (_BatchNorm.forward, _InstanceNorm.forward)
"""torch's own norms: a user's norm may need its running statistics in training mode."""


STATISTICS = ("running_mean", "running_var")
"""torch's names of a norm's running statistics."""


class TrackedNorm(_BatchNorm):
    """A batch norm whose running statistics are entries of the parameters, not state that a pass changes.

    In training mode it normalizes by the batch, and notes the batch's mean and unbiased variance, towards which torch
    moves the running ones, where `recorded` asks for them; else it normalizes by the running statistics.
    """

    momentum: float
    running_mean: Tensor
    running_var: Tensor
    notes: list[tuple[Tensor, Tensor]] | None = None

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.num_batches_tracked = None

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept what the user's layer did."""

    def forward(self, input: Tensor) -> Tensor:  # torch's own name
        """Return normalized inputs [B, C, ...]."""
        if not self.training:
            spread = self.running_var.clamp(min=0.0)  # a defense's noise may make it negative
            return batch_norm(input, self.running_mean, spread, self.weight, self.bias, False, 0.0, self.eps)
        out = batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)
        if self.notes is not None:
            variance, mean = torch.var_mean(input, [0, *range(2, input.dim())])
            self.notes.append((mean, variance))
        return out


def _moves(part: nn.Module) -> bool:
    """Return whether a norm moves its running statistics by a fixed share of the way to each batch's."""
    own = isinstance(part, _BatchNorm) and part.training and type(part).forward in _FORWARDS
    return own and part.running_mean is not None and bool(part.momentum)  # None: the mean over all batches so far


def moving_statistics(module: nn.Module) -> dict[str, float]:
    """Return the norm's momentum by the name of each running statistic that a training step moves by such a share."""
    norms = [(name, part) for name, part in module.named_modules() if _moves(part)]
    return {f"{name}.{end}".lstrip("."): part.momentum for name, part in norms for end in STATISTICS}


def tracked_norms(module: nn.Module) -> dict[str, TrackedNorm]:
    """Return the norms with running statistics among the parameters, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, TrackedNorm)}


@contextmanager
def recorded(norms: Iterable[TrackedNorm]) -> Iterator[None]:
    """Let norms note the statistics of their batches in the block, in `notes`."""
    kept = list(norms)
    for part in kept:
        part.notes = []
    try:
        yield
    finally:
        for part in kept:
            part.notes = None


@contextmanager
def using_statistics(norms: Iterable[TrackedNorm]) -> Iterator[None]:
    """Let norms normalize by their running statistics in the block."""
    kept = list(norms)
    for part in kept:
        part.training = False
    try:
        yield
    finally:
        for part in kept:
            part.training = True


class DrawsAlways(Exception):
    """The named layer draws in eval mode too."""


def copied(module: nn.Module) -> nn.Module:
    """Return a copy of a module; computed tensors that it stores (activations, derived weights) lose their graph."""
    inner = {id(value): value.detach().clone() for part in module.modules() for value in _computed(vars(part))}
    return copy.deepcopy(module, inner)


def with_single_names(module: nn.Module) -> nn.Module:
    """Return a copy in which each trained parameter has one name, its first; the module itself if that is so already.

    Other layers that use it (tied weights) read it off the first, so that whoever replaces it there replaces it
    everywhere.
    """
    twice = [value for _, value in module.named_parameters(remove_duplicate=False) if value.requires_grad]
    if len({*map(id, twice)}) == len(twice):
        return module
    module, owners = copied(module), dict[int, tuple[nn.Module, str]]()
    for part in module.modules():
        for name, value in [*part._parameters.items()]:
            if value is not None and value.requires_grad and owners.setdefault(id(value), (part, name))[0] is not part:
                _refer(part, name, owners[id(value)])
    return module


def _refer(part: nn.Module, name: str, owner: tuple[nn.Module, str]) -> None:
    """Let a layer read its parameter `name` off another layer; past `Module.__setattr__`, which would register that."""
    del part._parameters[name]
    part.__dict__.setdefault("_tied", {})[name] = owner
    kind = type(part)
    read = property(lambda self: getattr(*self._tied[name]))
    part.__class__ = type(kind.__name__, (kind,), {name: read, "__module__": kind.__module__})


def _computed(value: Any) -> Iterator[Tensor]:
    """Yield the tensors with a graph in dicts, lists and tuples, which torch cannot copy."""
    if isinstance(value, Tensor):
        yield from [] if value.is_leaf else [value]
    elif isinstance(value, dict):
        for part in value.values():
            yield from _computed(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _computed(part)


def run_module(module: nn.Module, x: Tensor, graph: bool = False) -> tuple[Any, frozenset[str]]:
    """Return a module's output for a batch x, with or without its `graph`, and the buffers that it writes into."""
    before = dict(module.named_buffers())
    buffers = {name: value.clone() for name, value in before.items()}
    with torch.set_grad_enabled(graph), sdpa_kernel(SDPBackend.MATH), unfused_attention(), kept_generators():
        out = functional_call(module, buffers, (x.clone(),))
    return out, frozenset(n for n, value in buffers.items() if value._version or not torch.equal(value, before[n]))


@contextmanager
def unfused_attention() -> Iterator[None]:
    """Compute attention layers in eval mode unfused: transforms of torch.func cannot handle fused ones."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restore the states of torch's, NumPy's and Python's generators after the block."""
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
    """Return the names of the layers whose own code (not their parts') draws in a pass; "" is the network itself."""
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
        run_module(module, x)
        with suppress(Exception):  # some layers draw for negative inputs alone; not every network takes them
            run_module(module, -x)
    return list(drawn)


def silence(module: nn.Module, x: Tensor) -> list[str]:
    """Put each layer that draws into eval mode, but not its parts; return their names, in order of a pass.

    DrawsAlways: a layer draws in every mode of itself and the layers around it.
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
    """Return `name`, or the nearest layer around it, if in training mode; None if there is none."""
    parts = name.split(".") if name else []
    around = (".".join(parts[:depth]) for depth in range(len(parts), -1, -1))
    return next((own for own in around if module.get_submodule(own).training), None)


def _switch_off(part: nn.Module) -> None:
    """Put a layer into eval mode; torch's own layers also draw nothing if user code sets training mode again."""
    part.training = False
    if isinstance(part, _DropoutNd):
        part.p = 0.0
    elif isinstance(part, nn.MultiheadAttention | nn.RNNBase):
        part.dropout = 0.0


def answers_alike(module: nn.Module, other: nn.Module, x: Tensor) -> bool:
    """Return whether `module` gives the output of `other`, which draws nothing, for all draws (say noise of size 0)."""
    expected, _ = run_module(other, x)
    for seed in range(DRAW_REPEATS):
        with kept_generators():
            random.seed(seed)
            np.random.seed(seed)
            torch.default_generator.manual_seed(seed)
            out, _ = run_module(module, x)
        if not torch.equal(out, expected):
            return False
    return True


def prepare(module: nn.Module, tracked: bool = False) -> None:
    """Make a module twice differentiable, and freeze its layers' state between passes.

    Norms in training mode need no running statistics; with `tracked`, batch norms that move theirs by a fixed share of
    the way become `TrackedNorm`. Spectral norms keep the singular vectors of the last pass, of
    which a gradient of that pass was computed: a further iteration would change them. Tensors that are plain attributes
    become buffers, in their dtype, which are converted as a computation needs them.
    """
    for part in module.modules():
        if isinstance(getattr(part, "inplace", None), bool):
            part.inplace = False  # type: ignore[assignment]  # what is overwritten cannot be differentiated twice
        if isinstance(part, _BatchNorm | _InstanceNorm) and part.training and type(part).forward in _FORWARDS:
            part.num_batches_tracked = None
            if tracked and _moves(part):
                part.__class__ = TrackedNorm
            else:
                part.running_mean = part.running_var = None
                part.track_running_stats = False
        for owner in (part, *part._forward_pre_hooks.values()):
            if isinstance(owner, _SpectralNorm | SpectralNorm):
                owner.n_power_iterations = 0
        for name in [name for name, value in vars(part).items() if isinstance(value, Tensor)]:
            part.register_buffer(name, vars(part).pop(name).detach().cpu(), persistent=False)


def steady(module: nn.Module, x: Tensor) -> bool:
    """Return whether two consecutive passes give equal outputs, so that no state of the first affects the second."""
    moved = copied(module)
    with torch.no_grad(), kept_generators():
        first, second = moved(x.clone()), moved(x.clone())
    return torch.allclose(first, second, rtol=1e-4, atol=1e-6, equal_nan=True)


def recomputes(module: nn.Module, x: Tensor) -> bool:
    """Return whether a module recomputes layers in the backward pass (checkpointing)."""
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks(_AGAIN):
            run_module(module, x, graph=True)
    except RuntimeError as cause:
        if _AGAIN in str(cause):
            return True
        raise
    return False


def computes_double(module: nn.Module, x: Tensor) -> bool:
    """Return whether a module can compute in double precision, which mismatches need; one that casts cannot."""
    try:
        out, _ = run_module(copied(module).double(), x.double())
    except RuntimeError:
        return False
    return bool(out.dtype == torch.float64)


def use_running_statistics(module: nn.Module, x: Tensor) -> None:
    """Put the layers that update running statistics into eval mode, but not their parts."""
    for name in run_module(module, x)[1]:
        module.get_submodule(name.rpartition(".")[0]).training = False


def mixes(module: nn.Module, x: Tensor) -> bool:
    """Return whether an example's output depends on the others of its batch x [B, *shape], B 1 or 2.

    Batch norms count without a run, because an initial scale of 0 would hide them.
    """
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
    if any(part.training or part.running_mean is None for part in norms):
        return True
    if len(x) == 1:
        return False
    mirrored = x.min() + x.max() - x[1]  # stays in the range that inputs have
    one, other = (run_module(module, torch.stack([x[0], second]))[0] for second in (x[1], mirrored))
    return not torch.allclose(one[0], other[0], rtol=1e-4, atol=1e-6, equal_nan=True)
