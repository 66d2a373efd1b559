"""PBPFL against who knows it: hidden scales are a gauge, the server has FedSGD, shared masks leave differences bare."""

import math
from dataclasses import replace

import pytest
import torch
from observations import scored, seeded, watched
from protocols import moved
from torch import Tensor

from ppbench.adversary.victims import Victims
from ppbench.attacks.adaptive.mpdp import canonical_scales
from ppbench.attacks.adaptive.pbpfl import AdaptivePBPFLExt, Single, message_differences, unmasked_differences
from ppbench.attacks.reconstruction.analytic import AnalyticInversion
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params
from ppbench.defenses.pbpfl.perturbation import exchanges, multiply, surrogates
from ppbench.defenses.pbpfl.protocol import PBPFL, PBPFLExt
from ppbench.federation.contract import Defense
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Batch, Local, Plan
from ppbench.federation.view import View
from ppbench.federation.wire import Slot
from ppbench.nets.channels import Channels, channels_of
from ppbench.nets.net import NetSpec, build, initial, net_spec
from ppbench.testing.small_federation import digit_shards

CLIENTS = 4
BIASED = net_spec("mlp", (1, 8, 8), 10, {"hidden": "64,64"})
BARE = net_spec("mlp", (1, 8, 8), 10, {"hidden": "64,64", "bias": False})
CNN = net_spec("cnn", (1, 8, 8), 10, {"widths": "8,8", "pool": "avg"})
SHARED = PBPFLExt(families="shared")


def probed(defense: Defense, spec: NetSpec, batch: int = 1, count: int = 8) -> tuple[View, Victims]:
    data = digit_shards((48, 48, 48, 30))
    fed = Federation(defense, Plan(spec, CLIENTS, Local("gradient", batch=16), loss="squared"), data, Seeds(0))
    fed.start(initial(spec, 1))
    return watched(fed, batch=batch, count=count)


def decibels(guess: Tensor, truth: Tensor) -> float:
    """Return the peak signal-to-noise ratio of images in [0, 1], without the scorer's cap."""
    return -20 * math.log10(max(float((guess.double() - truth.double()).square().mean().sqrt()), 1e-30))


def ratio(observed: Params) -> Tensor:
    """Return the image [1, 1, 8, 8] that the first layer's gradients of weights and biases give."""
    weight, bias = (observed[f"features.1.{part}"].double() for part in ("weight", "bias"))
    return ((bias[:, None] * weight).sum(0) / bias.square().sum()).view(1, 1, 8, 8)


def distance(one: Params, other: Params) -> float:
    pairs = [(one[n].detach(), value.detach()) for n, value in other.items()]
    return max(float((a - b).norm() / b.norm().clamp(min=1e-300)) for a, b in pairs)


# -- (F): hidden scales are a gauge ----------------------------------------------------------------------------------
NETS = [
    net_spec("mlp", (784,), 10, {"hidden": "256,128"}),
    net_spec("cnn", (3, 16, 16), 10, {"widths": "6,8", "hidden": "12"}),
    net_spec("densenet", (3, 16, 16), 10, {"growth": 4, "layers": 2}),
    net_spec("resnet20", (3, 16, 16), 10),
    net_spec("resnet20", (3, 16, 16), 10, {"shortcut": "B"}),
    net_spec("resnet20", (3, 16, 16), 10, {"norm": "fixup"}),
    net_spec("resnet20", (3, 16, 16), 10, {"norm": "gn"}),
]


def hidden(spec: NetSpec, params: Params, seed: int) -> Params:
    """Return weights with hidden scales U(.01, 100)."""
    result = channels_of(spec, "affine")
    scales = 0.01 + 99.99 * torch.rand(result.count, generator=seeded(seed), dtype=torch.float64)
    return multiply(params, result.multipliers(scales), torch.float64)


def canonical(result: Channels, params: Params) -> Params:
    """Return the weights in canonical units."""
    return multiply(params, result.multipliers(canonical_scales(result, params)), torch.float64)


@pytest.mark.parametrize("spec", NETS, ids=lambda s: f"{s.model}-{dict(s.options)}")
def test_true_and_perturbed_weights_have_one_canonical_form(spec):
    """To rounding (spec: 3e-16), and it computes the same function."""
    result, params = channels_of(spec, "affine"), moved(initial(spec, 1), 0.02)
    form = canonical(result, params)
    for seed in (0, 1):
        assert distance(canonical(result, hidden(spec, params, seed)), form) < 1e-12
    x = torch.rand(3, *spec.shape, generator=seeded(5), dtype=torch.float64)
    torch.testing.assert_close(build(spec)(form, x), build(spec)(params, x), rtol=1e-10, atol=1e-12)
    assert distance(canonical(result, form), form) < 1e-12


def test_canonical_units_have_norm_one_and_the_mask_must_be_off():
    spec = NETS[0]
    result, params = channels_of(spec), moved(initial(spec, 1), 0.02)
    form = canonical(result, params)
    for name in ("features.1.weight", "features.3.weight"):
        torch.testing.assert_close(form[name].norm(dim=1), torch.ones(len(form[name])).double())
    other = {**params, "head.weight": params["head.weight"] + 5.0}
    assert distance(canonical(result, other), form) > 0.1  # another function has another form


