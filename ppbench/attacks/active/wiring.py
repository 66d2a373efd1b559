"""Networks as an active server wires them: the layers before the first hidden linear layer, that layer, and the rest.

Only weights change. Layers before it become pass-throughs (convolutions with a single entry 1: shifts, so that strides
and pools drop as few pixels as the channels allow); layers behind it carry one number to one output of the head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import jvp, vjp

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.attacks.reconstruction.search.starts import PosedVictim, posed
from ppbench.base.tree import Params, detached, moved
from ppbench.federation.contract import Server
from ppbench.federation.evidence import Evidence, simulation
from ppbench.federation.plan import Plan
from ppbench.federation.threats import TARGET
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER, Slot

BUMPS = (nn.Sigmoid, nn.Tanh)
"""Activations whose units fire around one value; the slope of the others is a step, a few units wide."""
PASSING_BIAS: Mapping[type[nn.Module], float] = {
    nn.ReLU: 1.0,
    nn.LeakyReLU: 1.0,
    nn.Hardswish: 4.0,
    nn.Sigmoid: 0.0,
    nn.Tanh: 0.0,
}
"""Bias at which an activation passes numbers from -1 to 1 unchanged, or (sigmoid, tanh) bent but distinct."""
CLOSED: Mapping[type[nn.Module], float] = {nn.Sigmoid: -200.0}
"""Bias at which a unit without weights gives 0 exactly, in float32 too; 0 for others."""
WRONG = 20.0
"""Logit of one class, for all inputs, in weights for clients that a selection by loss should drop."""
NEWTON_STEPS, GRADIENT_STEPS, SLOPE_SHARE = 3, 60, 1e-18
"""Inversion of features: Gauss-Newton steps, conjugate-gradient steps of each at most, and the relative squared slope
at which these stop."""


@dataclass(frozen=True)
class WiredLayer:
    """A layer with weights (its name in the parameters), the activation behind it, and the width of its pool."""

    name: str
    module: nn.Linear | nn.Conv2d
    activation: nn.Module
    pool: int = 1

    @property
    def stride(self) -> int:
        """The larger stride of a convolution."""
        return max(self.module.stride) if isinstance(self.module, nn.Conv2d) else 1

    @property
    def padding(self) -> tuple[int, int]:
        """The rows and columns that a convolution adds before the first one."""
        if not isinstance(self.module, nn.Conv2d) or self.module.padding == "valid":
            return 0, 0
        if isinstance(self.module.padding, str):  # "same": of an even kernel one more behind the last
            rows, columns = self.module.kernel_size
            return (rows - 1) // 2, (columns - 1) // 2
        return self.module.padding[0], self.module.padding[1]


@dataclass(frozen=True)
class Wiring:
    """A network's layers. before: convolutions; trap: the first hidden linear layer; after: linear ones to the head.

    biased: whether linear layers have biases.
    """

    before: tuple[WiredLayer, ...]
    trap: WiredLayer
    after: tuple[WiredLayer, ...]
    biased: bool = True

    @property
    def bumps(self) -> bool:
        """Whether the trap's units fire around one value each, instead of above one value."""
        return isinstance(self.trap.activation, BUMPS)

    @property
    def units(self) -> int:
        """How many units the trap has."""
        return int(self.trap.module.weight.shape[0])

    @property
    def last(self) -> WiredLayer:
        """The layer before the head."""
        return (self.after or (self.trap,))[-1]

    @property
    def carrier(self) -> str:
        """The name of the layer that the trap's units enter."""
        return self.after[0].name if self.after else "head"


