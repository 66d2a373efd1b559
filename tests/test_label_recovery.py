"""Labels from the head's gradient: exact on a fresh model, chance on noise, never a crash; both losses, any head."""

import pytest
import torch
from daily import all_but_nightly
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from observations import ask, batch_gradient, seeded, uploads

from ppbench.adversary.attack import Challenge
from ppbench.attacks import labels as reading
from ppbench.attacks.labels import (
    ZERO_ROUNDING,
    LabelRecovery,
    exact_span,
    greedy_multiset,
    label_histogram,
    likely_multisets,
    possible_classes,
    recover_labels,
    single_label,
    typical_means,
)
from ppbench.attacks.reconstruction.features import recover_features
from ppbench.base.tree import Params, Recent
from ppbench.federation.plan import Data, Local, Plan
from ppbench.federation.wire import Slot
from ppbench.nets.net import initial, net_spec

SHAPE, CLASSES = (1, 16, 16), 10
PLAN = Plan(net_spec("dlnet", SHAPE, CLASSES), 4, Local("gradient"))


def drawn_gradient(batch: int, seed: int) -> tuple[Params, Params, torch.Tensor]:
    """Return weights, the gradient of a random batch and its labels, sorted."""
    g, params = seeded(seed), initial(PLAN.spec, seed)
    x, labels = torch.rand(batch, *SHAPE, generator=g), torch.randint(0, CLASSES, (batch,), generator=g)
    y = torch.nn.functional.one_hot(labels, CLASSES).float()
    return params, batch_gradient(PLAN, params, x, y), labels.sort().values


@pytest.mark.parametrize("batch", all_but_nightly([1, 2, 4, 8], [2, 4]))
def test_planted_leak_every_label_of_a_fresh_model(batch):
    for seed in range(10):
        params, grads, labels = drawn_gradient(batch, seed)
        recovered = recover_labels(PLAN, params, grads["head.weight"], grads["head.bias"], batch, seeded())
        assert torch.equal(recovered, labels)


def matches(result: torch.Tensor, truth: torch.Tensor) -> int:
    """Return the size of the intersection of two multisets of labels."""
    counts = torch.stack([torch.bincount(part, minlength=CLASSES) for part in (result, truth)])
    return int(counts.amin(0).sum())


@given(st.lists(st.floats(-3, 9), min_size=2, max_size=6), st.integers(1, 12), st.data())
@settings(max_examples=60)
def test_multiset_holds_every_present_class_once_at_least(counts, batch, data):
    present = data.draw(st.lists(st.booleans(), min_size=len(counts), max_size=len(counts)))
    labels = greedy_multiset(torch.tensor(counts).double(), torch.tensor(present), batch)
    assert len(labels) == batch and torch.equal(labels, labels.sort().values)
    must = {c for c, there in enumerate(present) if there}
    assert must <= set(labels.tolist()) if len(must) <= batch else set(labels.tolist()) <= must


@given(st.lists(st.integers(0, 3), min_size=4, max_size=4).filter(lambda c: sum(c) > 0))
@settings(max_examples=30)
def test_whole_counts_come_back_as_they_are(counts):
    expected = torch.tensor(counts)
    labels = greedy_multiset(expected.double(), expected > 0, sum(counts))
    assert torch.equal(torch.bincount(labels, minlength=4), expected)


def test_the_attack_answers_each_challenge_and_leaves_granted_labels_alone():
    params = initial(PLAN.spec, 5)
    _, first, truth = drawn_gradient(4, 5)
    wrong = torch.nn.functional.one_hot((truth + 1) % CLASSES, CLASSES).float()[None]
    unseen = Challenge((Slot(0, 3),), 4)
    guesses = LabelRecovery().run(uploads(PLAN, params, [first]), [unseen, *ask(1, 4, wrong)], seeded(0))
    assert guesses[0].y.shape == (4,)
    assert torch.equal(guesses[1].y, truth)


