"""FedPC's rounds: who is pilot, what travels, what the server makes of it and what each party can tell from it."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from protocols import UNEQUAL, answers, flat, trained, unequal
from torch import Tensor

from ppbench.base.errors import ProtocolError, UsageError
from ppbench.base.seeds import Seeds
from ppbench.claims.claim import claims_of
from ppbench.defenses.fedpc.messages import (
    SEND_MODEL,
    SEND_TERNARY,
    Command,
    Masked,
    Ternary,
    TrainingCost,
    Weights,
    entry_epsilon,
)
from ppbench.defenses.fedpc.protocol import FedPC, pilots, randomized
from ppbench.defenses.none import NoDefense
from ppbench.federation.plan import Data, Local, Opt
from ppbench.federation.wire import SERVER, Slot
from ppbench.run.experiment import make_defense
from ppbench.testing.small_federation import same_tensors

SGD = Opt("sgd", 0.05, 0.9)


@pytest.fixture
def build(deal):
    return partial(unequal, deal)


# -- rounds ----------------------------------------------------------------------------------------------------------
def test_the_pilot_is_the_client_of_largest_goodness_and_the_only_one_to_send_its_model(build):
    run, previous = build(FedPC()), None
    for _ in range(4):
        transcript = run.observe()
        costs = {c: a.value.double() for c, a in answers(transcript, TrainingCost).items()}
        good = {c: UNEQUAL[c] / v if previous is None else UNEQUAL[c] * (previous[c] - v) for c, v in costs.items()}
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


@pytest.mark.parametrize("beta", [0.2, 0.8])
def test_the_next_model_is_eq_3_and_stays_within_its_bound(build, beta):
    for sign, factor in (("plus", 1.0), ("minus", -1.0), ("none", 0.0)):
        run = build(FedPC(beta=beta, ternary_sign=sign, batch_sizes="8", epochs="1"))  # enough steps to pass the rate
        for round_ in (1, 2, 3):
            transcript, server = run.observe(), run.parties.server
            (pilot, model), *_ = answers(transcript, Weights).items()
            costs = {c: a.value for c, a in answers(transcript, TrainingCost).items()}
            sent = {e.sender: e.message for e in transcript.mail if isinstance(e.message, Weights | Ternary)}
            after = flat(run.defense.advanced(server, costs, pilot, sent).params)
            start, end = flat(server.params), flat(model.params)
            step = torch.full_like(start, 0.01) if round_ == 1 else beta * (start - flat(server.own.before))
            p = torch.tensor(UNEQUAL[:5]) / sum(UNEQUAL[:5])
            fields = {c: flat(run.defense.decode(t, server.params)) for c, t in answers(transcript, Ternary).items()}
            expected = end + factor * sum(p[c] * t * step for c, t in fields.items())
            torch.testing.assert_close(after, expected, rtol=1e-6, atol=1e-7)
            bound = (1 - p[pilot]) * step.abs() * (1 + 1e-5) + 2.0**-23 * end.abs().clamp(min=2.0**-20)
            assert bool(((after - end).abs() <= bound).all())
            assert sign == "none" or not torch.equal(after, end)
            run.run(round_)


# -- bytes -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("clients", [3, 10])
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
    claimed = {c.clients: c.value for c in claims_of("fedpc") if c.metric == "bytes_saving"}
    assert claimed[clients] == pytest.approx(saving(clients), abs=2e-4)
    # count is no multiple of 4: the last byte of a ternary is not full
    assert saving(clients) == pytest.approx(1 - spent / whole, abs=clients / whole)


def saving(clients: int) -> float:
    """Return the share of FedAvg's bytes, both ways, that a round saves (Eq. 8)."""
    return 1 - (clients + 1 + (clients - 1) / 16) / (2 * clients)


def test_base_3_sends_less_and_padding_hides_the_pilot_at_the_price_of_a_model(build):
    plain, sizes = build(FedPC()), {}
    plain.run(2)
    count = plain.plan.net.parameter_count
    for packing, padded in itertools.product(("two_bits", "base3"), (False, True)):
        run = build(FedPC(packing=packing, padded=padded))
        lengths = {e.nbytes for e in run.observe().mail if isinstance(e.message, Ternary | Weights)}
        sizes[packing, padded] = lengths
        run.run(2)
        assert same_tensors(run.parties.server.params, plain.parties.server.params)
    assert sizes["two_bits", False] == {4 * count, math.ceil(count / 4)}
    assert sizes["base3", False] == {4 * count, math.ceil(count / 5)}
    assert sizes["two_bits", True] == sizes["base3", True] == {4 * count}


