"""The attacks that know BAFFLE's directions: sketches, what masks leave of them, images, labels, and the histogram."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from daily import all_but_nightly
from observations import batch_gradient, reached, scored, seeded, watched
from protocols import central_bare
from scipy import stats

from ppbench.adversary.attack import Attack
from ppbench.adversary.victims import Victims
from ppbench.attacks.adaptive import baffle as baffle_sketch
from ppbench.attacks.adaptive.baffle import (
    BaffleHistogram,
    BaffleLabels,
    BaffleSketch,
    DirectionMap,
    coordinates,
    histogram_test,
    sketch_evidence,
    sketches,
)
from ppbench.attacks.reconstruction.search.problem import MappedObjective, SimulatedObjective, objective
from ppbench.base.autodiff import gradient
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params
from ppbench.defenses.baffle import RINGS, Baffle, Differences, slope, stein_directions
from ppbench.federation import secagg
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import at_truth
from ppbench.federation.plan import Batch, Data, Layout, Local, Opt, Plan
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER
from ppbench.metrics.labels import multiset_chance
from ppbench.nets.net import initial, net_spec
from ppbench.questions.labels import score_labels
from ppbench.testing.small_federation import digit_shards

SPEC = net_spec("mlp", (1, 8, 8), 10, {"hidden": "32", "activation": "hardswish"})
PLAN = Plan(SPEC, 4, Local("gradient", batch=14), server_opt=Opt("adam", lr=0.01, betas=(0.9, 0.99)))
STEPS = replace(PLAN, local=Local("delta", batch=14, opt=Opt("sgd", lr=0.1)), server_opt=Opt())
SIZES = (48, 48, 48, 40)


@pytest.fixture(scope="module")
def shards(digits: Data) -> dict[int, Data]:
    return digit_shards(SIZES)


@pytest.fixture(scope="module")
def trained(digits: Data) -> Params:
    """Weights that are right on nine digits in ten."""
    layout, opt, pick = Layout.of(initial(SPEC, 0)), PLAN.server_opt, seeded(3)
    flat = layout.pack(initial(SPEC, 0))
    state = opt.init(flat)
    for _ in range(60):
        rows = torch.randint(200, 1200, (140,), generator=pick)
        batch = digits.x[rows], digits.y[rows], torch.ones(140)
        step = gradient(lambda p, b=batch: PLAN.objective(p, *b), layout.unpack(flat))
        flat, state = opt.step(flat, layout.pack(step).detach(), state, opt.lr)
    return layout.unpack(flat.detach())


def observed(
    defense: Baffle, shards: dict[int, Data], count: int, batch: int = 1, threat: str = "server/1",
    rounds: int = 1, kind: str = "gradient", plan: Plan = PLAN, params: Params | None = None,
) -> tuple[View, Victims]:  # fmt: skip
    """Return an adversary's view of `count` victims, and the truth."""
    run = Federation(defense, plan, shards, Seeds(0))
    run.start(params or initial(SPEC, 1))
    return watched(run, threat, batch, count, kind, rounds)


@pytest.fixture(scope="module")
def hundred(shards: dict[int, Data]) -> tuple[View, Victims]:
    """A hundred numbers of each of forty examples on an untrained model."""
    return observed(central_bare(k=100), shards, 40)


def errors(view: View, victims: Victims) -> list[float]:
    """Return the sketches' discrepancies at the truth, unit by unit."""
    evidence = {e.unit: e for e in sketch_evidence(view, sketches(view))}
    truths = [(unit, victims.truth(unit)) for unit in victims.units]
    return [at_truth(evidence[u], t.x.unflatten(0, (len(u), -1)), t.y.unflatten(0, (len(u), -1))) for u, t in truths]


def decibels(attack: Attack, view: View, victims: Victims) -> float:
    """Return the median PSNR of an attack's images."""
    return float(torch.tensor(reached((view, victims), attack)[0]).median())


def share(attack: Attack, view: View, victims: Victims) -> float:
    """Return the share of right labels."""
    guesses = attack.run(view, victims.challenges(), seeded(0))
    scores = score_labels(victims, guesses).victims
    return sum(bool(score.label) for score in scores) / len(scores)


