"""Labels from the head's gradient: exact on a fresh model, chance on noise, never a crash."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppbench.adversary.attack import Challenge
from ppbench.adversary.view import View
from ppbench.attacks.label.recovery import LabelRecovery, greedy_multiset, mean_prediction, recover_labels
from ppbench.defenses.none import NoDefense
from ppbench.federation.autodiff import gradient
from ppbench.federation.messages import Model, Update
from ppbench.federation.plan import Plan
from ppbench.federation.tree import Params
from ppbench.federation.wire import SERVER, Envelope, Slot
from ppbench.task.net import initial, net_spec

SHAPE, CLASSES = (1, 16, 16), 10
PLAN = Plan(net_spec("dlnet", SHAPE, CLASSES), 4)
SLOT = Slot(0, 0)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch_gradient(batch: int, seed: int) -> tuple[Params, Params, torch.Tensor]:
    """Return weights, the gradient of a random batch and its labels, sorted."""
    g, params = generator(seed), initial(PLAN.spec, seed)
    x, labels = torch.rand(batch, *SHAPE, generator=g), torch.randint(0, CLASSES, (batch,), generator=g)
    y = torch.nn.functional.one_hot(labels, CLASSES).float()
    grads = gradient(lambda p: PLAN.objective(p, x, y, torch.ones(batch)), params)
    return params, {name: value.detach() for name, value in grads.items()}, labels.sort().values


def recovered(params: Params, grads: Params, batch: int, seed: int = 0) -> torch.Tensor:
    return recover_labels(PLAN, params, grads["head.weight"], grads["head.bias"], batch, generator(seed))


@pytest.mark.parametrize("batch", [1, 2, 4, 8])
def test_planted_leak_every_label_of_a_fresh_model(batch: int) -> None:
    for seed in range(10):
        params, grads, labels = batch_gradient(batch, seed)
        assert torch.equal(recovered(params, grads, batch), labels)


def matches(found: torch.Tensor, truth: torch.Tensor) -> int:
    """Return the size of the intersection of two multisets of labels."""
    counts = torch.stack([torch.bincount(part, minlength=CLASSES) for part in (found, truth)])
    return int(counts.amin(0).sum())


@pytest.mark.parametrize("batch", [1, 4])
def test_null_pure_noise_scores_chance(batch: int) -> None:
    """Labels found in noise agree with the truth as often as with a batch drawn independently."""
    params, grads, _ = batch_gradient(batch, 0)
    right = chance = 0
    for seed in range(600):
        g = generator(seed)
        noise = {name: torch.randn(value.shape, generator=g) for name, value in grads.items() if "head" in name}
        truth, other = torch.randint(0, CLASSES, (2, batch), generator=g)
        found = recovered(params, noise, batch, seed)
        right, chance = right + matches(found, truth), chance + matches(found, other)
    rate, reference = right / (600 * batch), chance / (600 * batch)
    assert abs(rate - reference) < 0.06
    assert batch > 1 or abs(rate - 1 / CLASSES) < 0.04


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("batch", [1, 4])
def test_useless_gradients_give_labels_drawn_from_the_generator(value: float, batch: int) -> None:
    params, grads, _ = batch_gradient(batch, 0)
    broken = {name: torch.full_like(part, value) for name, part in grads.items()}
    first, again = recovered(params, broken, batch, 3), recovered(params, broken, batch, 3)
    assert first.shape == (batch,) and first.dtype == torch.int64 and torch.equal(first, again)
    assert len({tuple(recovered(params, broken, batch, seed).tolist()) for seed in range(20)}) > 3


def test_a_diverged_model_counts_with_equal_predictions() -> None:
    params = {name: torch.full_like(value, float("nan")) for name, value in initial(PLAN.spec, 0).items()}
    assert torch.equal(mean_prediction(PLAN, params, generator(0)), torch.full((CLASSES,), 0.1, dtype=torch.float64))


@given(st.lists(st.floats(-3, 9), min_size=2, max_size=6), st.integers(1, 12), st.data())
@settings(max_examples=60, deadline=None)
def test_multiset_holds_every_present_class_once_at_least(counts: list[float], batch: int, data: st.DataObject) -> None:
    present = data.draw(st.lists(st.booleans(), min_size=len(counts), max_size=len(counts)))
    found = greedy_multiset(torch.tensor(counts).double(), torch.tensor(present), batch)
    assert len(found) == batch and torch.equal(found, found.sort().values)
    must = {c for c, there in enumerate(present) if there}
    assert must <= set(found.tolist()) if len(must) <= batch else set(found.tolist()) <= must


@given(st.lists(st.integers(0, 3), min_size=4, max_size=4).filter(lambda c: sum(c) > 0))
@settings(max_examples=30, deadline=None)
def test_whole_counts_come_back_as_they_are(counts: list[int]) -> None:
    wanted = torch.tensor(counts)
    found = greedy_multiset(wanted.double(), wanted > 0, sum(counts))
    assert torch.equal(torch.bincount(found, minlength=4), wanted)


def view(params: Params, uploads: dict[int, Params]) -> View:
    mail = []
    for client, grads in uploads.items():
        mail += [
            Envelope(0, 1, 0, SERVER, client, 0, Model(params)),
            Envelope(0, 1, 0, client, SERVER, 0, Update(grads)),
        ]
    return View("server/1", SERVER, PLAN, NoDefense(), tuple(mail), ())


def test_the_attack_answers_each_challenge_and_leaves_granted_labels_alone() -> None:
    params = initial(PLAN.spec, 5)
    _, first, truth = batch_gradient(4, 5)
    wrong = torch.nn.functional.one_hot((truth + 1) % CLASSES, CLASSES).float()[None]
    unseen = Challenge((Slot(0, 3),), 4)
    guesses = LabelRecovery().run(view(params, {0: first}), [unseen, Challenge((SLOT,), 4, y=wrong)], generator(0))
    assert guesses[0].y.shape == (4,)
    assert torch.equal(guesses[1].y, truth)


def test_the_attack_does_not_fail_on_an_upload_that_is_not_finite() -> None:
    params, grads, _ = batch_gradient(2, 1)
    broken = {name: torch.full_like(value, float("nan")) for name, value in grads.items()}
    (guess,) = LabelRecovery().run(view(params, {0: broken}), [Challenge((SLOT,), 2)], generator(0))
    assert guess.y.shape == (2,)
