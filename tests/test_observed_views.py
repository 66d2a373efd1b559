"""What each party sees in every kind of transcript, and what it must not: others' data, keys, the server's secrets."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from protocols import started
from torch import Tensor

from ppbench.adversary.leaks import leaks
from ppbench.adversary.victims import choose_victims
from ppbench.base.registry import load_plugin, plugins
from ppbench.base.seeds import Seeds
from ppbench.base.tree import leaves
from ppbench.defenses.pbpfl.protocol import PBPFL
from ppbench.federation import secagg
from ppbench.federation.contract import Defense, Server
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Local, Opt, Plan
from ppbench.federation.view import BEGUN, Transcript
from ppbench.federation.wire import SERVER
from ppbench.nets.net import net_spec

OURS = [name for name, plugin in plugins("defenses").items() if plugin.ours]
MASKED = [name for name in OURS if load_plugin("defenses", name).masked]
KINDS = ("probe", "observe", "release")


@pytest.fixture(scope="module")
def observed(deal: Any) -> Callable[..., tuple[Federation, Transcript]]:
    """Return a maker of a defense's federation, two rounds on, and of a transcript; what was made is kept."""
    spec, adam = net_spec("mlp", (1, 8, 8), 10, {"hidden": "16,12", "bias": False}), Opt("adam", 1e-3)
    plan = Plan(spec, 4, Local("gradient", batch=24, opt=adam), loss="squared", server_opt=adam)

    @cache
    def trained(defense: Defense) -> Federation:
        run = started(defense, plan, deal([24] * 4))
        assert run.run(2)
        return run

    @cache
    def make(defense: Defense, kind: str = "observe") -> tuple[Federation, Transcript]:
        run = trained(defense)
        victims = choose_victims(run.shards, "client/1", 2, 8, Seeds(0)).data
        return run, run.probe(victims) if kind == "probe" else getattr(run, kind)()

    return make


def secrets_of_server(run: Federation, transcript: Transcript) -> Iterator[Tensor]:
    """Yield the true weights and the hidden scales and masks of the present round and of every round observed."""
    defense = run.defense
    states = [run.parties.server, *(s.state for s in transcript.states if s.party == SERVER and s.step != BEGUN)]
    for state in states:
        assert isinstance(state, Server)
        yield from (value for value in state.params.values() if value.dim() > 1)
        yield state.own.scales[None]
        yield (state.own.gamma * state.own.direction if isinstance(defense, PBPFL) else state.own.mask)[None]


def secrets_of_clients(run: Federation, known_to: int | None) -> Iterator[Tensor]:
    for client, state in enumerate(run.parties.clients):
        if client != known_to:
            yield run.shards[client].x
            if isinstance(state, secagg.Keys):
                yield state.private[None]
                yield state.shared[[c for c in range(len(state.shared)) if c not in (client, known_to)]]


def secrets_of(run: Federation, transcript: Transcript, threat: str) -> list[Tensor]:
    result = list(secrets_of_clients(run, 0 if threat == "client/1" else None))
    return result if threat == "server/1" else result + list(secrets_of_server(run, transcript))


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threat", ["server/1", "client/1", "eavesdropper/1"])
def test_nobody_sees_what_others_keep(name, kind, threat, observed):
    run, transcript = observed(load_plugin("defenses", name)(), kind)
    view = transcript.view(threat, own=((-1, run.shards[0]),) if kind != "probe" else ())
    assert leaves([e.message for e in view.mail]), "the view is empty: the test proves nothing"
    assert leaks((view, view.defense.evidence(view)), secrets_of(run, transcript, threat)) == []


def sends(leak):
    """PBPFL whose message down is changed by `leak(server, message)`."""

    @dataclass(frozen=True)
    class Leaky(PBPFL):
        def broadcast(self, ctx, server):
            server, message = super().broadcast(ctx, server)
            return server, leak(server, message)

    return Leaky


SendsMask = sends(lambda server, message: replace(message, direction=server.own.gamma * server.own.direction))
SendsScales = sends(lambda server, message: replace(message, params={**message.params, "debug": server.own.scales}))
SendsTrueHead = sends(lambda server, m: replace(m, params={**m.params, "debug": server.params["head.weight"]}))


@dataclass(frozen=True)
class SendsImage(PBPFL):
    def reply(self, ctx, me, message, result, data):
        me, answer = super().reply(ctx, me, message, result, data)
        return me, answer if ctx.round == 0 else replace(answer, beta={**answer.beta, "debug": data.x[:1].double()})

    def aggregate(self, ctx, server, uploads):
        clean = {c: replace(u, beta={n: v for n, v in u.beta.items() if n != "debug"}) for c, u in uploads.items()}
        return super().aggregate(ctx, server, clean)


LEAKS = [(leak, "client/1") for leak in (SendsMask, SendsScales, SendsTrueHead)]
LEAKS += [(SendsTrueHead, "eavesdropper/1"), (SendsImage, "server/1"), (SendsImage, "eavesdropper/1")]


@pytest.mark.parametrize(("leaky", "threat"), LEAKS, ids=repr)
def test_what_is_planted_in_a_training_round_is_found(leaky, threat, observed):
    run, transcript = observed(leaky())
    view = transcript.view(threat, own=((-1, run.shards[0]),))
    assert leaks(view, secrets_of(run, transcript, threat))


def test_a_server_sees_no_secret_of_another_round(observed):
    """Its own states in a view are those of the observed round, and of no client."""
    run, transcript = observed(PBPFL())
    states = transcript.view("server/1").states
    assert {s.party for s in states} == {SERVER} and {(s.probe, s.round) for s in states} == {(-1, run.round + 1)}
    assert transcript.view("eavesdropper/1").states == ()
    assert {s.party for s in transcript.view("client/1", party=2).states} == {2}
