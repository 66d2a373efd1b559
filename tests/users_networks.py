"""Networks as people write them, drawn by a seed, each beside the same network without modes or flags.

`case(seed)` draws layers, modes by layer, what is frozen, and how layers are held together. `plain` has the same
parameters in the same order, and computes by formula what `module` computes in the mode that its layers are in.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ppbench.base.import_guard import importable

SHAPE, CLASSES, WIDTH = (1, 8, 8), 5, 8
Pair = tuple[nn.Module, nn.Module]


def stochastic_depth(p: float) -> nn.Module:
    from torchvision.ops import StochasticDepth

    return StochasticDepth(p, "row")


class Function(nn.Module):
    """A layer without parameters, by a function of its input and mode."""

    def __init__(self, function: Callable[[Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.training)


def constant(function: Callable[[Tensor], Tensor]) -> Function:
    return Function(lambda x, _: function(x))


class Residual(nn.Module):
    """x + drop(tanh(conv(x))), where `drop` drops the branch."""

    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.conv, self.drop = nn.Conv2d(WIDTH, WIDTH, 3, padding=1), drop

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.drop(torch.tanh(self.conv(x)))
        return out


class LayerDrop(nn.Module):
    """Leaves its layer out, by Python's own generator, as fairseq does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and random.random() < 0.5:
            return x
        return x + torch.tanh(self.conv(x))


class HandNorm(nn.Module):
    """Batch norm by the function, with the mode handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.var, self.weight, self.bias, training=self.training)


class FormulaNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) weight + bias, over the axes `over`, or with constant statistics (None)."""

    def __init__(self, over: tuple[int, ...] | None, norm: Any) -> None:
        super().__init__()
        self.weight, self.bias, self.over = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH)), over
        mean, var = (getattr(norm, n, None) for n in (("mean", "var") if hasattr(norm, "mean") else STATISTICS))
        self.register_buffer("m", None if mean is None else mean.clone()[:, None, None])
        self.register_buffer("v", None if var is None else var.clone()[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        mean, var = (self.m, self.v)
        if self.over is not None:
            mean, var = x.mean(self.over, keepdim=True), x.var(self.over, unbiased=False, keepdim=True)
        out: Tensor = (x - mean) / (var + 1e-5).sqrt() * self.weight[:, None, None] + self.bias[:, None, None]
        return out


STATISTICS = ("running_mean", "running_var")


def shifted(norm: nn.Module) -> nn.Module:
    """Return a norm with running statistics that are not those it begins with."""
    for place, buffer in enumerate(b for b in norm.buffers() if b.is_floating_point()):
        buffer.copy_(torch.rand(WIDTH) * (0.2 if place == 0 else 1.0) + (0.0 if place == 0 else 0.3))
    return norm


class Normed(nn.Module):
    """A convolution whose weight is made of others: g v / |v|, or w / (u^T w v) at constant u, v."""

    def __init__(self, shapes: list[tuple[int, ...]], uv: tuple[Tensor, Tensor] | None = None) -> None:
        super().__init__()
        self.values = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)
        self.register_buffer("u", None if uv is None else uv[0])
        self.register_buffer("v", None if uv is None else uv[1])

    def forward(self, x: Tensor) -> Tensor:
        bias, *rest = self.values
        if self.u is None:
            g, v = rest
            weight = g * v / v.flatten(1).norm(dim=1)[:, None, None, None]
        else:
            (w,) = rest
            weight = w / (self.u @ (w.flatten(1) @ self.v))
        return F.conv2d(x, weight, bias, padding=1)


class Blur(nn.Module):
    """Convolves with a constant kernel that is a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = torch.tensor([0.25, 0.5, 0.25]).expand(WIDTH, 1, 1, 3).clone()

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel, padding=(0, 1), groups=WIDTH)


def blur(x: Tensor) -> Tensor:
    return 0.5 * x + 0.25 * (F.pad(x, (1, 0))[..., :-1] + F.pad(x, (0, 1))[..., 1:])


class Tokens(nn.Module):
    """Rows of a map as tokens of a recurrent or attention layer, and back."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).mT  # [B, 16, WIDTH]
        if isinstance(self.layer, nn.MultiheadAttention):
            out = self.layer(tokens, tokens, tokens, need_weights=False)[0]
        else:
            out = self.layer(tokens)
            out = out[0] if isinstance(out, tuple) else out
        result: Tensor = x + out.mT.reshape(x.shape)
        return result


def _norm(make: Callable[[], nn.Module], over: tuple[int, ...]) -> Callable[[bool], Pair]:
    def pair(training: bool) -> Pair:
        norm = shifted(make()).train(training)
        return norm, FormulaNorm(over if training else None, norm)

    return pair


def _eval_only(make: Callable[[], nn.Module], plain: Callable[[], nn.Module]) -> Callable[[bool], Pair]:
    return lambda training: (make().train(training), plain())


def _normalized(make: Callable[[nn.Module], nn.Module]) -> Callable[[bool], Pair]:
    def pair(training: bool) -> Pair:
        conv = make(nn.Conv2d(WIDTH, WIDTH, 3, padding=1)).train(training)
        for _ in range(3):
            conv(torch.rand(2, WIDTH, 4, 4))  # passes that power iterations move in
        return conv, Normed([tuple(p.shape) for p in conv.parameters()])

    return pair


def _spectral(conv: nn.Module) -> tuple[Tensor, Tensor]:
    result = dict(conv.named_buffers())
    u = next(v for n, v in result.items() if n.endswith("_u"))
    return u.clone(), next(v for n, v in result.items() if n.endswith("_v")).clone()


def _transformer(dropout: float) -> Tokens:
    return Tokens(nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout, batch_first=True))


