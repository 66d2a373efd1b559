"""The architectures: parameter counts, what channel scales ask of them, initial laws, what they refuse."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from protocols import moved, rand
from torch import Tensor, fx, nn
from torch.func import grad, vmap

from ppbench.base.errors import UsageError
from ppbench.base.tree import Params
from ppbench.nets.models.resnet import FixupBlock, PaddedShortcut, ResidualBlock, resnet20, resnet56
from ppbench.nets.models.small import mlp
from ppbench.nets.net import Net, OptionValue, build, initial, net_spec

BACKBONE = {"backbone": "shufflenet_v2_x0_5"}
CIFAR = (3, 32, 32)
PLAIN = (nn.Conv2d, nn.Linear, nn.GroupNorm, nn.MaxPool2d, nn.Flatten)
PLAIN += (nn.ReLU, nn.LeakyReLU, nn.Hardswish, nn.Sigmoid, nn.Tanh)


@pytest.mark.parametrize(
    ("model", "shape", "classes", "options", "parameters", "features"),
    [
        ("dlnet", CIFAR, 10, {}, 19_438, 768),
        ("dlnet", CIFAR, 100, {}, 88_648, 768),
        ("dlnet", (1, 28, 28), 10, {"nconv": 3}, 312 + 2 * 3_612 + 10 * 589, 588),
        ("lenet", CIFAR, 10, {}, 15_826, 768),
        ("lenet", CIFAR, 100, {}, 85_036, 768),
        ("alexnet", CIFAR, 10, {}, 3_502_666, 256),
        ("vgg16", CIFAR, 10, {}, 14_857_034, 256),
        ("vgg16", CIFAR, 10, {"late_stride": 1}, 16_823_114, 256),
        ("mlp", (1, 8, 8), 10, {}, 4_810, 64),
        ("mlp", (1, 8, 8), 10, {"hidden": "48, 10"}, 64 * 48 + 48 + 49 * 10 + 11 * 10, 10),
        ("mlp", (43,), 2, {"hidden": 16, "activation": "tanh"}, 44 * 16 + 17 * 2, 16),
        ("mlp", (43,), 2, {"hidden": ""}, 44 * 2, 43),
        ("cnn", CIFAR, 10, {}, 896 + 9_248 + 20_490, 2048),
        ("cnn", CIFAR, 10, {"bias": False}, 864 + 9_216 + 20_480, 2048),
        ("cnn", CIFAR, 1, {"widths": 8, "hidden": "20"}, 224 + (2048 + 1) * 20 + 21, 20),
        ("cnn", CIFAR, 10, {"norm": "bn"}, 30_634 + 2 * (32 + 32), 2048),
        ("cnn", CIFAR, 10, {"norm": "tracked"}, 30_634 + 4 * (32 + 32), 2048),
        ("densenet", CIFAR, 10, {}, 119_146, 168),
        ("densenet", CIFAR, 10, {"bias": False}, 119_146 - 24 - 12 * 12 - 10, 168),
        ("resnet20", CIFAR, 10, {}, 268_346, 64),
        ("resnet20", CIFAR, 10, {"head_bias": False}, 268_336, 64),
        ("resnet32", CIFAR, 10, {}, 461_882, 64),
        ("resnet56", CIFAR, 10, {"head_bias": False}, 848_944, 64),
        ("resnet56", CIFAR, 100, {"head_bias": False}, 854_704, 64),
        ("resnet20", CIFAR, 10, {"shortcut": "B"}, 268_346 + 16 * 32 + 32 * 64, 64),
        ("resnet20", CIFAR, 10, {"norm": "bn"}, 268_346 + 2 * (16 + 6 * (16 + 32 + 64)), 64),
        ("resnet20", CIFAR, 10, {"norm": "gn", "shortcut": "B"}, 268_346 + 2560 + 2 * (16 + 6 * 112 + 32 + 64), 64),
        ("lenet_baffle", (1, 28, 28), 10, {}, 27_242, 60),
        ("lenet_baffle", (1, 32, 32), 10, {}, 27_242, 60),
        ("lenet_baffle", CIFAR, 10, {}, 27_542, 60),
        ("lenet_baffle", CIFAR, 100, {}, 33_032, 60),
        ("lenet_baffle", CIFAR, 10, {"norm": "gn"}, 27_542 + 2 * (6 + 16), 60),
        ("lenet_baffle", (1, 12, 12), 10, {"activation": "relu"}, 156 + 2416 + 17 * 60 + 610, 60),
        ("wrn_10_2", CIFAR, 10, {}, 303_706, 128),
        ("wrn_10_2", CIFAR, 100, {}, 315_316, 128),
        ("wrn_10_2", (1, 28, 28), 10, {"activation": "selu"}, 303_706 - 2 * 16 * 9, 128),
        ("wrn_10_2", CIFAR, 10, {"norm": "none"}, 303_706 - 2 * (16 + 32 + 32 + 64 + 64 + 128 + 128), 128),
        ("resnet20", CIFAR, 10, {"norm": "fixup"}, 268_346 + 80 + 3 * 16 + 16 + 2 * 32 + 32 + 2 * 64 + 9 * 113, 64),
    ],
)
def test_parameters_and_features(model, shape, classes, options, parameters, features):
    spec = net_spec(model, shape, classes, options)
    net = build(spec)
    assert (net.parameter_count, net.feature_count) == (parameters, features)
    assert net.head_bias == ("head.bias" in net.names)
    assert all(p.is_meta for p in net.module.parameters())
    if model in ("dlnet", "lenet", "alexnet", "vgg16", "mlp"):  # attacks have a fast path for plain layers
        assert isinstance(net.module.features, nn.Sequential)
        assert all(isinstance(layer, PLAIN) for layer in net.module.features)
    small = (shape[0], 8, 8) if model.startswith(("res", "dense")) else shape
    x, params = rand(2, *small, dtype=torch.float32), initial(spec, seed=0)
    logits = net(params, x)
    assert logits.shape == (2, classes) and logits.isfinite().all()
    if "baffle" in model or "wrn" in model:
        reached = grad(lambda p: net(p, x).logsumexp(1).sum())(params)
        assert all(bool((g != 0).any()) for g in reached.values()), "a layer that the loss does not reach"


@pytest.mark.parametrize(
    ("model", "shape", "smaller"),
    [
        ("dlnet", (1, 1, 1), (1, 0, 8)),
        ("lenet", (1, 1, 1), (0, 8, 8)),
        ("alexnet", (1, 8, 8), (1, 8, 7)),
        ("vgg16", (1, 32, 32), (1, 31, 32)),
        ("lenet_baffle", (1, 12, 32), (1, 11, 32)),
        ("wrn_10_2", (1, 1, 1), (0, 8, 8)),
        ("mlp", (1,), (0,)),
        ("cnn", (1, 4, 4), (1, 4, 3)),
        ("densenet", (1, 4, 4), (1, 3, 4)),
        ("resnet20", (1, 1, 1), (0, 8, 8)),
        ("resnet56", (2, 1, 3), (1, 0, 8)),
    ],
)
def test_smallest_input_works_and_a_smaller_one_is_refused(model, shape, smaller):
    spec = net_spec(model, shape, 2)
    assert build(spec)(initial(spec, 0), torch.zeros(1, *shape)).shape == (1, 2)
    for wrong in (smaller, *([(43,)] if model != "mlp" else [])):
        with pytest.raises(UsageError, match=f"Model '{model}' cannot be built for inputs .*: it takes "):
            build(net_spec(model, wrong, 2))


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("dlnet", {"activation": "relu"}, "sigmoid, tanh"),
        ("dlnet", {"init": "normal"}, "uniform, default"),
        ("dlnet", {"nconv": 1}, "nconv must be"),
        ("lenet", {"scale": 0.0}, "scale must be > 0"),
        ("lenet", {"nconv": 3}, "nconv"),
        ("vgg16", {"late_stride": 3}, "1 or 2"),
        ("vgg16", {"groups": 24}, "divide 64"),
        ("lenet_baffle", {"activation": "tanh"}, "hardswish, relu, selu"),
        ("lenet_baffle", {"norm": "bn"}, "none, gn"),
        ("wrn_10_2", {"norm": "bn"}, "gn, none"),
        ("wrn_10_2", {"activation": "elu"}, "hardswish, relu, selu"),
        ("mlp", {"hidden": "64,-1"}, "'64,-1'"),
        ("mlp", {"hidden": "64,"}, "'64,'"),
        ("mlp", {"hidden": 0}, "widths > 0"),
        ("mlp", {"activation": "elu"}, "leaky_relu"),
        ("mlp", {"layers": -1}, "layers must be a whole number of at least 0"),
        ("mlp", {"layers": 5, "hidden": "64,32"}, "one width, such as 64, where layers=5"),
        ("mlp", {"layers": 1, "hidden": ""}, "one width"),
        ("cnn", {"widths": ""}, "one block at least"),
        ("cnn", {"widths": "8,x"}, "widths must be widths > 0"),
        ("cnn", {"hidden": "0"}, "hidden must be widths > 0"),
        ("cnn", {"pool": "min"}, "pool must be one of max, avg"),
        ("cnn", {"activation": "sigmoid"}, "activation must be one of relu, leaky_relu, tanh"),
        ("cnn", {"norm": "batch"}, "norm must be one of none, bn, tracked"),
        ("cnn", {"bias": "no"}, "bias must be true or false, not 'no'"),
        ("densenet", {"growth": 0}, "growth must be a whole number of at least 1"),
        ("densenet", {"blocks": 1.5}, "blocks must be a whole number"),
        ("densenet", {"layers": True}, "layers must be a whole number"),
        ("resnet20", {"norm": "ln"}, "norm must be one of none, bn, gn, fixup, tracked"),
        ("resnet32", {"shortcut": "C"}, "shortcut must be one of A, B"),
        ("resnet56", {"head_bias": "no"}, "head_bias must be true or false"),
        ("resnet20", {"norm": "gn", "groups": 32}, "groups must divide 16"),
        ("resnet20", {"depth": 3}, "depth"),
        ("resnet50_fixup", {"blocks": "3,4,6"}, "4 stages"),
        ("resnet50_fixup", {"blocks": "3,4,6,0"}, "widths > 0"),
        ("resnet50_fixup", {"width": 0}, "width must be a whole number"),
        ("resnet50_fixup", {"norm": "bn"}, "norm"),
        ("frozen_backbone", {"backbone": "resnet"}, "none of torchvision.models"),
        ("frozen_backbone", {"backbone": "squeezenet1_0"}, "does not end in a linear layer"),
        ("frozen_backbone", {"backbone": "vit_b_16"}, "cannot take images of 32x32"),
        ("frozen_backbone", BACKBONE | {"weights": "/no/w.pth"}, "there is no file of weights /no/w.pth"),
        ("frozen_backbone", BACKBONE | {"backbone_seed": -1}, "backbone_seed must be a whole number"),
        ("unet", {"width": 0}, "width must be a whole number"),
    ],
)
def test_bad_options_are_refused(model, options, words):
    with pytest.raises(UsageError, match=words) as caught:
        build(net_spec(model, CIFAR, 10, options))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "shape", "options", "words"),
    [
        ("resnet50_fixup", (43,), {}, "takes images"),
        ("frozen_backbone", (43,), BACKBONE, "takes images"),
        ("frozen_backbone", (4, 32, 32), BACKBONE, "1 or 3 channels"),
        ("unet", (43,), {}, "takes images"),
        ("unet", (3, 8, 32), {}, "at least 16x16"),
        ("unet", (3, 32, 40), {}, "multiples of 16, not 32x40"),
    ],
)
def test_bad_shapes_are_refused(model, shape, options, words):
    with pytest.raises(UsageError, match=words):
        build(net_spec(model, shape, 10, options))


@pytest.mark.parametrize(("model", "scale"), [("dlnet", 0.3), ("lenet", 0.5)])
def test_uniform_law_of_all_weights_and_biases(model, scale):
    flat = torch.cat([p.flatten() for p in initial(net_spec(model, CIFAR, 10), 0).values()])
    assert flat.abs().max() <= scale
    assert flat.std() == pytest.approx(scale / math.sqrt(3), rel=0.03)


def test_default_law_is_not_the_uniform_one():
    params = initial(net_spec("lenet", CIFAR, 10, {"init": "default"}), 0)
    assert params["head.weight"].abs().max() <= 1 / math.sqrt(768)


@pytest.mark.parametrize("model", ["alexnet", "vgg16"])
def test_kaiming_law(model):
    spec = net_spec(model, CIFAR, 10)
    modules = dict(build(spec).module.named_modules())
    for name, value in initial(spec, 0).items():
        layer = modules[name.rpartition(".")[0]]
        if isinstance(layer, nn.GroupNorm):
            assert (value == (1.0 if name.endswith("weight") else 0.0)).all()
        elif name.endswith("bias"):
            assert (value == 0).all()
        else:
            bound = math.sqrt(6 / value[0].numel())
            assert value.abs().max() <= bound
            assert value.std() == pytest.approx(bound / math.sqrt(3), rel=0.05)


# -- what channel scales ask of a network ------------------------------------------------------------------------------
NORMS = ("none", "bn", "gn", "fixup")

VARIANTS: list[tuple[str, tuple[int, ...], Any]] = [
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
    ("resnet50_fixup", (3, 9, 9), {"width": 4, "blocks": "1,2,1,1"}),
]
each_variant = pytest.mark.parametrize(("model", "shape", "options"), VARIANTS)


def made(
    model: str, shape: tuple[int, ...], options: dict[str, OptionValue] | None = None, classes: int = 10
) -> tuple[Net, Params]:
    """The network and initial float64 parameters, those that start at 0 moved a little."""
    spec = net_spec(model, shape, classes, options)
    return build(spec), moved(initial(spec, 0), 0.1, zeros=True)


@each_variant
def test_graph_is_traced_without_state_or_in_place_operations(model, shape, options):
    net, params = made(model, shape, options)
    assert not list(net.module.buffers())
    graph = fx.symbolic_trace(net.module.features)
    for node in graph.graph.nodes:
        name = node.target if isinstance(node.target, str) else node.target.__name__
        assert node.op != "call_method" or not name.endswith("_")
        assert node.op != "call_function" or name in {"add", "mul", "cat", "getitem", "pad"}
        assert node.op != "call_module" or not getattr(graph.get_submodule(name), "inplace", False)
    x, inner = rand(3, *shape), {n.removeprefix("features."): p for n, p in params.items()}
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
def test_networks_without_biases_are_positively_homogeneous(model, options):
    net, params = made(model, (3, 9, 10), options)
    x = rand(2, 3, 9, 10)
    torch.testing.assert_close(net(params, 3.7 * x), 3.7 * net(params, x), rtol=1e-12, atol=1e-12)
    assert net(params, x).abs().max() > 1e-6
    tanh, params = made("cnn", (3, 9, 10), {"bias": False, "activation": "tanh"})
    assert not torch.allclose(tanh(params, 3.7 * x), 3.7 * tanh(params, x), rtol=0.1), "tanh is not homogeneous"


@each_variant
def test_gradients_by_vmap_equal_a_loop(model, shape, options):
    """Mapped over clients, each with a batch of two: what the federation does."""
    net, params = made(model, shape, options, classes=4)
    x = rand(2, 2, *shape)

    def loss(p, batch):
        return net(p, batch).logsumexp(1).sum()

    mapped = vmap(grad(loss), in_dims=(None, 0))(params, x)
    for client in range(2):
        single = grad(loss)(params, x[client])
        for name in params:
            torch.testing.assert_close(mapped[name][client], single[name], rtol=1e-7, atol=1e-9)


# -- residual blocks -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [(1, 1), (2, 3), (7, 9), (8, 8)])
def test_padded_shortcut_has_the_size_of_a_strided_convolution(size):
    x = rand(2, 4, *size)
    out = PaddedShortcut(2, 5)(x)
    assert out.shape == F.conv2d(x, torch.zeros(9, 4, 3, 3, dtype=x.dtype), stride=2, padding=1).shape
    assert torch.equal(out[:, 2:6], x[:, :, ::2, ::2])
    assert (out[:, :2] == 0).all() and (out[:, 6:] == 0).all()


@pytest.mark.parametrize("index", [0, 3], ids=["identity", "halved"])
@pytest.mark.parametrize("norm", ["none", "fixup"])
def test_a_block_is_relu_of_branch_plus_shortcut(norm, index):
    net, params = made("resnet20", (3, 8, 8), {"norm": norm})
    block = net.module.features[3 + index]
    own = {n.removeprefix(f"features.{3 + index}."): p for n, p in params.items() if f"features.{3 + index}." in n}
    inside, outside = (16, 16) if index == 0 else (16, 32)
    x = rand(2, inside, 8, 8) - 0.5
    stride = 1 if index == 0 else 2
    zero = torch.zeros(outside, 1, 1, dtype=x.dtype)
    way = x if index == 0 else F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 8, 8))
    branch = F.conv2d(x + own.get("before1.bias", torch.zeros(1)), own["conv1.weight"], stride=stride, padding=1)
    branch = (branch + own.get("after1.bias", zero)).relu() + own.get("before2.bias", zero)
    branch = F.conv2d(branch, own["conv2.weight"], padding=1) * own.get("scale", 1) + own.get("after2.bias", zero)
    result = torch.func.functional_call(block, own, (x,))
    torch.testing.assert_close(result, (branch + way).relu(), rtol=1e-12, atol=1e-12)
    assert ("after1.bias" in own) == (norm == "fixup")


def test_batch_norm_sees_the_batch_and_the_other_norms_do_not():
    x = rand(3, 3, 8, 8)
    for norm in (*NORMS, "tracked"):
        net, params = made("resnet20", (3, 8, 8), {"norm": norm})
        alone, together = net(params, x[:2])[0], net(params, x)[0]
        assert torch.allclose(alone, together, rtol=1e-9) == (norm not in ("bn", "tracked")), norm


# -- initial laws ----------------------------------------------------------------------------------------------------
def rms(features: nn.Sequential, x: Tensor) -> list[float]:
    """Root mean square after the stem and after every block."""
    results = []
    with torch.no_grad():
        for place, layer in enumerate(features):
            x = layer(x)
            if place == 2 or isinstance(layer, ResidualBlock):
                results.append(float(x.square().mean().sqrt()))
    return results


@pytest.mark.parametrize("shortcut", ["A", "B"])
@pytest.mark.parametrize("model", [resnet20, resnet56])
def test_norm_free_activations_and_gradients_do_not_grow_with_depth(model, shortcut):
    """Over ten seeds blocks have .58 to 4.3 times the stem's size, weights gradients of .03 to 28."""
    torch.manual_seed(0)
    net = model(CIFAR, 10, shortcut=shortcut)
    x = rand(4, *CIFAR).float()
    sizes = rms(net.features, x)
    assert max(sizes) < 10 * sizes[0]
    assert min(sizes) > sizes[0] / 10
    F.cross_entropy(net(x), torch.arange(4)).backward()
    norms = {n: float(p.grad.norm()) for n, p in net.named_parameters() if p.dim() == 4}
    assert all(0.005 < value < 100 for value in norms.values()), norms
    if model is resnet56:  # the scale is what does it
        with torch.no_grad():
            for block in (m for m in net.modules() if isinstance(m, ResidualBlock)):
                block.conv2.weight.mul_(27**0.5)
        assert max(rms(net.features, x)) > 100 * sizes[0]


