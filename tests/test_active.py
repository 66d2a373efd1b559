"""Servers that act: probes from weights of their own, trap weights, one target among others, what clients notice."""

from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import pytest
import torch
from protocols import central_bare
from scipy.optimize import linear_sum_assignment

from ppbench.adversary.leaks import leaks
from ppbench.adversary.victims import choose_victims
from ppbench.attacks.active.fishing import ClassFishing
from ppbench.attacks.active.imprint import Imprint, QuietImprint
from ppbench.attacks.active.text_trap import last_norm, text_trap
from ppbench.attacks.active.wiring import silent_weights, wiring
from ppbench.base.errors import UsageError
from ppbench.base.seeds import Seeds
from ppbench.base.tree import leaves
from ppbench.defenses.dp import DP
from ppbench.defenses.dp_sgd import DPSGD
from ppbench.defenses.fedpc.protocol import FedPC
from ppbench.defenses.mpdp.protocol import MPDP, MPDPH
from ppbench.defenses.none import FullNoise, NoDefense
from ppbench.defenses.pbpfl.protocol import PBPFLExt
from ppbench.defenses.secagg import SecureAggregation
from ppbench.federation.acting import Acting, Sent
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import at_truth, simulation
from ppbench.federation.plan import Data, Local, Opt, Plan
from ppbench.federation.wire import SERVER, Slot
from ppbench.nets.model_object import held_network
from ppbench.nets.net import initial, net_spec
from ppbench.run.config import configure
from ppbench.run.detection import detection_scores
from ppbench.run.evaluation import evaluate
from ppbench.run.experiment import resolve
from ppbench.run.task import make_task
from ppbench.testing.small_federation import World, all_digits, psnrs

ACTIVE, SYBIL = "server-active/1", "server-active/1/sybil"
SQUARED = {"loss": "squared"}


def federated(defense, model="mlp", options=None, clients=4, seed=0, **changes):
    """Return a started federation on all digits but 200, which are public, and these."""
    result = all_digits()
    x, y = (part[torch.randperm(1797, generator=torch.Generator().manual_seed(0))] for part in (result.x, result.y))
    size = 1597 // clients
    shards = {c: Data(*(part[200:][c * size : (c + 1) * size].clone() for part in (x, y))) for c in range(clients)}
    local = Local("delta" if isinstance(defense, FedPC) else "gradient", batch=32)
    plan = replace(
        Plan(net_spec(model, (1, 8, 8), 10, {"hidden": 256} if options is None else options), clients, local), **changes
    )
    run = Federation(defense, plan, shards, Seeds(seed))
    run.start(initial(plan.spec, seed + 1))
    return run, Data(x[:200].clone(), y[:200].clone())


def probed(attack, defense, batch, count, threat=ACTIVE, **options):
    """Return what an active server sees of `count` images, by `attack`, and how it acted."""
    run, public = federated(defense, **options)
    victims = choose_victims(run.shards, threat, batch, count, Seeds(0), sums=defense.sums, roles=len(defense.roles))
    acting = Acting(attack.crafted, 0 if sum(map(len, victims.units)) < len(victims.data) else None, public)
    view = replace(run.probe(victims.data, acting=acting).view(threat), public=public)
    return World(view, victims.challenges(), victims, run), acting


def share(attack, defense, batch, count, **options):
    """Return the share of images above 20 dB."""
    world, _ = probed(attack, defense, batch, count, **options)
    return sum(value > 20 for value in psnrs(world, world.answers(attack, 3))) / count


def as_it_is(before, generator):
    """Send the model itself, as an honest server does, but to the target and to the others apart."""
    return Sent(before.server.params, dict(before.server.params))


MASKED = [
    (SecureAggregation(), {}),
    (PBPFLExt(), SQUARED),
    (central_bare(k=8, masks="ring64"), {}),
    (FedPC(masks="ring"), {}),
    (NoDefense(), {}),
]


@pytest.mark.parametrize(("defense", "options"), MASKED, ids=lambda value: getattr(value, "name", ""))
def test_a_round_in_two_versions_of_one_model_is_the_honest_round_bit_for_bit(defense, options):
    """Masks, sessions and secrets are those of one round; clients' code is the honest one."""
    run, _ = federated(defense, options={"hidden": 16}, **options)
    victims = choose_victims(run.shards, ACTIVE, 4, 8, Seeds(0), sums=True)
    kept = [leaf.clone() for leaf in leaves((run.parties.server, run.parties.clients))]
    honest, acted = (run.probe(victims.data, acting=acting) for acting in (None, Acting(as_it_is, 0)))
    assert len(honest.mail) == len(acted.mail)
    for one, other in zip(honest.mail, acted.mail, strict=True):
        assert (one.probe, one.round, one.step, one.sender) == (other.probe, other.round, other.step, other.sender)
    sent = [{(e.probe, e.round, e.step, e.sender, e.receiver): e.message for e in t.mail} for t in (honest, acted)]
    assert sent[0].keys() == sent[1].keys()
    for key, message in sent[0].items():
        assert all(map(torch.equal, leaves(message), leaves(sent[1][key])))
    assert all(map(torch.equal, kept, leaves((run.parties.server, run.parties.clients))))  # nothing real moves


