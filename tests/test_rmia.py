"""RMIA against loops, its ties, odd populations; augmented copies. Planted leaks on trained models are in test_lira."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from observations import delivered, seeded, told
from sklearn.metrics import roc_auc_score
from torch import Tensor

from ppbench.adversary.attack import Challenge, References
from ppbench.adversary.augment import MOST, augmentations
from ppbench.attacks.membership.rmia import RMIA, OfflineRMIA, beaten, log_mean, log_prior
from ppbench.base.errors import UsageError
from ppbench.federation.plan import Plan
from ppbench.metrics.membership import Half, operating_point
from ppbench.nets.net import net_spec

CLASSES = 4
PLAN = Plan(net_spec("mlp", (CLASSES,), CLASSES, {"hidden": ""}), 2)


VIEW = delivered(PLAN, {"head.weight": torch.eye(CLASSES), "head.bias": torch.zeros(CLASSES)})
"""Of a model that answers its input: a candidate's x is the target's logits on it."""


@given(st.integers(0, 2**31), st.integers(1, 4), st.floats(0, 1), st.booleans())
@settings(max_examples=50)
def test_the_prior_is_the_papers_by_loops(seed, pairs, a, online):
    g = np.random.default_rng(seed)
    p, keep = g.uniform(1e-6, 1, size=(2 * pairs, 2, 3)), np.zeros((2 * pairs, 3), dtype=bool)
    for q in range(3):
        keep[g.permutation(2 * pairs)[:pairs], q] = True
    found = log_prior(torch.tensor(p).log(), torch.tensor(keep), a, online)
    for q in range(3):
        inside, outside = p[keep[:, q], :, q].mean(0), p[~keep[:, q], :, q].mean(0)
        expected = (inside + outside) / 2 if online else ((1 + a) * outside + 1 - a) / 2
        assert np.allclose(found[:, q].exp().numpy(), expected, rtol=1e-9)


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
    references = References(
        keep, logits[1:, None, :count], hot[count:].float(), logits[0, count:].float(), logits[1:, count:]
    )
    x, labels = logits[0, :count].float(), hot[:count].float()
    return Challenge((), 1, x=x, labels=labels, known=told(member), references=references), member


@pytest.mark.parametrize("runs", [2, 8])
@pytest.mark.parametrize("attack", [RMIA(), RMIA(gamma=2.0), OfflineRMIA(), OfflineRMIA(gamma=2.0, a=0.6)])
def test_two_to_eight_references_beat_the_loss(runs, attack):
    asked, member = challenge(runs)
    (guess,) = attack.run(VIEW, [asked], torch.Generator())
    likely = asked.x.double().log_softmax(-1)[asked.labels == 1]
    gain = 0.1 if type(attack) is RMIA else 0.02  # over ten seeds .15 or more, offline .055
    assert roc_auc_score(member, guess.score) > roc_auc_score(member, likely) + gain
    assert roc_auc_score(member, guess.score) > 0.75


def test_gamma_moves_shares_and_the_tie_break_keeps_the_order():
    asked, _ = challenge(4)
    one, two = (RMIA(gamma=gamma).run(VIEW, [asked], torch.Generator())[0].score for gamma in (1.0, 2.0))
    assert bool((two <= one + 1e-6).all())
    assert len(two.unique()) == len(two)  # shares of 500 alone would tie
    assert torch.equal(one.argsort(), two.argsort())


def test_ties_break_where_the_population_is_beaten_whole():
    """TPR at a low FPR lives at the very top, where every member beats all z (spec: .000 -> .115)."""
    asked, member = challenge(4)
    low = replace(asked.references, x=-9 * asked.references.labels)  # the target finds all z unlikely
    (guess,) = RMIA().run(VIEW, [replace(asked, references=low)], torch.Generator())
    assert bool((guess.score > 0.99).all())
    half = Half(member.numpy(), guess.score.numpy(), guess.decision.numpy())
    assert operating_point(half, 0.05)[0] > 0.2


def test_without_a_population_the_ratio_alone_decides():
    asked, member = challenge(4)
    r = asked.references
    empty = replace(r, labels=r.labels[:0], x=r.x[:0], population=r.population[:, :0])
    for references in (empty, replace(r, x=r.x * torch.nan)):
        (guess,) = RMIA().run(VIEW, [replace(asked, references=references)], torch.Generator())
        (usual,) = RMIA().run(VIEW, [asked], torch.Generator())
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


@pytest.mark.parametrize("count", [1, 2, 3, 7, MOST])
def test_the_record_comes_first_and_copies_are_many_and_unlike(count):
    x = torch.rand(3, 2, 5, 6)
    found = augmentations(x, count)
    assert found.shape == (count, 3, 2, 5, 6)
    assert torch.equal(found[0], x)
    assert len({tuple(copy.flatten().tolist()) for copy in found}) == count
    assert torch.equal(found, augmentations(x.clone(), 1000)[:count]) and len(augmentations(x, 1000)) == MOST


def test_the_second_is_the_mirror_image_and_the_third_a_shift():
    x = torch.arange(12.0).reshape(1, 1, 3, 4)
    found = augmentations(x, 4)
    assert torch.equal(found[1], x.flip(-1))
    assert found[2, 0, 0].tolist() == [[0, 0, 1, 2], [4, 4, 5, 6], [8, 8, 9, 10]]
    assert torch.equal(found[3], found[2].flip(-1))


@pytest.mark.parametrize("shape", [(4, 7), (4, 3, 8)])
def test_what_is_no_image_has_itself_only(shape):
    x = torch.rand(shape, dtype=torch.float64)
    found = augmentations(x, 5)
    assert torch.equal(found, x[None])
    assert found.data_ptr() != x.data_ptr()


def test_fewer_than_one_is_refused():
    with pytest.raises(UsageError, match="expected 1"):
        augmentations(torch.rand(1, 1, 4, 4), 0)
