"""Keys that a client shares with the server: a defense that shuffles uploads by them, its price, and who sees them."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from ppbench.adversary.leaks import leaks
from ppbench.base.errors import ProtocolError
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params, Tree, node
from ppbench.defenses.none import NoDefense
from ppbench.federation import secagg
from ppbench.federation.contract import Context, Server
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import at_truth
from ppbench.federation.messages import Join, Update
from ppbench.federation.optim import Layout
from ppbench.federation.shared_keys import KeyedDefense, Offer, SharedKeys, keys_of
from ppbench.federation.view import THREATS, Transcript
from ppbench.testing import check_defense
from ppbench.testing.scene import Trial, installed, same, victims_of
from ppbench.testing.secrecy import no_view_reaches_a_secret


@dataclass(frozen=True)
class Shuffled(KeyedDefense):
    """Uploads in an order that only the server and their sender know."""

    name: ClassVar[str] = "shuffled"
    epsilon_reason: ClassVar[str] = "an order hides no value"

    def order(self, ctx: Context, state: Tree, client: int, count: int) -> Tensor:
        return self.stream(ctx, state, client, "order", count).argsort()

    def upload(self, ctx: Context, me: Tree, result: Params) -> Update:
        layout = Layout.of(result)
        flat = layout.pack(result)
        order = self.order(ctx, me, ctx.party, len(flat)).to(flat.device)
        return Update(layout.unpack(flat[order]))

    def decoded(self, ctx: Context, server: Server, client: int, upload: Update) -> Params:
        layout = Layout.of(upload.params)
        flat = layout.pack(upload.params)
        order = self.order(ctx, server.own, client, len(flat)).to(flat.device)
        return layout.unpack(flat[order.argsort()])


@node
class Counted:
    """A state of a defense's own, with keys in it. rounds: int64 scalar."""

    keys: SharedKeys
    rounds: Tensor


@dataclass(frozen=True)
class ShuffledAndCounted(Shuffled):
    """Keeps something beside the keys, at both ends."""

    name: ClassVar[str] = "shuffled_and_counted"

    def init_server(self, ctx: Context, params: Params) -> Server:
        server = super().init_server(ctx, params)
        return replace(server, own=Counted(server.own, torch.tensor(0)))

    def init_client(self, ctx: Context, params: Params) -> Counted:
        return Counted(super().init_client(ctx, params), torch.tensor(0))

    def stepped(self, ctx: Context, server: Server, update: Params) -> Server:
        after = super().stepped(ctx, server, update)
        return replace(after, own=replace(after.own, rounds=after.own.rounds + 1))


@dataclass(frozen=True)
class Telltale(Shuffled):
    """Sends its key along: what the battery must find."""

    name: ClassVar[str] = "telltale"

    def upload(self, ctx: Context, me: SharedKeys, result: Params) -> tuple[Update, Tensor]:
        return super().upload(ctx, me, result), me.shared

    def decode(self, upload: tuple[Update, Tensor], like: Params) -> Params:
        return super().decode(upload[0], like)

    def decoded(self, ctx: Context, server: Server, client: int, upload: tuple[Update, Tensor]) -> Params:
        return super().decoded(ctx, server, client, upload[0])


def keys(run: Federation) -> tuple[SharedKeys, list[SharedKeys]]:
    return keys_of(run.parties.server.own), [keys_of(state) for state in run.parties.clients]


def probe(run: Federation) -> Transcript:
    return run.probe(victims_of(run).data)


# -- what it changes: nothing ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("defense", [Shuffled(), ShuffledAndCounted()])
@pytest.mark.parametrize("schedule", ["parallel", "round_robin"])
def test_what_the_server_undoes_trains_to_the_undefended_model_bit_for_bit(federate, plan, defense, schedule):
    plain, run = (federate(d, plan=replace(plan, schedule=schedule)) for d in (NoDefense(), defense))
    assert plain.run(3) and run.run(3)
    assert same(plain.parties.server.params, run.parties.server.params)
    assert torch.equal(plain.parties.server.counts, run.parties.server.counts)
    rounds = 3 * (1 if schedule == "parallel" else plan.clients)
    assert not isinstance(defense, ShuffledAndCounted) or run.parties.server.own.rounds == rounds


def test_set_up_costs_a_public_key_each_way_and_nothing_else(federate, plan):
    run = federate(Shuffled())
    assert (run.setup_up, run.setup_down) == (plan.clients * (8 + 32), plan.clients * 32)


