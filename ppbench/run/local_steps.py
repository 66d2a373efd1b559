"""Several local steps of SGD behind an update, and their learning rate where the attacker does not know it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from scipy.optimize import minimize_scalar

from ppbench.base.errors import UsageError
from ppbench.base.tree import Params
from ppbench.federation.plan import Plan
from ppbench.federation.view import View

HOW = '{"lr": 0.1, "local_epochs": 2, "batch_size": 4}'
RANGE, POINTS = 4.0, 17
"""Rates from e^-RANGE to e^RANGE times the first one are compared, so many of them."""
TOLERANCE = 1e-7
"""Relative error of a fitted rate, where the mismatch resolves it."""


def first_rate(change: Params, plan: Plan, batch: int) -> float:
    """Return about the rate behind the change start minus end after the local steps of `plan`, usually too low.

    A step changes the head's bias by the rate times mean p - y, whose entries at labels sum to 1 less their
    probabilities, taken as 1/C each: exact for one step, too low once predictions approach the labels.
    UsageError: the head has no trained bias, or its change shows no label.
    """
    bias = change.get("head.bias")
    labels = torch.zeros(0) if bias is None else bias[bias < 0].double().cpu()
    if bias is None or not len(labels) or len(labels) == len(bias):
        raise UsageError(f"The learning rate cannot be read off the change of the last bias; give lr, as {HOW}.")
    steps = plan.local.opt.reach(len(plan.local.steps(batch)))
    return float(-labels.sum()) / (steps * (1 - len(labels) / len(bias)))


def at_rate(view: View, rate: float) -> View:
    """Return a view whose plan states another rate of the local steps."""
    local = view.plan.local
    return replace(view, plan=replace(view.plan, local=replace(local, opt=replace(local.opt, lr=rate))))


def fitted_rate(mismatch: Callable[[float], float], first: float) -> float:
    """Return the rate of least mismatch near `first`. mismatch: of a guess at a rate; not finite if it diverges."""

    def at(log_factor: float) -> float:
        value = mismatch(first * math.exp(log_factor))
        return value if math.isfinite(value) else 1e9

    grid = np.linspace(-RANGE, RANGE, POINTS)
    best, step = float(min(grid, key=at)), float(grid[1] - grid[0])
    found = minimize_scalar(at, bounds=(best - step, best + step), method="bounded", options={"xatol": TOLERANCE})
    return first * math.exp(float(found.x))
