"""The architectures: parameter counts of the papers' tables, shapes, initial laws, what they refuse."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from ppbench.base.errors import UsageError
from ppbench.nets.net import Option, build, initial, net_spec

CIFAR = (3, 32, 32)
PLAIN = (
    nn.Conv2d,
    nn.Linear,
    nn.GroupNorm,
    nn.MaxPool2d,
    nn.Flatten,
    nn.ReLU,
    nn.LeakyReLU,
    nn.Hardswish,
    nn.Sigmoid,
    nn.Tanh,
)


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
    ],
)
def test_parameters_and_features(
    model: str, shape: tuple[int, ...], classes: int, options: dict[str, Option], parameters: int, features: int
) -> None:
    spec = net_spec(model, shape, classes, options)
    net = build(spec)
    assert net.parameter_count == parameters
    assert net.feature_count == features
    assert isinstance(net.module.features, nn.Sequential)
    assert all(isinstance(layer, PLAIN) for layer in net.module.features)
    params = initial(spec, seed=0)
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
    assert net.features(params, x).shape == (2, features)
    logits = net(params, x)
    assert logits.shape == (2, classes)
    assert logits.isfinite().all()


@pytest.mark.parametrize(
    ("model", "shape", "smaller"),
    [
        ("dlnet", (1, 1, 1), (1, 0, 8)),
        ("lenet", (1, 1, 1), (0, 8, 8)),
        ("alexnet", (1, 8, 8), (1, 8, 7)),
        ("vgg16", (1, 32, 32), (1, 31, 32)),
        ("mlp", (1,), (0,)),
    ],
)
def test_smallest_input_works_and_a_smaller_one_is_refused(
    model: str, shape: tuple[int, ...], smaller: tuple[int, ...]
) -> None:
    spec = net_spec(model, shape, 2)
    assert build(spec)(initial(spec, 0), torch.zeros(1, *shape)).shape == (1, 2)
    with pytest.raises(UsageError, match=f"Model '{model}' cannot be built for inputs"):
        build(net_spec(model, smaller, 2))


@pytest.mark.parametrize("model", ["dlnet", "lenet", "alexnet", "vgg16"])
def test_image_models_refuse_tables(model: str) -> None:
    with pytest.raises(UsageError, match="takes images"):
        build(net_spec(model, (43,), 2))


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
        ("mlp", {"hidden": "64,-1"}, "'64,-1'"),
        ("mlp", {"hidden": "64,"}, "'64,'"),
        ("mlp", {"hidden": 0}, "widths > 0"),
        ("mlp", {"activation": "elu"}, "leaky_relu"),
    ],
)
def test_bad_options_are_refused(model: str, options: dict[str, Option], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build(net_spec(model, CIFAR, 10, options))


@pytest.mark.parametrize(("model", "scale"), [("dlnet", 0.3), ("lenet", 0.5)])
def test_uniform_law_of_all_weights_and_biases(model: str, scale: float) -> None:
    flat = torch.cat([p.flatten() for p in initial(net_spec(model, CIFAR, 10), 0).values()])
    assert flat.abs().max() <= scale
    assert flat.std() == pytest.approx(scale / math.sqrt(3), rel=0.03)


def test_default_law_is_not_the_uniform_one() -> None:
    params = initial(net_spec("lenet", CIFAR, 10, {"init": "default"}), 0)
    assert params["head.weight"].abs().max() <= 1 / math.sqrt(768)


@pytest.mark.parametrize("model", ["alexnet", "vgg16"])
def test_kaiming_law(model: str) -> None:
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


@pytest.mark.parametrize(("model", "shape"), [("dlnet", (3, 16, 16)), ("alexnet", (3, 8, 8)), ("mlp", (3, 4, 4))])
def test_per_example_gradients_by_vmap_equal_a_loop(model: str, shape: tuple[int, ...]) -> None:
    spec = net_spec(model, shape, 4)
    net, params = build(spec), initial(spec, 0)
    x = torch.rand(3, *shape, generator=torch.Generator().manual_seed(0))

    def loss(p: dict[str, torch.Tensor], example: torch.Tensor) -> torch.Tensor:
        return net(p, example[None]).logsumexp(1).sum()

    mapped = vmap(grad(loss), in_dims=(None, 0))(params, x)
    for index in range(len(x)):
        single = grad(loss)(params, x[index])
        for name in params:
            torch.testing.assert_close(mapped[name][index], single[name], rtol=1e-4, atol=1e-5)
