"""Membership attacks on a model's outputs: modified entropy and the classifier of outputs, beside the loss."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from observations import CHANCE, delivered, deviations, half_known, seeded
from scipy import stats
from sklearn.metrics import roc_auc_score
from torch import Tensor

from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.membership.model_queries import MembershipAttack, best_threshold, last_model, log_probabilities
from ppbench.attacks.membership.outputs import (
    LossThreshold,
    ModifiedEntropy,
    OutputClassifier,
    modified_entropy,
    signals,
)
from ppbench.base.errors import UsageError
from ppbench.base.tree import Params
from ppbench.federation.plan import Data, Plan
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER, Envelope, Hello, Model, Slot, Update
from ppbench.nets.net import LossName, initial, net_spec
from ppbench.testing.record_attacks import fitted_weights
from ppbench.testing.small_federation import all_digits

COUNT = 120
SPEC = net_spec("mlp", (1, 8, 8), 10, {"hidden": "64"})
PLANS: dict[LossName, Plan] = {loss: Plan(SPEC, 2, loss=loss) for loss in ("cross_entropy", "squared")}
ATTACKS: list[type[MembershipAttack]] = [LossThreshold, ModifiedEntropy, OutputClassifier]
each_attack = pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: a.name)
each_loss = pytest.mark.parametrize("loss", PLANS)


@lru_cache
def candidates(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, one-hot labels (drawn, so that only memory helps) and membership of 2 * COUNT digits."""
    g = seeded(seed)
    x = all_digits().x[torch.randperm(len(all_digits().x), generator=g)[: 2 * COUNT]]
    labels = torch.randint(0, 10, (2 * COUNT,), generator=g)
    return x, torch.nn.functional.one_hot(labels, 10).float(), torch.randperm(2 * COUNT, generator=g) < COUNT


@pytest.fixture(scope="module")
def overfit() -> dict[str, Params]:
    x, y, member = candidates()
    return {loss: fitted_weights(plan, Data(x[member], y[member]), 0.01, 200) for loss, plan in PLANS.items()}


def ask(
    attack: MembershipAttack, seen: View, known: Tensor, seed: int = 0, order: Tensor | None = None, data: int = 0
) -> Guess:
    x, y, _ = candidates(data)
    order = torch.arange(len(x)) if order is None else order
    challenge = Challenge((Slot(-1, 0),), 1, x=x[order], labels=y[order], known=known[order])
    (guess,) = attack.run(seen, [challenge], seeded(seed))
    assert guess.score.dtype == torch.float64
    assert guess.score.shape == guess.decision.shape == (len(x),)
    assert bool(guess.score.isfinite().all())
    assert guess.decision.dtype == torch.bool
    return guess


# -- leaks and nulls -------------------------------------------------------------------------------------------------
@each_attack
@each_loss
def test_planted_leak_an_overfit_model_betrays_its_members(attack, loss, overfit):
    _, _, member = candidates()
    known = half_known(member)
    guess = ask(attack(), delivered(PLANS[loss], overfit[loss]), known)
    unknown = known == -1
    assert roc_auc_score(member[unknown], guess.score[unknown]) > 0.9
    assert float((guess.decision == member)[unknown].double().mean()) > 0.8


@each_attack
@each_loss
def test_null_an_untrained_model_is_inside_the_interval_of_chance(attack, loss):
    """Two seeds of 60 members and 60 others."""
    areas, right, count = [], 0, 0
    for seed in range(2):
        _, _, member = candidates(seed)
        known = half_known(member)
        guess = ask(attack(), delivered(PLANS[loss], initial(SPEC, seed)), known, data=seed)
        unknown = known == -1
        areas.append(deviations(member[unknown], guess.score[unknown]))
        right, count = right + int((guess.decision == member)[unknown].sum()), count + int(unknown.sum())
    assert max(map(abs, areas)) < CHANCE
    assert abs(sum(areas)) / 2**0.5 < CHANCE
    low, high = stats.binom.interval(0.999, count, 0.5)
    assert low <= right <= high


