"""The chain's value and gradient against autograd's double backward, over random networks, batches and weights."""

from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from observations import seeded
from torch import Tensor, nn

from ppbench.attacks.reconstruction.fastpath import chain, convolution
from ppbench.attacks.reconstruction.fastpath import chain as traces
from ppbench.attacks.reconstruction.fastpath.chain import ChainObjective, compile_chain
from ppbench.attacks.reconstruction.fastpath.convolution import SLICED, Compact, ConvolutionForm, Gathered, Summed
from ppbench.attacks.reconstruction.fastpath.layers import Outer
from ppbench.attacks.reconstruction.features import ChainBackbone, backbone_objective
from ppbench.attacks.reconstruction.search.problem import MappedObjective, Objective, SimulatedObjective, objective
from ppbench.base.tree import Params
from ppbench.federation.evidence import Evidence, Measure, simulation
from ppbench.federation.plan import Plan
from ppbench.federation.wire import Slot
from ppbench.nets.model_object import held_network
from ppbench.nets.net import Classifier, Net, NetSpec, initial, net_spec

CLASSES = 4


@dataclass(frozen=True)
class HandPlan(Plan):
    """A plan around a module that is no plugin."""

    module: Classifier | None = None

    @property
    def net(self) -> Net:
        assert self.module is not None
        return Net(self.spec, self.module)


def plan_of(features: nn.Sequential, shape: tuple[int, ...], loss: str = "cross_entropy") -> tuple[HandPlan, Params]:
    """A plan and float64 parameters for hand-made features."""
    width = features(torch.zeros(1, *shape)).shape[1]
    module = Classifier(features, nn.Linear(width, CLASSES))
    params = {name: p.detach().double().clone() for name, p in module.named_parameters()}
    return HandPlan(NetSpec("hand", shape, CLASSES), 1, loss=loss, module=module), params


def precisions(observed: Params, kind: str, g: torch.Generator) -> Params | None:
    """Return None, a precision of each entry (some 0), or one of each tensor, the first of them 0."""
    if kind == "none":
        return None
    shapes = {n: v.shape if kind == "entries" else () for n, v in observed.items()}
    results = {n: torch.rand(shape, generator=g, dtype=torch.float64).round(decimals=1) for n, shape in shapes.items()}
    hidden = next(iter(results))
    return {n: torch.zeros_like(v) if n == hidden and kind == "tensors" else v for n, v in results.items()}


