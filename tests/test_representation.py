"""Defenses of the representation: what Soteria leaves out, mixup mixes and PRECODE draws, and what attacks read."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import mean, median

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import jacrev

from ppbench.adversary.attack import Attack
from ppbench.adversary.victims import choose_victims
from ppbench.attacks.adaptive.dp import AdaptiveSoteria
from ppbench.attacks.adaptive.mixtures import AdaptiveMixup, Mixture, class_means, common_example
from ppbench.attacks.adaptive.spn import AdaptivePrecode
from ppbench.attacks.reconstruction.closed_form import ClosedForm, rebuilt_input
from ppbench.attacks.reconstruction.dlg import DLG
from ppbench.attacks.reconstruction.ig import IG
from ppbench.base.errors import UsageError
from ppbench.base.secret_draws import SecretDraws
from ppbench.base.seeds import Seeds
from ppbench.defenses.none import FullNoise, NoDefense
from ppbench.defenses.representation import Mixup, Partners, Precode, Soteria
from ppbench.federation.contract import Context, Defense
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Batch, Data, Local, Plan
from ppbench.federation.wire import Hello, Model
from ppbench.nets.net import initial, net_spec
from ppbench.testing.small_federation import Duel, World, all_digits, psnrs

PLAN = Plan(net_spec("mlp", (1, 8, 8), 10), 2)
HEAD = "head.weight"


def batch_of(count: int) -> Batch:
    digits = all_digits()
    return Batch(digits.x[:count], digits.y[:count], torch.ones(count))


# -- Soteria --


def slow_exposure(plan: Plan, batch: Batch) -> Tensor:
    """Return the sum [D] over a batch of |r_i| / ||dr_i / dx||, by the whole Jacobian of each example."""
    params, total = initial(plan.spec, 1), torch.zeros(plan.net.feature_count)
    for x, w in zip(batch.x, batch.w, strict=True):
        features = plan.net.features(params, x[None])[0]
        jacobian = jacrev(lambda one: plan.net.features(params, one[None])[0])(x).flatten(1)
        total += w * features.abs() / jacobian.norm(dim=1).clamp(min=1e-12)
    return total


@pytest.mark.parametrize("model", ["mlp", "dlnet"])
def test_the_columns_of_the_features_that_tell_most_are_left_out_and_nothing_else_changes(model: str) -> None:
    plan = replace(PLAN, spec=net_spec(model, (1, 8, 8), 10))
    params, batch = initial(plan.spec, 1), replace(batch_of(3), w=torch.tensor([1.0, 1.0, 0.0]))
    exposure = slow_exposure(plan, batch)
    torch.testing.assert_close(Soteria().exposure(plan, params, batch), exposure, rtol=1e-3, atol=1e-3)
    clean = Defense().local_gradient(plan, params, batch, (), ())
    for rate in (0.0, 0.25, 1.0):
        sent = Soteria(rate).local_gradient(plan, params, batch, (), ())
        hidden = exposure.topk(round(rate * len(exposure))).indices
        expected = clean[HEAD].index_fill(1, hidden, 0.0)
        assert torch.equal(sent[HEAD], expected) and len(hidden) == round(rate * plan.net.feature_count)
        assert all(torch.equal(sent[name], clean[name]) for name in clean if name != HEAD)


def test_units_that_do_not_fire_are_not_left_out_in_place_of_those_that_tell() -> None:
    plan, batch = replace(PLAN, spec=net_spec("mlp", (1, 8, 8), 10)), batch_of(1)
    silent = plan.net.features(initial(plan.spec, 1), batch.x)[0] == 0
    exposure = Soteria().exposure(plan, initial(plan.spec, 1), batch)
    assert bool(silent.any()) and bool((exposure[silent] == 0).all()) and bool((exposure[~silent] > 0).all())


def test_a_network_without_a_trained_linear_head_is_refused() -> None:
    plan = replace(PLAN, spec=net_spec("unet", (1, 16, 16), 1), loss="bce")
    with pytest.raises(UsageError, match=r"Defense 'soteria': rate=0\.6 cannot be used; it must be used with a"):
        Soteria().check(plan)
    with pytest.raises(UsageError, match="used where targets are classes"):
        Mixup().check(plan)


def best(world: World, *attacks: Attack) -> list[float]:
    """Return each victim's best PSNR over attacks."""
    return [max(one) for one in zip(*(psnrs(world, world.answers(attack), attack) for attack in attacks), strict=True)]


@pytest.mark.parametrize("rate", [0.2, 0.9, 1.0])
def test_what_soteria_leaves_out_is_not_needed(rate: float) -> None:
    """On DLNet and digits: searches that take zeros for zeros find nothing, one that leaves them out finds all."""
    world = Duel(AdaptiveSoteria(), Soteria(rate)).probe(3)
    assert min(best(world, AdaptiveSoteria())) > 60
    assert max(best(world, IG(budget=300), DLG(budget=600))) < 12


