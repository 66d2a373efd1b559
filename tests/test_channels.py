"""Channel scales found on a network's graph: Lemma 1 at every hidden activation, ties, random chains, refusals."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from protocols import moved, rand
from torch import Tensor, fx, nn

from ppbench.base.autodiff import gradient
from ppbench.base.errors import UsageError
from ppbench.base.tree import Params
from ppbench.defenses.pbpfl.perturbation import combine, mask, multiply, perturbed_outputs, surrogates, unscale
from ppbench.federation.plan import Batch
from ppbench.nets.channels import Channels, Norms, traced_channels, traced_features
from ppbench.nets.net import Classifier, Net, NetSpec, build, initial, net_spec, squared

IMAGE = (3, 8, 8)
CLASSES = 5


class Called(nn.Module):
    """A module whose forward is a function of (self, x); keywords are layers, parameters or buffers."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor, verbose: bool = False) -> Tensor:
        return self.function(self, x)


def wrapped(features: nn.Module, shape: tuple[int, ...] = IMAGE) -> tuple[Net, Params]:
    """The features with a head, and float64 parameters without special values."""
    with torch.no_grad():
        width = features(torch.zeros(2, *shape)).shape[1]
    model = Classifier(features, nn.Linear(width, CLASSES))
    params = {n: p.detach().double() for n, p in model.named_parameters()}
    return Net(NetSpec("test", shape, CLASSES), model), moved(params)


def registered(model: str, shape: tuple[int, ...] = IMAGE, **options: Any) -> tuple[Net, Params]:
    spec = net_spec(model, shape, CLASSES, options)
    return build(spec), moved(initial(spec, 0))