def check(
    kind: type[Objective], plan: Plan, params: Params, batch: int, weights: list[str], measure: Measure = "squares"
) -> None:
    """Compare D and its slopes with autograd's, for a victim of each kind of `weights`; one is guessed twice.

    With smoothed kinks, too.
    """
    g, shape, simulate, evidence = seeded(len(weights) + batch), plan.spec.shape, simulation(plan, params), []

    def drawn(count: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(count, batch, *shape, generator=g, dtype=torch.float64)
        return x, torch.randn(count, batch, CLASSES, generator=g, dtype=torch.float64).softmax(-1)

    for victim, weight in enumerate(weights):
        observed = {name: value.detach() for name, value in simulate(*drawn(1)).items()}
        seen = precisions(observed, weight, g)
        evidence.append(Evidence((Slot(victim, 0),), observed, simulate, params, seen, measure=measure))
    fast = objective(evidence, plan, batch, torch.float64)
    assert isinstance(fast, kind)
    x, y = drawn(len(weights) + 1)
    arguments = (x, y, x.new_zeros(len(x), 0), torch.tensor([*reversed(range(len(weights))), 0]))
    slow = SimulatedObjective(evidence)
    for mine, theirs in ((fast, slow), (fast.softened(0.3), slow.softened(0.3))):
        for ours, autograd in zip(mine(*arguments), theirs(*arguments), strict=True):
            largest = float(autograd.abs().amax() if autograd.numel() else 0)
            assert torch.allclose(ours, autograd, rtol=1e-8, atol=1e-9 * max(largest, 0.1))


@settings(max_examples=25)
@given(
    data=st.data(),
    channels=st.integers(1, 3),
    size=st.tuples(st.integers(5, 9), st.integers(5, 9)),
    convolutions=st.integers(1, 3),
    batch=st.integers(1, 3),
    weight=st.sampled_from(["none", "entries"]),
    loss=st.sampled_from(["cross_entropy", "squared"]),
)
def test_random_convolutional_networks(data, channels, size, convolutions, batch, weight, loss):
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    inside = channels
    for _ in range(convolutions):
        kernel, stride = data.draw(st.tuples(st.sampled_from([1, 3, (3, 2)]), st.sampled_from([1, 2, (1, 2)])))
        padding, bias, outside = data.draw(st.tuples(st.integers(1, 2), st.booleans(), st.integers(1, 4)))
        layers.append(nn.Conv2d(inside, outside, kernel, stride, padding, bias=bias))
        layers.append(data.draw(st.sampled_from([nn.Sigmoid, nn.Tanh, nn.ReLU]))())
        inside = outside
    if data.draw(st.booleans()):
        small = min(nn.Sequential(*layers)(torch.zeros(1, channels, *size)).shape[2:]) < 2
        layers.append(nn.AvgPool2d(2, data.draw(st.sampled_from([1, 2])), data.draw(st.integers(int(small), 1))))
    layers.append(nn.Flatten())
    if data.draw(st.booleans()):
        width = nn.Sequential(*layers)(torch.zeros(1, channels, *size)).shape[1]
        layers += [nn.Linear(width, 5), nn.Tanh()]
    plan, params = plan_of(nn.Sequential(*layers), (channels, *size), loss)
    check(ChainObjective, plan, params, batch, [weight] * 2)


REGISTERED = (
    ("dlnet", (1, 8, 8), {}),
    ("lenet", (3, 12, 12), {}),
    ("mlp", (7,), {"activation": "leaky_relu"}),
    ("mlp", (1, 4, 4), {"bias": False, "layers": 3, "hidden": 6}),
    ("cnn", (2, 6, 6), {"pool": "avg", "bias": False, "widths": "3", "hidden": 5}),
    ("cnn", (2, 9, 10), {"pool": "max", "widths": "3,4", "activation": "leaky_relu"}),
)


@pytest.mark.parametrize(
    ("model", "shape", "options", "batch", "loss"),
    [
        pytest.param(*network, batch, loss, marks=pytest.mark.battery(str(network), batch, loss))
        for network in REGISTERED
        for batch in (1, 3)
        for loss in ("cross_entropy", "squared")
    ],
)
def test_registered_models_take_the_fast_path(model, shape, options, batch, loss):
    plan = Plan(net_spec(model, shape, CLASSES, options), 1, loss=loss)
    params = {name: value.double() for name, value in initial(plan.spec, 0).items()}
    for measure in ("squares", "absolute", "cosine"):
        for weight in ("none", "entries", "tensors"):
            check(ChainObjective, plan, params, batch, [weight] * 2, measure)


def test_a_gradient_of_nothing_explains_nothing_by_the_cosine():
    """Black images behind no bias move no weight: the cosine is 1 on every path, not the half that squares leave."""
    plan = Plan(net_spec("mlp", (7,), CLASSES, {"bias": False}), 1)
    params = {name: value.double() for name, value in initial(plan.spec, 0).items()}
    simulate, x = simulation(plan, params), torch.rand(2, 1, 7, generator=seeded(), dtype=torch.float64)
    x[1] = 0
    y = torch.eye(CLASSES, dtype=torch.float64)[:1].expand(2, 1, -1)
    observed = [{n: v.detach() for n, v in simulate(x[i : i + 1], y[:1]).items()} for i in range(2)]
    evidence = [Evidence((Slot(i, 0),), o, simulate, params, measure="cosine") for i, o in enumerate(observed)]
    for pieces in (objective(evidence, plan, 1, torch.float64), SimulatedObjective(evidence)):
        rows = x[[0, 1, 0, 1]], y[[0] * 4], x.new_zeros(4, 0), torch.tensor([0, 0, 1, 1])
        loss, *slopes = pieces(*rows)
        assert loss.tolist() == pytest.approx([0, 1, 1, 1], abs=1e-12)
        assert all(bool(slope.isfinite().all()) for slope in slopes), "so a descent goes on from there"


@pytest.mark.parametrize("measure", ["cosine", "squares"])
def test_plain_gradients_of_other_networks_are_mapped_over_victims(measure):
    """A residual network has no chain: by vmap as one by one, with one precision a tensor, an entry, or none."""
    plan = Plan(net_spec("densenet", (1, 8, 8), CLASSES, {"growth": 2, "blocks": 2, "layers": 1}), 1)
    params = {n: v.double() for n, v in initial(plan.spec, 0).items()}
    check(MappedObjective, plan, params, 1, ["none", "tensors", "entries"], measure)
    check(SimulatedObjective, plan, params, 1, ["none"], measure)


@given(
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    size=st.tuples(st.integers(5, 9), st.integers(5, 9)),
)
@settings(max_examples=60, deadline=None)
def test_every_way_back_is_the_one_of_autograd(kernel, stride, padding, size):
    module = nn.Conv2d(2, 3, kernel, stride, padding, bias=False).double()
    x = torch.rand(2, 2, *size, generator=seeded(), dtype=torch.float64, requires_grad=True)
    z = module(x)
    cotangent = torch.rand(z.shape, generator=seeded(1), dtype=torch.float64)
    (expected,) = torch.autograd.grad(z, x, cotangent)
    form = ConvolutionForm.of(module, size)
    for kind, sliced in ((Compact, SLICED), (Summed, SLICED), (Summed, 0), (Gathered, SLICED)):
        layer = kind(form, "layer", module.weight.detach(), None, False)
        with patch.object(convolution, "SLICED", sliced):
            assert torch.allclose(layer.fold(layer.drop(layer.weight, layer.cut(cotangent))), expected, atol=1e-12)


LAYERS = {
    "tanh": nn.Sequential(nn.Conv2d(2, 3, 3, 2, 1), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten()),
    "sigmoid, means": nn.Sequential(nn.Conv2d(2, 3, 3, 2, 1), nn.Sigmoid(), nn.AvgPool2d(2), nn.Flatten()),
    "sigmoid": nn.Sequential(nn.Conv2d(2, 3, 3, 2, 1), nn.Sigmoid(), nn.MaxPool2d(2), nn.Flatten()),
    "leaky": nn.Sequential(nn.Conv2d(2, 3, 3, 2, 1), nn.LeakyReLU(0.1), nn.MaxPool2d(2), nn.Flatten()),
    "leakier": nn.Sequential(nn.Conv2d(2, 3, 3, 2, 1), nn.LeakyReLU(0.3), nn.MaxPool2d(2), nn.Flatten()),
    "gathered": nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 2, 5, 2, 2), nn.ReLU(), nn.Flatten()),
}


