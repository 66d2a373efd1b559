"""What a server sees of one client: a user's gradient, some tensors of it, or an update of several local steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.optimize import minimize_scalar

from ppbench.adversary.attack import Attack
from ppbench.base.errors import UsageError, shown, unknown
from ppbench.base.tree import Params
from ppbench.federation.contract import Defense
from ppbench.federation.evidence import Evidence, PartGradient
from ppbench.federation.plan import Local, Plan
from ppbench.federation.threats import HONEST_SERVER
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER, Model, Update, Wire
from ppbench.nets.classifier import HEAD_NAMES
from ppbench.nets.net import LossName, NetSpec, OwnLoss
from ppbench.records.schema import Scalar
from ppbench.run.config import configure
from ppbench.run.experiment import make_defense
from ppbench.run.task import plan_on

HOW = '{"lr": 0.1, "local_epochs": 2, "batch_size": 4}'
OF_STEPS = "fedavg_inversion"
"""The only attack of the default that simulates several local steps."""
STEP_OPTIONS = ("lr", "local_epochs", "batch_size", "optimizer", "momentum", "beta2")
"""Options that describe the local steps behind a change of weights."""
RANGE, POINTS = 4.0, 17
"""Rates from e^-RANGE to e^RANGE times the first one are compared, so many of them."""
TOLERANCE = 1e-7
"""Relative error of a fitted rate, where the mismatch resolves it."""


def plan_of_update(
    spec: NetSpec,
    batch: int,
    data_range: tuple[float, float],
    training: Mapping[str, Scalar] | None,
    loss: LossName | OwnLoss,
) -> Plan:
    """Return the public plan of one client that sends a gradient, or its change of weights in the steps `training`."""
    if training is None:
        return Plan(spec, 1, Local("gradient", batch=batch), loss, data_range=data_range)
    if not isinstance(training, Mapping):
        raise UsageError(f"training={shown(training)} cannot be used; it must say how steps were made, as {HOW}.")
    for name in training:
        if name not in STEP_OPTIONS:
            raise unknown("option of local steps", str(name), STEP_OPTIONS)
    if "lr" not in training:
        right = f"give it, as {HOW}, or None if it is unknown; leave out training= for one step, whose rate is fitted"
        raise UsageError(f"training={shown(training)} lacks the learning rate; {right}.")
    options: dict[str, Any] = {"optimizer": "sgd", "batch_size": batch, **training}
    options["lr"] = 1.0 if options["lr"] is None else options["lr"]  # read off the change, see `first_rate`
    config = configure(defense="none", clients=1, upload="delta", decay_at=(), schedule="parallel", **options)
    return replace(plan_on(config, spec, data_range), loss=loss)


@dataclass(frozen=True)
class PartlySeen(Defense):
    """Plain federated averaging of which the adversary sees the parameters `seen` alone."""

    name: ClassVar[str] = "none"

    seen: frozenset[str] = frozenset()

    def evidence(self, view: View) -> list[Evidence]:
        """Return the plain evidence in which the other parameters have no weight, or are missing, if of the head.

        Labels are read off a head wherever it is observed; closed forms pass a layer whose gradient has no weight.
        """
        return [self._part(e, view.plan) for e in super().evidence(view)]

    def _part(self, whole: Evidence, plan: Plan) -> Evidence:
        assert whole.params is not None  # one client's gradient
        observed = {n: value for n, value in whole.observed.items() if n in self.seen or n not in HEAD_NAMES}
        weight = {n: torch.full_like(value, float(n in self.seen)) for n, value in observed.items()}
        simulate = PartGradient(whole.params, plan, frozenset(observed))
        return replace(whole, observed=observed, simulate=simulate, weight=weight)


def view_of(plan: Plan, params: Params, gradient: Params) -> View:
    """Return the server's view of one undefended upload at `params`: a gradient, of which it may see some tensors."""
    wire, whole = Wire(keep=True), gradient.keys() == params.keys()
    wire.post(0, 1, 0, SERVER, [0], Model(params))
    wire.post(0, 1, 0, 0, [SERVER], Update({n: gradient.get(n, torch.zeros_like(v)) for n, v in params.items()}))
    defense = make_defense("none") if whole else PartlySeen(frozenset(gradient))
    return View(HONEST_SERVER, SERVER, plan, defense, tuple(wire.mail), ())


# -- The rate of several local steps, where the attacker does not know it --


def is_rate_unknown(training: Mapping[str, Scalar] | None, plan: Plan, attack: str | Attack | None) -> bool:
    """Return whether the rate of steps of SGD is to be fitted; UsageError: by an attack that cannot."""
    if training is None or training["lr"] is not None or plan.local.opt.name != "sgd":
        return False
    if attack not in (None, OF_STEPS):
        raise UsageError(
            f"The rate is unknown (lr is None), which {OF_STEPS!r} alone fits; leave out attack=, or give lr."
        )
    return True


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
    minimum = minimize_scalar(at, bounds=(best - step, best + step), method="bounded", options={"xatol": TOLERANCE})
    return first * math.exp(float(minimum.x))
