"""MP-DP's protocol and its variants: exact where the mathematics is, noisy as its laws say, and wrong input refused."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from protocols import examples, relative, started, true_gradient, weights
from scipy.stats import kstest
from torch import Tensor

from ppbench.base.errors import ProtocolError, UsageError
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params, leaves
from ppbench.defenses.mpdp.accounting import Sigmas, exact_theta
from ppbench.defenses.mpdp.expansion import expanded
from ppbench.defenses.mpdp.model_perturbation import ModelPerturbation, ServerSecrets
from ppbench.defenses.mpdp.protocol import MPCDP, MPDP, MPDPH, MPDPNaive
from ppbench.defenses.none import NoDefense
from ppbench.defenses.pbpfl.perturbation import Perturbed, Released, Surrogates, perturbed_outputs
from ppbench.federation import secagg
from ppbench.federation.contract import Context, Server
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import at_truth
from ppbench.federation.plan import Data, Local, Opt, Plan
from ppbench.federation.wire import SERVER, Slot
from ppbench.nets.net import NetSpec, initial, net_spec

VARIANTS = [MPDP, MPDPNaive, MPCDP, MPDPH]
MLP5 = net_spec("mlp", (1, 8, 8), 10, {"hidden": 32, "layers": 5, "bias": False})
CNN = net_spec("cnn", (3, 8, 8), 10, {"widths": "6,8", "hidden": "12", "bias": False})
CLIENTS = 4


def plan_of(spec: NetSpec = MLP5, clients: int = CLIENTS, lr: float = 0.1, batch: int = 24) -> Plan:
    opt = Opt("sgd", lr)
    return Plan(spec, clients, Local("gradient", batch=batch, opt=opt), loss="squared", server_opt=opt)


def context(plan: Plan, party: int = SERVER, seed: int = 0, session: str = "real", round_: int = 1) -> Context:
    return Context(plan, round_, session, party, torch.Generator().manual_seed(seed), Seeds(seed).secret("party"))


def served(defense: ModelPerturbation, plan: Plan, params: Params, seed: int = 0) -> tuple[Server, Perturbed]:
    """Return the server's state and its message of a round without set-up."""
    server = Server(params, (), torch.zeros(plan.clients, dtype=torch.int64), ())
    return defense.broadcast(context(plan, seed=seed), server)


def computed(defense: ModelPerturbation, plan: Plan, message: Perturbed, data: Data) -> Surrogates:
    job = defense.prepare(context(plan, 0), (), message, data)
    with torch.no_grad():
        return defense.compute(plan, job)


@pytest.fixture
def shards(deal):
    return deal([24] * CLIENTS)


@pytest.fixture
def run(shards):
    def make(defense, plan=None, seed=0, **options):
        return started(defense, plan or plan_of(), shards, seed, **options)

    return make


@dataclass(frozen=True)
class Fixed(MPDP):
    """MP-DP with sigmas of the test's choice."""

    eta: float = 0.0
    pairs: float = 0.0

    def sigmas(self, plan: Plan) -> Sigmas:
        return Sigmas(self.eta, self.pairs)


@dataclass(frozen=True)
class FixedH(MPDPH, Fixed):
    """The hardened variant with sigmas of the test's choice."""


# -- recovery ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("gamma", ["vector", "scalar"])
@pytest.mark.parametrize("kappa", [1.0, 100.0])
@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_recovery_is_exact_without_noise(gamma, kappa, precision):
    """U2: relative error up to 2e-14 (float64) and 2e-6 (float32) times kappa^2."""
    plan, params, data = plan_of(), weights(MLP5), examples(MLP5, 8)
    defense = Fixed(gamma=gamma, kappa=kappa, precision=precision, bound=0.7)
    server, message = served(defense, plan, params)
    assert all(leaf.dtype == defense.dtype for leaf in leaves(message))
    none = torch.zeros(0, dtype=torch.uint8)
    alone = secagg.Keys(none, none, torch.zeros(CLIENTS, CLIENTS, dtype=torch.bool), none.long())
    upload = defense.upload(context(plan, 0), alone, computed(defense, plan, message, data))
    unit = 2e-14 if precision == "float64" else 2e-6
    error = relative(defense.recover(plan, server, upload), true_gradient(plan, params, data))
    assert error < unit * kappa**2


