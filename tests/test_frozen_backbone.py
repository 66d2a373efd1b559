"""A frozen backbone under a trained head: real weights, constants everywhere, a record that names them."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import grad, vmap

from ppbench.base.errors import UsageError
from ppbench.base.tree import Params
from ppbench.base.vision import torchvision
from ppbench.federation.engine import Federation
from ppbench.nets.net import Net, NetSpec, Option, build, initial, net_spec
from ppbench.nets.walk import channels
from ppbench.run.choice import make_defense
from ppbench.run.config import EvaluateConfig, configure
from ppbench.run.task import describe, make_task

SMALL = "shufflenet_v2_x0_5"
SHAPE = (3, 32, 32)


def spec(shape: tuple[int, ...] = SHAPE, **options: Option) -> NetSpec:
    return net_spec("frozen_backbone", shape, 10, {"backbone": SMALL, **options})


@pytest.fixture(scope="module")
def original():
    """A torchvision network as its user trained it: with statistics of its own."""
    torch.manual_seed(1)
    network: nn.Module = torchvision().models.get_model(SMALL, weights=None)
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = None
    with torch.no_grad():
        network.train()(torch.rand(16, *SHAPE))
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


def loss(net: Net, params: Params, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(params, x), y)


def images(*lead: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(*lead, *SHAPE, generator=torch.Generator().manual_seed(0), dtype=dtype)


def test_only_the_head_is_a_parameter():
    net = build(net_spec("frozen_backbone", (1, 8, 8), 10))  # a ResNet-18
    assert net.names == ("head.weight", "head.bias") == tuple(initial(net.spec, 0))
    assert (net.parameter_count, net.feature_count, net.head_bias, net.pixelwise) == (5_130, 512, True, False)
    assert len(net.frozen) > 100
    assert all(not value.is_meta for value in net.frozen.values())
    assert all(parameter.is_meta for parameter in net.module.parameters())


def test_features_are_those_of_the_original_network(original, saved):
    net, x = build(spec(weights=saved("w.safetensors"))), images(4)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    normal = (x - mean[:, None, None]) / std[:, None, None]
    cut = torch.nn.Sequential(*[layer for name, layer in original.named_children() if name != "fc"])
    with torch.no_grad():
        expected = cut(normal).mean([2, 3])
        found = net.features(initial(net.spec, 0), x)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-3)
    assert found.std() > 0.01
    assert torch.allclose(net.features({}, x[:1]), found[:1], rtol=1e-4, atol=1e-3)  # no statistics of the batch


def test_random_weights_are_a_function_of_their_own_seed():
    first, other = build(spec()), build(spec(backbone_seed=1))
    torch.manual_seed(5)
    again = build(net_spec("frozen_backbone", SHAPE, 7, {"backbone": SMALL}))
    assert first.frozen_sha256 == again.frozen_sha256 != other.frozen_sha256
    heads = [initial(one, 3)["head.weight"] for one in (spec(), spec(backbone_seed=1))]
    assert torch.equal(*heads)


def test_vmap_equals_a_loop_in_float64_and_leaves_the_constants(saved):
    net = build(spec(weights=saved("w.safetensors")))
    params = {name: value.double() for name, value in initial(net.spec, 0).items()}
    x, y = images(3, 2, dtype=torch.float64), torch.tensor([[0, 1], [2, 3], [4, 5]])
    digest = net.frozen_sha256
    together = vmap(grad(lambda p, x, y: loss(net, p, x, y)), in_dims=(None, 0, 0))(params, x, y)
    for i in range(3):
        alone = grad(lambda p, i=i: loss(net, p, x[i], y[i]))(params)
        assert all(torch.allclose(together[n][i], alone[n], atol=1e-10) for n in params)
    del net.frozen_sha256  # computed anew below
    assert net.frozen_sha256 == digest
    assert {value.dtype for value in net.frozen.values()} == {torch.float32, torch.int64}


def test_another_process_builds_the_same_constants(saved):
    asked = spec(weights=saved("w.pth"))
    code = (
        "from ppbench.nets.net import NetSpec, build\n"
        f"print(build(NetSpec({asked.model!r}, {asked.shape!r}, 10, {asked.options!r})).frozen_sha256)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == build(asked).frozen_sha256


def config(**options: Option) -> EvaluateConfig:
    model = {"backbone": SMALL, **options}
    return configure(defense="none", model="frozen_backbone", model_options=model, clients=2, train=100)


def test_records_name_weights_by_their_digest_not_by_their_place(saved):
    def recorded(**options):
        asked = config(**options)
        return dict(describe(make_task(asked), asked)[1].options)

    first, second = recorded(weights=saved("a.pth")), recorded(weights=saved("b.safetensors"))
    assert (
        first
        == second
        == {"backbone": SMALL, "weights": f"sha256:{build(spec((1, 8, 8), weights=saved('a.pth'))).frozen_sha256}"}
    )
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


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        (SHAPE, {"backbone": "resnet"}, "none of torchvision.models"),
        (SHAPE, {"backbone": "squeezenet1_0"}, "does not end in a linear layer"),
        (SHAPE, {"backbone": "vit_b_16"}, "cannot take images of 32x32"),
        (SHAPE, {"weights": "/nowhere/w.pth"}, "there is no file of weights /nowhere/w.pth"),
        (SHAPE, {"backbone_seed": -1}, "backbone_seed must be a whole number"),
        ((4, 32, 32), {}, "1 or 3 channels"),
        ((43,), {}, "takes images"),
    ],
)
def test_bad_options_are_refused(shape, options, words):
    with pytest.raises(UsageError, match=words) as caught:
        build(spec(shape, **options))
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError):
        channels(spec())  # of a frozen network are not scaled


class Trap:
    """What unpickling would run."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('code was run')",)


def test_files_that_hold_something_else_are_refused(saved, tmp_path):
    (tmp_path / "noise.safetensors").write_bytes(b"no tensors here")
    torch.save({"conv1.0.weight": Trap()}, tmp_path / "code.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    for name in ("noise.safetensors", "code.pth", "list.pth"):
        with pytest.raises(UsageError, match="are not those of this backbone") as caught:
            build(spec(weights=str(tmp_path / name)))
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="are not those of this backbone"):
        build(spec(weights=saved("w.pth"), backbone="resnet18"))


def test_a_state_without_its_last_layer_will_do(original, tmp_path):
    state = {name: value for name, value in original.state_dict().items() if not name.startswith("fc.")}
    save_file(state, tmp_path / "w.safetensors")
    assert build(spec(weights=str(tmp_path / "w.safetensors"))).feature_count == 1024
