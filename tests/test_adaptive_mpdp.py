"""MP-DP against who knows that Psi and Phi carry no noise: gradients, labels, weights and the mask (S1, C1, C2)."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from daily import every_third
from observations import scored, seeded, watched
from protocols import relative, true_gradient, weights

from ppbench.adversary.attack import Guess
from ppbench.adversary.victims import Victims
from ppbench.attacks.adaptive.mpdp import (
    AdaptiveMPDP,
    MPDPHistogram,
    canonical_scales,
    histograms,
    rebuilt_gradient,
    sent_share,
    single_labels,
)
from ppbench.attacks.adaptive.perturbed import noiseless_moments
from ppbench.attacks.labels import LabelRecovery
from ppbench.attacks.reconstruction.analytic import AnalyticInversion
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params, tree_map
from ppbench.defenses.mpdp.expansion import expanded, fold
from ppbench.defenses.mpdp.model_perturbation import tree_norm
from ppbench.defenses.mpdp.protocol import MPCDP, MPDP, MPDPH, MPDPNaive
from ppbench.defenses.none import NoDefense
from ppbench.defenses.pbpfl.perturbation import exchanges, mask, multiply
from ppbench.federation.contract import Defense
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import at_truth
from ppbench.federation.plan import Data, Local, Plan
from ppbench.federation.view import Exchange, View
from ppbench.federation.wire import SERVER
from ppbench.nets.channels import channels_of
from ppbench.nets.net import NetSpec, build, initial, net_spec
from ppbench.questions.labels import score_labels
from ppbench.testing.small_federation import all_digits

CLIENTS = 4
BARE = net_spec("mlp", (1, 8, 8), 10, {"hidden": "64,64", "bias": False})
DEEP = net_spec("mlp", (1, 8, 8), 10, {"hidden": 32, "layers": 5, "bias": False})
CNN = net_spec("cnn", (1, 8, 8), 10, {"widths": "8,8", "bias": False})
DENSE = net_spec("densenet", (1, 8, 8), 10, {"growth": 4, "layers": 2, "bias": False})
RESNET = net_spec("resnet20", (1, 8, 8), 10, {"head_bias": False})
RESNET_B = net_spec("resnet20", (1, 8, 8), 10, {"head_bias": False, "shortcut": "B"})
UNMASKED = [MPDP(), MPDP(gamma="scalar", clip="none"), MPDPNaive(), MPCDP()]
IDS = ["mpdp", "mpdp-scalar", "mp_dp_naive", "mp_cdp"]
CLIPS = ["seen", "oracle", "none"]


def probed(
    defense: Defense, spec: NetSpec = BARE, batch: int = 1, count: int = 8, threat: str = "server/1"
) -> tuple[View, Victims]:
    x, y = all_digits().x.split(64), all_digits().y.split(64)
    data = {c: Data(x[c].clone(), y[c].clone()) for c in range(CLIENTS)}
    fed = Federation(defense, Plan(spec, CLIENTS, Local("gradient", batch=32), loss="squared"), data, Seeds(0))
    fed.start(initial(spec, 1))
    return watched(fed, threat, batch, count)


def hits(victims: Victims, guesses: Sequence[Guess]) -> float:
    scores = score_labels(victims, guesses).victims
    return sum(s.label for s in scores) / len(scores)


def silence(view: View, change: object) -> View:
    """Return the view with every client's letter passed through `change`."""
    mail = tuple(e if e.sender == SERVER else replace(e, message=change(e.message)) for e in view.mail)
    return replace(view, mail=mail)