# -- clients' secrets ------------------------------------------------------------------------------------------------
def test_hyper_parameters_are_drawn_from_the_menus_and_used(build):
    run = build(FedPC(batch_sizes="8,16", epochs="1,2,3", rates="0.5,1,2"), clients=10)
    drawn = [(int(w.batch), int(w.epochs), float(w.rate)) for w in run.parties.clients]
    for value, menu in zip(zip(*drawn, strict=True), ({8, 16}, {1, 2, 3}, {0.5, 1.0, 2.0}), strict=True):
        assert set(value) <= menu and len(set(value)) > 1
    message = run.defense.broadcast(run.context("real", 1, 0, SERVER), run.parties.server)[1]
    for client, (batch, epochs, rate) in enumerate(drawn):
        ctx = run.context("real", 1, 0, client)
        job = run.defense.prepare(ctx, run.parties.clients[client], message, run.shards[client])
        assert job.batches.x.shape[:2] == (epochs * math.ceil(UNEQUAL[client] / batch), batch)
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
    start, costs = run.parties.server.params, answers(transcript, TrainingCost)
    for client, model in trained(transcript).items():
        assert max(float((start[n] - model[n] - u).abs().max()) for n, u in updates[client].items()) < 1e-6
        losses = run.plan.example_loss(run.plan.net(model, run.shards[client].x), run.shards[client].y)
        assert float(costs[client].value) == pytest.approx(float(losses.double().mean()), rel=1e-6)


def test_a_diverging_client_ends_the_run_instead_of_sending_what_is_no_number(build):
    run = build(FedPC(), local=Local(batch=16, opt=Opt("sgd", 1e30)))
    assert run.run(3) is False


# -- noise -----------------------------------------------------------------------------------------------------------
def test_ternaries_are_drawn_anew_as_often_as_asked_and_a_whole_draw_tells_nothing():
    trits = torch.tensor([1, -1, 0], dtype=torch.int8).repeat(20_000)
    secret = Seeds(0).secret("party")
    kept = float((randomized(trits, 0.3, secret) == trits).double().mean())
    assert kept == pytest.approx(1 - 0.3 * 2 / 3, abs=0.01)
    # keeping beside telling any one other value: the likelihood ratio that epsilon bounds
    assert math.log(kept / ((1 - kept) / 2)) == pytest.approx(entry_epsilon(0.3), abs=0.05)
    blank = randomized(trits, 1.0, secret).view(-1, 3).double().mean(0)
    assert entry_epsilon(1.0) == 0 and float(blank.abs().max()) < 0.03
    assert entry_epsilon(0.0) == math.inf


def test_a_pilots_model_is_clipped_and_blurred_as_its_noise_is_told(build):
    def update(run):
        run.run(1)
        (model,) = answers(run.observe(), Weights).values()
        return flat(model.params) - flat(run.parties.server.params)

    assert float(update(build(FedPC())).norm()) > 0.002
    assert float(update(build(FedPC(pilot_clip=0.001))).norm()) == pytest.approx(0.001, rel=1e-3)
    noisy = build(FedPC(pilot_clip=0.001, pilot_sigma=0.5))
    assert float(update(noisy).std()) == pytest.approx(0.0005, rel=0.1)
    transcript = noisy.probe({Slot(0, c): Data(s.x[:1], s.y[:1]) for c, s in noisy.shards.items()})
    pilot, *_ = [e for e in noisy.defense.evidence(transcript.view("server/1")) if e.channel == "pilot"]
    assert pilot.noise is not None and pilot.noise.std == pytest.approx(0.0005 / 0.05)  # over the nominal rate


