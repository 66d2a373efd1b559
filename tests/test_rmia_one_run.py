"""The one-run audit: its bound by brute force, its attack; RMIA against loops, its ties; augmented copies."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from observations import delivered, half_known, letters, seeded
from scipy import stats
from sklearn.metrics import roc_auc_score
from torch import Tensor

from ppbench.adversary.attack import Challenge, References
from ppbench.adversary.victims import MOST_AUGMENTATIONS, augmentations
from ppbench.attacks.membership.audits import OneRunAudit, extremes
from ppbench.attacks.membership.references import RMIA, LiRA, OfflineRMIA, beaten, log_mean, log_prior
from ppbench.attacks.membership.updates import UpdateCosine
from ppbench.base.errors import UsageError
from ppbench.defenses.none import NoDefense
from ppbench.federation.plan import Local, Plan
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER
from ppbench.metrics.epsilon import epsilon_bound, epsilon_lower, p_value
from ppbench.metrics.intervals import Estimate
from ppbench.metrics.membership import Half, operating_point
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
        result = np.where(g.random(m) < rate, member, ~member)
        figure = epsilon_bound(member, result, np.ones(m, dtype=bool), delta=0)
        bounds.append(figure.value)
    assert np.mean(np.array(bounds) > epsilon) < 0.05 + 3 * (0.05 * 0.95 / 200) ** 0.5
    assert 0.8 < float(np.median(bounds)) < 1.0


def test_what_an_auditor_would_have_said_in_its_silence_does_not_count():
    member, place = np.arange(100) % 2 == 0, np.arange(100)
    guessed, right = place < 40, np.where(place < 6, ~member, member)  # 34 of the 40 guesses
    for unsaid in (member, ~member):
        figure = epsilon_bound(member, np.where(guessed, right, unsaid), guessed)
        assert figure.value == figure.interval.low == epsilon_lower(100, 40, 34)
        assert figure.interval.high is None and figure.n == 100
        assert "40 guesses" in figure.interval.method
    nothing = epsilon_bound(member, right, np.zeros(100, dtype=bool))
    assert (nothing.value, nothing.reason) == (None, "the auditor guessed on no example")


@pytest.mark.parametrize("bad", [(5, 6, 1), (5, 5, 6), (5, 5, -1)])
def test_impossible_counts_are_refused(bad):
    with pytest.raises(ValueError, match="out of range"):
        epsilon_lower(*bad)


# -- the attack ------------------------------------------------------------------------------------------------------
CLASSES = 4
SPEC = net_spec("mlp", (CLASSES,), CLASSES, {"hidden": ""})
PLAN = Plan(SPEC, 2, Local("gradient", batch=64))
VIEW = delivered(PLAN, {"head.weight": torch.eye(CLASSES), "head.bias": torch.zeros(CLASSES)})
"""Of a model that answers its input: a candidate's x is the target's logits on it."""


def questions(size: float, seed: int = 0, count: int = 200) -> tuple[View, list[Challenge], Tensor]:
    """Return the view, both halves' challenges, and who was in.

    A member has `size` more on its label's logit; everybody's logits are noise of deviation 1.
    """
    g = seeded(seed)
    member = torch.rand(count, generator=g) < 0.5
    labels = torch.eye(4)[torch.randint(4, (count,), generator=g)]
    x = torch.randn(count, 4, generator=g) + size * member[:, None] * labels
    half = torch.arange(count) % 2 == 0
    known = [torch.where(half == side, -1, member.to(torch.int8)) for side in (True, False)]
    return VIEW, [Challenge((), 1, x=x, labels=labels, known=k.to(torch.int8)) for k in known], member


def bound(view: View, challenges: list[Challenge], member: Tensor, attack: OneRunAudit | None = None) -> Estimate:
    """Return the figure of both halves together, as the scorer pools them."""
    decision, guessed = torch.zeros(len(member), dtype=torch.bool), torch.zeros(len(member), dtype=torch.bool)
    guesses = (attack or OneRunAudit()).run(view, challenges, seeded(0))
    for guess, challenge in zip(guesses, challenges, strict=True):
        unknown = challenge.known == -1
        assert bool(guess.abstain[~unknown].all())
        decision[unknown], guessed[unknown] = guess.decision[unknown], ~guess.abstain[unknown]
    return epsilon_bound(member.numpy(), decision.numpy(), guessed.numpy())


def test_planted_leak_gives_a_bound_and_noise_gives_none():
    strong = bound(*questions(8.0))
    assert 2.5 < strong.value <= epsilon_lower(200, 100, 100)
    assert "100 guesses" in strong.interval.method
    assert 0.2 < bound(*questions(1.0)).value < strong.value - 1
    nulls = [bound(*questions(0.0, seed)).value for seed in range(40)]
    assert sum(value > 0 for value in nulls) <= stats.binom.ppf(0.999, 40, 0.05)


def test_guessing_on_fewer_is_surer():
    """At a middling leak the surest tenth is righter than the whole; how many are guessed on is fixed by the share."""
    view, challenges, member = questions(3.0, count=1000)
    right = []
    for share, made in ((0.1, 50), (0.5, 250), (1.0, 500)):
        guesses = OneRunAudit(share=share).run(view, challenges, torch.Generator())
        assert [int((~g.abstain).sum()) for g in guesses] == [made, made]
        assert [int((g.decision & ~g.abstain).sum()) for g in guesses] == [made // 2, made // 2]
        right.append(float((guesses[0].decision == member)[~guesses[0].abstain].double().mean()))
    assert right[0] > right[-1] + 0.05


def test_the_known_half_is_never_used():
    view, challenges, _ = questions(3.0)
    flipped = [replace(c, known=torch.where(c.known >= 0, 1 - c.known, c.known)) for c in challenges]
    straight, other = (OneRunAudit().run(view, c, seeded(1)) for c in (challenges, flipped))
    for a, b, challenge in zip(straight, other, challenges, strict=True):
        unknown = challenge.known == -1
        assert torch.equal(a.score, b.score) and torch.equal(a.abstain, b.abstain)
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
    assert all(map(torch.equal, (decision, abstain), extremes(values, where, share, seeded(seed))))


def test_equal_scores_are_coins():
    """A model that cannot be queried: as many right as wrong, over forty federations."""
    right = total = 0
    for seed in range(40):
        view, challenges, member = questions(8.0, seed)
        broken = replace(view, mail=())
        guesses = OneRunAudit().run(broken, challenges, seeded(seed))
        for guess, challenge in zip(guesses, challenges, strict=True):
            assert len(guess.score.unique()) == 1
            made = (challenge.known == -1) & ~guess.abstain
            right, total = right + int((guess.decision == member)[made].sum()), total + int(made.sum())
    low, high = stats.binom.interval(0.999, total, 0.5)
    assert low <= right <= high


def test_references_and_uploads_are_used_where_there_are_any():
    view, challenges, _ = questions(3.0)
    count = len(challenges[0].x)
    g = seeded(3)
    keep = torch.arange(8)[:, None] % 2 == torch.arange(count) % 2
    outputs = torch.randn(8, 1, count, 4, generator=g, dtype=torch.float64)
    outputs = outputs + 3 * keep[:, None, :, None] * challenges[0].labels
    references = References(keep, outputs, torch.zeros(0, 4), torch.zeros(0, 4), torch.zeros(8, 0, 4).double())
    result = replace(challenges[0], references=references)
    (with_references,) = OneRunAudit().run(view, [result], torch.Generator())
    assert torch.equal(with_references.score, LiRA().run(view, [result], torch.Generator())[0].score)
    update = {n: torch.randn(v.shape, generator=g) for n, v in initial(SPEC, 0).items()}
    server = View("server/1", SERVER, PLAN, NoDefense(), letters(1, 1, view.mail[0].message.params, update), ())
    (by_uploads,) = OneRunAudit().run(server, [result], torch.Generator())
    assert torch.equal(by_uploads.score, UpdateCosine().run(server, [result], torch.Generator())[0].score)


# -- RMIA (planted leaks on trained models are in test_lira) ----------------------------------------------------------
@given(st.integers(0, 2**31), st.integers(1, 4), st.floats(0, 1), st.booleans())
@settings(max_examples=50)
def test_the_prior_is_the_papers_by_loops(seed, pairs, a, online):
    g = np.random.default_rng(seed)
    p, keep = g.uniform(1e-6, 1, size=(2 * pairs, 2, 3)), np.zeros((2 * pairs, 3), dtype=bool)
    for q in range(3):
        keep[g.permutation(2 * pairs)[:pairs], q] = True
    result = log_prior(torch.tensor(p).log(), torch.tensor(keep), a, online)
    for q in range(3):
        inside, outside = p[keep[:, q], :, q].mean(0), p[~keep[:, q], :, q].mean(0)
        expected = (inside + outside) / 2 if online else ((1 + a) * outside + 1 - a) / 2
        assert np.allclose(result[:, q].exp().numpy(), expected, rtol=1e-9)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=8), st.lists(st.integers(-3, 3), min_size=1, max_size=20))
@settings(max_examples=80)
def test_the_share_is_counted_ties_included(ratios, population):
    """Ratios are powers of 2, so that some are equal: LR >= gamma counts them."""
    x, z = torch.tensor(ratios).double() * math.log(2), torch.tensor(population).double() * math.log(2)
    for gamma in (1.0, 3.0):
        expected = [np.mean([math.exp(a - b) >= gamma * (1 - 1e-9) for b in z.tolist()]) for a in x.tolist()]
        assert beaten(x, z, gamma).tolist() == pytest.approx(expected)


def challenge(runs: int, seed: int = 0, count: int = 300, population: int = 500) -> tuple[Challenge, Tensor]:
    """Return a challenge of records that models know by heart (2 more on the label's logit), and who was a member."""
    g = seeded(seed)
    label = torch.randint(CLASSES, (count + population,), generator=g)
    hot = torch.nn.functional.one_hot(label, CLASSES).double()
    base = 1.5 * torch.randn(count + population, CLASSES, generator=g, dtype=torch.float64)
    noise = 0.5 * torch.randn(runs + 1, count + population, CLASSES, generator=g, dtype=torch.float64)
    once = torch.rand(runs // 2, count, generator=g) < 0.5
    keep, member = torch.cat([once, ~once]), torch.rand(count, generator=g) < 0.5
    learned = torch.cat([torch.cat([member[None], keep]).double(), torch.zeros(runs + 1, population).double()], 1)
    logits = base + noise + 2 * learned[..., None] * hot
    x, labels = logits[0].float(), hot.float()
    references = References(keep, logits[1:, None, :count], labels[count:], x[count:], logits[1:, count:])
    own = dict(x=x[:count], labels=labels[:count], known=half_known(member), references=references)
    return Challenge((), 1, **own), member


@pytest.mark.parametrize("runs", [2, 8])
@pytest.mark.parametrize("attack", [RMIA(), RMIA(gamma=2.0), OfflineRMIA(), OfflineRMIA(gamma=2.0, a=0.6)])
def test_two_to_eight_references_beat_the_loss(runs, attack):
    challenges, member = challenge(runs)
    (guess,) = attack.run(VIEW, [challenges], torch.Generator())
    likely = challenges.x.double().log_softmax(-1)[challenges.labels == 1]
    gain = 0.1 if type(attack) is RMIA else 0.02  # over ten seeds .15 or more, offline .055
    assert roc_auc_score(member, guess.score) > roc_auc_score(member, likely) + gain
    assert roc_auc_score(member, guess.score) > 0.75


def test_gamma_moves_shares_and_the_tie_break_keeps_the_order():
    challenges, _ = challenge(4)
    one, two = (RMIA(gamma=gamma).run(VIEW, [challenges], torch.Generator())[0].score for gamma in (1.0, 2.0))
    assert bool((two <= one + 1e-6).all())
    assert len(two.unique()) == len(two)  # shares of 500 alone would tie
    assert torch.equal(one.argsort(), two.argsort())


def test_ties_break_where_the_population_is_beaten_whole():
    """TPR at a low FPR lives at the very top, where every member beats all z (spec: .000 -> .115)."""
    challenges, member = challenge(4)
    low = replace(challenges.references, x=-9 * challenges.references.labels)  # the target finds all z unlikely
    (guess,) = RMIA().run(VIEW, [replace(challenges, references=low)], torch.Generator())
    assert bool((guess.score > 0.99).all())
    half = Half(member.numpy(), guess.score.numpy(), guess.decision.numpy())
    assert operating_point(half, 0.05)[0] > 0.2


def test_without_a_population_the_ratio_alone_decides():
    challenges, member = challenge(4)
    r = challenges.references
    empty = replace(r, labels=r.labels[:0], x=r.x[:0], population=r.population[:, :0])
    (usual,) = RMIA().run(VIEW, [challenges], torch.Generator())
    for references in (empty, replace(r, x=r.x * torch.nan)):
        (guess,) = RMIA().run(VIEW, [replace(challenges, references=references)], torch.Generator())
        assert torch.equal(guess.score.argsort(), usual.score.argsort())
        assert bool((guess.decision == member).double().mean() > 0.7)


def test_probabilities_that_underflow_are_no_trouble():
    log_p = torch.full((3, 1, 2), -2000.0, dtype=torch.float64)
    keep = torch.tensor([[True, False], [False, True], [False, False]])
    assert log_prior(log_p, keep, 0.3, online=False).tolist() == [pytest.approx([math.log(0.35)] * 2)]
    assert log_prior(log_p, keep, 0.3, online=True).tolist() == [pytest.approx([-2000.0] * 2)]
    assert log_mean(log_p, torch.zeros(3, 1, 2, dtype=torch.bool)).isnan().all()
    never = torch.full((2, 1, 2), -torch.inf).double()
    assert log_prior(never, keep[:2], 1.0, online=True).tolist() == [[-math.inf] * 2]


@pytest.mark.parametrize("count", [1, 2, 3, 7, MOST_AUGMENTATIONS])
def test_the_record_comes_first_and_copies_are_many_and_unlike(count):
    x = torch.rand(3, 2, 5, 6)
    augmented = augmentations(x, count)
    assert augmented.shape == (count, 3, 2, 5, 6)
    assert torch.equal(augmented[0], x)
    assert len({tuple(copy.flatten().tolist()) for copy in augmented}) == count
    assert (
        torch.equal(augmented, augmentations(x.clone(), 1000)[:count])
        and len(augmentations(x, 1000)) == MOST_AUGMENTATIONS
    )


def test_the_second_is_the_mirror_image_and_the_third_a_shift():
    x = torch.arange(12.0).reshape(1, 1, 3, 4)
    augmented = augmentations(x, 4)
    assert torch.equal(augmented[1], x.flip(-1))
    assert augmented[2, 0, 0].tolist() == [[0, 0, 1, 2], [4, 4, 5, 6], [8, 8, 9, 10]]
    assert torch.equal(augmented[3], augmented[2].flip(-1))


@pytest.mark.parametrize("shape", [(4, 7), (4, 3, 8)])
def test_what_is_no_image_has_itself_only_and_fewer_than_one_is_refused(shape):
    x = torch.rand(shape, dtype=torch.float64)
    augmented = augmentations(x, 5)
    assert torch.equal(augmented, x[None]) and augmented.data_ptr() != x.data_ptr()
    with pytest.raises(UsageError, match="expected 1"):
        augmentations(torch.rand(1, 1, 4, 4), 0)
