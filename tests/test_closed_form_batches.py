"""Batches by linear systems and the whole gradient: what is read exactly, and what is not claimed."""

from __future__ import annotations

import pytest
import torch
from observations import batch_gradient, psnr, reached, seeded, server_sees, uploads
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.reconstruction import batches
from ppbench.attacks.reconstruction.batches import separated
from ppbench.attacks.reconstruction.closed_form import ClosedForm
from ppbench.base.tree import Params
from ppbench.defenses.spn import SPN
from ppbench.federation.evidence import Evidence, simulation
from ppbench.federation.plan import Data, Local, Plan
from ppbench.federation.wire import Slot
from ppbench.metrics.image import match
from ppbench.nets.net import initial, net_spec


def plan_of(batch: int) -> Plan:
    return Plan(net_spec("dlnet", (1, 8, 8), 10), 1, Local("gradient", batch=batch))


def digits_at(places: list[int]) -> tuple[Tensor, Tensor]:
    data = load_digits()
    return torch.tensor(data.images[places] / 16)[:, None].float(), torch.tensor(data.target[places])


def sent(places: list[int]) -> tuple[Plan, Params, Params, Tensor, Tensor]:
    """Return plan, weights and the gradient of some digits at them, with images and labels."""
    plan, (x, y) = plan_of(len(places)), digits_at(places)
    params = initial(plan.spec, 0)
    return plan, params, batch_gradient(plan, params, x, one_hot(y, 10).float()), x, y


def guessed(plan: Plan, params: Params, update: Params) -> Guess:
    challenge = Challenge((Slot(0, 0),), plan.local.batch)
    (guess,) = ClosedForm().run(uploads(plan, params, [update]), [challenge], seeded())
    return guess


def least(guess: Guess, truth: Tensor) -> float:
    """Return the PSNR of the worst image, matched."""
    order = match(guess.x, truth)
    return min(psnr(guess.x[i : i + 1], truth[j : j + 1]) for j, i in enumerate(order))


TWINS = [3, 13, 5]
"""Places of digits, the first two of one class: their features are alike."""


def test_a_batch_is_read_exactly_with_its_labels() -> None:
    plan, params, update, x, y = sent([7, 21, 40, 5])
    guess = guessed(plan, params, update)
    assert guess.is_exact, guess.layers
    assert least(guess, x) > 60 and sorted(guess.y.tolist()) == sorted(y.tolist())
    assert [layer.unknowns for layer in guess.layers] == [4 * 58, 4 * 64]


@pytest.mark.nightly
def test_images_of_one_class_are_told_apart_by_the_whole_gradient() -> None:
    plan, params, update, x, y = sent(TWINS)
    assert y.tolist() == [3, 3, 5]
    guess = guessed(plan, params, update)
    assert guess.is_exact and least(guess, x) > 60 and sorted(guess.y.tolist()) == [3, 3, 5]


def test_linear_systems_alone_read_a_batch_of_unlike_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "BATCH_STEPS", 0)
    plan, params, update, x, _ = sent([0, 1, 2])
    assert least(guessed(plan, params, update), x) > 60


@pytest.mark.nightly
def test_a_secret_part_of_the_loss_is_an_unknown_of_each_example(digits: Data) -> None:
    values, guesses = reached(server_sees(digits, SPN(alpha2=0.1), batch=2, count=2), ClosedForm())
    assert guesses[0].is_exact and min(values) > 60


def test_one_gradient_gives_one_batch() -> None:
    plan, params, update, _, _ = sent([0, 1])
    one, other = (guessed(plan, params, update) for _ in range(2))
    assert torch.equal(one.x, other.x) and one.layers == other.layers and one.evaluations == other.evaluations > 60


# -- a trained network's head, which is sure of nearly all examples --
def sure_head(seed: int, count: int) -> tuple[Params, Params, Tensor, Tensor]:
    """Return a head that is sure of `count` examples, its gradient, their features, and labels."""
    draws = seeded(seed)
    features = (torch.rand(count, 48, generator=draws) < 0.5).double() * 0.9 + 0.05
    params = {"head.weight": torch.randn(10, 48, generator=draws), "head.bias": torch.zeros(10)}
    logits = features @ params["head.weight"].double().T
    labels = logits.argmax(1)
    a = logits.softmax(-1) - one_hot(labels, 10)
    return params, {"head.weight": a.T @ features / count, "head.bias": a.mean(0)}, features, labels


def test_examples_of_a_sure_network_are_separated_without_their_labels() -> None:
    params, update, features, labels = sure_head(0, 2)
    evidence = Evidence((Slot(0, 0),), update, simulation(plan_of(2), params), params)
    wrong = torch.tensor([0, 0])
    examples = separated(params, evidence, wrong, (0.0, 1.0), seeded())
    assert examples is not None
    nearest = torch.cdist(features, examples.features).argmin(1)
    assert torch.allclose(examples.features[nearest], features, atol=1e-5)
    assert torch.equal(examples.cotangents[nearest].argmin(1), labels)


# -- what it does not claim --
def test_of_a_noisy_batch_it_claims_nothing() -> None:
    plan, params, update, _, _ = sent([7, 21])
    rms = float(torch.cat([v.flatten() for v in update.values()]).square().mean().sqrt())
    noisy = {n: v + 1e-3 * rms * torch.randn(v.shape, generator=seeded(1)) for n, v in update.items()}
    noise = {n: torch.randn(v.shape, generator=seeded(2)) for n, v in update.items()}
    assert not any(guessed(plan, params, one).is_exact for one in (noisy, noise))


def test_noise_in_the_convolutions_alone_is_seen_by_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "BATCH_STEPS", 5)
    plan, params, update, _, _ = sent([7, 21])
    size = float(update["features.0.weight"].square().mean().sqrt())
    false = update | {"features.0.weight": size * torch.randn(12, 1, 5, 5, generator=seeded(1))}
    guess = guessed(plan, params, false)
    assert not guess.is_exact and guess.layers[-1].residual > 1e-3


def test_as_many_images_as_classes_are_not_separated() -> None:
    plan, params, update, _, _ = sent(list(range(10)))
    guess = guessed(plan, params, update)
    assert not guess.layers and guess.x.shape == (10, 1, 8, 8) and guess.evaluations == 1