# -- directions ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kept", [0, 10**6])
def test_directions_are_the_matrix_of_the_public_seed_and_differentiate_as_it_does(kept, monkeypatch):
    monkeypatch.setattr(baffle_sketch, "KEPT_NUMBERS", kept)
    monkeypatch.setattr(baffle_sketch, "STACK", 7)
    z, dense = DirectionMap(5, 30, 20), torch.stack(list(stein_directions(5, 30, 20))).double()
    g = torch.randn(30, dtype=torch.float64, requires_grad=True)
    s = torch.randn(20, dtype=torch.float64)
    torch.testing.assert_close(z(g), dense @ g)
    torch.testing.assert_close(torch.autograd.grad(z(g) @ s, g)[0], dense.T @ s)
    torch.testing.assert_close(z(torch.eye(30).double()), dense)
    assert (z.kept is None) == (kept == 0)


# -- sketches --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("scheme", "numbers"), [("central", 20), ("twice", 40)])
@pytest.mark.parametrize("threat", ["server/1", "eavesdropper/1"])
def test_a_sketch_is_the_gradient_along_the_directions(scheme, numbers, threat, shards):
    """Up to what float32 losses and the finite step cost: a thousandth of the sketch."""
    view, victims = observed(central_bare(k=20, scheme=scheme), shards, 4, 3, threat)
    assert [sketch.unit for sketch in sketches(view)] == list(victims.units)
    assert all(len(r.s) == numbers for sketch in sketches(view) for r in sketch.rounds)
    assert max(errors(view, victims)) < 1e-5


def test_every_round_has_other_directions_at_other_weights_and_all_are_one_observation(shards):
    view, victims = observed(central_bare(k=20), shards, 2, rounds=3)
    for sketch in sketches(view):
        assert len({r.z.seed for r in sketch.rounds}) == 3
        assert not torch.equal(sketch.rounds[0].params["head.bias"], sketch.rounds[2].params["head.bias"])
    assert max(errors(view, victims)) < 1e-5
    first, second = sketch_evidence(view, sketches(view))
    assert first.simulate is second.simulate  # one probe, one cohort: attacked in one batch
    assert first.params is None


