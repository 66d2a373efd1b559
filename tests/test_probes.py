"""Probes of several rounds and of local training, roles, collusion; and what views reach: planted leaks are found."""

import functools
import itertools
import math
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

import pytest
import torch
from observations import watched
from protocols import central_bare

from ppbench.adversary.leaks import leaks
from ppbench.adversary.victims import choose_candidates, choose_victims
from ppbench.base.errors import ProtocolError, UsageError
from ppbench.base.seeds import Seeds
from ppbench.base.tree import leaves, tree_map
from ppbench.defenses.none import NoDefense
from ppbench.defenses.pbpfl.protocol import PBPFLExt
from ppbench.defenses.spn import SPN
from ppbench.federation.contract import Defense, plain_evidence
from ppbench.federation.evidence import Evidence, at_truth, simulation
from ppbench.federation.plan import Local, Opt
from ppbench.federation.wire import SERVER, Hello, Slot, Update, Wire
from ppbench.nets.net import net_spec
from ppbench.report.controls import nothing_to_read
from ppbench.run.config import configure
from ppbench.run.evaluation import evaluate
from ppbench.run.experiment import resolve

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
    result = victims(run, batch=2)
    view = run.probe(result.data, "local").view("server/1")
    assert view.plan.local == replace(local, batch=2)
    params = run.parties.server.params
    for evidence in plain_evidence(view):
        (slot,) = evidence.unit
        data = result.data[slot]
        simulate = simulation(view.plan, params)
        first = simulate(data.x[None].double(), data.y[None].double())
        middle = {n: (params[n].double() - 0.1 * first[n]).float() for n in first}
        second = simulation(view.plan, middle)(data.x[None].double(), data.y[None].double())
        for name, value in evidence.observed.items():  # (g1 + g2) / 2: rate and epochs divided out
            torch.testing.assert_close(value.double(), (first[name] + second[name]) / 2, rtol=1e-3, atol=1e-6)
        assert 0 < at_truth(evidence, data.x[None], data.y[None]) < 0.2  # taken for one gradient, it is nearly that


def test_rounds_follow_each_other_and_plain_evidence_takes_the_first(federate, plan):
    run = federate(Plain())
    result = victims(run)
    once, thrice = run.probe(result.data), run.probe(result.data, rounds=3)
    uploads = [e for e in thrice.mail if e.receiver == SERVER]
    assert sorted({e.round for e in uploads}) == [1, 2, 3] and len(uploads) == 3 * len(result.units)
    biases = [e.message.params["head.bias"] for e in thrice.mail if e.sender == SERVER and e.receiver == 0]
    assert len(biases) == 4 and not any(torch.equal(a, b) for a, b in itertools.pairwise(biases))
    assert (
        biases[1] - biases[0]
    ).norm() < plan.local.opt.lr * 1.5  # a gradient step, though this server is meant for deltas
    for a, b in zip(plain_evidence(once.view("server/1")), plain_evidence(thrice.view("server/1")), strict=True):
        assert a.unit == b.unit and all(map(torch.equal, leaves(a.observed), leaves(b.observed)))


@pytest.mark.parametrize(("kind", "rounds"), [("gradient", 1), ("gradient", 2), ("local", 1), ("local", 2)])
def test_a_curious_client_still_reads_the_others_sum(federate, plan, kind, rounds):
    run = federate(Plain(), replace(plan, local=Local("delta", epochs=1, batch=16, opt=SGD)))
    run.shards = {c: type(s)(s.x[:40], s.y[:40]) for c, s in run.shards.items()}  # equal weights, as a client assumes
    run.parties.server = replace(run.parties.server, counts=torch.full_like(run.parties.server.counts, 40))
    result = victims(run, batch=2, threat="client/1", count=6)
    view = run.probe(result.data, kind, rounds).view("client/1", own=result.own)
    (evidence,) = plain_evidence(view)
    data = [result.data[slot] for slot in evidence.unit]
    x, y = torch.stack([d.x for d in data]), torch.stack([d.y for d in data])
    assert [slot.client for slot in evidence.unit] == [1, 2, 3]
    assert at_truth(evidence, x, y) < 1e-6  # the difference of two float32 models


def test_victims_are_asked_about_in_the_role_that_they_played(federate):
    run = federate(Odd())
    result = victims(run, count=6, roles=2)
    assert len({slot.probe for slot in result.data}) == 6 and len(result.data) == 24
    transcript = run.probe(result.data)
    roles = transcript.roles()
    for role, parity in (("even", 0), ("odd", 1)):
        some = result.playing(role, roles, 6)
        assert len(some.units) == 6 and {slot.client % 2 for (slot,) in some.units} == {parity}
    assert result.playing("nobody", roles, 6).units == ()


