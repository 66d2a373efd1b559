"""A pretended accelerator, "far": its numbers stay on the CPU, and it refuses to mix devices as CUDA does.

`install()` gives torch's private-use backend this name, once a process. What CUDA lets through passes here too:
`copy_`, indices on the CPU in brackets, and numbers without axes on the CPU in elementwise functions. What CUDA refuses
is refused: every other tensor of the CPU's, a generator of the CPU's, `.numpy()`. It rests on an experimental part of
torch, there in 2.13: tests that use it skip where it is missing. Sparse tensors are wrapped as they are.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import return_and_correct_aliasing

NAME = "far"
_BRACKETS = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})
"""Functions whose list of indices may lie on the CPU."""
_ALIKE = frozenset({"stack", "cat", "equal", "_local_scalar_dense"})
"""Functions that take no number from another device, not even one without axes."""
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype})
_KEPT: list[torch.library.Library] = []
"""What is registered, for as long as the process runs."""


REFUSED: list[str] = []
"""Every refusal of this process, with the place that asked: code may catch what it is told."""


class FarTensor(Tensor):
    """A tensor on the device "far:0".

    Attributes:
        near: the tensor on the CPU that holds the numbers.
    """

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> FarTensor:
        """Return a tensor without storage, of the form of `near`."""
        dense = near.layout == torch.strided
        form = {"strides": near.stride(), "storage_offset": near.storage_offset()} if dense else {"layout": near.layout}
        made = torch.Tensor._make_wrapper_subclass(cls, near.shape, dtype=near.dtype, device=f"{NAME}:0", **form)
        made.near = near
        return made  # type: ignore[no-any-return]

    def __repr__(self, **_: Any) -> str:
        return f"FarTensor({self.near!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        rule, kwargs, known = _rule(func), dict(kwargs or {}), dict[int, FarTensor]()
        device = kwargs.get("device")
        if device is not None:
            kwargs["device"] = "cpu"
        if rule.changes and not isinstance(args[0], FarTensor):
            _refuse(f"Expected all tensors to be on the same device, but {rule.name} changes one on {args[0].device}")
        out = func(
            *[_near(value, rule.name, known, place in rule.free) for place, value in enumerate(args)],
            **{key: _near(value, rule.name, known) for key, value in kwargs.items()},
        )
        if rule.reforms:  # `squeeze_` and its kin: the tensor without storage changes form too
            return return_and_correct_aliasing(func, args, kwargs, args[0])
        if rule.name == "copy_":
            return args[0]
        if rule.writes and any(wrapper.shape != wrapper.near.shape for wrapper in known.values()):
            raise NotImplementedError(f"{rule.name} changes the form of a tensor on {NAME}; register it as `eye` is")
        return out if device is not None and torch.device(device).type == "cpu" else _far(out, known)


@dataclass(frozen=True)
class _Rule:
    """What is known of a function. free: places of arguments that may lie on the CPU; changes: its first argument;
    reforms: that one's form; writes: on any argument."""

    name: str
    free: tuple[int, ...]
    changes: bool
    reforms: bool
    writes: bool


@cache
def _rule(func: Any) -> _Rule:
    name = func.overloadpacket.__name__
    free = {"copy_": (0, 1)}.get(name, (1,) if name in _BRACKETS else ())
    changes = name.endswith("_") and name != "copy_"
    return _Rule(name, free, changes, torch.Tag.inplace_view in func.tags, func._schema.is_mutable)


def _near(value: Any, name: str, known: dict[int, FarTensor], free: bool = False) -> Any:
    """Return an argument with the tensors on the CPU that hold its numbers, and remember whose they are.

    Raises:
        RuntimeError: it lies on the CPU, and the place is not `free` to.
    """
    kind = type(value)
    if kind is FarTensor:
        known[id(value.near)] = value
        return value.near
    if kind in _PLAIN:
        return value
    if kind is list or kind is tuple:
        return kind(_near(part, name, known, free) for part in value)
    if isinstance(value, torch.Generator) and value.device.type != NAME:
        _refuse(f"Expected a {NAME!r} device type for generator but found {value.device.type!r}")
    if not free and isinstance(value, Tensor) and (value.dim() or name in _ALIKE):
        _refuse(f"Expected all tensors to be on the same device, but {name} got {NAME}:0 and {value.device}")
    return value


def _far(out: Any, known: dict[int, FarTensor]) -> Any:
    """Return a result with its tensors on the pretended device, those that were arguments as they came."""
    if isinstance(out, Tensor):
        return known[id(out)] if id(out) in known else FarTensor(out)
    return type(out)(_far(part, known) for part in out) if isinstance(out, list | tuple) else out


