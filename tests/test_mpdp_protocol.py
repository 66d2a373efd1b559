"""MP-DP's protocol and its variants: exact where the mathematics is, noisy as its laws say, and wrong input refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest
from torch import Tensor, nn

from ppbench.base.autodiff import gradient
from ppbench.base.errors import ProtocolError, UsageError
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params, leaves, nbytes
from ppbench.defenses.mpdp.accounting import Sigmas, exact_theta
from ppbench.defenses.mpdp.baselines import MPCDP, MPDPNaive
from ppbench.defenses.mpdp.expansion import Expansion, expand, expanded, fold
from ppbench.defenses.mpdp.hardened import MPDPH
from ppbench.defenses.mpdp.known_scales import delta_given_R
from ppbench.defenses.mpdp.model_perturbation import ModelPerturbation, Secrets
from ppbench.defenses.mpdp.protocol import MPDP
from ppbench.defenses.none import NoDefense
from ppbench.defenses.pbpfl.perturbation import Perturbed, Released, Surrogates, multiply, outputs
from ppbench.federation import secagg
from ppbench.federation.client_map import client_map
from ppbench.federation.contract import Context, Server
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import at_truth
from ppbench.federation.optim import Opt
from ppbench.federation.plan import Data, Local, Plan
from ppbench.federation.wire import SERVER, Slot
from ppbench.nets.net import Classifier, Net, NetSpec, initial, net_spec
from ppbench.nets.walk import channels

VARIANTS = [MPDP, MPDPNaive, MPCDP, MPDPH]
MLP5 = net_spec("mlp", (1, 8, 8), 10, {"hidden": 32, "layers": 5, "bias": False})
TINY = net_spec("mlp", (4,), 2, {"hidden": "3,3", "bias": False})
CNN = net_spec("cnn", (3, 8, 8), 10, {"widths": "6,8", "hidden": "12", "bias": False})
DENSE = net_spec("densenet", (3, 8, 8), 10, {"growth": 4, "layers": 2, "bias": False})
RESNET = net_spec("resnet20", (3, 32, 32), 10, {"head_bias": False})
RESNET_B = net_spec("resnet20", (3, 32, 32), 10, {"head_bias": False, "shortcut": "B"})
CLIENTS = 4


def plan_of(spec: NetSpec = MLP5, clients: int = CLIENTS, lr: float = 0.1, batch: int = 24) -> Plan:
    opt = Opt("sgd", lr)
    return Plan(spec, clients, Local("gradient", batch=batch, opt=opt), loss="squared", server_opt=opt)


def context(plan: Plan, party: int = SERVER, seed: int = 0, session: str = "real", round_: int = 1) -> Context:
    return Context(plan, round_, session, party, torch.Generator().manual_seed(seed))


def weights(spec: NetSpec, seed: int = 1) -> Params:
    return {n: value.double() for n, value in initial(spec, seed).items()}


def examples(spec: NetSpec, count: int, seed: int = 0) -> Data:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, *spec.shape, generator=generator)
    return Data(x, torch.eye(spec.classes)[torch.randint(spec.classes, (count,), generator=generator)])


def true_gradient(plan: Plan, params: Params, data: Data) -> Params:
    ones = torch.ones(len(data.x), dtype=torch.float64)
    return gradient(lambda p: plan.objective(p, data.x.double(), data.y.double(), ones), params)


def relative(found: Params, truth: Params) -> float:
    assert list(found) == list(truth)
    gap = sum(float((found[n] - v).detach().square().sum()) for n, v in truth.items())
    return math.sqrt(gap / sum(float(v.detach().square().sum()) for v in truth.values()))


def served(defense: ModelPerturbation, plan: Plan, params: Params, seed: int = 0) -> tuple[Server, Perturbed]:
    """Return the server's state and its message of a round without set-up."""
    server = Server(params, (), torch.zeros(plan.clients, dtype=torch.int64), ())
    return defense.broadcast(context(plan, seed=seed), server)


def computed(defense: ModelPerturbation, plan: Plan, message: Perturbed, data: Data) -> Surrogates:
    job = defense.prepare(context(plan, 0), (), message, data)
    with torch.no_grad():
        return defense.compute(plan, job)


@pytest.fixture
def shards(digits: Data) -> dict[int, Data]:
    return {c: Data(digits.x[c * 24 :][:24].clone(), digits.y[c * 24 :][:24].clone()) for c in range(CLIENTS)}


@pytest.fixture
def run(shards: dict[int, Data]) -> Callable[..., Federation]:
    def make(defense: Any, plan: Plan | None = None, seed: int = 0, **options: Any) -> Federation:
        plan = plan_of() if plan is None else plan
        federation = Federation(defense, plan, shards, Seeds(seed), **options)
        federation.start(initial(plan.spec, 1))
        return federation

    return make


@dataclass(frozen=True)
class Fixed(MPDP):
    """MP-DP with sigmas of the test's choice."""

    eta: float = 0.0
    pairs: float = 0.0

    def sigmas(self, plan: Plan) -> Sigmas:
        return Sigmas(self.eta, self.pairs, 1.0, False, ())


