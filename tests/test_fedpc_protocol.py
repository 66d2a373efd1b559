"""FedPC's rounds: who is pilot, what travels, what the server makes of it and what each party can tell from it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from ppbench.adversary.victims import choose_victims
from ppbench.base.errors import ProtocolError, UsageError
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params, leaves
from ppbench.defenses.central import Central
from ppbench.defenses.fedpc.evidence import pilots, signs, uploads
from ppbench.defenses.fedpc.masks import word
from ppbench.defenses.fedpc.messages import SEND_MODEL, SEND_TERNARY, Command, Cost, Masked, Ternary, Weights
from ppbench.defenses.fedpc.protocol import FedPC
from ppbench.defenses.fedpc.worker import entry_epsilon, randomized
from ppbench.defenses.none import NoDefense
from ppbench.defenses.phong import Phong
from ppbench.federation import secagg
from ppbench.federation.contract import Context, Defense, Server
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import at_truth
from ppbench.federation.optim import Layout, Opt
from ppbench.federation.plan import Data, Local, Plan
from ppbench.federation.view import Transcript
from ppbench.federation.wire import SERVER, Slot
from ppbench.nets.net import initial, net_spec
from ppbench.run.choice import make_defense

SIZES = (60, 30, 90, 40, 75, 50, 45, 55, 35, 65)
SGD = Opt("sgd", 0.05, 0.9)
Build = Callable[..., Federation]


@pytest.fixture
def build(digits: Data) -> Build:
    """Return a started federation over unequal shards; `clients` of SIZES."""

    def made(defense: Defense, clients: int = 5, seed: int = 0, local: Local | None = None) -> Federation:
        spec = net_spec("mlp", (1, 8, 8), 10, {"hidden": "6"})
        ends = list(itertools.accumulate(SIZES[:clients]))
        parts = [slice(end - size, end) for end, size in zip(ends, SIZES, strict=False)]
        shards = {c: Data(digits.x[p].clone(), digits.y[p].clone()) for c, p in enumerate(parts)}
        run = Federation(defense, Plan(spec, clients, local or Local(batch=16, opt=SGD)), shards, Seeds(seed))
        run.start(initial(spec, 1))
        return run

    return made


def flat(params: Params) -> Tensor:
    return Layout.of(params).pack(params)


def same(a: object, b: object) -> bool:
    return len(leaves(a)) == len(leaves(b)) and all(map(torch.equal, leaves(a), leaves(b)))


def observed(run: Federation) -> tuple[Transcript, Server, Params]:
    """Return the next round's messages, the server's state before it and the model after it."""
    transcript, before = run.observe(), run.parties.server
    run.run(run.round + 1)
    return transcript, before, run.parties.server.params


def trained(transcript: Transcript) -> dict[int, Params]:
    """Return every client's Q, which it keeps until it is told what to send."""
    return {s.party: s.state.trained for s in transcript.states if s.party != SERVER and s.step == 1}


def answers(transcript: Transcript, kind: type) -> dict[int, Any]:
    return {e.sender: e.message for e in transcript.mail if isinstance(e.message, kind)}


# -- rounds ----------------------------------------------------------------------------------------------------------
def test_the_pilot_is_the_client_of_largest_goodness_and_the_only_one_to_send_its_model(build):
    run, previous = build(FedPC()), None
    for _ in range(4):
        transcript = run.observe()
        costs = {c: a.value.double() for c, a in answers(transcript, Cost).items()}
        good = {c: SIZES[c] / v if previous is None else SIZES[c] * (previous[c] - v) for c, v in costs.items()}
        best = max(good, key=lambda c: float(good[c]))
        commands = {e.receiver: int(e.message.code) for e in transcript.mail if isinstance(e.message, Command)}
        assert commands == {c: SEND_MODEL if c == best else SEND_TERNARY for c in range(5)}
        assert set(answers(transcript, Weights)) == {best}
        assert set(answers(transcript, Ternary)) == set(range(5)) - {best}
        assert pilots(transcript.view("server/1")) == {(-1, run.round + 1): best}
        # The observed round draws its batches anew: what the real one does is in its own ledger.
        assert run.run(run.round + 1)
        previous = dict(enumerate(run.parties.server.own.costs.double()))
    assert len(run.parties.server.own.pilots) == 4