def test_the_target_alone_is_sent_the_trap_and_the_sum_is_its_gradient():
    world, _ = probed(QuietImprint(), PBPFLExt(), 8, 8, **SQUARED)
    assert world.victims.units == ((Slot(0, 0),),) and len(world.victims.data) == 4
    sent = {e.receiver: leaves(e.message) for e in world.view.mail if e.sender == SERVER and e.round == 1}
    assert all(map(torch.equal, sent[1], sent[2])) and not all(map(torch.equal, sent[0], sent[1]))
    (evidence,) = QuietImprint().evidence(world.view)
    data = world.victims.data[Slot(0, 0)]
    exact = evidence.simulate(data.x[None].double(), data.y[None].double())
    name = "features.1.weight"
    torch.testing.assert_close(evidence.observed[name], exact[name], rtol=1e-5, atol=1e-9)


def test_views_of_active_servers_reach_no_secret():
    for defense, options in MASKED[:-1]:
        world, acting = probed(QuietImprint(), defense, 2, 4, options={"hidden": 16}, **options)
        hidden = [part for d in [*world.victims.data.values(), *world.run.shards.values()] for part in (d.x, d.y)]
        assert leaks((world.view, world.challenges, acting.craft), [h for h in hidden if h[0].numel() > 10]) == []


@pytest.mark.parametrize("wrong", ["name", "shape", "nan"])
def test_only_finite_weights_of_the_agreed_architecture_are_sent(wrong):
    def craft(before, generator):
        params = dict(before.server.params)
        bias = params.pop("head.bias")
        changed = {"name": {"other": bias}, "shape": {"head.bias": bias[1:]}, "nan": {"head.bias": bias / 0}}
        return Sent({**params, **changed[wrong]})

    run, _ = federated(NoDefense())
    with pytest.raises(UsageError, match="A server that acts must send"):
        run.probe(choose_victims(run.shards, ACTIVE, 1, 1, Seeds(0)).data, acting=Acting(craft))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("mlp", {"hidden": 256, "activation": "relu"}),
        ("mlp", {"hidden": "256,32", "activation": "hardswish"}),
        ("mlp", {"hidden": 256, "bias": False}),
        ("cnn", {"hidden": 256, "pool": "avg", "widths": 16}),
        *(
            pytest.param(*late, marks=pytest.mark.nightly)
            for late in (
                *[("mlp", {"hidden": 256, "activation": a}) for a in ("leaky_relu", "hardswish", "sigmoid", "tanh")],
                *[("mlp", {"hidden": "256,32", "activation": a}) for a in ("relu", "tanh")],
                ("mlp", {"hidden": "256,32", "bias": False}),
                ("cnn", {"hidden": 256, "pool": "avg", "widths": 16, "activation": "tanh"}),
            )
        ),
    ],
)
def test_trap_weights_rebuild_most_of_a_batch_of_64(model, options):
    """An image is alone in its bin, of 256, with probability (1 - 1/256)^63 = .78, by exact quantiles."""
    assert share(QuietImprint(), NoDefense(), 64, 128 if model == "mlp" else 64, model=model, options=options) > 0.55


def test_few_units_still_rebuild_one_image_in_e_bins():
    few = share(QuietImprint(), NoDefense(), 64, 256, options={"hidden": 64})
    assert 0.2 < few < 0.5  # 1 / e = .37


def test_a_single_image_is_exact_whatever_the_public_examples():
    world, _ = probed(Imprint(), NoDefense(), 1, 4)
    assert min(psnrs(world, world.answers(Imprint()))) > 80


UNBOUNDED = [DP(sigma=0.1), MPDP(clip="none"), MPDPH(clip="none")]


@pytest.mark.nightly
@pytest.mark.parametrize("defense", UNBOUNDED)
def test_loud_traps_drown_noise_that_nothing_is_clipped_before(defense):
    options = {"options": {"hidden": 256, "bias": False}, **SQUARED} if isinstance(defense, MPDP) else {}
    loud, quiet = (share(attack, defense, 8, 64, **options) for attack in (Imprint(), QuietImprint()))
    assert loud > 0.6 and quiet == 0