@dataclass(frozen=True)
class FixedH(MPDPH):
    """The hardened variant with sigmas of the test's choice."""

    eta: float = 0.0
    pairs: float = 0.0

    def sigmas(self, plan: Plan) -> Sigmas:
        return Sigmas(self.eta, self.pairs, 1.0, False, ())


# -- the expanded network ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("spec", [MLP5, CNN, DENSE, RESNET, RESNET_B], ids=lambda s: s.model)
def test_the_expanded_network_is_the_original_and_so_are_its_gradients(spec):
    plan, params, data = plan_of(spec), weights(spec), examples(spec, 3)
    expansion = expanded(spec)
    assert set(expansion.net.names) == set(plan.net.names) | set(expansion.transitional)
    odd, transitional = expansion.split(expansion.full(params))
    x, y = data.x.double(), data.y.double()
    torch.testing.assert_close(expansion.net(expansion.full(params), x), plan.net(params, x), rtol=0, atol=1e-14)
    found = gradient(lambda p: plan.example_loss(expansion.net({**p, **transitional}, x), y).mean(), odd)
    assert relative({n: found[n] for n in params}, true_gradient(plan, params, data)) < 1e-14  # U3


@pytest.mark.parametrize("spec", [MLP5, CNN, DENSE, RESNET, RESNET_B], ids=lambda s: s.model)
def test_scales_cancel_and_transitional_layers_fold_away(spec):
    plan, params, x = plan_of(spec), weights(spec), examples(spec, 3).x.double()
    expansion = expanded(spec)
    for seed in range(3):
        scales = expansion.laws.draw(torch.Generator().manual_seed(seed))
        perturbed = multiply(expansion.full(params), expansion.channels.multipliers(scales), torch.float64)
        logits = plan.net(params, x)
        torch.testing.assert_close(expansion.net(perturbed, x), logits, rtol=1e-12, atol=1e-13)
        folded = fold(expansion, perturbed)
        assert list(folded) == list(params) and all(folded[n].shape == v.shape for n, v in params.items())
        assert relative(folded, params) > 0.1
        torch.testing.assert_close(plan.net(folded, x), logits, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("spec", [MLP5, CNN, RESNET], ids=lambda s: s.model)
def test_folded_weights_are_pbpfls_with_the_same_first_scales(spec):
    """C2: what is left after folding is a perturbation of PBPFL's form, r^(1) and all (1e-12)."""
    params, expansion, plain = weights(spec), expanded(spec), channels(spec)
    scales = expansion.laws.draw(torch.Generator().manual_seed(5))
    multiplier = expansion.channels.multipliers(scales)
    folded = fold(expansion, multiply(expansion.full(params), multiplier, torch.float64))
    first = next(iter(params))
    assert torch.equal(folded[first], multiplier[first] * params[first])
    ratio = {n: (folded[n] / v).nan_to_num(1.0) for n, v in params.items()}
    found = torch.ones(plain.count + 1, dtype=torch.float64)
    for name, factor in plain.factors.items():  # a scale is what its rows are multiplied by, columns taken out
        if factor.out is not None and factor.inp is not None:
            columns = ratio[name].flatten(2).mean(2) if ratio[name].dim() > 2 else ratio[name]
            found[torch.from_numpy(factor.out)] = columns[:, 0] * found[int(factor.inp[0])]
    for name, value in plain.multipliers(found[1:]).items():
        torch.testing.assert_close(folded[name], value * params[name], rtol=1e-12, atol=0)


def test_a_mlps_folded_scales_are_r():
    """Folding an MLP gives PBPFL's weights with MP-DP's own scales r^(l); the s are gone."""
    spec, params = TINY, weights(TINY)
    expansion = expanded(spec)
    scales = expansion.laws.draw(torch.Generator().manual_seed(2))
    r = scales[torch.from_numpy(~expansion.laws.inverse)]
    folded = fold(expansion, multiply(expansion.full(params), expansion.channels.multipliers(scales), torch.float64))
    for name, value in channels(spec).multipliers(r).items():
        torch.testing.assert_close(folded[name], value * params[name], rtol=1e-12, atol=0)


def channels_of(expansion: Expansion) -> int:
    """q, the number of transitional channels."""
    return sum(torch.Size(shape).numel() for shape in expansion.transitional.values())


def test_transitional_channels_of_resnets_are_counted():
    assert channels_of(expanded(RESNET)) == 976  # 688 behind ReLUs, 288 on shortcuts
    assert channels_of(expanded(RESNET_B)) == 976 - 16 - 32  # convolutions on two shortcuts
    assert plan_of(RESNET).net.parameter_count == 268_336
    hundred = net_spec("resnet56", (3, 32, 32), 100, {"head_bias": False})
    assert plan_of(hundred).net.parameter_count == 854_704


@pytest.mark.parametrize("spec", [TINY, MLP5, CNN, DENSE, RESNET], ids=lambda s: f"{s.model}-{s.shape}")
def test_every_weights_multiplier_has_the_law_whose_noise_is_gaussian(spec):
    """E R^2 = 3/2, and |DN*(1)| in law: alone in the first layer and the head, a product of two elsewhere."""
    expansion, generator = expanded(spec), torch.Generator().manual_seed(0)
    count = 400 if expansion.channels.count < 500 else 20
    draws = [expansion.channels.multipliers(expansion.laws.draw(generator)) for _ in range(count)]
    for name in plan_of(spec).net.names:
        values = torch.stack([d[name].flatten(2)[..., 0] if d[name].dim() > 2 else d[name] for d in draws])
        assert bool((values > 0).all())
        # Entries of a row share r, so only the diagonal is independent. R^2 has the law Gamma(3/2).
        entries = values.diagonal(dim1=1, dim2=2).flatten().square()
        assert kstest(entries.numpy(), "gamma", args=(1.5,)).pvalue > 1e-4, name


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


class Raw(nn.Module):
    """A shortcut from the input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x)


def wrapped(features: nn.Module, width: int, bias: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(NetSpec("handmade", (3, 8, 8), 5), Classifier(features, nn.Linear(width, 5, bias=bias)))


def random_weights(net: Net) -> Params:
    generator = torch.Generator().manual_seed(0)
    shapes = {n: p.shape for n, p in net.module.named_parameters()}
    return {n: torch.randn(s, generator=generator, dtype=torch.float64) * 0.5 for n, s in shapes.items()}


@pytest.mark.parametrize("kind", ["pre-activation", "calls"])
def test_shortcuts_of_other_shapes_are_found(kind):
    if kind == "calls":
        net = wrapped(Calls(), 4)
    else:
        stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        tail = [nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        net = wrapped(nn.Sequential(stem, PreActivation(), PreActivation(), *tail), 4)
    params, x = random_weights(net), torch.rand(3, 3, 8, 8, dtype=torch.float64)
    expansion = expand(net)
    perturbed = multiply(
        expansion.full(params),
        expansion.channels.multipliers(expansion.laws.draw(torch.Generator().manual_seed(0))),
        torch.float64,
    )
    torch.testing.assert_close(expansion.net(perturbed, x), net(params, x), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(net(fold(expansion, perturbed), x), net(params, x), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("features", "width", "sentence"),
    [
        (
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 4, bias=False), nn.Linear(4, 4, bias=False)),
            4,
            "activation",
        ),
        (lambda: nn.Flatten(), 192, "a hidden layer before it"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.ReLU()), 4, "features.1.bias.*model.bias=false"),
        (lambda: nn.Sequential(Raw(), nn.ReLU(), nn.Flatten()), 192, "adds the unscaled input"),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.Tanh(), nn.Flatten()), 144, "Tanh.*use ReLU"),
        (
            lambda: nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()),
            144,
            "features.1.*BatchNorm2d.*without norms",
        ),
    ],
)
def test_networks_that_cannot_be_perturbed_are_refused_by_name(features, width, sentence):
    with pytest.raises(UsageError, match=sentence) as refused:
        expand(wrapped(features(), width))
    assert str(refused.value).count(". ") == 0 and str(refused.value).endswith(".")


@settings(max_examples=25, deadline=None)
@given(widths=st.lists(st.integers(1, 6), min_size=1, max_size=5), seed=st.integers(0, 1000))
def test_random_chains_are_perturbed_exactly(widths, seed):
    spec = net_spec("mlp", (5,), 3, {"hidden": ",".join(map(str, widths)), "bias": False})
    plan, params, data = plan_of(spec), weights(spec, seed), examples(spec, 4, seed)
    defense = Fixed(kappa=1.0)
    server, message = served(defense, plan, params, seed)
    truth = true_gradient(plan, params, data)
    if not any(bool(v.any()) for v in truth.values()):
        return  # all units are off
    assert relative(defense.recover(plan, server, computed(defense, plan, message, data)), truth) < 1e-11


# -- recovery ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("gamma", ["vector", "scalar"])
@pytest.mark.parametrize("kappa", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_recovery_is_exact_without_noise(gamma, kappa, precision):
    """U2: relative error up to 2e-14 (float64) and 2e-6 (float32) times kappa^2."""
    plan, params, data = plan_of(), weights(MLP5), examples(MLP5, 8)
    defense = Fixed(gamma=gamma, kappa=kappa, precision=precision, bound=0.7)
    server, message = served(defense, plan, params)
    assert all(leaf.dtype == defense.dtype for leaf in leaves(message))
    upload = defense.upload(context(plan, 0), no_neighbors(), computed(defense, plan, message, data))
    unit = 2e-14 if precision == "float64" else 2e-6
    error = relative(defense.recover(plan, server, upload), true_gradient(plan, params, data))
    assert error < unit * kappa**2


@pytest.mark.parametrize(("kappa", "precision"), [(1.0, "float64"), (100.0, "float64"), (10.0, "float32")])
def test_recovery_is_exact_on_resnet20_and_bytes_are_the_papers(kappa, precision):
    plan, params, data = plan_of(RESNET), weights(RESNET), examples(RESNET, 2)
    defense = MPCDP(kappa=kappa, precision=precision)
    server, message = served(defense, plan, params)
    upload = defense.upload(context(plan, 0), (), computed(defense, plan, message, data))
    size = 2 if precision == "float64" else 1
    assert nbytes(message) == size * 1_077_248
    assert nbytes(upload) == size * 12_880_128
    error = relative(defense.recover(plan, server, upload), true_gradient(plan, params, data))
    assert error < (2e-14 if precision == "float64" else 2e-6) * kappa**2


def no_neighbors() -> secagg.Keys:
    none = torch.zeros(0, dtype=torch.uint8)
    return secagg.Keys(none, none, torch.zeros(CLIENTS, CLIENTS, dtype=torch.bool), none.long())


@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("gamma", ["vector", "scalar"])
def test_bytes_of_a_round(gamma, precision, run, shards):
    """Section 5: 4(p + q) down and 4(C + 2)p up in float32; r_a is sent where gamma is a scalar."""
    federation = run(MPDP(gamma=gamma, precision=precision))
    federation.run(1)
    p, q, size = (
        federation.plan.net.parameter_count,
        channels_of(expanded(MLP5)),
        4 if precision == "float32" else 8,
    )
    directions = 10 if gamma == "vector" else 1
    sent = 0 if gamma == "vector" else 10
    assert (p, q) == (64 * 32 + 3 * 32 * 32 + 320, 128)
    assert federation.wire.down - federation.setup_down == CLIENTS * size * (p + q + sent)
    assert federation.wire.up - federation.setup_up == CLIENTS * size * (directions + 2) * p
    assert federation.setup_up == CLIENTS * (8 + 32)


def test_masked_logits_are_the_logits_plus_alpha_r_and_delivery_is_exact():
    plan, params, x = plan_of(CNN), weights(CNN), examples(CNN, 5).x.double()
    defense = MPDP(kappa=50.0)
    server, message = served(defense, plan, params)
    expansion, logits = expanded(CNN), plan.net(params, x)
    _, alpha = outputs(expansion.net, message.params, x, masked_bias=False)
    expected = logits + alpha[:, None] * server.own.mask
    torch.testing.assert_close(defense.predict(plan, message, x), expected, rtol=1e-11, atol=1e-12)
    size = float((expected - logits).square().mean().sqrt() / logits.square().mean().sqrt())
    assert 10 < size < 250  # kappa, up to the inputs on which it is measured
    released = defense.deliver(context(plan, seed=3), server)
    assert isinstance(released, Released)
    torch.testing.assert_close(defense.predict(plan, released, x), logits, rtol=1e-12, atol=1e-13)
    assert relative({n: released.params[n] for n in params}, params) > 0.1


def test_gamma_is_positive_and_negative_by_class():
    plan, params = plan_of(), weights(MLP5)
    signs = torch.stack([served(MPDP(), plan, params, seed)[0].own.mask.sign() for seed in range(40)])
    assert 0.2 < float((signs > 0).double().mean()) < 0.8
    assert float(signs.std(0).min()) > 0.3


# -- noise -------------------------------------------------------------------------------------------------------
def agreed(graph: Tensor, plan: Plan) -> list[secagg.Keys]:
    """Return every client's keys after set-up on `graph`."""
    keys = [secagg.new_keys(context(plan, c, seed=100 + c, round_=0)) for c in range(len(graph))]
    public = torch.stack([secagg.announce(k.private, 1).public for k in keys])
    roster = secagg.Roster(torch.ones(len(graph), dtype=torch.int64), public, graph)
    return [secagg.agree(k, c, roster) for c, k in enumerate(keys)]


def test_noise_of_a_pair_is_bitwise_opposite_at_its_ends():
    plan, edge = plan_of(clients=2), torch.tensor([[False, True], [True, False]])
    first, second = agreed(edge, plan)
    a = secagg.pair_noise(first, context(plan, 0, seed=1), "delta", 50_000)
    b = secagg.pair_noise(second, context(plan, 1, seed=2), "delta", 50_000)
    assert torch.equal(a, -b)
    assert kstest(a.numpy(), "uniform", args=(-1, 2)).pvalue > 1e-3
    assert float(a.abs().min()) > 0 and float(a.abs().max()) < 1
    words = torch.tensor([-(2**63), 2**63 - 1, 0, -1])
    assert secagg.unit(words).tolist() == [-1 + 2**-53, 1 - 2**-53, 2**-53, -(2**-53)]


def test_noise_differs_by_session_round_and_pair():
    plan = plan_of(clients=3)
    keys = agreed(~torch.eye(3, dtype=torch.bool), plan)
    noises = [
        secagg.pair_noise(keys[0], context(plan, 0, session="real", round_=1), "delta", 1000),
        secagg.pair_noise(keys[0], context(plan, 0, session="probe-0", round_=1), "delta", 1000),
        secagg.pair_noise(keys[0], context(plan, 0, session="real", round_=2), "delta", 1000),
        secagg.pair_noise(keys[1], context(plan, 1, session="real", round_=1), "delta", 1000),
        secagg.pair_noise(keys[0], context(plan, 0, session="real", round_=1), "sigma", 1000),
    ]
    for i, a in enumerate(noises):
        for b in noises[:i]:
            # Clients 0 and 1 share the noise of their own pair, with opposite signs; nothing else is shared.
            limit = 0.6 if {i} == {3} and b is noises[0] else 0.15
            assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < limit


def test_noise_of_pairs_alone_leaves_the_mean_as_it_is(run):
    """U4, at 1e-12: with sigma_eta = 0 the step is that of a noiseless round, while each upload is drowned."""
    quiet, noisy = run(Fixed(gamma="scalar")), run(Fixed(gamma="scalar", pairs=5.0))
    for federation in (quiet, noisy):
        federation.run(2)
    assert relative(noisy.parties.server.params, quiet.parties.server.params) < 1e-6  # weights are float32
    plan, params, data = plan_of(), weights(MLP5), examples(MLP5, 8)
    keys = agreed(~torch.eye(CLIENTS, dtype=torch.bool), plan)
    steps = []
    for defense in (Fixed(), Fixed(pairs=5.0)):
        server, message = served(defense, plan, params)
        found = computed(defense, plan, message, data)
        uploads = [defense.upload(context(plan, c, seed=c), keys[c], found) for c in range(CLIENTS)]
        steps.append(defense.recover(plan, server, defense.mean(uploads)))
        single = relative(defense.recover(plan, server, uploads[0]), true_gradient(plan, params, data))
        assert single > 10 if defense.pairs else single < 1e-10
    assert relative(steps[1], steps[0]) < 1e-12 * 100  # the mask, kappa = 10, amplifies rounding


def test_a_round_without_noise_is_fedsgd(run):
    exact, plain = run(Fixed(bound=3.0)), run(NoDefense())
    for federation in (exact, plain):
        federation.run(5)
    assert relative(exact.parties.server.params, plain.parties.server.params) < 1e-5  # float32 weights


def recovered_noise(defense: ModelPerturbation, plan: Plan, params: Params, rounds: int) -> tuple[Tensor, Tensor]:
    """Return (one client's, the mean's) recovered noise [rounds, P], every round with fresh scales.

    A gradient of zero is uploaded, so that what is recovered is noise alone.
    """
    keys = agreed(~torch.eye(plan.clients, dtype=torch.bool), plan)
    zero = {n: torch.zeros_like(v) for n, v in params.items()}
    nothing = Surrogates(zero, {n: v[None] for n, v in zero.items()}, zero)
    empty = torch.zeros(1, dtype=torch.float64)
    ones, means = [], []
    generator = torch.Generator().manual_seed(0)
    for number in range(rounds):
        ctx = Context(plan, number, "real", SERVER, generator)
        own = Secrets(defense.scales(ctx), empty, empty, torch.zeros(0, 0))
        server = Server(params, (), torch.zeros(0), own)
        uploads = [defense.upload(replace(ctx, party=c), keys[c], nothing) for c in range(plan.clients)]
        for found, kept in ((uploads[0], ones), (defense.mean(uploads), means)):
            kept.append(torch.cat([v.flatten() for v in defense.recover(plan, server, found).values()]))
    return torch.stack(ones), torch.stack(means)


def test_recovered_noise_is_gaussian_coordinate_by_coordinate_and_its_mean_has_a_kth_of_the_variance():
    """U5 with 2,000 draws of R; Theorem 5 with K-S; S4: the mean's tails are heavier than a Gaussian's."""
    plan, params = plan_of(TINY), weights(TINY)
    defense = Fixed(eta=2.0, pairs=0.0, gamma="scalar", bound=1.5)
    one, mean = recovered_noise(defense, plan, params, 2000)
    ratio = float(mean.square().mean()) * plan.clients / (2.0 * 1.5) ** 2
    assert 0.95 < ratio < 1.05
    for column in (0, 5, 14, 20, 22, 26):  # first layer, hidden layer, head
        assert kstest(one[:, column].numpy(), "norm", args=(0, 3.0)).pvalue > 1e-3
    assert 4.0 < float((mean**4).mean() / mean.square().mean() ** 2) < 5.2  # 5 - 2/K = 4.5, Gaussian 3
    law = defense.noise(plan)
    assert law is not None and law.std == pytest.approx(3.0)
    assert float(one.square().mean()) == pytest.approx(law.std**2, rel=0.07)


def test_naive_noise_has_another_variance_in_every_layer():
    plan, params = plan_of(TINY), weights(TINY)
    defense = MPDPNaive(gamma="scalar")
    one, mean = recovered_noise(defense, plan, params, 1000)
    layers = [v / defense.sigma() ** 2 for v in one.square().split([12, 9, 6], dim=1)]
    # E r^2 = 7/4 and E r^-2 = 1 for U(.5, 2): rows, rows over columns, columns.
    for found, expected in zip(layers, (1.75, 1.75, 1.0), strict=True):
        assert float(found.mean()) == pytest.approx(expected, rel=0.1)
    assert float(mean.square().mean() / one.square().mean()) == pytest.approx(1 / plan.clients, rel=0.1)


def test_given_the_scales_noise_is_bounded_and_its_support_gives_shifts_away():
    """U6: |R o eta| <= sqrt(2) sigma R, and a look at the support alone tells a shift as often as S2's formula says."""
    plan, params, sigma = plan_of(TINY), weights(TINY), 1.3
    defense = Fixed(eta=sigma, gamma="scalar")
    scale = torch.cat([v.flatten() for v in defense.multipliers(plan, served(defense, plan, params)[0]).values()])
    noise = scale * torch.stack([defense.added(context(plan, 0, seed=s), no_neighbors(), 27) for s in range(6000)])
    half = math.sqrt(2) * sigma * scale
    assert bool((noise.abs() <= half).all())
    shift = torch.linspace(0.01, 0.08, 27, dtype=torch.float64)
    caught = ((noise + shift).abs() > half).any(1).double().mean()
    expected = float(delta_given_R(shift, sigma, scale))
    assert 0.2 < expected < 0.9
    assert float(caught) == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / 6000))


