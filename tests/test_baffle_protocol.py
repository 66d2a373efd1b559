"""BAFFLE's rounds: bytes, masks, what is refused, the epoch level, the average, and what the server can read."""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import protocols
import pytest
import torch
from daily import all_but_nightly
from protocols import central_bare, started
from scipy import stats
from torch import Tensor

from ppbench.adversary.leaks import leaks
from ppbench.base.errors import ProtocolError, UsageError
from ppbench.base.tree import Params, Tree, leaves, nbytes, tree_map
from ppbench.defenses.baffle import (
    RINGS,
    Baffle,
    Differences,
    Evaluate,
    answers_by_slot,
    stein_directions,
    unmasked_answer,
)
from ppbench.defenses.none import NoDefense
from ppbench.federation.contract import Context
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Batch, Data, Local, Opt, Plan
from ppbench.federation.view import Transcript, View
from ppbench.federation.wire import SERVER, Slot, Update
from ppbench.nets.net import initial, net_spec
from ppbench.testing.small_federation import all_digits, same_tensors

SIZES = (40, 64, 100, 60)  # of a stride of 48: some examples are two clients'
SPEC = net_spec("mlp", (1, 8, 8), 10, {"hidden": "32", "activation": "hardswish"})
N = 2_410
BATCH = 4


def federation(defense, upload="gradient", opt=None, seed=0, **local):
    """A started federation over unequal shards."""
    opt = opt or Opt("adam", 0.01, betas=(0.9, 0.99))
    options = Local(upload, batch=14, opt=opt)  # type: ignore[arg-type]
    plan = Plan(SPEC, len(SIZES), replace(options, **local), server_opt=opt if upload == "gradient" else Opt())
    whole = all_digits()
    shards = {c: Data(whole.x[c * 48 :][:n].clone(), whole.y[c * 48 :][:n].clone()) for c, n in enumerate(SIZES)}
    return started(defense, plan, shards, seed)


def victims(run: Federation) -> dict[Slot, Data]:
    return {Slot(0, c): Data(s.x[:BATCH], s.y[:BATCH]) for c, s in run.shards.items()}


def probed(run: Federation, threat: str = "server/1", **options: Any) -> tuple[Transcript, View]:
    transcript = run.probe(victims(run), **options)
    return transcript, transcript.view(threat)


def server_message(transcript: Transcript) -> Evaluate:
    return next(e.message for e in transcript.mail if e.sender == SERVER)  # type: ignore[no-any-return]


def sent(transcript: Transcript) -> dict[int, Any]:
    return {e.sender: e.message for e in transcript.mail if e.receiver == SERVER}


def computed(run: Federation, message: Evaluate, client: int) -> Tensor:
    """A client's loss differences, float64, as it computes them before it encodes anything."""
    data = victims(run)[Slot(0, client)]
    batch = Batch(data.x, data.y, torch.ones(BATCH))
    defense: Baffle = run.defense  # type: ignore[assignment]
    return defense.differences(run.plan, message.params, batch, int(message.seed))


def true_gradient(evidence: Evidence, run: Federation) -> Tensor:
    data = [victims(run)[slot] for slot in evidence.unit]
    x, y = torch.stack([d.x for d in data]), torch.stack([d.y for d in data])
    return flat(tree_map(lambda t: t.detach(), evidence.simulate(x.double(), y.double())))


def flat(params: Params) -> Tensor:
    return protocols.flat(params).double()


@pytest.mark.parametrize(
    ("k", "up", "ratio"), [(100, 400, 0.502), (500, 2000, 0.509), (1000, 4000, 0.518), (5000, 20_000, 0.592)]
)
def test_bytes_of_the_papers_lenet(k, up, ratio):
    """4n + 4 down and 4K up (8K for twice as many, or of 8-byte numbers), beside 8n of FedSGD."""
    spec = net_spec("lenet_baffle", (1, 28, 28), 10)
    plan = Plan(spec, 2, Local("gradient"))
    ctx = Context(plan, 1, "real", SERVER, torch.Generator())
    defense = central_bare(k=k)
    server, message = defense.broadcast(ctx, defense.init_server(ctx, initial(spec, 0)))
    down = nbytes(message)
    assert down == 4 * 27_242 + 4 and server.own.seed == message.seed
    for scheme, factor in (("central", 1), ("twice", 2)):
        one = replace(defense, scheme=scheme)
        assert nbytes(one.upload(ctx, (), torch.zeros(one.count, dtype=torch.float64))) == factor * up
    assert (down + up) / (8 * 27_242) == pytest.approx(ratio, abs=5e-4)


EPOCH = {"level": "epoch"}


