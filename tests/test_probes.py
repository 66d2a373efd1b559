"""Probes of several rounds and of local training, roles, collusion, and what evidence makes of them."""

import itertools
import math
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

import pytest
import torch

from ppbench.adversary.victims import choose_victims
from ppbench.base.errors import ProtocolError, UsageError
from ppbench.base.seeds import Seeds
from ppbench.base.tree import leaves, tree_map
from ppbench.defenses.baffle.protocol import Baffle
from ppbench.federation.contract import Defense
from ppbench.federation.evidence import Evidence, at_truth, simulation
from ppbench.federation.messages import Hello, Update
from ppbench.federation.optim import Opt
from ppbench.federation.plain import plain_evidence
from ppbench.federation.plan import Local
from ppbench.federation.wire import SERVER, Slot

SGD = Opt("sgd", lr=0.1)


@dataclass(frozen=True)
class Plain(Defense):
    name: ClassVar[str] = "plain"


@dataclass(frozen=True)
class Odd(Defense):
    """Clients with an odd index send the negative of their update and play another role."""

    name: ClassVar[str] = "odd"
    roles: ClassVar[tuple[str, ...]] = ("even", "odd")

    def upload(self, ctx, me, result):
        return Update(tree_map(lambda t: -t, result)) if ctx.party % 2 else Update(result)

    def role_of(self, uploads):
        bias = uploads[0].params["head.bias"]
        return "even" if float(bias.min()) < -float(bias.max()) else "odd"  # one class pulls, the others push


def victims(run, batch=1, count=4, **options):
    return choose_victims(run.shards, options.pop("threat", "server/1"), batch, count, Seeds(0), **options)


def test_a_local_probe_sends_what_local_training_makes_of_the_batch(federate, plan):
    local = Local("delta", epochs=2, batch=16, opt=SGD)
    run = federate(Plain(), replace(plan, local=local))
    found = victims(run, batch=2)
    view = run.probe(found.data, "local").view("server/1")
    assert view.plan.local == replace(local, batch=2)
    params = run.parties.server.params
    for evidence in plain_evidence(view):
        (slot,) = evidence.unit
        data = found.data[slot]
        simulate = simulation(view.plan, params)
        first = simulate(data.x[None].double(), data.y[None].double())
        middle = {n: (params[n].double() - 0.1 * first[n]).float() for n in first}
        second = simulation(view.plan, middle)(data.x[None].double(), data.y[None].double())
        for name, value in evidence.observed.items():  # (g1 + g2) / 2: rate and epochs divided out
            torch.testing.assert_close(value.double(), (first[name] + second[name]) / 2, rtol=1e-3, atol=1e-6)
        assert 0 < at_truth(evidence, data.x[None], data.y[None]) < 0.2  # taken for one gradient, it is nearly that


def test_rounds_follow_each_other_and_plain_evidence_takes_the_first(federate, plan):
    run = federate(Plain())
    found = victims(run)
    once, thrice = run.probe(found.data), run.probe(found.data, rounds=3)
    uploads = [e for e in thrice.mail if e.receiver == SERVER]
    assert sorted({e.round for e in uploads}) == [1, 2, 3] and len(uploads) == 3 * len(found.units)
    models = [e.message.params for e in thrice.mail if e.sender == SERVER and e.receiver == 0]
    assert len(models) == 4 and not any(
        torch.equal(a["head.bias"], b["head.bias"]) for a, b in itertools.pairwise(models)
    )
    moved = (models[1]["head.bias"] - models[0]["head.bias"]).norm()
    assert moved < plan.local.opt.lr * 1.5  # a gradient step, though this server is meant for deltas
    for a, b in zip(plain_evidence(once.view("server/1")), plain_evidence(thrice.view("server/1")), strict=True):
        assert a.unit == b.unit and all(map(torch.equal, leaves(a.observed), leaves(b.observed)))


@pytest.mark.parametrize(("kind", "rounds"), [("gradient", 1), ("gradient", 2), ("local", 1), ("local", 2)])
def test_a_curious_client_still_reads_the_others_sum(federate, plan, kind, rounds):
    run = federate(Plain(), replace(plan, local=Local("delta", epochs=1, batch=16, opt=SGD)))
    run.shards = {c: type(s)(s.x[:40], s.y[:40]) for c, s in run.shards.items()}  # equal weights, as a client assumes
    run.parties.server = replace(run.parties.server, counts=torch.full_like(run.parties.server.counts, 40))
    found = victims(run, batch=2, threat="client/1", count=6)
    view = run.probe(found.data, kind, rounds).view("client/1", own=found.own)
    (evidence,) = plain_evidence(view)
    data = [found.data[slot] for slot in evidence.unit]
    x, y = torch.stack([d.x for d in data]), torch.stack([d.y for d in data])
    assert len(evidence.unit) == 3 and at_truth(evidence, x, y) < 1e-5


def test_victims_are_asked_about_in_the_role_that_they_played(federate):
    run = federate(Odd())
    found = victims(run, count=6, roles=2)
    assert len({slot.probe for slot in found.data}) == 6 and len(found.data) == 24
    transcript = run.probe(found.data)
    roles = transcript.roles()
    for role, parity in (("even", 0), ("odd", 1)):
        some = found.playing(role, roles, 6)
        assert len(some.units) == 6 and {slot.client % 2 for (slot,) in some.units} == {parity}
    assert found.playing("nobody", roles, 6).units == ()