def test_noise_of_the_hardened_variant_has_a_floor():
    plan, ctx = plan_of(), context(plan_of())
    scales = torch.cat([MPDPH(floor=0.5).scales(ctx) for _ in range(30)])
    inverse = torch.from_numpy(expanded(MLP5).laws.inverse).repeat(30)
    assert float(scales[~inverse].min()) == 0.5 and float(scales[inverse].max()) == 2.0
    free = torch.cat([MPDP().scales(ctx) for _ in range(30)])
    assert float(free[~inverse].min()) < 0.4
    assert MPDPH().accounting(plan).theta_given_scales < MPDP().accounting(plan).theta_given_scales / 2


# -- the hardened variant ----------------------------------------------------------------------------------------
def test_hardened_uploads_are_read_as_sums_only(run):
    masked, bare = run(FixedH(gamma="scalar")), run(Fixed(gamma="scalar"))
    for federation in (masked, bare):
        federation.run(3)
    assert relative(masked.parties.server.params, bare.parties.server.params) < 1e-5
    transcript = masked.probe({Slot(0, c): masked.shards[c] for c in range(CLIENTS)})
    uploads = [e.answer for e in transcript.view("server/1").exchanges()]
    for part in ("sigma", "beta"):
        values = torch.cat([v.flatten() for v in getattr(uploads[0], part).values()])
        assert values.dtype == torch.int64
        assert kstest(values.double().numpy() / 2.0**63, "uniform", args=(-1, 2)).pvalue > 1e-3
    same = uploads[0].sigma["head.weight"][0] - uploads[0].beta["head.weight"]
    assert kstest(same.flatten().double().numpy() / 2.0**63, "uniform", args=(-1, 2)).pvalue > 1e-3  # other families


