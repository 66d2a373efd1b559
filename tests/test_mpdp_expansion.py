"""MP-DP's expanded network: it computes what the original does, its scales have their laws, and folding undoes it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from protocols import examples, relative, true_gradient, weights
from scipy.stats import kstest
from torch import Tensor, nn

from ppbench.base.autodiff import gradient
from ppbench.base.errors import UsageError
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params
from ppbench.defenses.mpdp.expansion import Expansion, expand, expanded, fold
from ppbench.defenses.mpdp.protocol import MPCDP
from ppbench.defenses.pbpfl.perturbation import multiply
from ppbench.federation.contract import Context, Server
from ppbench.federation.plan import Local, Plan
from ppbench.federation.wire import SERVER
from ppbench.nets.channels import channels_of
from ppbench.nets.net import Classifier, Net, NetSpec, net_spec

MLP5 = net_spec("mlp", (1, 8, 8), 10, {"hidden": 32, "layers": 5, "bias": False})
TINY = net_spec("mlp", (4,), 2, {"hidden": "3,3", "bias": False})
CNN = net_spec("cnn", (3, 8, 8), 10, {"widths": "6,8", "hidden": "12", "bias": False})
DENSE = net_spec("densenet", (3, 8, 8), 10, {"growth": 4, "layers": 2, "bias": False})
RESNET = net_spec("resnet20", (3, 32, 32), 10, {"head_bias": False})
RESNET_B = net_spec("resnet20", (3, 32, 32), 10, {"head_bias": False, "shortcut": "B"})


def plan_of(spec: NetSpec) -> Plan:
    return Plan(spec, 4, Local("gradient", batch=24), loss="squared")


def perturbed(expansion: Expansion, params: Params, seed: int = 0) -> tuple[Params, Params]:
    """Return the expanded network's weights under drawn scales, and the multipliers."""
    multiplier = expansion.channels.multipliers(expansion.laws.draw(Seeds(seed).secret("party")))
    return multiply(expansion.full(params), multiplier, torch.float64), multiplier


@pytest.mark.parametrize("spec", [MLP5, CNN, DENSE, RESNET, RESNET_B], ids=lambda s: s.model)
def test_the_expanded_network_is_the_original_and_so_are_its_gradients(spec):
    plan, params, data = plan_of(spec), weights(spec), examples(spec, 3)
    expansion, x, y = expanded(spec), data.x.double(), data.y.double()
    assert set(expansion.net.names) == set(plan.net.names) | set(expansion.transitional)
    odd, transitional = expansion.split(expansion.full(params))
    torch.testing.assert_close(expansion.net(expansion.full(params), x), plan.net(params, x), rtol=0, atol=1e-14)
    gradients = gradient(lambda p: plan.example_loss(expansion.net({**p, **transitional}, x), y).mean(), odd)
    assert relative({n: gradients[n] for n in params}, true_gradient(plan, params, data)) < 1e-14  # U3