def test_the_goodness_rule_does_not_depend_on_the_unit_of_examples_and_takes_the_first_of_equals(build):
    run = build(FedPC())
    run.run(1)
    server, costs = run.parties.server, {c: torch.tensor(0.1 * (c + 1)) for c in range(5)}
    many = replace(server, counts=server.counts * 1000)
    one, other = (run.defense.goodness(s, costs) for s in (server, many))
    assert max(one, key=one.__getitem__) == max(other, key=other.__getitem__)
    equal = replace(server, counts=torch.full((5,), 10), own=replace(server.own, costs=torch.ones(5)))
    worse = run.defense.goodness(equal, dict.fromkeys(range(5), torch.tensor(2.0)))
    assert set(worse.values()) == {-10.0} and max(range(5), key=worse.__getitem__) == 0
    assert run.defense.goodness(build(FedPC()).parties.server, {0: torch.tensor(0.0)})[0] == math.inf


@dataclass(frozen=True)
class _Spy(FedPC):
    """FedPC that keeps what the pilots send in the real run."""

    seen: tuple[list[Params], ...] = ()

    def advanced(self, server, costs, pilot, uploads):
        self.seen[0].append(uploads[pilot].params)
        return super().advanced(server, costs, pilot, uploads)


def test_a_single_client_gets_back_what_it_trained(build):
    seen: list[Params] = []
    run = build(_Spy(seen=(seen,)), clients=1)
    for round_ in (1, 2, 3):
        run.run(round_)
        assert len(seen) == round_ and same(run.parties.server.params, seen[-1])