@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("gamma", ["vector", "scalar"])
def test_bytes_of_a_round(gamma, precision, run):
    """Section 5: 4(p + q) down and 4(C + 2)p up in float32; r_a is sent where gamma is a scalar."""
    federation = run(MPDP(gamma=gamma, precision=precision))
    federation.run(1)
    size = 4 if precision == "float32" else 8
    directions, sent = (10, 0) if gamma == "vector" else (1, 10)
    p, q = federation.plan.net.parameter_count, sum(map(math.prod, expanded(MLP5).transitional.values()))
    assert (p, q) == (64 * 32 + 3 * 32 * 32 + 320, 128)
    assert federation.wire.down - federation.setup_down == CLIENTS * size * (p + q + sent)
    assert federation.wire.up - federation.setup_up == CLIENTS * size * (directions + 2) * p
    assert federation.setup_up == CLIENTS * (8 + 32)


def test_masked_logits_are_the_logits_plus_alpha_r_and_delivery_is_exact():
    plan, params, x = plan_of(CNN), weights(CNN), examples(CNN, 5).x.double()
    defense = MPDP(kappa=50.0)
    server, message = served(defense, plan, params)
    expansion, logits = expanded(CNN), plan.net(params, x)
    _, alpha = perturbed_outputs(expansion.net, message.params, x, masked_bias=False)
    expected = logits + alpha[:, None] * server.own.mask
    torch.testing.assert_close(defense.predict(plan, message, x), expected, rtol=1e-11, atol=1e-12)
    size = float((expected - logits).square().mean().sqrt() / logits.square().mean().sqrt())
    assert 10 < size < 250  # kappa, up to the inputs on which it is measured
    released = defense.deliver(context(plan, seed=3), server)
    assert isinstance(released, Released)
    torch.testing.assert_close(defense.predict(plan, released, x), logits, rtol=1e-12, atol=1e-13)
    assert relative({n: released.params[n] for n in params}, params) > 0.1


# -- noise -------------------------------------------------------------------------------------------------------
def agreed(graph: Tensor, plan: Plan) -> list[secagg.Keys]:
    """Return every client's keys after set-up on `graph`."""
    keys = [secagg.new_keys(context(plan, c, seed=100 + c, round_=0)) for c in range(len(graph))]
    public = torch.stack([secagg.announce(k.private, 1).public for k in keys])
    roster = secagg.Roster(torch.ones(len(graph), dtype=torch.int64), public, graph)
    return [secagg.with_secrets(k, c, roster) for c, k in enumerate(keys)]


def test_noise_of_pairs_alone_leaves_the_mean_as_it_is(run):
    """U4, at 1e-12: with sigma_eta = 0 the step is that of a noiseless round, while each upload is drowned."""
    quiet, noisy = run(Fixed(gamma="scalar")), run(Fixed(gamma="scalar", pairs=5.0))
    for federation in (quiet, noisy):
        federation.run(2)
    assert relative(noisy.parties.server.params, quiet.parties.server.params) < 1e-6  # weights are float32
    plan, params, data = plan_of(), weights(MLP5), examples(MLP5, 8)
    keys = agreed(~torch.eye(CLIENTS, dtype=torch.bool), plan)
    steps = []
    for defense in (Fixed(), Fixed(pairs=5.0)):
        server, message = served(defense, plan, params)
        result = computed(defense, plan, message, data)
        uploads = [defense.upload(context(plan, c, seed=c), keys[c], result) for c in range(CLIENTS)]
        steps.append(defense.recover(plan, server, defense.mean(uploads)))
        single = relative(defense.recover(plan, server, uploads[0]), true_gradient(plan, params, data))
        assert single > 10 if defense.pairs else single < 1e-10
    assert relative(steps[1], steps[0]) < 1e-12 * 100  # the mask, kappa = 10, amplifies rounding