def test_the_classifier_finds_what_no_threshold_on_the_loss_does():
    """Members have losses of middle size, others small or large ones: only a rule that is not monotone tells them."""
    g = seeded(0)
    member = torch.rand(400, generator=g) < 0.5
    extreme = torch.where(torch.rand(400, generator=g) < 0.5, -4.0, 4.0)
    margin = torch.where(member, 0.0, extreme) + 0.5 * torch.randn(400, generator=g)
    outputs = torch.stack([margin, torch.zeros(400)], 1).double()
    plan = Plan(net_spec("mlp", (2,), 2, {"hidden": ""}), 2)
    labels = torch.tensor([[1.0, 0.0]]).double().expand(400, 2)
    x = torch.arange(400.0)[:, None].expand(400, 2)
    known = half_known(member)
    areas = {}
    for attack in (LossThreshold, OutputClassifier):

        class Told(attack):
            def signal(self, view: View, challenge: Challenge) -> Tensor:
                return outputs

        question = Challenge((), 1, x=x, labels=labels, known=known)
        (guess,) = Told().run(delivered(plan, {}), [question], torch.Generator())
        areas[attack.name] = roc_auc_score(member[known == -1], guess.score[known == -1])
    assert areas["mia_loss"] < 0.6
    assert areas["mia_nn"] > 0.95


# -- determinism, order, coins ---------------------------------------------------------------------------------------
@each_attack
def test_the_order_of_the_candidates_does_not_matter(attack, overfit):
    """Up to the rounding of a matrix product, whose sums depend on a record's place in it."""
    known, seen = half_known(candidates()[2]), delivered(PLANS["squared"], overfit["squared"])
    order = torch.randperm(len(known), generator=seeded(5))
    straight, moved = ask(attack(), seen, known), ask(attack(), seen, known, order=order)
    scale = float(straight.score.std())
    assert torch.allclose(moved.score, straight.score[order], atol=0.02 * scale, rtol=1e-3)
    assert float((moved.decision == straight.decision[order]).double().mean()) > 0.98


def only(pairs: dict[int, int]) -> Tensor:
    known = torch.full((2 * COUNT,), -1, dtype=torch.int8)
    for place, value in pairs.items():
        known[place] = value
    return known


@each_attack
@pytest.mark.parametrize("known", [{}, {0: 1, 3: 1, 9: 1}, {2: 0, 7: 0}])
def test_decisions_are_coins_where_one_class_is_known(attack, known, overfit):
    seen = delivered(PLANS["cross_entropy"], overfit["cross_entropy"])
    first, again, other = (ask(attack(), seen, only(known), seed) for seed in (1, 1, 2))
    assert torch.equal(first.decision, again.decision)
    assert not torch.equal(first.decision, other.decision)
    assert 0.35 < float(first.decision.double().mean()) < 0.65


@each_attack
def test_one_known_record_of_each_kind_is_enough(attack, overfit):
    _, _, member = candidates()
    known = only({int(member.nonzero()[0]): 1, int((~member).nonzero()[0]): 0})
    guess = ask(attack(), delivered(PLANS["squared"], overfit["squared"]), known)
    assert bool(guess.decision[known == 1].all()) and not bool(guess.decision[known == 0].any())


# -- one door, odd models ---------------------------------------------------------------------------------------------
@each_attack
def test_a_record_on_which_the_model_diverges_scores_lowest_and_harms_no_other(attack, overfit):
    class Diverging(attack):
        def signal(self, view: View, challenge: Challenge) -> Tensor:
            result = super().signal(view, challenge)
            result[[3, 4, 5]] = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=torch.float64)[:, None]
            return result

    _, _, member = candidates()
    known = half_known(member)
    guess = ask(Diverging(), delivered(PLANS["cross_entropy"], overfit["cross_entropy"]), known)
    assert bool((guess.score[3:6] == guess.score.min()).all())
    sound = (known == -1) & (torch.arange(len(known)) > 5)
    assert roc_auc_score(member[sound], guess.score[sound]) > 0.9


def test_a_float64_model_is_queried_in_float64(overfit):
    plan, (x, y, member) = PLANS["squared"], candidates()
    double = {name: value.double() for name, value in overfit["squared"].items()}
    outputs = LossThreshold().signal(delivered(plan, double), Challenge((), 1, x=x, labels=y, known=half_known(member)))
    assert outputs.dtype == torch.float64
    assert torch.equal(outputs, plan.net(double, x.double()))


@pytest.fixture(scope="module")
def regression() -> tuple[View, Challenge, Tensor]:
    """A model of one output that learned targets of noise by heart, a question about it, and who was a member."""
    x, _, member = candidates()
    plan = Plan(net_spec("mlp", (1, 8, 8), 1, {"hidden": "64"}), 2, loss="squared")
    y = torch.randn(len(x), 1, generator=seeded(2))
    params = fitted_weights(plan, Data(x[member], y[member]), 0.01, 400)
    return delivered(plan, params), Challenge((), 1, x=x, labels=y, known=half_known(member)), member