def test_without_moves_the_next_model_is_the_pilots_bit_for_bit(build):
    run = build(FedPC())
    run.run(2)
    transcript, server = run.observe(), run.parties.server
    (pilot, model), *_ = answers(transcript, Weights).items()
    costs = {c: a.value for c, a in answers(transcript, Cost).items()}
    still = Ternary(torch.zeros(-(-len(flat(server.params)) // 4), dtype=torch.uint8))
    after = run.defense.advanced(server, costs, pilot, {**dict.fromkeys(costs, still), pilot: model})
    assert same(after.params, model.params)


@pytest.mark.parametrize("beta", [0.2, 0.8])
def test_the_next_model_is_eq_3_and_stays_within_its_bound(build, beta):
    for sign, factor in (("plus", 1.0), ("minus", -1.0), ("none", 0.0)):
        run = build(FedPC(beta=beta, ternary_sign=sign, batch_sizes="8", epochs="1"))  # enough steps to pass the rate
        for round_ in (1, 2, 3):
            transcript, server = run.observe(), run.parties.server
            (pilot, model), *_ = answers(transcript, Weights).items()
            costs = {c: a.value for c, a in answers(transcript, Cost).items()}
            sent = {e.sender: e.message for e in transcript.mail if isinstance(e.message, Weights | Ternary)}
            after = flat(run.defense.advanced(server, costs, pilot, sent).params)
            start, end = flat(server.params), flat(model.params)
            step = torch.full_like(start, 0.01) if round_ == 1 else beta * (start - flat(server.own.before))
            p = torch.tensor(SIZES[:5]) / sum(SIZES[:5])
            told = {c: flat(run.defense.decode(t, server.params)) for c, t in answers(transcript, Ternary).items()}
            expected = end + factor * sum(p[c] * t * step for c, t in told.items())
            torch.testing.assert_close(after, expected, rtol=1e-6, atol=1e-7)
            bound = (1 - p[pilot]) * step.abs() * (1 + 1e-5) + 2.0**-23 * end.abs().clamp(min=2.0**-20)
            assert bool(((after - end).abs() <= bound).all())
            assert sign == "none" or not torch.equal(after, end)
            run.run(round_)


def test_plus_and_minus_part_by_the_sign_of_the_correction_alone(build):
    seen: list[list[Params]] = [[], []]
    runs = [
        build(_Spy(batch_sizes="8", ternary_sign=sign, seen=(kept,)))
        for sign, kept in zip(("plus", "minus"), seen, strict=True)
    ]
    for run in runs:
        run.run(1)
    assert same(seen[0][0], seen[1][0])
    plus, minus = (flat(run.parties.server.params).double() for run in runs)
    pilot = flat(seen[0][0]).double()
    assert not torch.equal(plus, minus)
    torch.testing.assert_close(plus - pilot, pilot - minus, rtol=0, atol=1e-7)


@pytest.mark.parametrize("beta", [0.2, 0.8])
def test_the_printed_minus_sign_moves_away_from_the_other_workers(build, beta):
    """The correction of "plus" points where the others went: why "plus" is the default, in one deterministic number."""
    run, cosines = build(FedPC(beta=beta)), []
    run.run(2)
    for _ in range(4):
        transcript, server = run.observe(), run.parties.server
        view = transcript.view("server/1")
        moved, told = torch.zeros(()), torch.zeros(())
        step = flat(server.params) - flat(server.own.before)
        for exchange in uploads(view):
            if isinstance(exchange.answer, Ternary):
                share = SIZES[exchange.slot.client]
                moved = moved + share * (flat(trained(transcript)[exchange.slot.client]) - flat(server.params))
                told = told + share * flat(run.defense.decode(exchange.answer, server.params)) * step
        cosines.append(float(torch.cosine_similarity(moved, told, dim=0)))
        run.run(run.round + 1)
    assert min(cosines) > 0.5


# -- bytes -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("clients", range(3, 11))
def test_bytes_are_those_of_eq_8(build, clients):
    run = build(FedPC(), clients=clients)
    run.run(2)
    count = run.plan.net.parameter_count
    model, ternary = 4 * count, math.ceil(count / 4)
    assert run.wire.up - run.setup_up == 2 * (4 * clients + model + (clients - 1) * ternary)
    assert run.wire.down - run.setup_down == 2 * clients * (model + 1)
    assert (run.setup_up, run.setup_down) == (8 * clients, 0)
    plain = build(NoDefense(), clients=clients)
    plain.run(1)
    whole = plain.wire.up + plain.wire.down - plain.setup_up
    assert whole == 2 * model * clients
    spent = (run.wire.up + run.wire.down - run.setup_up) / 2 - 5 * clients
    # count is no multiple of 4: the last byte of a ternary is not full
    assert saving(clients) == pytest.approx(1 - spent / whole, abs=clients / whole)


def saving(clients: int) -> float:
    """Return the share of FedAvg's bytes, both ways, that a round saves (Eq. 8)."""
    return 1 - (clients + 1 + (clients - 1) / 16) / (2 * clients)


def test_savings_are_the_papers_figures():
    printed = (31.25, 35.15625, 37.5, 39.0625, 40.178571, 41.015625, 41.666667, 42.1875)
    assert [100 * saving(n) for n in range(3, 11)] == pytest.approx(printed)
    assert 100 * saving(10**6) == pytest.approx(46.875, abs=1e-4)  # the model down to all is most of it
    assert {(c.clients, c.value) for c in FedPC.claimed if c.metric == "bytes_saving"} == {(3, 0.3125), (10, 0.4220)}


def test_base_3_sends_less_and_padding_hides_the_pilot_at_the_price_of_a_model(build):
    count = build(FedPC()).plan.net.parameter_count
    sizes = {}
    for packing, padded in itertools.product(("two_bits", "base3"), (False, True)):
        run = build(FedPC(packing=packing, padded=padded))
        lengths = {e.nbytes for e in run.observe().mail if isinstance(e.message, Ternary | Weights)}
        sizes[packing, padded] = lengths
        run.run(2)
        assert same(run.parties.server.params, _reference(build).parties.server.params)
    assert sizes["two_bits", False] == {4 * count, math.ceil(count / 4)}
    assert sizes["base3", False] == {4 * count, math.ceil(count / 5)}
    assert sizes["two_bits", True] == sizes["base3", True] == {4 * count}


def _reference(build: Build, **options: Any) -> Federation:
    run = build(FedPC(**options))
    run.run(2)
    return run


# -- clients' secrets ------------------------------------------------------------------------------------------------
def test_hyper_parameters_are_drawn_from_the_menus_and_used(build):
    run = build(FedPC(batch_sizes="8,16", epochs="1,2,3", rates="0.5,1,2"), clients=10)
    drawn = [(int(w.batch), int(w.epochs), float(w.rate)) for w in run.parties.clients]
    assert {b for b, _, _ in drawn} == {8, 16} and {e for _, e, _ in drawn} == {1, 2, 3}
    assert {r for _, _, r in drawn} == {0.5, 1.0, 2.0}
    message = run.defense.broadcast(run.context("real", 1, 0, SERVER), run.parties.server)[1]
    for client, (batch, epochs, rate) in enumerate(drawn):
        ctx = run.context("real", 1, 0, client)
        job = run.defense.prepare(ctx, run.parties.clients[client], message, run.shards[client])
        assert job.batches.x.shape[:2] == (epochs * math.ceil(SIZES[client] / batch), batch)
        assert float(job.lr) == pytest.approx(rate * 0.05)
    other = build(FedPC(batch_sizes="8,16", epochs="1,2,3", rates="0.5,1,2"), clients=10, seed=1)
    assert drawn != [(int(w.batch), int(w.epochs), float(w.rate)) for w in other.parties.clients]
    public = build(FedPC(batch_sizes="32", epochs="2", rates="1"), clients=10).parties.clients
    assert {(int(w.batch), int(w.epochs), float(w.rate)) for w in public} == {(32, 2, 1.0)}


def test_training_is_fedavgs_and_the_cost_is_the_trained_models_mean_loss_on_all_examples(build):
    local = Local(batch=16, epochs=2, opt=SGD)
    run, plain = build(FedPC(batch_sizes="16", epochs="2", rates="1"), local=local), build(NoDefense(), local=local)
    transcript = run.observe()
    updates = {e.sender: e.message.params for e in plain.observe().mail if e.receiver == SERVER}
    start, costs = run.parties.server.params, answers(transcript, Cost)
    for client, model in trained(transcript).items():
        assert max(float((start[n] - model[n] - u).abs().max()) for n, u in updates[client].items()) < 1e-6
        losses = run.plan.example_loss(run.plan.net(model, run.shards[client].x), run.shards[client].y)
        assert float(costs[client].value) == pytest.approx(float(losses.double().mean()), rel=1e-6)


def test_a_diverging_client_ends_the_run_instead_of_sending_what_is_no_number(build):
    run = build(FedPC(), local=Local(batch=16, opt=Opt("sgd", 1e30)))
    assert run.run(3) is False


# -- what parties can tell -------------------------------------------------------------------------------------------
def probed(run: Federation, kind: str = "gradient", rounds: int = 1, batch: int = 1, threat: str = "server/1"):
    found = choose_victims(run.shards, threat, batch, 2 * batch, Seeds(3), roles=2)
    return found, run.probe(found.data, kind, rounds)


@pytest.mark.parametrize("threat", ["server/1", "eavesdropper/1", "collusion/1"])
def test_ternaries_tell_the_exact_signs_of_what_their_sender_does_not_send(build, threat):
    run = build(FedPC())
    run.run(2)
    _, transcript = probed(run, "local", 2)
    view, seen = transcript.view(threat), 0
    for exchange in uploads(view):
        (state,) = [
            s.state
            for s in transcript.states
            if (s.probe, s.round, s.step, s.party)
            == (exchange.slot.probe, exchange.round, exchange.step, exchange.slot.client)
        ]
        told = signs(view, exchange)
        if told is None:  # a listener has not heard the broadcast before its first round
            assert threat == "eavesdropper/1" and exchange.round == 3
            continue
        true = flat(state.last) - flat(state.trained)
        known = flat(told) != 0
        assert torch.equal(flat(told)[known], true.sign()[known])
        seen += int(known.sum()) if isinstance(exchange.answer, Ternary) else 0
    assert seen > 1000


def test_in_round_1_a_ternary_tells_the_sign_itself(build):
    run = build(FedPC(rates="1"))
    view = run.observe().view("server/1")
    truth = trained(run.observe())
    start = flat(run.parties.server.params)
    for exchange in uploads(view):
        told, true = flat(signs(view, exchange)), start - flat(truth[exchange.slot.client])
        assert torch.equal(told[told != 0], true.sign()[told != 0])
        if isinstance(exchange.answer, Ternary):
            assert torch.equal(told != 0, true.abs() > 0.05)


def test_a_plain_attacker_holds_the_exact_gradient_of_a_pilot_whose_rate_is_public(build):
    run = build(FedPC(rates="1"))
    run.run(2)
    found, transcript = probed(run)
    roles = transcript.roles()
    pieces = {e.unit[0]: e for e in run.defense.evidence(transcript.view("server/1"))}
    assert set(pieces) == set(found.data) and set(roles.values()) == {"pilot", "ternary"}
    for slot, evidence in pieces.items():
        assert evidence.channel == roles[slot]
        exact = at_truth(evidence, found.data[slot].x[None], found.data[slot].y[None])
        assert exact < 1e-8 if roles[slot] == "pilot" else exact > 0.1
    assert len({id(e.simulate) for e in pieces.values()}) == 1
    secret = build(FedPC(rates="2"))
    found, transcript = probed(secret)
    wrong = [e for e in secret.defense.evidence(transcript.view("server/1")) if e.channel == "pilot"]
    truth = [at_truth(e, found.data[e.unit[0]].x[None], found.data[e.unit[0]].y[None]) for e in wrong]
    assert truth == pytest.approx([0.25] * len(wrong), abs=1e-4)  # (2g - g)^2 / (2g)^2: its rate is twice the plan's


def test_a_surrogate_points_where_the_sender_went(build):
    run = build(FedPC())
    run.run(2)
    _, transcript = probed(run, "local", 1, batch=8)
    view = transcript.view("server/1")
    states = {(s.probe, s.party): s.state for s in transcript.states if s.party != SERVER and s.step == 1}
    pieces = [e for e in run.defense.evidence(view) if e.channel == "ternary"]
    assert pieces
    for evidence in pieces:
        state = states[tuple(evidence.unit[0])]
        true = flat(state.last) - flat(state.trained)
        assert float(torch.cosine_similarity(flat(evidence.observed), true, dim=0)) > 0.2


def test_a_curious_client_sees_the_pilots_update_up_to_the_correction(build):
    run = build(FedPC(rates="1"))
    run.run(3)
    found = choose_victims(run.shards, "client/1", 4, 16, Seeds(3))
    transcript = run.probe(found.data)
    pilot, server = pilots(transcript.view("server/1"))[0, 4], run.parties.server
    evidence = run.defense.evidence(transcript.view("client/1", 0 if pilot else 1, own=found.own))
    (piece,) = evidence
    assert len(piece.unit) == 4 and piece.channel == "aggregate"
    (state,) = [s.state for s in transcript.states if (s.party, s.step) == (pilot, 1)]
    update = (flat(server.params) - flat(state.trained)) / 0.05
    off = (flat(piece.observed) - update).abs()
    bound = 0.2 * (flat(server.params) - flat(server.own.before)).abs() / 0.05
    assert bool((off <= bound + 1e-4).all())
    assert run.defense.evidence(transcript.view("client/1", pilot, own=found.own)) == []


# -- masks -----------------------------------------------------------------------------------------------------------
def test_masks_change_what_is_seen_and_nothing_of_what_is_learnt(build):
    plain, hidden = build(FedPC()), build(FedPC(masks="ring"))
    for run in (plain, hidden):
        run.run(4)
    assert same(plain.parties.server.params, hidden.parties.server.params)
    assert same(plain.parties.server.own, hidden.parties.server.own)
    transcript, count = hidden.observe(), hidden.plan.net.parameter_count
    sent = answers(transcript, Masked)
    assert len(sent) == 4 and {m.words.dtype for m in sent.values()} == {torch.int16}
    bare = {c: hidden.defense.ternary(hidden.context("observed", 5, 1, c), _at(transcript, c)) for c in sent}
    total = sum(SIZES[c] * t.long() for c, t in bare.items())
    assert torch.equal(hidden.defense.votes(hidden.parties.server, sent), total)
    for client, message in sent.items():
        same_sign = (message.words.sign() == bare[client].sign())[bare[client] != 0].double().mean()
        assert abs(float(same_sign) - 0.5) < 4 * 0.5 / (0.3 * count) ** 0.5
        assert float(message.words.double().std()) > 2**16 / 12**0.5 * 0.9  # uniform over all words
        assert signs(transcript.view("server/1"), next(e for e in uploads(transcript.view("server/1"))
                     if e.slot.client == client)) is None  # fmt: skip


def _at(transcript: Transcript, client: int) -> Any:
    return next(s.state for s in transcript.states if (s.party, s.step) == (client, 1))


def test_words_are_as_wide_as_the_sum_needs():
    assert word(torch.tensor([2**14, 2**14 - 1])) == torch.int16
    assert word(torch.tensor([2**14, 2**14])) == torch.int32
    assert word(torch.tensor([2**31])) == torch.int64


def test_masked_ternaries_are_evidence_about_all_their_senders_together(build):
    run = build(FedPC(masks="ring"))
    run.run(2)
    found, transcript = probed(run)
    pieces = run.defense.evidence(transcript.view("server/1"))
    roles = transcript.roles()
    for evidence in pieces:
        assert {roles[slot] for slot in evidence.unit} == {"pilot" if evidence.channel == "pilot" else "ternary"}
    assert sorted(len(e.unit) for e in pieces) == [1, 1, 4, 4] and len(found.data) == 10
    assert {e.channel for e in run.defense.evidence(transcript.view("eavesdropper/1"))} <= {"pilot"}


def test_all_other_senders_together_take_a_mask_off(build):
    """Masks are worth nothing against N-1 colluders and the server: they hold every key that the victim's uses."""
    run = build(FedPC(masks="ring"))
    run.run(1)
    transcript = run.observe()
    sent, view = answers(transcript, Masked), transcript.view("collusion/1")
    assert 0 in sent, "client 0 is the pilot: the test proves nothing"
    others = [c for c in sent if c != 0]
    rest = torch.zeros(len(sent[0].words), dtype=torch.int64)
    for client in others:
        (state,) = [s.state for s in view.states if (s.party, s.step) == (client, 1)]
        ctx = Context(run.plan, 2, "observed", client, torch.Generator())
        rest = rest + secagg.stream(state.keys, ctx, 0, "ternary", len(rest)) * (1 if client > 0 else -1)
    bare = (sent[0].words.long() - rest).to(torch.int16)
    assert torch.equal(
        bare.long(), SIZES[0] * run.defense.ternary(run.context("observed", 2, 1, 0), _at(transcript, 0)).long()
    )


@pytest.mark.parametrize("senders", [[0, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1]])
def test_a_client_masks_for_no_set_that_hides_nothing(build, senders):
    run = build(FedPC(masks="ring"))
    run.run(1)
    me, command = _at(run.observe(), 0), Command(torch.tensor(SEND_TERNARY), torch.tensor(senders).bool())
    with pytest.raises(ProtocolError, match="asks client 0 to mask a ternary vector for itself alone"):
        run.defense.reply(run.context("real", 2, 1, 0), me, command, (), run.shards[0])


# -- noise -----------------------------------------------------------------------------------------------------------
def test_ternaries_are_drawn_anew_as_often_as_asked_and_a_whole_draw_tells_nothing():
    trits = torch.tensor([1, -1, 0], dtype=torch.int8).repeat(20_000)
    generator = torch.Generator().manual_seed(0)
    kept = float((randomized(trits, 0.3, generator) == trits).double().mean())
    assert kept == pytest.approx(1 - 0.3 * 2 / 3, abs=0.01)
    # keeping beside telling any one other value: the likelihood ratio that epsilon bounds
    assert math.log(kept / ((1 - kept) / 2)) == pytest.approx(entry_epsilon(0.3), abs=0.05)
    blank = randomized(trits, 1.0, generator).view(-1, 3).double().mean(0)
    assert entry_epsilon(1.0) == 0 and float(blank.abs().max()) < 0.03
    assert entry_epsilon(0.0) == math.inf


def test_a_pilots_model_is_clipped_and_blurred_as_its_noise_is_told(build):
    def update(run: Federation) -> Tensor:
        run.run(1)
        (model,) = answers(run.observe(), Weights).values()
        return flat(model.params) - flat(run.parties.server.params)

    assert float(update(build(FedPC())).norm()) > 0.02
    assert float(update(build(FedPC(pilot_clip=0.01))).norm()) == pytest.approx(0.01, rel=1e-3)
    noisy = build(FedPC(pilot_clip=0.01, pilot_sigma=0.5))
    assert float(update(noisy).std()) == pytest.approx(0.005, rel=0.1)
    _, transcript = probed(noisy)
    pilot, *_ = [e for e in noisy.defense.evidence(transcript.view("server/1")) if e.channel == "pilot"]
    assert pilot.noise is not None and pilot.noise.std == pytest.approx(0.005 / 0.05)  # over the nominal rate


def test_noise_gives_no_guarantee_and_says_what_one_entry_has(build):
    plan = build(FedPC()).plan
    assert FedPC().guarantee(plan, 100, 10) is None and "no noise" in FedPC().why_no_epsilon(plan)
    said = FedPC(flip=0.5).why_no_epsilon(plan)
    assert "costs" in said and "1.39 is one entry's alone" in said


# -- malformed answers -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Faulty(FedPC):
    """FedPC with a client (by role) whose answers are spoiled from round 2 on."""

    name: ClassVar[str] = "faulty"
    spoil: tuple[tuple[type, Callable[[Any], Any]], ...] = ()
    whom: tuple[int, ...] = (0, 1, 2, 3, 4)

    def reply(self, ctx, me, message, result, data):
        me, answer = super().reply(ctx, me, message, result, data)
        for kind, spoiled in self.spoil if ctx.round > 1 and ctx.party in self.whom else ():
            if isinstance(answer, kind):
                answer = spoiled(answer)
        return me, answer


def spoiled_model(change: Callable[[Tensor], Tensor]) -> Callable[[Weights], Weights]:
    return lambda answer: Weights({**answer.params, "head.bias": change(answer.params["head.bias"])})


@pytest.mark.parametrize(
    ("kind", "spoil", "said"),
    [
        (Cost, lambda a: Cost(a.value * math.nan), r"Client 2 told the cost nan"),
        (Cost, lambda a: Cost(a.value * math.inf), r"Client 2 told the cost inf"),
        (Cost, lambda a: Cost(a.value - 100), r"Client 2 told the cost -"),
        (Cost, lambda a: Cost(a.value.double()), r"Client 2 told the cost .* not one finite float32"),
        (Cost, lambda a: Cost(a.value[None]), r"Client 2 told the cost \["),
        (Cost, lambda a: Weights({}), r"Client 2 answered the model with Weights, not Cost"),
        (Cost, lambda a: None, r"Client 2 answered the model with nothing, not Cost"),
        (
            Ternary,
            lambda a: Ternary(a.packed[:-1]),
            r"Client \d sent a ternary vector that cannot be read: 460 entries",
        ),
        (
            Ternary,
            lambda a: Ternary(torch.cat([torch.tensor([2]).byte(), a.packed[1:]])),
            r"Client \d sent a ternary.*code 10",
        ),
        (Ternary, lambda a: Ternary(a.packed.char()), r"Client \d sent a ternary.*uint8"),
        (Ternary, lambda a: Cost(torch.tensor(1.0)), r"Client \d was asked for a ternary vector and sent Cost"),
        (Weights, spoiled_model(lambda b: b * math.nan), r"Client \d sent a model with values in 'head.bias'"),
        (Weights, spoiled_model(lambda b: b[:-1]), r"Client \d sent a model whose names, shapes or dtypes"),
        (Weights, spoiled_model(lambda b: b.double()), r"Client \d sent a model whose names, shapes or dtypes"),
        (Weights, lambda a: Weights({}), r"Client \d sent a model whose names, shapes or dtypes"),
        (Weights, lambda a: Ternary(torch.zeros(4)), r"Client \d was asked for its model and sent Ternary"),
    ],
)
def test_a_malformed_answer_names_its_client_and_changes_nothing(build, kind, spoil, said):
    run = build(Faulty(spoil=((kind, spoil),), whom=(2,) if kind is Cost else (0, 1, 2, 3, 4)))
    assert run.run(1)
    before = (run.parties.server, list(run.parties.clients), run.round)
    with pytest.raises(ProtocolError, match=said):
        run.run(2)
    assert same(before[0], run.parties.server) and same(before[1], run.parties.clients) and run.round == before[2]
    run.defense = FedPC()
    assert run.run(2)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda a: Masked(a.words[:-1]), r"Client \d sent masked ternaries as torch.int16 of shape \(459,\)"),
        (lambda a: Masked(a.words.int()), r"Client \d sent masked ternaries as torch.int32"),
        (lambda a: Ternary(torch.zeros(115)), r"Client \d was asked for masked ternaries and sent Ternary"),
    ],
)
def test_malformed_masked_ternaries_are_refused(build, spoil, said):
    run = build(Faulty(masks="ring", spoil=((Masked, spoil),)))
    assert run.run(1)
    with pytest.raises(ProtocolError, match=said):
        run.run(2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"beta": 0.0}, "beta=0.0 cannot be used; it must be in"),
        ({"beta": 1.0}, "beta=1.0"),
        ({"ternary_sign": "times"}, "ternary_sign='times'"),
        ({"alpha0": -1.0}, "alpha0=-1.0"),
        ({"alpha0": math.nan}, "alpha0=nan"),
        ({"batch_sizes": "64,0"}, "batch_sizes='64,0' cannot be used; it must be whole numbers > 0"),
        ({"batch_sizes": "64,1.5"}, "batch_sizes='64,1.5'"),
        ({"epochs": ""}, "epochs=''"),
        ({"rates": "1,-1"}, "rates='1,-1' cannot be used; it must be numbers > 0"),
        ({"rates": "inf"}, "rates='inf'"),
        ({"packing": "bytes"}, "packing='bytes'"),
        ({"masks": "one"}, "masks='one'"),
        ({"masks": "ring", "padded": True}, "padded=True"),
        ({"flip": 1.5}, "flip=1.5"),
        ({"pilot_clip": -1.0}, "pilot_clip=-1.0"),
        ({"pilot_sigma": 1.0}, "pilot_sigma=1.0 cannot be used; it must be a finite number >= 0, and 0 where"),
    ],
)
def test_bad_parameters_are_refused_in_one_sentence(build, options, said):
    with pytest.raises(UsageError, match=said) as refusal:
        build(FedPC(**options))
    assert str(refusal.value).count(". ") == 0


