"""What every registered defense must keep, whatever it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ppbench.adversary.leaks import leaks
from ppbench.adversary.victims import Victims, choose_victims
from ppbench.adversary.view import View
from ppbench.errors import UsageError
from ppbench.federation import secagg
from ppbench.federation.client_map import client_map
from ppbench.federation.contract import Defense
from ppbench.federation.engine import Federation
from ppbench.federation.optim import Opt
from ppbench.federation.plan import Data, Local, Plan
from ppbench.federation.tree import Tree, leaves, nbytes
from ppbench.federation.wire import SERVER, Slot
from ppbench.registry import load, plugins
from ppbench.seeds import Seeds
from ppbench.task.net import initial, net_spec

DEFENSES = [n for n, p in plugins("defenses").items() if p.distribution == "ppbench"]
UNFIT = {  # what cancels in a sum over all clients needs them all at once
    "pbpfl_ext": ("round_robin",),
    "mpdp": ("round_robin",),
    "mpdp_h": ("round_robin",),
    "fedpc": ("round_robin",),  # compares everybody's costs first
}
BARE = {"central"}  # hands its examples over, on purpose
Federate = Callable[..., Federation]


def make(name: str) -> Defense:
    return load("defenses", name)()


def plan_for(defense: Defense, plan: Plan) -> Plan:
    """Return `plan` with the loss, network and federation that the defense's own setting asks for."""
    setting = defense.setting.get("quick", {})
    if not setting:
        return plan
    opt = Opt("adam", 1e-3)  # small steps: what is tested is no learning, and noise must not blow the weights up
    spec = net_spec(setting.get("model", plan.spec.model), (1, 8, 8), 10, setting.get("model_options"))
    local = Local(setting.get("upload", "delta"), setting.get("local_epochs", 1), 16, opt)
    return replace(
        plan,
        spec=spec,
        clients=setting.get("clients", plan.clients),
        local=local,
        loss=setting.get("loss", plan.loss),
        server_opt=opt if local.upload == "gradient" else plan.server_opt,
        schedule=setting.get("schedule", plan.schedule),
    )


def shards_for(defense: Defense, plan: Plan, digits: Data) -> dict[int, Data]:
    """Return 48 examples a client and fewer for the last one, but for defenses that refuse shards of unlike sizes."""
    sizes = [48] * (plan.clients - 1) + [40]
    try:
        defense.check_data(plan, sizes)
    except UsageError:
        sizes = [48] * plan.clients
    return {c: Data(digits.x[c * 48 :][:n].clone(), digits.y[c * 48 :][:n].clone()) for c, n in enumerate(sizes)}


@pytest.fixture
def federate(plan: Plan, digits: Data) -> Federate:
    """Return a started federation of a defense in a plan that it accepts, with `changes` of that plan."""

    def started(defense: Defense, seed: int = 0, start: bool = True, **changes: Any) -> Federation:
        own = plan_for(defense, plan)
        federation = Federation(defense, replace(own, **changes), shards_for(defense, own, digits), Seeds(seed))
        if start:
            federation.start(initial(federation.plan.spec, 1))
        return federation

    return started


def victims_of(run: Federation, threat: str = "server/1", batch: int = 2, count: int = 8) -> Victims:
    return choose_victims(run.shards, threat, batch, count, Seeds(0), sums=run.defense.sums)


