"""Trap weights: a first linear layer that sorts a batch's images, or texts' tokens, into bins, if possible one per bin.

What lies in a bin of its own is read off the upload; of a transformer the layer is the first MLP's, and tokens are
sorted, see `text_trap`. Where the server reads sums alone, all other clients get weights without a gradient (Pasquini
et al., "Eluding Secure Aggregation in Federated Learning via Model Inconsistency", CCS 2022), so that the sum is the
target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from ppbench.attacks.active.text_trap import last_norm, text_trap, trapped_features
from ppbench.attacks.active.token_bins import shown_texts
from ppbench.attacks.active.wiring import (
    BIN_FLOOR,
    LOUD_WEIGHT,
    QUIET_HEIGHT,
    ActiveInversion,
    WiredLayer,
    Wiring,
    alternating,
    bin_differences,
    bin_units,
    bin_widths,
    carried,
    doubled,
    entering,
    lowered,
    opposed,
    padded,
    passing,
    quantiles,
    shown_images,
    silent_weights,
    wiring,
)
from ppbench.attacks.reconstruction.search.starts import PosedVictim
from ppbench.base.errors import UsageError
from ppbench.base.tree import Params, detached, moved
from ppbench.base.vocabulary import PADDING
from ppbench.federation.acting import Before, Sent
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Data, Plan


class Trap(Protocol):
    """How one kind of input is trapped: the weights that a server sends, and what it reads off the upload."""

    def suits(self, plan: Plan) -> bool:
        """Return whether the network can be a trap."""

    def weights(self, before: Before, generator: torch.Generator, loud: bool) -> tuple[Params, WiredLayer]:
        """Return the trap's weights, and the layer before the head. UsageError: the network cannot be a trap."""

    def blank(self, victim: PosedVictim) -> Tensor:
        """Return the answer [N, *shape] where nothing is read."""

    def read(self, plan: Plan, params: Params, evidence: Evidence, count: int) -> Tensor:
        """Return at most `count` inputs [N, *shape] that an upload from weights of the trap shows, the surest first."""


class ImageTrap:
    """Bins of brightness, or of a ratio in networks without biases."""

    def suits(self, plan: Plan) -> bool:
        """Return whether `wiring` knows the network's layers."""
        return plan.spec.classes > 1 and wiring(plan) is not None

    def weights(self, before: Before, generator: torch.Generator, loud: bool) -> tuple[Params, WiredLayer]:
        """Return convolutions that pass the image on, with the trap behind them."""
        plan, wired, params = before.plan, image_wiring(before.plan), _weights_of(before)
        params |= passing(wired.before, params, plan.data_range)
        return params | (bin_trap if wired.biased else ratio_trap)(wired, params, before, loud), wired.last

    def blank(self, victim: PosedVictim) -> Tensor:
        """Return a grey image for each example."""
        return victim.image("grey")

    def read(self, plan: Plan, params: Params, evidence: Evidence, count: int) -> Tensor:
        """Return the images in bins of their own, those with the largest share of the gradient first."""
        wired = image_wiring(plan)
        rows = (bin_rows if wired.biased else ratio_rows)(wired, params, evidence, plan)
        return shown_images(plan, wired.before, params, rows)[:count]


class TextTrap:
    """Bins of tokens in the first MLP of a transformer."""

    def suits(self, plan: Plan) -> bool:
        """Return whether the network is a transformer whose blocks are trained."""
        return trapped_features(plan) is not None

    def weights(self, before: Before, generator: torch.Generator, loud: bool) -> tuple[Params, WiredLayer]:
        """Return blocks that pass on what the first one sorts."""
        weights = text_trap(before.plan, _weights_of(before), before.public, generator, loud)
        return weights, last_norm(before.plan)

    def blank(self, victim: PosedVictim) -> Tensor:
        """Return a text of padding for each example."""
        return torch.full(victim.size, float(PADDING))

    def read(self, plan: Plan, params: Params, evidence: Evidence, count: int) -> Tensor:
        """Return texts of token numbers, with padding where a token was not read."""
        return shown_texts(plan, params, evidence, count)