# -- S1: the gradient of one example, rebuilt ------------------------------------------------------------------------
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("defense", [MPDP, MPDPNaive, MPCDP])
def test_by_what_factor_an_example_was_clipped_is_told_by_itself(defense, clip):
    """From Psi and Phi alone; of mp_cdp, whose server does the oracle's clipping, clients send all of it."""
    for bound in (0.02, 1.0, 1e4):
        view, victims = probed(defense(bound=bound, clip=clip), count=4)
        for e in exchanges(view):
            server, sent = view.state_at(e), sent_share(view, e)
            true = true_gradient(view.plan, server.params, victims.truth((e.slot,)))
            whole = view.defense.recover(view.plan, server, replace(e.answer, g=rebuilt_of(view, e)))
            assert relative({n: v / (sent * bound) for n, v in whole.items()}, true) < 1e-9
            if clip == "none" or (clip, defense) == ("oracle", MPCDP) or bound == 1e4:
                assert sent == pytest.approx(1 / bound, rel=1e-9)
            elif bound == 0.02:
                size = tree_norm(rebuilt_of(view, e) if clip == "seen" else whole) / (1 if clip == "seen" else bound)
                assert float(size) == pytest.approx(1, rel=1e-9) and sent < 1 / bound


def rebuilt_of(view: View, exchange: Exchange) -> Params:
    return rebuilt_gradient(view.plan, exchange.answer, exchange.request.params)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("defense", [MPCDP, MPDP, MPDPH])
def test_batches_are_explained_whatever_was_clipped(defense, clip):
    """Exact but where each client's factor is unknown: the oracle's, of sums; else directions are compared."""
    if (defense, clip) == (MPDPH, "oracle"):
        return
    for bound in (0.05, 1e4):
        view, victims = probed(defense(bound=bound, clip=clip), batch=2, count=2 * CLIENTS)
        for one in AdaptiveMPDP().evidence(view):
            truth = victims.truth(one.unit)
            x, y = (t.unflatten(0, (len(one.unit), -1)) for t in (truth.x, truth.y))
            assert at_truth(one, x, y) < 1e-14
            tail = tree_map(lambda t: t * 1.5, one.simulate(x.double(), y.double()))
            known = defense is not MPCDP and clip == "seen"
            assert not known or float(one.discrepancy(tail)) > 1e-3  # its size is simulated too


def test_a_clipped_label_under_one_coefficient_is_guessed_by_brightness():
    """Two thirds on digits, where one in ten is chance."""
    view, victims = probed(MPDP(gamma="scalar"), count=32)
    assert hits(victims, MPDPHistogram().run(view, victims.challenges(), seeded())) > 0.4


@pytest.mark.parametrize(
    "spec", every_third([BARE, DEEP, CNN, RESNET, RESNET_B, DENSE]), ids=lambda s: f"{s.model}-{dict(s.options)}"
)
def test_the_exact_gradient_of_one_example_is_rebuilt(spec):
    """U8: below 1e-10 in float64 (spec: 2.6e-15 for an MLP-5, 2.7e-14 for ResNet20), whatever noise was added."""
    view, victims = probed(MPDP(epsilon=0.1, kappa=10.0), spec, count=4)
    evidence = AdaptiveMPDP().evidence(view)
    assert len(evidence) == 4
    for one in evidence:
        state = next(view.state_at(e) for e in exchanges(view) if (e.slot,) == one.unit)
        assert one.params is state.params
        true = true_gradient(view.plan, state.params, victims.truth(one.unit))
        assert relative(one.observed, true) < 1e-10
    noisy = view.defense.evidence(view)[0]
    assert relative(noisy.observed, true_gradient(view.plan, noisy.params, victims.truth(noisy.unit))) > 1


@pytest.mark.parametrize("defense", [MPDP(), MPDPNaive(), MPCDP(), MPDP(bound=37.0)], ids=repr)
@pytest.mark.parametrize("spec", [BARE, CNN], ids=lambda s: s.model)
def test_a_listener_rebuilds_the_gradient_of_an_ordinary_network(defense, spec):
    """No state and no data: transitional layers fold away, and most of the mask comes off with the head's columns."""
    view, victims = probed(defense, spec, count=4, threat="eavesdropper/1")
    assert not view.states
    for one in AdaptiveMPDP().evidence(view):
        assert set(one.params) == set(view.plan.net.names)
        assert relative(one.observed, true_gradient(view.plan, one.params, victims.truth(one.unit))) < 1e-9