@lru_cache
def wiring(plan: Plan) -> Wiring | None:
    """Return the layers of the network of `plan`; None without a hidden linear layer, or with unsupported layers.

    Supported are convolutions, average pools, linear layers and the activations of `PASSING_BIAS`, in sequence, none
    frozen. All linear layers and the head have biases or, with (leaky) ReLUs on inputs that are not negative, none has.
    A maximum pool would pass the brightest of four pixels only.
    """
    layers, module = _layers(plan), plan.net.module
    linear = [layer for layer in layers or () if isinstance(layer.module, nn.Linear)]
    if layers is None or not linear:
        return None
    place, biases = (
        layers.index(linear[0]),
        {part.bias is not None for part in (*(x.module for x in linear), module.head)},
    )
    wired = Wiring(tuple(layers[:place]), linear[0], tuple(layers[place + 1 :]), biases == {True})
    plain = all(isinstance(layer.activation, nn.ReLU | nn.LeakyReLU) for layer in linear)
    unbiased = biases == {False} and not wired.before and plain and plan.data_range[0] >= 0
    return wired if wired.biased or unbiased else None


@lru_cache
def convolutions(plan: Plan) -> tuple[WiredLayer, ...]:
    """Return the layers of a network of convolutions and a head, none frozen; () for other networks."""
    layers = _layers(plan) or []
    known = all(isinstance(layer.module, nn.Conv2d) for layer in layers) and plan.net.module.head.bias is not None
    return tuple(layers) if known else ()


def _layers(plan: Plan) -> list[WiredLayer] | None:
    """Return the layers with weights before a linear head, in order; None if any is unsupported, or frozen."""
    network, layers = plan.net.module, list[WiredLayer]()
    plain = type(network.head) is nn.Linear and not plan.net.frozen_parameters and plan.loss != "bce"
    if network.layers is None or not plain:
        return None
    for name, module in network.layers.named_children():
        last = layers[-1] if layers else None
        if type(module) is nn.Linear or (type(module) is nn.Conv2d and _plain(module)):
            layers.append(WiredLayer(f"features.{name}", module, nn.Identity()))
        elif type(module) in PASSING_BIAS and last is not None and isinstance(last.activation, nn.Identity):
            layers[-1] = WiredLayer(last.name, last.module, module)
        elif isinstance(module, nn.AvgPool2d) and last is not None and last.pool == 1:
            sides = module.kernel_size if isinstance(module.kernel_size, tuple) else (module.kernel_size,)
            layers[-1] = WiredLayer(last.name, last.module, last.activation, max(sides))
        elif not isinstance(module, nn.Flatten | nn.Identity):
            return None
    return None if any(isinstance(layer.activation, nn.Identity) for layer in layers) else layers


def _plain(layer: nn.Conv2d) -> bool:
    return layer.groups == 1 and set(layer.dilation) == {1} and layer.padding_mode == "zeros"


def passing(layers: Sequence[WiredLayer], params: Params, data_range: tuple[float, float]) -> Params:
    """Return weights of convolutions that pass the image on, as far as channels allow: one entry each, and a bias.

    A stride, or a pool behind, of s takes s^2 channels for each channel passed on: the image shifted by 0 to s - 1 rows
    and columns. If there are too few channels, a shift is kept for all colors before the next one.
    """
    weights, (low, high) = Params(), data_range
    used = None
    for layer in layers:
        weight = torch.zeros_like(params[f"{layer.name}.weight"])
        out, inputs, rows, columns = weight.shape
        used = min(inputs, used or inputs)
        pad = layer.padding
        stride = layer.stride * layer.pool
        shifts = [(u, v) for u in range(stride) for v in range(stride)]
        shifts = [(u, v) for u, v in shifts if u + pad[0] < rows and v + pad[1] < columns]
        for place, ((u, v), channel) in enumerate([(s, c) for s in _spread(shifts) for c in range(used)][:out]):
            weight[place, channel, u + pad[0], v + pad[1]] = 1 / (high - low) if not weights else 1.0
        lift = PASSING_BIAS[type(layer.activation)] + (-low / (high - low) if not weights else 0.0)
        bent = isinstance(layer.activation, BUMPS)
        used = min(out, used * len(shifts))
        weights[f"{layer.name}.weight"] = weight
        if f"{layer.name}.bias" in params:
            weights[f"{layer.name}.bias"] = torch.full_like(params[f"{layer.name}.bias"], lift - 0.5 * bent)
    return weights


