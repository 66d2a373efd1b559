"""Attacks by gradient descent: priors, hypotheses, the likelihood of a public law, and what they make of digits."""

import math
from dataclasses import replace
from statistics import median

import pytest
import torch
from observations import Seen, observation, psnr, reached, seeded, server_sees, watched
from torch import Tensor

from ppbench.adversary.attack import Challenge
from ppbench.attacks.reconstruction import ig_features
from ppbench.attacks.reconstruction.gradinversion import Consistency, GradInversion, registered_mean
from ppbench.attacks.reconstruction.ig import IG, IGMasked
from ppbench.attacks.reconstruction.ig_features import IGFeatures
from ppbench.attacks.reconstruction.likelihood import NOISELESS_SHARE, Likelihood, deviations, scaled_law
from ppbench.attacks.reconstruction.search.priors import GreyNorm, Sum, TotalVariation
from ppbench.attacks.reconstruction.search.starts import posed
from ppbench.base.seeds import Seeds
from ppbench.defenses.dp import DP
from ppbench.defenses.none import NoDefense
from ppbench.defenses.ppdl import PPDL
from ppbench.federation.contract import plain_evidence
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Data, Local, Noise, Opt, Plan
from ppbench.federation.wire import Slot
from ppbench.nets.net import initial, net_spec


# -- priors ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("prior", [TotalVariation(2.0), GreyNorm(3.0, 0.5), Sum([TotalVariation(1.0), GreyNorm(1.0)])])
def test_slopes_of_priors_are_those_of_autograd(prior):
    x = torch.rand(3, 2, 2, 5, 4, generator=seeded(), dtype=torch.float64).requires_grad_()
    index = torch.arange(3)

    def value(x: Tensor) -> Tensor:
        if isinstance(prior, GreyNorm):
            return prior.weight * ((x - prior.middle) ** 2).flatten(1).mean(1)
        rough = x.diff(dim=-1).abs().flatten(1).mean(1) + x.diff(dim=-2).abs().flatten(1).mean(1)
        return prior.weight * rough if isinstance(prior, TotalVariation) else rough + (x**2).flatten(1).mean(1)

    (slope,) = torch.autograd.grad(value(x).sum(), x)
    result, mine = prior(x.detach(), index)
    assert torch.allclose(result, value(x).detach())
    assert torch.allclose(mine, slope)


def test_color_edges_that_coincide_cost_less_than_those_that_do_not():
    """Of three channels their differences vary too: nothing for grey images, as autograd has it for others."""
    x = torch.rand(3, 2, 3, 5, 4, generator=seeded(), dtype=torch.float64).requires_grad_()
    prior, index = TotalVariation(2.0), torch.arange(3)

    def rough(x: Tensor) -> Tensor:
        return x.diff(dim=-1).abs().flatten(1).mean(1) + x.diff(dim=-2).abs().flatten(1).mean(1)

    pairs = torch.stack([x[:, :, a] - x[:, :, b] for a, b in ((0, 1), (1, 2), (2, 0))], 2)
    value = 2.0 * (rough(x) + rough(pairs))
    (slope,) = torch.autograd.grad(value.sum(), x)
    result, mine = prior(x.detach(), index)
    assert torch.allclose(result, value.detach())
    assert torch.allclose(mine, slope)
    grey = x.detach()[:, :, :1].expand(-1, -1, 3, -1, -1)
    assert torch.allclose(prior(grey, index)[0], prior(grey[:, :, :1], index)[0])


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 16, 16)])
def test_a_balanced_prior_pulls_as_hard_as_the_observation_whatever_the_size(shape):
    plan = Plan(net_spec("dlnet", shape, 4), 1)
    x = torch.rand(2, *shape, generator=seeded(4))
    evidence = [observation(plan, initial(plan.spec, 0), x[i : i + 1], torch.eye(4)[i : i + 1]) for i in range(2)]
    victims = posed(evidence, plan, [Challenge(e.unit, 1) for e in evidence], seeded())
    problem, index = IG(tries=2).problem(victims, evidence, 2), torch.arange(4)
    free, balanced = replace(problem, penalty=None), problem.balanced(0.5)
    value = free(problem.start, index)
    added = balanced(problem.start, index).gradient - value.gradient
    assert torch.allclose(added.abs().sum(1), 0.5 * value.gradient.abs().sum(1), rtol=1e-4)
    assert len(set(balanced.strength.tolist())) == 4
    assert free.balanced(0.5) is free


