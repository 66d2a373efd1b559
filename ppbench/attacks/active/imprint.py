"""Trap weights: a first linear layer that sorts the images of a batch into bins, one image a bin where it can.

All rows are one measurement of the input, biases its quantiles (the imprint of Fowl et al., "Robbing the Fed", ICLR
2022, put into a layer that is there instead of one in front; trap weights of Boenisch et al., "When the Curious Abandon
Honesty", EuroS&P 2023, likewise use the layer that is there). Of units that step, gradients of neighbors differ by the
images between their quantiles; of units that bump, each has those around its own. Weight over bias gradient of one
image is the image. Where the server reads sums alone all others get weights without a gradient (Pasquini et al.,
"Eluding Secure Aggregation in Federated Learning via Model Inconsistency", CCS 2022), so that the sum is the target's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.attacks.active.wiring import Wiring, carried, entering, inverted, passing, silent, wiring
from ppbench.attacks.reconstruction.search.starts import Victim, posed
from ppbench.base.errors import UsageError
from ppbench.base.tree import Params
from ppbench.federation.acting import Before, Sent
from ppbench.federation.contract import Server
from ppbench.federation.evidence import Evidence, simulation
from ppbench.federation.plan import Data, Plan
from ppbench.federation.view import TARGET, View
from ppbench.federation.wire import SERVER, Slot

MEAN, SPREAD = 0.4, 0.12
"""Of a normal law of brightness, in units of the data range, where no public examples tell another."""
FLOOR = 1e-5
"""Bias gradients below this share of the largest are the rounding of a bin without an image."""
SLACK = 0.25
"""How far out of the data range, in units of it, what a bin shows may lie: noise lies farther in some pixel."""
TWICE = 1e-3
"""Root mean squared distance, in units of the data range, below which two bins show one image."""
REACH = 3.0
"""How far below the first quantile, in units of all of them, the lowest bin begins."""
QUIET = 0.005
"""What the trap adds to an output, where there is no noise to be drowned: no example is decided, no range left."""
MOST = 1000
"""Public examples that are looked at."""
SHARP: Mapping[type[nn.Module], float] = {nn.Hardswish: 12.0, nn.Sigmoid: 12.0, nn.Tanh: 6.0}
"""Input over a bin's width at which an activation that is no sharp step tells two bins apart."""


@dataclass(frozen=True)
class Imprint(Attack):
    """Trap weights in the first hidden linear layer: as many of a batch's images as fall into a bin of their own.

    Bins are equally likely on the public examples, by their leading principal direction; without any, by brightness and
    a normal law. With fewer units than examples each bin is as likely as one example of the batch, and the rest of the
    law goes without: 1 in e bins then holds one image. Convolutions before the layer pass the image on.

    loud: whether gradients are made as large as can be, which drowns noise that has no clipping before it; not of a
    target among others, whose numbers travel in a range.
    """

    loud: bool = True

    name: ClassVar[str] = "imprint"
    kind: ClassVar[Kind] = "reconstruction"
    threats: ClassVar[tuple[str, ...]] = ("server-active/1",)
    standard: ClassVar[bool] = False
    reference: ClassVar[str] = (
        "Fowl et al., Robbing the Fed: Directly Obtaining Private Data in Federated Learning with Modified Models, "
        "ICLR 2022; Boenisch et al., When the Curious Abandon Honesty, EuroS&P 2023; Pasquini et al., Eluding Secure "
        "Aggregation in Federated Learning via Model Inconsistency, CCS 2022"
    )

    def suits(self, plan: Plan) -> bool:
        """Return whether the network has a hidden linear layer with biases behind layers that can pass the image on."""
        return plan.spec.classes > 1 and wiring(plan) is not None

    def crafted(self, before: Before, generator: torch.Generator) -> Sent:
        """Return the trap, and for all but a target weights without a gradient."""
        wired = _wired(before.plan)
        params = {name: value.detach().cpu() for name, value in before.server.params.items()}
        trap = {**params, **passing(wired.before, params, before.plan.data_range)}
        trap |= _bins(wired, trap, before, self.loud and before.target is None)
        return Sent(trap, None if before.target is None else silent(wired, params, before.plan.loss))

    def evidence(self, view: View) -> list[Evidence]:
        """Return what the defense makes of uploads; of a cohort in which one client alone has a gradient, that one's.

        Of unknown scale then: the share that the target has of the sum.
        """
        found: list[Evidence] = []
        for evidence in view.defense.evidence(view):
            if len(evidence.unit) == 1:
                found.append(evidence)
            elif any(slot.client == TARGET for slot in evidence.unit):
                found += _of_target(view, evidence)
        return found

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess a challenge: images that bins show, then grey ones; labels are not told."""
        victims = posed(self.evidence(view), view.plan, challenges, generator)
        return [self._answer(victim, view) for victim in victims]

    def _answer(self, victim: Victim, view: View) -> Guess:
        images = victim.image("grey")
        params = None if victim.evidence is None else _trap_of(view, victim.challenge.unit[0])
        if victim.evidence is None or params is None:
            return Guess(x=images, evaluations=1)
        wired = _wired(view.plan)
        shown, _ = _shown(wired, params, victim.evidence)
        kept = _plausible(inverted(view.plan, wired, params, shown), view.plan)[: len(images)]
        images[: len(kept)] = kept.float()
        return Guess(x=images, evaluations=1)


@dataclass(frozen=True)
class QuietImprint(Imprint):
    """Trap weights of small gradients of one size: what sparsifies keeps more of them, and a client notices less."""

    name: ClassVar[str] = "imprint_quiet"

    loud: bool = False


def _wired(plan: Plan) -> Wiring:
    found = wiring(plan)
    if found is None:
        raise UsageError(
            f"Attack 'imprint' needs a hidden linear layer with biases, behind convolutions and pools alone; model "
            f"{plan.spec.model!r} has none: take --model mlp, or cnn with --model-set hidden=256."
        )
    return found


def _bins(wired: Wiring, params: Params, before: Before, loud: bool) -> Params:
    """Return the trap's weights and those behind it, whose gradients are to be as large as can be where `loud`."""
    direction, thresholds = _law(wired, params, before.plan, before.public)
    widths = torch.cat([thresholds.diff(), thresholds[-1:] - thresholds[-2:-1]])
    sharp = SHARP.get(type(wired.trap.activation))
    gains = torch.ones_like(thresholds) if sharp is None else sharp / widths
    heights = torch.ones_like(widths) if loud else QUIET * widths / widths.median()
    if wired.bumps:
        coefficients = 2.0 * _signs(len(gains)) * heights
    else:  # the first unit steps below all: what it has and the second has not is the lowest bin
        below = REACH * (thresholds[-1] - thresholds[0])
        thresholds = torch.cat([thresholds[:1] - below, thresholds[:-1]])
        widths, gains = torch.cat([below[None], widths[:-1]]), torch.cat([gains[:1], gains[:-1]])
        slopes = 2 * _signs(len(gains)) * torch.cat([heights[:1], heights[:-1]]) / widths
        coefficients = slopes.diff(prepend=slopes.new_zeros(1)) / gains
    middle = torch.linspace(float(thresholds[1]), float(thresholds[-1]), 4096, dtype=torch.float64)
    sums = wired.trap.activation(gains * (middle[:, None] - thresholds)) @ coefficients
    name = wired.trap.name
    like = params[f"{name}.weight"]
    found = {f"{name}.weight": (gains[:, None] * direction).to(like), f"{name}.bias": (-gains * thresholds).to(like)}
    return found | carried(wired, params, coefficients, float((sums.max() + sums.min()) / 2), before.plan.loss)