def test_a_round_without_noise_is_fedsgd(run):
    exact, plain = run(Fixed(bound=3.0)), run(NoDefense())
    for federation in (exact, plain):
        federation.run(5)
    assert relative(exact.parties.server.params, plain.parties.server.params) < 1e-5  # float32 weights


# -- the hardened variant ----------------------------------------------------------------------------------------
def test_hardened_uploads_are_read_as_sums_only(run):
    masked, bare = run(FixedH(gamma="scalar", clip="none")), run(Fixed(gamma="scalar", clip="none"))
    for federation in (masked, bare):
        federation.run(3)
    assert relative(masked.parties.server.params, bare.parties.server.params) < 1e-5
    transcript = masked.probe({Slot(0, c): masked.shards[c] for c in range(CLIENTS)})
    uploads = [e.answer for e in transcript.view("server/1").exchanges()]
    for part in ("sigma", "beta"):
        values = torch.cat([v.flatten() for v in getattr(uploads[0], part).values()])
        assert values.dtype == torch.int64
        assert kstest(values.double().numpy() / 2.0**63, "uniform", args=(-1, 2)).pvalue > 1e-3
    same = uploads[0].sigma["head.weight"][0] - uploads[0].beta["head.weight"]
    assert kstest(same.flatten().double().numpy() / 2.0**63, "uniform", args=(-1, 2)).pvalue > 1e-3  # other families


def test_hardened_sums_need_everybody_and_divergence_is_no_error(run):
    federation = run(MPDPH())
    with pytest.raises(ProtocolError, match="1 of 4"):
        federation.defense.aggregate(context(plan_of()), federation.parties.server, {0: ()})
    wild = run(MPDPH(epsilon=0.01, gamma="scalar", fraction_bits=50, clip="none"), plan_of(lr=5.0))
    assert wild.run(60) is False


# -- evidence ----------------------------------------------------------------------------------------------------
def truth_of(result: Any, data: dict[Slot, Data]) -> tuple[Tensor, Tensor]:
    return torch.stack([data[s].x for s in result.unit]), torch.stack([data[s].y for s in result.unit])


@pytest.mark.parametrize("threat", ["server/1", "eavesdropper/1", "client/1"])
@pytest.mark.parametrize(
    "defense",
    [
        Fixed(bound=0.02),
        Fixed(bound=0.02, clip="oracle"),
        MPCDP(bound=0.02),
        FixedH(bound=0.02),
        FixedH(clip="none"),
        FixedH(bound=0.02, clip="oracle"),
        Fixed(gamma="scalar", clip="none"),
    ],
    ids=repr,
)
def test_evidence_without_noise_is_exact(defense, threat, run):
    federation = run(defense)
    federation.run(1)
    data = {Slot(p, c): examples(MLP5, 3, 10 * p + c) for p in range(2) for c in range(CLIENTS)}
    evidence = defense.evidence(federation.probe(data).view(threat))
    if threat == "client/1":
        assert evidence == []
        return
    assert len(evidence) == (2 if defense.sums else 2 * CLIENTS)
    shared = {id(e.simulate) for e in evidence}
    # What is sent is fresh in every probe: a listener's weights, and those by which a client clips what it sees.
    assert len(shared) == (1 if threat == "server/1" and defense.clip != "seen" else 2)
    for e in evidence:
        assert e.noise is None and (e.params is None) == (threat == "eavesdropper/1")
        blind = threat == "eavesdropper/1" and defense.clip == "oracle"  # it cannot tell by what factor
        assert e.measure == ("cosine" if blind else "squares")
        if blind and defense.sums:
            continue  # each client of a sum has a factor of its own
        assert at_truth(e, *truth_of(e, data)) < (1e-15 if defense.sums or blind else 1e-20)