MEASURES: list[Measure] = ["squares", "cosine", "absolute", "tensors", "poisoned"]


@pytest.mark.nightly
def test_a_trace_has_the_bits_of_what_it_was_made_of_whatever_was_traced_before(monkeypatch):
    """Traces are shared by all objectives of a process: other weights, observations, guesses and victims each time."""
    monkeypatch.setitem(traces.WARM, "cpu", 1)
    monkeypatch.setattr(chain, "TRACES", traces.Traces())
    kinds, dtypes = ("none", "tensors", "entries"), (torch.float32, torch.float64)
    cases = [
        (layers, measure, dtypes[i % 2], kinds[i % 3])
        for i, layers in enumerate(LAYERS)
        for measure in MEASURES[i % 3 :: 2]
    ]
    cases += [(layers, "squares", torch.float32, "none") for layers in LAYERS]  # nothing but the layers differs
    cases += [("tanh", measure, torch.float32, "none") for measure in MEASURES]  # nothing but the measure
    cases = sorted(set(cases), key=str)
    for seed, (layers, measure, dtype, kind) in enumerate(cases * 3):
        g, (plan, params) = seeded(seed), plan_of(LAYERS[layers], (2, 11, 12))
        params = {n: torch.randn(v.shape, generator=g, dtype=dtype) for n, v in params.items()}
        observed = [{n: torch.randn(v.shape, generator=g, dtype=dtype) for n, v in params.items()} for _ in "abc"]
        weights = None if kind == "none" else [precisions(one, kind, g) for one in observed]
        mine = ChainObjective(compile_chain(plan, params, dtype), plan.loss, observed, weights, 2, measure)
        x = torch.rand(2, 2, 2, 11, 12, generator=g, dtype=dtype)
        y, index = torch.rand(2, 2, CLASSES, generator=g, dtype=dtype), torch.tensor([seed % 3, (seed + 1) % 3])
        result = mine(x, y, x.new_zeros(2, 0), index)[:3]
        with torch.inference_mode():
            expected = mine.slopes(x, y, index, *mine.tensors)
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    assert len(chain.TRACES.kept) == len(cases)