def test_colluders_bring_their_states_and_no_secret_of_the_target(federate):
    spec = net_spec("mlp", (1, 8, 8), 10, {"hidden": "8", "bias": False})
    plan = replace(federate(Plain()).plan, spec=spec, loss="squared", local=Local("gradient", batch=16))
    shards = {c: type(s)(s.x[:40], s.y[:40]) for c, s in federate(Plain()).shards.items()}
    run = federate(PBPFLExt(), plan)
    run.shards = shards
    result = victims(run, threat="collusion/1", count=3, sums=True)
    assert result.units == tuple((Slot(p, 0),) for p in range(3)) and len(result.data) == 12
    view = run.probe(result.data).view("collusion/1")
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


@pytest.mark.parametrize("defense", [Plain(), central_bare(masks="ring64")])
@pytest.mark.parametrize("count", [0, -5, math.nan, 7.0, [1, 2], 2**41])
def test_a_number_of_examples_that_is_none_is_refused_by_name(federate, plan, defense, count):
    @dataclass(frozen=True)
    class Liar(type(defense)):
        def reply(self, ctx, me, message, result, data):
            state, answer = super().reply(ctx, me, message, result, data)
            outcome = ctx.party == 2 and isinstance(message, Hello)
            return state, replace(answer, count=torch.tensor(count)) if outcome else answer

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


@pytest.mark.parametrize("measure", ["squares", "absolute", "cosine"])
def test_a_weight_hides_entries(measure):
    truth, seen = {"a": torch.tensor([1.0, 2.0])}, {"a": torch.tensor([1.0, -50.0])}
    weight = {"a": torch.tensor([1.0, 0.0])}
    evidence = Evidence((Slot(0, 0),), seen, lambda x, y: truth, weight=weight, measure=measure)
    assert float(evidence.discrepancy(truth)) == pytest.approx(0, abs=1e-6)


def test_an_attack_on_local_training_is_not_run_on_single_gradients():
    for probe, there in (("gradient", False), ("local", True)):
        config = configure(defense="none", probe=probe)
        assert ("fedavg_inversion" in {attack.name for attack in resolve(config).attacks}) == there
    config = configure(defense="none", attacks=("fedavg_inversion",))
    with pytest.raises(UsageError, match="'fedavg_inversion' has no use for --probe gradient; leave it out"):
        resolve(config).attacks  # noqa: B018


def test_where_nothing_can_be_read_nothing_is_concluded(tmp_path):
    evaluation = evaluate(
        defense="baffle", grid=(5.0,), rounds=1, stages=("init",), threats=("client/1",),
        attacks=("dlg", "label_recovery", "tracing"),
        victims=4, clients=3, attack_batch=(1,), settings={"dlg.budget": 50}, out=tmp_path / "o", workers=1,
    )  # fmt: skip
    mine = [r for r in evaluation.records if r.config.defense.id == "baffle"]
    assert {r.status for r in mine} == {"failed"} and all(nothing_to_read(r) for r in mine)
    assert {r.reason for r in mine if r.config.attack.follows} == {
        "attack 'tracing' has nothing to follow: attack 'dlg': nothing in the view of client/1 can be read"
    }
    assert not any("hide" in sentence or "Labels" in sentence for sentence in evaluation.verdict)


# -- what views reach -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Holder:
    value: object


def plants(secret: torch.Tensor) -> dict[str, object]:
    weight = torch.ones(secret.shape[1:], requires_grad=True)

    def closure():
        return secret

    def default(x=secret):
        return x

    class Thing:
        def __init__(self):
            self.kept = secret

        def method(self):
            return None

    return {
        "itself": secret,
        "slice of the same storage": secret[0],
        "copy of one row": secret[1].clone(),
        "copy in double": secret.double(),
        "transposed batch of it": torch.cat([torch.zeros_like(secret), secret]),
        "closure": closure,
        "default argument": default,
        "bound method": Thing().method,
        "partial": functools.partial(print, secret),
        "autograd graph": (secret * weight).sum(),
        "deep container": {"a": [({"b": Holder((1, secret))},)]},
        "generator": torch.Generator(),
        "gradient": functools.partial(print, Holder([secret.clone()])),
    }


@pytest.mark.parametrize("kind", plants(torch.rand(2, 3, 3)))
def test_every_planted_leak_is_found(kind):
    secret = torch.rand(2, 3, 3, generator=torch.Generator().manual_seed(0))
    assert leaks(Holder({"x": plants(secret)[kind]}), [secret])


def test_nothing_is_found_where_nothing_is():
    secret = torch.rand(2, 3, 3)
    assert leaks(Holder([torch.rand(9), {"f": lambda: 1}, (secret + 1).clone()]), [secret]) == []


def test_the_wire_detaches_and_copies():
    x = torch.rand(3, requires_grad=True)
    sent = Wire().post(0, 1, 0, 0, [-1], {"g": x * 2})["g"]
    assert sent.grad_fn is None
    assert leaks(sent, [x.detach()[None]]) == []


