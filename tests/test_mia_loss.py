"""Membership by the loss: an overfit model is found out, an untrained one is not, thresholds are fitted honestly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score

from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.membership.base import best_threshold, last_model
from ppbench.attacks.membership.loss import LossThreshold
from ppbench.base.autodiff import gradient
from ppbench.base.errors import UsageError
from ppbench.base.tree import Params
from ppbench.defenses.none import NoDefense
from ppbench.federation.messages import Hello, Model, Update
from ppbench.federation.optim import Layout, Opt
from ppbench.federation.plan import Plan
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER, Envelope, Slot
from ppbench.nets.net import initial, net_spec

SPEC = net_spec("dlnet", (1, 8, 8), 10, {"activation": "tanh"})
PLAN = Plan(SPEC, 2)
COUNT = 60


def candidates() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, one-hot labels (wrong ones, so that only memory helps) and membership of 2 * COUNT digits."""
    g = torch.Generator().manual_seed(0)
    x = torch.tensor(load_digits().images[: 2 * COUNT], dtype=torch.float32)[:, None] / 16
    y = torch.nn.functional.one_hot(torch.randint(0, 10, (2 * COUNT,), generator=g), 10).float()
    return x, y, torch.randperm(2 * COUNT, generator=g) < COUNT


def overfit(x: torch.Tensor, y: torch.Tensor, steps: int) -> Params:
    """Return weights after full-batch Adam on (x, y)."""
    params, opt = initial(SPEC, 0), Opt("adam", lr=0.01)
    layout = Layout.of(params)
    flat = layout.pack(params)
    state, w = opt.init(flat), torch.ones(len(x))
    for _ in range(steps):
        g = gradient(lambda p: PLAN.objective(p, x, y, w), layout.unpack(flat))
        flat, state = opt.step(flat, layout.pack(g), state, torch.tensor(opt.lr))
    return layout.unpack(flat)


def letter(round_: int, receiver: int, message: object) -> Envelope:
    return Envelope(-1, round_, 0, SERVER, receiver, 0, message)


def view(*mail: Envelope) -> View:
    return View("client/1", 0, PLAN, NoDefense(), mail, ())


def ask(seen: View, known: torch.Tensor, seed: int = 0) -> Guess:
    x, y, _ = candidates()
    challenge = Challenge((Slot(-1, 0),), 1, x=x, labels=y, known=known)
    return LossThreshold().run(seen, [challenge], torch.Generator().manual_seed(seed))[0]


def half_known() -> torch.Tensor:
    _, _, member = candidates()
    known = member.to(torch.int8)
    known[1::2] = -1
    return known


def test_planted_leak_an_overfit_model_is_found_out() -> None:
    x, y, member = candidates()
    trained = overfit(x[member], y[member], 150)
    seen = view(letter(0, 0, Hello()), letter(1, 0, Model(initial(SPEC, 0))), letter(2, 0, Model(trained)))
    known = half_known()
    guess = ask(seen, known)
    asked = known == -1
    assert roc_auc_score(member[asked], guess.score[asked]) > 0.9
    assert float((guess.decision == member)[asked].double().mean()) > 0.8


def test_null_an_untrained_model_gives_chance() -> None:
    areas = []
    for seed in range(20):
        member = torch.randperm(2 * COUNT, generator=torch.Generator().manual_seed(seed)) < COUNT
        guess = ask(view(letter(1, 0, Model(initial(SPEC, seed)))), member.to(torch.int8))
        areas.append(roc_auc_score(member, guess.score))
    mean, half = sum(areas) / 20, 2.1 * torch.tensor(areas).std().item() / 20**0.5
    assert abs(mean - 0.5) <= half + 0.01


def test_the_last_broadcast_to_this_client_is_the_one_used() -> None:
    first, second, other = (Model(initial(SPEC, seed)) for seed in range(3))
    up = Envelope(0, 3, 0, 0, SERVER, 0, Update(initial(SPEC, 4)))
    seen = view(letter(1, 0, first), letter(2, 0, second), letter(3, 1, other), up, letter(4, 0, Hello()))
    assert last_model(seen) is second


@pytest.mark.parametrize("known", [half_known(), torch.full((2 * COUNT,), -1, dtype=torch.int8)])
def test_without_a_model_scores_are_equal_and_decisions_are_coins(known: torch.Tensor) -> None:
    guess = ask(view(letter(0, 0, Hello())), known, seed=1)
    assert len(guess.score.unique()) == 1
    assert 0.3 < float(guess.decision.double().mean()) < 0.7
    again, other = ask(view(), known, seed=1), ask(view(), known, seed=2)
    assert torch.equal(guess.decision, again.decision) and not torch.equal(guess.decision, other.decision)


def test_a_diverged_model_gives_finite_scores() -> None:
    broken = {name: torch.full_like(value, float("nan")) for name, value in initial(SPEC, 0).items()}
    guess = ask(view(letter(1, 0, Model(broken))), half_known())
    assert bool(guess.score.isfinite().all()) and guess.decision.dtype == torch.bool


def test_unknown_candidates_do_not_move_the_threshold() -> None:
    """Decisions on the known half are the same whatever the memberships asked are: they are not in the challenge."""
    x, y, member = candidates()
    seen, known = view(letter(1, 0, Model(overfit(x[member], y[member], 20)))), half_known()
    order = torch.cat([(known >= 0).nonzero()[:, 0], (known == -1).nonzero()[:, 0].flip(0)])
    challenge = Challenge((Slot(-1, 0),), 1, x=x[order], labels=y[order], known=known[order])
    (moved,) = LossThreshold().run(seen, [challenge], torch.Generator())
    assert torch.equal(moved.decision, ask(seen, known).decision[order])


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=12))
@settings(max_examples=60, deadline=None)
def test_threshold_is_the_best_one_and_treats_equal_scores_alike(pairs: list[tuple[int, bool]]) -> None:
    scores = torch.tensor([float(s) for s, _ in pairs], dtype=torch.float64)
    member = torch.tensor([m for _, m in pairs])
    found = best_threshold(scores, member)
    if len(scores.unique()) < 2 or bool(member.all()) or not bool(member.any()):
        assert found is None
        return

    def balanced(t: float) -> float:
        return float(((scores[member] >= t).double().mean() + (scores[~member] < t).double().mean()) / 2)

    assert found is not None and found not in scores.tolist()
    assert balanced(found) == pytest.approx(max(balanced(t + 0.5) for t in range(-4, 4)))


def test_an_incomplete_challenge_is_refused() -> None:
    with pytest.raises(UsageError, match="must have all three"):
        LossThreshold().run(view(), [Challenge((Slot(-1, 0),), 1)], torch.Generator())
