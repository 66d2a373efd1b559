"""Attacks that know FedPC: pilots fall whatever they keep secret, ternaries tell labels."""

from dataclasses import replace

import pytest
import torch
from observations import scored, seeded

from ppbench.adversary.victims import choose_victims
from ppbench.attacks.adaptive.fedpc import (
    AdaptiveFedPC,
    FedPCLabels,
    class_signs,
    gradient_gain,
    known_signs,
    observed_pilots,
    pilot_evidence,
    public_hyperparameters,
    sign_labels,
    ternary_evidence,
)
from ppbench.attacks.reconstruction.dlg import IDLG
from ppbench.base.seeds import Seeds
from ppbench.base.tree import tree_map
from ppbench.defenses.fedpc.protocol import FedPC
from ppbench.federation.evidence import at_truth
from ppbench.federation.plan import Local, Opt
from ppbench.federation.threats import TARGET
from ppbench.nets.net import net_spec
from ppbench.questions.labels import score_labels

MOMENTUM = Local("delta", epochs=1, batch=32, opt=Opt("sgd", lr=0.05, momentum=0.9))
PLAIN = FedPC()
SHALLOW = {"nconv": 2}


@pytest.fixture
def probed(federate, plan):
    """Return a maker of a view, and the victims by the role that they played."""

    def make(count, batch=1, kind="local", rounds=2, defense=PLAIN, model="dlnet", options=SHALLOW, threat="server/1"):
        run = federate(defense, replace(plan, local=MOMENTUM, spec=net_spec(model, (1, 8, 8), 10, options)))
        victims = choose_victims(run.shards, "server/1", batch, count, Seeds(0), roles=2)
        transcript = run.probe(victims.data, kind, rounds)
        roles = transcript.roles()
        return transcript.view(threat), {role: victims.playing(role, roles, count) for role in defense.roles}, run

    return make


def psnrs(attack, view, victims):
    guesses = attack.run(view, victims.challenges(), seeded())
    result, labels = zip(*scored(victims, guesses), strict=True)
    return result, labels, guesses


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["gradient", "local"])
def test_pilots_are_inverted_with_the_hyper_parameters_that_they_keep_secret(probed, kind):
    """Plain matching, which takes them for one step at the nominal rate, is right about those that took just that."""
    view, victims, run = probed(3, kind=kind, rounds=1)
    assert len({(float(c.rate), int(c.epochs)) for c in run.parties.clients}) > 1  # there is something to find
    blind, _, _ = psnrs(IDLG(restarts=0, budget=60), view, victims["pilot"])
    decibels, labels, guesses = psnrs(AdaptiveFedPC(restarts=0), view, victims["pilot"])
    assert min(decibels) > 30 and all(labels)
    pilots = [run.parties.clients[slot.client] for (slot,) in victims["pilot"].units]
    nominal = [float(c.rate) == 1 and (kind == "gradient" or int(c.epochs) == 1) for c in pilots]
    assert [decibels > 15 for decibels in blind] == nominal
    assert all(g.confidence is not None and g.confidence < 1e-8 for g in guesses)


def test_only_the_true_secret_explains_a_pilots_update(probed):
    view, victims, run = probed(4, batch=2, rounds=1)
    for slot, one in observed_pilots(view).items():
        data, me = victims["pilot"].data[slot], run.parties.clients[slot.client]
        tries = public_hyperparameters(view.plan, view.defense, one.round, 2)
        assert len(tries) == 6  # three rates, two numbers of epochs; all batch sizes exceed two images
        gaps = {}
        for secret in tries:
            (evidence,) = pilot_evidence([one], view.plan, secret)
            gaps[secret.rate, secret.epochs] = at_truth(evidence, data.x[None], data.y[None])
        truth = gaps.pop((float(me.rate) * 0.05, int(me.epochs)))
        assert truth < 1e-8 and min(gaps.values()) > 1e-6


def test_a_linear_first_layer_gives_the_image_by_a_ratio(probed):
    view, victims, _ = probed(3, model="mlp", options={}, rounds=1)
    decibels, labels, guesses = psnrs(AdaptiveFedPC(), view, victims["pilot"])
    assert min(decibels) > 40 and all(labels)
    assert all(g.evaluations < 30 for g in guesses)


def test_the_direction_of_one_step_is_exact_whatever_the_rate(probed):
    view, victims, _ = probed(2, kind="gradient", rounds=1)
    pilots = [e for e in AdaptiveFedPC().evidence(view) if e.channel == "pilot"]
    assert len(pilots) == 2
    for evidence in pilots:
        data = victims["pilot"].data[evidence.unit[0]]
        assert evidence.measure == "cosine"
        assert at_truth(evidence, data.x[None], data.y[None]) < 1e-9