@pytest.mark.nightly
def test_a_trap_is_no_louder_than_the_bound_that_its_gradient_is_clipped_to():
    options = {"options": {"hidden": 256, "bias": False}, **SQUARED}
    assert share(Imprint(), MPDP(clip="seen"), 8, 64, **options) == 0


@pytest.mark.parametrize(("defense", "options"), [(SecureAggregation(), {}), (PBPFLExt(), SQUARED)])
def test_sums_that_hide_clients_give_the_target_away(defense, options):
    assert share(QuietImprint(), defense, 64, 128, **options) > 0.5


@pytest.mark.parametrize("defense", [SecureAggregation(), central_bare(k=400, masks="ring64")])
def test_sybils_take_the_sum_apart_where_everybody_is_sent_one_model(defense):
    """By keys alone: without them one trap for all is read in the sum of four clients' batches."""

    class Consistent(QuietImprint):
        def crafted(self, before, generator):
            return replace(super().crafted(before, generator), others=None)

    world, acting = probed(Consistent(), defense, 8, 16, SYBIL)
    assert world.victims.units == ((Slot(0, 0),), (Slot(1, 0),)) and acting.target == 0
    sent = {e.receiver: leaves(e.message) for e in world.view.mail if e.sender == SERVER and e.round == 1}
    assert all(map(torch.equal, sent[0], sent[1]))
    evidence = Consistent().evidence(world.view)
    assert [e.unit for e in evidence] == list(world.victims.units)
    data = [world.victims.data[e.unit[0]] for e in evidence]
    if isinstance(defense, SecureAggregation):  # a sketch says something of the gradient, and is not it
        assert (
            max(at_truth(e, d.x[None], d.y[None]) for e, d in zip(evidence, data, strict=True)) < 1e-8
        )  # 4e-10 on one
        # processor, below 1e-10 on another: rounding of float32
        shown = [share(Consistent(), defense, 8, 64, threat=threat) for threat in (ACTIVE, SYBIL)]
        assert shown[1] > 0.8 > 3 * shown[0]
    hidden = [d.x for d in [*data, *world.run.shards.values()]]
    assert leaks((world.view, acting.craft), hidden) == []