def _refuse(message: str) -> None:
    places = [
        f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in traceback.extract_stack() if "ppbench" in f.filename
    ]
    REFUSED.append(f"{message} ({' > '.join(places[-4:])})")
    raise RuntimeError(message)


def _empty(
    size: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:
    return FarTensor(torch.empty(size, dtype=dtype, memory_format=memory_format))


def _empty_strided(
    size: Any, stride: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Tensor:
    return FarTensor(torch.empty_strided(size, stride, dtype=dtype))


def _eye(n: int, m: int | None = None, *, dtype: Any = None, **_: Any) -> Tensor:
    return FarTensor(torch.eye(n, n if m is None else m, dtype=dtype))


def _arange(*bounds: Any, dtype: Any = None, **_: Any) -> Tensor:
    return FarTensor(torch.arange(*bounds, dtype=dtype))


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Fill `target` with `source`, where torch itself passes `__torch_dispatch__` by, as in `torch.tensor`."""
    to, from_ = (tensor.near if isinstance(tensor, FarTensor) else tensor for tensor in (target, source))
    to.copy_(from_)
    return target


def install() -> torch.device:
    """Make "far" a device of this process and return it; a second call changes nothing."""
    if not _KEPT:
        backend_registration._setup_privateuseone_for_python_backend(NAME)
        library = torch.library.Library("aten", "IMPL")
        library.impl("empty.memory_format", _empty, "PrivateUse1")
        library.impl("empty_strided", _empty_strided, "PrivateUse1")
        library.impl("copy_", _copy, "PrivateUse1")
        for name in ("eye", "eye.m"):  # as torch makes them they begin empty and grow, which no wrapper does
            library.impl(name, _eye, "PrivateUse1")
        for name in ("arange", "arange.start", "arange.start_step"):
            library.impl(name, _arange, "PrivateUse1")
        listed = Tensor.tolist
        Tensor.tolist = lambda self: listed(self.near if isinstance(self, FarTensor) else self)  # type: ignore[method-assign]
        _KEPT.append(library)
    return torch.device(f"{NAME}:0")


def refused(ask: Callable[[], object]) -> str | None:
    """Return what is said to a wrong use, None where it is let through."""
    try:
        ask()
    except (RuntimeError, TypeError) as cause:
        return str(cause)
    return None


def itself() -> dict[str, Any]:
    """Return what is refused, what is let through, and how many refusals were kept; these are forgotten."""
    there = install()
    x, near = torch.rand(4, 3).to(there), torch.rand(4, 3)
    index, draws, eye = torch.tensor([2, 0]), torch.Generator().manual_seed(0), torch.eye(3)
    wrong = {
        "sum": lambda: x + near,
        "product": lambda: x @ near.T,
        "stack": lambda: torch.stack([x, near]),
        "stack of numbers": lambda: torch.stack([x.sum(), near.sum()]),
        "condition": lambda: torch.where(near > 0, x, x),
        "a far index of a near tensor": lambda: near[index.to(there)],
        "index_select": lambda: x.index_select(0, index),
        "near values by index": lambda: x.__setitem__(index, near[:2]),
        "a near number changed in place": lambda: torch.tensor(0.0).add_(x.sum()),
        "generator": lambda: torch.randn(3, device=there, generator=draws),
        "numpy": lambda: x.numpy(),
    }
    answers = {name: refused(ask) for name, ask in wrong.items()}
    right = {
        "near index": torch.equal(x[index].cpu(), x.cpu()[index]),
        "near number": (x * torch.tensor(2.0)).device == there,
        "lists": x.tolist() == x.cpu().tolist(),
        "copy": torch.equal(x.copy_(near).cpu(), near),
        "product of a vector": (torch.ones(3).to(there) @ x.T).shape == (4,),
        "eye": torch.equal(torch.eye(3, device=there).T.cpu(), eye),
        "count": torch.equal(torch.arange(1, 7, 2, device=there)[None].T.cpu(), torch.tensor([[1], [3], [5]])),
        "sparse": torch.equal(eye.to_sparse().to(there).to_dense().cpu(), eye),
        "slopes": torch.func.vmap(torch.func.grad(lambda row: (row**2).sum()))(x).device == there,
    }
    kept = len(REFUSED)
    REFUSED.clear()
    return {"refused": answers, "let through": right, "kept": kept}