def test_colluders_bring_their_states_and_no_secret_of_the_target(federate):
    from ppbench.defenses.pbpfl.extended import PBPFLExt
    from ppbench.nets.net import net_spec

    spec = net_spec("mlp", (1, 8, 8), 10, {"hidden": "8", "bias": False})
    plan = replace(federate(Plain()).plan, spec=spec, loss="squared", local=Local("gradient", batch=16))
    shards = {c: type(s)(s.x[:40], s.y[:40]) for c, s in federate(Plain()).shards.items()}
    run = federate(PBPFLExt(), plan)
    run.shards = shards
    found = victims(run, threat="collusion/1", count=3, sums=True)
    assert found.units == tuple((Slot(p, 0),) for p in range(3)) and len(found.data) == 12
    view = run.probe(found.data).view("collusion/1")
    assert {s.party for s in view.states} == {SERVER, 1, 2, 3}
    exchange = next(e for e in view.exchanges() if e.slot == Slot(0, 0))
    keys = view.state_at(exchange, 1)
    assert keys.shared.shape == (4, 32) and bool(keys.shared[0].any())
    assert view.state_at(exchange, 0) is None and view.state_at(exchange) is not keys


def test_a_broken_message_ends_the_round_and_changes_nothing(federate):
    @dataclass(frozen=True)
    class Broken(Defense):
        name: ClassVar[str] = "broken"

        def reply(self, ctx, me, message, result, data):
            state, answer = super().reply(ctx, me, message, result, data)
            if ctx.round == 2:
                state = torch.ones(1)
                answer = Update({"head.bias": torch.zeros(3)}) if ctx.party == 1 else answer
            return state, answer

    run = federate(Broken())
    run.run(1)
    before = run.parties
    with pytest.raises(ProtocolError, match="Client 1 "):
        run.run(2)
    assert run.parties is before and run.round == 1 and run.parties.clients == [()] * 4


@pytest.mark.parametrize("defense", [Plain(), Baffle(masks="ring64")])
@pytest.mark.parametrize("count", [0, -5, math.nan, 7.0, [1, 2], 2**41])
def test_a_number_of_examples_that_is_none_is_refused_by_name(federate, plan, defense, count):
    @dataclass(frozen=True)
    class Liar(type(defense)):
        def reply(self, ctx, me, message, result, data):
            state, answer = super().reply(ctx, me, message, result, data)
            told = ctx.party == 2 and isinstance(message, Hello)
            return state, replace(answer, count=torch.tensor(count)) if told else answer

    gradient = replace(plan, local=Local("gradient", batch=8))
    with pytest.raises(ProtocolError, match=r"^Client 2 told .* examples, not one int64 from 1 to 2\^40\.$"):
        federate(Liar(**asdict(defense)), gradient)


@pytest.mark.parametrize("measure", ["cosine", "hinge"])
def test_scale_free_measures(measure):
    truth = {"a": torch.tensor([1.0, -2.0, 0.5]), "b": torch.tensor([[3.0, -1.0]])}
    seen = {n: (v.sign() if measure == "hinge" else 7 * v) for n, v in truth.items()}
    evidence = Evidence((Slot(0, 0),), seen, lambda x, y: truth, measure=measure)
    assert float(evidence.discrepancy(truth)) == pytest.approx(0, abs=1e-6)
    scaled = {n: 1e-3 * v for n, v in truth.items()}
    against = {n: -v for n, v in truth.items()}
    assert float(evidence.discrepancy(scaled)) == pytest.approx(0, abs=1e-6)
    assert float(evidence.discrepancy(against)) == pytest.approx(2 if measure == "cosine" else 1)
    assert float(evidence.scale()) == 1
    assert float(replace(evidence, observed={n: torch.zeros_like(v) for n, v in seen.items()}).scale()) == 0


def test_a_weight_hides_entries_from_the_cosine():
    truth, seen = {"a": torch.tensor([1.0, 2.0])}, {"a": torch.tensor([1.0, -50.0])}
    weight = {"a": torch.tensor([1.0, 0.0])}
    evidence = Evidence((Slot(0, 0),), seen, lambda x, y: truth, weight=weight, measure="cosine")
    assert float(evidence.discrepancy(truth)) == pytest.approx(0, abs=1e-6)


def test_an_attack_on_local_training_is_not_run_on_single_gradients():
    from ppbench.run.config import configure
    from ppbench.run.experiment import resolve

    for probe, there in (("gradient", False), ("local", True)):
        config = configure(defense="none", probe=probe)
        assert ("fedavg_inversion" in {attack.name for attack in resolve(config).attacks}) == there
    config = configure(defense="none", attacks=("fedavg_inversion",))
    with pytest.raises(UsageError, match="'fedavg_inversion' has no use for --probe gradient; leave it out"):
        resolve(config).attacks  # noqa: B018


def test_where_nothing_can_be_read_nothing_is_concluded(tmp_path):
    from ppbench.run.evaluation import evaluate

    found = evaluate(
        defense="baffle", grid=(5.0,), rounds=1, stages=("init",), threats=("client/1",),
        attacks=("dlg", "label_recovery"),
        victims=4, clients=3, attack_batch=(1,), settings={"dlg.budget": 50}, out=tmp_path / "o", workers=1,
    )  # fmt: skip
    mine = [r for r in found.records if r.config.defense.id == "baffle"]
    assert {r.status for r in mine} == {"failed"} and all("nothing in the view of client/1" in r.reason for r in mine)
    assert not any("hide" in sentence or "Labels" in sentence for sentence in found.verdict)