@pytest.mark.parametrize("upload", ["gradient", "delta"])
def test_secure_aggregation_steps_as_no_defense_and_tells_sums_alone(upload):
    local = Local(upload, batch=32, opt=Opt("sgd", lr=0.1))
    runs = [federated(d, options={"hidden": 16}, local=local)[0] for d in (NoDefense(), SecureAggregation())]
    assert all(run.run(2) for run in runs)
    for one, other in zip(*(leaves(run.parties.server.params) for run in runs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    run = runs[1]
    victims = choose_victims(run.shards, "server/1", 4, 16, Seeds(0), sums=True)
    transcript, cohort = run.probe(victims.data), tuple(Slot(0, c) for c in range(4))
    (seen,) = SecureAggregation().evidence(transcript.view("server/1"))
    (bare,) = SecureAggregation().evidence(transcript.view("collusion/1"))
    assert SecureAggregation().evidence(transcript.view("eavesdropper/1")) == []
    for evidence, unit in ((seen, cohort), (bare, cohort[:1])):
        assert evidence.unit == unit
        x, y = (torch.stack([getattr(victims.data[s], part) for s in unit]) for part in ("x", "y"))
        assert at_truth(evidence, x, y) < 1e-10


@pytest.mark.nightly
def test_a_class_of_which_a_batch_holds_one_is_fished():
    """Of 8 digits nine in ten are of a class that is fished, and alone in theirs with probability .9^7 = .48."""
    options = {"model": "cnn", "options": {"widths": 16, "pool": "avg"}}
    assert share(ClassFishing(), NoDefense(), 1, 8, **options) >= 0.5
    assert share(ClassFishing(), NoDefense(), 8, 16, **options) > 0.1
    assert share(ClassFishing(), SecureAggregation(), 2, 8, **options) > 0.2
    assert share(ClassFishing(), FullNoise(), 4, 16, **options) == 0
    for model, others in (("dlnet", {}), ("mlp", {}), ("cnn", {"widths": 16})):
        assert not ClassFishing().suits(federated(NoDefense(), model, others)[0].plan)


def test_planted_null_uploads_of_noise_show_nothing():
    for batch in (1, 8, 64):
        assert share(Imprint(), FullNoise(), batch, 64) == 0


def test_pools_of_two_sides_and_padding_by_its_name_are_wired():
    layers = [torch.nn.Conv2d(1, 8, 3, padding="same"), torch.nn.ReLU(), torch.nn.AvgPool2d((2, 2)), torch.nn.Flatten()]
    layers += [torch.nn.Linear(128, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10)]
    wired = wiring(Plan(held_network(torch.nn.Sequential(*layers), (1, 8, 8)).spec, 1))
    assert wired is not None and [(layer.pool, layer.padding, layer.stride) for layer in wired.before] == [
        (2, (1, 1), 1)
    ]


def test_what_it_cannot_wire_is_refused():
    for model, options in (("dlnet", {}), ("cnn", {"hidden": 64}), ("mlp", {"hidden": ""})):
        run, _ = federated(NoDefense(), model, options)
        assert not Imprint().suits(run.plan)
    config = configure(defense="none", attacks=("imprint",), threats=(ACTIVE,), model="dlnet", rounds=1)
    with pytest.raises(UsageError, match="'imprint' has no use for model 'dlnet'"):
        assert resolve(config).attacks


@cache
def lettered(model="transformer", loss="cross_entropy", **options):
    """Return the task of letters on an untrained network of texts."""
    return make_task(
        configure(defense="none", dataset="letters", model=model, loss=loss, model_options=options, clients=4)
    )


def probed_letters(attack, defense, batch, count, threat=ACTIVE, **options):
    """Return what an active server sees of `count` letters, by `attack`."""
    task = lettered(**options)
    plan = replace(task.plan, local=Local("gradient", batch=32), schedule="parallel")
    run = Federation(defense, plan, task.shards, Seeds(0))
    run.start(task.params)
    victims = choose_victims(run.shards, threat, batch, count, Seeds(0), sums=defense.sums, roles=len(defense.roles))
    acting = Acting(attack.crafted, 0 if sum(map(len, victims.units)) < len(victims.data) else None)
    return World(run.probe(victims.data, acting=acting).view(threat), victims.challenges(), victims, run)


def tokens_in_place(world, guesses):
    """Return the share of real tokens that stand in their place in the text that a guess has for theirs."""
    hits = total = 0
    for unit, guess in zip(world.victims.units, guesses, strict=True):
        truth = world.victims.truth(unit).x
        same = ((truth[:, None] == guess.x) & (truth[:, None] != 0)).sum(2)
        hits += int(same[linear_sum_assignment(same, maximize=True)].sum())
        total += int((truth != 0).sum())
    return hits / total


def letters_read(attack, defense, batch, count, **options):
    """Return the share of tokens of `count` letters that come out in place."""
    world = probed_letters(attack, defense, batch, count, **options)
    return tokens_in_place(world, world.answers(attack, 3))


GPT, TOKENS = {"model": "gpt"}, {"model": "gpt", "loss": "next_token"}


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        (1, {}),
        (8, {}),
        (8, GPT),
        (8, TOKENS),
        *(
            pytest.param(*late, marks=pytest.mark.nightly)
            for late in (
                (16, {}),
                (16, GPT),
                (16, TOKENS),
                (8, {"frozen_embedding": True}),
                (8, {"depth": 2}),
                (8, {**TOKENS, "depth": 1}),
            )
        ),
    ],
)
def test_planted_leak_letters_come_out_of_a_transformer_whose_mlp_is_a_trap(batch, options):
    for attack in (Imprint(), QuietImprint()):
        assert letters_read(attack, NoDefense(), batch, 2 * batch, **options) > 0.95


def test_planted_null_uploads_of_noise_show_no_letter():
    world = probed_letters(Imprint(), FullNoise(), 4, 8)
    assert all(bool((guess.x == 0).all()) and guess.evaluations == 1 for guess in world.answers(Imprint()))


def test_letters_are_read_alike_each_time_from_one_evaluation():
    worlds = [probed_letters(Imprint(), NoDefense(), 4, 4) for _ in range(2)]
    first, again = (world.answers(Imprint(), seed) for seed, world in enumerate(worlds))
    assert torch.equal(first[0].x, again[0].x) and first[0].evaluations == 1 and first[0].y is None


@pytest.mark.parametrize("options", [{}, GPT])
def test_sums_that_hide_clients_give_the_targets_letters_away(options):
    assert letters_read(QuietImprint(), SecureAggregation(), 8, 8, **options) > 0.97


def test_a_loud_trap_of_letters_drowns_noise_but_not_noise_after_clipping():
    """Clipping scales a text's gradient down to its bound, and with it what the noise must drown."""
    assert letters_read(Imprint(), DP(sigma=0.01), 4, 8) > 0.9
    assert letters_read(Imprint(), DPSGD(noise_multiplier=0.1), 4, 8) < 0.05


