"""The one-run audit: the bound against the paper's formula by brute force, and the attack that feeds it."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from observations import delivered, letters, seeded
from scipy import stats
from torch import Tensor

from ppbench.adversary.attack import Challenge, References
from ppbench.attacks.membership.lira import LiRA
from ppbench.attacks.membership.one_run import OneRunAudit, extremes
from ppbench.attacks.membership.update_cosine import UpdateCosine
from ppbench.defenses.none import NoDefense
from ppbench.federation.plan import Local, Plan
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER
from ppbench.metrics.audit import audited, epsilon_lower, p_value
from ppbench.metrics.intervals import Estimate
from ppbench.nets.net import initial, net_spec


def brute_p(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """Theorem 5.2 by sums of exact binomial terms."""
    q = 1 / (1 + math.exp(-epsilon))
    pmf = [math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
    beta = sum(pmf[v:])
    alpha = max((sum(pmf[v - i : v]) / i for i in range(1, v + 1)), default=0.0)
    return min(1.0, beta + 2 * m * delta * alpha)


@given(st.data(), st.integers(1, 40), st.floats(0, 6), st.sampled_from([0.0, 1e-5, 1e-2]))
@settings(max_examples=80)
def test_p_value_is_the_papers(data, r, epsilon, delta):
    v, extra = data.draw(st.integers(0, r)), data.draw(st.integers(0, 30))
    expected = brute_p(r + extra, r, v, epsilon, delta)
    assert p_value(r + extra, r, v, epsilon, delta) == pytest.approx(expected, rel=1e-9, abs=1e-14)


@given(st.integers(1, 60), st.data(), st.sampled_from([0.0, 1e-5, 1e-3]))
@settings(max_examples=60)
def test_the_bound_is_where_the_p_value_crosses(r, data, delta):
    v = data.draw(st.integers(0, r))
    bound = epsilon_lower(r, r, v, delta)
    assert brute_p(r, r, v, bound + 1e-6, delta) >= 0.05
    if bound > 0:
        assert brute_p(r, r, v, bound - 1e-6, delta) < 0.05


def test_randomized_response_is_bounded_below_its_epsilon_in_nineteen_of_twenty_runs():
    """The auditor of randomized response at epsilon 1 guesses what it was told: the bound must hold, and come near."""
    g, epsilon, m = np.random.default_rng(0), 1.0, 2000
    rate = 1 / (1 + math.exp(-epsilon))
    bounds = []
    for _ in range(200):
        member = g.random(m) < 0.5
        told = np.where(g.random(m) < rate, member, ~member)
        figure = audited(member, told, np.ones(m, dtype=bool), delta=0)
        bounds.append(figure.value)
    assert np.mean(np.array(bounds) > epsilon) < 0.05 + 3 * (0.05 * 0.95 / 200) ** 0.5
    assert 0.8 < float(np.median(bounds)) < 1.0


def test_only_guesses_count():
    member = np.arange(100) % 2 == 0
    guessed = np.arange(100) < 40
    decision = np.where(guessed, member, ~member)
    figure = audited(member, decision, guessed)
    assert figure.value == figure.interval.low == epsilon_lower(100, 40, 40)
    assert figure.interval.high is None
    assert "40 guesses" in figure.interval.method
    assert figure.n == 100
    nothing = audited(member, decision, np.zeros(100, dtype=bool))
    assert nothing.value is None
    assert nothing.reason == "the auditor guessed on no example"


@pytest.mark.parametrize("bad", [(5, 6, 1), (5, 5, 6), (5, 5, -1)])
def test_impossible_counts_are_refused(bad):
    with pytest.raises(ValueError, match="out of range"):
        epsilon_lower(*bad)
    with pytest.raises(ValueError, match="confidence"):
        epsilon_lower(5, 5, 5, confidence=1.0)


# -- the attack ------------------------------------------------------------------------------------------------------
SPEC = net_spec("mlp", (4,), 4, {"hidden": ""})
PLAN = Plan(SPEC, 2, Local("gradient", batch=64))


def asked(size: float, seed: int = 0, count: int = 200) -> tuple[View, list[Challenge], Tensor]:
    """Return a client's view of a model that answers its input, both halves' challenges, and who was in.

    A member has `size` more on its label's logit; everybody's logits are noise of deviation 1.
    """
    g = seeded(seed)
    member = torch.rand(count, generator=g) < 0.5
    labels = torch.eye(4)[torch.randint(4, (count,), generator=g)]
    x = torch.randn(count, 4, generator=g) + size * member[:, None] * labels
    view = delivered(PLAN, {"head.weight": torch.eye(4), "head.bias": torch.zeros(4)})
    half = torch.arange(count) % 2 == 0
    known = [torch.where(half == side, -1, member.to(torch.int8)) for side in (True, False)]
    return view, [Challenge((), 1, x=x, labels=labels, known=k.to(torch.int8)) for k in known], member


def bound(view: View, challenges: list[Challenge], member: Tensor, attack: OneRunAudit | None = None) -> Estimate:
    """Return the figure of both halves together, as the scorer pools them."""
    decision, guessed = torch.zeros(len(member), dtype=torch.bool), torch.zeros(len(member), dtype=torch.bool)
    guesses = (attack or OneRunAudit()).run(view, challenges, seeded(0))
    for guess, challenge in zip(guesses, challenges, strict=True):
        unknown = challenge.known == -1
        assert bool(guess.abstain[~unknown].all())
        decision[unknown], guessed[unknown] = guess.decision[unknown], ~guess.abstain[unknown]
    return audited(member.numpy(), decision.numpy(), guessed.numpy())


def test_planted_leak_gives_a_bound_and_noise_gives_none():
    strong = bound(*asked(8.0))
    assert strong.value > 2.5
    assert strong.value <= epsilon_lower(200, 100, 100)
    assert "100 guesses" in strong.interval.method
    assert bound(*asked(3.0)).value < strong.value
    nulls = [bound(*asked(0.0, seed)).value for seed in range(40)]
    assert sum(value > 0 for value in nulls) <= stats.binom.ppf(0.999, 40, 0.05)


def test_guessing_on_fewer_is_surer():
    """At a middling leak the surest tenth is righter than the whole; how many are guessed on is fixed by the share."""
    view, challenges, member = asked(3.0, count=1000)
    for share, made in ((0.1, 50), (0.5, 250), (1.0, 500)):
        guesses = OneRunAudit(share=share).run(view, challenges, torch.Generator())
        assert [int((~g.abstain).sum()) for g in guesses] == [made, made]
        assert [int((g.decision & ~g.abstain).sum()) for g in guesses] == [made // 2, made // 2]
    right = []
    for share in (0.1, 1.0):
        guess = OneRunAudit(share=share).run(view, challenges, torch.Generator())[0]
        right.append(float((guess.decision == member)[~guess.abstain].double().mean()))
    assert right[0] > right[1] + 0.05


def test_the_known_half_is_never_used():
    view, challenges, _ = asked(3.0)
    flipped = [replace(c, known=torch.where(c.known >= 0, 1 - c.known, c.known)) for c in challenges]
    straight, other = (OneRunAudit().run(view, c, seeded(1)) for c in (challenges, flipped))
    for a, b, challenge in zip(straight, other, challenges, strict=True):
        unknown = challenge.known == -1
        assert torch.equal(a.score, b.score)
        assert torch.equal(a.abstain, b.abstain)
        assert torch.equal(a.decision[unknown], b.decision[unknown])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.floats(0.01, 1), st.integers(0, 99))
@settings(max_examples=80)
def test_extremes_are_extreme_and_ties_are_lots(scores, share, seed):
    values = torch.tensor(scores, dtype=torch.float64)
    where = torch.arange(len(scores)) % 3 != 1
    decision, abstain = extremes(values, where, share, seeded(seed))
    count = int(where.sum())
    each = min(round(share * count / 2), count // 2)
    high, low = decision & ~abstain, ~decision & ~abstain
    assert int(high.sum()) == int(low.sum()) == each
    assert bool(abstain[~where].all())
    if each:
        rest = values[where & abstain]
        assert float(values[high].min()) >= max([float(values[low].max()), *rest.tolist()])
        assert float(values[low].max()) <= min([float(values[high].min()), *rest.tolist()])
    again = extremes(values, where, share, seeded(seed))
    assert torch.equal(decision, again[0])
    assert torch.equal(abstain, again[1])


def test_equal_scores_are_coins():
    """A model that cannot be queried: as many right as wrong, over forty federations."""
    right = total = 0
    for seed in range(40):
        view, challenges, member = asked(8.0, seed)
        broken = replace(view, mail=())
        guesses = OneRunAudit().run(broken, challenges, seeded(seed))
        for guess, challenge in zip(guesses, challenges, strict=True):
            assert len(guess.score.unique()) == 1
            made = (challenge.known == -1) & ~guess.abstain
            right, total = right + int((guess.decision == member)[made].sum()), total + int(made.sum())
    low, high = stats.binom.interval(0.999, total, 0.5)
    assert low <= right <= high


def test_references_and_uploads_are_used_where_there_are_any():
    view, challenges, _ = asked(3.0)
    count = len(challenges[0].x)
    g = seeded(3)
    keep = torch.arange(8)[:, None] % 2 == torch.arange(count) % 2
    outputs = torch.randn(8, 1, count, 4, generator=g, dtype=torch.float64)
    outputs = outputs + 3 * keep[:, None, :, None] * challenges[0].labels
    references = References(keep, outputs, torch.zeros(0, 4), torch.zeros(0, 4), torch.zeros(8, 0, 4).double())
    told = replace(challenges[0], references=references)
    (with_references,) = OneRunAudit().run(view, [told], torch.Generator())
    assert torch.equal(with_references.score, LiRA().run(view, [told], torch.Generator())[0].score)
    update = {n: torch.randn(v.shape, generator=g) for n, v in initial(SPEC, 0).items()}
    server = View("server/1", SERVER, PLAN, NoDefense(), letters(1, 1, view.mail[0].message.params, update), ())
    (by_uploads,) = OneRunAudit().run(server, [told], torch.Generator())
    assert torch.equal(by_uploads.score, UpdateCosine().run(server, [told], torch.Generator())[0].score)
