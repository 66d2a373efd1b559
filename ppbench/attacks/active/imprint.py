"""Trap weights: a first linear layer that sorts a batch's images, or texts' tokens, into bins, if possible one per bin.

All rows are one measurement of the input, biases its quantiles (the imprint of Fowl et al., "Robbing the Fed", ICLR
2022, in an existing layer instead of one in front; trap weights of Boenisch et al., "When the Curious Abandon Honesty",
EuroS&P 2023, likewise use an existing layer). Gradients of neighboring units that step differ by the images between
their quantiles; a unit that bumps has the images around its own. Weight over bias gradient of one image is the image.
Where the server reads sums alone, all other clients get weights without a gradient (Pasquini et al., "Eluding Secure
Aggregation in Federated Learning via Model Inconsistency", CCS 2022), so that the sum is the target's.

Of a transformer the layer is the first MLP's (Fowl et al., "Decepticons", ICLR 2023), and tokens are sorted, see
`token_bins`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ppbench.attacks.active.token_bins import (
    TRAP_BLOCK,
    TokenVectors,
    embedding_tables,
    relays,
    shown_texts,
    signature_size,
    trapped_features,
)
from ppbench.attacks.active.wiring import (
    BIN_FLOOR,
    LOUD_WEIGHT,
    QUIET_HEIGHT,
    WRONG,
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
    silent_weights,
    wiring,
)
from ppbench.attacks.reconstruction.search.starts import PosedVictim
from ppbench.base.errors import UsageError
from ppbench.base.tree import Params
from ppbench.base.vocabulary import PADDING
from ppbench.federation.acting import Before, Sent
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Data, Plan

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


@dataclass(frozen=True)
class Imprint(ActiveInversion):
    """Trap weights in the first hidden linear layer: recovers the images that fall into a bin of their own, or texts.

    Bins are equally likely on the public examples, by their leading principal direction; without any, by brightness and
    a normal law. With fewer units than examples a bin has probability 1 / batch, and the rest of the law has no bins: 1
    in e bins then holds one image. Convolutions before the layer pass the image on.

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
        """Return whether the network can be a trap: of images by `wiring`, of texts by `trapped_features`."""
        if plan.vocabulary is not None:
            return trapped_features(plan) is not None
        return plan.spec.classes > 1 and wiring(plan) is not None

    def crafted(self, before: Before, generator: torch.Generator) -> Sent:
        """Return the trap for the target (or for all), and weights without a gradient for the others."""
        plan, params = before.plan, {name: value.detach().cpu() for name, value in before.server.params.items()}
        if plan.vocabulary is not None:
            trap, last = text_trap(plan, params, before.public, generator, self.loud), last_norm(plan)
        else:
            wired = _wired(plan)
            trap, last = {**params, **passing(wired.before, params, plan.data_range)}, wired.last
            trap |= (bin_trap if wired.biased else ratio_trap)(wired, trap, before, self.loud)
        return Sent(trap, None if before.target is None else silent_weights(last, params, plan.loss_name))

    def blank(self, victim: PosedVictim) -> Tensor:
        """Return a grey image, or an empty text, for each example."""
        return super().blank(victim) if victim.plan.vocabulary is None else torch.full(victim.size, float(PADDING))

    def read(self, plan: Plan, params: Params, evidence: Evidence, count: int) -> Tensor:
        """Return the images, or the texts, that the trap's bins show."""
        if plan.vocabulary is None:
            return super().read(plan, params, evidence, count)
        return shown_texts(plan, params, evidence, count)

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


# -- Bins of tokens: the first MLP of a transformer, see `token_bins` --

SIGNATURE_WEIGHT = 2.0
"""Spread of the measurement by signatures, beside that by tokens: letters share tokens, at equal places too."""
SAMPLED_TOKENS = 2**14
"""Tokens of public or drawn texts from which the law of the measurement is taken."""
BLUR = 0.02
"""Spread that is added to the measured values, relative to theirs: tokens that begin a text of a decoder are alike."""
STEPS_IN_BIN = 200.0
"""Change of a unit's input over the median bin: a few of a hundred tokens lie where a unit is half open."""
READ_WEIGHT = 4.0
"""Weight by which the head reads the mean over a text's tokens: its output still stays where it is undecided."""
LOUDER = 30.0
"""How much larger than those of images the weights behind a loud trap are: a norm follows on what rounding leaves."""


def last_norm(plan: Plan) -> WiredLayer:
    """Return the layer before the head of a network of texts."""
    return WiredLayer("features.norm", plan.net.module.get_submodule("features.norm"), nn.Identity())  # type: ignore[arg-type]