def test_the_rebuilt_gradient_owes_nothing_to_the_noisy_one():
    view, _ = probed(MPDP(), count=4)
    blind = silence(view, lambda m: replace(m, g={n: torch.full_like(v, torch.nan) for n, v in m.g.items()}))
    attack = AdaptiveMPDP()
    for a, b in zip(attack.evidence(view), attack.evidence(blind), strict=True):
        assert relative(a.observed, b.observed) == 0


@pytest.mark.parametrize("threat", ["server/1", "eavesdropper/1"])
@pytest.mark.parametrize("defense", every_third(UNMASKED), ids=IDS)
def test_every_image_and_label_of_one_example_is_read(defense, threat):
    """Spec: 309 to 312 dB whatever epsilon; the scorer stops at 100. The noisy gradient alone gives little."""
    view, victims = probed(defense, count=4, threat=threat)
    attack = AdaptiveMPDP()
    scores = scored(victims, attack.run(view, victims.challenges(), seeded()))
    assert all(psnr > 99 and label for psnr, label in scores)
    for one in attack.evidence(view):
        truth = victims.truth(one.unit)
        assert at_truth(one, truth.x[None], truth.y[None]) < 1e-18
    if defense.noise_variance(view.plan, None):
        plain = scored(victims, AnalyticInversion().run(view, victims.challenges(), seeded()))
        assert sorted(psnr for psnr, _ in plain)[2] < 20


@pytest.mark.nightly
def test_batches_are_matched_with_what_carries_no_noise():
    """Over ten seeds half of the images come to 21 dB and more; of noise none comes to 9."""
    view, victims = probed(MPDP(epsilon=1.0), batch=2, count=6)
    attack = AdaptiveMPDP()
    for one in attack.evidence(view):
        truth = victims.truth(one.unit)
        assert one.params is None
        assert at_truth(one, truth.x[None], truth.y[None]) < 1e-18
    scores = scored(victims, attack.run(view, victims.challenges(), seeded()))
    assert all(label for _, label in scores)
    assert sorted(psnr for psnr, _ in scores)[3] > 15


@pytest.mark.nightly
def test_null_noise_instead_of_surrogates_gives_no_image():
    g = seeded(9)

    def drown(message: object) -> object:
        return tree_map(lambda t: t.std() * torch.randn(t.shape, generator=g, dtype=t.dtype), message)

    for batch in (1, 2):
        view, victims = probed(MPDP(), batch=batch, count=4)
        scores = scored(victims, AdaptiveMPDP(budget=30).run(silence(view, drown), victims.challenges(), seeded()))
        assert max(psnr for psnr, _ in scores) < 12
        view, victims = probed(MPDP(), batch=batch, count=40)
        guesses = MPDPHistogram().run(silence(view, drown), victims.challenges(), seeded())
        assert hits(victims, guesses) < 0.5


# -- the hardened variant --------------------------------------------------------------------------------------------
def test_nothing_of_one_client_is_rebuilt_from_masked_surrogates():
    """U8's other half: mpdp_h. A client's ring words are noise, and the sums are no single example's."""
    view, victims = probed(MPDPH(), count=CLIENTS)
    assert single_labels(view) == {}
    (unit,) = victims.units
    sent = {e.slot: e for e in exchanges(view)}
    for slot in unit:
        words = sent[slot].answer
        lone = replace(
            words,
            sigma={n: v.double() * 2.0**-48 * CLIENTS for n, v in words.sigma.items()},
            beta={n: v.double() * 2.0**-48 * CLIENTS for n, v in words.beta.items()},
        )
        for upload in (lone, view.defense.mean([e.answer for e in sent.values()])):
            recovered = rebuilt_gradient(view.plan, upload, sent[slot].request.params)
            state = view.state_at(sent[slot])
            exact = view.defense.recover(view.plan, state, replace(upload, g=recovered))
            assert relative(exact, true_gradient(view.plan, state.params, victims.data[slot])) > 0.3
    moments = noiseless_moments(view.plan, lone, sent[unit[-1]].request.params)
    shares = (moments.labels / moments.labels.sum()).tolist()
    assert max(abs(s - round(s)) for s in shares) > 1e-3  # no one-hot label


