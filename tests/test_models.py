"""The architectures: parameter counts of the papers' tables, shapes, initial laws, what they refuse."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

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
        ("cnn", CIFAR, 10, {}, 896 + 9_248 + 20_490, 2048),
        ("cnn", CIFAR, 10, {"bias": False}, 864 + 9_216 + 20_480, 2048),
        ("cnn", CIFAR, 1, {"widths": 8, "hidden": "20"}, 224 + (2048 + 1) * 20 + 21, 20),
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
        # stem 16, after the pool 64; a block: its input, thrice its output, one multiplier
        (
            "resnet20",
            CIFAR,
            10,
            {"norm": "fixup"},
            268_346 + 80 + (3 * 16 + 16 + 2 * 32 + 32 + 2 * 64) + 9 * 112 + 9,
            64,
        ),
    ],
)
def test_parameters_and_features(
    model: str, shape: tuple[int, ...], classes: int, options: dict[str, Option], parameters: int, features: int
) -> None:
    spec = net_spec(model, shape, classes, options)
    net = build(spec)
    assert (net.parameter_count, net.feature_count) == (parameters, features)
    assert net.head_bias == ("head.bias" in net.names)
    assert all(p.is_meta for p in net.module.parameters())
    if model in ("dlnet", "lenet", "alexnet", "vgg16", "mlp"):  # attacks have a fast path for plain layers
        assert isinstance(net.module.features, nn.Sequential)
        assert all(isinstance(layer, PLAIN) for layer in net.module.features)
    small = (shape[0], 8, 8) if model.startswith(("res", "dense")) else shape
    x = torch.rand(2, *small, generator=torch.Generator().manual_seed(0))
    logits = net(initial(spec, seed=0), x)
    assert logits.shape == (2, classes) and logits.isfinite().all()


@pytest.mark.parametrize(
    ("model", "shape", "smaller"),
    [
        ("dlnet", (1, 1, 1), (1, 0, 8)),
        ("lenet", (1, 1, 1), (0, 8, 8)),
        ("alexnet", (1, 8, 8), (1, 8, 7)),
        ("vgg16", (1, 32, 32), (1, 31, 32)),
        ("mlp", (1,), (0,)),
        ("cnn", (1, 4, 4), (1, 4, 3)),
        ("densenet", (1, 4, 4), (1, 3, 4)),
        ("resnet20", (1, 1, 1), (0, 8, 8)),
        ("resnet56", (2, 1, 3), (1, 0, 8)),
    ],
)
def test_smallest_input_works_and_a_smaller_one_is_refused(
    model: str, shape: tuple[int, ...], smaller: tuple[int, ...]
) -> None:
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
        ("cnn", {"bias": "no"}, "bias must be true or false, not 'no'"),
        ("densenet", {"growth": 0}, "growth must be a whole number of at least 1"),
        ("densenet", {"blocks": 1.5}, "blocks must be a whole number"),
        ("densenet", {"layers": True}, "layers must be a whole number"),
        ("resnet20", {"norm": "ln"}, "norm must be one of none, bn, gn, fixup"),
        ("resnet32", {"shortcut": "C"}, "shortcut must be one of A, B"),
        ("resnet56", {"head_bias": "no"}, "head_bias must be true or false"),
        ("resnet20", {"norm": "gn", "groups": 32}, "groups must divide 16"),
        ("resnet20", {"depth": 3}, "depth"),
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