def test_hardened_sums_need_everybody_and_divergence_is_no_error(run):
    federation = run(MPDPH())
    with pytest.raises(ProtocolError, match="1 of 4"):
        federation.defense.aggregate(context(plan_of()), federation.parties.server, {0: ()})
    wild = run(MPDPH(epsilon=0.01, gamma="scalar", fraction_bits=50), plan_of(lr=5.0))
    assert wild.run(60) is False


# -- evidence ----------------------------------------------------------------------------------------------------
def truth_of(found: Any, data: dict[Slot, Data]) -> tuple[Tensor, Tensor]:
    return torch.stack([data[s].x for s in found.unit]), torch.stack([data[s].y for s in found.unit])


@pytest.mark.parametrize("threat", ["server/1", "eavesdropper/1", "client/1"])
@pytest.mark.parametrize("defense", [Fixed(bound=2.0), MPCDP(bound=2.0), FixedH(), Fixed(gamma="scalar")], ids=repr)
def test_evidence_without_noise_is_exact(defense, threat, run):
    federation = run(defense)
    federation.run(1)
    data = {Slot(p, c): examples(MLP5, 3, 10 * p + c) for p in range(2) for c in range(CLIENTS)}
    found = defense.evidence(federation.probe(data).view(threat))
    if threat == "client/1":
        assert found == []
        return
    assert len(found) == (2 if defense.sums else 2 * CLIENTS)
    shared = {id(e.simulate) for e in found}
    assert len(shared) == (1 if threat == "server/1" else 2)  # a listener's weights are fresh in every probe
    for e in found:
        assert e.noise is None and (e.params is None) == (threat == "eavesdropper/1")
        assert at_truth(e, *truth_of(e, data)) < (1e-15 if defense.sums else 1e-20)


