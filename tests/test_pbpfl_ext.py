"""Extended PBPFL: sums are exact, single uploads are noise, one shared mask bares differences (Feng et al., App. C)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from ppbench.adversary.victims import choose_victims
from ppbench.base.autodiff import gradient
from ppbench.base.errors import ProtocolError
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params, leaves, tree_map
from ppbench.defenses.pbpfl.extended import PBPFLExt
from ppbench.defenses.pbpfl.perturbation import HEAD_WEIGHT, Surrogates
from ppbench.defenses.pbpfl.protocol import PBPFL
from ppbench.federation import secagg
from ppbench.federation.contract import Context
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import at_truth
from ppbench.federation.optim import Layout, Opt
from ppbench.federation.plan import Data, Local, Plan
from ppbench.federation.view import Transcript
from ppbench.federation.wire import SERVER, Slot
from ppbench.nets.net import initial, net_spec

FAMILIES = ("g", "sigma", "beta")
SIZES = (40, 64, 100, 60)
BATCH = 6


def federation(digits: Data, defense: PBPFL | None = None, sizes: tuple[int, ...] = SIZES) -> Federation:
    """A started federation over unequal shards, float64."""
    spec = net_spec("mlp", (1, 8, 8), 10, {"hidden": "32"})
    plan = Plan(spec, len(sizes), Local("gradient", batch=16), "squared", Opt("sgd", 0.1))
    ends = [sum(sizes[: client + 1]) for client in range(len(sizes))]
    parts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    shards = {c: Data(digits.x[p].double(), digits.y[p].double()) for c, p in enumerate(parts)}
    run = Federation(defense or PBPFLExt(), plan, shards, Seeds(0))
    run.start({n: p.double() for n, p in initial(spec, 1).items()})
    return run


def batches(run: Federation, probes: int = 1) -> dict[Slot, Data]:
    return {
        Slot(p, c): Data(shard.x[p * BATCH :][:BATCH], shard.y[p * BATCH :][:BATCH])
        for p in range(probes)
        for c, shard in run.shards.items()
    }


def uploads(transcript: Transcript, probe: int = 0) -> dict[int, Surrogates]:
    return {e.sender: e.message for e in transcript.mail if e.probe == probe and isinstance(e.message, Surrogates)}


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
    parts = []
    for slot, batch in data.items():
        ones = torch.ones(len(batch.x)).double()
        with torch.no_grad():
            found = gradient(lambda p, b=batch, w=ones: run.plan.objective(p, b.x, b.y, w), params)
        parts.append({n: SIZES[slot.client] / total * g for n, g in found.items()})
    return {n: sum((p[n] for p in parts), torch.zeros(())) for n in params}


def relative(a: Params, b: Params) -> float:
    layout = Layout.of(b)
    return float((layout.pack(a) - layout.pack(b)).norm() / layout.pack(b).norm())


def flat(params: Params) -> Tensor:
    return torch.cat([v.flatten() for v in params.values()])


# -- sums --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("families", ["independent", "shared"])
@pytest.mark.parametrize("kappa", [1.0, 100.0])
def test_the_sum_of_uploads_is_the_sum_of_what_they_hide_and_recovers_the_mean(
    families: Any, kappa: float, digits: Data
) -> None:
    """T6: the weighted mean of the surrogates, and the true mean gradient, to 1e-10."""
    run = federation(digits, PBPFLExt(kappa=kappa, families=families))
    data = batches(run)
    transcript = run.probe(data)
    sent = uploads(transcript)
    assert sorted(sent) == [0, 1, 2, 3]
    assert all(leaf.dtype == torch.int64 for upload in sent.values() for leaf in leaves(upload))
    hidden = {c: bare(run, transcript, c, data[Slot(0, c)]) for c in sent}
    total = run.defense.total(list(sent.values()))  # type: ignore[attr-defined]
    for family in FAMILIES:
        weighted = {
            n: sum((SIZES[c] / sum(SIZES) * getattr(h, family)[n] for c, h in hidden.items()), torch.zeros(()))
            for n in getattr(total, family)
        }
        error = (flat(getattr(total, family)) - flat(weighted)).abs().max()
        unit = 2.0 ** -run.defense.bits(family, 32)  # type: ignore[attr-defined]
        assert float(error) <= len(sent) * unit / 2 + 1e-15 * float(flat(weighted).abs().max())
    server = next(s.state for s in transcript.states if s.party == SERVER)
    recovered = run.defense.recover(run.plan, server, total)  # type: ignore[attr-defined]
    assert relative(recovered, true_mean(run, data)) < 1e-10
    assert relative(tree_map(lambda t: -t, recovered), true_mean(run, data)) > 1


@pytest.mark.parametrize("kappa", [0.1, 10.0, 1000.0])
def test_every_kappa_of_the_grid_fits_the_fixed_point_and_loses_little(kappa: float) -> None:
    """2048 features: beta is too large for 48 fractional bits at any kappa, sigma from 10 and g from 100."""
    spec = net_spec("cnn", (3, 32, 32), 10)
    plan = Plan(spec, 2, Local("gradient", batch=4), "squared")
    g = torch.Generator().manual_seed(0)
    shards = {c: Data(torch.rand(4, 3, 32, 32, generator=g).double(), torch.eye(10)[:4].double()) for c in range(2)}
    params = {n: p.double() for n, p in initial(spec, 1).items()}
    run = Federation(PBPFLExt(kappa=kappa), plan, shards, Seeds(0))
    run.start(params)
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
    spoilt = {
        n: v + size * torch.randn(v.shape, generator=g, dtype=torch.float64) for n, v in getattr(total, family).items()
    }
    return replace(total, **{family: spoilt})


@pytest.mark.parametrize("family", FAMILIES)
def test_masks_of_any_one_family_that_do_not_cancel_spoil_the_mean(family: str, digits: Data) -> None:
    """T6: an error of more than 1e-2 for masks as large as a percent of what they hide; so all three must cancel."""
    run = federation(digits, PBPFLExt(kappa=10.0))
    data = batches(run)
    transcript = run.probe(data)
    server = next(s.state for s in transcript.states if s.party == SERVER)
    defense: PBPFLExt = run.defense  # type: ignore[assignment]
    total = defense.total(list(uploads(transcript).values()))
    size = 0.05 * float(flat(getattr(total, family)).square().mean().sqrt())
    error = relative(defense.recover(run.plan, server, non_zero(total, family, size)), true_mean(run, data))
    assert error > 1e-2
    assert relative(defense.recover(run.plan, server, total), true_mean(run, data)) < 1e-10


# -- one upload --------------------------------------------------------------------------------------------------------
def test_one_upload_is_uniform_noise_and_so_is_a_difference_of_its_families(digits: Data) -> None:
    run = federation(digits, PBPFLExt(families="independent"))
    sent = uploads(run.probe(batches(run)))[0]
    words = {f: flat(getattr(sent, f)) for f in FAMILIES}
    views = [*words.values(), words["beta"] - words["g"], words["sigma"] - words["g"], words["beta"] - words["sigma"]]
    for found in views:
        assert stats.kstest(found.double().numpy() / 2**64 + 0.5, "uniform").pvalue > 1e-3
    # beta of the head is exactly zero before it is masked: even there nothing shows.
    head = sent.beta[HEAD_WEIGHT].flatten()
    assert len(set(head.tolist())) == len(head) and bool((head.double().abs() > 2.0**50).float().mean() > 0.9)


def test_a_mask_shared_by_the_families_leaves_their_differences_bare(digits: Data) -> None:
    """Section 7(H): beta - g of one client, and sigma - g, to 1e-9; the same arithmetic on independent masks: noise."""
    for families, exposed in (("shared", True), ("independent", False)):
        run = federation(digits, PBPFLExt(families=families))  # type: ignore[arg-type]
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
def test_evidence_is_about_whole_cohorts_and_exact(sizes: tuple[int, ...], digits: Data) -> None:
    run = federation(digits, sizes=sizes)
    victims = choose_victims(run.shards, "server/1", BATCH, 2 * BATCH * len(sizes), Seeds(0), sums=True)
    view = run.probe(victims.data).view("server/1")
    found = view.defense.evidence(view)
    assert [e.unit for e in found] == list(victims.units)
    assert all(len(e.unit) == len(sizes) and e.channel == "sum" for e in found)
    for piece in found:
        truth = victims.truth(piece.unit)
        x, y = (t.unflatten(0, (len(sizes), BATCH)) for t in (truth.x, truth.y))
        assert at_truth(piece, x, y) < 1e-20
        # With unequal counts it matters whose batch is whose; with equal ones it does not, and all is one batch.
        assert (at_truth(piece, x.flip(0), y.flip(0)) < 1e-20) == (sizes != SIZES)
        assert (piece.params is None) == (sizes == SIZES)
    assert len(found) == 2 and len({id(e.simulate) for e in found}) == 1, "attacks take victims of one model together"


def test_a_cohort_that_is_not_whole_and_a_listener_are_given_nothing(digits: Data) -> None:
    run = federation(digits)
    transcript = run.probe(batches(run))
    for threat in ("eavesdropper/1", "client/1"):
        assert run.defense.evidence(transcript.view(threat)) == []
    part = replace(transcript, mail=tuple(e for e in transcript.mail if e.sender != 2))
    assert run.defense.evidence(part.view("server/1")) == []


# -- the protocol ------------------------------------------------------------------------------------------------------
def test_a_missing_client_ends_the_round(digits: Data) -> None:
    run = federation(digits)
    with pytest.raises(ProtocolError, match=r"^2 of 4 clients sent an upload; masks cancel only in everybody's sum\.$"):
        run.probe({slot: d for slot, d in batches(run).items() if slot.client > 1})


def test_values_beyond_the_fixed_point_end_the_round(digits: Data) -> None:
    run = federation(digits)
    data = batches(run)
    data[Slot(0, 1)] = Data(data[Slot(0, 1)].x * 1e4, data[Slot(0, 1)].y)
    with pytest.raises(ProtocolError, match="finite values below 16384"):
        run.probe(data)
    run = federation(digits, PBPFLExt(fraction_bits=24))
    run.probe(data)
