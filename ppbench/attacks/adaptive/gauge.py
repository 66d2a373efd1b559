"""The gauge of a positively homogeneous network: hidden scales hide a choice of units, not the function.

Positive scales of hidden channels (the secrets r of PBPFL and MP-DP) act on the weights without changing the network.
So every choice of them can be undone up to a convention: here each channel's incoming weights get norm 1, the norm
pushed forward into the next layer. True and perturbed weights (less the mask on the logits, see `unmask`; MP-DP's
transitional layers folded first, see `expansion.fold`) have the same form in these units.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ppbench.base.tree import Params
from ppbench.nets.channels import Channels, Factor


def canonical_scales(channels: Channels, params: Params) -> Tensor:
    """Return the scales [count] > 0, float64, that bring each channel's incoming weights to norm 1.

    Channels are taken in the order of the network, each from the first weight that writes to it: with residual ties
    several do, and later ones read channels that depend on it. Biases follow. A channel whose incoming weights are
    all 0, or that no weight writes to, keeps its units. Weights may be true or perturbed.
    """
    full = torch.ones(channels.count + 1, dtype=torch.float64)
    known = torch.zeros(channels.count + 1, dtype=torch.bool)
    known[0] = True
    for name, factor in channels.factors.items():
        if factor.out is None or factor.diagonal:
            continue
        numbers = torch.from_numpy(factor.out)
        if bool(known[numbers].all()):
            continue
        power = torch.zeros(channels.count + 1, dtype=torch.float64)
        power = power.index_add(0, numbers, _incoming(params[name], factor, full))
        fresh = (power > 0) & ~known
        full = torch.where(fresh, power.clamp(min=1e-300).rsqrt(), full)
        known = known | fresh
        known[numbers] = True
    return full[1:]


def _incoming(value: Tensor, factor: Factor, scales: Tensor) -> Tensor:
    """Return the squared norms [out] of a parameter's entries by output channel, its input channels in new units."""
    weight = value.detach().double().cpu().expand(factor.shape)
    if factor.inp is not None:
        weight = weight / scales[torch.from_numpy(factor.inp)].view(-1, *[1] * (weight.dim() - 2))
    return weight.square().movedim(factor.axis, 0).flatten(1).sum(1) if weight.dim() > 1 else weight.square()
