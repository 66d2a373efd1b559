"""The gauge of a positively homogeneous network: hidden scales hide a choice of units, not the function.

Positive scales of hidden channels (the secrets r of PBPFL and MP-DP) act on the weights without changing the network.
So every choice of them can be undone up to a convention: here each channel's incoming weights get norm 1, the norm
pushed forward into the next layer. True and perturbed weights (less the mask on the logits, see `unmask`; MP-DP's
transitional layers folded first, see `expansion.fold`) have the same canonical form. And whoever knows the law of the
initial weights knows the norms to expect, hence the scales themselves about as well as norms concentrate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ppbench.base.tree import Params
from ppbench.defenses.pbpfl.perturbation import multiply
from ppbench.nets.channels import Channels, Factor


def canonical_scales(channels: Channels, params: Params) -> Tensor:
    """Return the scales [count] > 0, float64, that bring each channel's incoming weights to norm 1.

    Channels are taken in the order of the network, each from the first weight that writes to it: with residual ties
    several do, and later ones read channels that depend on it. Biases follow. A channel whose incoming weights are
    all 0, or that no weight writes to, keeps its units.

    Args:
        channels: where scales enter the network (`walk.channels`).
        params: its weights, true or perturbed.
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


def canonical(channels: Channels, params: Params) -> Params:
    """Return the weights, float64 on CPU, in canonical units: the same for all weights that differ by hidden scales.

    Args:
        channels: where scales enter the network.
        params: its weights, true or perturbed, without a mask on the logits.
    """
    weights = {name: value.detach().double().cpu() for name, value in params.items()}
    return multiply(weights, channels.multipliers(canonical_scales(channels, weights)), torch.float64)


def scales_from_law(channels: Channels, perturbed: Params, drawn: Params) -> Tensor:
    """Return an estimate [count] of the hidden scales r of weights that are fresh from a known law.

    Norms of rows concentrate: a channel's canonical scale is about that of any other draw from the law. What is taken
    from `drawn` is its mean over each layer, as channels are exchangeable there.

    Args:
        channels: where scales enter the network.
        perturbed: perturbed weights, without a mask on the logits.
        drawn: true weights drawn anew from the same law, e.g. `net.initial` with a seed of one's own.
    """
    expected = canonical_scales(channels, drawn)
    means, free = expected.clone(), torch.ones(channels.count, dtype=torch.bool)
    for factor in channels.factors.values():
        if factor.out is None or factor.diagonal or factor.inp is None:
            continue
        layer = torch.from_numpy(factor.out).unique()
        layer = layer[layer > 0] - 1
        layer = layer[free[layer]]
        if len(layer):
            means[layer] = expected[layer].log().mean().exp()
            free[layer] = False
    return means / canonical_scales(channels, perturbed)