def test_noise_gives_no_guarantee_and_says_what_one_entry_has(build):
    plan = build(FedPC()).plan
    assert FedPC().guarantee(plan, 100, 10) is None and "no noise" in FedPC().why_no_epsilon(plan)
    printed = FedPC(flip=0.5).why_no_epsilon(plan)
    assert "costs" in printed and "1.39 is one entry's alone" in printed


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


def spoiled(change: Callable[[Tensor], Tensor]) -> Callable[[Weights], Weights]:
    return lambda answer: Weights({**answer.params, "head.bias": change(answer.params["head.bias"])})


@pytest.mark.parametrize(
    ("kind", "spoil", "transcript"),
    [
        (TrainingCost, lambda a: TrainingCost(a.value * math.nan), "told the cost nan"),
        (TrainingCost, lambda a: TrainingCost(a.value * math.inf), "told the cost inf"),
        (TrainingCost, lambda a: TrainingCost(a.value - 100), "told the cost -"),
        (TrainingCost, lambda a: TrainingCost(a.value.double()), "told the cost .* not one finite float32"),
        (TrainingCost, lambda a: TrainingCost(a.value[None]), r"told the cost \["),
        (TrainingCost, lambda a: Weights({}), "was asked for TrainingCost and sent Weights"),
        (TrainingCost, lambda a: None, "was asked for TrainingCost and sent nothing"),
        (Ternary, lambda a: Ternary(a.packed[:-1]), "sent a ternary vector that cannot be read: 460 entries"),
        (Ternary, lambda a: Ternary(a.packed.index_fill(0, torch.tensor(0), 2)), "sent a ternary.*stands for nothing"),
        (Ternary, lambda a: Ternary(a.packed.char()), "sent a ternary.*uint8"),
        (Ternary, lambda a: TrainingCost(torch.tensor(1.0)), "was asked for Ternary and sent TrainingCost"),
        (Weights, spoiled(lambda b: b * math.nan), "sent a model with values in 'head.bias'"),
        (Weights, spoiled(lambda b: b[:-1]), "sent a model whose names, shapes or dtypes"),
        (Weights, spoiled(lambda b: b.double()), "sent a model whose names, shapes or dtypes"),
        (Weights, lambda a: Weights({}), "sent a model whose names, shapes or dtypes"),
        (Weights, lambda a: Ternary(torch.zeros(4)), "was asked for Weights and sent Ternary"),
        (Masked, lambda a: Masked(a.words[:-1]), r"sent masked ternaries as torch.int16 of shape \(459,\)"),
        (Masked, lambda a: Masked(a.words.int()), "sent masked ternaries as torch.int32"),
        (Masked, lambda a: Ternary(torch.zeros(115)), "was asked for Masked and sent Ternary"),
    ],
)
def test_a_malformed_answer_names_its_client_and_changes_nothing(build, kind, spoil, transcript):
    masks, whom = "ring" if kind is Masked else "none", (2,) if kind is TrainingCost else (0, 1, 2, 3, 4)
    run = build(Faulty(spoil=((kind, spoil),), whom=whom, masks=masks))
    assert run.run(1)
    before = (run.parties.server, list(run.parties.clients), run.round)
    with pytest.raises(ProtocolError, match=f"Client {2 if kind is TrainingCost else '[0-4]'} {transcript}"):
        run.run(2)
    assert (
        same_tensors(before[0], run.parties.server)
        and same_tensors(before[1], run.parties.clients)
        and run.round == before[2]
    )
    run.defense = FedPC(masks=masks)
    assert run.run(2)


def test_a_menu_of_one_may_be_given_as_a_number():
    made = make_defense("fedpc", {"rates": 1, "epochs": 2, "batch_sizes": 16})
    assert [made.menu(field) for field in ("rates", "epochs", "batch_sizes")] == [[1.0], [2], [16]]


def test_plans_that_the_protocol_cannot_follow_are_refused(build):
    plan = build(FedPC()).plan
    with pytest.raises(UsageError, match="use --schedule parallel, not 'round_robin'"):
        FedPC().check(replace(plan, schedule="round_robin"))
    with pytest.raises(UsageError, match="use at least 3 clients"):
        FedPC(masks="ring").check(replace(plan, clients=2))
    with pytest.raises(UsageError, match="padded=True cannot be used"):
        build(FedPC(masks="ring", padded=True))
