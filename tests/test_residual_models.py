"""cnn, densenet and the residual networks: counts, what channel scales ask of them, initial laws, what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import grad, vmap

from ppbench.base.tree import Params
from ppbench.nets.models.mlp import mlp
from ppbench.nets.models.resnet import Block, FixupBlock, PaddedShortcut, resnet20, resnet56
from ppbench.nets.net import Net, Option, build, initial, net_spec

CIFAR = (3, 32, 32)
NORMS = ("none", "bn", "gn", "fixup")
Options = dict[str, Option]

VARIANTS: list[tuple[str, tuple[int, ...], Options]] = [
    ("dlnet", (3, 16, 16), {}),
    ("alexnet", (3, 8, 8), {}),
    ("mlp", (3, 4, 4), {"bias": False}),
    ("mlp", (7,), {"layers": 5, "hidden": 8}),
    ("cnn", (3, 9, 11), {}),
    ("cnn", (3, 9, 11), {"pool": "avg", "activation": "leaky_relu", "bias": False, "hidden": "16,8"}),
    ("densenet", (3, 9, 11), {}),
    ("densenet", (1, 8, 8), {"growth": 4, "blocks": 2, "layers": 2, "bias": False}),
    *[("resnet20", (3, 7, 9), {"norm": norm, "shortcut": way}) for norm in NORMS for way in "AB"],
    ("resnet32", (1, 8, 8), {"head_bias": False}),
]
each_variant = pytest.mark.parametrize(("model", "shape", "options"), VARIANTS)


def made(model: str, shape: tuple[int, ...], options: Options | None = None, classes: int = 10) -> tuple[Net, Params]:
    """The network and initial float64 parameters, those that start at 0 moved a little."""
    spec = net_spec(model, shape, classes, options)
    g = torch.Generator().manual_seed(0)
    params = {
        name: value.double() + 0.1 * torch.randn(value.shape, generator=g, dtype=torch.float64) * (value == 0)
        for name, value in initial(spec, 0).items()
    }
    return build(spec), params


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- what channel scales ask of a network ----------------------------------------------------------------------------


@each_variant
def test_graph_is_traced_without_state_or_in_place_operations(
    model: str, shape: tuple[int, ...], options: Options
) -> None:
    net, params = made(model, shape, options)
    assert not list(net.module.buffers())
    graph = fx.symbolic_trace(net.module.features)
    for node in graph.graph.nodes:
        name = node.target if isinstance(node.target, str) else node.target.__name__
        assert node.op != "call_method" or not name.endswith("_")
        assert node.op != "call_function" or name in {"add", "mul", "cat", "getitem", "pad"}
        assert node.op != "call_module" or not getattr(graph.get_submodule(name), "inplace", False)
    x, inner = uniform(3, *shape), {n.removeprefix("features."): p for n, p in params.items()}
    traced = torch.func.functional_call(graph, {n: inner[n] for n, _ in graph.named_parameters()}, (x,))
    assert torch.equal(traced, net.features(params, x))
    assert traced.shape == (3, net.feature_count)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("mlp", {"bias": False}),
        ("mlp", {"bias": False, "activation": "leaky_relu", "layers": 7, "hidden": 9}),
        ("cnn", {"bias": False}),
        ("cnn", {"bias": False, "pool": "avg", "activation": "leaky_relu", "hidden": 12}),
        ("densenet", {"bias": False, "growth": 4}),
        ("resnet20", {"head_bias": False}),
        ("resnet20", {"head_bias": False, "shortcut": "B"}),
    ],
)
def test_networks_without_biases_are_positively_homogeneous(model: str, options: Options) -> None:
    net, params = made(model, (3, 9, 10), options)
    x = uniform(2, 3, 9, 10)
    torch.testing.assert_close(net(params, 3.7 * x), 3.7 * net(params, x), rtol=1e-12, atol=1e-12)
    assert net(params, x).abs().max() > 1e-3


def test_tanh_is_not_homogeneous() -> None:
    net, params = made("cnn", (3, 9, 10), {"bias": False, "activation": "tanh"})
    x = uniform(2, 3, 9, 10)
    assert not torch.allclose(net(params, 3.7 * x), 3.7 * net(params, x), rtol=0.1)


@each_variant
def test_gradients_by_vmap_equal_a_loop(model: str, shape: tuple[int, ...], options: Options) -> None:
    """Mapped over clients, each with a batch of two: what the federation does."""
    net, params = made(model, shape, options, classes=4)
    x = uniform(2, 2, *shape)

    def loss(p: Params, batch: Tensor) -> Tensor:
        return net(p, batch).logsumexp(1).sum()

    mapped = vmap(grad(loss), in_dims=(None, 0))(params, x)
    for client in range(2):
        single = grad(loss)(params, x[client])
        for name in params:
            torch.testing.assert_close(mapped[name][client], single[name], rtol=1e-7, atol=1e-9)


# -- residual blocks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (7, 9), (8, 8)])
def test_padded_shortcut_has_the_size_of_a_strided_convolution(size: tuple[int, int]) -> None:
    x = uniform(2, 4, *size)
    out = PaddedShortcut(2, 5)(x)
    assert out.shape == F.conv2d(x, torch.zeros(9, 4, 3, 3, dtype=x.dtype), stride=2, padding=1).shape
    assert torch.equal(out[:, 2:6], x[:, :, ::2, ::2])
    assert (out[:, :2] == 0).all() and (out[:, 6:] == 0).all()


@pytest.mark.parametrize("index", [0, 3], ids=["identity", "halved"])
@pytest.mark.parametrize("norm", ["none", "fixup"])
def test_a_block_is_relu_of_branch_plus_shortcut(norm: str, index: int) -> None:
    net, params = made("resnet20", (3, 8, 8), {"norm": norm})
    block = net.module.features[3 + index]
    own = {n.removeprefix(f"features.{3 + index}."): p for n, p in params.items() if f"features.{3 + index}." in n}
    inside, outside = (16, 16) if index == 0 else (16, 32)
    x = uniform(2, inside, 8, 8) - 0.5
    stride = 1 if index == 0 else 2
    zero = torch.zeros(outside, 1, 1, dtype=x.dtype)
    way = x if index == 0 else F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 8, 8))
    branch = F.conv2d(x + own.get("before1.bias", torch.zeros(1)), own["conv1.weight"], stride=stride, padding=1)
    branch = (branch + own.get("after1.bias", zero)).relu() + own.get("before2.bias", zero)
    branch = F.conv2d(branch, own["conv2.weight"], padding=1) * own.get("scale", 1) + own.get("after2.bias", zero)
    found = torch.func.functional_call(block, own, (x,))
    torch.testing.assert_close(found, (branch + way).relu(), rtol=1e-12, atol=1e-12)
    assert ("after1.bias" in own) == (norm == "fixup")


def test_batch_norm_sees_the_batch_and_the_other_norms_do_not() -> None:
    x = uniform(3, 3, 8, 8)
    for norm in NORMS:
        net, params = made("resnet20", (3, 8, 8), {"norm": norm})
        alone, together = net(params, x[:2])[0], net(params, x)[0]
        assert torch.allclose(alone, together, rtol=1e-9) == (norm != "bn"), norm


# -- initial laws ----------------------------------------------------------------------------------------------------


def rms(features: nn.Sequential, x: Tensor) -> list[float]:
    """Root mean square after the stem and after every block."""
    found = []
    with torch.no_grad():
        for place, layer in enumerate(features):
            x = layer(x)
            if place == 2 or isinstance(layer, Block):
                found.append(float(x.square().mean().sqrt()))
    return found


@pytest.mark.parametrize("shortcut", ["A", "B"])
@pytest.mark.parametrize("model", [resnet20, resnet56])
def test_norm_free_activations_and_gradients_do_not_grow_with_depth(
    model: Callable[..., nn.Module], shortcut: str
) -> None:
    torch.manual_seed(0)
    net = model(CIFAR, 10, shortcut=shortcut)
    x = uniform(4, *CIFAR).float()
    sizes = rms(net.features, x)
    assert max(sizes) < math.e * sizes[0]
    assert min(sizes) > sizes[0] / math.e
    F.cross_entropy(net(x), torch.arange(4)).backward()
    norms = {n: float(p.grad.norm()) for n, p in net.named_parameters() if p.dim() == 4}
    assert all(0.05 < value < 50 for value in norms.values()), norms
    if model is resnet56:  # the scale is what does it
        with torch.no_grad():
            for block in (m for m in net.modules() if isinstance(m, Block)):
                block.conv2.weight.mul_(27**0.5)
        assert max(rms(net.features, x)) > 100 * sizes[0]


def test_second_convolutions_alone_are_scaled() -> None:
    params = initial(net_spec("resnet20", CIFAR, 10), 0)
    for name, value in params.items():
        if value.dim() == 4:
            bound = math.sqrt(6 / value[0].numel()) * (1 / 3 if "conv2" in name else 1)
            assert value.std() == pytest.approx(bound / math.sqrt(3), rel=0.1), name
            assert value.abs().max() <= bound, name


def test_fixup_starts_as_its_paper_says_and_wakes_up_layer_by_layer() -> None:
    """Zero heads and last convolutions: the gradient reaches the head, then conv2, then conv1, a step each."""
    spec = net_spec("resnet20", (1, 8, 8), 3, {"norm": "fixup"})
    net, params = build(spec), initial(spec, 0)
    assert all((params[n] == 1).all() for n in params if n.endswith("scale"))
    zero = [n for n in params if "conv2" in n or n.startswith("head") or n.endswith("bias")]
    assert all((params[n] == 0).all() for n in zero)
    first = params["features.3.conv1.weight"]
    assert first.std() == pytest.approx(math.sqrt(2 / (16 * 9)) / 3, rel=0.1)
    x, y = uniform(6, 1, 8, 8).float(), torch.arange(6) % 3
    reached = []
    for _ in range(4):
        g = grad(lambda p: F.cross_entropy(net(p, x), y))(params)
        reached.append({k for k in ("head", "conv2", "conv1") if any(k in n and g[n].abs().max() > 0 for n in g)})
        params = {n: p - 0.5 * g[n] for n, p in params.items()}
    assert reached == [{"head"}, {"head", "conv2"}, {"head", "conv2", "conv1"}, {"head", "conv2", "conv1"}]
    assert any(isinstance(m, FixupBlock) for m in net.module.modules())


@each_variant
def test_initial_parameters_are_a_function_of_the_seed_alone(
    model: str, shape: tuple[int, ...], options: Options
) -> None:
    spec = net_spec(model, shape, 4, options)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, again, other = initial(spec, 7), initial(spec, 7), initial(spec, 8)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_layers_count_linear_layers() -> None:
    for layers in (1, 3, 5, 7):
        module = mlp((16,), 1, layers=layers, hidden=64)
        assert [m.out_features for m in module.modules() if isinstance(m, nn.Linear)] == [64] * (layers - 1) + [1]