def test_a_prior_that_says_nothing_of_a_start_or_that_nothing_pulls_against_has_no_weight():
    plan = Plan(net_spec("mlp", (6,), 3, {}), 1)
    evidence = observation(plan, initial(plan.spec, 0), torch.rand(1, 6, generator=seeded(1)), torch.eye(3)[:1])
    victims = posed([evidence], plan, [Challenge(evidence.unit, 1)], seeded())
    problem = IG().problem(victims, [evidence], 1)
    assert problem.balanced(1.0).strength.tolist() == [0.0]
    (result,) = IG(budget=5).attack(victims)
    assert result.evaluations == 5
    assert bool(result.x.isfinite().all())


def test_inputs_without_a_grid_and_images_of_one_pixel_have_no_variation():
    for shape in ((2, 3, 7), (2, 1, 1, 1, 1)):
        value, slope = TotalVariation(1.0)(torch.rand(shape, generator=seeded()), torch.arange(2))
        assert value.tolist() == [0, 0]
        assert not slope.any()


def test_seeds_that_are_shifts_of_one_image_have_it_as_their_registered_mean():
    """Smooth images: the plain mean of shifted ones blurs, the registered one does not, up to a common shift."""
    grid = torch.arange(16.0)
    image = torch.exp(-((grid[:, None] - 8) ** 2 + (grid[None] - 7) ** 2) / 4)[None, None]
    seeds = torch.stack([image.roll(s, (-2, -1)) for s in ((0, 0), (1, 0), (0, -1), (-1, 1), (0, 0))])
    result = registered_mean(seeds)
    assert float((result - image).abs().max()) < 1e-5
    assert float((seeds.mean(0) - image).abs().max()) > 0.1
    flat = torch.rand(3, 2, 5, generator=seeded())
    assert torch.equal(registered_mean(flat), flat.mean(0))


def test_consistency_draws_seeds_of_one_victim_together_and_lonely_ones_nowhere():
    x = torch.rand(3, 1, 1, 1, 1, generator=seeded())
    value, slope = Consistency(2.0, 2)(x, torch.tensor([0, 1, 3]))  # two seeds of victim 0, one of victim 1
    middle = x[:2].mean()
    assert torch.allclose(value[:2], 2.0 * (x[:2, 0, 0, 0, 0] - middle) ** 2)
    assert torch.allclose(slope[:2], 4.0 * (x[:2] - middle))
    assert value[2] == 0
    assert not slope[2].any()


# -- attacks -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def seen(digits: Data) -> Seen:
    return server_sees(digits, NoDefense(), count=4)


@pytest.fixture(scope="module")
def pairs(digits: Data) -> Seen:
    return server_sees(digits, NoDefense(), batch=2)


@pytest.mark.nightly
def test_a_fading_prior_costs_nothing_where_a_fixed_one_outweighs_the_data(seen):
    """Sigmoid networks: cosines differ by less than 1e-4 between a grey image and the truth."""
    fading, _ = reached(seen, IG(budget=120))
    fixed, _ = reached(seen, IG(budget=120, tv=1e-3, fading=False))
    assert median(fading) > 60
    assert median(fixed) < 20


def test_the_best_of_several_starts_is_chosen_by_its_mismatch_and_the_others_are_shown(seen):
    _, guesses = reached(seen, IG(budget=30, tries=3))  # few steps: near 0, rounding is a part of the mismatch
    _, alone = reached(seen, IG(budget=10))
    for guess, single in zip(guesses, alone, strict=True):
        assert guess.evaluations == 30
        assert len(guess.others) == 2
        assert all(other.shape == guess.x.shape and not torch.equal(other, guess.x) for other in guess.others)
        assert guess.confidence <= 1.0001 * single.confidence  # the first of the starts is the same, but for rounding
        counts = [count for count, _ in guess.path]
        assert counts == sorted(set(counts))
        assert counts[-1] == 30
        assert all(count % 3 == 0 for count in counts)


@pytest.mark.parametrize("batch", [1, 2])
def test_exact_features_guide_the_search_through_kinks(digits, batch):
    seen = server_sees(digits, NoDefense(), batch=batch, count=4, kinks=True)
    guided, _ = reached(seen, IGFeatures(budget=150, soften=0.0))  # rounded kinks need less guidance
    unguided, _ = reached(seen, IG(budget=150, soften=0.0))
    assert median(guided) > median(unguided) + 3


def test_where_features_are_noise_it_is_ig_to_the_bit(digits):
    seen = server_sees(digits, DP(sigma=0.01), count=3, kinks=True)
    _, guided = reached(seen, IGFeatures(budget=20))
    _, unguided = reached(seen, IG(budget=20))
    for one, other in zip(guided, unguided, strict=True):
        assert torch.equal(one.x, other.x) and one.confidence == other.confidence