def fixup_with_scalar_biases() -> tuple[Net, Params]:
    """Two residual blocks whose biases are one number each, as the Fixup paper has them; they must be expanded."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = F.relu(m.stem(x) + m.b0)
        for conv1, conv2, (b1, b2, b3, b4), scale in (
            (m.conv1, m.conv2, (m.b1, m.b2, m.b3, m.b4), m.s1),
            (m.conv3, m.conv4, (m.b5, m.b6, m.b7, m.b8), m.s2),
        ):
            h = F.relu(conv2(F.relu(conv1(h + b1) + b2) + b3) * scale + b4 + h)
        return h.mean((2, 3))

    torch.manual_seed(0)
    convs = {f"conv{i}": nn.Conv2d(6, 6, 3, padding=1, bias=False) for i in range(1, 5)}
    biases = {f"b{i}": nn.Parameter(torch.zeros(()) if i % 2 else torch.zeros(1)) for i in range(9)}
    scales = {f"s{i}": nn.Parameter(torch.ones(1)) for i in (1, 2)}
    return wrapped(Called(forward, stem=nn.Conv2d(3, 6, 3, padding=1, bias=False), **convs, **biases, **scales))


def viewing() -> tuple[Net, Params]:
    """Flattened by a view whose sizes are computed in the forward pass; a dropout of nothing is no obstacle."""
    torch.manual_seed(0)
    parts = {"conv": nn.Conv2d(3, 4, 3), "drop": nn.Dropout(0.0)}
    return wrapped(Called(lambda m, x: m.drop(m.conv(x)).relu().view(x.size(0), -1), **parts))


ZOO: dict[str, tuple[Callable[[], tuple[Net, Params]], Norms, int]] = {
    # name: (network, norms, number of free scales)
    "mlp": (lambda: registered("mlp", hidden="16,12"), "refuse", 16 + 12),
    "cnn, max pool": (lambda: registered("cnn", widths="6,4", hidden="7"), "refuse", 6 + 4 + 7),
    "densenet": (lambda: registered("densenet", growth=3, blocks=2, layers=2), "refuse", 3 * (2 + 4)),
    # 64 along the stream (channels that option A copies keep their scale), 3 * (16 + 32 + 64) inside the blocks
    "resnet20 A": (lambda: registered("resnet20"), "refuse", 64 + 336),
    "resnet20 B": (lambda: registered("resnet20", shortcut="B"), "refuse", 112 + 336),
    "resnet20 fixup B": (lambda: registered("resnet20", norm="fixup", shortcut="B"), "refuse", 112 + 336),
    "fixup, scalar biases": (fixup_with_scalar_biases, "refuse", 3 * 6),
    "resnet20 bn": (lambda: registered("resnet20", norm="bn"), "affine", 64 + 336),
    "resnet20 gn B": (lambda: registered("resnet20", norm="gn", shortcut="B"), "affine", 112 + 336),
    "view": (viewing, "refuse", 4),
}
each_net = pytest.mark.parametrize("name", ZOO)


def scaled(params: Params, result: Channels, seed: int = 0) -> tuple[Params, Tensor, Params]:
    """Perturbed weights, the scales with the fixed 1 in front, and the multipliers."""
    scales = 0.5 + 1.5 * rand(result.count, seed=seed)
    multiplier = result.multipliers(scales)
    return multiply(params, multiplier, torch.float64), torch.cat([torch.ones(1).double(), scales]), multiplier


class Recorder(fx.Interpreter):
    """Runs the traced features with explicit parameters and keeps what every node returns."""

    def __init__(self, net: Net, params: Params) -> None:
        graph = copy.deepcopy(traced_features(net))
        for name, value in params.items():
            if name.startswith("features."):
                *path, leaf = name.removeprefix("features.").split(".")
                graph.get_submodule(".".join(path))._parameters[leaf] = nn.Parameter(value)
        super().__init__(graph)
        self.kept: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.kept[n.name] = super().run_node(n)
        return self.kept[n.name]


@each_net
def test_every_hidden_activation_is_the_true_one_times_a_positive_scale_per_channel(name):
    make, norms, _ = ZOO[name]
    net, params = make()
    result = traced_channels(net, norms)
    perturbed, scales, _ = scaled(params, result)
    x = rand(6, *net.spec.shape, seed=1)
    clean, hidden = Recorder(net, params), Recorder(net, perturbed)
    with torch.no_grad():
        clean.run(x)
        hidden.run(x)
    checked, graph = 0, clean.module
    for node in graph.graph.nodes:
        true, seen = clean.kept[node.name], hidden.kept[node.name]
        if not isinstance(true, Tensor) or node.op in ("get_attr", "output") or true.dim() < 2:
            continue
        a, b = true.transpose(0, 1).flatten(1), seen.transpose(0, 1).flatten(1)
        weight = (a**2).sum(1)
        r = torch.where(weight > 0, (a * b).sum(1) / weight.clamp(min=1e-300), torch.ones_like(weight))
        assert bool((r > 0).all()), node.name
        error = (b - r[:, None] * a).norm(dim=1) / (r * weight.sqrt()).clamp(min=1e-300)
        assert float(error.max()) < 1e-12, (node.name, float(error.max()))
        if node.op == "call_module" and f"features.{node.target}.weight" in result.factors:
            factor = result.factors[f"features.{node.target}.weight"]
            expected = scales[torch.from_numpy(factor.out)]
            live = weight > 0
            torch.testing.assert_close(r[live], expected[live], rtol=1e-12, atol=0)
            checked += 1
    layers = [m for m in net.module.features.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    assert checked >= len(layers), "a layer was not looked at"


@each_net
def test_masked_logits_are_the_true_ones_plus_alpha_times_the_mask(name):
    make, norms, count = ZOO[name]
    net, params = make()
    result = traced_channels(net, norms)
    assert result.count == count
    perturbed, _, _ = scaled(params, result)
    r = 10 * (rand(CLASSES, seed=4) - 0.5)
    x = rand(6, *net.spec.shape, seed=1)
    true = net(params, x)
    torch.testing.assert_close(net(perturbed, x), true, rtol=1e-12, atol=1e-12 * float(true.abs().max()))
    for masked_bias in (True, False):
        logits, alpha = perturbed_outputs(net, mask(perturbed, r, masked_bias), x, masked_bias)
        features = net.features(perturbed, x)
        torch.testing.assert_close(alpha, features.sum(1) + float(masked_bias and net.head_bias))
        expected = true + alpha[:, None] * r
        torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12 * float(expected.abs().max()))


# -- where scales enter ----------------------------------------------------------------------------------------------
def test_multipliers_of_a_perceptron_are_those_of_the_paper():
    """Eq. 6-8: rows by r of this layer, columns by 1/r of the last; biases by r; the head by 1/r alone."""
    net, params = registered("mlp", hidden="4,3")
    result = traced_channels(net)
    _, scales, multiplier = scaled(params, result)
    first, second = scales[1:5], scales[5:8]
    torch.testing.assert_close(multiplier["features.1.weight"], first[:, None].expand(4, 192))
    torch.testing.assert_close(multiplier["features.3.weight"], second[:, None] / first)
    torch.testing.assert_close(multiplier["features.3.bias"], second)
    torch.testing.assert_close(multiplier["head.weight"], (1 / second).expand(CLASSES, 3))
    assert "head.bias" not in multiplier


# -- random chains ---------------------------------------------------------------------------------------------------
class Chain(nn.Module):
    """A list of steps that commute with scales, drawn by hypothesis, from convolutions to a flat output."""

    def __init__(self, steps: list[tuple[str, int]], channels: int, size: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        self.steps: list[tuple[str, int]] = []
        self.channels, self.size, self.flat, raw = channels, size, False, True
        for kind, value in [("conv", 3), *steps]:
            if kind in ("residual", "bias", "scalar") and raw:
                continue
            raw = raw and kind not in ("conv", "linear")
            self._add(kind, value)

    def _add(self, kind: str, value: int) -> None:
        part: nn.Module = nn.Identity()
        c, spatial = self.channels, not self.flat
        if kind in ("conv", "linear"):
            stride = 2 if spatial and value % 2 and self.size > 2 else 1
            part = self._layer(2 + value, stride=stride, bias=value % 3 > 0)
            self.channels, self.size = 2 + value, -(-self.size // stride)
        elif kind in ("residual", "concat"):
            part = nn.Sequential(self._layer(c), nn.LeakyReLU(0.1 * value))
            self.channels = 2 * c if kind == "concat" else c
        elif kind == "pool" and spatial and self.size >= 2:
            part = nn.MaxPool2d(2) if value % 2 else nn.AvgPool2d(2)
            self.size //= 2
        elif kind == "activation":
            part = nn.ReLU() if value % 2 else nn.LeakyReLU(0.05 * value)
        elif kind in ("bias", "factor", "scalar"):
            self.parts.append(nn.ParameterList([torch.ones(() if kind == "scalar" else [c] + [1, 1] * spatial)]))
            self.steps.append((kind, value))
            return
        elif kind == "pad channels":
            self.channels += value
            part = nn.ZeroPad2d(0) if spatial else nn.Identity()
        elif kind == "drop channels" and c > 2:
            self.channels -= 1
        elif kind == "flatten" and spatial:
            part = nn.Flatten()
            self.channels, self.flat = c * self.size**2, True
        else:
            kind = "keep"
        self.parts.append(part)
        self.steps.append((kind, value))

    def _layer(self, out: int, stride: int = 1, bias: bool = True) -> nn.Module:
        if self.flat:
            return nn.Linear(self.channels, out, bias)
        return nn.Conv2d(self.channels, out, 3, stride, padding=1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        for (kind, value), part in zip(self.steps, self.parts, strict=True):
            if kind == "residual":
                x = part(x) + x
            elif kind == "concat":
                x = torch.cat([x, part(x)], 1)
            elif kind in ("bias", "scalar"):
                x = x + part[0]
            elif kind == "factor":
                x = part[0] * x
            elif kind == "pad channels":
                x = F.pad(x, (*[0] * 5, value) if isinstance(part, nn.ZeroPad2d) else (0, value))
            elif kind == "drop channels":
                x = x[:, 1:]
            else:
                x = part(x)
        return x if self.flat else x.mean((2, 3))


KINDS = ("conv", "linear", "residual", "concat", "pool", "activation", "bias", "factor", "scalar")
KINDS += ("pad channels", "drop channels", "flatten")
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 3)), max_size=9)


@settings(max_examples=60)
@given(steps=STEPS, seed=st.integers(0, 9))
def test_random_chains_of_commuting_steps_are_exact(steps, seed):
    torch.manual_seed(seed)
    net, params = wrapped(Chain(steps, 2, 6), (2, 6, 6))
    perturbed, _, multiplier = scaled(params, traced_channels(net), seed)
    r = 4 * (rand(CLASSES, seed=seed) - 0.5)
    sent = mask(perturbed, r, True)
    x, y = rand(3, 2, 6, 6, seed=seed + 1), rand(3, CLASSES, seed=seed + 2)
    with torch.no_grad():
        result = surrogates(net, sent, Batch(x, y, torch.ones(3).double()), r[None], True)
        recovered = unscale(combine(result, torch.ones(1).double(), r @ r), multiplier, params)
        true = gradient(lambda p: squared(net(p, x), y).mean(), params)
        logits, again = net(params, x), net(perturbed, x)
    assert any(n.startswith("features") for n in true)
    for name in true:
        size = result.g[name].abs() + result.sigma[name][0].abs() + (r @ r) * result.beta[name].abs()
        worst = (multiplier.get(name, torch.ones(())) * size).max()  # what cancels sets the rounding error
        assert float((recovered[name] - true[name]).abs().max()) <= 1e-12 * float(worst + 1), name
    torch.testing.assert_close(again, logits, rtol=1e-11, atol=1e-11 * float(logits.abs().max() + 1))


# -- refusals --------------------------------------------------------------------------------------------------------
def layers(*parts: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *parts, nn.Flatten())


def called(function: Callable[[Any, Tensor], Tensor], **parts: nn.Module | Tensor) -> nn.Module:
    return Called(lambda m, x: function(m, x).flatten(1), conv=nn.Conv2d(3, 3, 3, padding=1), **parts)


def conv() -> nn.Module:
    return nn.Conv2d(3, 3, 3, padding=1)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape))


TWICE = "'features.b' is used more than once"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    # name: (features, what the sentence names, what it advises)
    "tanh": (lambda: layers(nn.Tanh()), r"'features.1' \(Tanh\)", "use ReLU or LeakyReLU"),
    "torch.tanh": (lambda: called(lambda m, x: torch.tanh(m.conv(x))), "calls tanh", "use ReLU, LeakyReLU"),
    "batch norm": (lambda: layers(nn.BatchNorm2d(4)), r"'features.1' \(BatchNorm2d\) cancels", "norms=affine"),
    "affine, running statistics": (lambda: layers(nn.BatchNorm2d(4)), "running stat", "track_running_stats=False"),
    "affine, no affine part": (lambda: layers(nn.GroupNorm(2, 4, affine=False)), "no affine part", "affine=True"),
    "affine, layer norm": (lambda: layers(nn.Flatten(), nn.LayerNorm(256)), r"\(LayerNorm\)", "without it"),
    "dropout": (lambda: layers(nn.Dropout(0.5)), r"\(Dropout\)", "use no dropout"),
    "grouped": (lambda: layers(nn.Conv2d(4, 4, 3, groups=2)), "grouped convolution", "groups=1"),
    "raw residual": (lambda: called(lambda m, x: m.conv(x) + x), "unscaled input", "layer on the shortcut"),
    "product": (
        lambda: called(lambda m, x: m.conv(x) * m.other(x), other=conv()),
        "'mul' multiplies two activations",
        "use additions or concatenation",
    ),
    "padding by 1": (
        lambda: called(lambda m, x: F.pad(m.conv(x), (1, 1, 1, 1), value=1.0)), r"'pad' pads with 1\.0", "zero padding"
    ),
    "reflected channels": (
        lambda: called(lambda m, x: F.pad(m.conv(x).mean(2), (1, 1, 1, 1), mode="reflect")),
        "pads channels in mode 'reflect'",
        "zero padding",
    ),
    "padded batch": (
        lambda: called(lambda m, x: F.pad(m.conv(x), (*[0] * 7, 1))), "pads the batch", "padding of channels and space"
    ),
    "a layer twice": (
        lambda: called(lambda m, x: m.conv(F.relu(m.conv(x)))),
        "'features.conv.weight' is used more than once",
        "a layer of its own for each use",
    ),
    "a bias twice": (lambda: called(lambda m, x: (m.conv(x) + m.b).relu() + m.b, b=parameter(3, 1, 1)), TWICE, "own"),
    "mean over channels": (
        lambda: called(lambda m, x: m.conv(x).mean(1)), "'mean' averages over examples or channels", "means over space"
    ),
    "constant": (lambda: called(lambda m, x: m.conv(x) + 0.5), "adds a constant", "use a bias parameter"),
    "buffer": (lambda: called(lambda m, x: m.conv(x) + m.b, b=torch.ones(1)), "'features.b' is a buf", "own"),
    "weight norm": (
        lambda: layers(nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3))),
        r"'features.1.weight' is a buffer, a constant, or a weight made of others",
        "parameter of its own",
    ),
    "bias a pixel": (
        lambda: called(lambda m, x: m.conv(x) + m.b, b=parameter(8, 8)), r"\(8, 8\) is not one", r"shape \(3, 1, 1\)"
    ),
    "pool over channels": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.MaxPool1d(3, 1, 1)),
        r"'features.3' \(MaxPool1d\) is applied to activations of shape \(8,\)",
        "use it on 1d maps",
    ),
    "two outputs": (
        lambda: called(lambda m, x: m.pool(m.conv(x))[0], pool=nn.MaxPool2d(2, return_indices=True)),
        "'pool' does not keep its channels on axis 1",
        r"\[B, C, ...\]",
    ),
    "other axis": (lambda: called(lambda m, x: torch.cat([m.conv(x)] * 2, 2)), "axis 2", "axis 1"),
    "parameter joined": (
        lambda: called(lambda m, x: torch.cat([m.conv(x), m.p], 1), p=parameter(2, 1, 8, 8)),
        "concatenates a parameter",
        "torch.cat of activations",
    ),
    "by keyword": (lambda: called(lambda m, x: m.conv(input=x)), "'features.conv' is called on", "use layer"),
    "by other keyword": (lambda: called(lambda m, x: torch.add(m.conv(x), other=x)), "names its operands", "position"),
    "control flow": (
        lambda: called(lambda m, x: m.conv(x) if x.sum() > 0 else x),
        "'test' cannot be traced by torch.fx",
        "without control flow on tensors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_commute_is_refused_in_one_sentence_that_names_it_and_a_way_out(name, capfd):
    make, named, advice = REFUSED[name]
    with pytest.raises(UsageError, match=rf"(?s)(?=.*{named}).*{advice}") as caught:
        traced_channels(wrapped(make())[0], "affine" if name.startswith("affine") else "refuse")
    sentence = str(caught.value)
    assert sentence.endswith(".") and ". " not in sentence and "\n" not in sentence, sentence
    assert "cannot be perturbed" in sentence
    assert capfd.readouterr() == ("", ""), "a refusal prints nothing by itself"
