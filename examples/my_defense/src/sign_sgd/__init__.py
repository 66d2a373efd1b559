"""A defense of your own in twenty lines: upload signs only, scaled by the mean magnitude."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ppbench.api import Context, Defense, Layout, Params, Tree, node


@node
class Signs:
    """What travels. sign: int8 [P]; scale: float32 scalar."""

    sign: Tensor
    scale: Tensor


@dataclass(frozen=True)
class SignSGD(Defense):
    """Uploads one sign a parameter and one scale (Bernstein et al. 2018), the scale rounded to `digits` decimals."""

    digits: int = 5

    name: ClassVar[str] = "sign_sgd"
    contract: ClassVar[int] = 1
    control: ClassVar[str] = "digits"
    grids: ClassVar[Mapping[str, tuple[float, ...]]] = {"quick": (3, 5), "paper": (2, 3, 4, 5, 6)}
    paper: ClassVar[str] = "Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems, ICML 2018"

    def upload(self, ctx: Context, me: Tree, result: Tree) -> Tree:
        """Encode: signs as one byte each (pack them to bits for a real network)."""
        flat = Layout.of(result).pack(result)
        return Signs(flat.sign().char(), flat.abs().mean().round(decimals=self.digits))

    def decode(self, upload: Tree, like: Params) -> Params:
        """The public inverse of `upload`: the server takes it, and so does every attacker."""
        return Layout.of(like).unpack(upload.sign * upload.scale)