@pytest.mark.parametrize("spec", [MLP5, CNN, DENSE, RESNET, RESNET_B], ids=lambda s: s.model)
def test_scales_cancel_and_transitional_layers_fold_away(spec):
    plan, params, x = plan_of(spec), weights(spec), examples(spec, 3).x.double()
    expansion, logits = expanded(spec), plan.net(params, x)
    for seed in range(2):
        sent, _ = perturbed(expansion, params, seed)
        torch.testing.assert_close(expansion.net(sent, x), logits, rtol=1e-12, atol=1e-13)
        folded = fold(expansion, sent)
        assert list(folded) == list(params) and all(folded[n].shape == v.shape for n, v in params.items())
        assert relative(folded, params) > 0.1
        torch.testing.assert_close(plan.net(folded, x), logits, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("spec", [MLP5, CNN, RESNET], ids=lambda s: s.model)
def test_folded_weights_are_pbpfls_with_the_same_first_scales(spec):
    """C2: what is left after folding is a perturbation of PBPFL's form, r^(1) and all (1e-12)."""
    params, expansion, plain = weights(spec), expanded(spec), channels_of(spec)
    sent, multiplier = perturbed(expansion, params, 5)
    folded = fold(expansion, sent)
    first = next(iter(params))
    assert torch.equal(folded[first], multiplier[first] * params[first])
    ratio = {n: (folded[n] / v).nan_to_num(1.0) for n, v in params.items()}
    result = torch.ones(plain.count + 1, dtype=torch.float64)
    for name, factor in plain.factors.items():  # a scale is what its rows are multiplied by, columns taken out
        if factor.out is not None and factor.inp is not None:
            columns = ratio[name].flatten(2).mean(2) if ratio[name].dim() > 2 else ratio[name]
            result[torch.from_numpy(factor.out)] = columns[:, 0] * result[int(factor.inp[0])]
    for name, value in plain.multipliers(result[1:]).items():
        torch.testing.assert_close(folded[name], value * params[name], rtol=1e-12, atol=0)


def transitional_channels(expansion: Expansion) -> int:
    """q, the number of transitional channels."""
    return sum(torch.Size(shape).numel() for shape in expansion.transitional.values())


def test_transitional_channels_of_resnets_are_counted():
    assert transitional_channels(expanded(RESNET)) == 976  # 688 behind ReLUs, 288 on shortcuts
    assert transitional_channels(expanded(RESNET_B)) == 976 - 16 - 32  # convolutions on two shortcuts
    assert plan_of(RESNET).net.parameter_count == 268_336
    hundred = net_spec("resnet56", (3, 32, 32), 100, {"head_bias": False})
    assert plan_of(hundred).net.parameter_count == 854_704


@pytest.mark.nightly
@pytest.mark.parametrize("spec", [TINY, MLP5, CNN, DENSE, RESNET], ids=lambda s: f"{s.model}-{s.shape}")
def test_every_weights_multiplier_has_the_law_whose_noise_is_gaussian(spec):
    """E R^2 = 3/2, and |DN*(1)| in law: alone in the first layer and the head, a product of two elsewhere."""
    expansion, secret = expanded(spec), Seeds(0).secret("party")
    count = 400 if expansion.channels.count < 500 else 20
    draws = [expansion.channels.multipliers(expansion.laws.draw(secret)) for _ in range(count)]
    for name in plan_of(spec).net.names:
        values = torch.stack([d[name].flatten(2)[..., 0] if d[name].dim() > 2 else d[name] for d in draws])
        assert bool((values > 0).all())
        # Entries of a row share r, so only the diagonal is independent. R^2 has the law Gamma(3/2).
        entries = values.diagonal(dim1=1, dim2=2).flatten().square()
        assert kstest(entries.numpy(), "gamma", args=(1.5,)).pvalue > 1e-7, (
            name
        )  # 4e-5 over ten seeds, of some 500 tests


class PreActivation(nn.Module):
    """A block whose shortcut leaves before the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(torch.relu(self.conv1(x.relu())))


class Calls(nn.Module):
    """Activations and additions as functions and methods; a shortcut that pools."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.Conv2d(4, 4, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.leaky_relu(self.first(x), 0.1)
        h = torch.add(nn.functional.max_pool2d(self.second(h), 2), nn.functional.avg_pool2d(h, 2))
        return h.relu().mean((2, 3))


def wrapped(features: nn.Module, width: int, bias: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(NetSpec("handmade", (3, 8, 8), 5), Classifier(features, nn.Linear(width, 5, bias=bias)))


def random_weights(net: Net) -> Params:
    generator = torch.Generator().manual_seed(0)
    shapes = {n: p.shape for n, p in net.module.named_parameters()}
    return {n: torch.randn(s, generator=generator, dtype=torch.float64) * 0.5 for n, s in shapes.items()}


def pre_activations() -> nn.Module:
    stem, tail = nn.Conv2d(3, 4, 3, padding=1, bias=False), (nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(stem, PreActivation(), PreActivation(), *tail)


@pytest.mark.parametrize("make", [pre_activations, Calls])
def test_shortcuts_of_other_shapes_are_found(make):
    net = wrapped(make(), 4)
    params, x = random_weights(net), torch.rand(3, 3, 8, 8, dtype=torch.float64)
    expansion = expand(net)
    sent, _ = perturbed(expansion, params)
    for outputs in (expansion.net(sent, x), net(fold(expansion, sent), x)):
        torch.testing.assert_close(outputs, net(params, x), rtol=1e-11, atol=1e-12)


def chain(*parts: nn.Module) -> nn.Module:
    return nn.Sequential(*parts, nn.Flatten())


def conv() -> nn.Module:
    return nn.Conv2d(3, 4, 3, bias=False)


@pytest.mark.parametrize(
    ("features", "width", "sentence"),
    [
        (lambda: chain(nn.Flatten(), nn.Linear(192, 4, bias=False), nn.Linear(4, 4, bias=False)), 4, "activation"),
        (nn.Flatten, 192, "a hidden layer before it"),
        (lambda: chain(nn.Flatten(), nn.Linear(192, 4), nn.ReLU()), 4, "features.1.bias.*model.bias=false"),
        (lambda: chain(conv(), nn.Tanh()), 144, "Tanh.*use ReLU"),
        (lambda: chain(conv(), nn.BatchNorm2d(4), nn.ReLU()), 144, "features.1.*BatchNorm2d.*without norms"),
    ],
)
def test_networks_that_cannot_be_perturbed_are_refused_by_name(features, width, sentence):
    with pytest.raises(UsageError, match=sentence) as refused:
        expand(wrapped(features(), width))
    assert str(refused.value).count(". ") == 0 and str(refused.value).endswith(".")


@settings(max_examples=25)
@given(widths=st.lists(st.integers(1, 6), min_size=1, max_size=5), seed=st.integers(0, 1000))
def test_random_chains_are_perturbed_exactly(widths, seed):
    spec = net_spec("mlp", (5,), 3, {"hidden": ",".join(map(str, widths)), "bias": False})
    plan, params, data, defense = plan_of(spec), weights(spec, seed), examples(spec, 4, seed), MPCDP(kappa=1.0)
    ctx = Context(plan, 1, "real", SERVER, torch.Generator(), Seeds(seed).secret("party"))
    server, message = defense.broadcast(ctx, Server(params, (), torch.zeros(4, dtype=torch.int64), ()))
    truth = true_gradient(plan, params, data)
    if not any(bool(v.any()) for v in truth.values()):
        return  # all units are off
    result = defense.compute(plan, defense.prepare(ctx, (), message, data))
    assert relative(defense.recover(plan, server, result), truth) < 1e-11