def _weights_of(before: Before) -> Params:
    return moved(detached(before.server.params), torch.device("cpu"))


@dataclass(frozen=True)
class Imprint(ActiveInversion):
    """Trap weights in the first hidden linear layer: recovers the images that fall into a bin of their own, or texts.

    Bins are equally likely on the public examples; without any, by a normal law of brightness, or among drawn tokens.
    With fewer units than images a bin has probability 1 / batch, and the rest of the law has no bins: 1 in e bins then
    holds one image.

    loud: whether gradients are made as large as possible, which drowns noise without clipping before it.
    """

    loud: bool = True

    name: ClassVar[str] = "imprint"
    reads_tokens: ClassVar[bool] = True
    next_token: ClassVar[bool] = True
    reference: ClassVar[str] = (
        "Fowl et al., Robbing the Fed: Directly Obtaining Private Data in Federated Learning with Modified Models, "
        "ICLR 2022; Boenisch et al., When the Curious Abandon Honesty, EuroS&P 2023; Pasquini et al., Eluding Secure "
        "Aggregation in Federated Learning via Model Inconsistency, CCS 2022; Fowl et al., Decepticons: Corrupted "
        "Transformers Breach Privacy in Federated Learning for Language Models, ICLR 2023"
    )

    def suits(self, plan: Plan) -> bool:
        """Return whether the network can be a trap."""
        return _trap(plan).suits(plan)

    def crafted(self, before: Before, generator: torch.Generator) -> Sent:
        """Return the trap for the target (or for all), and weights without a gradient for the others."""
        weights, last = _trap(before.plan).weights(before, generator, self.loud)
        silent = None if before.target is None else silent_weights(last, _weights_of(before), before.plan.loss_name)
        return Sent(weights, silent)

    def blank(self, victim: PosedVictim) -> Tensor:
        """Return a grey image, or an empty text, for each example."""
        return _trap(victim.plan).blank(victim)

    def read(self, plan: Plan, params: Params, evidence: Evidence, count: int) -> Tensor:
        """Return the images, or the texts, that the trap's bins show."""
        return _trap(plan).read(plan, params, evidence, count)


def _trap(plan: Plan) -> Trap:
    return ImageTrap() if plan.vocabulary is None else TextTrap()


@dataclass(frozen=True)
class QuietImprint(Imprint):
    """Trap weights with small gradients of one size: sparsifiers keep more of them, and they fit the range of masks."""

    name: ClassVar[str] = "imprint_quiet"

    loud: bool = False


# -- Trap weights for images: a first linear layer that sorts a batch's images into bins, if possible one per bin --
# All rows are one measurement of the image, biases its quantiles (the imprint of Fowl et al., "Robbing the Fed", ICLR
# 2022, in an existing layer instead of one in front; trap weights of Boenisch et al., "When the Curious Abandon
# Honesty", EuroS&P 2023, likewise use an existing layer). Gradients of neighboring units that step differ by the
# images between their quantiles; a unit that bumps has the images around its own. Weight over bias gradient of one
# image is the image.

BRIGHTNESS_MEAN, BRIGHTNESS_STD = 0.4, 0.12
"""Mean and standard deviation of a normal law of brightness, in units of the data range; without public examples."""
BRIGHTNESS_LIFT = 0.2
"""What the last unit, which measures brightness, adds to all outputs together, so that ReLUs pass the sum."""
RATIO_STD = 0.15
"""Standard deviation of the ratio without public examples: the left half less the right one, over both."""
MOST_PUBLIC = 1000
"""Public examples that are used, at most."""
SHARP: Mapping[type[nn.Module], float] = {nn.Hardswish: 12.0, nn.Sigmoid: 12.0, nn.Tanh: 6.0}
"""Change of the input over a bin's width at which an activation without a sharp step separates two bins."""