@pytest.mark.parametrize("threat", ["server/1", "eavesdropper/1"])
@pytest.mark.parametrize("defense", [MPDP(), MPDPNaive(), MPDPH(), MPDP(graph="n_out", n=2)], ids=lambda d: d.name)
def test_evidence_names_the_size_of_its_noise(defense, threat, run):
    federation = run(defense)
    data = {Slot(p, c): examples(MLP5, 3, 10 * p + c) for p in range(3) for c in range(CLIENTS)}
    for e in defense.evidence(federation.probe(data).view(threat)):
        simulated = e.simulate(*(t.double() for t in truth_of(e, data)))
        residual = torch.cat([(e.observed[n] - v.detach()).flatten() for n, v in simulated.items()])
        assert e.noise is not None
        # Scales are shared by rows and columns, so the spread is wide for who knows the mean degree only.
        loose = 0.35 if defense == MPDP(graph="n_out", n=2) else 0.06
        assert float(residual.square().mean().sqrt()) == pytest.approx(e.noise.std, rel=loose)


@pytest.mark.parametrize("kind", VARIANTS)
def test_no_view_holds_a_secret_of_the_server_and_a_probe_moves_nothing(kind, run):
    probed, plain = run(kind()), run(kind())
    for federation in (probed, plain):
        federation.run(1)
    transcript = probed.probe({Slot(0, c): probed.shards[c] for c in range(CLIENTS)})
    for federation in (probed, plain):
        federation.run(2)
    for a, b in zip(leaves(probed.parties), leaves(plain.parties), strict=True):
        assert torch.equal(a, b)
    secrets = [s.state.own for s in transcript.states if s.party == SERVER]
    assert secrets and all(isinstance(s, Secrets) for s in secrets)
    for threat in ("client/1", "eavesdropper/1"):
        seen = leaves([e.message for e in transcript.view(threat).mail])
        for own in secrets:
            for value in (own.scales, own.mask):
                assert not any(t.shape == value.shape and torch.equal(t.double(), value) for t in seen)