@pytest.mark.parametrize("rate", [0.6, 1.0])
def test_trained_models_of_four_convolutions_show_single_images_too(rate: float) -> None:
    plan = replace(Duel(AdaptiveSoteria(), Soteria()).federate().plan, spec=net_spec("dlnet", (1, 8, 8), 10))
    run = Federation(Soteria(rate), plan, Duel(AdaptiveSoteria(), Soteria()).federate().shards, Seeds(0))
    run.start(initial(plan.spec, 1))
    run.run(10)
    victims = choose_victims(run.shards, "server/1", 1, 3, Seeds(0))
    world = World(run.probe(victims.data).view("server/1", own=victims.own), victims.challenges(), victims, run)
    assert min(best(world, AdaptiveSoteria())) > 30


def test_knowing_soteria_helps_on_batches_too() -> None:
    world = Duel(AdaptiveSoteria(), Soteria()).probe(4, batch=4)
    aware, plain = best(world, AdaptiveSoteria()), best(world, IG(budget=300), DLG(budget=600))
    assert min(aware) > 20 and max(plain) < 12


def test_the_attack_on_soteria_finds_nothing_in_noise() -> None:
    world = Duel(AdaptiveSoteria(), FullNoise()).probe(3)
    assert max(best(world, AdaptiveSoteria(budget=300))) < 11


def test_a_hidden_column_is_no_exact_feature() -> None:
    """Features of hidden columns are not determined, whatever the rest of the gradient shows."""
    world = Duel(AdaptiveSoteria(), Soteria(0.5)).probe(1)
    evidence = AdaptiveSoteria().evidence(world.view)[0]
    rebuilt = rebuilt_input(evidence, world.view.plan)
    assert rebuilt is not None
    hidden = int((evidence.observed[HEAD] == 0).all(0).sum())
    head = rebuilt.layers[0]
    assert hidden > 0 and head.determined == head.unknowns - hidden and not head.exact


# -- Mixup --


def context(seed: int) -> Context:
    return Context(PLAN, 1, "real", 0, torch.Generator().manual_seed(seed), SecretDraws(seed.to_bytes(32, "little")))


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.sampled_from([0.2, 1.0, 8.0]))
def test_each_example_is_mixed_with_one_partner_inputs_and_labels_alike(seed: int, alpha: float) -> None:
    pool = torch.arange(10)
    partners = Partners(pool.float().view(10, 1, 1, 1).expand(10, 1, 2, 2), pool)
    batches = Batch(torch.full((2, 3, 1, 2, 2), 20.0), torch.zeros(2, 3, 10), torch.ones(2, 3))
    mixed = Mixup(alpha).mixed(context(seed), partners, batches)
    assert mixed.x.shape == batches.x.shape and torch.equal(mixed.w, batches.w)
    part, label = mixed.y.max(-1)
    assert float(part.max()) <= 0.5 and float((mixed.y > 0).sum(-1).max()) <= 1
    expected = (1 - part) * 20 + part * label  # one share and one partner for input and label
    torch.testing.assert_close(mixed.x, expected.view(2, 3, 1, 1, 1).expand_as(mixed.x))


