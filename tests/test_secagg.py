"""Keys of pairs: masks, streams, fixed point, set-up; keys shared with the server: a defense that shuffles by them."""

from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from ppbench.adversary.leaks import leaks
from ppbench.base.errors import ProtocolError
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params, Tree, node
from ppbench.defenses.none import NoDefense
from ppbench.defenses.secagg import SecureAggregation, SparseSecureAggregation
from ppbench.federation import secagg
from ppbench.federation.contract import Context, Server
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import at_truth
from ppbench.federation.plan import Layout, Plan
from ppbench.federation.secagg import KeyedDefense, Offer, SharedKeys, complete_graph, keys_of
from ppbench.federation.threats import THREATS
from ppbench.federation.wire import Hello, Join, Update
from ppbench.nets.net import initial, net_spec
from ppbench.testing import check_defense
from ppbench.testing.defenses import no_view_reaches_a_secret
from ppbench.testing.small_federation import DefenseTrial, registered, same_tensors, scene_victims

PLAN = Plan(net_spec("mlp", (4,), 2), 6)


def context(party: int, round_: int = 1, session: str = "real") -> Context:
    return Context(PLAN, round_, session, party, torch.Generator(), Seeds(0).secret("party", session, round_, party))


def agreed(graph: Tensor, seed: int = 0) -> tuple[list[secagg.Keys], secagg.Roster]:
    """Every client's keys after a set-up through the server, over `graph`."""
    clients = len(graph)
    keys = [secagg.new_keys(replace(context(c), secret=Seeds(seed).secret("keys", c))) for c in range(clients)]
    server = Server({}, (), torch.zeros(clients, dtype=torch.int64), ())
    coroutine = secagg.exchange_keys(server, range(clients), graph)
    hello = next(coroutine)
    assert all(isinstance(message, Hello) for message in hello.out.values())
    step = coroutine.send({c: secagg.announce(keys[c].private, 10 + c) for c in reversed(range(clients))})
    roster = step.out[0]
    assert set(step.out) == set(range(clients)) and torch.equal(roster.graph, graph)
    with pytest.raises(StopIteration) as stop:
        coroutine.send({})
    assert stop.value.value.counts.tolist() == [10 + c for c in range(clients)]
    return [secagg.with_secrets(keys[c], c, roster) for c in range(clients)], roster


def sparse(clients: int, seed: int) -> Tensor:
    """Some random pairs; clients without any are allowed here, their mask is 0."""
    upper = (torch.rand(clients, clients, generator=torch.Generator().manual_seed(seed)) < 0.4).triu(1)
    return upper | upper.T


# -- masks cancel ----------------------------------------------------------------------------------------------------
@settings(max_examples=25)
@given(
    st.integers(2, 7), st.sampled_from([lambda k, _: complete_graph(k), sparse]), st.integers(0, 99), st.integers(1, 40)
)
def test_masks_sum_to_zero_modulo_two_to_the_64(clients, drawn, seed, words):
    graph = drawn(clients, seed)
    keys, _ = agreed(graph, seed)
    masks = [secagg.zero_sum(keys[c], context(c), "g", words) for c in range(clients)]
    assert torch.equal(torch.stack(masks).sum(0), torch.zeros(words, dtype=torch.int64))
    for client, mask in enumerate(masks):
        assert bool(mask.any()) == bool(graph[client].any())
    # Any client fewer, and the rest is no zero.
    if bool(graph[0].any()):
        assert bool(torch.stack(masks[1:]).sum(0).any())


@settings(max_examples=40)
@given(st.integers(2, 40), st.integers(1, 12), st.integers(0, 99))
def test_a_ring_of_neighbors_is_symmetric_regular_and_holds_together(clients, degree, seed):
    neighbors = secagg.ring_neighbors(clients, degree, Seeds(seed).secret("party"))
    size = min(degree + degree % 2, clients - 1)
    assert neighbors.shape == (clients, size)
    graph = torch.zeros(clients, clients, dtype=torch.bool)
    graph[torch.arange(clients)[:, None], neighbors] = True
    assert torch.equal(graph, graph.T) and not bool(graph.diagonal().any())
    assert bool((graph.sum(1) == size).all())
    left = torch.randperm(clients)[: clients - size + 1]  # fewer clients removed than each has neighbors
    rest, reached = graph[left][:, left].float(), torch.eye(len(left))[:1]
    for _ in left:
        reached = ((reached + reached @ rest) > 0).float()
    assert bool((reached > 0).all())


