"""The walk finds planted leaks of every kind, and finds none where there is none."""

import functools
from dataclasses import dataclass, replace

import pytest
import torch

from ppbench.adversary.leaks import leaks
from ppbench.adversary.victims import choose_candidates, choose_victims
from ppbench.base.seeds import Seeds
from ppbench.base.tree import leaves
from ppbench.defenses.none import NoDefense
from ppbench.defenses.spn import SPN
from ppbench.federation.wire import SERVER, Wire


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
    victims = choose_victims(run.shards, "server/1", 1, 4, Seeds(0))
    view = run.probe(victims.data).view("server/1")
    found = leaks(view, [data.x for data in victims.data.values()])
    assert found and "debug" in found[0]


def test_a_client_sees_only_its_own_mail_state_and_data(federate):
    run = federate(SPN())
    victims = choose_victims(run.shards, "client/1", 2, 6, Seeds(0))
    view = run.probe(victims.data).view("client/1", own=victims.own)
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
    victims = choose_victims(run.shards, "server/1", 1, 4, Seeds(0))
    view = run.probe(victims.data).view("eavesdropper/1")
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
        asked = candidates.half == half
        assert (question.known[asked] == -1).all()
        assert torch.equal(question.known[~asked].bool(), candidates.member[~asked])
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