@pytest.mark.parametrize("alpha", [1e-30, 0.2, 1.0, 8.0, 1e6])
def test_the_shares_have_the_law_that_the_attack_assumes(alpha: float) -> None:
    defense, count = Mixup(alpha), 4000
    partners = Partners(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
    batches = Batch(torch.ones(1, count, 1), torch.ones(1, count, 2), torch.ones(1, count))
    share = defense.mixed(context(0), partners, batches).x
    assert float(share.mean()) == pytest.approx(defense.mean_share, abs=0.01) and float(share.min()) >= 0.5
    assert float((share > 0.9).float().mean()) == pytest.approx(defense.share_beyond(0.9), abs=0.02)


def test_a_client_keeps_its_first_examples_and_without_alpha_mixes_nothing() -> None:
    data, defense = all_digits(), Mixup(partners=5)
    me, _ = defense.reply(context(0), (), Hello(), (), data)
    assert torch.equal(me.x, data.x[:5]) and torch.equal(me.label, data.y[:5].argmax(1))
    runs = [Duel(DLG(), one).federate() for one in (Mixup(alpha=0.0), NoDefense())]
    for run in runs:
        run.run(2)
    assert all(torch.equal(runs[0].parties.server.params[n], v) for n, v in runs[1].parties.server.params.items())


def mixed_world(alpha: float, rounds: int, public: Data | None = None) -> World:
    """Return twelve single digits under mixup, in a probe of so many rounds."""
    duel = Duel(AdaptiveMixup(), Mixup(alpha))
    world = duel.probe(12)
    run = world.run
    victims = choose_victims(run.shards, duel.threat, 1, 12, Seeds(0))
    view = run.probe(victims.data, rounds=rounds).view(duel.threat, own=victims.own)
    return World(replace(view, public=public), world.challenges, victims, run)


def test_the_plain_attack_finds_the_mixture_alone() -> None:
    world = mixed_world(1.0, 1)
    guesses = world.answers(ClosedForm())
    upload = world.view.first_uploads()
    assert len(upload) == 12 and 14 < median(psnrs(world, guesses)) < 22
    aware = psnrs(world, world.answers(AdaptiveMixup()))
    assert aware == pytest.approx(psnrs(world, guesses), abs=0.5)  # one mixture and nothing public: no better


def test_more_rounds_and_public_means_separate_the_examples() -> None:
    digits = all_digits()
    public = Data(digits.x[-300:], digits.y[-300:])
    reached = {
        key: median(psnrs(world, world.answers(AdaptiveMixup())))
        for key, world in {
            "one": mixed_world(1.0, 1),
            "public": mixed_world(1.0, 1, public),
            "four": mixed_world(1.0, 4),
            "both": mixed_world(1.0, 4, public),
        }.items()
    }
    assert reached["public"] > reached["one"] + 4 and reached["four"] > reached["one"] + 8
    assert reached["both"] > reached["four"] + 4


def test_halves_separate_only_with_many_rounds() -> None:
    digits = all_digits()
    public = Data(digits.x[-300:], digits.y[-300:])
    few, many = (
        mean(psnrs(world, world.answers(AdaptiveMixup())))
        for world in (mixed_world(1e4, 1, public), mixed_world(1e4, 16, public))
    )
    assert few < 21 and many > few + 6


def test_labels_that_hide_the_shares_count_by_the_mean_share() -> None:
    """Two examples of one class, in one mixture of equal shares and one that is nearly the first example."""
    first, second = torch.zeros(1, 2, 2), torch.ones(1, 2, 2)
    one_class = torch.zeros(10, dtype=torch.float64).index_fill(0, torch.tensor(3), 1.0)
    shown = one_class.clone()
    shown[3], shown[5] = 0.99, 0.01
    mixtures = [Mixture((first + second).double() / 2, one_class), Mixture(0.01 * second.double(), shown)]
    x, y = common_example(mixtures, Mixup(), None, PLAN)
    assert y.tolist() == [3] and float(x.max()) < 0.02


def test_classes_without_public_examples_have_the_mean_of_all() -> None:
    data = Data(torch.tensor([[0.0], [1.0], [5.0]]), torch.eye(4)[torch.tensor([0, 0, 2])])
    assert class_means(data, 4).flatten().tolist() == [0.5, 2.0, 5.0, 2.0]


def test_granted_labels_of_the_originals_do_not_mislead_the_attack() -> None:
    world = mixed_world(1.0, 1)
    granted = [replace(c, y=world.victims.truth(c.unit).y[None]) for c in world.challenges]
    both = [AdaptiveMixup().run(world.view, c, torch.Generator().manual_seed(0)) for c in (world.challenges, granted)]
    assert psnrs(world, both[0]) == pytest.approx(psnrs(world, both[1]), abs=1e-3)


def test_batches_are_answered_by_their_mixtures() -> None:
    world = Duel(AdaptiveMixup(), Mixup(0.05)).probe(2, batch=2)
    guesses = world.answers(AdaptiveMixup())
    assert all(guess.x is not None and guess.x.shape == (2, 1, 8, 8) for guess in guesses)
    assert median(psnrs(world, guesses)) > 20


def test_the_attack_on_mixup_finds_nothing_in_noise() -> None:
    world = Duel(AdaptiveMixup(), FullNoise()).probe(3)
    assert max(best(world, AdaptiveMixup(budget=300))) < 11


def test_local_steps_are_mixed_anew_each() -> None:
    plan = replace(PLAN, local=Local("delta", epochs=2, batch=8))
    data, defense = Data(all_digits().x[:16], all_digits().y[:16]), Mixup()
    me, _ = defense.reply(context(0), (), Hello(), (), data)
    ctx = replace(context(1), plan=plan)
    job = defense.prepare(ctx, me, Model(initial(plan.spec, 0)), data)
    assert job is not None and job.own == () and job.batches.x.shape[:2] == (4, 8)
    soft = job.batches.y.flatten(0, 1)
    assert len(soft.amax(1).unique()) > 20 and torch.allclose(soft.sum(1), torch.ones(32))


# -- PRECODE --


def test_the_bottleneck_travels_with_the_model_and_a_sample_is_drawn_for_each_example_of_each_step() -> None:
    run = Duel(AdaptivePrecode(), Precode(size=7)).federate()
    width = run.plan.net.feature_count
    own = {name: tuple(v.shape) for name, v in run.parties.server.params.items() if name.startswith("bottleneck.")}
    assert own == {
        "bottleneck.encoder.weight": (14, width),
        "bottleneck.encoder.bias": (14,),
        "bottleneck.decoder.weight": (width, 7),
        "bottleneck.decoder.bias": (width,),
    }
    ctx, data = replace(context(0), plan=replace(run.plan, local=Local("delta", epochs=2, batch=8))), all_digits()
    job = run.defense.prepare(ctx, (), Model(run.parties.server.params), Data(data.x[:16], data.y[:16]))
    assert job is not None and job.noise.shape == (4, 8, 7) and len(job.noise.unique()) == 4 * 8 * 7


def test_the_loss_is_that_of_a_sample_plus_beta_times_a_divergence_in_bits() -> None:
    defense, batch = Precode(beta=0.5, size=3), batch_of(2)
    run = Duel(AdaptivePrecode(), defense).federate()
    plan, params = run.plan, {n: v.clone().requires_grad_() for n, v in run.parties.server.params.items()}
    draws = torch.tensor([[0.5, -1.0, 2.0], [0.0, 1.0, -0.5]])
    r = plan.net.features(params, batch.x)
    out = r @ params["bottleneck.encoder.weight"].T + params["bottleneck.encoder.bias"]
    law = torch.distributions.Normal(out[:, :3], torch.nn.functional.softplus(out[:, 3:]))
    z = law.mean + draws * law.stddev
    logits = plan.net.head(params, z @ params["bottleneck.decoder.weight"].T + params["bottleneck.decoder.bias"])
    prior = torch.distributions.Normal(torch.zeros(2, 3), torch.ones(2, 3))
    bits = torch.distributions.kl_divergence(law, prior).sum(1) / math.log(2)
    loss = torch.nn.functional.cross_entropy(logits, batch.y.argmax(1)) + 0.5 * bits.mean()
    expected = torch.autograd.grad(loss, [*params.values()])
    sent = defense.local_gradient(plan, run.parties.server.params, batch, (), draws)
    for name, value in zip(params, expected, strict=True):
        torch.testing.assert_close(sent[name], value, rtol=1e-4, atol=1e-6)


def test_whoever_uses_the_model_takes_the_mean_for_the_sample() -> None:
    defense = Precode(size=5)
    run = Duel(AdaptivePrecode(), defense).federate()
    params, x = run.parties.server.params, all_digits().x[:4]
    first, again = (run.outputs(x) for _ in range(2))
    assert torch.equal(first, again)
    sampled = defense.outputs(run.plan, params, x, torch.ones(4, 5))[0]
    assert not torch.allclose(first.float(), sampled, atol=1e-3)


def test_what_is_drawn_behind_the_encoder_hides_no_image() -> None:
    """On DLNet and digits: who takes means for the samples finds nothing; the encoder's gradient is exact."""
    world = Duel(AdaptivePrecode(), Precode(size=16)).probe(3)
    assert min(best(world, AdaptivePrecode())) > 60
    assert max(best(world, IG(budget=60), DLG(budget=100))) < 12
    labels = [guess.y.tolist() for guess in world.answers(AdaptivePrecode()) if guess.y is not None]
    assert labels == world.labels


@pytest.mark.nightly
def test_behind_kinks_the_cotangent_that_the_encoder_shows_is_searched_with() -> None:
    duel = Duel(AdaptivePrecode(budget=600), Precode(size=16))
    plan = replace(duel.federate().plan, spec=net_spec("cnn", (1, 8, 8), 10), local=Local("gradient", batch=1))
    run = Federation(duel.defense, plan, duel.federate().shards, Seeds(0))
    run.start(initial(plan.spec, 1))
    victims = choose_victims(run.shards, duel.threat, 1, 2, Seeds(0))
    view = run.probe(victims.data).view(duel.threat, own=victims.own)
    world = World(view, victims.challenges(), victims, run)
    aware, plain = best(world, AdaptivePrecode(budget=600)), best(world, IG(budget=100))
    assert median(aware) > max(plain) + 15


@pytest.mark.nightly
def test_samples_of_batches_are_searched_with_the_images() -> None:
    world = Duel(AdaptivePrecode(), Precode()).probe(2, batch=2)
    aware, plain = best(world, AdaptivePrecode()), best(world, DLG(budget=100))
    assert min(aware) > 40 and max(plain) < 10


def test_the_attack_on_precode_finds_nothing_in_noise() -> None:
    world = Duel(AdaptivePrecode(), FullNoise()).probe(3)
    assert max(best(world, AdaptivePrecode(budget=300))) < 11