def test_a_menu_of_one_may_be_given_as_a_number():
    made = make_defense("fedpc", {"rates": 1, "epochs": 2, "batch_sizes": 16})
    assert [made.menu(field) for field in ("rates", "epochs", "batch_sizes")] == [[1.0], [2], [16]]


def test_plans_that_the_protocol_cannot_follow_are_refused(build):
    plan = build(FedPC()).plan
    with pytest.raises(UsageError, match="use --schedule parallel, not 'round_robin'"):
        FedPC().check(replace(plan, schedule="round_robin"))
    with pytest.raises(UsageError, match="use at least 3 clients"):
        FedPC(masks="ring").check(replace(plan, clients=2))


# -- baselines -------------------------------------------------------------------------------------------------------
def test_weight_transmission_hands_each_client_the_model_of_the_one_before(build):
    run = build(Phong())
    run.run(2)
    assert run.wire.up - run.setup_up == run.wire.down - run.setup_down == 2 * 5 * 4 * run.plan.net.parameter_count
    transcript = run.observe()
    models = {e.receiver: e.message.params for e in transcript.mail if e.sender == SERVER}
    sent = {e.sender: e.message.params for e in transcript.mail if e.receiver == SERVER}
    assert [e.sender for e in transcript.mail if e.receiver == SERVER] == list(range(5))
    for client in range(4):
        handed = {n: models[client][n] - sent[client][n] for n in sent[client]}
        assert same(handed, models[client + 1])
    found, probe = probed(run)
    for evidence in run.defense.evidence(probe.view("server/1")):
        data = found.data[evidence.unit[0]]
        assert at_truth(evidence, data.x[None], data.y[None]) < 1e-8