@pytest.mark.parametrize("attack", [IGFeatures(budget=8, soften=0.0), IGFeatures(budget=4)], ids=["hard", "rounded"])
def test_a_victim_is_searched_beside_others_as_alone_also_under_batch_norms(attack, digits):
    """Rounded kinks for fewer steps: where they are narrow, steps multiply what float32 rounds."""
    plan = Plan(net_spec("resnet20", (1, 8, 8), 10, {"norm": "bn"}), 1, Local("gradient", batch=2))
    run = Federation(NoDefense(), plan, {0: Data(digits.x[900:960], digits.y[900:960])}, Seeds(0))
    run.start(initial(plan.spec, 1))
    view, victims = watched(run, batch=2, count=4)
    first, *_ = attack.run(view, victims.challenges(), seeded())
    (alone,) = attack.run(view, victims.challenges()[:1], seeded())
    assert alone.confidence == pytest.approx(first.confidence, rel=1e-3)


def test_a_victim_without_features_takes_none_from_its_neighbors(digits, monkeypatch):
    seen = server_sees(digits, NoDefense(), count=3, kinks=True)
    guided, unguided = (reached(seen, attack)[1] for attack in (IGFeatures(budget=20), IG(budget=20)))
    readable = iter([True, False, True])
    read = ig_features.read_features
    monkeypatch.setattr(ig_features, "read_features", lambda *of: read(*of) if next(readable) else None)
    mixed = reached(seen, IGFeatures(budget=20))[1]
    for one, other in zip(mixed, (guided[0], unguided[1], guided[2]), strict=True):
        assert one.confidence == pytest.approx(other.confidence, rel=1e-5)
    assert guided[0].confidence != pytest.approx(unguided[0].confidence, rel=1e-2)


def test_features_are_read_of_kinked_convolutions():
    def suits(model: str) -> bool:
        return IGFeatures().suits(Plan(net_spec(model, (3, 16, 16), 10), 1, Local("gradient")))

    assert suits("cnn") and not suits("dlnet") and not suits("mlp")


@pytest.mark.nightly
@pytest.mark.parametrize("attack", [IG(budget=100), GradInversion(budget=120, tries=2), IGMasked(budget=100)], ids=type)
def test_labels_of_a_batch_are_recovered_and_images_come_near(attack, pairs):
    """Two digits a batch: their labels as a multiset, their images nearer than grey is."""
    decibels, guesses = reached(pairs, attack)
    truth = [pairs[1].truth(unit) for unit in pairs[1].units]
    for true, guess in zip(truth, guesses, strict=True):
        assert sorted(guess.y.tolist()) == sorted(true.y.argmax(1).tolist())
    assert median(decibels) > median(psnr(torch.full_like(x, 0.5), x) for true in truth for x in true.x) + 3


def test_variants_differ_in_the_prior_alone_and_none_is_free():
    for attack in (IG(), Likelihood(), GradInversion()):
        variants = list(attack.variants())
        assert variants[0] == attack
        assert len({v.tv for v in variants}) == len(variants) > 1
        assert all(replace(v, tv=attack.tv) == attack for v in variants)
    assert list(IGMasked().variants()) == [IGMasked()]


def hand(noise: Noise | None, weight: dict[str, torch.Tensor] | None = None) -> Evidence:
    """Return evidence about two tensors of a network that is not there."""
    observed = {"a.weight": torch.tensor([[3.0, -4.0]]), "b.weight": torch.tensor([[1.0], [2.0]])}
    return Evidence((Slot(0, 0),), observed, lambda x, y: observed, weight=weight, noise=noise)


@pytest.mark.parametrize(("kind", "share"), [("gaussian", 0.5), ("laplace", 1.0)])
def test_the_discrepancy_is_the_negative_log_likelihood_up_to_its_constant(kind, share):
    evidence = hand(Noise(kind, 0.5, (("b.weight", 2.0),)))
    guess = {"a.weight": torch.tensor([[2.0, 1.0]]), "b.weight": torch.tensor([[1.5], [-1.0]])}
    total = 0.0
    for name, std in (("a.weight", 0.5), ("b.weight", 2.0)):
        o, s = evidence.observed[name].double(), guess[name].double()
        laplace = torch.distributions.Laplace(s, std / math.sqrt(2))
        p = torch.distributions.Normal(s, std) if kind == "gaussian" else laplace
        total -= float((p.log_prob(o) - p.log_prob(s)).sum())
    assert float(Likelihood().matched(evidence).discrepancy(guess)) == pytest.approx(total)
    assert Likelihood().unit([evidence]).tolist() == [4 * share]