# -- any head, both losses, on images --------------------------------------------------------------------------------
NETS = [
    ("mlp", {}),
    ("mlp", {"bias": False}),
    ("cnn", {"widths": 16, "bias": False}),
    ("cnn", {"widths": 8, "activation": "leaky_relu"}),
    ("resnet20", {"head_bias": False}),
]
LOSSES = ["cross_entropy", "squared"]
each_net = pytest.mark.parametrize(("model", "options"), NETS, ids=[f"{m}-{'-'.join(o)}" for m, o in NETS])


def step(plan: Plan, params: Params, data: Data, rate: float) -> Params:
    """One step of gradient descent on `data`."""
    slope = batch_gradient(plan, params, data.x, data.y)
    return {name: params[name] - rate * slope[name] for name in params}


def rates(plan: Plan, params: Params, digits: Data, batch: int, tries: int, noise: float = 0.0) -> tuple[float, float]:
    """Return the share of labels found in batches of digits, and the share found in other batches: chance."""
    right = chance = 0
    for seed in range(tries):
        g = seeded(seed)
        pick, other = torch.randint(0, len(digits.x), (2, batch), generator=g)
        x, y = digits.x[pick], digits.y[pick]
        grads = batch_gradient(plan, params, x, y)
        heads = [grads[name] for name in ("head.weight", "head.bias") if name in grads]
        weight, *rest = (part + noise * part.std() * torch.randn(part.shape, generator=g) for part in heads)
        bias = rest[0] if rest else None
        assert not noise or label_histogram(params, weight, bias, batch) is None, "no identity holds under noise"
        labels = recover_labels(plan, params, weight, bias, batch, g)
        right += matches(labels, y.argmax(1))
        chance += matches(labels, digits.y[other].argmax(1))
    return right / (tries * batch), chance / (tries * batch)


@pytest.mark.parametrize(
    ("model", "options", "loss"),
    [pytest.param(*net, loss, marks=pytest.mark.battery(str(net), loss)) for net in NETS for loss in LOSSES],
)
def test_planted_leak_any_head_at_random_weights(model, options, loss, digits):
    plan = Plan(net_spec(model, (1, 8, 8), CLASSES, options), 4, Local("gradient"), loss=loss)
    params = initial(plan.spec, 1)
    assert rates(plan, params, digits, 1, 25)[0] >= 0.9
    rate, chance = rates(plan, params, digits, 8, 12)
    # over ten seeds .75 at least of softmax behind a few convolutions, whose features differ little, .94 of others
    least = 0.65 if (model, loss) == ("cnn", "cross_entropy") else 0.85
    assert rate > max(least, chance + 0.2)


@pytest.mark.nightly
@pytest.mark.parametrize(("model", "options"), [NETS[1], NETS[3]], ids=["mlp-bias", "cnn-activation"])
def test_squared_loss_shows_labels_of_a_trained_model_too(model, options, digits):
    plan = Plan(net_spec(model, (1, 8, 8), CLASSES, options), 4, Local("gradient"), loss="squared")
    params = initial(plan.spec, 1)
    for _ in range(400):
        params = step(plan, params, Data(digits.x[:200], digits.y[:200]), 0.05)
    outputs = plan.net(params, digits.x[:200])
    assert (outputs.argmax(1) == digits.y[:200].argmax(1)).float().mean() > 0.3, "the model must have learnt"
    for batch, least in ((1, 1.0), (3, 1.0), (8, 0.8)):
        assert rates(plan, params, Data(digits.x[:200], digits.y[:200]), batch, 15)[0] >= least


