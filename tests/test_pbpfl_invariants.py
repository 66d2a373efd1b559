"""PBPFL's invariants: exact recovery, delivery, training equal to FedSGD's, bytes, refusals (Feng et al. 2020)."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from daily import every_third
from protocols import moved, rand, relative, started
from torch import Tensor
from torch.func import functional_call, jacrev

from ppbench.base.autodiff import gradient
from ppbench.base.tree import Params
from ppbench.defenses.none import NoDefense
from ppbench.defenses.pbpfl import perturbation
from ppbench.defenses.pbpfl.perturbation import (
    Released,
    Surrogates,
    combine,
    mask,
    multiply,
    perturbed_outputs,
    surrogates,
    unscale,
)
from ppbench.defenses.pbpfl.protocol import PBPFL, PBPFLExt, RoundSecrets
from ppbench.federation.evidence import at_truth
from ppbench.federation.plan import Batch, Data, Local, Opt, Plan
from ppbench.federation.view import BEGUN
from ppbench.federation.wire import SERVER, Slot
from ppbench.nets.channels import Channels, Norms, traced_channels
from ppbench.nets.net import Net, build, initial, net_spec, squared

IMAGE = (3, 16, 16)
BATCH = 4


@lru_cache
def images() -> Data:
    """Four images of noise, float64."""
    return Data(rand(BATCH, *IMAGE), F.one_hot(torch.arange(BATCH), 10).double())


def registered(model: str, shape: tuple[int, ...] = IMAGE, classes: int = 10, **options: Any) -> tuple[Net, Params]:
    spec = net_spec(model, shape, classes, options)
    return build(spec), moved(initial(spec, 0), zeros=True)


NETS: dict[str, tuple[Callable[[], tuple[Net, Params]], Norms]] = {
    "MLP-5": (lambda: registered("mlp", hidden=128, layers=5), "refuse"),
    "CNN, max pool": (lambda: registered("cnn", hidden="64"), "refuse"),
    "DenseNet, concat + max pool": (lambda: registered("densenet"), "refuse"),
    "ResNet20 A": (lambda: registered("resnet20"), "refuse"),
    "ResNet20 B": (lambda: registered("resnet20", shortcut="B"), "refuse"),
    "ResNet20 Fixup A": (lambda: registered("resnet20", norm="fixup"), "refuse"),
    "ResNet20 BN": (lambda: registered("resnet20", norm="bn"), "affine"),
    "ResNet20 GN": (lambda: registered("resnet20", norm="gn"), "affine"),
}


@lru_cache
def case(name: str) -> tuple[Net, Params, Channels, Params]:
    """A network, its weights, its scales' places, and the true gradient on `images()` in float64."""
    make, norms = NETS[name]
    net, params = make()
    data = images()
    with torch.no_grad():
        true = gradient(lambda p: squared(net(p, data.x), data.y).mean(), params)
    return net, params, traced_channels(net, norms), true


def mask_of(net: Net, hidden: Params, kappa: float, masked_bias: bool = True) -> tuple[Tensor, Tensor]:
    """A direction r_a and the gamma that gives RMS(gamma alpha r_a) = kappa RMS(y) on this batch."""
    direction = rand(net.spec.classes, seed=5) * 2 - 1
    with torch.no_grad():
        logits, alpha = perturbed_outputs(net, hidden, images().x, masked_bias)
    size = (alpha[:, None] * direction).square().mean().sqrt()
    return direction, kappa * logits.square().mean().sqrt() / size


def recovery(name, kappa, dtype=torch.float64, result=None, masked_bias=True, scales=None):
    """Relative L2 error of the recovered gradient."""
    net, params, exact, true = case(name)
    result = result or exact
    scales = 0.5 + 1.5 * rand(result.count, seed=2) if scales is None else scales
    multiplier = result.multipliers(scales)
    hidden = multiply(params, multiplier, torch.float64)
    direction, gamma = mask_of(net, hidden, kappa, masked_bias)
    sent = {n: p.to(dtype) for n, p in mask(hidden, gamma * direction, masked_bias).items()}
    data = images()
    with torch.no_grad():
        batch = Batch(data.x, data.y, torch.ones(len(data.x)).double())
        answer = surrogates(net, sent, batch, direction.to(dtype)[None], masked_bias)
        answer = Surrogates(*({n: v.double() for n, v in t.items()} for t in (answer.g, answer.sigma, answer.beta)))
        back = unscale(combine(answer, gamma[None], gamma**2 * (direction @ direction)), multiplier, params)
    return relative(back, true)