def test_dead_units_keep_their_units():
    spec = BIASED
    params = moved(initial(spec, 1), 0.02)
    params["features.1.weight"][3] = 0
    scales = canonical_scales(channels_of(spec), params)
    assert float(scales[3]) == 1.0
    assert bool(scales.isfinite().all())


# -- (G): to the server it is FedSGD ---------------------------------------------------------------------------------
@pytest.mark.parametrize("channel", ["recovered", "beta", "sigma"])
def test_one_example_is_inverted_from_each_surrogate_alone(channel):
    """Spec: 294 dB recovered, 338 from beta, 335 from sigma."""
    view, victims = probed(PBPFL(), BIASED, count=4)
    evidence = view.defense.evidence(view)
    if channel != "recovered":
        answers = {e.slot: e.answer for e in exchanges(view)}
        for i, one in enumerate(evidence):
            part = getattr(answers[one.unit[0]], channel)
            observed = {n: v[0] if channel == "sigma" else v for n, v in part.items()}
            evidence[i] = replace(one, observed=observed)
    for one, question in zip(evidence, victims.challenges(), strict=True):
        assert decibels(ratio(one.observed), victims.truth(question.unit).x) > 200
    guesses = AnalyticInversion().answer(evidence, view.plan, victims.challenges(), seeded())
    assert min(psnr for psnr, _ in scored(victims, guesses)) > 60


# -- (H): one family of masks for three messages ---------------------------------------------------------------------
def true_differences(view: View, victims: Victims, slot: Slot) -> Params:
    question = next(e.request for e in exchanges(view) if e.slot == slot)
    data = victims.data[slot]
    batch = Batch(data.x.double(), data.y.double(), torch.ones(len(data.x)).double())
    return message_differences(
        surrogates(view.plan.net, question.params, batch, question.direction[None], view.defense.bias_masked)
    )


@pytest.mark.parametrize("defense", [SHARED, PBPFLExt(families="shared", head_bias="clear")], ids=["masked", "clear"])
def test_differences_of_shared_masks_are_bare(defense):
    view, victims = probed(defense, BIASED, batch=2, count=8)
    failures = unmasked_differences(view)
    assert len(failures) == len(victims.data)
    for one in failures:
        assert distance(one.observed, true_differences(view, victims, one.unit[0])) < 1e-9


def test_independent_masks_leave_noise_in_the_differences():
    view, victims = probed(PBPFLExt(), BIASED)
    assert unmasked_differences(view) == []
    lied = replace(view, defense=SHARED)  # read them as if they were bare
    for one in unmasked_differences(lied):
        assert distance(one.observed, true_differences(view, victims, one.unit[0])) > 10


@pytest.mark.parametrize("spec", [BIASED, BARE, CNN], ids=["mlp", "mlp-bare", "cnn"])
def test_the_head_of_one_example_is_known_exactly(spec):
    """alpha, features, error and label follow from the differences, so that the rest is a known linear function."""
    view, victims = probed(SHARED, spec)
    for one in unmasked_differences(view):
        single, data = Single.of(view, one), victims.data[one.unit[0]]
        features = view.plan.net.features(single.params, data.x.double())[0]
        torch.testing.assert_close(single.features, features, rtol=1e-7, atol=1e-9)
        assert torch.equal(single.label[0], data.y)
        evidence = single.evidence(view)
        simulated = evidence.simulate(data.x[None].double(), torch.full((1, 1, 10), torch.nan).double())
        assert float(evidence.discrepancy(simulated).detach() / evidence.scale()) < 1e-15


@pytest.mark.parametrize("spec", [BIASED, BARE], ids=["biases", "bare"])
def test_shared_masks_give_every_image(spec):
    """Spec: 259 dB from the difference, 9.4 from the masked message and 10.4 with independent masks."""
    view, victims = probed(SHARED, spec)
    attack = AdaptivePBPFLExt()
    scores = scored(victims, attack.run(view, victims.challenges(), seeded()), attack.evidence(view))
    assert all(psnr == 100.0 and label for psnr, label in scores)  # the scorer's cap
    first = unmasked_differences(view)[0]
    if "features.1.bias" in first.observed:
        assert decibels(ratio(first.observed), victims.data[first.unit[0]].x) > 200


def test_a_masked_message_alone_gives_nothing():
    """The control of the control: the same inversion of one masked surrogate, read as a gradient."""
    view, victims = probed(SHARED, BIASED)
    for exchange in exchanges(view):
        image = ratio({n: v.double() / 2.0**48 for n, v in exchange.answer.beta.items()})
        assert decibels(image.clamp(0, 1), victims.data[exchange.slot].x) < 15


def test_batches_are_attacked_client_by_client_in_the_order_of_the_unit():
    """Rows that one example alone fires give it exactly, at its client's place; the mean of a cohort has no places."""
    view, victims = probed(SHARED, BIASED, batch=2, count=8)
    (unit,), (guess,) = victims.units, AdaptivePBPFLExt().run(view, victims.challenges(), seeded())
    assert guess.x.shape == (8, 1, 8, 8)
    for i, slot in enumerate(unit):
        gap = torch.cdist(guess.x[2 * i : 2 * i + 2].flatten(1), victims.data[slot].x.flatten(1))
        assert int((gap.min(0).values < 1e-3).sum()) >= 1
