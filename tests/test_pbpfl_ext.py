"""Extended PBPFL: sums are exact, single uploads are noise, one shared mask bares differences (Feng et al., App. C)."""

from dataclasses import replace

import pytest
import torch
from observations import watched
from protocols import answers, flat, relative, started, true_gradient
from scipy import stats

from ppbench.base.errors import ProtocolError
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params, leaves, tree_map
from ppbench.defenses.pbpfl.perturbation import HEAD_WEIGHT, Surrogates
from ppbench.defenses.pbpfl.protocol import PBPFL, PBPFLExt
from ppbench.federation import secagg
from ppbench.federation.contract import Context
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import at_truth
from ppbench.federation.plan import Data, Local, Opt, Plan
from ppbench.federation.view import BEGUN, Transcript
from ppbench.federation.wire import SERVER, Slot
from ppbench.nets.net import net_spec

FAMILIES = ("g", "sigma", "beta")
SIZES = (40, 64, 100, 60)
BATCH = 6


@pytest.fixture
def federation(deal):
    """Return a maker of started federations over unequal shards, float64."""

    def made(defense=None, sizes=SIZES):
        spec = net_spec("mlp", (1, 8, 8), 10, {"hidden": "32"})
        plan = Plan(spec, len(sizes), Local("gradient", batch=16), "squared", Opt("sgd", 0.1))
        return started(defense or PBPFLExt(), plan, deal(sizes, torch.float64))

    return made


def batches(run: Federation) -> dict[Slot, Data]:
    return {Slot(0, c): Data(shard.x[:BATCH], shard.y[:BATCH]) for c, shard in run.shards.items()}


def uploads(transcript: Transcript) -> dict[int, Surrogates]:
    return answers(transcript, Surrogates)


def bare(run: Federation, transcript: Transcript, client: int, data: Data) -> Surrogates:
    """What the client computed before it masked: the basic scheme's upload for the same broadcast."""
    message = next(e.message for e in transcript.mail if e.sender == SERVER)
    ctx = Context(transcript.plan, run.round + 1, "probe-0", client, Seeds(0).generator("unused"))
    job = PBPFL().prepare(ctx, (), message, data)
    with torch.no_grad():
        return PBPFL().compute(transcript.plan, job)  # type: ignore[arg-type,no-any-return]


def true_mean(run: Federation, data: dict[Slot, Data]) -> Params:
    """The weighted mean of the clients' gradients at the true weights."""
    params, total = run.parties.server.params, sum(SIZES)
    parts = [(SIZES[slot.client] / total, true_gradient(run.plan, params, batch)) for slot, batch in data.items()]
    return {n: sum((share * value[n] for share, value in parts), torch.zeros(())) for n in params}


# -- sums --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("families", ["independent", "shared"])
@pytest.mark.parametrize("kappa", [1.0, 100.0])
def test_the_sum_of_uploads_is_the_sum_of_what_they_hide_and_recovers_the_mean(families, kappa, federation):
    """T6: the weighted mean of the surrogates, and the true mean gradient, to 1e-10."""
    run = federation(PBPFLExt(kappa=kappa, families=families))
    data = batches(run)
    transcript = run.probe(data)
    sent = uploads(transcript)
    assert sorted(sent) == [0, 1, 2, 3]
    assert all(leaf.dtype == torch.int64 for upload in sent.values() for leaf in leaves(upload))
    hidden = {c: bare(run, transcript, c, data[Slot(0, c)]) for c in sent}
    total = run.defense.total(list(sent.values()))  # type: ignore[attr-defined]
    for family in FAMILIES:
        weighted = sum(SIZES[c] / sum(SIZES) * flat(getattr(h, family)) for c, h in hidden.items())
        error, unit = (flat(getattr(total, family)) - weighted).abs().max(), 2.0 ** -run.defense.bits(family, 32)
        assert float(error) <= len(sent) * unit / 2 + 1e-15 * float(weighted.abs().max())
    server = next(s.state for s in transcript.states if s.party == SERVER and s.step != BEGUN)
    recovered = run.defense.recover(run.plan, server, total)  # type: ignore[attr-defined]
    assert relative(recovered, true_mean(run, data)) < 1e-10
    assert relative(tree_map(lambda t: -t, recovered), true_mean(run, data)) > 1


@pytest.mark.parametrize("kappa", [0.1, 10.0, 1000.0])
def test_every_kappa_of_the_grid_fits_the_fixed_point_and_loses_little(kappa):
    """2048 features: beta is too large for 48 fractional bits at any kappa, sigma from 10 and g from 100."""
    spec = net_spec("cnn", (3, 32, 32), 10)
    plan = Plan(spec, 2, Local("gradient", batch=4), "squared")
    g = torch.Generator().manual_seed(0)
    shards = {c: Data(torch.rand(4, 3, 32, 32, generator=g).double(), torch.eye(10)[:4].double()) for c in range(2)}
    run = started(PBPFLExt(kappa=kappa), plan, shards)
    transcript = run.probe({Slot(0, c): shard for c, shard in shards.items()})
    piece = run.defense.evidence(transcript.view("server/1"))[0]
    x, y = (torch.stack([getattr(shards[c], name) for c in (0, 1)]) for name in ("x", "y"))
    assert at_truth(piece, x, y) ** 0.5 < 1e-13 * max(1.0, kappa**2 / 100)
    hidden = bare(run, transcript, 0, shards[0])
    sizes = {f: max(float(v.abs().max()) for v in getattr(hidden, f).values()) for f in FAMILIES}
    assert {f for f, size in sizes.items() if size > 2.0**14} >= {"beta"} | ({"g"} if kappa >= 100 else set())