def secrets_of(state: Tree, known_to: int | None) -> Iterator[Tensor]:
    """Yield what a client's state hides from others, and from client `known_to`: not the public parts of its keys."""
    if not isinstance(state, secagg.Keys):
        yield from leaves(state)
        return
    yield state.private[None]
    others = [c for c in range(len(state.shared)) if c != known_to and bool(state.shared[c].any())]
    yield state.shared[others]


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
def test_resumes_bit_for_bit(name, schedule, federate, tmp_path):
    if schedule in UNFIT.get(name, ()):
        with pytest.raises(UsageError, match=rf"{name}.*use --schedule parallel"):
            federate(make(name), schedule=schedule)
        return
    whole = federate(make(name), schedule=schedule)
    assert whole.run(3)
    half = federate(make(name), schedule=schedule)
    half.run(1)
    half.save(tmp_path)
    rest = federate(make(name), schedule=schedule, start=False)
    rest.restore(tmp_path)
    rest.run(3)
    assert same(whole.parties.server, rest.parties.server)
    assert same(whole.parties.clients, rest.parties.clients)
    assert (whole.wire.up, whole.wire.down, whole.setup_up) == (rest.wire.up, rest.wire.down, rest.setup_up)


@pytest.mark.parametrize("name", DEFENSES)
def test_a_probe_moves_nothing(name, federate):
    probed, plain = federate(make(name)), federate(make(name))
    for run in (probed, plain):
        run.run(1)
    probed.probe(victims_of(probed).data)
    probed.observe()
    for run in (probed, plain):
        run.run(2)
    assert same(probed.parties.server, plain.parties.server)
    assert same(probed.parties.clients, plain.parties.clients)
    assert probed.wire.up == plain.wire.up


@pytest.mark.parametrize("name", DEFENSES)
def test_loop_and_vmap_compute_the_same_on_equal_inputs(name, federate, plan):
    if not make(name).mappable:
        pytest.skip("its clients always run in a loop")
    first = plan_for(make(name), plan).local
    for local in (first, Local("gradient", batch=48)):
        run = federate(make(name), local=local)
        _, message = run.defense.broadcast(run._context("real", 1, 0, SERVER), run.parties.server)
        jobs = {
            c: run.defense.prepare(run._context("real", 1, 0, c), run.parties.clients[c], message, shard)
            for c, shard in run.shards.items()
        }
        one = client_map("loop", run.defense, run.plan, jobs)
        many = client_map("vmap", run.defense, run.plan, jobs)
        assert sorted(one) == sorted(many) == sorted(run.shards)
        for client in run.shards:
            for a, b in zip(leaves(one[client]), leaves(many[client]), strict=True):
                # Adam divides by the root of a tiny second moment: rounding grows with the steps.
                exact = a.dtype == torch.float64
                torch.testing.assert_close(a, b, rtol=1e-10 if exact else 2e-3, atol=1e-12 if exact else 2e-5)


@pytest.mark.parametrize("name", DEFENSES)
@pytest.mark.parametrize("threat", ["server/1", "client/1", "eavesdropper/1"])
def test_no_view_reaches_a_victims_batch(name, threat, federate):
    run = federate(make(name))
    victims = victims_of(run, threat)
    view = run.probe(victims.data).view(threat, own=victims.own)
    curious = 0 if threat == "client/1" else None
    secrets = [data.x for slot, data in victims.data.items() if slot.client != curious]
    # What other parties hold: client secrets (SPN's heads, keys), the server's own state.
    states = {c: state for c, state in enumerate(run.parties.clients) if c != curious}
    secrets += [secret for state in states.values() for secret in secrets_of(state, curious)]
    assert leaves([e.message for e in view.mail]), "the view is empty: the test proves nothing"
    found = leaks((view, view.defense.evidence(view), victims.challenges()), secrets)
    assert bool(found) == (name in BARE and threat != "client/1"), found


@pytest.mark.parametrize("name", DEFENSES)
def test_a_view_survives_the_disk(name, federate, tmp_path):
    run = federate(make(name))
    view = run.probe(victims_of(run).data).view("server/1")
    view.save(tmp_path / "view")
    again = View.load(tmp_path / "view")
    assert (again.threat, again.party, again.plan, again.defense) == ("server/1", SERVER, view.plan, view.defense)
    assert same([e.message for e in view.mail], [e.message for e in again.mail])
    first, second = view.defense.evidence(view), again.defense.evidence(again)
    assert [e.unit for e in first] == [e.unit for e in second]
    assert same([e.observed for e in first], [e.observed for e in second])
    # Evidence that shares a broadcast still does: attacks batch by the identity of `simulate`.
    assert len({id(e.simulate) for e in second}) == len({id(e.simulate) for e in first}) == 1