def image_wiring(plan: Plan) -> Wiring:
    """Return the layers of a trap. UsageError: the network has no hidden linear layer that can be one."""
    wired = wiring(plan)
    if wired is None:
        raise UsageError(
            f"Attack 'imprint' needs a hidden linear layer with biases, behind convolutions and pools alone; model "
            f"{plan.spec.model!r} has none: take --model mlp, or cnn with --model-set hidden=256."
        )
    return wired


# -- Bins of a measurement: a projection of the features, in a layer with biases --


def bin_trap(wired: Wiring, params: Params, before: Before, loud: bool) -> Params:
    """Return the weights of the trap and of the layers behind it; `loud`: with the largest possible gradients."""
    count = wired.units // 2 if loud else wired.units
    direction, thresholds = _law(wired, params, before, count)
    sharp, activation = SHARP.get(type(wired.trap.activation)), wired.trap.activation
    gains = torch.ones_like(thresholds) if sharp is None else sharp / bin_widths(thresholds)
    units = bin_units(direction, thresholds, gains, activation, loud)
    name, like = wired.trap.name, params[f"{wired.trap.name}.bias"]
    trap = {f"{name}.weight": padded(units.weight, params[f"{name}.weight"]), f"{name}.bias": padded(units.bias, like)}
    return trap | carried(wired, params, padded(units.coefficients, like), units.middle, before.plan.loss_name)


def _law(wired: Wiring, params: Params, before: Before, count: int) -> tuple[Tensor, Tensor]:
    """Return the direction [F] along which features are measured, and `count` thresholds between bins; float64."""
    plan, public = before.plan, before.public
    levels = quantiles(count, plan.local.batch)
    width = wired.trap.module.weight.shape[1]
    low, high = plan.data_range
    if public is not None and len(public.x) > 1:
        seen = entering(plan, wired, params, public.x[:MOST_PUBLIC].cpu().float()).double()
        if (law := _leading(seen, levels)) is not None:
            return law
    grey, white = (
        entering(plan, wired, params, torch.full((1, *plan.spec.shape), level)).double()[0] for level in (low, high)
    )
    direction = torch.ones(width, dtype=torch.float64) / width
    start, end = float(grey @ direction), float(white @ direction)
    normal = torch.distributions.Normal(torch.tensor(BRIGHTNESS_MEAN).double(), torch.tensor(BRIGHTNESS_STD).double())
    return direction, start + (end - start) * normal.icdf(levels)


