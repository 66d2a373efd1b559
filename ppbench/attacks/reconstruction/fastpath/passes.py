"""What the passes of a layer share: forward, backward, and the same two differentiated along a weight direction.

V victims are attacked in parallel, each with a batch of B examples, N = V * B. Images are [N, C, H, W], flat features
[V, B, D]. The network's weights are shared by all victims; a direction (what a gradient or a residual is) has one
value a victim. `tangent` is the derivative of an activation along the direction, `cotangent` the derivative of the
loss with respect to an activation (the R-operator of Pearlmutter, Neural Computation 6, 1994).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Full:
    """A weight or a direction, written out.

    rows: [V, O, K], V = 1 for the network's own weight, K inputs of one output unit; columns: [V, K, O], the
    transpose in the order in which the layer folds it.
    """

    rows: Tensor
    columns: Tensor


@dataclass(frozen=True)
class Outer:
    """A direction of low rank, left @ right, never written out. left: [V, O, R]; right: [V, R, K]."""

    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class Direction:
    """A direction in the weight space of one affine layer; bias: [V, O], or None where the layer has none."""

    weight: Full | Outer
    bias: Tensor | None


@dataclass
class Memo:
    """What one layer keeps between the passes of one evaluation, each field set by the pass that names it.

    inputs, output, slope, places (of maxima): forward; cotangent (of the output): backward; tangent (of the input):
    tangent. Passes in another order are an AttributeError.
    """

    victims: int
    inputs: Tensor = field(init=False)
    output: Tensor = field(init=False)
    slope: Tensor = field(init=False)
    places: Tensor = field(init=False)
    cotangent: Tensor = field(init=False)
    tangent: Tensor = field(init=False)