def _signs(count: int) -> Tensor:
    """Return 1, -1, 1, ... [count] float64: sums over units stay small whatever their number.

    So each may weigh much: gradients are large beside noise, and no example is decided. Of units that step it is the
    slope of the sum that alternates, by bins: from -1 to 1 in one, and back in the next.
    """
    return 1.0 - 2.0 * (torch.arange(count, dtype=torch.float64) % 2)


def _law(wired: Wiring, params: Params, plan: Plan, public: Data | None) -> tuple[Tensor, Tensor]:
    """Return the direction [F] that features are measured along, and the thresholds [H] between bins; float64."""
    count, batch = wired.units, max(1, plan.local.batch)
    mass = 1 / max(count, batch)
    levels = 0.5 + mass * (torch.arange(count, dtype=torch.float64) - (count - 1) / 2)
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


def _trap_of(view: View, slot: Slot) -> Params | None:
    """Return the weights that the target of a probe was sent, from the server's own state; None where it has none."""
    for state in view.states:
        if state.probe == slot.probe and state.party == SERVER and isinstance(state.state, Server):
            return {name: value.detach().cpu() for name, value in state.state.params.items()}
    return None


def _of_target(view: View, evidence: Evidence) -> list[Evidence]:
    """Return evidence about a cohort as evidence about the target alone, whose gradient it is up to a factor."""
    target = next(slot for slot in evidence.unit if slot.client == TARGET)
    params = _trap_of(view, target)
    if params is None:
        return []
    seen = simulation(view.plan, params)
    return [replace(evidence, unit=(target,), simulate=seen, params=None, weight=None, measure="cosine")]


def _shown(wired: Wiring, params: Params, evidence: Evidence) -> tuple[Tensor, Tensor]:
    """Return what bins show [N, F], and how much of the gradient each has [N]; float64, the largest first.

    A unit's weight gradient over its bias gradient, of units that step less those of the unit that steps next.
    """
    parts = [evidence.observed.get(f"{wired.trap.name}.{part}") for part in ("weight", "bias")]
    if any(part is None for part in parts):
        return torch.zeros(0, wired.trap.module.weight.shape[1], dtype=torch.float64), torch.zeros(0).double()
    weight, bias = (part.detach().double().cpu() for part in parts if part is not None)
    if not wired.bumps:
        out = params[f"{wired.carrier}.weight"][0].double()
        rows = torch.cat([weight, bias[:, None]], 1) / out[:, None]
        rows = rows - torch.cat([rows[1:], torch.zeros_like(rows[:1])])
        weight, bias = rows[:, :-1], rows[:, -1]
    sure = bias.abs()
    seen = sure.isfinite() & (sure > FLOOR * sure.nan_to_num(0.0, 0.0, 0.0).max())
    order = sure[seen].argsort(descending=True, stable=True)
    return (weight[seen] / bias[seen, None])[order], sure[seen][order]


def _plausible(images: Tensor, plan: Plan) -> Tensor:
    """Return those of images [N, *shape] that lie near the data range, each once; of two alike the first."""
    low, high = plan.data_range
    slack, flat = SLACK * (high - low), images.flatten(1)
    inside = flat.isfinite().all(1) & (flat >= low - slack).all(1) & (flat <= high + slack).all(1)
    kept: list[Tensor] = []
    for image in flat[inside]:
        apart = [float((image - other).square().mean().sqrt()) for other in kept]
        if min(apart, default=high - low) > TWICE * (high - low):
            kept.append(image)
    return torch.stack(kept).view(-1, *images.shape[1:]) if kept else images[:0]