@pytest.mark.parametrize(
    ("options", "upload", "up"),
    [({"scheme": "twice"}, "gradient", 8 * 30), ({"masks": "ring32"}, "gradient", 4 * 30),
     (EPOCH, "delta", 4 * N), ({**EPOCH, "masks": "ring64"}, "delta", 8 * N)],
)  # fmt: skip
def test_bytes_on_the_wire(options, upload, up):
    run = federation(central_bare(k=30, **options), upload)
    before = (run.wire.up, run.wire.down)
    assert run.run(1)
    assert (run.wire.up - before[0], run.wire.down - before[1]) == (4 * up, 4 * (4 * N + 4))
    seed = run.parties.server.own.seed
    assert run.run(2) and run.parties.server.own.seed != seed, "every round has its own directions"


@pytest.mark.parametrize("masks", ["ring64", "ring32"])
@pytest.mark.parametrize("scheme", ["central", "twice"])
def test_masks_cancel_in_the_weighted_sum_and_hide_every_answer(masks, scheme):
    run = federation(central_bare(k=300, masks=masks, scheme=scheme))
    transcript, view = probed(run)
    message, uploads = server_message(transcript), sent(transcript)
    hidden = {c: computed(run, message, c) for c in uploads}
    mean = sum((SIZES[c] / sum(SIZES) * h for c, h in hidden.items()), torch.zeros(()))
    unit = [some[0] for some in answers_by_slot(view).values()]
    seed, slopes = run.defense.sketch(*unit)  # type: ignore[attr-defined]
    scale = 2e-4 if scheme == "central" else 1e-4
    step = 2.0 ** -RINGS[masks].fraction_bits
    assert seed == int(message.seed)
    assert float((slopes * scale - mean).abs().max()) <= len(SIZES) * step / 2 + 1e-15
    bits = torch.iinfo(RINGS[masks].dtype).bits
    for client, upload in uploads.items():
        assert upload.value.dtype == RINGS[masks].dtype
        for numbers in (upload.value, upload.value.diff()):  # of one mask for all entries differences would be bare
            uniform = numbers.double() / 2.0**bits + 0.5
            assert stats.kstest(uniform.numpy(), "uniform").pvalue > 1e-3
        assert abs(stats.pearsonr(upload.value.double(), hidden[client]).statistic) < 0.2


def test_a_missing_answer_and_a_mask_of_another_round_do_not_give_the_mean():
    run = federation(central_bare(k=20, masks="ring64"))
    transcript, view = probed(run)
    ctx = Context(run.plan, 1, "probe-0", SERVER, torch.Generator())
    server = view.state_at(next(view.exchanges()))
    uploads = sent(transcript)
    with pytest.raises(ProtocolError, match="3 of 4 clients sent an upload; masks cancel only in everybody's sum"):
        run.defense.aggregate(ctx, server, {c: u for c, u in uploads.items() if c})
    later = run.probe(victims(run), rounds=2)
    second = [e.message for e in later.mail if e.sender == 0][1]
    mixed = run.defense.aggregate(ctx, server, {**uploads, 0: second})
    right = run.defense.aggregate(ctx, server, uploads)
    good = flat(right.params) - flat(server.params)
    assert float(good.norm()) < 1 and float(mixed.opt["m"].norm()) > 1e3 * float(right.opt["m"].norm())


@pytest.mark.parametrize(("options", "upload"), [({}, "gradient"), ({"level": "epoch"}, "delta")])
def test_all_but_one_client_take_its_mask_off(options, upload):
    masked = federation(central_bare(k=200, masks="ring64", **options), upload)
    clear = federation(central_bare(k=200, **options), upload)
    _, view = probed(masked, "collusion/1")
    _, open_view = probed(clear, "collusion/1")
    evidence = masked.defense.evidence(view)
    assert [e.unit for e in evidence] == [(Slot(0, 0),)]
    plain = next(e for e in clear.defense.evidence(open_view) if e.unit == (Slot(0, 0),))
    torch.testing.assert_close(flat(evidence[0].observed), flat(plain.observed), rtol=1e-4, atol=1e-6)
    exchange = next(e for e in view.exchanges() if e.slot.client == 0)
    parts = leaves(exchange.answer)
    numbers = torch.cat([p.flatten() for p in parts])
    fewer = replace(view, states=tuple(s for s in view.states if s.party != 3))
    assert unmasked_answer(view, exchange, numbers, "ring64") is not None
    assert unmasked_answer(fewer, exchange, numbers, "ring64") is None
    assert leaks((view, evidence), [s.x for s in [victims(masked)[Slot(0, 0)]]]) == []