@pytest.mark.parametrize(("model", "options"), [NETS[1], NETS[3]], ids=["mlp-bias", "cnn-activation"])
@pytest.mark.parametrize("loss", LOSSES)
def test_null_noise_in_place_of_any_heads_gradient(model, options, loss):
    """Labels found in noise agree with the truth as often as with a batch drawn independently."""
    plan = Plan(net_spec(model, (1, 8, 8), CLASSES, options), 4, Local("gradient"), loss=loss)
    params, batch, tries = initial(plan.spec, 1), 8, 60
    right = chance = 0
    for seed in range(tries):
        g = seeded(seed)
        weight = torch.randn(params["head.weight"].shape, generator=g)
        bias = torch.randn(CLASSES, generator=g) if "head.bias" in params else None
        truth, other = torch.randint(0, CLASSES, (2, batch), generator=g)
        labels = recover_labels(plan, params, weight, bias, batch, g)
        right, chance = right + matches(labels, truth), chance + matches(labels, other)
    assert abs(right - chance) / (tries * batch) < 0.1


@each_net
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 1e30])
def test_poisoned_gradients_of_any_head_are_survived(model, options, value):
    for loss in LOSSES:
        plan = Plan(net_spec(model, (1, 8, 8), CLASSES, options), 4, Local("gradient"), loss=loss)
        params = initial(plan.spec, 1)
        for weights in (params, {name: torch.full_like(part, value) for name, part in params.items()}):
            weight = torch.full_like(params["head.weight"], value)
            weight[0, 0] = 0 if value == 1e30 else value
            bias = weight[:, 0].clone() if "head.bias" in params else None
            for batch in (1, 3):
                labels = recover_labels(plan, weights, weight, bias, batch, seeded(0))
                assert labels.shape == (batch,) and labels.dtype == torch.int64
                assert (labels >= 0).all() and (labels < CLASSES).all()


def test_features_of_either_sign_do_not_turn_the_sign_rule_round():
    """Without a head bias the signal is multiplied by the sum of features, which tanh may make negative."""
    plan = Plan(net_spec("mlp", (6,), 5, {"bias": False, "activation": "tanh"}), 4, Local("gradient"))
    params, negative = initial(plan.spec, 0), 0
    for seed in range(40):
        g = seeded(seed)
        x, label = torch.randn(1, 6, generator=g), int(torch.randint(0, 5, (1,), generator=g))
        y = torch.nn.functional.one_hot(torch.tensor([label]), 5).float()
        grads = batch_gradient(plan, params, x, y)
        negative += int(plan.net.features(params, x).sum() < 0)
        assert recover_labels(plan, params, grads["head.weight"], None, 1, g).tolist() == [label]
    assert 10 < negative < 30, "both signs must occur"


def test_one_label_of_a_signal():
    assert single_label(torch.tensor([0.2, -0.9, 0.7])).tolist() == [1]
    assert single_label(torch.tensor([-0.2, 0.9, -0.7]), positive=True).tolist() == [2]
    assert single_label(torch.tensor([-0.2, 0.9, -0.7]), positive=False).tolist() == [1]
    assert single_label(torch.tensor([-0.2, 0.2]), positive=False).tolist() == [0]