def test_a_process_keeps_the_traces_that_it_used_last_and_no_more():
    kept, ran = traces.Traces(), []

    def twice(x: Tensor) -> tuple[Tensor, ...]:
        ran.append(len(x))
        return x + x, x

    for length in [*range(1, traces.MOST_TRACES + 2), 1]:
        for _ in range(traces.WARM["cpu"] + 1):
            assert kept.run(twice, "twice", [torch.ones(length)])[0].tolist() == [2.0] * length
    assert len(kept.kept) == traces.MOST_TRACES
    assert ran.count(2) == traces.WARM["cpu"] + 1  # in the call that traces it runs twice; then Python is not asked
    assert ran.count(1) == 2 * (traces.WARM["cpu"] + 1)  # it had to make room


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 2, 3, groups=2),
        nn.Conv2d(2, 2, 3, dilation=2),
        nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(2, 2, 3, padding="same"),
        nn.MaxPool2d(2, dilation=2),
        nn.GroupNorm(1, 2),
        nn.AvgPool2d(3, 2, ceil_mode=True),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_without_a_fast_form_are_refused_not_approximated(layer):
    features = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sigmoid(), layer, nn.Flatten())
    plan, params = plan_of(features, (1, 8, 8))
    assert compile_chain(plan, params, torch.float64) is None


class Written(nn.Module):
    """A network whose forward pass is written out, with functions instead of layers."""

    def __init__(self, twist: str = "") -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(2, 3, 3), nn.Conv2d(3, 3, 3, padding=1), nn.Linear(27, CLASSES)
        self.twist, self.scale = twist, 1.0 if twist != "temperature" else 0.5

    def forward(self, x: Tensor) -> Tensor:
        a = F.max_pool2d(torch.tanh(self.first(x)), 2)
        b = F.leaky_relu(self.second(a), 0.2)
        if self.twist == "skip":
            b = b + a
        if self.twist == "branch" and float(x.detach().sum()) > 0:
            b = -b
        return self.head(b.view(-1, 27)) * self.scale


def held_plan(module: nn.Module) -> tuple[Plan, Params]:
    network = held_network(module, (2, 8, 8))
    return Plan(network.spec, 1), network.spec.start


@pytest.mark.parametrize("written", [True, False], ids=["written out", "nested"])
def test_networks_of_users_have_a_chain_if_they_are_one_however_they_are_written(written):
    inner = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Sequential(nn.AvgPool2d(2), nn.Flatten()))
    plan, params = held_plan(Written() if written else nn.Sequential(inner, nn.Linear(27, CLASSES)))
    check(ChainObjective, plan, {n: v.double() for n, v in params.items()}, 2, ["none", "none"])


@pytest.mark.parametrize("twist", ["skip", "branch", "temperature"])
def test_what_a_written_network_does_beside_its_layers_is_not_passed_over(twist):
    plan, params = held_plan(Written(twist))
    assert compile_chain(plan, params, torch.float64) is None


def test_a_dense_gradient_is_compared_as_an_outer_product_only_where_it_is_one():
    torch.manual_seed(2)
    plan, params = plan_of(nn.Sequential(nn.Linear(6, 5), nn.Sigmoid()), (6,))
    x, y = torch.rand(1, 1, 6, dtype=torch.float64), torch.eye(CLASSES, dtype=torch.float64)[None, :1]
    observed = {name: value.detach() for name, value in simulation(plan, params)(x, y).items()}
    noisy = {name: value + 1e-3 * torch.randn_like(value) for name, value in observed.items()}
    steps = compile_chain(plan, params, torch.float64)
    exact = ChainObjective(steps, plan.loss, [observed], None, 1)
    assert all(isinstance(goal.rows, Outer) for goal in exact.match.targets)
    blurred = ChainObjective(steps, plan.loss, [noisy], None, 1)
    assert not any(isinstance(goal.rows, Outer) for goal in blurred.match.targets)
    loss, gx, *_ = exact(x, y, x.new_zeros(1, 0), torch.tensor([0]))
    assert float(loss) < 1e-25
    assert float(gx.abs().max()) < 1e-12


@pytest.mark.parametrize("measure", ["squares", "absolute", "cosine"])
@pytest.mark.parametrize(("shape", "batch", "victims"), [((1, 8, 8), 1, 2), ((3, 32, 32), 8, 8)])
def test_what_has_a_chain_takes_it_whatever_the_shape(shape, batch, victims, measure):
    plan = Plan(net_spec("dlnet", shape, CLASSES), 1)
    params = initial(plan.spec, 0)
    one = Evidence((Slot(0, 0),), params, simulation(plan, params), params, measure=measure)
    opaque = replace(one, simulate=lambda x, y: one.simulate(x, y))
    for evidence in (one, opaque):  # the second can be followed by no vmap
        assert type(objective([evidence] * victims, plan, batch, torch.float32)) is ChainObjective
    phi = torch.ones(victims, batch, plan.net.features(params, torch.zeros(1, *shape)).shape[1])
    assert type(backbone_objective(plan, params, [params] * victims, phi)) is ChainBackbone
