"""FedMIA: other clients' updates as the null. Stacking: one classifier over all scores."""

from dataclasses import replace

import pytest
import torch
from observations import CHANCE, deviations, drawn_rounds, seeded
from sklearn.metrics import roc_auc_score
from torch import Tensor

from ppbench.adversary.attack import Challenge
from ppbench.attacks.membership.model_queries import MembershipQuestion
from ppbench.attacks.membership.stack import Stack
from ppbench.attacks.membership.updates import FedMIA, UpdateCosine, against_others
from ppbench.federation.plan import Local, Plan
from ppbench.federation.view import View
from ppbench.nets.net import net_spec
from ppbench.testing.small_federation import POISONS, with_changed_mail

CLIENTS, COUNT, ROUNDS = 5, 60, 4
SPEC = net_spec("mlp", (1, 8, 8), 10, {"hidden": "32"})
PLAN = Plan(SPEC, CLIENTS, Local("gradient", batch=COUNT))


def seen(size: float = 0.0, seed: int = 0) -> tuple[View, Challenge, Tensor]:
    """Return a server's view of gradients at drawn weights, a challenge, who was in; size: of noise, in norms."""
    return drawn_rounds(PLAN, COUNT, ROUNDS, size, seed)[:3]


def score(view: View, challenge: Challenge, attack: FedMIA | Stack | UpdateCosine, seed: int = 0) -> Tensor:
    (guess,) = attack.run(view, [challenge], seeded(seed))
    assert guess.score.dtype == torch.float64 and bool(guess.score.isfinite().all())
    return guess.score


def test_planted_leak_and_the_joint_regression_is_what_finds_them():
    """Over ten seeds .86 to .98; plain cosines .39 to .61, as in `test_update_cosine`."""
    view, challenge, member = seen()
    joint, alone = (roc_auc_score(member, score(view, challenge, a)) for a in (FedMIA(), FedMIA(alone=True)))
    assert joint > 0.78 and joint > alone + 0.1


@pytest.mark.parametrize("attack", [FedMIA(), Stack()], ids=["fedmia", "stack"])
def test_null_noise_tells_nothing(attack):
    view, challenge, member = seen(1e4)
    challenges = challenge.known == -1
    assert abs(deviations(member[challenges], score(view, challenge, attack)[challenges])) < CHANCE


def test_a_statistic_is_judged_by_the_other_clients_alone():
    """A hand-made round: shifts and scales that all share do not matter, the judged client is no part of its null."""
    g = seeded(0)
    result = torch.randn(1, 8, 50, generator=g, dtype=torch.float64)
    result[0, 3, 7] += 10
    told_ = against_others(result)
    assert told_.shape == result.shape and float(told_[0, 3, 7]) > 0.999 and float(told_[0, 2, 7]) < 0.6
    assert torch.allclose(against_others(5 * result - 2), told_)
    assert abs(float(told_.mean()) - 0.5) < 0.03


def test_too_few_others_or_a_sum_of_all_say_nothing():
    result = torch.randn(2, 3, 5, generator=seeded(1), dtype=torch.float64)
    broken = result.clone()
    broken[0, 0] = torch.nan
    assert against_others(broken)[0].isnan().all() and against_others(broken)[1].isfinite().all()
    assert against_others(result[:, :1].expand(2, 3, 5)).isnan().all()


@pytest.mark.parametrize("poison", ["nan", "no mail"])
def test_where_nothing_can_be_read_decisions_are_coins(poison):
    view, challenge, _ = seen()
    view = replace(view, mail=()) if poison == "no mail" else with_changed_mail(view, POISONS["nan"])
    first, other = (FedMIA().run(view, [challenge], seeded(s))[0] for s in (1, 2))
    assert len(first.score.unique()) == 1 and not torch.equal(first.decision, other.decision)


def test_stacking_is_as_good_as_its_best_part_and_one_seed_gives_one_guess():
    view, challenge, member = seen(0.5)
    challenges = challenge.known == -1
    stacked, best = (score(view, challenge, a)[challenges] for a in (Stack(), UpdateCosine()))
    assert roc_auc_score(member[challenges], stacked) > roc_auc_score(member[challenges], best) - 0.1
    assert torch.equal(score(view, challenge, Stack()), score(view, challenge, Stack(), seed=5))


def test_two_weak_columns_are_stronger_together_and_the_asked_half_is_not_looked_at():
    g, member = seeded(3), torch.arange(400) % 2 == 0
    known = torch.where(torch.arange(400) < 200, member.to(torch.int8), torch.tensor(-1, dtype=torch.int8))
    signal = torch.randn(400, 3, generator=g, dtype=torch.float64)
    signal[:, :2] += member[:, None].double()
    signal[:, 2] = torch.nan
    question = MembershipQuestion(torch.zeros(400, 10, dtype=torch.float64), known)
    guess = Stack().answer(PLAN, signal, question, seeded())
    alone = max(roc_auc_score(member[200:], signal[200:, c]) for c in (0, 1))
    assert roc_auc_score(member[200:], guess.score[200:]) > alone + 0.02
    moved = signal.clone()
    moved[200:] += 3  # what is asked about moves no coefficient
    order = guess.score[:200].argsort()
    assert torch.equal(Stack().answer(PLAN, moved, question, seeded()).score[:200].argsort(), order)
    nothing = Stack().answer(PLAN, torch.full((400, 2), torch.nan), question, seeded())
    assert not nothing.score.any() and 120 < int(nothing.decision.sum()) < 280