@pytest.mark.parametrize("kind", VARIANTS)
def test_loop_and_vmap_compute_the_same(kind, shards):
    plan, params = plan_of(), weights(MLP5)
    defense = kind()
    _, message = served(defense, plan, params)
    jobs = {c: defense.prepare(context(plan, c, seed=c), (), message, shards[c]) for c in shards}
    one, many = client_map("loop", defense, plan, jobs), client_map("vmap", defense, plan, jobs)
    for client in shards:
        for a, b in zip(leaves(one[client]), leaves(many[client]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", VARIANTS)
def test_runs_repeat_and_resume_bit_for_bit(kind, run, shards, tmp_path):
    whole, half = run(kind(gamma="scalar")), run(kind(gamma="scalar"))
    whole.run(3)
    half.run(1)
    half.save(tmp_path)
    rest = Federation(kind(gamma="scalar"), half.plan, shards, Seeds(0))
    rest.restore(tmp_path)
    rest.run(3)
    assert all(map(torch.equal, leaves(whole.parties.server), leaves(rest.parties.server)))
    assert all(map(torch.equal, leaves(whole.parties.clients), leaves(rest.parties.clients)))
    other = run(kind(gamma="scalar"), seed=1)
    other.run(3)
    assert relative(other.parties.server.params, whole.parties.server.params) > 1e-6


# -- set-up and accounting ---------------------------------------------------------------------------------------
def test_the_graph_is_drawn_by_the_server_and_announced(run):
    federation = run(MPDP(graph="n_out", n=1))
    graph = federation.parties.server.own.graph
    assert torch.equal(graph, graph.T) and bool(graph.any(1).all()) and not bool(graph.diagonal().any())
    for party, keys in enumerate(federation.parties.clients):
        assert torch.equal(keys.graph, graph)
        assert torch.equal(keys.shared.any(1), graph[party])
    federation.run(2)
    assert torch.equal(federation.parties.server.own.graph, graph)
    others = {
        tuple(run(MPDP(graph="n_out", n=1), seed=s).parties.server.own.graph.flatten().tolist()) for s in range(6)
    }
    assert len(others) > 1


def test_accounts_state_the_claim_and_what_it_is_worth():
    plan = plan_of(clients=5)
    account = MPDP(epsilon=3.0).accounting(plan, rounds=10)
    assert account.claimed == (3.0, 1e-5) and account.sigmas.guarantee
    assert (account.sigmas.eta, account.sigmas.delta) == (
        pytest.approx(0.793, abs=5e-4),
        pytest.approx(2.380, abs=5e-4),
    )
    assert account.exact_theta is not None and account.exact_theta < account.theta == pytest.approx(0.35314, abs=1e-5)
    assert account.epsilon_exact < account.epsilon_round < 3.0
    assert account.epsilon_total == pytest.approx(9.3, abs=0.2)
    assert account.delta_spread > 0.99 and 0.1 < account.delta_single < 0.6  # claimed: 1e-5
    assert account.theta_given_scales > 10 * account.exact_theta
    assert MPDP(epsilon=3.0).guarantee(plan, 100, 10) is None


def test_outside_the_theorem_there_is_no_guarantee_and_it_is_said():
    plan = plan_of(clients=10)
    defense = MPDP(graph="n_out", n=5)
    sigmas = defense.sigmas(plan)
    assert not sigmas.guarantee and sigmas.eta == MPDP().sigmas(plan).eta
    assert "no guarantee here" in defense.why_no_epsilon(plan) and "K >= 81" in defense.why_no_epsilon(plan)
    assert "no guarantee here" not in MPDP().why_no_epsilon(plan)
    assert "epsilon 3 a round" in MPDP().why_no_epsilon(plan)
    assert defense.accounting(plan).exact_theta is None and defense.accounting(plan).theta == math.inf
    ring = torch.eye(10, dtype=torch.bool).roll(1, 0)
    account = defense.accounting(plan, graph=ring | ring.T)
    assert account.exact_theta == pytest.approx(exact_theta(ring | ring.T, sigmas.eta, sigmas.delta))
    for kind in VARIANTS:
        reason = kind().why_no_epsilon(plan)
        assert f"epsilon {kind().epsilon:g} a round" in reason and not reason.endswith(".")


# -- bad input ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", VARIANTS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epsilon", 0.0),
        ("epsilon", -1.0),
        ("epsilon", math.inf),
        ("epsilon", math.nan),
        ("delta", 0.0),
        ("delta", 1.0),
        ("kappa", 0.0),
        ("kappa", math.nan),
        ("bound", 0.0),
        ("bound", math.inf),
        ("gamma", "matrix"),
        ("precision", "float16"),
    ],
)
def test_values_out_of_range_are_refused_by_name(kind, field, value):
    with pytest.raises(UsageError, match=rf"'{kind.name}': {field}=.*must be"):
        replace(kind(), **{field: value}).check(plan_of())


