"""Tracing by the nearest reconstruction: perfect, noisy, useless and unusable reconstructions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppbench.adversary.attack import Challenge
from ppbench.attacks.tracing.nearest import NearestReconstruction, nearest
from ppbench.base.errors import UsageError
from ppbench.defenses.none import NoDefense
from ppbench.federation.plan import Plan
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER, Slot
from ppbench.nets.net import net_spec

CLIENTS, IMAGES = 10, 200
SHAPE = (3, 32, 32)
VIEW = View("server/1", SERVER, Plan(net_spec("dlnet", SHAPE, 10), CLIENTS), NoDefense(), (), ())
UNIT = tuple(Slot(0, client) for client in range(CLIENTS))
OWNERS = torch.arange(IMAGES) // (IMAGES // CLIENTS)


def images(seed: int) -> torch.Tensor:
    """Return images that share a mean image, as natural ones do."""
    g = torch.Generator().manual_seed(seed)
    return (torch.rand(1, *SHAPE, generator=g) + 0.5 * torch.randn(IMAGES, *SHAPE, generator=g)).clamp(0, 1)


def noisy(x: torch.Tensor, rmse: float, seed: int = 1) -> torch.Tensor:
    """Return x plus Gaussian noise of relative root-mean-square error `rmse`."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    return x + rmse * x.pow(2).mean().sqrt() * noise


def owners(queries: torch.Tensor, reconstructions: torch.Tensor, batch: int = IMAGES // CLIENTS) -> torch.Tensor:
    """Return the owners that the attack names."""
    challenge = Challenge(UNIT, batch, x=queries, reconstructions=reconstructions)
    (guess,) = NearestReconstruction().run(VIEW, [challenge], torch.Generator())
    assert guess.owner is not None and guess.owner.dtype == torch.int64
    return guess.owner


@pytest.mark.parametrize("rmse", [0.0, 0.2, 0.6])
def test_good_reconstructions_name_every_owner(rmse):
    x = images(0)
    assert torch.equal(owners(x, noisy(x, rmse)), OWNERS)


def test_an_order_that_is_not_that_of_the_slots_is_punished():
    x = images(0)
    assert float((owners(x, x.roll(IMAGES // CLIENTS, 0)) == OWNERS).float().mean()) == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e200])
def test_reconstructions_that_are_not_finite_are_never_nearest(bad):
    x = images(0).double()
    broken = x.clone()
    broken[::3] = bad
    found = nearest(x, broken)
    assert not bool((found % 3 == 0).any())
    good = torch.arange(IMAGES) % 3 != 0
    assert torch.equal(found[good], torch.arange(IMAGES)[good])


def test_without_a_finite_reconstruction_the_owner_is_nobody():
    x = images(0)
    assert bool((owners(x, torch.full_like(x, float("nan"))) == -1).all())


@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 7))
@settings(max_examples=30, deadline=None)
def test_equals_the_direct_search(seed, queries, count):
    g = torch.Generator().manual_seed(seed)
    q, r = torch.randn(queries, 2, 3, generator=g), 3 * torch.randn(count, 2, 3, generator=g)
    direct = ((q[:, None].double() - r[None].double()) ** 2).flatten(2).sum(2).argmin(1)
    assert torch.equal(nearest(q, r), direct)


def test_bad_challenges_are_refused_with_a_sentence():
    x = images(0)
    with pytest.raises(UsageError, match="must follow a reconstruction attack"):
        NearestReconstruction().run(VIEW, [Challenge(UNIT, 20, x=x)], torch.Generator())
    with pytest.raises(UsageError, match="must get 30"):
        owners(x, x, batch=3)
