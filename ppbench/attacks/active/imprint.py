"""Trap weights: a first linear layer that sorts the images of a batch into bins, if possible one image per bin.

All rows are one measurement of the input, biases its quantiles (the imprint of Fowl et al., "Robbing the Fed", ICLR
2022, in an existing layer instead of one in front; trap weights of Boenisch et al., "When the Curious Abandon Honesty",
EuroS&P 2023, likewise use an existing layer). Gradients of neighboring units that step differ by the images between
their quantiles; a unit that bumps has the images around its own. Weight over bias gradient of one image is the image.
Where the server reads sums alone, all other clients get weights without a gradient (Pasquini et al., "Eluding Secure
Aggregation in Federated Learning via Model Inconsistency", CCS 2022), so that the sum is the target's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ppbench.attacks.active.wiring import (
    ActiveInversion,
    WiredLayer,
    Wiring,
    carried,
    entering,
    passing,
    silent_weights,
    wiring,
)
from ppbench.base.errors import UsageError
from ppbench.base.tree import Params
from ppbench.federation.acting import Before, Sent
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Data, Plan

BRIGHTNESS_MEAN, BRIGHTNESS_STD = 0.4, 0.12
"""Mean and standard deviation of a normal law of brightness, in units of the data range; without public examples."""
BIN_FLOOR = 1e-5
"""Bias gradients below this share of the largest are the rounding of a bin without an image."""
LOWEST_REACH = 3.0
"""How far below the first quantile, in units of all of them, the lowest bin begins."""
LOUD_WEIGHT = 5e3
"""Weight of a unit of a loud trap: float32 sums of pairs that cancel are then exact to some hundredths."""
QUIET_HEIGHT = 0.005
"""What a quiet trap adds to an output: no example becomes decided, no gradient leaves its range."""
BRIGHTNESS_LIFT = 0.2
"""What the last unit, which measures brightness, adds to all outputs together, so that ReLUs pass the sum."""
RATIO_STD = 0.15
"""Standard deviation of the ratio without public examples: the left half less the right one, over both."""
MOST_PUBLIC = 1000
"""Public examples that are used, at most."""
SHARP: Mapping[type[nn.Module], float] = {nn.Hardswish: 12.0, nn.Sigmoid: 12.0, nn.Tanh: 6.0}
"""Change of the input over a bin's width at which an activation without a sharp step separates two bins."""


@dataclass(frozen=True)
class Imprint(ActiveInversion):
    """Trap weights in the first hidden linear layer: recovers the images that fall into a bin of their own.

    Bins are equally likely on the public examples, by their leading principal direction; without any, by brightness and
    a normal law. With fewer units than examples a bin has probability 1 / batch, and the rest of the law has no bins: 1
    in e bins then holds one image. Convolutions before the layer pass the image on.

    loud: whether gradients are made as large as possible, which drowns noise without clipping before it.
    """

    loud: bool = True

    name: ClassVar[str] = "imprint"
    reference: ClassVar[str] = (
        "Fowl et al., Robbing the Fed: Directly Obtaining Private Data in Federated Learning with Modified Models, "
        "ICLR 2022; Boenisch et al., When the Curious Abandon Honesty, EuroS&P 2023; Pasquini et al., Eluding Secure "
        "Aggregation in Federated Learning via Model Inconsistency, CCS 2022"
    )

    def suits(self, plan: Plan) -> bool:
        """Return whether the network has a hidden linear layer with biases behind layers that can pass the image on."""
        return plan.spec.classes > 1 and wiring(plan) is not None

    def crafted(self, before: Before, generator: torch.Generator) -> Sent:
        """Return the trap for the target (or for all), and weights without a gradient for the others."""
        wired = _wired(before.plan)
        params = {name: value.detach().cpu() for name, value in before.server.params.items()}
        trap = {**params, **passing(wired.before, params, before.plan.data_range)}
        trap |= (bin_trap if wired.biased else ratio_trap)(wired, trap, before, self.loud)
        return Sent(trap, None if before.target is None else silent_weights(wired.last, params, before.plan.loss_name))

    def features(self, plan: Plan, params: Params, evidence: Evidence) -> tuple[Sequence[WiredLayer], Tensor]:
        """Return the layers before the trap, and the features in its bins."""
        wired = _wired(plan)
        return wired.before, (bin_rows if wired.biased else ratio_rows)(wired, params, evidence, plan)


@dataclass(frozen=True)
class QuietImprint(Imprint):
    """Trap weights with small gradients of one size: sparsifiers keep more of them, and they fit the range of masks."""

    name: ClassVar[str] = "imprint_quiet"

    loud: bool = False