def _flagged(training: bool) -> Pair:
    own = Function(lambda x, training: x * (0.5 if training else 1.5))
    return own.train(training), constant(lambda x: x * (0.5 if training else 1.5))


IDENTITY: Callable[[], nn.Module] = lambda: constant(lambda x: x)  # noqa: E731
NORMS = torch.nn.utils
DRAWING: dict[str, Callable[[bool], Pair]] = {
    "dropout": _eval_only(lambda: nn.Dropout(0.3), IDENTITY),
    "dropout2d": _eval_only(lambda: nn.Dropout2d(0.3), IDENTITY),
    "functional dropout": _eval_only(lambda: Function(lambda x, t: F.dropout(x, 0.3, training=t)), IDENTITY),
    "noise": _eval_only(lambda: Function(lambda x, t: x + torch.randn_like(x) if t else x), IDENTITY),
    "rrelu": _eval_only(nn.RReLU, lambda: nn.LeakyReLU((1 / 8 + 1 / 3) / 2)),
    "stochastic depth": _eval_only(
        lambda: Residual(importable(lambda: stochastic_depth(0.5))), lambda: Residual(IDENTITY())
    ),
    "drop path": _eval_only(
        lambda: Residual(Function(lambda x, t: x * (torch.rand(len(x), 1, 1, 1) < 0.5) if t else x)),
        lambda: Residual(IDENTITY()),
    ),
    "layer drop": _eval_only(LayerDrop, lambda: Residual(IDENTITY())),
    "attention": _eval_only(
        lambda: Tokens(nn.MultiheadAttention(WIDTH, 2, 0.1, batch_first=True)),
        lambda: Tokens(nn.MultiheadAttention(WIDTH, 2, 0.0, batch_first=True)),
    ),
    "transformer": _eval_only(lambda: _transformer(0.1), lambda: _transformer(0.0)),
    "lstm": _eval_only(
        lambda: Tokens(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.2)),
        lambda: Tokens(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)),
    ),
    "gru": _eval_only(
        lambda: Tokens(nn.GRU(WIDTH, WIDTH, 2, batch_first=True, dropout=0.2)),
        lambda: Tokens(nn.GRU(WIDTH, WIDTH, 2, batch_first=True)),
    ),
}
"""Layers that draw in training mode."""
OTHERS: dict[str, Callable[[bool], Pair]] = {
    "flag": _flagged,
    "batch norm": _norm(lambda: nn.BatchNorm2d(WIDTH), (0, 2, 3)),
    "batch norm by hand": _norm(HandNorm, (0, 2, 3)),
    "instance norm": _norm(lambda: nn.InstanceNorm2d(WIDTH, affine=True, track_running_stats=True), (2, 3)),
    "group norm": lambda _: (nn.GroupNorm(2, WIDTH), nn.GroupNorm(2, WIDTH)),
    "layer norm": lambda _: (nn.LayerNorm([WIDTH, 4, 4]), nn.LayerNorm([WIDTH, 4, 4])),
    "spectral norm": _normalized(lambda conv: NORMS.parametrizations.spectral_norm(conv)),
    "old spectral norm": _normalized(lambda conv: NORMS.spectral_norm(conv)),
    "weight norm": _normalized(lambda conv: NORMS.parametrizations.weight_norm(conv)),
    "old weight norm": _normalized(lambda conv: NORMS.weight_norm(conv)),
    "blur": lambda _: (Blur(), constant(blur)),
    "dropout of none": lambda training: (nn.Dropout(0.0).train(training), IDENTITY()),
    "noise of size 0": lambda t: (
        Function(lambda x, t: x + 0.0 * torch.randn_like(x) if t else x).train(t),
        IDENTITY(),
    ),
}
LAYERS = DRAWING | OTHERS


class Written(nn.Module):
    """Layers by name, called one after another by a forward of its own; may have an auxiliary head in training mode."""

    def __init__(self, layers: list[nn.Module], auxiliary: bool = False) -> None:
        super().__init__()
        self.first, self.parts, self.fc = layers[0], nn.ModuleList(layers[1:-1]), layers[-1]
        self.auxiliary = nn.Linear(WIDTH, CLASSES).requires_grad_(False) if auxiliary else None

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for part in self.parts:
            x = part(x)
        logits = self.fc(x)
        if self.training and self.auxiliary is not None:
            return logits, self.auxiliary(x[:, :WIDTH])
        return logits