@pytest.mark.parametrize("options", [{"lora": 4}, {**GPT, "depth": 1}, {"width": 16}])
def test_texts_are_refused_without_a_trained_mlp_that_every_token_passes(options):
    """Adapters leave no gradient of the MLP; of a classified decoder of one block only the last token has one."""
    plan = lettered(**options).plan
    assert not Imprint().suits(plan)
    with pytest.raises(UsageError, match="needs a transformer whose first MLP is trained"):
        text_trap(plan, initial(plan.spec, 0), None, torch.Generator(), loud=True)


def test_a_refusal_names_the_options_of_the_network():
    config = configure(
        defense="none", dataset="letters", attacks=("imprint",), threats=(ACTIVE,), model_options={"lora": 4}
    )
    with pytest.raises(UsageError, match="with loss 'cross_entropy', lora=4; leave it out"):
        assert resolve(config).attacks


@pytest.mark.parametrize("options", [{}, TOKENS])
def test_letters_of_all_but_the_target_have_no_gradient_but_the_heads_bias(options):
    task = lettered(**options)
    params = silent_weights(last_norm(task.plan), task.params, task.plan.loss)
    result = simulation(task.plan, params)(task.shards[0].x[None, :4], task.shards[0].y[None, :4])
    assert {name for name, value in result.items() if bool((value != 0).any())} == {"head.bias"}


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "hardswish", "sigmoid", "tanh"])
def test_weights_for_all_but_the_target_have_no_gradient_but_the_heads_bias(activation):
    run, _ = federated(NoDefense(), options={"hidden": "32,16", "activation": activation})
    plan, data = run.plan, run.shards[0]
    params = silent_weights(wiring(plan).last, run.parties.server.params, plan.loss)
    result = simulation(plan, params)(data.x[None], data.y[None])
    assert {name for name, value in result.items() if bool((value != 0).any())} == {"head.bias"}


@dataclass(frozen=True)
class Honest(Imprint):
    """Sends other weights of the law that honest ones have."""

    name: ClassVar[str] = "honest"

    def crafted(self, before, generator):
        return Sent(initial(before.plan.spec, int(torch.randint(2**31, (), generator=generator))))


def test_clients_notice_a_trap_and_nothing_where_there_is_nothing():
    world, acting = probed(QuietImprint(), NoDefense(), 8, 32)
    transcript = world.run.probe(world.victims.data, acting=acting)
    assert set(detection_scores(world.run, acting, transcript, world.victims.data).values()) == {1.0}
    placed = []
    for seed in range(8):
        world, acting = probed(Honest(), NoDefense(), 8, 32, seed=seed, options={"hidden": 16})
        transcript = world.run.probe(world.victims.data, acting=acting)
        placed += detection_scores(world.run, acting, transcript, world.victims.data).values()
    assert 0.25 < sum(placed) / len(placed) < 0.75


SMALL = {
    "model": "mlp",
    "model_options": {"hidden": 64},
    "clients": 3,
    "rounds": 1,
    "schedule": "parallel",
    "public": 0.2,
}


def test_an_evaluation_keeps_servers_that_act_apart(tmp_path):
    config = configure(defense="dp", **SMALL)
    assert not {"imprint", "imprint_quiet"} & {a.name for a in resolve(config).attacks}
    options = {"attacks": ("analytic", "imprint", "imprint_quiet"), "threats": ("server/1", ACTIVE), "victims": 16}
    options |= {"attack_batch": (8,), "stages": ("init",), "tuning": 0, "grid": (0.1,)}
    evaluation = evaluate(defense="dp", **SMALL, **options, out=tmp_path, workers=1)
    fields = {(r.config.defense.id, r.config.attack.id): r for r in evaluation.records}
    for (defense, attack), record in fields.items():
        assert record.status == "complete", record.reason
        acting = attack != "analytic"
        assert (record.config.threat_model.id == ACTIVE) is acting
        assert (record.metric("detection_auc") is not None) is acting
        if acting:
            assert record.metric("detection_auc").chance == 0.5
        if defense == "none" and acting:
            assert record.metric("share_above_20db").value > 0.5
        if defense == "full_noise":
            assert record.metric("share_above_20db").value == 0
    assert len(fields) == 9
    loud, quiet = (fields["dp", name].metric("share_above_20db").value for name in ("imprint", "imprint_quiet"))
    assert loud > 0 and quiet == 0  # each has a view of its own
    assert ACTIVE in (tmp_path / "leaderboard.html").read_text()