def _leading(seen: Tensor, levels: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the leading principal direction [F] of rows [N, F] and quantiles along it, None if all are equal there."""
    direction = torch.linalg.svd(seen - seen.mean(0), full_matrices=False)[2][0]
    values = seen @ direction
    return (direction, torch.quantile(values, levels)) if float(values.std()) > 0 else None


def bin_rows(wired: Wiring, params: Params, evidence: Evidence, plan: Plan) -> Tensor:
    """Return the features in bins [N, F] float64, those with the largest share of the gradient first.

    A bin's features are its weight gradient over its bias gradient. For units that step, each gradient is taken less
    that of the next unit.
    """
    parts = [evidence.observed.get(f"{wired.trap.name}.{part}") for part in ("weight", "bias")]
    if any(part is None for part in parts):
        return torch.zeros(0, wired.trap.module.weight.shape[1], dtype=torch.float64)
    weight, bias = (part.detach().double().cpu() for part in parts if part is not None)
    out = params[f"{wired.carrier}.weight"][0].double()
    trap = torch.cat([params[f"{wired.trap.name}.weight"], params[f"{wired.trap.name}.bias"][:, None]], 1)
    rows = bin_differences(torch.cat([weight, bias[:, None]], 1), out, trap, wired.bumps)
    weight, bias = rows[:, :-1], rows[:, -1]
    strongest = _strongest(bias.abs())
    return weight[strongest] / bias[strongest, None]


def _strongest(strength: Tensor) -> Tensor:
    """Return the places of bins that hold an image, by their strength [N], the strongest first."""
    visible = strength.isfinite() & (strength > BIN_FLOOR * strength.nan_to_num(0.0, 0.0, 0.0).max())
    return visible.nonzero()[:, 0][strength[visible].argsort(descending=True, stable=True)]


# -- Bins of a ratio, that of a projection to the brightness: networks without biases are scale-free --
# A unit fires where (v - q u) x > 0, that is where v x / u x > q for inputs that are not negative (u: the mean). There
# is no bias gradient to divide by. The cotangent gives the scale of an image, and the trap makes it known: it adds so
# little to the outputs that they are nearly those of a head of zeros.


def ratio_trap(wired: Wiring, params: Params, before: Before, loud: bool) -> Params:
    """Return the weights of the trap and of the layers behind it; `loud`: with the largest possible gradients."""
    count = (wired.units - 1) // 2 if loud else wired.units - 1
    direction, thresholds = _ratio_law(wired, before.plan, before.public, count)
    height = QUIET_HEIGHT / float(thresholds.diff().median()) / before.plan.spec.classes
    thresholds = lowered(thresholds)
    rows, coefficients = direction - thresholds[:, None] / len(direction), height * alternating(thresholds)
    if loud:
        rows, coefficients = doubled(rows), opposed(count, torch.full_like(thresholds, LOUD_WEIGHT))
    weights = {name: torch.zeros_like(params[name]) for name in (f"{layer.name}.weight" for layer in wired.after)}
    weights["head.weight"] = torch.zeros_like(params["head.weight"])
    like = params[f"{wired.trap.name}.weight"]
    coefficients, rows = padded(coefficients, like[:, 0]), padded(rows, like)
    coefficients[-1], rows[-1] = BRIGHTNESS_LIFT / before.plan.spec.classes, 1 / len(direction)
    reached = slice(None) if before.plan.loss == "squared" else slice(1)
    for layer in wired.after:
        weights[f"{layer.name}.weight"][0, 0] = 1.0
    carrier = f"{wired.carrier}.weight"
    if wired.after:
        weights[carrier][0] = coefficients
        weights["head.weight"][reached, 0] = 1.0
    else:
        weights[carrier][reached] = coefficients
    return {**weights, f"{wired.trap.name}.weight": rows}


def _ratio_law(wired: Wiring, plan: Plan, public: Data | None, count: int) -> tuple[Tensor, Tensor]:
    """Return the direction [F] of the measurement, and `count` ratios between bins; float64."""
    width, levels = int(wired.trap.module.weight.shape[1]), quantiles(count, plan.local.batch)
    if public is not None and len(public.x) > 1:
        seen = public.x[:MOST_PUBLIC].cpu().double().flatten(1)
        seen = seen / seen.mean(1, keepdim=True).clamp(min=1e-6)
        if (law := _leading(seen, levels)) is not None:
            return law
    columns = torch.arange(width) % plan.spec.shape[-1]
    direction = torch.where(2 * columns < plan.spec.shape[-1], 1.0, -1.0).double() / width
    return direction, torch.distributions.Normal(torch.tensor(0.0).double(), RATIO_STD).icdf(levels)


def ratio_rows(wired: Wiring, params: Params, evidence: Evidence, plan: Plan) -> Tensor:
    """Return the features in bins [N, F] float64, those with the largest share of the gradient first."""
    weight = evidence.observed.get(f"{wired.trap.name}.weight")
    if weight is None:
        return torch.zeros(0, wired.trap.module.weight.shape[1], dtype=torch.float64)
    out, trap = params[f"{wired.carrier}.weight"][0].double(), params[f"{wired.trap.name}.weight"]
    rows = bin_differences(weight[:-1].detach().double().cpu(), out[:-1], trap, bumps=False)
    classes, sums = plan.spec.classes, rows.sum(1)
    slope = (
        torch.where(sums > 0, 1 / classes, 1 / classes - 1) if plan.loss == "cross_entropy" else -torch.ones_like(sums)
    )
    strongest = _strongest(sums.abs())
    return rows[strongest] * (plan.local.batch / slope[strongest])[:, None]