def _wrapped(layers: list[nn.Module], container: str) -> nn.Module:
    if container == "sequential":
        return nn.Sequential(*layers)
    if container == "nested":
        return nn.Sequential(nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:]))
    return Written(layers, container == "auxiliary")


FREEZING: dict[str, Callable[[str, int, int], bool]] = {
    "nothing": lambda name, place, count: False,
    "the head": lambda name, place, count: place >= count - 2,
    "the head's bias": lambda name, place, count: place == count - 1,
    "the head's weight": lambda name, place, count: place == count - 2,
    "the first layer": lambda name, place, count: place < 2,
    "all biases": lambda name, place, count: name.endswith("bias"),
    "all but biases": lambda name, place, count: not name.endswith("bias"),
    "every third": lambda name, place, count: place % 3 == 0,
    "all but the middle": lambda name, place, count: place < 2 or place >= count - 2,
}
CONTAINERS = ("sequential", "nested", "written", "auxiliary")


@dataclass(frozen=True)
class Case:
    """A network of a user's, the same by formula, a batch [B, *SHAPE] and its labels [B].

    about: what it is, in words. gradient: of the trained parameters, as torch computes it in the module's own mode.
    refusal: words of the sentence with which it must be refused: a layer draws in the mode that it is in, the network
    answers by more than logits, or all is frozen; "" where it must not.
    """

    about: str
    module: nn.Module
    plain: nn.Module
    x: Tensor
    y: Tensor
    gradient: list[Tensor]
    refusal: str

    def plain_gradient(self) -> list[Tensor]:
        """Return the gradient of the network by formula."""
        return gradient_of(self.plain, self.x, self.y)


def gradient_of(module: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Return the gradient of a module's trained parameters on the mean cross-entropy; 0 of those without a part."""
    trained = [p for p in module.parameters() if p.requires_grad]
    loss = F.cross_entropy(module(x), y)
    return list(torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True))


def _frozen_alike(module: nn.Module, plain: nn.Module, frozen: str) -> None:
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    ours = [p for p in module.parameters() if p.requires_grad]
    theirs = [p for p in plain.parameters() if p.requires_grad]
    assert [p.shape for p in ours] == [p.shape for p in theirs]
    for place, (name, one, other) in enumerate(zip(names, ours, theirs, strict=True)):
        other.data = one.detach().clone()
        freeze = FREEZING[frozen](name, place, len(ours))
        one.requires_grad_(not freeze)
        other.requires_grad_(not freeze)


def build(kinds: list[tuple[str, bool]], container: str, frozen: str, training: bool, batch: int, seed: int) -> Case:
    """Return the case of a first convolution, layers by their kinds, each in training mode or not, and a head."""
    torch.manual_seed(seed)
    pairs = [LAYERS[kind](mode) for kind, mode in kinds]
    ends = [nn.Conv2d(1, WIDTH, 5, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(16 * WIDTH, CLASSES)]
    ours, theirs = ([*copy.deepcopy(ends[:2]), *(pair[i] for pair in pairs), *copy.deepcopy(ends[2:])] for i in (0, 1))
    about = ", ".join(f"{kind} ({'train' if mode else 'eval'})" for kind, mode in kinds)
    about += f"; {container} ({'train' if training else 'eval'}); {frozen} frozen; batch of {batch}"
    module, plain = _wrapped(ours, container), nn.Sequential(*theirs)
    module.training = training
    for parameter in module.parameters():
        if parameter.requires_grad:
            nn.init.uniform_(parameter, -0.4, 0.4)
    _frozen_alike(module, plain, frozen)
    x, y = torch.rand(batch, *SHAPE), torch.randperm(CLASSES)[:batch]
    refusal = "draws at random" if any(mode and kind in DRAWING for kind, mode in kinds) else ""
    refusal = "answers by tuple in training mode" if container == "auxiliary" and training else refusal
    if not any(parameter.requires_grad for parameter in module.parameters()):
        refusal = refusal or "no parameter that requires a gradient"
    gradient = [] if refusal else gradient_of(module, x, y)
    for (kind, _), pair in zip(kinds, pairs, strict=True):
        if "spectral" in kind:
            pair[1].u, pair[1].v = _spectral(pair[0])  # as the pass left them
    return Case(about, module, plain, x, y, gradient, refusal)


def case(seed: int) -> Case:
    """Return a case drawn by a seed: one to three layers, mostly in modes in which they do not draw."""
    draw = random.Random(seed)
    names, kinds = list(LAYERS), list[tuple[str, bool]]()
    kinds.append((names[seed % len(names)], draw.random() < 0.5))
    kinds += [(draw.choice(names), draw.random() < 0.5) for _ in range(draw.choice((0, 1, 1, 2)))]
    if draw.random() < 0.8:
        kinds = [(kind, mode and kind not in DRAWING) for kind, mode in kinds]
    container, training = draw.choice(CONTAINERS), draw.random() < 0.5
    if draw.random() < 0.8:
        training = training and container != "auxiliary"
    return build(kinds, container, draw.choice(list(FREEZING)), training, draw.choice((1, 1, 2)), seed)
