"""Noise of an unknown law comes off where it leaves entries bare; one law for all entries hides what it hid."""

from statistics import median

import pytest
import torch
from observations import reached, watched
from weakened.ppbench_weakened import Guard

from ppbench.attacks.reconstruction.likelihood import EstimatedNoise, Uploads
from ppbench.base.seeds import Seeds
from ppbench.defenses.dp import DP
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Local, Plan
from ppbench.nets.net import initial, net_spec
from ppbench.testing.small_federation import Duel


@pytest.fixture
def rebuilt(deal, monkeypatch):
    """Return the median decibels of victims under a variant of a defense."""

    def make(variant, count=8):
        monkeypatch.setenv("PPBENCH_VARIANT", variant)
        plan = Plan(net_spec("dlnet", (1, 8, 8), 10), 4, Local("delta", batch=16))
        run = Federation(Guard(), plan, deal([24] * 4), Seeds(0))
        run.start(initial(plan.spec, 0))
        return median(reached(watched(run, count=count), EstimatedNoise())[0])

    return make


@pytest.mark.parametrize(
    ("variant", "count", "least"),
    [
        pytest.param("tenth_bare", 8, 40, marks=pytest.mark.nightly),
        ("rounded", 2, 40),
        pytest.param("low_rank", 16, 10, marks=pytest.mark.nightly),
        pytest.param("reused", 16, 10, marks=pytest.mark.nightly),
    ],
)
def test_noise_that_leaves_entries_bare_comes_off(rebuilt, variant, count, least):
    """Entry by entry where several uploads tell, within one upload where noise is rounded to zero."""
    assert rebuilt(variant, count) > least


def test_one_law_for_all_entries_is_left_to_others(rebuilt):
    assert rebuilt("as_it_is") < 9 and rebuilt("as_it_is", 2) < 9


def test_a_law_of_each_entry_is_told_by_eight_uploads_and_of_each_tensor_by_one():
    draws = torch.Generator().manual_seed(0)
    noise = torch.randn(8, 3000, generator=draws).double()
    noise[:, :1000] *= 1e-3
    noise[:, 1000:1500] *= 0.1
    uploads = Uploads(noise, (1000, 2000))
    every, one = uploads.precision(noise), uploads.precision(noise[:1])
    assert every[:1000].median() > 1e5 and 50 < every[1000:1500].median() < 200 > 3 > every[1500:].median() > 0.5
    assert one[:1000].std() < 1e-6 > one[1000:].std() and one[0] > 1e5 * one[-1]
    even = torch.randn(8, 3000, generator=draws).double()
    assert uploads.uneven(noise) and not Uploads(even, (3000,)).uneven(even)
    sparse = even[:1] * (1e-4 + (torch.rand(1, 3000, generator=draws) > 0.1))
    assert Uploads(sparse, (3000,)).uneven(sparse) and not Uploads(sparse, (3000,)).uneven_entries(sparse)
    unsent = even[:1] * (torch.rand(1, 3000, generator=draws) > 0.1)
    assert not Uploads(unsent, (3000,)).uneven(unsent), "what is not sent is unknown, not bare"


def test_directions_that_hold_all_noise_are_found_and_none_where_there_are_none():
    draws = torch.Generator().manual_seed(0)
    basis, small = torch.randn(3, 500, generator=draws).double(), 1e-3 * torch.randn(12, 500, generator=draws).double()
    loud = torch.randn(12, 3, generator=draws).double() @ basis + small
    shared = Uploads(loud, (500,)).shared(loud)
    assert shared.shape == (3, 500) and torch.allclose(shared @ shared.T, torch.eye(3).double(), atol=1e-8)
    assert float((loud - loud @ shared.T @ shared).norm()) < 2 * float(small.norm())
    assert len(Uploads(small, (500,)).shared(small)) == 0 == len(Uploads(loud[:4], (500,)).shared(loud[:4]))


def test_what_is_left_to_a_search_of_another_budget_shows_no_path_along_its_own():
    """`ppbench verify` refused boards of 32x32 images: a descent spends its budget, and this one 300 of 6000."""
    world = Duel(EstimatedNoise(), DP(sigma=0.01)).probe(2, batch=2)
    attack = EstimatedNoise()
    guesses = world.answers(attack)
    assert all(guess.evaluations == 300 and guess.path == () for guess in guesses)