def test_a_leaking_client_is_caught(federate):
    @dataclass(frozen=True)
    class Leaky(NoDefense):
        def upload(self, ctx, me, result):
            return {"params": result, "debug": ctx.plan}

        def reply(self, ctx, me, message, result, data):
            state, answer = super().reply(ctx, me, message, result, data)
            return (state, answer) if not isinstance(answer, dict) else (state, {**answer, "debug": data.x})

        def decode(self, upload, like):
            return upload["params"]

    run = federate(Leaky())
    view, victims = watched(run)
    leakage = leaks(view, [data.x for data in victims.data.values()])
    assert leakage and "debug" in leakage[0]


def test_a_client_sees_only_its_own_mail_state_and_data(federate):
    run = federate(SPN())
    view, _ = watched(run, "client/1", 2, 6)
    assert all(0 in (e.sender, e.receiver) for e in view.mail)
    assert {s.party for s in view.states} == {0}
    mine = run.parties.clients[0]
    others = [leaf for state in run.parties.clients[1:] for leaf in leaves(state) if leaf.dim() > 1]
    assert leaks(view, [mine.head["weight"]]), "its own secret is in its own view"
    assert leaks(view, others) == []


def test_an_eavesdropper_has_no_states_and_a_server_no_client_state(federate):
    run = federate(SPN())
    victims = choose_victims(run.shards, "server/1", 2, 8, Seeds(0))
    transcript = run.probe(victims.data)
    heads = [state.head["weight"] for state in run.parties.clients]
    assert leaks(transcript, heads), "the transcript holds every state: the view must not"
    assert transcript.view("eavesdropper/1").states == ()
    for threat in ("server/1", "eavesdropper/1"):
        assert leaks(transcript.view(threat), heads) == []


def test_encrypted_mail_gives_no_exchange(federate):
    run = federate(NoDefense())
    view, _ = watched(run, "eavesdropper/1")
    assert len(list(view.exchanges())) == 4
    for read in ((), (SERVER,)):  # nothing, or what the server sends
        sealed = tuple(e if e.sender in read else replace(e, message=None) for e in view.mail)
        assert view.defense.evidence(replace(view, mail=sealed)) == []


def test_a_membership_challenge_does_not_tell_the_unknown_half(federate, digits):
    run = federate(NoDefense())
    test = type(digits)(digits.x[300:400].clone(), digits.y[300:400].clone())
    candidates = choose_candidates(run.shards, test, 40, Seeds(0))
    for half in (0, 1):
        question = candidates.challenge(half)
        unknown = candidates.half == half
        assert (question.known[unknown] == -1).all()
        assert torch.equal(question.known[~unknown].bool(), candidates.member[~unknown])
        assert leaks(question, [candidates.member[None].float()]) == []
    assert candidates.member.float().mean() == 0.5


def test_places_in_a_challenge_tell_nothing(federate, digits):
    """An attack that looks at nothing but positions scores chance, on membership and on tracing."""
    run = federate(NoDefense())
    test = type(digits)(digits.x[300:700].clone(), digits.y[300:700].clone())
    candidates = choose_candidates(run.shards, test, 120, Seeds(0))
    first_half = torch.arange(len(candidates.member)) < len(candidates.member) / 2
    assert 0.35 < float((first_half == candidates.member).float().mean()) < 0.65
    assert 0.35 < float((candidates.half.bool() == candidates.member).float().mean()) < 0.65
    victims = choose_victims(run.shards, "server/1", 2, 64, Seeds(0))
    images, owners = victims.queries(Seeds(0))
    by_place = torch.tensor([slot.client for (slot,) in victims.units]).repeat_interleave(2)
    assert 0.05 < float((by_place == owners).float().mean()) < 0.45
    truth = {bytes(d.x[i].numpy().tobytes()): s.client for s, d in victims.data.items() for i in range(2)}
    assert [truth[bytes(x.numpy().tobytes())] for x in images] == owners.tolist()


def test_no_example_is_a_victim_twice_and_none_shares_storage_with_a_shard(federate):
    run = federate(NoDefense())
    victims = choose_victims(run.shards, "server/1", 4, 160, Seeds(0))
    shards = {shard.x.untyped_storage().data_ptr() for shard in run.shards.values()}
    assert all(d.x.untyped_storage().data_ptr() not in shards for d in victims.data.values())
    rows = [bytes(x.numpy().tobytes()) for data in victims.data.values() for x in data.x]
    known = {bytes(x.numpy().tobytes()) for shard in run.shards.values() for x in shard.x}
    assert len(rows) == 160 and len(set(rows)) >= min(160, len(known)) - 2  # digits holds no exact twins here