@pytest.mark.nightly
def test_ternaries_tell_labels_and_something_of_the_image(probed):
    """Labels are exact where one image makes few steps; images beat grey, and what plain matching makes of them."""
    view, victims, _ = probed(4)
    plain, _, _ = psnrs(IDLG(restarts=0, budget=60), view, victims["ternary"])
    decibels, labels, guesses = psnrs(AdaptiveFedPC(sign_budget=40), view, victims["ternary"])
    grey = [float(-10 * ((victims["ternary"].truth(u).x - 0.5) ** 2).mean().log10()) for u in victims["ternary"].units]
    assert all(labels)
    assert sum(decibels) > sum(grey) + 4 and sum(decibels) > sum(plain) + 4
    assert all(g.evaluations <= 52 for g in guesses)


def test_signs_of_ternaries_are_those_of_the_gradients_at_the_truth(probed):
    view, victims, _ = probed(4)
    known = known_signs(view, view.defense)
    for (slot,) in victims["ternary"].units:
        evidence = ternary_evidence(slot, known[slot], view.plan)
        data = victims["ternary"].data[slot]
        right = evidence.simulate(data.x[None].double(), data.y[None].double())
        wrong = tree_map(lambda t: -t, right)
        gaps = [float(evidence.discrepancy(tree).detach()) for tree in (right, wrong)]
        assert gaps[0] < 0.02 < 0.2 < gaps[1]
        assert set(evidence.observed) == set(evidence.simulate.params)


def test_bounds_hold_at_the_truth_with_the_true_gain_only(probed):
    view, victims, run = probed(4, kind="gradient")
    known = known_signs(view, view.defense)
    for (slot,) in victims["ternary"].units:
        data, me = victims["ternary"].data[slot], run.parties.clients[slot.client]
        gaps = {}
        for secret in public_hyperparameters(view.plan, view.defense, 2, 1):
            evidence = ternary_evidence(slot, known[slot], view.plan, gradient_gain(view.plan, secret, 1))
            assert any(n.startswith("bound/") for n in evidence.observed)
            simulated = evidence.simulate(data.x[None].double(), data.y[None].double())
            gaps[secret.rate] = float(evidence.discrepancy(simulated).detach())
        truth = gaps.pop(0.05 * float(me.rate))
        assert truth < 1e-8 and min(gaps.values()) > 1e-5


@pytest.mark.parametrize("batch", [1, 4])
def test_labels_of_both_roles(probed, batch):
    """Over ten seeds .83 to 1 of a batch of four's."""
    view, victims, _ = probed(6 * batch, batch=batch, options={})
    for some in victims.values():
        labels = score_labels(some, FedPCLabels().run(view, some.challenges(), seeded())).victims
        share = sum(bool(one.label) for one in labels) / len(labels)
        assert share == 1 if batch == 1 else share > 0.7


def test_labels_from_signs_by_hand(plan):
    signs = torch.tensor([1.0, -1, 1, 0, 1, 1, 1, 1, 1, 1])
    rows = torch.ones(10, 192)
    rows[3] = -1
    known = {"head.bias": signs, "head.weight": rows}
    assert class_signs([known]).tolist() == [1, -1, 1, -1, 1, 1, 1, 1, 1, 1]  # class 3 by its weights
    params = {"head.weight": torch.zeros(10, 48)}
    nothing = {n: torch.zeros_like(v) for n, v in known.items()}
    draws = {int(sign_labels([nothing], plan, params, 1, seeded(s))) for s in range(40)}
    assert len(draws) > 5  # no sign: chance
    only = {**known, "head.weight": torch.ones(10, 192)}
    assert sign_labels([only], plan, params, 1, seeded()).tolist() == [1]


@pytest.mark.nightly
def test_masked_ternaries_tell_nothing_about_one_client(probed):
    view, victims, _ = probed(2, defense=FedPC(masks="ring"))
    assert known_signs(view, view.defense) == {}
    guesses = AdaptiveFedPC().run(view, victims["ternary"].challenges(), seeded())
    assert all(g.evaluations == 1 and g.confidence is None for g in guesses)
    decibels, _, _ = psnrs(AdaptiveFedPC(restarts=0), view, victims["pilot"])
    assert min(decibels) > 30


def test_colluders_read_a_masked_ternary_as_if_it_had_no_mask(probed):
    bare, hidden = (probed(4, defense=FedPC(masks=m), threat="collusion/1")[0] for m in ("none", "ring"))
    outcome, result = (
        {slot: t for slot, t in known_signs(v, v.defense).items() if slot.client == TARGET} for v in (bare, hidden)
    )
    assert outcome and outcome.keys() == result.keys()
    for slot, rounds in outcome.items():
        assert [t.round for t in rounds] == [t.round for t in result[slot]]
        for one, other in zip(rounds, result[slot], strict=True):
            assert all(torch.equal(one.signs[n], other.signs[n]) for n in one.signs)
    pieces = {e.unit: e for e in hidden.defense.evidence(hidden) if e.unit[0].client == TARGET}
    assert pieces and {len(unit) for unit in pieces} == {1}
    few = replace(hidden, states=tuple(s for s in hidden.states if s.party not in (1, 2)))  # one is no pilot
    assert TARGET not in {slot.client for slot in known_signs(few, few.defense)}
