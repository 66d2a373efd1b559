"""Attacks by gradient descent: priors, hypotheses, what they make of digits."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
import torch
from observations import Seen, observation, psnr, reached, seeded, server_sees
from torch import Tensor

from ppbench.adversary.attack import Attack
from ppbench.attacks.reconstruction.gradinversion import Consistency, GradInversion, registered_mean
from ppbench.attacks.reconstruction.ig import IG
from ppbench.attacks.reconstruction.layers_left_out import IGLayers, hypotheses, layer, layers
from ppbench.attacks.reconstruction.likelihood import Likelihood
from ppbench.attacks.reconstruction.search.priors import Norm, Penalty, Sum, TotalVariation
from ppbench.base.errors import UsageError
from ppbench.defenses.none import NoDefense
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Data, Plan
from ppbench.nets.net import initial, net_spec


# -- priors ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("prior", [TotalVariation(2.0), Norm(3.0, 0.5), Sum([TotalVariation(1.0), Norm(1.0)])])
def test_slopes_of_priors_are_those_of_autograd(prior: Penalty) -> None:
    x = torch.rand(3, 2, 2, 5, 4, generator=seeded(), dtype=torch.float64).requires_grad_()
    index = torch.arange(3)

    def value(x: Tensor) -> Tensor:
        if isinstance(prior, Norm):
            return prior.weight * ((x - prior.middle) ** 2).flatten(1).mean(1)
        rough = x.diff(dim=-1).abs().flatten(1).mean(1) + x.diff(dim=-2).abs().flatten(1).mean(1)
        return prior.weight * rough if isinstance(prior, TotalVariation) else rough + (x**2).flatten(1).mean(1)

    (slope,) = torch.autograd.grad(value(x).sum(), x)
    found, mine = prior(x.detach(), index)
    assert torch.allclose(found, value(x).detach())
    assert torch.allclose(mine, slope)


def test_inputs_without_a_grid_and_images_of_one_pixel_have_no_variation() -> None:
    for shape in ((2, 3, 7), (2, 1, 1, 1, 1)):
        value, slope = TotalVariation(1.0)(torch.rand(shape, generator=seeded()), torch.arange(2))
        assert value.tolist() == [0, 0]
        assert not slope.any()


def test_seeds_that_are_shifts_of_one_image_have_it_as_their_registered_mean() -> None:
    """Smooth images: the plain mean of shifted ones blurs, the registered one does not, up to a common shift."""
    grid = torch.arange(16.0)
    image = torch.exp(-((grid[:, None] - 8) ** 2 + (grid[None] - 7) ** 2) / 4)[None, None]
    seeds = torch.stack([image.roll(s, (-2, -1)) for s in ((0, 0), (1, 0), (0, -1), (-1, 1), (0, 0))])
    found = registered_mean(seeds)
    assert float((found - image).abs().max()) < 1e-5
    assert float((seeds.mean(0) - image).abs().max()) > 0.1
    flat = torch.rand(3, 2, 5, generator=seeded())
    assert torch.equal(registered_mean(flat), flat.mean(0))


def test_consistency_draws_seeds_of_one_victim_together_and_lonely_ones_nowhere() -> None:
    x = torch.rand(3, 1, 1, 1, 1, generator=seeded())
    value, slope = Consistency(2.0, 2)(x, torch.tensor([0, 1, 3]))  # two seeds of victim 0, one of victim 1
    middle = x[:2].mean()
    assert torch.allclose(value[:2], 2.0 * (x[:2, 0, 0, 0, 0] - middle) ** 2)
    assert torch.allclose(slope[:2], 4.0 * (x[:2] - middle))
    assert value[2] == 0
    assert not slope[2].any()


# -- hypotheses --------------------------------------------------------------------------------------------------------
def test_hypotheses_are_each_layer_alone_every_prefix_and_every_suffix_none_twice() -> None:
    plan = Plan(net_spec("dlnet", (1, 8, 8), 4), 1)
    evidence = observation(plan, initial(plan.spec, 0), torch.rand(1, 1, 8, 8, generator=seeded(4)), torch.eye(4)[:1])
    names = layers(evidence)
    assert len(names) == 5

    def visible(found: Evidence) -> tuple[str, ...]:
        assert found.weight is not None
        return tuple(dict.fromkeys(layer(n) for n, w in found.weight.items() if bool((w > 0).any())))

    kept = [visible(found) for found in hypotheses(evidence, 99, zeros=False)]
    assert kept[0] == tuple(names)
    assert len(set(kept)) == len(kept)
    wanted = {tuple(n for n in names if n != name) for name in names}
    wanted |= {tuple(names[:k]) for k in range(1, 6)} | {tuple(names[-k:]) for k in range(1, 6)}
    assert set(kept) == wanted
    assert len(hypotheses(evidence, 4, zeros=False)) == 4
    zeros = {n: v * (torch.arange(v.numel()).view(v.shape) % 2) for n, v in evidence.observed.items()}
    hidden = hypotheses(replace(evidence, observed=zeros), 99, zeros=True)[1]
    assert hidden.weight is not None
    assert all(bool(((w > 0) == (zeros[n] != 0)).all()) for n, w in hidden.weight.items())


# -- attacks -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def seen(digits: Data) -> Seen:
    return server_sees(digits, NoDefense(), count=4)


@pytest.fixture(scope="module")
def pairs(digits: Data) -> Seen:
    return server_sees(digits, NoDefense(), batch=2)


def test_a_fading_prior_costs_nothing_where_a_fixed_one_outweighs_the_data(seen: Seen) -> None:
    """Sigmoid networks: cosines differ by less than 1e-4 between a grey image and the truth."""
    fading, _ = reached(seen, IG(budget=200))
    fixed, _ = reached(seen, IG(budget=200, tv=1e-3, fading=False))
    assert median(fading) > 60
    assert median(fixed) < 20


def test_the_best_of_several_starts_is_chosen_by_its_mismatch_and_the_others_are_shown(
    seen: Seen,
) -> None:
    _, guesses = reached(seen, IG(budget=90, tries=3))
    _, alone = reached(seen, IG(budget=30))
    for guess, single in zip(guesses, alone, strict=True):
        assert guess.evaluations == 90
        assert len(guess.others) == 2
        assert all(other.shape == guess.x.shape and not torch.equal(other, guess.x) for other in guess.others)
        assert guess.confidence is not None
        assert single.confidence is not None
        assert guess.confidence <= single.confidence  # the first of the starts is the same
        counts = [count for count, _ in guess.path]
        assert counts == sorted(set(counts))
        assert counts[-1] == 90
        assert all(count % 3 == 0 for count in counts)


@pytest.mark.parametrize(
    "attack", [IG(), GradInversion(budget=300, tries=2), IGLayers(budget=300)], ids=lambda a: a.name
)
def test_labels_of_a_batch_are_recovered_and_images_come_near(attack: Attack, pairs: Seen) -> None:
    """Two digits a batch: their labels as a multiset, their images nearer than grey is."""
    found, guesses = reached(pairs, attack)
    truth = [pairs[1].truth(unit) for unit in pairs[1].units]
    for true, guess in zip(truth, guesses, strict=True):
        assert sorted(guess.y.tolist()) == sorted(true.y.argmax(1).tolist())
    assert median(found) > median(psnr(torch.full_like(x, 0.5), x) for true in truth for x in true.x) + 3


def test_variants_differ_in_the_prior_alone_and_none_is_free() -> None:
    for attack in (IG(), Likelihood(), GradInversion()):
        variants = list(attack.variants())
        assert variants[0] == attack
        assert len({v.tv for v in variants}) == len(variants) > 1  # type: ignore[attr-defined]
        assert all(replace(v, tv=attack.tv) == attack for v in variants)  # type: ignore[call-arg]
    assert list(IGLayers().variants()) == [IGLayers()]


def test_settings_out_of_range_are_refused() -> None:
    bad = (IG(tries=0), IG(slots=0), IG(tv=float("nan")), IG(label="guess"), IGLayers(hypotheses=0), IGLayers(tries=2))  # type: ignore[arg-type]
    worse = (Likelihood(lr=0.0), Likelihood(budget=0), GradInversion(group=-1.0), GradInversion(norm=float("inf")))
    for attack in (*bad, *worse):
        with pytest.raises(UsageError, match=attack.name):
            attack.check()