def test_the_cohorts_sums_carry_no_noise_either():
    """Secure aggregation, not privacy: the sums are those of a batch as large as the cohort."""
    view, victims = probed(MPDPH(), count=2 * CLIENTS)
    attack = AdaptiveMPDP()
    for one in attack.evidence(view):
        truth = victims.truth(one.unit)
        assert at_truth(one, truth.x.unflatten(0, (CLIENTS, -1)), truth.y.unflatten(0, (CLIENTS, -1))) < 1e-15
    assert hits(victims, MPDPHistogram().run(view, victims.challenges(), seeded())) >= 0.8
    missing = replace(view, mail=tuple(e for e in view.mail if e.sender != 1))
    assert attack.evidence(missing) == []
    assert histograms(missing) == {}


# -- the label histogram ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("defense", every_third(UNMASKED), ids=IDS)
@pytest.mark.parametrize("spec", [BARE, CNN], ids=lambda s: s.model)
def test_the_label_of_one_example_is_exact(defense, spec):
    for threat in ("server/1", "eavesdropper/1"):
        view, victims = probed(defense, spec, threat=threat)
        assert hits(victims, MPDPHistogram().run(view, victims.challenges(), seeded())) == 1


@pytest.mark.parametrize("spec", [BARE, RESNET], ids=lambda s: s.model)
def test_the_weighted_histogram_is_exact_at_any_batch(spec):
    """Spec: 1e-13. A skewed batch of 21; zeros are zeros."""
    view, victims = probed(MPDP(epsilon=0.1), spec, batch=21, count=21)
    (share,) = histograms(view).values()
    exchange, data = exchanges(view)[0], victims.truth(victims.units[0])
    params = {n: v.double() for n, v in exchange.request.params.items()}
    alpha = expanded(spec).net.features(params, data.x.double()).sum(1)
    expected = (alpha[:, None] * data.y).sum(0) / alpha.sum()
    torch.testing.assert_close(share, expected, rtol=0, atol=1e-11)
    assert torch.equal(share > 0, data.y.sum(0) > 0)


def test_other_defenses_and_one_coefficient_for_all_classes_are_answered_as_label_recovery_does():
    for defense in (NoDefense(), MPDP(gamma="scalar")):
        view, victims = probed(defense, batch=4)
        first, plain = (a.run(view, victims.challenges(), seeded()) for a in (MPDPHistogram(), LabelRecovery()))
        assert [g.y.tolist() for g in first] == [g.y.tolist() for g in plain]


# -- C2: transitional layers hide nothing ----------------------------------------------------------------------------
@pytest.mark.parametrize("spec", [DEEP, CNN, DENSE, RESNET, RESNET_B], ids=lambda s: f"{s.model}-{dict(s.options)}")
def test_folded_and_unmasked_weights_have_the_true_canonical_form(spec):
    """Spec: 1e-16 (weights), 5e-15 (function)."""
    made, params = expanded(spec), weights(spec)
    scales, r = made.laws.draw(Seeds(2).secret("party")), torch.randn(10, generator=seeded(3)).double()
    sent = mask(multiply(made.full(params), made.channels.multipliers(scales), torch.float64), r, False)
    folded = fold(made, mask(sent, -r, False))
    units, true = (
        channels_of(spec).multipliers(canonical_scales(channels_of(spec), some)) for some in (folded, params)
    )
    assert relative({n: units[n] * v for n, v in folded.items()}, {n: true[n] * v for n, v in params.items()}) < 1e-12
    x = torch.rand(3, *spec.shape, generator=seeded(4), dtype=torch.float64)
    torch.testing.assert_close(build(spec)(folded, x), build(spec)(params, x), rtol=1e-9, atol=1e-11)