@pytest.mark.parametrize(("directions", "passes"), [(1, 3), (10, 12)])
def test_backward_passes_are_counted(directions, passes, monkeypatch):
    """PBPFL's client takes three; MP-DP's takes two more than classes: its paper's times of training leave them out."""
    counted = []
    net, params, *_ = case("MLP-5")
    original = perturbation.gradients
    monkeypatch.setattr(perturbation, "gradients", lambda *what: counted.append(what[-1]) or original(*what))
    batch = Batch(images().x, images().y, torch.ones(BATCH).double())
    with torch.no_grad():
        answer = surrogates(net, params, batch, torch.eye(10).double()[:directions], masked_bias=True)
    assert counted == [passes] and {len(stack) for stack in answer.sigma.values()} == {directions}


# -- T2: the surrogates are the paper's Jacobian formula -------------------------------------------------------------
@pytest.mark.parametrize("masked_bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (2, 4, 4)])
def test_surrogates_are_the_literal_per_sample_jacobians(shape, masked_bias):
    """Lemma 2: sigma = mean of r_a^T (alpha d yhat + (yhat - ybar) d alpha), beta = mean of alpha d alpha."""
    model, options = ("mlp", {"hidden": "4"}) if len(shape) == 1 else ("cnn", {"widths": "3"})
    net, params = registered(model, shape, 3, **options)
    params = mask(params, rand(3, seed=1), masked_bias)
    x, y = rand(5, *shape, seed=2), rand(5, 3, seed=3)
    w = torch.tensor([1.0, 1, 1, 0, 1]).double()  # a padded place
    directions = torch.stack([rand(3, seed=4) - 0.5, *torch.eye(3).double()])
    with torch.no_grad():
        recovered = surrogates(net, params, Batch(x, y, w), directions, masked_bias)

    def alpha_of(p, one):
        inner = {n.removeprefix("features."): v for n, v in p.items() if n.startswith("features.")}
        return functional_call(net.module.features, inner, (one[None],)).sum() + float(masked_bias)

    real = [i for i in range(5) if w[i] > 0]
    logits = [net(params, x[i : i + 1])[0] for i in real]
    alpha = [alpha_of(params, x[i]) for i in real]
    d_logits = [jacrev(lambda p, i=i: net(p, x[i : i + 1])[0])(params) for i in real]
    d_alpha = [jacrev(lambda p, i=i: alpha_of(p, x[i]))(params) for i in real]
    for name in params:
        g = sum(torch.tensordot(e - y[i], d[name], 1) for i, e, d in zip(real, logits, d_logits, strict=True)) / 4
        beta = sum(a * d[name] for a, d in zip(alpha, d_alpha, strict=True)) / 4
        torch.testing.assert_close(recovered.g[name], g, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(recovered.beta[name], beta, rtol=1e-12, atol=1e-13)
        for k, r_a in enumerate(directions):
            sigma = sum(
                torch.tensordot(r_a, a * dy[name], 1) + (r_a @ (e - y[i])) * da[name]
                for i, e, a, dy, da in zip(real, logits, alpha, d_logits, d_alpha, strict=True)
            )
            torch.testing.assert_close(recovered.sigma[name][k], sigma / 4, rtol=1e-12, atol=1e-13)


# -- T3, T4, T8: recovery --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kappa", [1.0, 100.0])
@pytest.mark.parametrize("name", NETS)
def test_the_gradient_is_recovered_to_rounding(name, kappa):
    rounding = 1e-12 if name.endswith("BN") else 1e-14
    assert recovery(name, kappa) < rounding * kappa**2


@lru_cache
def plain_error(name: str) -> float:
    """What float32 costs without any perturbation: kinks of ReLU and ties of max pools fall otherwise."""
    net, params, _, true = case(name)
    data = images()
    with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):
        single = {n: p.float() for n, p in params.items()}
        gradients = gradient(lambda p: squared(net(p, data.x.float()), data.y.float()).mean(), single)
    return relative(gradients, true)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("kappa", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("name", every_third(n for n in NETS if not n.endswith("N")))
def test_float32_clients_cost_rounding_that_grows_with_the_square_of_kappa(name, kappa):
    """T3 in float32, by torch's own convolutions; oneDNN's sum less exactly, up to 25 times (measured)."""
    bound = max(2e-6 * kappa**2, 5 * plain_error(name))
    with torch.backends.mkldnn.flags(enabled=False):
        error = recovery(name, kappa, torch.float32)
    assert 1e-9 * kappa**2 < error < bound  # the lower bound: it was float32 that computed
    if kappa == 10:
        assert recovery(name, kappa, torch.float32) < 10 * bound


@pytest.mark.parametrize("name", ["MLP-5", "DenseNet, concat + max pool", "ResNet20 A"])
def test_wide_scales_and_a_bias_in_the_clear_are_recovered_too(name):
    count = case(name)[2].count
    wide = 10 ** (6 * rand(count, seed=7) - 3)
    assert recovery(name, 1.0, scales=wide) < 1e-13
    assert recovery(name, 10.0, masked_bias=False) < 1e-12


def naive_norms(result: Channels) -> Channels:
    """The scale in the convolution's rows, as if a norm commuted with it; its own weight and bias untouched."""
    factors = dict(result.factors)
    for name in result.factors:
        place, kind = name.rsplit(".", 2)[-2:]
        norm = name.rsplit(".", 1)[0]
        if place.startswith("norm") or norm == "features.1":
            conv = norm.replace("norm", "conv") if place.startswith("norm") else "features.0"
            if kind == "weight":
                factors[f"{conv}.weight"] = replace(factors[f"{conv}.weight"], out=factors[name].out)
            del factors[name]
    return replace(result, factors=factors)


def untied(result: Channels) -> Channels:
    """Fresh scales for the rows of one block's last convolution, not those of its shortcut."""
    name = "features.4.conv2.weight"
    out = result.factors[name].out
    assert out is not None
    fresh = replace(result.factors[name], out=out * 0 + result.count + 1 + torch.arange(len(out)).numpy())
    return replace(result, factors={**result.factors, name: fresh}, count=result.count + len(out))


@pytest.mark.parametrize(
    ("name", "spoilt"), [("ResNet20 BN", naive_norms), ("ResNet20 GN", naive_norms), ("ResNet20 A", untied)]
)
def test_ignored_norms_and_untied_shortcuts_fail_recovery(name, spoilt):
    """T8, a guard of the guards: where the rules are broken, the error is no rounding (about a half, measured)."""
    wrong = spoilt(case(name)[2])
    assert len(wrong.factors) < len(case(name)[2].factors) or wrong.count > case(name)[2].count
    assert recovery(name, 1.0, result=wrong) > 0.1
    assert recovery(name, 1.0) < 1e-12


# -- the protocol ----------------------------------------------------------------------------------------------------
def digits_plan(opt: Opt) -> Plan:
    return Plan(net_spec("mlp", (1, 8, 8), 10, {"hidden": "64"}), 3, Local("gradient", batch=32), "squared", opt)


@pytest.fixture
def unequal(deal):
    """Three shards of unlike sizes, float64."""
    return deal((40, 150, 246), torch.float64)


MOMENTUM, ADAM = Opt("sgd", 0.1, 0.9), Opt("adam", 5e-3)


@pytest.mark.nightly
@pytest.mark.parametrize("opt", [MOMENTUM, ADAM], ids=["momentum", "adam"])
def test_fifty_rounds_equal_those_of_fedsgd(opt, unequal, digits):
    """T7: fresh secrets every round, unequal shards, the same batches; the server steps on recovered gradients."""
    plan = digits_plan(opt)
    plain = started(NoDefense(), plan, unequal)
    plain.run(50)
    data = Data(digits.x[600:].double(), digits.y[600:].double())
    assert plain.accuracy(data) > 0.7, "a model that learned nothing would prove nothing"
    for defense in (PBPFL(kappa=100.0), PBPFLExt(kappa=10.0)):
        run = started(defense, plan, unequal)
        assert run.run(50)
        assert relative(run.parties.server.params, plain.parties.server.params) < 1e-10
        assert run.accuracy(data) == pytest.approx(plain.accuracy(data))


def test_no_secret_comes_twice(unequal):
    """Fresh secrets every round: no scale, direction or gamma comes twice, not in a probe either."""
    run = started(PBPFL(), digits_plan(MOMENTUM), unequal)
    seen: list[RoundSecrets] = []
    for last in (1, 2, 3):
        run.run(last)
        seen.append(run.parties.server.own)
    probe = run.probe({Slot(0, 0): Data(run.shards[0].x[:2], run.shards[0].y[:2])})
    seen += [s.state.own for s in probe.states if s.party == SERVER and s.step != BEGUN]
    values = torch.stack([torch.cat([s.scales, s.direction, s.gamma[None]]) for s in seen])
    assert len(values) == 4
    assert all(len(set(column.tolist())) == len(values) for column in values.T)
    assert bool((values[:, :64] > 0.5).all()) and bool((values[:, :64] < 2).all())
    assert all(len(set(s.direction.tolist())) == 10 for s in seen), "the entries of r_a are distinct"


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_kappa_is_the_ratio_of_mask_and_logits(model):
    spec = net_spec(model, (3, 16, 16), 10)
    x, data = rand(64, 3, 16, 16, seed=9), Data(torch.rand(4, 3, 16, 16).double(), torch.eye(10)[:4].double())
    gammas = []
    for kappa in (0.1, 1.0, 100.0):
        plan = Plan(spec, 1, Local("gradient", batch=4), "squared")
        run = started(PBPFL(kappa=kappa), plan, {0: data})
        server, message = run.defense.broadcast(run.context("real", 1, 0, SERVER), run.parties.server)
        logits, alpha = perturbed_outputs(plan.net, message.params, x, True)
        true = plan.net(server.params, x)
        masked = (server.own.gamma * alpha[:, None] * server.own.direction).square().mean().sqrt()
        assert float(masked / true.square().mean().sqrt()) == pytest.approx(kappa, rel=0.2)  # on other noise
        torch.testing.assert_close(logits - alpha[:, None] * server.own.gamma * server.own.direction, true)
        gammas.append(float(server.own.gamma))
    assert gammas == pytest.approx([gammas[1] * k for k in (0.1, 1, 100)])


def test_the_delivered_model_computes_the_true_outputs_and_the_training_one_does_not(digits, unequal):
    """T5, for every kappa: no additive mask is left at the end, and hidden scales change no output."""
    for defense in (PBPFL(kappa=100.0), PBPFLExt(kappa=100.0), PBPFL(precision="float32", kappa=1.0)):
        run = started(defense, digits_plan(MOMENTUM), unequal)
        run.run(3)
        message, x = run.deliver(), digits.x[600:900].double()
        assert isinstance(message, Released)
        true, got = run.plan.net(run.parties.server.params, x), run.outputs(x)
        single = defense.precision == "float32"
        error = (got - true).abs().max() / true.abs().max()
        assert float(error) < (2e-6 if single else 1e-12) and (single or float(error) > 0)
        assert torch.equal(got.argmax(1), true.argmax(1))
        hidden = {n: p for n, p in run.parties.server.params.items() if n != "head.bias"}
        assert not any(torch.equal(message.params[n].double(), p) for n, p in hidden.items())
        _, training = defense.broadcast(run.context("real", 9, 0, SERVER), run.parties.server)
        masked = defense.predict(run.plan, training, x).double()
        assert float((masked - true).norm() / true.norm()) > 0.3 * defense.kappa


# -- the adversary's evidence ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("threat", ["server/1", "eavesdropper/1", "client/1"])
def test_evidence_at_the_truth_is_exact(threat, unequal):
    run = started(PBPFL(kappa=10.0), digits_plan(MOMENTUM), unequal)
    run.run(2)
    victims = {Slot(p, c): Data(run.shards[c].x[p : p + 3], run.shards[c].y[p : p + 3]) for p in (0, 1) for c in (1, 2)}
    view = run.probe(victims).view(threat)
    evidence = view.defense.evidence(view)
    if threat == "client/1":
        assert evidence == []
        return
    assert [e.unit for e in evidence] == [(slot,) for slot in victims]
    assert {e.channel for e in evidence} == {"recovered" if threat == "server/1" else "g"}
    # One object for equal weights: the server's stay the same over probes, a listener's are perturbed anew each time.
    assert len({id(e.simulate) for e in evidence}) == (1 if threat == "server/1" else 2)
    for piece in evidence:
        truth = victims[piece.unit[0]]
        assert at_truth(piece, truth.x[None], truth.y[None]) < 1e-20
        other = run.shards[0]
        assert at_truth(piece, other.x[None, :3], other.y[None, :3]) > 1e-3
        same = all(torch.equal(piece.params[n], p) for n, p in run.parties.server.params.items())  # type: ignore[index]
        assert same == (threat == "server/1")


# -- refusals --------------------------------------------------------------------------------------------------------
def test_float32_warns_beyond_kappa_ten_and_only_there():
    plan = digits_plan(MOMENTUM)
    with pytest.warns(UserWarning, match=r"float32.*kappa=100.*0\.003.*precision=float64 or kappa <= 10"):
        PBPFL(kappa=100.0, precision="float32").check(plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PBPFL(kappa=10.0, precision="float32").check(plan)
        PBPFL(kappa=100.0).check(plan)
