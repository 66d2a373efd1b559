"""The networks of BAFFLE's figures: their sizes, what they take, and what group normalization is for."""

from __future__ import annotations

import pytest
import torch

from ppbench.base.autodiff import gradient
from ppbench.base.errors import UsageError
from ppbench.defenses.baffle.protocol import Baffle
from ppbench.federation.plan import Plan
from ppbench.nets.net import Option, build, initial, net_spec
from ppbench.run.choice import make_defense

GREY, CIFAR = (1, 28, 28), (3, 32, 32)


@pytest.mark.parametrize(
    ("model", "shape", "classes", "options", "parameters", "features"),
    [
        ("lenet_baffle", GREY, 10, {}, 27_242, 60),
        ("lenet_baffle", (1, 32, 32), 10, {}, 27_242, 60),
        ("lenet_baffle", CIFAR, 10, {}, 27_542, 60),
        ("lenet_baffle", CIFAR, 100, {}, 33_032, 60),
        ("lenet_baffle", CIFAR, 10, {"norm": "gn"}, 27_542 + 2 * (6 + 16), 60),
        ("lenet_baffle", (1, 12, 12), 10, {"activation": "relu"}, 156 + 2416 + 17 * 60 + 610, 60),
        ("wrn_10_2", CIFAR, 10, {}, 303_706, 128),
        ("wrn_10_2", CIFAR, 100, {}, 315_316, 128),
        ("wrn_10_2", GREY, 10, {"activation": "selu"}, 303_706 - 2 * 16 * 9, 128),
        ("wrn_10_2", CIFAR, 10, {"norm": "none"}, 303_706 - 2 * (16 + 32 + 32 + 64 + 64 + 128 + 128), 128),
    ],
)
def test_sizes(
    model: str, shape: tuple[int, ...], classes: int, options: dict[str, Option], parameters: int, features: int
) -> None:
    spec = net_spec(model, shape, classes, options)
    net, params = build(spec), initial(spec, 0)
    assert (net.parameter_count, net.feature_count) == (parameters, features)
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
    y = torch.eye(classes)[:2]
    plan = Plan(spec, 1)
    logits = plan.net(params, x)
    assert logits.shape == (2, classes) and bool(logits.isfinite().all())
    found = gradient(lambda p: plan.objective(p, x, y, torch.ones(2)), params)
    assert all(bool((g != 0).any()) for g in found.values()), "a layer that the loss does not reach"


@pytest.mark.parametrize(
    ("model", "shape", "options", "words"),
    [
        ("lenet_baffle", CIFAR, {"activation": "tanh"}, "hardswish, relu, selu"),
        ("lenet_baffle", CIFAR, {"norm": "bn"}, "none, gn"),
        ("lenet_baffle", (1, 11, 32), {}, "at least 12x12"),
        ("lenet_baffle", (43,), {}, "takes images"),
        ("wrn_10_2", CIFAR, {"norm": "bn"}, "gn, none"),
        ("wrn_10_2", CIFAR, {"activation": "elu"}, "hardswish, relu, selu"),
        ("wrn_10_2", (43,), {}, "takes images"),
    ],
)
def test_what_is_not_offered_is_refused(
    model: str, shape: tuple[int, ...], options: dict[str, Option], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        build(net_spec(model, shape, 10, options))


def test_group_normalization_looks_at_one_example_and_batch_normalization_does_not() -> None:
    x = torch.rand(4, *CIFAR, generator=torch.Generator().manual_seed(0))
    for model, options, alone in (("wrn_10_2", {}, True), ("resnet20", {"norm": "bn"}, False)):
        spec = net_spec(model, CIFAR, 10, options)  # type: ignore[arg-type]
        net, params = build(spec), initial(spec, 0)
        together, single = net(params, x)[:1], net(params, x[:1])
        assert torch.allclose(together, single, rtol=1e-4, atol=1e-5) is alone


def test_claims_name_parameters_and_networks_that_exist() -> None:
    found = Baffle.claimed
    accuracies = [c for c in found if c.metric.startswith("accuracy") and c.value is not None]
    assert len(accuracies) == 6 * 7 + 4 * 3 + 5
    for claim in found:
        make_defense("baffle", dict(claim.when))
        if claim.model in ("lenet_baffle", "wrn_10_2"):
            build(net_spec(claim.model, CIFAR, 10, dict(claim.options)))
    assert all(0 < (c.value or 0) < (c.undefended or 0) < 1 for c in accuracies)