def test_a_curious_client_sees_what_the_others_made_of_the_model_that_it_handed_on(build):
    """Exactly the other one's update of two clients; of more the sum of steps taken one after another."""
    for clients, error in ((2, 1e-6), (4, 0.02)):
        run = build(Phong(), clients, local=Local(batch=16, opt=Opt("sgd", 0.01)))
        found = choose_victims(run.shards, "client/1", 1, clients - 1, Seeds(0))
        view = run.probe(found.data, "local").view("client/1", 0, own=found.own)
        (evidence,) = run.defense.evidence(view)
        assert evidence.unit == found.units[0]
        truth = found.truth(evidence.unit)
        assert at_truth(evidence, truth.x[:, None], truth.y[:, None]) < error


def test_centralized_training_is_training_on_the_pool_with_one_optimizer(build):
    local = Local(batch=600, opt=SGD)  # the whole pool is one batch: no order matters
    run = build(Central(), local=local)
    params = run.parties.server.params
    weight, moment = flat(params).double(), torch.zeros(len(flat(params))).double()
    x, y = (torch.cat([getattr(s, k) for s in run.shards.values()]) for k in ("x", "y"))
    layout = Layout.of(params)
    for _ in range(3):
        leaf = weight.clone().requires_grad_()
        loss = run.plan.objective(layout.unpack(leaf), x.double(), y.double(), torch.ones(len(x)).double())
        (step,) = torch.autograd.grad(loss, leaf)
        moment = 0.9 * moment + step
        weight = weight - 0.05 * moment
    run.run(3)
    torch.testing.assert_close(flat(run.parties.server.params).double(), weight, rtol=1e-4, atol=1e-5)
    assert run.wire.up - run.setup_up == 3 * sum(SIZES[:5]) * 4 * (64 + 10)
    found, probe = probed(run)
    for evidence in run.defense.evidence(probe.view("server/1")):
        data = found.data[evidence.unit[0]]
        assert at_truth(evidence, data.x[None], data.y[None]) < 1e-10
    assert run.defense.evidence(probe.view("client/1", 0, own=found.own)) == []


def test_centralized_training_refuses_what_is_no_examples(build):
    run = build(Central())
    with pytest.raises(ProtocolError, match="Client 1 sent no examples"):
        run.defense.aggregate(run.context("real", 1, 0, SERVER), run.parties.server, {1: Cost(torch.tensor(1.0))})


def test_slots_of_a_probe_are_a_round_of_their_own(build):
    run = build(FedPC())
    run.run(1)
    data = {Slot(0, c): Data(run.shards[c].x[:1], run.shards[c].y[:1]) for c in (1, 3)}
    mail = run.probe(data).mail
    assert {e.sender for e in mail} == {SERVER, 1, 3}
    assert sum(isinstance(e.message, Weights) for e in mail) == 1