def _spread(shifts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return shifts with those on the diagonal first: a few of them cover most rows and columns."""
    return sorted(shifts, key=lambda s: (s[0] != s[1], s))


def silent_weights(last: WiredLayer, params: Params, loss: str) -> Params:
    """Return weights whose gradient is 0 on any data, except for the head's bias, and whose loss is large.

    A selection of clients by the smallest loss then chooses the target. The `last` layer before the head gives 0 and
    the head has no weights, so nothing propagates back through it (Pasquini et al. 2022 use dead ReLUs; a head of zeros
    works for every activation).
    """
    closed = CLOSED.get(type(last.activation), 0.0)
    weights = {name: value.clone() for name, value in params.items()}
    for name in (f"{last.name}.weight", "head.weight"):
        weights[name] = torch.zeros_like(weights[name])
    if "head.bias" not in params:
        return weights
    weights["head.bias"] = torch.zeros_like(weights["head.bias"])
    weights[f"{last.name}.bias"] = torch.full_like(weights[f"{last.name}.bias"], closed)
    if loss == "cross_entropy":
        weights["head.bias"][0] = WRONG
    return weights


def carried(wired: Wiring, params: Params, coefficients: Tensor, shift: float, loss: str) -> Params:
    """Return weights of the layers behind the trap: its units times `coefficients` [H], less `shift`, reach output 0.

    There it adds to a bias at which the output is undecided, so that all examples' gradients have about one size.
    """
    weights = Params()
    for layer in wired.after:
        weight, bias = (torch.zeros_like(params[f"{layer.name}.{part}"]) for part in ("weight", "bias"))
        first = layer is wired.after[0]
        weight[0] = coefficients.to(weight) if first else 0.0
        if not first:
            weight[0, 0] = 1.0
        bias[0] = PASSING_BIAS[type(layer.activation)] - (shift if first else 0.0)
        weights |= {f"{layer.name}.weight": weight, f"{layer.name}.bias": bias}
    weight, bias = torch.zeros_like(params["head.weight"]), torch.zeros_like(params["head.bias"])
    undecided = torch.tensor(float(len(bias) - 1)).log() if loss == "cross_entropy" else torch.tensor(0.5)
    if wired.after:
        weight[0, 0] = 1.0
        bias[0] = undecided - _level(wired.after)
    else:
        weight[0] = coefficients.to(weight)
        bias[0] = undecided - shift
    return {**weights, "head.weight": weight, "head.bias": bias}


def _level(after: Sequence[WiredLayer]) -> float:
    """Return the output of the last hidden layer where the trap's sum is 0."""
    value = torch.zeros(())
    for layer in after:
        value = layer.activation(value + PASSING_BIAS[type(layer.activation)])
    return float(value)


def entering(plan: Plan, wired: Wiring, params: Params, x: Tensor) -> Tensor:
    """Return the input [N, F] of the trap for inputs x [N, *shape] of the network."""
    with torch.no_grad():
        return plan.net.flat_features(params, x) if wired.before else x.flatten(1)


def inverted_features(plan: Plan, before: Sequence[WiredLayer], params: Params, features: Tensor) -> Tensor:
    """Return inputs [N, *shape] float64 that the layers `before` map to `features` [N, F], by least squares.

    Gauss-Newton steps, each solved by conjugate gradients on all examples side by side. Features that no input has
    (mixtures of saturated ones) give the best fit.
    """
    shape = (len(features), *plan.spec.shape)
    if not before or not len(features):
        return features.view(shape)
    weights = {name: value.double() for name, value in params.items()}
    x = torch.full(shape, sum(plan.data_range) / 2, dtype=torch.float64)
    for _ in range(NEWTON_STEPS):
        seen, back = vjp(lambda inputs: plan.net.flat_features(weights, inputs), x)[:2]
        x = x + _least(plan, weights, x, back, features - seen)
    return x.detach()


def _least(plan: Plan, weights: Params, x: Tensor, back: Callable[..., tuple[Tensor]], residual: Tensor) -> Tensor:
    """Return the least-squares steps [N, *shape] that reduce `residual` [N, F] (CGLS)."""
    step, left = torch.zeros_like(x), residual
    slope = back(left)[0]
    along, power = slope, slope.flatten(1).square().sum(1)
    first = power
    for _ in range(GRADIENT_STEPS):
        moved = jvp(lambda inputs: plan.net.flat_features(weights, inputs), (x,), (along,))[1]
        size = (power / moved.square().sum(1).clamp(min=1e-300)).where(power > 0, 0.0)
        step = step + size.view(-1, *[1] * (x.dim() - 1)) * along
        left = left - size[:, None] * moved
        slope = back(left)[0]
        fresh = slope.flatten(1).square().sum(1)
        along = slope + (fresh / power.clamp(min=1e-300)).view(-1, *[1] * (x.dim() - 1)) * along
        power = fresh
        if bool((power <= SLOPE_SHARE * first).all()):
            break
    return step.detach()


# -- Units of a trap: bins of one measurement --

LOWEST_REACH = 3.0
"""How far below the first quantile, in units of all of them, the lowest bin begins."""
LOUD_WEIGHT = 5e3
"""Weight of a unit of a loud trap: float32 sums of pairs that cancel are then exact to some hundredths."""
QUIET_HEIGHT = 0.005
"""What a quiet trap adds to an output: no example becomes decided, no gradient leaves its range."""
BIN_FLOOR = 1e-5
"""Bias gradients below this share of the largest are the rounding of a bin without an image."""


@dataclass(frozen=True)
class BinUnits:
    """Units that sort inputs by one measurement, and how they are added up; float64.

    weight: [H, F]; bias, coefficients: [H]; middle: of the sum over the range of thresholds.
    """

    weight: Tensor
    bias: Tensor
    coefficients: Tensor
    middle: float


def bin_units(direction: Tensor, thresholds: Tensor, gains: Tensor, activation: nn.Module, loud: bool) -> BinUnits:
    """Return units that step, or bump, at thresholds [H] along a direction [F] with gains [H].

    loud: each twice, of opposite coefficients, as large as rounding allows; else coefficients whose sum stays small.
    """
    bumps, widths = isinstance(activation, BUMPS), bin_widths(thresholds)
    count = len(thresholds)
    if not bumps:  # the first unit steps below all others: its gradient less the second's is the lowest bin
        thresholds, gains = lowered(thresholds), torch.cat([gains[:1], gains[:-1]])
    weight, bias = gains[:, None] * direction, -gains * thresholds
    if loud:
        return BinUnits(doubled(weight), doubled(bias), opposed(count, LOUD_WEIGHT / gains), 0.0)
    height = QUIET_HEIGHT / (1.0 if bumps else float(widths.median()))
    coefficients = (2 * alternating_signs(count) if bumps else alternating(thresholds)) * height / gains
    places = torch.linspace(float(thresholds[1]), float(thresholds[-1]), 4096, dtype=torch.float64)
    sums = activation(gains * (places[:, None] - thresholds)) @ coefficients
    return BinUnits(weight, bias, coefficients, float((sums.max() + sums.min()) / 2))


def bin_widths(thresholds: Tensor) -> Tensor:
    """Return the widths [H] of the bins that begin at ascending thresholds [H]; of the last, the one before."""
    return torch.cat([thresholds.diff(), thresholds[-1:] - thresholds[-2:-1]])


def quantiles(units: int, batch: int) -> Tensor:
    """Return the quantile levels [H] between bins: bins of equal probability, at most 1 / `batch` each."""
    return 0.5 + (torch.arange(units, dtype=torch.float64) - (units - 1) / 2) / max(units, batch, 1)


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


def bin_differences(rows: Tensor, coefficients: Tensor, trap: Tensor, bumps: bool) -> Tensor:
    """Return what each bin adds to the gradient, from all units' rows [H, F + 1] of it, those of biases at the end.

    coefficients: [H] of the units; trap: their weights and biases [H, F + 1]. Of units that step, a row less the next.
    """
    rows = normalized_rows(rows, coefficients, trap)
    return rows if bumps else rows - torch.cat([rows[1:], torch.zeros_like(rows[:1])])


# -- What an active server reads: evidence about its target alone, and which recovered images are plausible --

RANGE_SLACK = 0.25
"""How far pixels of a recovered image may lie outside the data range, in units of it; noise lies farther somewhere."""
SAME_IMAGE = 1e-3
"""Root mean squared distance, in units of the data range, below which two bins hold the same image."""


@dataclass(frozen=True)
class ActiveInversion(Attack):
    """Base of attacks that read inputs off an upload from crafted weights; no labels."""

    kind: ClassVar[Kind] = "reconstruction"
    threats: ClassVar[tuple[str, ...]] = ("server-active/1", "server-active/1/sybil")
    standard: ClassVar[bool] = False

    def evidence(self, view: View) -> list[Evidence]:
        """Return the defense's evidence; from a cohort where only the target has a gradient, the target's."""
        readable: list[Evidence] = []
        for evidence in view.defense.evidence(view):
            if len(evidence.unit) == 1:
                readable.append(evidence)
            elif any(slot.client == TARGET for slot in evidence.unit):
                readable += _of_target(view, evidence)
        return readable

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess per challenge: the images that features show, then grey ones."""
        return [self._answer(victim, view) for victim in posed(self.evidence(view), view.plan, challenges, generator)]

    def blank(self, victim: PosedVictim) -> Tensor:
        """Return the answer [N, *shape] where nothing is read: grey images."""
        return victim.image("grey")

    def read(self, plan: Plan, params: Params, evidence: Evidence, count: int) -> Tensor:
        """Return at most `count` of the inputs [N, *shape] that an upload from `params` shows, the surest first."""
        raise NotImplementedError

    def _answer(self, victim: PosedVictim, view: View) -> Guess:
        inputs, server = self.blank(victim), _server_of(view, victim.challenge.unit[0])
        if victim.evidence is None or server is None:
            return Guess(x=inputs, evaluations=1)
        params = moved(detached(server.params), torch.device("cpu"))
        shown = self.read(view.plan, params, victim.evidence, len(inputs))
        inputs[: len(shown)] = shown.float()
        return Guess(x=inputs, evaluations=1)


def _server_of(view: View, slot: Slot) -> Server | None:
    """Return the server's own state in a slot's probe, with the weights sent to its target; None if there is none."""
    states = (s.state for s in view.states if s.probe == slot.probe and s.party == SERVER)
    return next((state for state in states if isinstance(state, Server)), None)


def _of_target(view: View, evidence: Evidence) -> list[Evidence]:
    """Return evidence about a cohort as evidence about the target alone: divided by its share of the examples."""
    target = next(slot for slot in evidence.unit if slot.client == TARGET)
    server = _server_of(view, target)
    if server is None:
        return []
    counts = server.counts[[slot.client for slot in evidence.unit]].double()
    share = float(server.counts[TARGET] / counts.sum())
    observed = {name: value / share for name, value in evidence.observed.items()}
    return [replace(evidence, unit=(target,), observed=observed, simulate=simulation(view.plan, server.params))]


def shown_images(plan: Plan, layers: Sequence[WiredLayer], params: Params, features: Tensor) -> Tensor:
    """Return the images [M, *shape] behind outputs [N, F] float64 of `layers`, without those that cannot be images."""
    return _plausible(inverted_features(plan, layers, params, features), plan)


def _plausible(images: Tensor, plan: Plan) -> Tensor:
    """Return those of images [N, *shape] that lie near the data range; of two alike only the first."""
    low, high = plan.data_range
    slack, flat = RANGE_SLACK * (high - low), images.flatten(1)
    inside = flat.isfinite().all(1) & (flat >= low - slack).all(1) & (flat <= high + slack).all(1)
    kept: list[Tensor] = []
    for image in flat[inside]:
        distances = [float((image - other).square().mean().sqrt()) for other in kept]
        if min(distances, default=high - low) > SAME_IMAGE * (high - low):
            kept.append(image)
    return torch.stack(kept).view(-1, *images.shape[1:]) if kept else images[:0]