def _wired(plan: Plan) -> Wiring:
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
    widths = torch.cat([thresholds.diff(), thresholds[-1:] - thresholds[-2:-1]])
    sharp = SHARP.get(type(wired.trap.activation))
    gains = torch.ones_like(thresholds) if sharp is None else sharp / widths
    if not wired.bumps:  # the first unit steps below all others: its gradient less the second's is the lowest bin
        thresholds, gains = lowered(thresholds), torch.cat([gains[:1], gains[:-1]])
    weight, bias = gains[:, None] * direction, -gains * thresholds
    if loud:
        weight, bias, coefficients, middle = doubled(weight), doubled(bias), opposed(count, LOUD_WEIGHT / gains), 0.0
    else:
        height = QUIET_HEIGHT / (1.0 if wired.bumps else float(widths.median()))
        coefficients = (2 * alternating_signs(count) if wired.bumps else alternating(thresholds)) * height / gains
        places = torch.linspace(float(thresholds[1]), float(thresholds[-1]), 4096, dtype=torch.float64)
        sums = wired.trap.activation(gains * (places[:, None] - thresholds)) @ coefficients
        middle = float((sums.max() + sums.min()) / 2)
    name, like = wired.trap.name, params[f"{wired.trap.name}.bias"]
    trap = {f"{name}.weight": padded(weight, params[f"{name}.weight"]), f"{name}.bias": padded(bias, like)}
    return trap | carried(wired, params, padded(coefficients, like), middle, before.plan.loss_name)


def padded(value: Tensor, like: Tensor) -> Tensor:
    """Return `value` padded by rows of zeros to the shape of `like`, in its dtype."""
    whole = torch.zeros_like(like)
    whole[: len(value)] = value.to(like)
    return whole


def lowered(thresholds: Tensor) -> Tensor:
    """Return thresholds with a first one far below the others, and without the last."""
    return torch.cat([thresholds[:1] - LOWEST_REACH * (thresholds[-1] - thresholds[0]), thresholds[:-1]])


def alternating_signs(count: int) -> Tensor:
    """Return 1, -1, 1, ... [count] float64, so that the sum over any number of units that bump stays small."""
    return 1.0 - 2.0 * (torch.arange(count, dtype=torch.float64) % 2)


def alternating(thresholds: Tensor) -> Tensor:
    """Return coefficients [H] of units that step at ascending thresholds, so that their sum stays small.

    Its slopes are 2, -2, 2, ... from bin to bin. The first bin is wide and gets a smaller slope, so that the sum rises
    as much in it as in others.
    """
    slopes, widths = 2 * alternating_signs(len(thresholds)), thresholds.diff()
    slopes[0] = 2 * widths.median() / widths[0]
    return slopes.diff(prepend=slopes.new_zeros(1))


def doubled(rows: Tensor) -> Tensor:
    """Return each row twice in succession."""
    return rows.repeat_interleave(2, 0)


def opposed(count: int, sizes: Tensor) -> Tensor:
    """Return coefficients [2 count] of opposite signs for pairs of equal units: their sum is 0 for every input.

    So they, and with them all gradients, may be as large as rounding allows. Noise without clipping before it cannot
    drown them.
    """
    return doubled(sizes) * alternating_signs(2 * count)


def normalized_rows(rows: Tensor, coefficients: Tensor, trap: Tensor) -> Tensor:
    """Return rows of gradients divided by their units' coefficients, averaged over pairs of equal units of `trap`."""
    used = coefficients != 0
    rows = rows[used] / coefficients[used, None]
    if len(trap) > 1 and torch.equal(trap[0], trap[1]):
        rows = rows.unflatten(0, (-1, 2)).mean(1)
    return rows


def quantiles(units: int, batch: int) -> Tensor:
    """Return the quantile levels [H] between bins: bins of equal probability, at most 1 / `batch` each."""
    return 0.5 + (torch.arange(units, dtype=torch.float64) - (units - 1) / 2) / max(units, batch, 1)


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
    rows = normalized_rows(torch.cat([weight, bias[:, None]], 1), out, trap)
    if not wired.bumps:
        rows = rows - torch.cat([rows[1:], torch.zeros_like(rows[:1])])
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
    rows = normalized_rows(weight[:-1].detach().double().cpu(), out[:-1], trap)
    rows = rows - torch.cat([rows[1:], torch.zeros_like(rows[:1])])
    classes, sums = plan.spec.classes, rows.sum(1)
    slope = (
        torch.where(sums > 0, 1 / classes, 1 / classes - 1) if plan.loss == "cross_entropy" else -torch.ones_like(sums)
    )
    strongest = _strongest(sums.abs())
    return rows[strongest] * (plan.local.batch / slope[strongest])[:, None]
