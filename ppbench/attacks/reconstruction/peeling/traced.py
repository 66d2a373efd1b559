"""The operations of a network before its first linear layer, recorded as it runs, for any modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ppbench.base.tree import Params
from ppbench.federation.plan import Plan

IntPair = tuple[int, int]


@dataclass(frozen=True)
class ConvBlock:
    """A convolution, a ReLU, and a max pooling of square tiles. name: of its weight; bias: None for none.

    inputs, outputs: shapes [C, H, W]; side: of the tiles, 1 without pooling.
    """

    name: str
    bias: str | None
    stride: IntPair
    padding: IntPair
    side: int
    inputs: tuple[int, int, int]
    outputs: tuple[int, int, int]


@dataclass(frozen=True)
class Chain:
    """Blocks, first to last, and the linear layer (weight and bias) that their flat output enters."""

    blocks: tuple[ConvBlock, ...]
    weight: str
    bias: str


@dataclass(frozen=True)
class _Call:
    """One call of a torch function on the output of the call before."""

    name: str
    arguments: Mapping[str, Any]
    out: Tensor


_SAME = {"flatten", "view", "reshape", "contiguous", "clone", "to", "squeeze", "dropout"}
_ORDER = {
    "conv2d": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "linear": ("input", "weight", "bias"),
    "max_pool2d": ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode"),
}


class _Recorder(TorchFunctionMode):
    """Records each function whose first argument is the output of the last recorded one."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.last, self.calls = start, list[_Call]()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        first = args[0] if args else kwargs.get("input")
        name = getattr(func, "__name__", "").strip("_")
        if first is self.last and isinstance(out, Tensor) and name not in ("get", "detach"):  # an attribute, a copy
            named = dict(zip(_ORDER.get(name, ()), args, strict=False)) | dict(kwargs)
            self.calls.append(_Call(name, named, out))
            self.last = out
        return out


def chain_of(plan: Plan, params: Params) -> Chain | None:
    """Return the blocks that the network begins with, None if it does not begin with a `Chain`."""
    x = next(iter(params.values())).new_zeros(1, *plan.spec.shape)
    if x.dim() != 4:
        return None
    copies = {name: value.detach().clone() for name, value in params.items()}
    recorder = _Recorder(x)
    with torch.no_grad(), recorder:
        plan.net(copies, x)
    names = {id(value): name for name, value in copies.items()}
    blocks: list[ConvBlock] = []
    shape, calls = tuple(x.shape[1:]), [call for call in recorder.calls if call.name not in _SAME]
    while calls and calls[0].name == "conv2d":
        block, used = _block(calls, names, shape)
        if block is None:
            return None
        blocks.append(block)
        shape, calls = block.outputs, calls[used:]
    if not blocks or not calls or calls[0].name != "linear":
        return None
    weight, bias = (names.get(id(calls[0].arguments.get(key))) for key in ("weight", "bias"))
    whole = shape[0] * shape[1] * shape[2]
    fits = weight is not None and bias is not None and copies[weight].shape[1] == whole
    return Chain(tuple(blocks), str(weight), str(bias)) if fits else None


def _block(calls: Sequence[_Call], names: Mapping[int, str], shape: tuple[int, ...]) -> tuple[ConvBlock | None, int]:
    """Return the block that calls begin with, or None, and the number of its calls."""
    conv, after = calls[0], [call.name for call in calls[1:3]]
    named = conv.arguments
    stride, padding = _pair(named.get("stride", 1)), _pair(named.get("padding", 0))
    plain = _pair(named.get("dilation", 1)) == (1, 1) and named.get("groups", 1) == 1
    weight = names.get(id(named.get("weight")))
    if weight is None or stride is None or padding is None or not plain or after[:1] != ["relu"]:
        return None, 0
    bias = names.get(id(named.get("bias")))
    if bias is None and named.get("bias") is not None:
        return None, 0  # frozen: the layer's output does not follow from its weights alone
    side, used = 1, 2
    if after[1:] == ["max_pool2d"]:
        tiles = _tiles(calls[2].arguments)
        if tiles is None:
            return None, 0
        side, used = tiles, 3
    out = calls[used - 1].out.shape[1:]
    return ConvBlock(weight, bias, stride, padding, side, tuple(shape), tuple(out)), used  # type: ignore[arg-type]  # three


def _tiles(named: Mapping[str, Any]) -> int | None:
    """Return the side of a pooling's square tiles, None if its windows overlap or are padded."""
    kernel = _pair(named.get("kernel_size", 0))
    stride = _pair(named.get("stride") or named.get("kernel_size", 0))
    plain = _pair(named.get("padding", 0)) == (0, 0) and _pair(named.get("dilation", 1)) == (1, 1)
    square = kernel is not None and kernel == stride and kernel[0] == kernel[1]
    return kernel[0] if kernel is not None and square and plain and not named.get("ceil_mode", False) else None


def _pair(value: Any) -> IntPair | None:
    """Return a setting of a layer for both directions, None if it is no number."""
    if isinstance(value, int):
        return value, value
    if isinstance(value, tuple | list) and all(isinstance(one, int) for one in value):
        return (value[0], value[0]) if len(value) == 1 else (value[0], value[1])
    return None


def tiled(block: ConvBlock, z: Tensor) -> Tensor:
    """Return a convolution's output z [S, C, h, w] in tiles [S, C, H, W, side * side]; the remainder is cut off."""
    side, (_, high, wide) = block.side, block.outputs
    cut = z[..., : high * side, : wide * side]
    tiles = cut.unflatten(-1, (wide, side)).unflatten(-3, (high, side))
    flat: Tensor = tiles.transpose(-2, -3).flatten(-2)
    return flat


def untiled(block: ConvBlock, tiles: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the inverse of `tiled`: [S, C, *size], 0 outside of tiles."""
    side = block.side
    whole = tiles.unflatten(-1, (side, side)).transpose(-2, -3).flatten(-2).flatten(-3, -2)
    padded: Tensor = F.pad(whole, (0, size[1] - whole.shape[-1], 0, size[0] - whole.shape[-2]))
    return padded