def text_trap(plan: Plan, params: Params, public: Data | None, generator: torch.Generator, loud: bool) -> Params:
    """Return the weights of an encoder or decoder whose first MLP is a trap; loud: with the largest gradients.

    Directions are drawn by `generator`. Bins are equally likely among tokens of public texts, else of drawn ones.
    UsageError: the network has no such layer.
    """
    features = trapped_features(plan)
    if features is None:
        raise UsageError(
            f"Attack 'imprint' needs a transformer whose first MLP is trained and whose every token reaches the head; "
            f"model {plan.spec.model!r} is none: take --model transformer without adapters, or gpt of depth 2."
        )
    width = features.embedding.embedding_dim
    drawn = torch.randn(width, 2, generator=generator, dtype=torch.float64)
    way, answered = torch.linalg.qr(drawn - drawn.mean(0))[0].T  # of mean 0: norms pass nothing else
    spread = math.sqrt(sum(float(table.double().var(0).mean()) for table in embedding_tables(plan, params)))
    sent = {**params, **_plain_blocks(params)}
    _write_signatures(sent, width, spread * math.sqrt(len(features.positions)) / 2, generator)  # as large as tokens
    if relays(features):
        _set(sent, "features.blocks.1.query_key_value.weight", slice(2 * width, 2 * width + 1), way[None])
        _set(sent, "features.blocks.1.mixed.weight", (slice(None), 0), READ_WEIGHT * spread * answered)
    else:
        answered = READ_WEIGHT * way
    sent |= _undecided_head(answered, params, plan)
    texts = _law_texts(plan, public, generator)
    vectors = TokenVectors.of(plan, sent)
    return sent | _trap_layer(vectors, vectors.of_texts(texts)[texts != PADDING], way, params, generator, loud)


def _set(weights: Params, name: str, where: slice | tuple[slice | int, ...], value: Tensor) -> None:
    """Set some of the weights `name`, which are no one else's."""
    weights[name][where] = value.to(weights[name])


def _write_signatures(sent: Params, width: int, scale: float, generator: torch.Generator) -> None:
    """Let the first attention write signatures: means over a drawn projection of normed vectors, times `scale`."""
    size = signature_size(width)
    projection = torch.linalg.qr(torch.randn(width, size, generator=generator, dtype=torch.float64))[0].T
    _set(sent, f"{TRAP_BLOCK}.query_key_value.weight", slice(2 * width, 2 * width + size), scale * projection)
    _set(sent, f"{TRAP_BLOCK}.mixed.weight", (slice(size), slice(size)), torch.eye(size))


def _plain_blocks(params: Params) -> Params:
    """Return weights of blocks that add nothing, and whose attention is the mean over what a token sees."""
    weights = Params()
    for name in params:
        layer, _, part = name.rpartition(".")
        if layer.startswith("features.norm") or ".norm_" in layer:
            weights[name] = torch.full_like(params[name], 1.0 if part == "weight" else 0.0)
        elif layer.endswith((".query_key_value", ".mixed", ".down")):
            weights[name] = torch.zeros_like(params[name])
    return weights


def _undecided_head(way: Tensor, params: Params, plan: Plan) -> Params:
    """Return a head that reads one direction [D] into its first output, at which it is undecided.

    Where texts are their own targets the first output is that of padding, no target, and sure: its slope is 1 for all.
    """
    weight, bias = torch.zeros_like(params["head.weight"]), torch.zeros_like(params["head.bias"])
    weight[0] = way.to(weight)
    bias[0] = 0.5 if plan.loss == "squared" else math.log(max(len(bias) - 1, 1)) + WRONG * plan.next_token
    return {"head.weight": weight, "head.bias": bias}


def _law_texts(plan: Plan, public: Data | None, generator: torch.Generator) -> Tensor:
    """Return texts [N, L] from which the law of the measurement is taken: public ones, else drawn tokens."""
    assert plan.vocabulary is not None
    length = plan.spec.shape[0]
    count = max(SAMPLED_TOKENS // length, 16)
    if public is not None and len(public.x) > 1:
        return public.x[:count].cpu().round().long()
    return torch.randint(PADDING + 1, len(plan.vocabulary), (count, length), generator=generator)


def _trap_layer(
    vectors: TokenVectors, seen: Tensor, way: Tensor, params: Params, generator: torch.Generator, loud: bool
) -> Params:
    """Return the weights of the first MLP: units that step along one drawn direction, whose sum goes `way` [D].

    seen: vectors [N, D] of the law of tokens.
    """
    drawn, size = torch.randn(len(way), generator=generator, dtype=torch.float64), len(vectors.projection)
    signature, token = drawn.clone(), drawn.clone()
    signature[size:] = token[:size] = 0
    direction = SIGNATURE_WEIGHT * signature / (seen @ signature).std() + token / (seen @ token).std()
    direction = (direction - direction.mean()) / (direction - direction.mean()).norm()
    measured = seen @ direction
    measured += BLUR * measured.std() * torch.randn(len(measured), generator=generator, dtype=torch.float64)
    like, down = params[f"{TRAP_BLOCK}.up.bias"], params[f"{TRAP_BLOCK}.down.weight"]
    thresholds = torch.quantile(measured, quantiles(len(like) // 2 if loud else len(like), 1))
    gains = torch.full_like(thresholds, STEPS_IN_BIN / float(thresholds.diff().median()))
    units = bin_units(direction, thresholds, gains, nn.GELU(), loud)
    coefficients = padded(units.coefficients * (LOUDER if loud else 1.0), like.double())
    return {
        f"{TRAP_BLOCK}.up.weight": padded(units.weight, params[f"{TRAP_BLOCK}.up.weight"]),
        f"{TRAP_BLOCK}.up.bias": padded(units.bias, like),
        f"{TRAP_BLOCK}.down.weight": (way[:, None] * coefficients).to(down),
        f"{TRAP_BLOCK}.down.bias": (-units.middle * way).to(down),
    }
