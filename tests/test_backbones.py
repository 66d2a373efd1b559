"""ResNet-50 under Fixup: sizes, initial law; a frozen backbone under a trained head: constants, records, files."""

import math

import pytest
import torch
import torch.nn.functional as F
from observations import seeded
from protocols import moved
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import grad, vmap

from ppbench.base.errors import UsageError
from ppbench.base.import_guard import torchvision
from ppbench.base.tree import Params
from ppbench.federation.engine import Federation
from ppbench.nets.channels import channels_of
from ppbench.nets.models.resnet import FixupBottleneck, Shift, resnet50_fixup
from ppbench.nets.net import Net, NetSpec, OptionValue, build, initial, net_spec
from ppbench.run.config import EvaluateConfig, configure
from ppbench.run.experiment import make_defense
from ppbench.run.task import describe, make_task

CIFAR = (3, 32, 32)
FROZEN = "shufflenet_v2_x0_5"
PINNED = "c3ffc7a6e73d99e9b6763a660789294c9586a9acbae011e710a74c441cb7b258"


def fixup(shape: tuple[int, ...] = (1, 8, 8)) -> tuple[Net, Params]:
    """Return a small one, and its initial parameters."""
    spec = net_spec("resnet50_fixup", shape, 10, {"width": 4, "blocks": "1,2,1,1"})
    return build(spec), initial(spec, 0)


def spec(shape: tuple[int, ...] = CIFAR, **options: OptionValue) -> NetSpec:
    return net_spec("frozen_backbone", shape, 10, {"backbone": FROZEN, **options})


def loss(net: Net, params: Params, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(params, x), y)


def test_it_has_fifty_layers_scalar_biases_and_a_multiplier_a_block():
    with torch.device("meta"):
        model, narrow = (resnet50_fixup(CIFAR, 10, width=width) for width in (64, 40))
    assert [sum(p.numel() for p in m.parameters()) for m in (model, narrow)] == [23_467_836, 9_172_404]
    layers = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear) and "shortcut" not in n]
    blocks = [m for m in model.modules() if isinstance(m, FixupBottleneck)]
    shifts = [m for m in model.modules() if isinstance(m, Shift)]
    assert (len(layers), len(blocks), len(shifts)) == (50, 16, 6 * 16 + 2)
    assert {scalar.numel() for scalar in (*(s.bias for s in shifts), *(b.scale for b in blocks))} == {1}


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
    net, params = fixup()
    x, y = torch.rand(4, 1, 8, 8, generator=seeded(1)), torch.arange(4)
    g = grad(lambda p: loss(net, p, x, y))(params)
    assert (net(params, x) == 0).all()
    assert g["head.weight"].abs().max() > 0
    assert all((value == 0).all() for name, value in g.items() if not name.startswith("head."))
    other = {n: torch.randn_like(p) if n.endswith(("conv1.weight", "conv2.weight")) else p for n, p in params.items()}
    assert torch.equal(net.features(params, x), net.features(other, x))


def test_the_first_steps_of_a_deep_network_are_small():
    """Outputs move by .02 to .47 over ten seeds; behind He's initialization alone by 900, or out of range."""
    x, y = torch.rand(16, 3, 8, 8, generator=seeded(1)), torch.arange(16) % 10
    spec = net_spec("resnet50_fixup", (3, 8, 8), 10, {"width": 8, "blocks": "4,4,4,4"})
    net, params = build(spec), initial(spec, 0)
    for _ in range(2):  # the first step moves the head alone
        g = grad(lambda p: loss(net, p, x, y))(params)
        before = net(params, x)
        params = {n: p - 0.01 * g[n] for n, p in params.items()}
    assert float((net(params, x) - before).norm()) < 5


def test_gradients_can_be_differentiated():
    net, start = fixup((3, 9, 9))
    params, g = moved(start, 0.1), seeded(2)
    x, y = torch.rand(2, 3, 9, 9, generator=g, dtype=torch.float64), torch.randint(0, 10, (2,), generator=g)

    def size(x: Tensor) -> Tensor:
        gradients = grad(lambda p: loss(net, p, x, y))(params)
        return torch.stack([v.square().sum() for v in gradients.values()]).sum()

    slope, step = grad(size)(x), 1e-6 * torch.randn(x.shape, generator=g, dtype=torch.float64)
    numeric = (size(x + step) - size(x - step)) / 2
    assert float((slope * step).sum()) == pytest.approx(float(numeric), rel=1e-3)


# -- a frozen backbone ------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def original():
    """A torchvision network as its user trained it: with statistics of its own."""
    torch.manual_seed(1)
    network: nn.Module = torchvision().models.get_model(FROZEN, weights=None)
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = None
    with torch.no_grad():
        network.train()(torch.rand(16, *CIFAR))
    return network.eval()


@pytest.fixture
def saved(original, tmp_path):
    """Write the network's state and return the path."""

    def save(name):
        path = tmp_path / name
        if path.suffix == ".pth":
            torch.save(original.state_dict(), path)
        else:
            save_file(original.state_dict(), path)
        return str(path)

    return save


