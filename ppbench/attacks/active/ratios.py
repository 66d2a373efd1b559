"""Bins for networks without biases: of the ratio of a measurement to the brightness, as such networks are scale-free.

A unit fires where (v - q u) x > 0, that is where v x / u x > q for inputs that are not negative (u: the mean). There is
no bias gradient to divide by. The cotangent gives the scale of an image, and the trap makes it known: it adds so little
to the outputs that they are nearly those of a head of zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ppbench.attacks.active.bins import (
    BIN_FLOOR,
    LOUD_WEIGHT,
    MOST_PUBLIC,
    QUIET_HEIGHT,
    alternating,
    doubled,
    lowered,
    normalized_rows,
    opposed,
    padded,
    quantiles,
)
from ppbench.attacks.active.wiring import Wiring
from ppbench.base.tree import Params
from ppbench.federation.acting import Before
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Data, Plan

BRIGHTNESS_LIFT = 0.2
"""What the last unit, which measures brightness, adds to all outputs together, so that ReLUs pass the sum."""
RATIO_STD = 0.15
"""Standard deviation of the ratio without public examples: the left half less the right one, over both."""


def ratio_trap(wired: Wiring, params: Params, before: Before, loud: bool) -> Params:
    """Return the weights of the trap and of the layers behind it; `loud`: with the largest possible gradients."""
    count = (wired.units - 1) // 2 if loud else wired.units - 1
    direction, thresholds = _law(wired, before.plan, before.public, count)
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


def _law(wired: Wiring, plan: Plan, public: Data | None, count: int) -> tuple[Tensor, Tensor]:
    """Return the direction [F] of the measurement, and `count` ratios between bins; float64."""
    width, levels = int(wired.trap.module.weight.shape[1]), quantiles(count, plan.local.batch)
    if public is not None and len(public.x) > 1:
        seen = public.x[:MOST_PUBLIC].cpu().double().flatten(1)
        seen = seen / seen.mean(1, keepdim=True).clamp(min=1e-6)
        direction = torch.linalg.svd(seen - seen.mean(0), full_matrices=False)[2][0]
        values = seen @ direction
        if float(values.std()) > 0:
            return direction, torch.quantile(values, levels)
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
    strength = sums.abs()
    visible = strength.isfinite() & (strength > BIN_FLOOR * strength.nan_to_num(0.0, 0.0, 0.0).max())
    order = strength[visible].argsort(descending=True, stable=True)
    return (rows[visible] * (plan.local.batch / slope[visible])[:, None])[order]