def test_the_sparse_sum_is_the_sum_and_a_client_hears_of_its_neighbors_alone(plan, deal):
    def trained(defense: SecureAggregation) -> Federation:
        federation = Federation(defense, replace(plan, clients=6), deal([32] * 6), Seeds(0))
        federation.start(initial(plan.spec, 1))
        federation.run(2)
        return federation

    sparse, complete = trained(SparseSecureAggregation(neighbors=2)), trained(SecureAggregation())
    for name, value in complete.parties.server.params.items():
        torch.testing.assert_close(sparse.parties.server.params[name], value, rtol=0, atol=1e-9)
    states = sparse.parties.clients
    assert all(isinstance(state, secagg.NeighborKeys) and state.shared.shape == (2, 32) for state in states)
    assert sparse.setup_down < complete.setup_down
    assert [SparseSecureAggregation().degree(n) for n in (6, 1000, 10_000)] == [5, 32, 34]


def test_both_ends_of_a_pair_derive_equal_words_and_no_other_pair_does():
    keys, _ = agreed(complete_graph(4))
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    seen = {(a, b): tuple(secagg.stream(keys[a], context(a), b, "g", 8).tolist()) for a, b in pairs}
    assert all(seen[a, b] == seen[b, a] for a, b in seen)
    assert len(set(seen.values())) == 6
    assert all(torch.equal(keys[a].shared[b], keys[b].shared[a]) for a, b in seen)


def test_session_round_and_purpose_each_change_the_stream_and_nothing_else_does():
    keys, _ = agreed(complete_graph(3))
    sessions, rounds = ("real", "probe-0", "probe-1", "probe-10", "observed"), (1, 2, 10, 11)
    question = list(product(sessions, rounds, ("g", "sigma", "beta")))
    words = [secagg.stream(keys[0], context(0, r, s), 1, p, 16) for s, r, p in question]
    assert len({tuple(w.tolist()) for w in words}) == len(question)
    single = torch.stack(words).flatten()
    assert len(set(single.tolist())) == single.numel(), "not one word comes twice"
    again = secagg.stream(keys[0], context(0, 1, "real"), 1, "g", 32)
    assert torch.equal(again[:16], words[0]), "more words of a stream begin with the same"
    # The party's own generator has no part in it: otherwise the two ends would differ.
    moved = replace(context(0), generator=torch.Generator().manual_seed(99))
    assert torch.equal(secagg.stream(keys[0], moved, 1, "g", 16), words[0])


# -- a stream looks like nothing -------------------------------------------------------------------------------------
def uniform(words: Tensor) -> float:
    """The p-value of a chi-square test that the bytes of int64 `words` are uniform."""
    data = words.contiguous().view(torch.uint8).to(torch.int64)
    return float(stats.chisquare(torch.bincount(data, minlength=256).numpy()).pvalue)


def test_streams_and_masks_are_uniform_bytes():
    keys, _ = agreed(complete_graph(5))
    stream = secagg.stream(keys[0], context(0), 1, "g", 50_000)
    mask = secagg.zero_sum(keys[2], context(2), "g", 50_000)
    for words in (stream, mask):
        assert 1e-3 < uniform(words) < 1 - 1e-3
        bits = words.contiguous().view(torch.uint8)
        ones = sum(int(((bits >> b) & 1).sum()) for b in range(8))
        assert abs(ones / (8 * len(bits)) - 0.5) < 4 * 0.5 / (8 * len(bits)) ** 0.5
        lagged = torch.corrcoef(torch.stack([words[:-1].double(), words[1:].double()]))[0, 1]
        assert abs(float(lagged)) < 4 / len(words) ** 0.5
    assert uniform(torch.arange(50_000)) < 1e-6, "the test sees what is not uniform"


