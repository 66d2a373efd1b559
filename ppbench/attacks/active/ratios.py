"""Bins where no layer has biases: of the ratio of a measurement to the brightness, as such networks know no scale.

A unit fires where (v - q u) x > 0, that is where v x / u x > q for inputs that are not negative (u: the mean). There is
no bias gradient to divide by, so the scale of an image is that of its cotangent, which the trap makes known: what it
adds to the outputs is small, so these are those of a head of zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ppbench.attacks.active.bins import (
    FLOOR,
    LOUD,
    MOST,
    QUIET,
    alternating,
    filled,
    folded,
    lowered,
    opposed,
    quantiles,
    twice,
)
from ppbench.attacks.active.wiring import Wiring
from ppbench.base.tree import Params
from ppbench.federation.acting import Before
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Data, Plan

LIFT = 0.2
"""What the last unit, which measures brightness, adds to all outputs together: so the sum is positive behind ReLUs."""
SPREAD = 0.15
"""Standard deviation of the ratio, without public examples: the left half less the right one, over both."""


def sown(wired: Wiring, params: Params, before: Before, loud: bool) -> Params:
    """Return the trap's weights and those behind it, whose gradients are to be as large as can be where `loud`."""
    count = (wired.units - 1) // 2 if loud else wired.units - 1
    direction, thresholds = _law(wired, before.plan, before.public, count)
    height = QUIET / float(thresholds.diff().median()) / before.plan.spec.classes
    thresholds = lowered(thresholds)
    rows, coefficients = direction - thresholds[:, None] / len(direction), height * alternating(thresholds)
    if loud:
        rows, coefficients = twice(rows), opposed(count, torch.full_like(thresholds, LOUD))
    found = {name: torch.zeros_like(params[name]) for name in (f"{layer.name}.weight" for layer in wired.after)}
    found["head.weight"] = torch.zeros_like(params["head.weight"])
    like = params[f"{wired.trap.name}.weight"]
    coefficients, rows = filled(coefficients, like[:, 0]), filled(rows, like)
    coefficients[-1], rows[-1] = LIFT / before.plan.spec.classes, 1 / len(direction)
    reached = slice(None) if before.plan.loss == "squared" else slice(1)
    for layer in wired.after:
        found[f"{layer.name}.weight"][0, 0] = 1.0
    carrier = f"{wired.carrier}.weight"
    if wired.after:
        found[carrier][0] = coefficients
        found["head.weight"][reached, 0] = 1.0
    else:
        found[carrier][reached] = coefficients
    return {**found, f"{wired.trap.name}.weight": rows}


def _law(wired: Wiring, plan: Plan, public: Data | None, count: int) -> tuple[Tensor, Tensor]:
    """Return the direction [F] of the measurement, and `count` ratios between bins; float64."""
    width, levels = int(wired.trap.module.weight.shape[1]), quantiles(count, plan.local.batch)
    if public is not None and len(public.x) > 1:
        seen = public.x[:MOST].cpu().double().flatten(1)
        seen = seen / seen.mean(1, keepdim=True).clamp(min=1e-6)
        direction = torch.linalg.svd(seen - seen.mean(0), full_matrices=False)[2][0]
        values = seen @ direction
        if float(values.std()) > 0:
            return direction, torch.quantile(values, levels)
    columns = torch.arange(width) % plan.spec.shape[-1]
    direction = torch.where(2 * columns < plan.spec.shape[-1], 1.0, -1.0).double() / width
    return direction, torch.distributions.Normal(torch.tensor(0.0).double(), SPREAD).icdf(levels)


def shown(wired: Wiring, params: Params, evidence: Evidence, plan: Plan) -> Tensor:
    """Return what bins show [N, F] float64, those with the largest share of the gradient first."""
    weight = evidence.observed.get(f"{wired.trap.name}.weight")
    if weight is None:
        return torch.zeros(0, wired.trap.module.weight.shape[1], dtype=torch.float64)
    out, trap = params[f"{wired.carrier}.weight"][0].double(), params[f"{wired.trap.name}.weight"]
    rows = folded(weight[:-1].detach().double().cpu(), out[:-1], trap)
    rows = rows - torch.cat([rows[1:], torch.zeros_like(rows[:1])])
    classes, sums = plan.spec.classes, rows.sum(1)
    slope = (
        torch.where(sums > 0, 1 / classes, 1 / classes - 1) if plan.loss == "cross_entropy" else -torch.ones_like(sums)
    )
    sure = sums.abs()
    seen = sure.isfinite() & (sure > FLOOR * sure.nan_to_num(0.0, 0.0, 0.0).max())
    order = sure[seen].argsort(descending=True, stable=True)
    return (rows[seen] * (plan.local.batch / slope[seen])[:, None])[order]