def test_ring32_says_what_it_cannot_hold():
    run = federation(central_bare(k=3, masks="ring32"))
    ctx = Context(run.plan, 1, "real", 2, torch.Generator())
    with pytest.raises(ProtocolError, match=r"Client 2 has the number 1.5 to mask.*masks='ring32'.*below 1"):
        run.defense.upload(ctx, run.parties.clients[2], torch.tensor([0.1, 1.5, 0.2]))


# -- what is refused ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Liar(Baffle):
    """One client answers with something else from round 2 on."""

    lie: str = ""
    name: ClassVar[str] = "liar"

    def upload(self, ctx: Context, me: Tree, result: Tree) -> Tree:
        message = super().upload(ctx, me, result)
        if ctx.party != 2 or ctx.round < 2:
            return message
        value = leaves(message)[0]
        lies: dict[str, Any] = {
            "short": Differences(value[:-1]),
            "twice": Differences(torch.stack([value, value])),
            "nan": Differences(value.clone().index_fill(0, torch.tensor([1]), math.nan)),
            "inf": Differences(value.clone().index_fill(0, torch.tensor([1]), math.inf)),
            "double": Differences(value.double()),
            "update": Update(initial(SPEC, 0)),
            "differences": Differences(value.flatten()),
            "shape": Update({n: p[None] for n, p in message.params.items()} if isinstance(message, Update) else {}),
            "name": Update({f"x{n}": p for n, p in message.params.items()} if isinstance(message, Update) else {}),
            "holes": Update({n: p / 0 for n, p in message.params.items()} if isinstance(message, Update) else {}),
        }
        return lies[self.lie]


@pytest.mark.parametrize(
    ("level", "lie", "words"),
    [
        ("batch", "short", r"sent numbers of shape \(8,\); \(9,\) is right"),
        ("batch", "twice", r"shape \(2, 9\); \(9,\) is right"),
        ("batch", "nan", "not finite"),
        ("batch", "inf", "not finite"),
        ("batch", "double", "type torch.float64; torch.float32 is right"),
        ("batch", "update", "answered with Update, not Differences"),
        ("epoch", "differences", "answered with Differences, not Update"),
        ("epoch", "shape", "names or shapes are not the model's"),
        ("epoch", "name", "names or shapes are not the model's"),
        ("epoch", "holes", "not finite"),
    ],
)
def test_a_malformed_answer_is_refused_by_name_and_moves_nothing(level, lie, words):
    run = federation(
        Liar(k=9, level=level, lie=lie, masks="none", scheme="central"), "gradient" if level == "batch" else "delta"
    )
    assert run.run(1)
    before = tree_map(torch.clone, run.parties.server)
    with pytest.raises(ProtocolError, match=rf"^Client 2 .*{words}"):
        run.run(2)
    assert same_tensors(run.parties.server, before) and run.round == 1


def test_weights_out_of_range_are_a_divergence_not_a_lie():
    run = federation(central_bare(k=5), opt=Opt("sgd", 1e30))
    assert run.run(6) is False


def test_plans_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match="level='batch' needs --upload gradient, not 'delta'"):
        central_bare().check(Plan(SPEC, 4, Local("delta")))
    with pytest.raises(UsageError, match="level='epoch' needs --upload delta, not 'gradient'"):
        central_bare(level="epoch").check(Plan(SPEC, 4, Local("gradient")))
    with pytest.raises(UsageError, match="use at least 2 clients"):
        central_bare(masks="ring64").check(Plan(SPEC, 1, Local("gradient")))
    with pytest.raises(UsageError, match="use --schedule parallel, not 'round_robin'"):
        central_bare(masks="ring64").check(Plan(SPEC, 4, Local("gradient"), schedule="round_robin"))
    central_bare().check(Plan(SPEC, 1, Local("gradient"), schedule="round_robin"))


# -- learning ----------------------------------------------------------------------------------------------------------
@pytest.mark.nightly
def test_it_learns_less_than_backpropagation_and_more_with_more_directions(digits):
    """Over ten seeds .13 to .33 with 5 directions, .51 to .69 with 100, .78 to .84 by backpropagation."""
    test = Data(digits.x[800:], digits.y[800:])
    results = {}
    for defense in (NoDefense(), central_bare(k=5), central_bare(k=100, scheme="twice")):
        run = federation(defense)
        assert run.run(40)
        results[getattr(defense, "k", 0)] = run.accuracy(test)
    assert results[5] + 0.2 < results[100] < results[0] - 0.05 and results[100] > 0.45


def test_one_local_step_is_the_batch_level_round():
    """Both are one step of SGD on the weighted mean of the clients' estimates, from the same seed (Eq. 7)."""
    opt = Opt("sgd", 0.05)
    kinds = ("batch", "gradient"), ("epoch", "delta")
    runs = [federation(central_bare(k=50, ema=0.0, level=level), upload, opt, batch=100) for level, upload in kinds]
    starts = flat(runs[0].parties.server.params)
    for run in runs:
        run.run(1)
    steps = [flat(run.parties.server.params) - starts for run in runs]
    assert float(steps[0].norm()) > 0.01
    assert float((steps[0] - steps[1]).norm() / steps[0].norm()) < 1e-4