@pytest.mark.parametrize(
    ("defense", "plan", "sentence"),
    [
        (MPDP(graph="n_out", n=4), plan_of(), "n=4.*from 1 to 3"),
        (MPDP(graph="n_out", n=0), plan_of(), "n=0.*from 1 to 3"),
        (MPDP(graph="ring"), plan_of(), "graph='ring'"),  # type: ignore[arg-type]
        (MPDP(), plan_of(clients=1), "at least 2 clients"),
        (MPDP(), replace(plan_of(), schedule="round_robin"), "--schedule parallel"),
        (MPDPH(floor=-1.0), plan_of(), "floor"),
        (MPDPH(fraction_bits=60), plan_of(), "fraction_bits"),
        (MPCDP(), replace(plan_of(), loss="cross_entropy"), "--loss squared"),
        (MPDPNaive(), replace(plan_of(), local=Local("delta")), "--upload gradient"),
        (MPDP(), plan_of(net_spec("mlp", (1, 8, 8), 10)), "head.bias.*model.bias=false"),
        (MPDPNaive(), plan_of(net_spec("mlp", (1, 8, 8), 10)), "head.bias.*model.bias=false"),
        (MPDP(), plan_of(net_spec("resnet20", (3, 32, 32), 10)), "head.bias.*model.head_bias=false"),
        (MPDP(), plan_of(net_spec("resnet20", (3, 32, 32), 10, {"norm": "gn", "head_bias": False})), "GroupNorm"),
        (MPDPNaive(), plan_of(net_spec("mlp", (4,), 2, {"hidden": "", "bias": False})), "hidden layer"),
    ],
)
def test_plans_that_cannot_work_are_refused_in_one_sentence(defense, plan, sentence):
    with pytest.raises(UsageError, match=sentence) as refused:
        defense.check(plan)
    assert str(refused.value).endswith(".") and str(refused.value).count(". ") == 0