@pytest.mark.parametrize(("rounds", "kept"), [(1, 10**7), (3, 10**7), (1, 0)])
def test_victims_of_the_same_directions_are_searched_at_once_where_these_are_kept(rounds, kept, shards, monkeypatch):
    """By vmap, so that directions are read once for all; what is drawn whenever it is needed goes one by one."""
    monkeypatch.setattr(baffle_sketch, "KEPT_NUMBERS", kept)
    monkeypatch.setattr(baffle_sketch, "STACK", 7)
    view, _ = observed(central_bare(k=20), shards, 6, 2, rounds=rounds)
    evidence, g = sketch_evidence(view, sketches(view)), seeded(1)
    fast = objective(evidence, view.plan, 2, torch.float64)
    assert type(fast) is (MappedObjective if kept else SimulatedObjective)
    x, y = torch.rand(3, 2, 1, 8, 8, generator=g).double(), torch.rand(3, 2, 10, generator=g).double()
    rows = x, y, x.new_zeros(3, 0), torch.tensor([2, 0, 1])
    for mine, theirs in zip(fast(*rows), SimulatedObjective(evidence)(*rows), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("masks", ["ring64", "ring32"])
def test_colluders_take_the_mask_off_bit_for_bit(masks, shards):
    """What is left are the fixed-point numbers that the client would have sent without a mask."""
    defense = central_bare(k=30, masks=masks)
    view, victims = observed(defense, shards, 2, threat="collusion/1", rounds=2)
    assert [sketch.unit for sketch in sketches(view)] == list(victims.units)
    part, bits = SIZES[0] / sum(SIZES), RINGS[masks].fraction_bits
    for sketch in sketches(view):
        truth = victims.truth(sketch.unit)
        for r in sketch.rounds:
            delta = defense.differences(PLAN, r.params, Batch(truth.x, truth.y, torch.ones(1)), r.z.seed)
            exact = secagg.from_ring(secagg.to_ring(delta, bits, part), bits) / part
            assert torch.equal(r.s, slope(exact, defense.sigma, defense.scheme))
    assert max(errors(view, victims)) < 1e-5


def test_masks_leave_the_server_the_weighted_mean_of_all_and_nothing_of_one(shards):
    view, victims = observed(central_bare(k=20, masks="ring64"), shards, 8, 2)
    (sketch,) = sketches(view)
    assert sketch.unit == victims.units[0]
    assert sketch.shares == pytest.approx([n / sum(SIZES) for n in SIZES])
    assert errors(view, victims)[0] < 1e-5
    silent = replace(view, mail=tuple(e for e in view.mail if e.sender != 2))
    assert sketches(silent) == []


@pytest.mark.parametrize("kind", ["gradient", "local"])
@pytest.mark.parametrize(
    ("masks", "threat"), [("none", "server/1"), ("none", "collusion/1"), ("ring64", "collusion/1")]
)
def test_an_update_of_one_step_is_its_sketch(kind, masks, threat, shards):
    view, victims = observed(
        central_bare(k=20, level="epoch", masks=masks), shards, 2, threat=threat, kind=kind, plan=STEPS
    )
    assert max(errors(view, victims)) < 1e-5


def local(**options: object) -> Plan:
    return replace(STEPS, local=replace(STEPS.local, **options))


def test_an_update_of_several_sgd_steps_is_taken_apart_into_their_sketches(shards):
    """Sixty numbers in three steps are less than the model's entries: each step's are found, and the way between."""
    view, victims = observed(central_bare(k=20, level="epoch"), shards, 2, kind="local", plan=local(epochs=3))
    assert [len(sketch.rounds) for sketch in sketches(view)] == [3, 3]
    assert max(errors(view, victims)) < 1e-5


@pytest.mark.parametrize("plan", [local(opt=Opt("adam", lr=0.01)), local(epochs=2, opt=Opt(lr=0.1, momentum=0.9))])
def test_an_update_that_is_no_plain_sum_is_none(plan, shards):
    view, _ = observed(central_bare(k=20, level="epoch"), shards, 2, kind="local", plan=plan)
    assert sketches(view) == []
    assert [e.params is not None for e in BaffleSketch().evidence(view)] == [True, True]  # then it is taken plainly


def test_coordinates_of_a_sum_of_estimates_are_the_numbers_that_made_it():
    maps, s = [DirectionMap(seed, 50, 20) for seed in (3, 4)], torch.randn(2, 20, dtype=torch.float64)
    total = sum((z.transposed(some) / 20 for z, some in zip(maps, s, strict=True)), torch.zeros(()))
    torch.testing.assert_close(torch.stack(coordinates(maps, total)), s)


# -- images ----------------------------------------------------------------------------------------------------------
@pytest.mark.nightly
def test_images_fall_where_numbers_are_as_many_as_pixels(shards):
    """64 pixels: 64 numbers, or two rounds of 32, give the image; a third of them does not."""
    seen = [observed(central_bare(k=k), shards, 2, rounds=rounds) for k, rounds in ((20, 1), (64, 1), (32, 2))]
    few, enough, twice = (decibels(BaffleSketch(budget=60), *some) for some in seen)
    assert few < 20 and min(enough, twice) > 35


@pytest.mark.nightly
def test_masks_do_not_help_whom_all_others_are_after(shards):
    view, victims = observed(central_bare(k=80, masks="ring64"), shards, 2, threat="collusion/1")
    assert decibels(BaffleSketch(budget=60), view, victims) > 35


# -- labels ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", all_but_nightly(["cone", "stein"], ["stein"]))
def test_labels_of_an_untrained_model_are_read_off_a_hundred_numbers(method, hundred):
    assert share(BaffleLabels(method), *hundred) == 1


@pytest.mark.nightly
def test_the_cone_reads_labels_from_fewer_numbers_and_after_training(shards, trained):
    """Where training has moved the gradient out of the head's bias, the bias tells little more than chance."""
    early = observed(central_bare(k=20), shards, 40)
    late = observed(central_bare(k=60), shards, 40, params=trained)
    assert share(BaffleLabels(), *early) > 0.85
    assert share(BaffleLabels(), *late) > 0.9
    assert share(BaffleLabels("stein"), *late) < 0.5


def test_labels_of_batches_and_of_cohorts_are_counted(shards):
    assert share(BaffleLabels(), *observed(central_bare(k=200), shards, 40, 4)) > 0.9
    assert share(BaffleLabels(), *observed(central_bare(k=200, masks="ring64"), shards, 16)) > 0.8


def test_label_attacks_suit_classes_of_images_only():
    bare = replace(PLAN, spec=net_spec("mlp", (1, 16, 16), 10, {"bias": False}))
    regression = replace(PLAN, spec=net_spec("mlp", (1, 16, 16), 1))
    assert [BaffleLabels(m).suits(PLAN) for m in ("cone", "stein")] == [True, True]
    assert [BaffleLabels(m).suits(bare) for m in ("cone", "stein")] == [True, False]
    assert not BaffleLabels().suits(regression) and not BaffleHistogram().suits(regression)


# -- the histogram ---------------------------------------------------------------------------------------------------
@pytest.mark.nightly
def test_the_histogram_calls_alike_what_is_read_without_error(shards, digits):
    """The paper's own test, 500 directions: real inputs pass for noise, and their labels are all read.

    Each example meets noise along other directions; p-values are corrected for their number (Bonferroni).
    """
    view, victims = observed(central_bare(k=500), shards, 12)
    params, g, ps = sketches(view)[0].rounds[0].params, seeded(5), []
    for i, sketch in enumerate(sketches(view)):
        x, y = torch.randn(1, 1, 8, 8, generator=g), digits.y[torch.randint(0, 1000, (1,), generator=g)]
        part = batch_gradient(PLAN, params, x, y)
        noise = DirectionMap(77 + i, sketch.rounds[0].z.entries, 500)(Layout.of(part).pack(part))
        size = sketch.rounds[0].s.std() / noise.std()  # a histogram's width tells the gradient's size, no more
        ps.append(histogram_test(sketch.rounds[0].s, size * noise).pvalue)
    assert len(ps) * min(ps) > 0.001
    assert share(BaffleLabels(), view, victims) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("batch", [1, 4])
def test_the_attack_by_histogram_is_chance(batch, shards, hundred):
    seen = hundred if batch == 1 else observed(central_bare(k=100), shards, 40, batch)
    low, high = stats.binom.interval(0.999, 40, multiset_chance(10, batch))
    assert low <= 40 * share(BaffleHistogram(), *seen) <= high


# -- bad observations ------------------------------------------------------------------------------------------------
def changed(view: View, values: Sequence[float]) -> View:
    """Return the view with `values` for the numbers of client 1."""
    answer = Differences(torch.tensor(values))
    return replace(view, mail=tuple(replace(e, message=answer) if e.sender == 1 else e for e in view.mail))


@pytest.mark.parametrize("values", [[torch.nan] * 80, [1e-4]])
def test_one_odd_answer_is_a_failed_guess_and_harms_no_other(values, shards):
    view, victims = observed(central_bare(k=80), shards, 3)
    seen = changed(view, values)
    for attack in (BaffleSketch(budget=40), BaffleLabels(), BaffleHistogram()):
        guesses = attack.run(seen, victims.challenges(), seeded(0))
        assert len(guesses) == 3
        if attack.kind == "reconstruction":
            assert min(scored(victims, guesses)[i][0] for i in (0, 2)) > 25
        elif attack.name == "baffle_labels":
            assert all(score_labels(victims, guesses).victims[i].label for i in (0, 2))


def test_a_client_sees_no_sketch(shards):
    view, victims = observed(central_bare(k=5), shards, 3, threat="client/1")
    assert sketches(view) == []
    assert SERVER not in {slot.client for unit in victims.units for slot in unit}
