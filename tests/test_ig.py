"""Attacks by gradient descent: fast objectives against autograd, priors, hypotheses, what they make of digits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median

import pytest
import torch
from torch import Tensor

from ppbench.adversary.attack import Attack, Guess
from ppbench.adversary.victims import Victims, choose_victims
from ppbench.attacks.reconstruction.explained import layer, layers
from ppbench.attacks.reconstruction.fastpath import affine
from ppbench.attacks.reconstruction.fastpath.affine import Convolution
from ppbench.attacks.reconstruction.fastpath.chain import ChainObjective
from ppbench.attacks.reconstruction.gradinversion import Consistency, GradInversion, registered_mean
from ppbench.attacks.reconstruction.ig import IG
from ppbench.attacks.reconstruction.layers_left_out import IGLayers, hypotheses
from ppbench.attacks.reconstruction.likelihood import Likelihood
from ppbench.attacks.reconstruction.search.priors import Norm, Penalty, Sum, TotalVariation
from ppbench.attacks.reconstruction.search.problem import (
    MappedObjective,
    SimulatedObjective,
    objective,
)
from ppbench.base.errors import UsageError
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params
from ppbench.defenses.none import NoDefense
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import Evidence, simulation
from ppbench.federation.plan import Data, Local, Plan
from ppbench.federation.view import View
from ppbench.federation.wire import Slot
from ppbench.nets.net import initial, net_spec
from ppbench.questions.images import score_images

CLASSES = 4


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=g, dtype=torch.float64)


def precisions(observed: Params, kind: str, g: torch.Generator) -> Params | None:
    """Return None, a precision of each entry, or one of each tensor, some of them 0."""
    if kind == "none":
        return None
    shaped = {n: drawn(v.shape if kind == "entries" else (), g) for n, v in observed.items()}
    hidden = next(iter(shaped))
    return {n: torch.zeros_like(v) if n == hidden else v for n, v in shaped.items()}


@pytest.mark.parametrize("measure", ["cosine", "squares", "absolute"])
@pytest.mark.parametrize("kind", ["none", "entries", "tensors"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("model", "shape", "options"),
    [
        ("dlnet", (1, 8, 8), {}),
        ("mlp", (7,), {"activation": "leaky_relu"}),
        ("mlp", (1, 4, 4), {"bias": False, "layers": 3, "hidden": 6}),
        ("cnn", (2, 6, 6), {"pool": "avg", "bias": False, "widths": "3", "hidden": 5}),
        ("cnn", (2, 9, 10), {"pool": "max", "widths": "3,4", "activation": "leaky_relu"}),
    ],
)
def test_the_fast_discrepancy_and_its_slopes_are_those_of_autograd(
    model: str, shape: tuple[int, ...], options: dict, batch: int, kind: str, measure: str
) -> None:
    """Random guesses, more rows than victims, in float64: D, dD/dx and dD/dy agree to rounding."""
    plan, g = Plan(net_spec(model, shape, CLASSES, options), 1), torch.Generator().manual_seed(3)
    params = {n: v.double() for n, v in initial(plan.spec, 0).items()}
    simulate, evidence = simulation(plan, params), []
    for victim in range(2):
        y = drawn((1, batch, CLASSES), g).softmax(-1)
        observed = {n: v.detach() for n, v in simulate(drawn((1, batch, *shape), g), y).items()}
        weight = precisions(observed, kind, g)
        evidence.append(Evidence((Slot(victim, 0),), observed, simulate, params, weight, measure=measure))
    fast, slow = objective(evidence, plan, batch, torch.float64), SimulatedObjective(evidence)
    assert isinstance(fast, ChainObjective)
    x, y = drawn((3, batch, *shape), g), drawn((3, batch, CLASSES), g).softmax(-1)
    index, none = torch.tensor([1, 0, 0]), x.new_zeros(3, 0)
    for mine, theirs in zip(fast(x, y, none, index), slow(x, y, none, index), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("measure", ["cosine", "squares"])
def test_plain_gradients_of_other_networks_are_mapped_over_victims(measure: str) -> None:
    """A residual network has no chain: by vmap as one by one, with one precision a tensor, an entry, or none."""
    plan, g = Plan(net_spec("densenet", (1, 8, 8), CLASSES, {"growth": 2, "blocks": 2, "layers": 1}), 1), seeded(3)
    params = {n: v.double() for n, v in initial(plan.spec, 0).items()}
    simulate, evidence = simulation(plan, params), []
    for victim, kind in enumerate(("none", "tensors", "entries")):
        y = drawn((1, 1, CLASSES), g).softmax(-1)
        observed = {n: v.detach() for n, v in simulate(drawn((1, 1, 1, 8, 8), g), y).items()}
        weight = precisions(observed, kind, g)
        evidence.append(Evidence((Slot(victim, 0),), observed, simulate, params, weight, measure=measure))
    fast = objective(evidence, plan, 1, torch.float64)
    assert isinstance(fast, MappedObjective)
    assert isinstance(objective(evidence[:1], plan, 1, torch.float64), SimulatedObjective)
    x, y = drawn((3, 1, 1, 8, 8), g), drawn((3, 1, CLASSES), g).softmax(-1)
    args = (x, y, x.new_zeros(3, 0), torch.tensor([2, 0, 1]))
    for mine, theirs in zip(fast(*args), SimulatedObjective(evidence)(*args), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "size"), [(3, 1, 1, (6, 5)), ((3, 2), (1, 2), (2, 0), (7, 9)), (5, 2, 2, (8, 9))]
)
def test_patches_are_summed_alike_slice_by_slice_and_by_torch(
    kernel: int, stride: int, padding: int, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = torch.nn.Conv2d(3, 4, kernel, stride, padding)
    layer = Convolution(module, "layer", module.weight.detach(), None, False, size)
    dropped = torch.rand(2, module.weight[0].numel(), layer.out[0] * layer.out[1], generator=seeded())
    whole = layer.fold(dropped)
    monkeypatch.setattr(affine, "SLICED", 0)
    sliced = layer.fold(dropped)
    assert sliced.shape == (2, 3, *size)
    assert torch.allclose(sliced, whole, atol=1e-5)


# -- priors ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("prior", [TotalVariation(2.0), Norm(3.0, 0.5), Sum([TotalVariation(1.0), Norm(1.0)])])
def test_slopes_of_priors_are_those_of_autograd(prior: Penalty) -> None:
    x = drawn((3, 2, 2, 5, 4), seeded()).requires_grad_()
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
    evidence = observation(Plan(net_spec("dlnet", (1, 8, 8), CLASSES), 1))
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


def observation(plan: Plan) -> Evidence:
    params, g = initial(plan.spec, 0), seeded(4)
    simulate = simulation(plan, params)
    x, y = torch.rand((1, 1, *plan.spec.shape), generator=g), torch.eye(plan.spec.classes)[None, :1]
    observed = {n: v.detach() for n, v in simulate(x, y).items()}
    return Evidence((Slot(0, 0),), observed, simulate, params)


# -- attacks -----------------------------------------------------------------------------------------------------------
Seen = tuple[View, Victims]


@pytest.fixture(scope="module")
def see(digits: Data) -> Callable[[int], Seen]:
    """Return what a server sees of eight digits in batches of a size, undefended, and whose they are."""

    def make(batch: int) -> Seen:
        plan = Plan(net_spec("dlnet", (1, 8, 8), 10), 1, Local("gradient", batch=batch))
        fed = Federation(NoDefense(), plan, {0: Data(digits.x[900:960].clone(), digits.y[900:960].clone())}, Seeds(0))
        fed.start(initial(plan.spec, 1))
        victims = choose_victims(fed.shards, "server/1", batch, 8, Seeds(0))
        return fed.probe(victims.data).view("server/1"), victims

    return make


def reached(seen: Seen, attack: Attack) -> tuple[list[float], list[Guess]]:
    view, victims = seen
    guesses = attack.run(view, victims.challenges(), seeded())
    return [s.psnr or 0.0 for s in score_images(victims, guesses, {}, {}, (0.0, 1.0)).victims], guesses


def test_a_fading_prior_costs_nothing_where_a_fixed_one_outweighs_the_data(see: Callable[[int], Seen]) -> None:
    """Sigmoid networks: cosines differ by less than 1e-4 between a grey image and the truth."""
    fading, _ = reached(see(1), IG(budget=200))
    fixed, _ = reached(see(1), IG(budget=200, tv=1e-3, fading=False))
    assert median(fading) > 60
    assert median(fixed) < 20


def test_the_best_of_several_starts_is_chosen_by_its_mismatch_and_the_others_are_shown(
    see: Callable[[int], Seen],
) -> None:
    _, guesses = reached(see(1), IG(budget=90, tries=3))
    _, alone = reached(see(1), IG(budget=30))
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


def test_victims_are_searched_alike_in_blocks_of_any_size(see: Callable[[int], Seen]) -> None:
    (_, together), (_, apart) = (reached(see(1), IG(budget=10, slots=n)) for n in (32, 3))
    assert all(torch.allclose(a.x, b.x, atol=1e-3) for a, b in zip(together, apart, strict=True))


@pytest.mark.parametrize(
    "attack", [IG(), GradInversion(budget=300, tries=2), IGLayers(budget=300)], ids=lambda a: a.name
)
def test_labels_of_a_batch_are_recovered_and_images_come_near(attack: Attack, see: Callable[[int], Seen]) -> None:
    """Two digits a batch: their labels as a multiset, their images nearer than grey is."""
    seen = see(2)
    found, guesses = reached(seen, attack)
    for unit, guess in zip(seen[1].units, guesses, strict=True):
        assert sorted(guess.y.tolist()) == sorted(seen[1].truth(unit).y.argmax(1).tolist())  # type: ignore[union-attr]
    truth = torch.cat([seen[1].truth(unit).x for unit in seen[1].units])
    grey = -10 * torch.log10(((truth - 0.5) ** 2).flatten(1).mean(1))
    assert median(found) > float(grey.median()) + 3


def test_variants_differ_in_the_prior_alone_and_none_is_free(see: Callable[[int], Seen]) -> None:
    for attack in (IG(), Likelihood(), GradInversion()):
        variants = list(attack.variants())
        assert variants[0] == attack
        assert len({v.tv for v in variants}) == len(variants) > 1  # type: ignore[attr-defined]
        assert all(replace(v, tv=attack.tv) == attack for v in variants)  # type: ignore[call-arg]
    assert list(IGLayers().variants()) == [IGLayers()]


def test_settings_out_of_range_are_refused() -> None:
    bad = (IG(tries=0), IG(slots=0), IG(tv=float("nan")), IG(label="guess"), IGLayers(hypotheses=0), IGLayers(tries=2))  # type: ignore[arg-type]
    for attack in (*bad, GradInversion(group=-1.0), GradInversion(norm=float("inf"))):
        with pytest.raises(UsageError, match=attack.name):
            attack.check()