# -- the squared loss' identities ------------------------------------------------------------------------------------
@st.composite
def heads(draw: st.DrawFn) -> tuple[Params, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """A head, the gradients of its weight and bias on random features, and the batch's labels; float64."""
    classes, batch, width = draw(st.integers(2, 12)), draw(st.integers(1, 10)), draw(st.integers(6, 30))
    labels = torch.tensor(draw(st.lists(st.integers(0, classes - 1), min_size=batch, max_size=batch)))
    g, size = seeded(draw(st.integers(0, 2**32))), draw(st.sampled_from([0.05, 1.0, 5.0]))
    h = torch.randn(batch, width, generator=g, dtype=torch.float64)
    params = {"head.weight": size * torch.randn(classes, width, generator=g, dtype=torch.float64)}
    outputs = h @ params["head.weight"].T
    if draw(st.booleans()):
        params["head.bias"] = size * torch.randn(classes, generator=g, dtype=torch.float64)
        outputs = outputs + params["head.bias"]
    error = (outputs - torch.nn.functional.one_hot(labels, classes)) / batch
    return params, error.T @ h, error.sum(0) if "head.bias" in params else None, labels


@given(heads())
@settings(max_examples=150)
def test_exact_gradients_show_which_classes_a_batch_holds(case):
    params, weight, bias, labels = case
    classes, batch = len(weight), len(labels)
    truth = torch.bincount(labels, minlength=classes)
    terms = torch.stack([a[:, None] * b for a, b in zip(params["head.weight"].T, weight.T, strict=True)])
    if bias is not None:
        terms = torch.cat([terms, (params["head.bias"][:, None] * bias)[None]])
    vanish = (terms.sum(0) - terms.sum(0).T).abs() <= 2 * ZERO_ROUNDING * terms.square().sum(0).max().sqrt()
    absent = truth == 0
    assume(torch.equal(vanish, (absent[:, None] & absent) | torch.eye(classes, dtype=torch.bool)))  # none by chance
    result = label_histogram(params, weight, bias, batch)
    if result is None:
        assert bias is None and absent.sum() < 2
        return
    assert torch.equal(result.present, truth > 0)
    assert (result.counts[truth == 0] == -torch.inf).all()
    assert (result.counts[truth > 0] <= truth[truth > 0] + 1e-6).all()
    assert (result.counts[truth > 0] > -1e-9).all()
    if batch == 1:
        assert result.counts.max() == pytest.approx(1, abs=1e-6)


def test_identities_claim_nothing_where_they_do_not_hold():
    g = seeded(0)
    h, w = torch.rand(3, 20, generator=g, dtype=torch.float64), torch.randn(6, 20, generator=g, dtype=torch.float64)
    error = (h @ w.T - torch.nn.functional.one_hot(torch.tensor([0, 1, 1]), 6)) / 3
    gradients, params = error.T @ h, {"head.weight": w}
    assert label_histogram(params, gradients, None, 3) is not None
    noisy = gradients + 0.01 * gradients.std() * torch.randn(gradients.shape, generator=g, dtype=torch.float64)
    assert label_histogram(params, noisy, None, 3) is None
    assert label_histogram(params, gradients, None, 1) is None, "two classes do not fit into one example"
    assert label_histogram({**params, "head.bias": w[:, 0]}, gradients, None, 3) is None, "the bias' gradient is hidden"
    assert label_histogram(params, torch.zeros_like(gradients), None, 3) is None
    assert label_histogram(params, gradients * torch.nan, None, 3) is None


def test_noise_on_the_gradient_leaves_counts_against_random_images(digits):
    """The identities are gone, the signal is not."""
    plan = Plan(net_spec("mlp", (1, 8, 8), CLASSES), 4, Local("gradient"), loss="squared")
    right, chance = rates(plan, initial(plan.spec, 1), digits, 4, 20, noise=0.02)
    assert right > 0.85 and chance < 0.5


def test_a_regression_has_no_labels_to_recover():
    plan = Plan(net_spec("mlp", (6,), 1), 2, Local("gradient"), loss="squared")
    assert not LabelRecovery().suits(plan) and LabelRecovery().suits(PLAN)
    params = initial(plan.spec, 0)
    g = batch_gradient(plan, params, torch.rand(2, 6), torch.rand(2, 1))
    labels = recover_labels(plan, params, g["head.weight"], g["head.bias"], 2, seeded(0))
    assert labels.tolist() == [0, 0]


# -- trained networks: predictions that cannot be guessed --------------------------------------------------------------
def head_gradient(labels, seed, sure=1.0):
    """Return [C, 32] float32, the head's gradient of labels [B] by random features and predictions, Dirichlet(sure)."""
    g = seeded(seed)
    p = torch.rand(len(labels), CLASSES, generator=g).double().log().neg() ** (1 / sure)
    apart = p / p.sum(1, keepdim=True) - torch.nn.functional.one_hot(labels, CLASSES)
    return (apart.T @ torch.randn(len(labels), 32, generator=g).double() / len(labels)).float()


@given(st.lists(st.integers(0, CLASSES - 1), min_size=1, max_size=CLASSES - 1), st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_no_class_of_a_batch_is_excluded(labels, seed):
    labels = torch.tensor(labels)
    assert possible_classes(exact_span(head_gradient(labels, seed), None, len(labels)))[labels].all()


@pytest.mark.nightly
@pytest.mark.parametrize(("batch", "most"), [(1, 0), (2, 0.2), (4, 1)])
def test_most_classes_that_are_not_there_are_excluded(batch, most):
    """Vectors of a span of few dimensions are seldom negative at one entry alone, by chance."""
    wrong = 0
    for seed in range(20):
        labels = torch.randperm(CLASSES, generator=seeded(seed))[:batch]
        wrong += int(possible_classes(exact_span(head_gradient(labels, seed), None, batch)).sum()) - batch
    assert wrong / 20 <= most


def test_noise_and_large_batches_exclude_nothing():
    labels = torch.tensor([0, 1, 1])
    exact, g = head_gradient(labels, 0), seeded(1)
    noisy = exact + 1e-3 * exact.std() * torch.randn(exact.shape, generator=g)
    assert exact_span(exact, exact.mean(1), 3).shape == (CLASSES, 3)
    assert exact_span(noisy, None, 3) is None
    assert exact_span(head_gradient(torch.arange(10), 0), None, 10) is None


def test_multisets_come_in_the_order_of_the_counts():
    counts = torch.tensor([0.9, -torch.inf, 1.2, 0.4]).double()
    recovered = [labels.tolist() for labels in likely_multisets(counts, torch.tensor([False, False, True, False]), 3)]
    assert recovered[:2] == [[0, 2, 3], [0, 2, 2]]
    assert len(recovered) == 6 == len({tuple(labels) for labels in recovered})
    assert all(2 in labels and 1 not in labels for labels in recovered)
    assert len(list(likely_multisets(torch.zeros(100).double(), torch.zeros(100) > 0, 8))) == 1, "too many to sort"


def test_a_trained_network_gives_most_labels_away(digits):
    """Random images say nothing of its predictions, and are not asked."""
    plan = Plan(net_spec("mlp", (1, 8, 8), CLASSES), 4, Local("gradient"))
    params = initial(plan.spec, 1)
    assert float(typical_means(plan, params, seeded()).prediction.std()) > 0
    for _ in range(100):
        params = step(plan, params, digits, 0.5)
    assert typical_means(plan, params, seeded()).prediction.tolist() == [0.1] * CLASSES
    right, chance = rates(plan, params, digits, 4, 20)
    assert right > 0.94 and chance < 0.5  # .96; without trials of multisets .93


def test_labels_of_one_gradient_are_tried_once_whoever_reads_them(digits, monkeypatch):
    """Draws differ, and the numbers may be in float64; the labels are the same."""
    plan = Plan(net_spec("mlp", (1, 8, 8), CLASSES), 4, Local("gradient"))
    params, tried = initial(plan.spec, 1), []
    for _ in range(100):
        params = step(plan, params, digits, 0.5)
    grads = batch_gradient(plan, params, digits.x[:4], digits.y[:4])
    monkeypatch.setattr(reading, "LABELS_EXPLAINED", Recent(2))
    monkeypatch.setattr(reading, "recover_features", lambda *a, **b: tried.append(a) or recover_features(*a, **b))
    head = [grads[name] for name in ("head.weight", "head.bias")]
    first = recover_labels(plan, params, *head, 4, seeded())
    count = len(tried)
    again = recover_labels(plan, params, *(part.double() for part in head), 4, seeded(7))
    assert count and len(tried) == count and torch.equal(first, again)
    recover_labels(plan, params, 2 * head[0], head[1], 4, seeded())
    assert len(tried) > count