# -- who has which words ---------------------------------------------------------------------------------------------
def test_both_ends_derive_the_same_words_and_no_other_party_session_round_or_purpose_gives_them(federate):
    run = federate(Shuffled())
    server, clients = keys(run)
    assert server.shared.shape == (4, 32) and torch.equal(server.shared, torch.stack([c.shared for c in clients]))
    here = Context(run.plan, 2, "real", 1, Seeds(0).generator("words"))
    words = run.defense.stream(here, clients[1], 1, "order", 64)
    assert torch.equal(words, run.defense.stream(replace(here, party=-1), server, 1, "order", 64))
    assert torch.equal(words[:8], run.defense.stream(here, clients[1], 1, "order", 8))
    others = [run.defense.stream(here, server, 2, "order", 64), run.defense.stream(here, clients[1], 1, "mask", 64)]
    moved = replace(here, session="probe-0"), replace(here, round=3)
    others += [run.defense.stream(ctx, clients[1], 1, "order", 64) for ctx in moved]
    others.append(run.defense.stream(here, clients[0], 1, "order", 64))  # who knows the info but not the key
    assert not any(bool((words == other).any()) for other in others)


# -- who sees them ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("defense", [Shuffled(), ShuffledAndCounted()])
@pytest.mark.parametrize("threat", THREATS)
def test_a_view_has_the_keys_of_its_own_parties_and_no_others(federate, defense, threat):
    run = federate(defense)
    server, clients = keys(run)
    view = probe(run).view(threat)
    held = (view, view.defense.evidence(view))
    seen = {c for c, one in enumerate(clients) if leaks(held, [one.shared[None]])}
    private = {c for c, one in enumerate(clients) if leaks(held, [one.private[None]])}
    everybody = set(range(run.plan.clients))
    expected = {"server/1": (everybody, set()), "client/1": ({0}, {0}), "eavesdropper/1": (set(), set())}
    assert (seen, private) == expected.get(threat, (everybody, everybody - {0}))  # colluders: all but client 0's own
    assert bool(leaks(held, [server.private[None]])) == (threat in ("server/1", "collusion/1"))


def test_the_server_reads_the_gradient_and_a_listener_does_not(federate):
    run = federate(Shuffled())
    victims = victims_of(run)
    transcript = run.probe(victims.data)
    exact = {}
    for threat in ("server/1", "eavesdropper/1"):
        view = transcript.view(threat)
        found = view.defense.evidence(view)
        truth = [victims.data[e.unit[0]] for e in found]
        exact[threat] = [at_truth(e, d.x[None], d.y[None]) for e, d in zip(found, truth, strict=True)]
    assert len(exact["server/1"]) == len(victims.data) and max(exact["server/1"]) < 1e-8
    assert min(exact["eavesdropper/1"]) > 0.5


def test_the_battery_passes_it_and_finds_a_key_that_is_sent_along():
    with installed("defenses", Shuffled):
        check_defense(Shuffled)
    assert not list(no_view_reaches_a_secret(Trial(Shuffled()), "eavesdropper/1"))
    (found,) = no_view_reaches_a_secret(Trial(Telltale()), "eavesdropper/1")
    assert "what a client keeps in its state is reached" in found


# -- answers that are none -------------------------------------------------------------------------------------------
def test_the_server_refuses_what_is_no_key(federate):
    run = federate(Shuffled())
    ctx = Context(run.plan, 0, "real", -1, Seeds(0).generator("set-up"))
    good = {c: secagg.announce(keys_of(state).private, 5) for c, state in enumerate(run.parties.clients)}
    zero = secagg.Announce(torch.tensor(5), torch.zeros(32).byte())
    refused = {"answered set-up with Join": Join(torch.tensor(5)), "sent a public key that gives no": zero}
    for words, answer in refused.items():
        coroutine = run.defense.setup(ctx, run.parties.server, range(run.plan.clients))
        assert isinstance(next(coroutine).out[0], Offer)
        with pytest.raises(ProtocolError, match=f"Client 0 {words}"):
            coroutine.send({**good, 0: answer})


def test_a_client_refuses_a_server_key_that_is_none(federate, shards):
    run = federate(Shuffled())
    ctx = Context(run.plan, 0, "real", 0, Seeds(0).generator("set-up"))
    with pytest.raises(ProtocolError, match="The server sent a public key that gives no shared secret"):
        run.defense.reply(ctx, run.parties.clients[0], Offer(torch.zeros(32, dtype=torch.uint8)), (), shards[0])