def test_second_convolutions_alone_are_scaled():
    params = initial(net_spec("resnet20", CIFAR, 10), 0)
    for name, value in params.items():
        if value.dim() == 4:
            bound = math.sqrt(6 / value[0].numel()) * (1 / 3 if "conv2" in name else 1)
            assert value.std() == pytest.approx(bound / math.sqrt(3), rel=0.1), name
            assert value.abs().max() <= bound, name


def test_fixup_starts_as_its_paper_says_and_wakes_up_layer_by_layer():
    """Zero heads and last convolutions: the gradient reaches the head, then conv2, then conv1, a step each."""
    spec = net_spec("resnet20", (1, 8, 8), 3, {"norm": "fixup"})
    net, params = build(spec), initial(spec, 0)
    assert all((params[n] == 1).all() for n in params if n.endswith("scale"))
    zero = [n for n in params if "conv2" in n or n.startswith("head") or n.endswith("bias")]
    assert all((params[n] == 0).all() for n in zero)
    first = params["features.3.conv1.weight"]
    assert first.std() == pytest.approx(math.sqrt(2 / (16 * 9)) / 3, rel=0.1)
    x, y = rand(6, 1, 8, 8).float(), torch.arange(6) % 3
    reached = []
    for _ in range(4):
        g = grad(lambda p: F.cross_entropy(net(p, x), y))(params)
        reached.append({k for k in ("head", "conv2", "conv1") if any(k in n and g[n].abs().max() > 0 for n in g)})
        params = {n: p - 0.5 * g[n] for n, p in params.items()}
    assert reached == [{"head"}, {"head", "conv2"}, {"head", "conv2", "conv1"}, {"head", "conv2", "conv1"}]
    assert any(isinstance(m, FixupBlock) for m in net.module.modules())


@each_variant
def test_initial_parameters_are_a_function_of_the_seed_alone(model, shape, options):
    spec = net_spec(model, shape, 4, options)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, again, other = initial(spec, 7), initial(spec, 7), initial(spec, 8)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_layers_count_linear_layers():
    for layers in (1, 3, 5, 7):
        module = mlp((16,), 1, layers=layers, hidden=64)
        assert [m.out_features for m in module.modules() if isinstance(m, nn.Linear)] == [64] * (layers - 1) + [1]