def test_the_unit_is_what_the_discrepancy_is_at_the_truth():
    """Many draws of each law: the mean of D over the unit is 1 within five standard errors (.01)."""
    g = seeded(1)
    for law in ("gaussian", "laplace"):
        truth, std = torch.randn(1, 200_000, generator=g), 0.3
        draws = torch.randn(truth.shape, generator=g)
        if law == "laplace":
            u = torch.rand(truth.shape, generator=g) - 0.5
            draws = -u.sign() * torch.log1p(-2 * u.abs()) / math.sqrt(2)
        evidence = Evidence((Slot(0, 0),), {"w": truth + std * draws}, lambda x, y: {}, noise=Noise(law, std))
        pieces = Likelihood().matched(evidence).discrepancy({"w": truth}) / Likelihood().unit([evidence])
        assert float(pieces) == pytest.approx(1, abs=0.02)


def test_tensors_without_noise_share_a_small_deviation_and_nothing_is_divided_by_zero():
    evidence = hand(Noise("gaussian", 0.0, (("b.weight", 2.0),)))
    result = deviations(evidence, evidence.noise)
    assert result["b.weight"] == 2.0
    assert result["a.weight"] == pytest.approx(NOISELESS_SHARE * math.sqrt(25 / 2))
    silent = replace(evidence, observed={n: torch.zeros_like(v) for n, v in evidence.observed.items()})
    assert min(deviations(silent, Noise("gaussian", 0.0)).values()) > 0


def test_hidden_entries_stay_hidden_and_do_not_count():
    mask = {"a.weight": torch.tensor([[1.0, 0.0]]), "b.weight": torch.ones(())}
    evidence = hand(Noise("gaussian", 0.5), mask)
    weight = Likelihood().matched(evidence).weight
    assert weight["a.weight"].tolist() == [[2.0, 0.0]]
    assert float(Likelihood().unit([evidence])) == 1.5


def test_a_mean_of_uploads_has_less_noise_in_every_tensor():
    law = scaled_law(Noise("laplace", 2.0, (("a", 4.0),)), 0.5)
    assert law == Noise("laplace", 1.0, (("a", 2.0),))
    assert (law.of("a"), law.of("b")) == (2.0, 1.0)


def test_what_a_sparse_message_holds_is_its_support(digits):
    view, _ = server_sees(digits, PPDL(theta=0.2, sigma=1e-3))
    for evidence in Likelihood().evidence(view):
        assert evidence.noise == Noise("gaussian", 1e-3)
        flat = torch.cat([v.flatten() for v in evidence.weight.values()])
        assert set(flat.unique().tolist()) == {0.0, 1.0}
        assert float(flat.mean()) == pytest.approx(0.2, abs=0.01)
        assert all(bool((evidence.observed[n][w == 0] == 0).all()) for n, w in evidence.weight.items())


@pytest.mark.nightly
@pytest.mark.parametrize("law", ["gaussian", "laplace"])
def test_under_noise_the_likelihood_beats_the_oblivious(law, digits):
    """Noise of a hundredth of the gradient's root mean square, at which DLNet's images begin to blur."""
    view, _ = server_sees(digits, NoDefense(), count=4)
    flat = torch.cat([v.flatten() for e in plain_evidence(view) for v in e.observed.values()])
    scale = 0.01 * float(flat.square().mean().sqrt()) / (math.sqrt(2) if law == "laplace" else 1)
    seen = server_sees(digits, DP(scale, law), count=4)
    aware, oblivious = (median(reached(seen, attack)[0]) for attack in (Likelihood(budget=200), IG(budget=120)))
    assert aware > oblivious + 5
    assert aware > 20


def test_the_law_of_a_weight_change_is_divided_as_the_change_is(plan, digits):
    """Noise on what is sent: a change over two epochs at rate .05 is taken for a tenth of a gradient."""
    for local, divisor in ((Local("gradient"), 1.0), (Local("delta", 2, 64, Opt("sgd", lr=0.05)), 0.1)):
        own = replace(plan, local=local)
        run = Federation(
            PPDL(sigma=1e-3, noise_on="upload"),
            own,
            {c: Data(digits.x[c::4], digits.y[c::4]) for c in range(4)},
            Seeds(0),
        )
        run.start(initial(own.spec, 1))
        victims = {Slot(0, c): Data(digits.x[c : c + 1], digits.y[c : c + 1]) for c in range(4)}
        view = run.probe(victims, "gradient" if local.upload == "gradient" else "local").view("server/1")
        for evidence in Likelihood().evidence(view):
            assert evidence.noise.std == pytest.approx(1e-3 / divisor)