def test_noise_of_a_pair_is_bitwise_opposite_at_its_ends():
    first, second = agreed(complete_graph(2))[0]
    a, b = secagg.pair_noise(first, context(0), "delta", 50_000), secagg.pair_noise(second, context(1), "delta", 50_000)
    assert torch.equal(a, -b)
    assert stats.kstest(a.numpy(), "uniform", args=(-1, 2)).pvalue > 1e-3
    assert float(a.abs().min()) > 0 and float(a.abs().max()) < 1
    words = torch.tensor([-(2**63), 2**63 - 1, 0, -1])
    assert secagg.to_unit(words).tolist() == [-1 + 2**-53, 1 - 2**-53, 2**-53, -(2**-53)]


# -- fixed point -----------------------------------------------------------------------------------------------------
@settings(max_examples=100)
@given(st.lists(st.floats(-60, 60, allow_nan=False), min_size=1, max_size=20), st.integers(16, 56))
def test_fixed_point_is_exact_to_half_a_unit(values, bits):
    x = torch.tensor(values, dtype=torch.float64)
    encoded = secagg.to_ring(x, bits)
    assert encoded.dtype == torch.int64
    assert bool(((secagg.from_ring(encoded, bits) - x).abs() <= 2.0 ** -(bits + 1) + 1e-15 * x.abs()).all())
    assert torch.equal(secagg.to_ring(-x, bits), -encoded)
    assert torch.equal(secagg.to_ring(torch.zeros(3), bits), torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("clients", [2, 5, 50])
def test_a_weighted_mean_of_the_largest_values_does_not_wrap(clients):
    """The range holds for values before weighting, so any number of clients may be at its end together."""
    value = 2.0**14 * (1 - 1e-9)
    shares = torch.rand(clients, generator=torch.Generator().manual_seed(0)).double()
    shares = shares / shares.sum()
    keys, _ = agreed(complete_graph(clients)) if clients <= 5 else ([], None)
    for sign in (1, -1):
        total = torch.zeros(4, dtype=torch.int64)
        for client, share in enumerate(shares.tolist()):
            total = total + secagg.to_ring(sign * value * torch.ones(4).double(), 48, share)
            total = total + (secagg.zero_sum(keys[client], context(client), "g", 4) if keys else 0)
        expected = sign * value * torch.ones(4).double()
        torch.testing.assert_close(secagg.from_ring(total, 48), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("bad", [2.0**14, -(2.0**14), float("inf"), float("nan")])
@pytest.mark.parametrize("share", [1.0, 0.01])
def test_what_does_not_fit_is_refused_in_one_sentence(bad, share):
    values = torch.tensor([0.5, bad, -0.5]).double()
    with pytest.raises(ProtocolError, match=r"fixed point with 48 fractional bits holds finite values below 16384\.$"):
        secagg.to_ring(values, 48, share)
    assert float(secagg.from_ring(secagg.to_ring(torch.tensor([16383.9]).double(), 48), 48)) == pytest.approx(16383.9)


# -- set-up ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "key",
    [
        torch.zeros(32, dtype=torch.uint8),
        torch.tensor([1] + [0] * 31, dtype=torch.uint8),  # of order 1
        torch.tensor([0xEC] + [0xFF] * 30 + [0x7F], dtype=torch.uint8),  # p - 1, of order 2
        torch.zeros(31, dtype=torch.uint8),
    ],
    ids=["zero", "one", "minus one", "short"],
)
def test_a_public_key_that_forces_a_known_secret_is_refused_by_its_owner(key):
    """X25519 with a point of small order gives zeros whatever the private key (RFC 7748, section 6.1)."""
    keys, roster = agreed(complete_graph(3))
    public = [*roster.public[:2], key]
    bad = secagg.Roster(roster.counts, public, roster.graph)  # type: ignore[arg-type]  # rows of unlike lengths
    with pytest.raises(ProtocolError, match=r"^Client 2 sent a public key that gives no shared secret"):
        secagg.with_secrets(secagg.Keys(keys[0].private, *[torch.zeros(0)] * 3), 0, bad)
    # A client that is not its neighbor does not mind.
    apart = torch.tensor([[0, 1, 0], [1, 0, 1], [0, 1, 0]], dtype=torch.bool)
    assert secagg.with_secrets(keys[0], 0, replace(bad, graph=apart)).shared.shape == (3, 32)


def test_a_set_up_without_everybodys_key_is_refused_by_name():
    def answered(answers):
        coroutine = secagg.exchange_keys(Server({}, (), torch.zeros(3).long(), ()), range(3), complete_graph(3))
        next(coroutine)
        coroutine.send(answers)

    good = {c: secagg.announce(secagg.new_private(context(c)), 5) for c in range(3)}
    answered(good)
    with pytest.raises(ProtocolError, match=r"^Client 1 did not answer set-up"):
        answered({c: good[c] for c in (0, 2)})
    with pytest.raises(ProtocolError, match=r"^Client 2 answered set-up with Hello, not Announce\.$"):
        answered({**good, 2: Hello()})
    with pytest.raises(ProtocolError, match=r"^Client 0 sent a public key as torch.uint8 of shape \(31,\), not"):
        answered({**good, 0: replace(good[0], public=torch.zeros(31, dtype=torch.uint8))})


# -- keys that a client shares with the server ------------------------------------------------------------------------
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


# -- what it changes: nothing ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("defense", [Shuffled(), ShuffledAndCounted()])
@pytest.mark.parametrize("schedule", ["parallel", "round_robin"])
def test_what_the_server_undoes_trains_to_the_undefended_model_bit_for_bit(federate, plan, defense, schedule):
    plain, run = (federate(d, plan=replace(plan, schedule=schedule)) for d in (NoDefense(), defense))
    assert plain.run(3) and run.run(3)
    assert same_tensors(plain.parties.server.params, run.parties.server.params)
    assert torch.equal(plain.parties.server.counts, run.parties.server.counts)
    rounds = 3 * (1 if schedule == "parallel" else plan.clients)
    assert not isinstance(defense, ShuffledAndCounted) or run.parties.server.own.rounds == rounds


# -- who has which words ---------------------------------------------------------------------------------------------
def test_both_ends_derive_the_same_words_and_no_other_party_session_round_or_purpose_gives_them(federate, plan):
    run = federate(Shuffled())
    assert (run.setup_up, run.setup_down) == (plan.clients * (8 + 32), plan.clients * 32), "a public key each way"
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
    view = run.probe(scene_victims(run).data).view(threat)
    kept = (view, view.defense.evidence(view))
    seen = {c for c, one in enumerate(clients) if leaks(kept, [one.shared[None]])}
    private = {c for c, one in enumerate(clients) if leaks(kept, [one.private[None]])}
    everybody = set(range(run.plan.clients))
    inside = {client for client in everybody if THREATS[threat].has(client)}
    assert (seen, private) == (everybody if THREATS[threat].server else inside, inside)
    assert bool(leaks(kept, [server.private[None]])) == THREATS[threat].server


def test_the_server_reads_the_gradient_and_a_listener_does_not(federate):
    run = federate(Shuffled())
    victims = scene_victims(run)
    transcript = run.probe(victims.data)
    exact = {}
    for threat in ("server/1", "eavesdropper/1"):
        view = transcript.view(threat)
        evidence = view.defense.evidence(view)
        truth = [victims.data[e.unit[0]] for e in evidence]
        exact[threat] = [at_truth(e, d.x[None], d.y[None]) for e, d in zip(evidence, truth, strict=True)]
    assert len(exact["server/1"]) == len(victims.data) and max(exact["server/1"]) < 1e-8
    assert min(exact["eavesdropper/1"]) > 0.5


@pytest.mark.nightly
def test_the_battery_passes_it_and_finds_a_key_that_is_sent_along():
    with registered("defenses", Shuffled):
        check_defense(Shuffled)
    assert not list(no_view_reaches_a_secret(DefenseTrial(Shuffled()), "eavesdropper/1"))
    (result,) = no_view_reaches_a_secret(DefenseTrial(Telltale()), "eavesdropper/1")
    assert "what a client keeps in its state is reached" in result


# -- answers that are none -------------------------------------------------------------------------------------------
def test_the_server_and_a_client_refuse_what_is_no_key(federate, shards):
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
    ctx = replace(ctx, party=0)
    with pytest.raises(ProtocolError, match="The server sent a public key that gives no shared secret"):
        run.defense.reply(ctx, run.parties.clients[0], Offer(torch.zeros(32, dtype=torch.uint8)), (), shards[0])