KEY = 32
BYTES: dict[str, Callable[[int, int, int], tuple[int, int | None, int, int]]] = {
    # name: of P parameters, C classes and N clients: down and up a message, set-up up and down of all clients
    "pbpfl": lambda p, c, n: (8 * (p + c), 3 * 8 * p, 8 * n, 0),
    "pbpfl_ext": lambda p, c, n: (8 * (p + c), 3 * 8 * p, (8 + KEY) * n, n * (n * (8 + KEY) + n * n)),
    "ppdl": lambda p, c, n: (4 * p, None, 8 * n, 0),  # what it sends depends on the data
    "baffle": lambda p, c, n: (4 * p + 4, 4 * 100, 8 * n, 0),  # a seed down, K = 100 numbers up
}
COUNTED = {"mpdp", "mpdp_h", "mp_dp_naive", "mp_cdp", "fedpc", "central"}  # by their own tests


@pytest.mark.parametrize("name", DEFENSES)
def test_bytes_are_those_of_the_messages(name, federate):
    run = federate(make(name))
    transcript = run.probe(victims_of(run, count=4).data)
    assert {e.sender == SERVER for e in transcript.mail} == {True, False}
    for letter in transcript.mail:
        assert letter.nbytes == nbytes(letter.message)
    if name in COUNTED:
        return
    p, c, n = run.plan.net.parameter_count, run.plan.spec.classes, run.plan.clients
    down, up, setup_up, setup_down = BYTES.get(name, lambda p, c, n: (4 * p, 4 * p, 8 * n, 0))(p, c, n)
    for letter in transcript.mail:
        expected = down if letter.sender == SERVER else up
        assert expected is None or letter.nbytes == expected
    assert (run.setup_up, run.setup_down) == (setup_up, setup_down)


@pytest.mark.parametrize("name", DEFENSES)
def test_the_control_parameter_is_a_field_with_grids(name):
    defense = make(name)
    if defense.control is not None:
        assert hasattr(defense, defense.control)
        few = 3 if len(defense.roles) == 1 else 2  # cells of each role double an evaluation
        assert len(defense.grids["quick"]) >= few and len(defense.grids["paper"]) >= 5
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
        ("fedpc", "beta", 1.0),
        ("fedpc", "batch_sizes", "64,x"),
        ("baffle", "k", 0),
        ("baffle", "sigma", 0.0),
        ("pbpfl", "kappa", 0.0),
        ("pbpfl", "kappa", float("nan")),
        ("pbpfl", "precision", "float16"),
        ("pbpfl_ext", "families", "two"),
    ],
)
def test_values_out_of_range_are_refused_by_name(name, field, value, plan):
    with pytest.raises(UsageError, match=rf"{name}.*{field}.*must be"):
        replace(make(name), **{field: value}).check(plan_for(make(name), plan))


def test_unequal_shards_are_weighted_by_examples(federate):
    run = federate(make("none"))
    weights = run.defense.weights(run.parties.server, [0, 3])
    assert weights == pytest.approx([48 / 88, 40 / 88])


def test_a_diverging_run_stops_and_says_so(federate):
    run = federate(make("none"), local=Local(batch=16, opt=Opt("sgd", lr=1e38)))
    assert run.run(5) is False
    assert run.round < 5


def test_slots_of_one_probe_are_its_cohort(federate):
    run = federate(make("none"))
    data = {Slot(0, 1): run.shards[1], Slot(0, 2): run.shards[2]}
    mail = run.probe(data).mail
    assert {e.sender for e in mail} == {SERVER, 1, 2}
