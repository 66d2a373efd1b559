"""What every registered defense must keep, whatever it does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ppbench.adversary.leaks import leaks
from ppbench.adversary.victims import choose_victims
from ppbench.adversary.view import View
from ppbench.errors import UsageError
from ppbench.federation.client_map import client_map
from ppbench.federation.contract import Defense
from ppbench.federation.optim import Opt
from ppbench.federation.plan import Local
from ppbench.federation.tree import leaves, nbytes
from ppbench.federation.wire import SERVER, Slot
from ppbench.registry import load, plugins
from ppbench.seeds import Seeds

DEFENSES = [n for n, p in plugins("defenses").items() if p.distribution == "ppbench"]


def make(name: str) -> Defense:
    return load("defenses", name)()


def same(a: object, b: object) -> bool:
    return len(leaves(a)) == len(leaves(b)) and all(map(torch.equal, leaves(a), leaves(b)))


@pytest.mark.parametrize("name", DEFENSES)
def test_one_seed_one_result_and_another_seed_another(name, federate):
    runs = [federate(make(name), seed=s) for s in (0, 0, 1)]
    for run in runs:
        assert run.run(2)
    assert same(runs[0].parties.server, runs[1].parties.server)
    assert same(runs[0].parties.clients, runs[1].parties.clients)
    assert not same(runs[0].parties.server.params, runs[2].parties.server.params)


@pytest.mark.parametrize("name", DEFENSES)
@pytest.mark.parametrize("schedule", ["parallel", "round_robin"])
def test_resumes_bit_for_bit(name, schedule, federate, plan, shards, tmp_path):
    plan = replace(plan, schedule=schedule)
    whole = federate(make(name), plan)
    whole.run(3)
    half = federate(make(name), plan)
    half.run(1)
    half.save(tmp_path)
    rest = type(half)(make(name), plan, shards, Seeds(0))
    rest.restore(tmp_path)
    rest.run(3)
    assert same(whole.parties.server, rest.parties.server)
    assert same(whole.parties.clients, rest.parties.clients)
    assert (whole.wire.up, whole.wire.down, whole.setup_up) == (rest.wire.up, rest.wire.down, rest.setup_up)


@pytest.mark.parametrize("name", DEFENSES)
def test_a_probe_moves_nothing(name, federate, shards):
    probed, plain = federate(make(name)), federate(make(name))
    for run in (probed, plain):
        run.run(1)
    victims = choose_victims(shards, "server/1", 2, 8, Seeds(0))
    probed.probe(victims.data)
    for run in (probed, plain):
        run.run(2)
    assert same(probed.parties.server, plain.parties.server)
    assert same(probed.parties.clients, plain.parties.clients)
    assert probed.wire.up == plain.wire.up


@pytest.mark.parametrize("name", DEFENSES)
def test_loop_and_vmap_compute_the_same_on_equal_inputs(name, federate, plan, shards):
    for local in (plan.local, Local("gradient", batch=48)):
        run = federate(make(name), replace(plan, local=local))
        _, message = run.defense.broadcast(run._context("real", 1, 0, SERVER), run.parties.server)
        jobs = {
            c: run.defense.prepare(run._context("real", 1, 0, c), run.parties.clients[c], message, shards[c])
            for c in shards
        }
        one = client_map("loop", run.defense, run.plan, jobs)
        many = client_map("vmap", run.defense, run.plan, jobs)
        assert sorted(one) == sorted(many) == sorted(shards)
        for client in shards:
            for a, b in zip(leaves(one[client]), leaves(many[client]), strict=True):
                # Adam divides by the root of a tiny second moment: rounding grows with the steps.
                torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("name", DEFENSES)
@pytest.mark.parametrize("threat", ["server/1", "client/1", "eavesdropper/1"])
def test_no_view_reaches_a_victims_batch(name, threat, federate, shards):
    run = federate(make(name))
    victims = choose_victims(run.shards, threat, 2, 8, Seeds(0))
    view = run.probe(victims.data).view(threat, own=victims.own)
    mine = {slot for slot in victims.data if threat == "client/1" and slot.client == 0}
    secrets = [victims.data[slot].x for slot in victims.data if slot not in mine]
    # What other parties hold: client secrets (SPN's heads), the server's own state.
    secrets += [leaf for c, state in enumerate(run.parties.clients) if not mine or c for leaf in leaves(state)]
    assert leaves([e.message for e in view.mail]), "the view is empty: the test proves nothing"
    assert leaks((view, view.defense.evidence(view), victims.challenges()), secrets) == []


@pytest.mark.parametrize("name", DEFENSES)
def test_a_view_survives_the_disk(name, federate, shards, tmp_path):
    run = federate(make(name))
    victims = choose_victims(run.shards, "server/1", 2, 8, Seeds(0))
    view = run.probe(victims.data).view("server/1")
    view.save(tmp_path / "view")
    again = View.load(tmp_path / "view")
    assert (again.threat, again.party, again.plan, again.defense) == ("server/1", SERVER, view.plan, view.defense)
    assert same([e.message for e in view.mail], [e.message for e in again.mail])
    first, second = view.defense.evidence(view), again.defense.evidence(again)
    assert [e.unit for e in first] == [e.unit for e in second]
    # Evidence that shares a broadcast still does: attacks batch by the identity of `simulate`.
    assert len({id(e.simulate) for e in second}) == len({id(e.simulate) for e in first}) == 1


@pytest.mark.parametrize("name", DEFENSES)
def test_bytes_are_those_of_the_messages(name, federate, shards):
    run = federate(make(name))
    victims = choose_victims(run.shards, "server/1", 1, 4, Seeds(0))
    transcript = run.probe(victims.data)
    params = run.plan.net.parameter_count
    for letter in transcript.mail:
        assert letter.nbytes == nbytes(letter.message)
        if letter.sender == SERVER or name != "ppdl":
            assert letter.nbytes == 4 * params
    assert run.setup_up == 8 * len(shards)


@pytest.mark.parametrize("name", DEFENSES)
def test_the_control_parameter_is_a_field_with_grids(name):
    defense = make(name)
    if defense.control is not None:
        assert hasattr(defense, defense.control)
        assert len(defense.grids["quick"]) >= 3 and len(defense.grids["paper"]) >= 5
        for value in defense.grids["paper"]:
            replace(defense, **{defense.control: value})


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("dp", "sigma", -1.0),
        ("dp", "law", "cauchy"),
        ("dp_sgd", "noise_multiplier", -0.1),
        ("dp_sgd", "clip", 0.0),
        ("ppdl", "theta", 0.0),
        ("ppdl", "theta", 1.5),
        ("spn", "alpha2", -0.1),
        ("spn", "bits", 0),
        ("full_noise", "sigma", 0.0),
    ],
)
def test_values_out_of_range_are_refused_by_name(name, field, value, plan):
    with pytest.raises(UsageError, match=rf"{name}.*{field}.*must be"):
        replace(make(name), **{field: value}).check(plan)


def test_unequal_shards_are_weighted_by_examples(federate):
    run = federate(make("none"))
    weights = run.defense.weights(run.parties.server, [0, 3])
    assert weights == pytest.approx([48 / 88, 40 / 88])


def test_a_diverging_run_stops_and_says_so(federate, plan):
    run = federate(make("none"), replace(plan, local=Local(batch=16, opt=Opt("sgd", lr=1e38))))
    assert run.run(5) is False
    assert run.round < 5


def test_slots_of_one_probe_are_its_cohort(federate, shards):
    run = federate(make("none"))
    data = {Slot(0, 1): shards[1], Slot(0, 2): shards[2]}
    mail = run.probe(data).mail
    assert {e.sender for e in mail} == {SERVER, 1, 2}
