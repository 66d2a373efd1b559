"""Invariants of SPN, DP, DP-SGD and PPDL that their papers state or that follow from their definitions."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from observations import watched
from scipy.optimize import brentq
from scipy.stats import norm, truncnorm

from ppbench.base.errors import ProtocolError
from ppbench.base.seeds import Seeds
from ppbench.base.tree import leaves, tree_map
from ppbench.defenses.dp import DP
from ppbench.defenses.dp_sgd import DPSGD
from ppbench.defenses.none import NoDefense
from ppbench.defenses.ppdl import PPDL, Bitmap, Indexed, cut_precision
from ppbench.defenses.spn import SPN, polarization
from ppbench.federation.contract import Context, Job
from ppbench.federation.evidence import at_truth
from ppbench.federation.plan import Batch, Data, Layout, Local, Plan, poisson
from ppbench.federation.wire import Slot, Update
from ppbench.nets.net import initial, net_spec

ALPHAS = (1e-4, 1e-3, 0.01, 0.1, 0.2, 0.3, 0.4, 0.5)


def context(plan, party=0, round_=1):
    return Context(plan, round_, "real", party, torch.Generator(), Seeds(0).secret("party"))


def spn_gradient(plan, data: Data, alpha2: float, dtype=torch.float64, seed: int = 0) -> dict[str, torch.Tensor]:
    plan = replace(plan, local=Local("gradient", batch=len(data.x)))
    params = {n: p.to(dtype) for n, p in initial(plan.spec, 1).items()}
    defense = SPN(alpha2)
    ctx = Context(plan, 1, "real", 0, torch.Generator(), Seeds(seed).secret("party"))
    secret = tree_map(lambda t: t.to(dtype), defense.init_client(ctx, params))
    batch = Batch(data.x[None].to(dtype), data.y[None].to(dtype), torch.ones(1, len(data.x), dtype=dtype))
    return defense.compute(plan, Job(params, batch, torch.tensor(0.1), secret, ()))[0]


@pytest.mark.parametrize("n", [1, 4])
def test_public_head_gradient_is_the_same_for_every_alpha2_and_every_secret(plan, digits, n):
    grads = [spn_gradient(plan, Data(digits.x[:n], digits.y[:n]), a, seed=s) for s, a in enumerate(ALPHAS)]
    for name in ("head.weight", "head.bias"):
        assert all(torch.equal(grads[0][name], g[name]) for g in grads)
    assert not torch.equal(grads[0]["features.0.weight"], grads[-1]["features.0.weight"])


def test_backbone_gradient_is_cross_entropy_plus_alpha2_times_polarization(plan, digits):
    data = Data(digits.x[:4], digits.y[:4])
    clean, one, half = (spn_gradient(plan, data, a) for a in (0.0, 1.0, 0.5))
    for name in clean:
        torch.testing.assert_close(half[name] - clean[name], 0.5 * (one[name] - clean[name]), rtol=1e-10, atol=1e-14)


@given(*(st.lists(one, min_size=8, max_size=8) for one in (st.floats(-50, 50), st.sampled_from([-1.0, 1.0]))))
def test_polarization_bounds_the_hamming_distance(v, code):
    """Lemma 5.5: the loss is at least the number of bits whose sign is wrong."""
    v, t = torch.tensor([v]), torch.tensor([code])
    assert float(polarization(v, t)) >= float((torch.where(v > 0, 1.0, -1.0) != t).sum()) - 1e-4


def test_the_upload_holds_public_weights_only_and_secrets_stay(federate, plan):
    run = federate(SPN())
    before = [leaf.clone() for leaf in leaves(run.parties.clients)]
    for letter in watched(run)[0].mail:
        if isinstance(letter.message, Update):
            assert set(letter.message.params) == set(run.parties.server.params)
            assert letter.nbytes == 4 * plan.net.parameter_count
    run.run(1)
    assert not all(map(torch.equal, before, leaves(run.parties.clients))), "the secret head trains"
    assert all(torch.equal(c.code, b) for c, b in zip(run.parties.clients, before[2::6], strict=True))
    assert not torch.equal(before[0], before[6]) and set(before[2].unique().tolist()) == {-1.0, 1.0}


def test_phi_tap_reads_what_the_convolutions_hand_over(digits):
    plan = Plan(net_spec("alexnet", (3, 32, 32), 10), 2, Local("gradient", batch=1))
    ctx = context(plan)
    params = initial(plan.spec, 0)
    assert SPN(phi_tap="conv_flat").init_client(ctx, params).head["weight"].shape == (64, 4096)
    assert SPN().init_client(ctx, params).head["weight"].shape == (64, 256)


def test_the_server_takes_the_unweighted_mean(federate, plan):
    """Alg. 2, though client 3 has fewer examples."""
    run, rng = federate(SPN()), torch.Generator().manual_seed(0)
    server = run.parties.server
    ups = {c: Update({n: torch.randn(p.shape, generator=rng) for n, p in server.params.items()}) for c in (0, 3)}
    after = run.defense.aggregate(context(run.plan, party=-1), server, ups)
    for name, value in server.params.items():
        torch.testing.assert_close(after.params[name], value - (ups[0].params[name] + ups[3].params[name]) / 2)


def test_plain_evidence_is_exact_for_none_and_not_for_spn(federate):
    for defense, exact in ((NoDefense(), True), (SPN(alpha2=0.5), False)):
        view, victims = watched(federate(defense), batch=4, count=16)
        for evidence in view.defense.evidence(view):
            truth = victims.truth(evidence.unit)
            residual = at_truth(evidence, truth.x[None], truth.y[None])
            assert (residual < 1e-10) == exact, (defense.name, residual)


@pytest.mark.parametrize(("law", "factor"), [("gaussian", 1.0), ("laplace", math.sqrt(2))])
def test_dp_noise_has_the_stated_scale(federate, law, factor):
    victims = {}
    for defense in (NoDefense(), DP(0.05, law)):
        run = federate(defense)
        view, _ = watched(run)
        victims[defense.name] = [Layout.of(e.observed).pack(e.observed) for e in view.defense.evidence(view)]
    noise = torch.cat(victims["dp"]) - torch.cat(victims["none"])
    assert float(noise.std()) == pytest.approx(0.05 * factor, rel=0.03)
    assert abs(float(noise.mean())) < 4 * 0.05 * factor / math.sqrt(len(noise))
    kurtosis = float(((noise / noise.std()) ** 4).mean())
    assert kurtosis == pytest.approx(3 if law == "gaussian" else 6, rel=0.15)
    assert defense.noise(replace(run.plan, local=Local("gradient"))).std == pytest.approx(0.05 * factor)


@settings(max_examples=15)
@given(n=st.integers(2, 6), clip=st.floats(0.01, 5), drop=st.integers(0, 5))
def test_clipped_sum_moves_by_at_most_clip_when_an_example_leaves(n, clip, drop):
    plan = Plan(net_spec("dlnet", (1, 8, 8), 10), 2)
    params = initial(plan.spec, 0)
    generator = torch.Generator().manual_seed(n)
    x = torch.rand(n, 1, 8, 8, generator=generator)
    y = torch.nn.functional.one_hot(torch.randint(0, 10, (n,), generator=generator), 10).float()
    w = torch.ones(n)
    defense = DPSGD(clip=clip)
    whole = defense.clipped_sum(plan, params, Batch(x, y, w))
    w[drop % n] = 0
    less = defense.clipped_sum(plan, params, Batch(x, y, w))
    layout = Layout.of(params)
    assert float((layout.pack(whole) - layout.pack(less)).norm()) <= clip * (1 + 1e-5)


def test_poisson_takes_each_example_with_the_stated_rate_and_pads_with_weight_zero():
    data = Data(torch.arange(50.0)[:, None], torch.ones(50, 1))
    batch = poisson(data, 400, 0.2, Seeds(0).secret("party"))
    assert float(batch.w.sum() / 400) == pytest.approx(10, rel=0.05)
    assert float(batch.w.sum(1).var()) == pytest.approx(50 * 0.2 * 0.8, rel=0.2)
    for x, w in zip(batch.x, batch.w, strict=True):
        kept = x[w > 0].flatten().tolist()
        assert len(set(kept)) == len(kept)


def test_without_noise_and_with_a_wide_clip_dp_sgd_is_the_batch_gradient(federate, shards):
    results = []
    for defense in (NoDefense(), DPSGD(noise_multiplier=0.0, clip=1e6)):
        view, _ = watched(federate(defense), batch=4, count=16)
        results.append(view.defense.evidence(view)[0].observed)
    for name in results[0]:
        torch.testing.assert_close(results[0][name], results[1][name], rtol=1e-4, atol=1e-6)


def test_epsilon_falls_with_noise_and_rises_with_rounds(plan):
    weak, strong = DPSGD(0.5).guarantee(plan, 140, 10), DPSGD(2.0).guarantee(plan, 140, 10)
    assert weak[0] > strong[0] > 0 and weak[1] == pytest.approx(1 / 140)
    assert DPSGD(2.0).guarantee(plan, 140, 20)[0] > strong[0]
    assert DPSGD(0.0).guarantee(plan, 140, 10) is None


def test_epsilon_of_the_full_batch_gaussian_is_the_known_one(plan):
    """One full-batch step is a Gaussian mechanism: RDP may exceed its exact epsilon, not much and never less."""
    mu = 1 / 5.0
    exact = brentq(lambda e: norm.cdf(mu / 2 - e / mu) - math.exp(e) * norm.cdf(-mu / 2 - e / mu) - 0.01, 0, 5)
    epsilon, delta = DPSGD(5.0).guarantee(replace(plan, local=Local("gradient", batch=100)), 100, 1)
    assert delta == 0.01
    assert exact <= epsilon <= 2.5 * exact


@settings(max_examples=30)
@given(theta=st.floats(0.001, 1), seed=st.integers(0, 5), size=st.integers(1, 300))
def test_ppdl_keeps_exactly_k_largest_entries_unchanged(theta, seed, size):
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    like = {"a": values[: size // 2], "b": values[size // 2 :]}
    defense = PPDL(theta)
    message = defense.upload(context(None), (), like)
    back = torch.cat(list(defense.decode(message, like).values()))
    kept = max(1, round(theta * size))
    assert len(message.value) == kept == int(sum(m.sum() for m in defense.support(message, like).values()))
    chosen = back != 0
    assert torch.equal(back[chosen], values[chosen])
    if kept < size:
        assert values[chosen].abs().min() >= values[~chosen].abs().max()
    size_of = sum(t.numel() * t.element_size() for t in leaves(message))
    assert size_of == min(8 * kept, 4 * kept + math.ceil(size / 8))


def test_sigma_of_ppdl_is_that_of_dp(federate):
    """With all entries sent, gradients and weight changes are those of `dp`, bit by bit; chosen ones too."""
    dp, whole, part = (federate(defense) for defense in (DP(0.1), PPDL(1.0, 0.1), PPDL(0.3, 0.1)))
    data = dict(zip((Slot(0, 0), Slot(1, 1)), dp.shards.values(), strict=False))
    for kind in ("gradient", "local"):
        views = [run.probe(data, kind).view("server/1") for run in (dp, whole, part)]
        for noisy, same, chosen in zip(*(view.exchanges() for view in views), strict=True):
            like = noisy.request.params
            kept = part.defense.decode(chosen.answer, like)
            for name, value in noisy.answer.params.items():
                assert torch.equal(whole.defense.decode(same.answer, like)[name], value)
                assert torch.equal(kept[name], torch.where(kept[name] != 0, value, 0.0))


def test_the_law_of_ppdl_is_told_where_it_is_known(plan):
    gradient, delta = (replace(plan, local=Local(upload)) for upload in ("gradient", "delta"))
    assert PPDL(0.3, 0.1).noise(gradient) == DP(0.1).noise(gradient) == PPDL(0.3, 0.1, "upload").noise(gradient)
    assert PPDL(0.3, 0.1).noise(delta) is None
    assert PPDL(0.3, 0.1, "upload").noise(delta) == PPDL(0.3, 0.1, "upload").noise(gradient)
    assert PPDL(0.3).noise(gradient) is None and PPDL(0.3, 0.0, "upload").noise(gradient) is None


@given(cut=st.floats(0.01, 8))
def test_an_unsent_entry_tells_what_the_cut_leaves_of_the_variance(cut):
    assert cut_precision(cut) == pytest.approx(1 - truncnorm(-cut, cut).var(), abs=1e-9)


def test_unsent_entries_weigh_by_the_least_sent_value_where_the_choice_was_among_noisy_ones(plan):
    plan = replace(plan, local=Local("gradient"))
    like = {"a": torch.randn(1000, generator=torch.Generator().manual_seed(0))}
    for defense, expected in ((PPDL(0.3, 1.0), None), (PPDL(0.3, 1.0, "upload"), 0.0), (PPDL(0.3), 0.0)):
        message = defense.upload(context(plan), (), like)
        cut = float(message.value.abs().min())
        unsent = cut_precision(cut) if expected is None else expected
        weight = defense.precision(plan, message, like)["a"]
        sent = defense.support(message, like)["a"] == 1
        assert bool((weight[sent] == 1).all()) and torch.allclose(weight[~sent], torch.tensor(unsent))
    assert cut_precision(1e-9) == 1.0 and cut_precision(50.0) == 0.0


def test_noise_on_the_upload_is_on_sent_entries_only():
    like = {"a": torch.linspace(1, 2, 10_000)}
    defense = PPDL(0.5, sigma=0.1, noise_on="upload")
    message = defense.upload(context(None), (), like)
    back = defense.decode(message, like)["a"]
    error = (back - like["a"])[5000:]
    assert float(error.std()) == pytest.approx(0.1, rel=0.05)
    assert not back[:5000].any()


@pytest.mark.parametrize(
    "broken",
    [
        Indexed(torch.tensor([0, 10**6]).int(), torch.ones(2)),
        Indexed(torch.tensor([3, 3]).int(), torch.ones(2)),
        Indexed(torch.tensor([-1, 2]).int(), torch.ones(2)),
        Indexed(torch.tensor([1, 2]).int(), torch.ones(3)),
        Bitmap(torch.zeros(3, dtype=torch.uint8), torch.ones(2)),
    ],
)
def test_a_malformed_upload_names_the_client(federate, broken):
    run = federate(PPDL())
    with pytest.raises(ProtocolError, match="Client 3"):
        run.defense.aggregate(context(run.plan, -1), run.parties.server, {3: broken})