def images(*lead: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(*lead, *CIFAR, generator=torch.Generator().manual_seed(0), dtype=dtype)


def test_only_the_head_is_a_parameter_and_no_channel_can_be_scaled():
    net = build(net_spec("frozen_backbone", (1, 8, 8), 10))  # a ResNet-18
    assert net.names == ("head.weight", "head.bias") == tuple(initial(net.spec, 0))
    assert (net.parameter_count, net.feature_count, net.head_bias, net.pixelwise) == (5_130, 512, True, False)
    assert len(net.frozen) > 100 and not any(value.is_meta for value in net.frozen.values())
    assert all(parameter.is_meta for parameter in net.module.parameters())
    with pytest.raises(UsageError):
        channels_of(spec())


def test_features_are_those_of_the_original_network(original, saved):
    net, x = build(spec(weights=saved("w.safetensors"))), images(4)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    normal = (x - mean[:, None, None]) / std[:, None, None]
    cut = torch.nn.Sequential(*[layer for name, layer in original.named_children() if name != "fc"])
    with torch.no_grad():
        expected = cut(normal).mean([2, 3])
        result = net.features(initial(net.spec, 0), x)
    assert torch.allclose(result, expected, rtol=1e-4, atol=1e-3)
    assert result.std() > 0.01
    assert torch.allclose(net.features({}, x[:1]), result[:1], rtol=1e-4, atol=1e-3)  # no statistics of the batch


def test_random_weights_are_a_function_of_their_own_seed():
    first, other = build(spec()), build(spec(backbone_seed=1))
    torch.manual_seed(5)
    again = build(net_spec("frozen_backbone", CIFAR, 7, {"backbone": FROZEN}))
    assert first.weights_sha256 == again.weights_sha256 != other.weights_sha256
    heads = [initial(one, 3)["head.weight"] for one in (spec(), spec(backbone_seed=1))]
    assert torch.equal(*heads)


def test_vmap_equals_a_loop_in_float64_and_leaves_the_constants(saved):
    net = build(spec(weights=saved("w.safetensors")))
    params = {name: value.double() for name, value in initial(net.spec, 0).items()}
    x, y = images(3, 2, dtype=torch.float64), torch.tensor([[0, 1], [2, 3], [4, 5]])
    digest = net.weights_sha256
    together = vmap(grad(lambda p, x, y: loss(net, p, x, y)), in_dims=(None, 0, 0))(params, x, y)
    for i in range(3):
        alone = grad(lambda p, i=i: loss(net, p, x[i], y[i]))(params)
        assert all(torch.allclose(together[n][i], alone[n], atol=1e-10) for n in params)
    del net.weights_sha256  # computed anew below
    assert net.weights_sha256 == digest
    assert {value.dtype for value in net.frozen.values()} == {torch.float32, torch.int64}


def test_every_process_on_every_machine_names_the_same_constants_alike(original, tmp_path):
    """Values by place, exact in float32: a name in a record that hung on a process's hashes would be another one."""
    state = {n: torch.full_like(value, i % 64) for i, (n, value) in enumerate(original.state_dict().items())}
    torch.save(state, tmp_path / "w.pth")
    assert build(spec(weights=str(tmp_path / "w.pth"))).weights_sha256 == PINNED


def config(**options: OptionValue) -> EvaluateConfig:
    model = {"backbone": FROZEN, **options}
    return configure(defense="none", model="frozen_backbone", model_options=model, clients=2, train=100)


def test_records_name_weights_by_their_digest_not_by_their_place(saved):
    def recorded(**options):
        configs = config(**options)
        return dict(describe(make_task(configs), configs)[1].options)

    first, second = recorded(weights=saved("a.pth")), recorded(weights=saved("b.safetensors"))
    digest = build(spec((1, 8, 8), weights=saved("a.pth"))).weights_sha256
    assert first == second == {"backbone": FROZEN, "weights": f"sha256:{digest}"}
    assert recorded()["weights"] != first["weights"] != recorded(backbone_seed=1)["weights"]


def test_a_federation_trains_and_sends_the_head_alone():
    task = make_task(config(backbone="resnet18"))
    fed = Federation(make_defense("none"), task.plan, task.shards, task.seeds)
    fed.start(task.params)
    before = fed.accuracy(task.test)
    fed.run(10)
    assert set(fed.parties.server.params) == {"head.weight", "head.bias"}
    assert fed.accuracy(task.test) > before + 0.2
    assert fed.wire.up - fed.setup_up == 10 * 2 * 4 * task.plan.net.parameter_count


class Trap:
    """What unpickling would run."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('code was run')",)


def test_files_that_hold_something_else_are_refused_and_the_last_layer_may_be_left_out(original, saved, tmp_path):
    (tmp_path / "noise.safetensors").write_bytes(b"no tensors here")
    torch.save({"conv1.0.weight": Trap()}, tmp_path / "code.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    for name in ("noise.safetensors", "code.pth", "list.pth"):
        with pytest.raises(UsageError, match="are not those of this backbone") as caught:
            build(spec(weights=str(tmp_path / name)))
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="are not those of this backbone"):
        build(spec(weights=saved("w.pth"), backbone="resnet18"))
    state = {name: value for name, value in original.state_dict().items() if not name.startswith("fc.")}
    save_file(state, tmp_path / "w.safetensors")
    assert build(spec(weights=str(tmp_path / "w.safetensors"))).feature_count == 1024, "the last layer is not needed"
