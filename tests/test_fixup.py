"""ResNet-50 under Fixup: sizes, the initial law and what follows from it, vmap, training, bad options."""

import math

import pytest
import torch
import torch.nn.functional as F
from observations import seeded
from torch import Tensor, nn
from torch.func import grad, vmap

from ppbench.base.errors import UsageError
from ppbench.base.tree import Params
from ppbench.nets.models.resnet import Shift
from ppbench.nets.models.resnet50_fixup import FixupBottleneck, resnet50_fixup
from ppbench.nets.net import Net, Option, build, initial, net_spec

CIFAR = (3, 32, 32)
SMALL: dict[str, Option] = {"width": 4, "blocks": "1,2,1,1"}


def small(shape: tuple[int, ...] = (1, 8, 8)) -> tuple[Net, Params]:
    spec = net_spec("resnet50_fixup", shape, 10, SMALL)
    return build(spec), initial(spec, 0)


def loss(net: Net, params: Params, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(params, x), y)


def moved(params: Params) -> Params:
    """Float64 parameters away from the zeros of the initial law."""
    g = seeded(0)
    return {n: p.double() + 0.1 * torch.randn(p.shape, generator=g, dtype=torch.float64) for n, p in params.items()}


def test_it_has_fifty_layers_scalar_biases_and_a_multiplier_a_block():
    with torch.device("meta"):
        model, narrow = (resnet50_fixup(CIFAR, 10, width=width) for width in (64, 40))
    assert [sum(p.numel() for p in m.parameters()) for m in (model, narrow)] == [23_467_836, 9_172_404]
    layers = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear) and "shortcut" not in n]
    blocks = [m for m in model.modules() if isinstance(m, FixupBottleneck)]
    shifts = [m for m in model.modules() if isinstance(m, Shift)]
    assert (len(layers), len(blocks), len(shifts)) == (50, 16, 6 * 16 + 2)
    assert all(shift.bias.numel() == 1 for shift in shifts)
    assert all(block.scale.numel() == 1 for block in blocks)


def test_initial_law():
    spec = net_spec("resnet50_fixup", CIFAR, 10, {"width": 32, "blocks": "2,2,3,1"})
    params, branches = initial(spec, 0), 8
    for name, value in params.items():
        fan_in = value[0].numel() if value.dim() == 4 else 0
        bound = math.sqrt(6 / fan_in) if fan_in else 0.0
        if name.endswith(("conv3.weight", "bias", "head.weight")):
            assert (value == 0).all(), name
        elif name.endswith("scale"):
            assert (value == 1).all(), name
        else:
            scale = branches**-0.25 if name.endswith(("conv1.weight", "conv2.weight")) else 1.0
            assert value.abs().max() <= bound * scale + 1e-7, name
            assert value.std() == pytest.approx(bound * scale / math.sqrt(3), rel=0.1), name


def test_at_initialization_only_the_head_learns_and_branches_add_nothing():
    net, params = small()
    x, y = torch.rand(4, 1, 8, 8, generator=seeded(1)), torch.arange(4)
    g = grad(lambda p: loss(net, p, x, y))(params)
    assert (net(params, x) == 0).all()
    assert g["head.weight"].abs().max() > 0
    assert all((value == 0).all() for name, value in g.items() if not name.startswith("head."))
    other = {n: torch.randn_like(p) if n.endswith(("conv1.weight", "conv2.weight")) else p for n, p in params.items()}
    assert torch.equal(net.features(params, x), net.features(other, x))


def test_the_first_step_of_a_deeper_network_is_no_larger():
    x, y = torch.rand(16, 3, 8, 8, generator=seeded(1)), torch.arange(16) % 10

    def change(blocks: str) -> float:
        spec = net_spec("resnet50_fixup", (3, 8, 8), 10, {"width": 8, "blocks": blocks})
        net, params = build(spec), initial(spec, 0)
        for _ in range(2):  # the first step moves the head alone
            g = grad(lambda p, net=net: loss(net, p, x, y))(params)
            before = net(params, x)
            params = {n: p - 0.01 * g[n] for n, p in params.items()}
        return float((net(params, x) - before).norm())

    assert change("4,4,4,4") < 2 * change("1,1,1,1")


def test_vmap_over_clients_equals_a_loop_and_gradients_can_be_differentiated():
    net, start = small((3, 9, 9))
    params, g = moved(start), seeded(2)
    x, y = torch.rand(3, 2, 3, 9, 9, generator=g, dtype=torch.float64), torch.randint(0, 10, (3, 2), generator=g)
    together = vmap(grad(lambda p, x, y: loss(net, p, x, y)), in_dims=(None, 0, 0))(params, x, y)
    for i in range(3):
        alone = grad(lambda p, i=i: loss(net, p, x[i], y[i]))(params)
        assert all(torch.allclose(together[n][i], alone[n], atol=1e-10) for n in params)

    def size(x: Tensor) -> Tensor:
        found = grad(lambda p: loss(net, p, x, y[0]))(params)
        return torch.stack([v.square().sum() for v in found.values()]).sum()

    slope, step = grad(size)(x[0]), 1e-6 * torch.randn(x[0].shape, generator=g, dtype=torch.float64)
    numeric = (size(x[0] + step) - size(x[0] - step)) / 2
    assert float((slope * step).sum()) == pytest.approx(float(numeric), rel=1e-3)


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        (CIFAR, {"blocks": "3,4,6"}, "4 stages"),
        (CIFAR, {"blocks": "3,4,6,0"}, "widths > 0"),
        (CIFAR, {"width": 0}, "width must be a whole number"),
        (CIFAR, {"norm": "bn"}, "norm"),
        ((43,), {}, "takes images"),
    ],
)
def test_bad_options_are_refused(shape, options, words):
    with pytest.raises(UsageError, match=words):
        build(net_spec("resnet50_fixup", shape, 10, options))
