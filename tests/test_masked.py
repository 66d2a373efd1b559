"""Gradients of which a part was masked: kinds of masks, what is left unexplained, which hypothesis is taken."""

import math
from dataclasses import replace
from statistics import median

import pytest
import torch
from daily import all_but_nightly
from observations import ask, observation, psnr, seeded, updates, uploads

from ppbench.attacks.reconstruction.fastpath.distances import typical
from ppbench.attacks.reconstruction.ig import IG, MEASURES, IGMasked, hypotheses, tried_labels, unexplained
from ppbench.attacks.reconstruction.search.problem import SimulatedObjective, objective
from ppbench.attacks.reconstruction.search.starts import Starts, posed
from ppbench.base.errors import UsageError
from ppbench.federation.evidence import EXPLAINED_FLOOR, simulation, softsign
from ppbench.federation.plan import Data, Local, Plan
from ppbench.nets.net import initial, net_spec

COUNT = 4


@pytest.fixture(scope="module")
def plan():
    return Plan(net_spec("dlnet", (1, 8, 8), 10, {"nconv": 3}), 1, Local("gradient", batch=1))


@pytest.fixture(scope="module")
def params(plan):
    return initial(plan.spec, 1)


@pytest.fixture(scope="module")
def truth(digits):
    return Data(digits.x[900 : 900 + COUNT], digits.y[900 : 900 + COUNT])


@pytest.fixture(scope="module")
def case(plan, params, truth):
    """An exact observation of one digit."""
    return observation(plan, params, truth.x[:1], truth.y[:1])


def noise(update, names, times=30):
    draws = seeded(3)
    return {
        n: v + times * v.square().mean().sqrt() * torch.randn(v.shape, generator=draws) if n in names else v
        for n, v in update.items()
    }


def spoilt(update, share=0.05):
    """Return `update` with some entries of every tensor replaced by a hundred times its largest."""
    draws = seeded(3)
    return {
        n: torch.where(
            torch.rand(v.shape, generator=draws) < share,
            100 * v.abs().max() * torch.randn(v.shape, generator=draws),
            v,
        )
        for n, v in update.items()
    }


def zeroed(update):
    """Return `update` with half of its entries 0."""
    return {n: v * (torch.rand(v.shape, generator=seeded(3)) < 0.5) for n, v in update.items()}


MASKS = {
    "nothing": lambda u: u,
    "first layer drowned": lambda u: noise(u, [n for n in u if n.startswith("features.0")]),
    "all between drowned": lambda u: noise(u, [n for n in u if n.startswith(("features.2", "features.4"))]),
    "scales": lambda u: {n: v * math.exp(5 * math.sin(7 * i)) for i, (n, v) in enumerate(u.items())},
    "norms": lambda u: {n: v / v.norm() for n, v in u.items()},
    "one tensor loud": lambda u: {n: v * (1e4 if n == "features.0.bias" else 1.0) for n, v in u.items()},
    "zeroed": zeroed,
}


def images(attack, plan, params, truth, mask):
    """Return each victim's dB, and the guesses."""
    x, y = truth.x[:, None], truth.y[:, None]
    view = uploads(plan, params, [mask(u) for u in updates(simulation(plan, params), x, y)])
    guesses = attack.run(view, ask(len(x)), seeded())
    return [psnr(g.x[0], image[0]) for g, image in zip(guesses, x, strict=True)], guesses


@pytest.mark.parametrize("mask", all_but_nightly(MASKS, {*MASKS} - {"nothing", "scales"}))
def test_what_is_left_of_a_masked_gradient_gives_the_image(mask, plan, params, truth):
    budget = 300 if mask == "zeroed" else 150
    images_, guesses = images(IGMasked(budget=budget), plan, params, truth, MASKS[mask])
    assert median(images_) > 25
    assert [int(g.y[0]) for g in guesses] == truth.y.argmax(1).tolist()
    assert {g.evaluations for g in guesses} == {budget}
    if mask != "nothing":
        assert median(images(IG(budget=60), plan, params, truth, MASKS[mask])[0]) < 15, "which a cosine does not see"


@pytest.mark.nightly
@pytest.mark.parametrize("mask", [lambda u: {n: v.sign() for n, v in u.items()}, spoilt], ids=["signs", "outliers"])
def test_of_signs_and_among_outliers_more_is_seen_than_by_a_cosine(mask, plan, params, truth):
    images_, guesses = images(IGMasked(budget=150), plan, params, truth, mask)
    assert [int(g.y[0]) for g in guesses] == truth.y.argmax(1).tolist()
    assert median(images_) > median(images(IG(budget=60), plan, params, truth, mask)[0]) + 2


def test_noise_over_all_is_not_undone(plan, params, truth):
    guesses, _ = images(IGMasked(budget=80), plan, params, truth, lambda u: noise(u, list(u)))
    assert median(guesses) < 12