def test_clients_of_unequal_sizes_are_refused(shards):
    plan = plan_of()
    for kind in VARIANTS:
        kind().check_data(plan, [24, 24, 25, 24])
        with pytest.raises(UsageError, match="from 20 to 24 examples; use --partition iid"):
            kind().check_data(plan, [24, 24, 20, 24])
    uneven = {**shards, 3: Data(shards[3].x[:20], shards[3].y[:20])}
    with pytest.raises(UsageError, match="equal weights"):
        Federation(MPDP(), plan, uneven, Seeds(0)).start(initial(MLP5, 1))


def test_uploads_that_break_the_protocol_are_refused(run):
    federation = run(MPDP())
    server, _ = federation.defense.broadcast(context(plan_of()), federation.parties.server)
    for broken in ((), Surrogates({}, {}, {})):
        with pytest.raises(ProtocolError, match="cannot be"):
            federation.defense.aggregate(context(plan_of()), server, {0: broken})


def test_float32_with_a_large_mask_warns():
    with pytest.warns(UserWarning, match="precision=float64"):
        MPDP(kappa=100.0, precision="float32").check(plan_of())


# -- training ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", VARIANTS)
def test_training_learns_at_a_large_budget(kind, digits):
    order = torch.randperm(len(digits.x), generator=torch.Generator().manual_seed(0))
    x, y = digits.x[order], digits.y[order]
    shards = {c: Data(x[c * 100 :][:100].clone(), y[c * 100 :][:100].clone()) for c in range(CLIENTS)}
    spec = net_spec("mlp", (1, 8, 8), 10, {"hidden": "32", "bias": False})
    plan = plan_of(spec, lr=0.3, batch=100)
    federation = Federation(kind(epsilon=200.0, gamma="scalar"), plan, shards, Seeds(0))
    federation.start(initial(spec, 1))
    assert federation.run(40)
    assert federation.accuracy(Data(x[-800:], y[-800:])) > 0.5  # chance: .1


def test_expansions_are_made_once():
    assert expanded(MLP5) is expanded(MLP5)
    assert isinstance(expanded(MLP5), Expansion)