@each_attack
def test_regression_with_one_output(attack, regression):
    """Residuals tell members; `mia_mentr` scores as `mia_loss`."""
    seen, challenge, member = regression
    (guess,) = attack().run(seen, [challenge], torch.Generator())
    challenges = challenge.known == -1
    assert roc_auc_score(member[challenges], guess.score[challenges]) > 0.9
    if attack is ModifiedEntropy:
        (loss,) = LossThreshold().run(seen, [challenge], torch.Generator())
        assert torch.equal(guess.score, loss.score)


# -- formulas --------------------------------------------------------------------------------------------------------
@given(st.lists(st.floats(-8, 8), min_size=2, max_size=6), st.integers(0, 5))
@settings(max_examples=80)
def test_modified_entropy_is_the_papers_formula(logits, label):
    z = torch.tensor([logits], dtype=torch.float64)
    y = label % len(logits)
    p = z.softmax(-1)[0].tolist()
    expected = -(1 - p[y]) * z.log_softmax(-1)[0, y].item() - sum(
        q * torch.log1p(torch.tensor(-q, dtype=torch.float64)).item() for j, q in enumerate(p) if j != y
    )
    result = modified_entropy(z.log_softmax(-1), torch.nn.functional.one_hot(torch.tensor([y]), len(logits)))
    assert float(result) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_modified_entropy_is_monotone_where_probabilities_round_to_one():
    """Confidence grows from logits 0 to 700: right predictions approach 0 from above, wrong ones grow for ever."""
    z = torch.zeros(701, 3, dtype=torch.float64)
    z[:, 0] = torch.arange(701.0)
    right = modified_entropy(z.log_softmax(-1), torch.tensor([[1, 0, 0]]).expand(701, 3))
    wrong = modified_entropy(z.log_softmax(-1), torch.tensor([[0, 1, 0]]).expand(701, 3))
    assert bool((right[1:371].diff() < 0).all())
    assert bool((right >= 0).all())
    assert bool((wrong.diff() > 0).all())


def test_probabilities_of_a_squared_loss_are_clipped_outputs():
    outputs = torch.tensor([[0.5, 2.0, -3.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    p = log_probabilities(PLANS["squared"], outputs).exp()
    assert torch.allclose(p[0], torch.tensor([1 / 3, 2 / 3, 0.0], dtype=torch.float64), atol=1e-11)
    assert torch.allclose(p[1], torch.full((3,), 1 / 3, dtype=torch.float64))
    assert torch.allclose(log_probabilities(PLANS["cross_entropy"], outputs).exp(), outputs.softmax(-1))


def test_signals_are_those_of_the_membership_papers():
    z = torch.tensor([[2.0, 0.0, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    y = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    plan = Plan(net_spec("mlp", (2,), 3, {"hidden": ""}), 2)
    result = signals(plan, z, y)
    p = z.softmax(-1)
    assert torch.allclose(result[:, :3], p.sort(-1).values)
    assert torch.allclose(result[:, 3], torch.stack([p[0, 0], p[1, 2]]))
    assert torch.allclose(result[:, 4], plan.example_loss(z, y))
    assert result[:, 5].tolist() == [1, 1]  # a tie is not a mistake, whichever label it is
    assert result[0, 6].item() == pytest.approx(2 - torch.tensor([0.0, 1.0]).logsumexp(0).item())


def test_the_last_broadcast_to_this_client_is_the_one_used():
    first, second, other = (Model(initial(SPEC, seed)) for seed in range(3))
    sent = (first, 0), (second, 0), (other, 1), (Hello(), 0)
    mail = [Envelope(-1, number, 0, SERVER, receiver, 0, message) for number, (message, receiver) in enumerate(sent)]
    mail.insert(3, Envelope(0, 3, 0, 0, SERVER, 0, Update(initial(SPEC, 4))))
    assert last_model(replace(delivered(PLANS["squared"], {}), mail=tuple(mail))) is second


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=12))
@settings(max_examples=60)
def test_threshold_is_the_best_one_and_treats_equal_scores_alike(pairs):
    scores = torch.tensor([float(s) for s, _ in pairs], dtype=torch.float64)
    member = torch.tensor([m for _, m in pairs])
    result = best_threshold(scores, member)
    if len(scores.unique()) < 2 or bool(member.all()) or not bool(member.any()):
        assert result is None
        return

    def balanced(t: float) -> float:
        return float(((scores[member] >= t).double().mean() + (scores[~member] < t).double().mean()) / 2)

    assert result is not None and result not in scores.tolist()
    assert balanced(result) == pytest.approx(max(balanced(t + 0.5) for t in range(-4, 4)))


@each_attack
def test_an_incomplete_challenge_is_refused(attack, overfit):
    with pytest.raises(UsageError, match=f"'{attack.name}'.*must have all three"):
        attack().run(delivered(PLANS["squared"], overfit["squared"]), [Challenge((), 1)], torch.Generator())