@pytest.mark.parametrize(("clip", "channel"), [("seen", "g"), ("oracle", "recovered")])
def test_what_is_clipped_has_the_norm_of_the_bound(clip, channel, run):
    """By plain arithmetic: of G for who clips what it sees, of the true gradient for an oracle."""
    defense = Fixed(bound=0.02, clip=clip)
    threat = "eavesdropper/1" if channel == "g" else "server/1"
    probe = run(defense).probe({Slot(0, c): examples(MLP5, 3, c) for c in range(CLIENTS)})
    unit = defense.bound if channel == "g" else 1.0  # a listener has G / bound
    for e in defense.evidence(probe.view(threat)):
        size = math.sqrt(sum(float((value.double() ** 2).sum()) for value in e.observed.values()))
        assert e.channel == channel and size * unit == pytest.approx(0.02, rel=1e-6)


@pytest.mark.parametrize("threat", ["server/1", "eavesdropper/1"])
@pytest.mark.parametrize("defense", [MPDP(), MPDPNaive(), MPDPH(), MPDP(graph="n_out", n=2)], ids=lambda d: d.name)
def test_evidence_names_the_size_of_its_noise(defense, threat, run):
    federation = run(defense)
    data = {Slot(p, c): examples(MLP5, 3, 10 * p + c) for p in range(3) for c in range(CLIENTS)}
    for e in defense.evidence(federation.probe(data).view(threat)):
        simulated = e.simulate(*(t.double() for t in truth_of(e, data)))
        residual = torch.cat([(e.observed[n] - v.detach()).flatten() for n, v in simulated.items()])
        assert e.noise is not None
        # Scales are shared by rows and columns, so the spread is wide for who knows the mean degree only.
        loose = 0.35 if defense == MPDP(graph="n_out", n=2) else 0.06
        assert float(residual.square().mean().sqrt()) == pytest.approx(e.noise.std, rel=loose)


# -- set-up and accounting ---------------------------------------------------------------------------------------
def test_the_graph_is_drawn_by_the_server_and_announced(run):
    federation = run(MPDP(graph="n_out", n=1))
    graph = federation.parties.server.own.graph
    assert torch.equal(graph, graph.T) and bool(graph.any(1).all()) and not bool(graph.diagonal().any())
    for party, keys in enumerate(federation.parties.clients):
        assert torch.equal(keys.graph, graph)
        assert torch.equal(keys.shared.any(1), graph[party])
    federation.run(2)
    assert torch.equal(federation.parties.server.own.graph, graph)


def step(defense: MPDP, plan: Plan, graph: Tensor | None = None, rounds: int = 1) -> str:
    none = torch.zeros(0)
    server = Server({}, (), none, ServerSecrets(none, none, none, graph)) if graph is not None else None
    return defense.why_no_epsilon(plan, server, rounds)


def test_reasons_state_the_claim_and_what_it_is_worth():
    plan, ring = plan_of(clients=5), torch.eye(10, dtype=torch.bool).roll(1, 0)
    reason = step(MPDP(), plan, rounds=10)
    assert "epsilon 3 a round, delta 1e-05;" in reason and "theta 0.345: by Eq. 23 epsilon 2.97 a round" in reason
    assert (
        "9.14 over 10 rounds" in reason
        and "colludes with all neighbours is certain of a change of one coordinate with probability 0.47" in reason
    )
    assert MPDP().guarantee(plan, 100, 10) is None
    defense, plan = MPDP(graph="n_out", n=5), plan_of(clients=10)
    assert "no guarantee here: Theorem 11 needs K >= 81" in step(defense, plan) and "theta" not in step(defense, plan)
    theta = exact_theta(ring | ring.T, defense.sigmas(plan).eta, defense.sigmas(plan).delta)
    assert f"theta {theta:.3g}" in step(defense, plan, ring | ring.T)
    for kind in VARIANTS:
        reason = kind().why_no_epsilon(plan)
        assert f"epsilon {kind().epsilon:g} a round" in reason and not reason.endswith(".")