def non_zero(total: Surrogates, family: str, size: float) -> Surrogates:
    """The sum when one family's masks sum to noise of standard deviation `size`."""
    g = torch.Generator().manual_seed(0)
    noise = {n: size * torch.randn(v.shape, generator=g).double() for n, v in getattr(total, family).items()}
    return replace(total, **{family: {n: v + noise[n] for n, v in getattr(total, family).items()}})


@pytest.mark.parametrize("family", FAMILIES)
def test_masks_of_any_one_family_that_do_not_cancel_spoil_the_mean(family, federation):
    """T6: an error of more than 1e-2 for masks as large as a percent of what they hide; so all three must cancel."""
    run = federation(PBPFLExt(kappa=10.0))
    data = batches(run)
    transcript = run.probe(data)
    server = next(s.state for s in transcript.states if s.party == SERVER and s.step != BEGUN)
    defense: PBPFLExt = run.defense  # type: ignore[assignment]
    total = defense.total(list(uploads(transcript).values()))
    size = 0.05 * float(flat(getattr(total, family)).square().mean().sqrt())
    error = relative(defense.recover(run.plan, server, non_zero(total, family, size)), true_mean(run, data))
    assert error > 1e-2
    assert relative(defense.recover(run.plan, server, total), true_mean(run, data)) < 1e-10


# -- one upload --------------------------------------------------------------------------------------------------------
def test_one_upload_is_uniform_noise_and_so_is_a_difference_of_its_families(federation):
    run = federation(PBPFLExt(families="independent"))
    sent = uploads(run.probe(batches(run)))[0]
    words = {f: flat(getattr(sent, f)) for f in FAMILIES}
    views = [*words.values(), words["beta"] - words["g"], words["sigma"] - words["g"], words["beta"] - words["sigma"]]
    for value in views:
        assert stats.kstest(value.double().numpy() / 2**64 + 0.5, "uniform").pvalue > 1e-3
    # beta of the head is exactly zero before it is masked: even there nothing shows.
    head = sent.beta[HEAD_WEIGHT].flatten()
    assert len(set(head.tolist())) == len(head) and bool((head.double().abs() > 2.0**50).float().mean() > 0.9)


def test_a_mask_shared_by_the_families_leaves_their_differences_bare(federation):
    """Section 7(H): beta - g of one client, and sigma - g, to 1e-9; the same arithmetic on independent masks: noise."""
    for families, exposed in (("shared", True), ("independent", False)):
        run = federation(PBPFLExt(families=families))  # type: ignore[arg-type]
        data = batches(run)
        transcript = run.probe(data)
        sent, hidden = uploads(transcript)[1], bare(run, transcript, 1, data[Slot(0, 1)])
        share = SIZES[1] / sum(SIZES)
        for other in ("beta", "sigma"):
            seen = secagg.from_ring(flat(getattr(sent, other)) - flat(sent.g), 48) / share
            true = flat(getattr(hidden, other)) - flat(hidden.g)
            error = float((seen - true).norm() / true.norm())
            assert error < 1e-9 if exposed else error > 1e3
        alone = secagg.from_ring(flat(sent.g), 48) / share
        assert float((alone - flat(hidden.g)).norm() / flat(hidden.g).norm()) > 1e3


# -- evidence ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sizes", [SIZES, (50, 50, 50)])
def test_evidence_is_about_whole_cohorts_and_exact(sizes, federation):
    run = federation(sizes=sizes)
    view, victims = watched(run, batch=BATCH, count=2 * BATCH * len(sizes))
    evidence = view.defense.evidence(view)
    assert [e.unit for e in evidence] == list(victims.units)
    assert all(len(e.unit) == len(sizes) and e.channel == "sum" for e in evidence)
    for piece in evidence:
        truth = victims.truth(piece.unit)
        x, y = (t.unflatten(0, (len(sizes), BATCH)) for t in (truth.x, truth.y))
        assert at_truth(piece, x, y) < 1e-20
        # With unequal counts it matters whose batch is whose; with equal ones it does not, and all is one batch.
        assert (at_truth(piece, x.flip(0), y.flip(0)) < 1e-20) == (sizes != SIZES)
        assert (piece.params is None) == (sizes == SIZES)
    assert len(evidence) == 2 and len({id(e.simulate) for e in evidence}) == 1, (
        "attacks take victims of one model together"
    )


def test_a_cohort_that_is_not_whole_and_a_listener_are_given_nothing(federation):
    run = federation()
    transcript = run.probe(batches(run))
    for threat in ("eavesdropper/1", "client/1"):
        assert run.defense.evidence(transcript.view(threat)) == []
    part = replace(transcript, mail=tuple(e for e in transcript.mail if e.sender != 2))
    assert run.defense.evidence(part.view("server/1")) == []


# -- the protocol ------------------------------------------------------------------------------------------------------
def test_a_missing_client_ends_the_round(federation):
    run = federation()
    with pytest.raises(ProtocolError, match=r"^2 of 4 clients sent an upload; masks cancel only in everybody's sum\.$"):
        run.probe({slot: d for slot, d in batches(run).items() if slot.client > 1})


def test_values_beyond_the_fixed_point_end_the_round(federation):
    run = federation()
    data = batches(run)
    data[Slot(0, 1)] = Data(data[Slot(0, 1)].x * 1e4, data[Slot(0, 1)].y)
    with pytest.raises(ProtocolError, match="finite values below 16384"):
        run.probe(data)
    run = federation(PBPFLExt(fraction_bits=24))
    run.probe(data)
