"""Bins of a measurement, where the trap has biases: which weights sort examples into them, and what each bin shows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ppbench.attacks.active.wiring import Wiring, carried, entering
from ppbench.base.tree import Params
from ppbench.federation.acting import Before
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan

MEAN, SPREAD = 0.4, 0.12
"""Of a normal law of brightness, in units of the data range, where no public examples tell another."""
FLOOR = 1e-5
"""Bias gradients below this share of the largest are the rounding of a bin without an image."""
REACH = 3.0
"""How far below the first quantile, in units of all of them, the lowest bin begins."""
LOUD = 5e3
"""What a loud trap weighs a unit with: float32 sums of pairs that cancel are then exact to some hundredths."""
QUIET = 0.005
"""What the trap adds to an output, where there is no noise to be drowned: no example is decided, no range left."""
MOST = 1000
"""Public examples that are looked at."""
SHARP: Mapping[type[nn.Module], float] = {nn.Hardswish: 12.0, nn.Sigmoid: 12.0, nn.Tanh: 6.0}
"""Input over a bin's width at which an activation that is no sharp step tells two bins apart."""


def sown(wired: Wiring, params: Params, before: Before, loud: bool) -> Params:
    """Return the trap's weights and those behind it, whose gradients are to be as large as can be where `loud`."""
    count = wired.units // 2 if loud else wired.units
    direction, thresholds = _law(wired, params, before, count)
    widths = torch.cat([thresholds.diff(), thresholds[-1:] - thresholds[-2:-1]])
    sharp = SHARP.get(type(wired.trap.activation))
    gains = torch.ones_like(thresholds) if sharp is None else sharp / widths
    if not wired.bumps:  # the first unit steps below all: what it has and the second has not is the lowest bin
        thresholds, gains = lowered(thresholds), torch.cat([gains[:1], gains[:-1]])
    weight, bias = gains[:, None] * direction, -gains * thresholds
    if loud:
        weight, bias, coefficients, middle = twice(weight), twice(bias), opposed(count, LOUD / gains), 0.0
    else:
        height = QUIET / (1.0 if wired.bumps else float(widths.median()))
        coefficients = (2 * signs(count) if wired.bumps else alternating(thresholds)) * height / gains
        places = torch.linspace(float(thresholds[1]), float(thresholds[-1]), 4096, dtype=torch.float64)
        sums = wired.trap.activation(gains * (places[:, None] - thresholds)) @ coefficients
        middle = float((sums.max() + sums.min()) / 2)
    found = {}
    for part, value in (("weight", weight), ("bias", bias), ("", coefficients)):
        like = params[f"{wired.trap.name}.{part or 'bias'}"]
        found[part] = filled(value, like)
    trap = {f"{wired.trap.name}.{part}": found[part] for part in ("weight", "bias")}
    return trap | carried(wired, params, found[""], middle, before.plan.loss)


def filled(value: Tensor, like: Tensor) -> Tensor:
    """Return `value` with rows of zeros for units that are left over, in the dtype of `like`."""
    whole = torch.zeros_like(like)
    whole[: len(value)] = value.to(like)
    return whole


def lowered(thresholds: Tensor) -> Tensor:
    """Return thresholds with one far below the others in the place of the last."""
    return torch.cat([thresholds[:1] - REACH * (thresholds[-1] - thresholds[0]), thresholds[:-1]])


def signs(count: int) -> Tensor:
    """Return 1, -1, 1, ... [count] float64: the sum over units that bump stays small whatever their number."""
    return 1.0 - 2.0 * (torch.arange(count, dtype=torch.float64) % 2)


def alternating(thresholds: Tensor) -> Tensor:
    """Return coefficients [H] of units that step at ascending thresholds, so that their sum stays small: its slopes are

    2, -2, 2, ... from bin to bin, less in the first, which is so wide that the sum rises as much in it as in others.
    """
    slopes, widths = 2 * signs(len(thresholds)), thresholds.diff()
    slopes[0] = 2 * widths.median() / widths[0]
    return slopes.diff(prepend=slopes.new_zeros(1))


def twice(rows: Tensor) -> Tensor:
    """Return each row two times in a row."""
    return rows.repeat_interleave(2, 0)


def opposed(count: int, sizes: Tensor) -> Tensor:
    """Return the coefficients of pairs of equal units, [2 count], of opposite signs: the sum is 0 for every input.

    So they may be as large as rounding allows, and with them all gradients; no noise that is added to these without
    clipping before it can drown them.
    """
    return twice(sizes) * signs(2 * count)


def folded(rows: Tensor, coefficients: Tensor, trap: Tensor) -> Tensor:
    """Return rows of gradients over the coefficients of their units, of pairs of equal units (of `trap`) the mean."""
    used = coefficients != 0
    rows = rows[used] / coefficients[used, None]
    if len(trap) > 1 and torch.equal(trap[0], trap[1]):
        rows = rows.unflatten(0, (-1, 2)).mean(1)
    return rows


def quantiles(units: int, batch: int) -> Tensor:
    """Return the shares of a law [H] at which bins end: of one weight, an example's where units are few."""
    return 0.5 + (torch.arange(units, dtype=torch.float64) - (units - 1) / 2) / max(units, batch, 1)


def _law(wired: Wiring, params: Params, before: Before, count: int) -> tuple[Tensor, Tensor]:
    """Return the direction [F] that features are measured along, and `count` thresholds between bins; float64."""
    plan, public = before.plan, before.public
    levels = quantiles(count, plan.local.batch)
    width = wired.trap.module.weight.shape[1]
    low, high = plan.data_range
    if public is not None and len(public.x) > 1:
        seen = entering(plan, wired, params, public.x[:MOST].cpu().float()).double()
        direction = torch.linalg.svd(seen - seen.mean(0), full_matrices=False)[2][0]
        values = seen @ direction
        if float(values.std()) > 0:
            return direction, torch.quantile(values, levels)
    grey, white = (
        entering(plan, wired, params, torch.full((1, *plan.spec.shape), level)).double()[0] for level in (low, high)
    )
    direction = torch.ones(width, dtype=torch.float64) / width
    start, end = float(grey @ direction), float(white @ direction)
    normal = torch.distributions.Normal(torch.tensor(MEAN).double(), torch.tensor(SPREAD).double())
    return direction, start + (end - start) * normal.icdf(levels)


def shown(wired: Wiring, params: Params, evidence: Evidence, plan: Plan) -> Tensor:
    """Return what bins show [N, F] float64, those with the largest share of the gradient first.

    A unit's weight gradient over its bias gradient, of units that step less those of the unit that steps next.
    """
    parts = [evidence.observed.get(f"{wired.trap.name}.{part}") for part in ("weight", "bias")]
    if any(part is None for part in parts):
        return torch.zeros(0, wired.trap.module.weight.shape[1], dtype=torch.float64)
    weight, bias = (part.detach().double().cpu() for part in parts if part is not None)
    out = params[f"{wired.carrier}.weight"][0].double()
    trap = torch.cat([params[f"{wired.trap.name}.weight"], params[f"{wired.trap.name}.bias"][:, None]], 1)
    rows = folded(torch.cat([weight, bias[:, None]], 1), out, trap)
    if not wired.bumps:
        rows = rows - torch.cat([rows[1:], torch.zeros_like(rows[:1])])
    weight, bias = rows[:, :-1], rows[:, -1]
    sure = bias.abs()
    seen = sure.isfinite() & (sure > FLOOR * sure.nan_to_num(0.0, 0.0, 0.0).max())
    order = sure[seen].argsort(descending=True, stable=True)
    return (weight[seen] / bias[seen, None])[order]