# -- bad input ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("defense", "plan", "sentence"),
    [
        (MPDP(graph="n_out", n=4), plan_of(), "n=4.*from 1 to 3"),
        (MPDP(graph="n_out", n=0), plan_of(), "n=0.*from 1 to 3"),
        (MPDP(), plan_of(clients=1), "at least 2 clients"),
        (MPDP(), replace(plan_of(), schedule="round_robin"), "--schedule parallel"),
        (MPCDP(), replace(plan_of(), loss="cross_entropy"), "--loss squared"),
        (MPDPNaive(), replace(plan_of(), local=Local("delta")), "--upload gradient"),
        (MPDP(), plan_of(net_spec("mlp", (1, 8, 8), 10)), "head.bias.*model.bias=false"),
        (MPDPNaive(), plan_of(net_spec("mlp", (1, 8, 8), 10)), "head.bias.*model.bias=false"),
        (MPDP(), plan_of(net_spec("resnet20", (3, 32, 32), 10)), "head.bias.*model.head_bias=false"),
        (MPDP(), plan_of(net_spec("resnet20", (3, 32, 32), 10, {"norm": "gn", "head_bias": False})), "GroupNorm"),
        (MPDPNaive(), plan_of(net_spec("mlp", (4,), 2, {"hidden": "", "bias": False})), "hidden layer"),
    ],
)
def test_plans_that_cannot_work_are_refused_in_one_sentence(defense, plan, sentence):
    with pytest.raises(UsageError, match=sentence) as refused:
        defense.check(plan)
    assert str(refused.value).endswith(".") and str(refused.value).count(". ") == 0


def test_clients_of_unequal_sizes_are_refused(shards):
    plan = plan_of()
    for kind in VARIANTS:
        kind().check_data(plan, [24, 24, 25, 24])
        with pytest.raises(UsageError, match="from 20 to 24 examples; use --partition iid"):
            kind().check_data(plan, [24, 24, 20, 24])
    uneven = {**shards, 3: Data(shards[3].x[:20], shards[3].y[:20])}
    with pytest.raises(UsageError, match="equal weights"):
        Federation(MPDP(), plan, uneven, Seeds(0)).start(initial(MLP5, 1))


def test_uploads_that_break_the_protocol_are_refused(run):
    federation = run(MPDP())
    server, _ = federation.defense.broadcast(context(plan_of()), federation.parties.server)
    for broken in ((), Surrogates({}, {}, {})):
        with pytest.raises(ProtocolError, match="cannot be"):
            federation.defense.aggregate(context(plan_of()), server, {0: broken})


# -- training ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("clip", "kappa", "low", "high", "kind"),
    [
        pytest.param(*case, kind, marks=pytest.mark.battery(case, kind))
        for kind in VARIANTS
        for case in [
            ("none", 10.0, 0.5, 1.0),
            ("oracle", 10.0, 0.5, 1.0),
            ("seen", None, 0.5, 1.0),
            ("seen", 10.0, 0.0, 0.3),
        ]
    ],
)
def test_training_learns_at_a_large_budget_unless_the_mask_is_what_is_clipped(kind, clip, kappa, low, high, digits):
    """Where clients clip what they see, a mask ten times the logits leaves next to nothing of the gradient.

    kappa: None is the default.
    """
    order = torch.randperm(len(digits.x), generator=torch.Generator().manual_seed(0))
    x, y = digits.x[order], digits.y[order]
    shards = {c: Data(x[c * 100 :][:100].clone(), y[c * 100 :][:100].clone()) for c in range(CLIENTS)}
    spec = net_spec("mlp", (1, 8, 8), 10, {"hidden": "32", "bias": False})
    plan = plan_of(spec, lr=0.3, batch=100)
    parameters = {} if kappa is None else {"kappa": kappa}
    federation = started(kind(epsilon=200.0, gamma="scalar", clip=clip, **parameters), plan, shards)
    assert federation.run(30)
    assert low < federation.accuracy(Data(x[-800:], y[-800:])) < high  # chance: .1