def test_local_steps_perturb_along_directions_of_their_own():
    run = federation(central_bare(k=5, level="epoch"), "delta", Opt("sgd", 0.05), epochs=2)
    ctx = Context(run.plan, 1, "real", 0, torch.Generator().manual_seed(0))
    _, message = run.defense.broadcast(ctx, run.parties.server)
    job = run.defense.prepare(ctx, (), message, run.shards[0])
    assert job is not None and len(set(job.noise.tolist())) == len(job.noise) == 2 * math.ceil(SIZES[0] / 14)
    update = flat(run.defense.compute(run.plan, job))
    z = torch.cat([torch.stack(list(stein_directions(int(s), N, 5))) for s in job.noise]).double()
    for known, outside in ((z, (0, 1e-4)), (z[:-5], (1e-2, 1))):  # without the last step's something is left
        inside = known.T @ torch.linalg.lstsq(known.T, update[:, None]).solution
        assert outside[0] < float((inside[:, 0] - update).norm() / update.norm()) < outside[1]


@pytest.mark.parametrize("how", all_but_nightly(["warmed", "constant"], ["constant"]))
def test_what_is_delivered_is_the_average_of_the_weights(how):
    run, history = federation(central_bare(k=2, ema=0.9, average=how)), []
    average = flat(run.parties.server.params)
    run.run(100, lambda _: history.append(flat(run.parties.server.params)))
    for step, weights in enumerate(history, 1):
        b = 0.9 if how == "constant" else min(0.9, (1 + step) / (10 + step))
        average = b * average + (1 - b) * weights
    assert central_bare(ema=0.9).decay(1) == 2 / 11 and central_bare(ema=0.9).decay(100) == 0.9
    assert central_bare(ema=0.9, average="constant").decay(1) == 0.9
    assert float((flat(run.deliver().params) - average).abs().max()) < 1e-5
    assert float((flat(run.deliver().params) - history[-1]).abs().max()) > 1e-2
    last = federation(central_bare(k=10, ema=0.0))
    last.run(2)
    assert same_tensors(last.deliver().params, last.parties.server.params) and last.parties.server.own.average == ()


# -- what is seen ------------------------------------------------------------------------------------------------------
def test_the_sketch_is_the_gradient_along_public_directions():
    for scheme, tolerance in (("central", 1e-2), ("twice", 5e-2)):
        run = federation(central_bare(k=40, scheme=scheme))  # type: ignore[arg-type]
        _, view = probed(run)
        evidence = {e.unit: e for e in run.defense.evidence(view)}
        for slot, some in answers_by_slot(view).items():
            seed, slopes = run.defense.sketch(*some)  # type: ignore[attr-defined]
            g = true_gradient(evidence[slot,], run)
            z = torch.stack(list(stein_directions(seed, N, len(slopes)))).double()
            assert float((z @ g - slopes).norm() / slopes.norm()) < tolerance


@pytest.mark.parametrize(
    ("options", "upload", "units"),
    [({}, "gradient", 4), ({"masks": "ring64"}, "gradient", 1), (EPOCH, "delta", 4),
     ({**EPOCH, "masks": "ring32"}, "delta", 1)],
)  # fmt: skip
@pytest.mark.parametrize("kind", all_but_nightly(["gradient", "local"], ["local"]))
def test_plain_evidence_is_a_noisy_gradient_at_public_weights(options, upload, units, kind):
    run = federation(central_bare(k=400, scheme="twice", **options), upload, Opt("sgd", 0.01))
    transcript, view = probed(run, kind=kind)
    pieces = run.defense.evidence(view)
    assert len(pieces) == units and sorted(s for e in pieces for s in e.unit) == sorted(victims(run))
    for evidence in pieces:
        g, estimate = true_gradient(evidence, run), flat(evidence.observed)
        assert abs(float(estimate @ g / (g @ g)) - 1) <= 4 * math.sqrt(2 / 800)
        assert units == 1 or same_tensors(next(view.exchanges()).request.params, evidence.params)
    own = tuple((slot.probe, data) for slot, data in victims(run).items() if slot.client == 0)
    curious = run.defense.evidence(transcript.view("client/1", own=own))
    # else the model moves along 2K directions, or the others' masks are in the way
    assert bool(curious) == (run.defense.level == "epoch" and not run.defense.sums)
    listener = run.defense.evidence(transcript.view("eavesdropper/1"))
    assert len(listener) == (units if units > 1 else 0)