@pytest.mark.parametrize("measure", MEASURES)
def test_the_chain_of_layers_has_the_measures_of_autograd(measure, case, plan):
    dead = {n: torch.zeros_like(v) if n.endswith("bias") else v for n, v in case.observed.items()}
    half = {n: (torch.arange(v.numel()).view(v.shape) % 2).to(v) for n, v in case.observed.items()}
    some = [replace(e, measure=measure) for e in (case, replace(case, observed=dead), replace(case, weight=half))]
    ones = {n: torch.ones_like(v) for n, v in case.observed.items()}
    some = [e if e.weight else replace(e, weight=ones) for e in some]
    x = torch.rand(3, 1, 1, 8, 8, generator=seeded(), dtype=torch.float64)
    y = torch.softmax(torch.randn(3, 1, 10, generator=seeded(1), dtype=torch.float64), -1)
    values = x, y, x.new_zeros(3, 0), torch.arange(3)
    fast, slow = objective(some, plan, 1, torch.float64)(*values), SimulatedObjective(some)(*values)
    assert not isinstance(objective(some, plan, 1, torch.float64), SimulatedObjective)
    for a, b in zip(fast, slow, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def test_bounded_entries_lie_within_one_and_their_slope_is_that_of_a_constant_middle():
    rows = torch.tensor([[1e6, -2.0, 0.0, 4.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    value, slope = softsign(rows)
    assert value[0].tolist() == pytest.approx([1e6 / (1e6 + 4), -2 / 6, 0, 0.5])  # the median of 2, 4 and 1e6
    assert slope[0].tolist() == pytest.approx([4 / (1e6 + 4) ** 2, 4 / 36, 1 / 4, 4 / 64])
    assert not value[1].any()


def test_hypotheses_are_the_measures_and_zeros_are_left_out_where_something_is_hidden(case):
    assert [e.measure for e in hypotheses(case)] == list(MEASURES)
    whole = replace(case, observed={n: v + 1 for n, v in case.observed.items()})
    assert all(e.weight is None for e in hypotheses(whole))
    half = {n: v * (torch.arange(v.numel()).view(v.shape) % 2) for n, v in case.observed.items()}
    plain, *others = hypotheses(replace(case, observed=half))
    assert plain.weight is None
    assert all(bool(((w > 0) == (half[n] != 0)).all()) for e in others for n, w in e.weight.items())
    signs = replace(case, measure="hinge")
    assert hypotheses(signs) == [signs]


def test_the_truth_explains_what_is_not_masked_and_nothing_finite_explains_nothing(case, truth, plan):
    x, y = truth.x[:1], truth.y[:1]

    def left(evidence, x=x):
        return float(unexplained([evidence], Starts(x[None], y[None], False), plan))

    exact = left(case)
    assert exact == pytest.approx(EXPLAINED_FLOOR, rel=1e-2)
    count = len(case.observed)
    poisoned = replace(case, observed=noise(case.observed, ["head.weight", "head.bias"], 1e3))
    assert math.log(left(poisoned)) == pytest.approx(math.log(exact) * (count - 2) / count, abs=0.1)
    half = {n: v * (torch.arange(v.numel()).view(v.shape) % 3 > 0) for n, v in case.observed.items()}
    assert left(replace(case, observed=half)) == pytest.approx(exact, rel=1e-2), "zeros do not count"
    assert left(replace(case, observed={n: v * torch.nan for n, v in case.observed.items()})) == math.inf
    assert left(case, x * torch.nan) > exact


def test_labels_that_were_granted_or_belong_to_a_batch_are_not_tried(plan, params, truth):
    view = uploads(plan, params, updates(simulation(plan, params), truth.x[:1, None], truth.y[:1, None]))
    words, granted = ask(1), ask(1, y=truth.y[:1, None])
    attack = IGMasked()
    for challenges, known in ((words, True), (granted, False), ([replace(words[0], batch=2)], False)):
        victims = posed(attack.evidence(view), plan, challenges, seeded())
        labels, spent = tried_labels(victims, attack.evidence(view), attack.start)
        assert (labels is not None, spent) == (known, 10 if known else 0)


def test_several_starts_are_refused():
    with pytest.raises(UsageError, match="hypotheses are its starts"):
        IGMasked(tries=2).check()


def test_the_typical_size_of_entries_is_their_lower_median_however_many_are_hidden():
    rows = torch.randn(6, 41, generator=torch.Generator().manual_seed(3))
    for victim, hidden in enumerate((0, 1, 7, 8, 40, 41)):
        rows[victim, :hidden] = 0
    seen = [row[row != 0].abs().sort().values for row in rows]
    expected = [[float(sizes[(len(sizes) - 1) // 2])] if len(sizes) else [1.0] for sizes in seen]
    assert torch.equal(typical(rows), torch.tensor(expected))
    assert all(torch.equal(a, b) for a, b in zip(softsign(rows, typical(rows)), softsign(rows), strict=True))
