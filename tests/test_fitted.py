"""Who knows the mechanism searches as well as who attacks no defense, whatever the network."""

from dataclasses import replace
from statistics import median
from types import SimpleNamespace

import pytest
import torch
from observations import reached, seeded, watched

from ppbench.adversary.attack import Guess
from ppbench.attacks.adaptive import inversion
from ppbench.attacks.adaptive.dp import AdaptiveDP
from ppbench.attacks.adaptive.encrypted import AdaptiveEncrypted
from ppbench.attacks.adaptive.inversion import fittest_guesses
from ppbench.attacks.adaptive.mpdp import AdaptiveMPDP
from ppbench.attacks.adaptive.server import AdaptiveServer
from ppbench.attacks.reconstruction.closed_form import ClosedForm
from ppbench.attacks.reconstruction.dlg import DLG, IDLG
from ppbench.attacks.reconstruction.ig import IG
from ppbench.base.seeds import Seeds
from ppbench.defenses.dp import DP
from ppbench.defenses.dp_sgd import DPSGD
from ppbench.defenses.encrypted.protocols import PILE
from ppbench.defenses.mpdp.protocol import MPCDP, MPDP
from ppbench.defenses.none import NoDefense
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Data, Local, Plan
from ppbench.nets.channels import has_kinks
from ppbench.nets.net import initial, net_spec
from ppbench.testing.small_federation import all_digits

pytestmark = pytest.mark.nightly

BUDGET, IMAGES, CLIENTS = 900, 6, 2
CNN = net_spec("cnn", (1, 8, 8), 10, {"widths": "16,32", "bias": False})


def seen(defense, spec=CNN, loss="squared"):
    """Return what the server sees of single digits."""
    data = {
        c: Data(x.clone(), y.clone())
        for c, (x, y) in enumerate(zip(all_digits().x.split(64), all_digits().y.split(64), strict=False))
        if c < CLIENTS
    }
    fed = Federation(defense, Plan(spec, CLIENTS, Local("gradient", batch=32), loss=loss), data, Seeds(0))
    fed.start(initial(spec, 1))
    return watched(fed, count=IMAGES)


@pytest.fixture(scope="module")
def undefended():
    """The median PSNR of each attack that knows no defense, where there is none."""
    return {a.name: median(reached(seen(NoDefense()), a)[0]) for a in (IDLG(budget=BUDGET), IG(budget=BUDGET))}


@pytest.mark.parametrize(
    ("defense", "attack"),
    [
        (NoDefense(), AdaptiveServer(budget=BUDGET)),
        (DP(sigma=0.0), AdaptiveDP(budget=BUDGET)),
        (MPCDP(), AdaptiveMPDP(budget=BUDGET)),
        (MPDP(), AdaptiveMPDP(budget=BUDGET)),
    ],
    ids=["none", "dp", "mp_cdp", "mpdp"],
)
def test_on_convolutions_with_kinks_exact_evidence_is_inverted_as_well_as_without_a_defense(
    defense, attack, undefended
):
    """By L-BFGS alone, as it was, mpdp's worst case on such a network stayed below what plain `ig` saw undefended."""
    view, victims = seen(defense)
    decibels, guesses = reached((view, victims), attack)
    assert median(decibels) > max(undefended.values()) - 1, (decibels, undefended)
    assert all(0 < guess.evaluations <= BUDGET for guess in guesses)


@pytest.mark.parametrize(
    ("spec", "extra"),
    [
        (CNN, True),
        (net_spec("densenet", (1, 8, 8), 10, {"growth": 4, "layers": 1}), True),
        (net_spec("resnet20", (1, 8, 8), 10), True),
        (net_spec("dlnet", (1, 8, 8), 10), False),
        (net_spec("mlp", (1, 8, 8), 10, {"hidden": 16}), False),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_nothing_changes_where_slopes_do_not_jump_or_nothing_is_convolved(monkeypatch, spec, extra):
    monkeypatch.setattr(ClosedForm, "suits", lambda *_: False)
    view, victims = seen(NoDefense(), spec, "cross_entropy")
    few = victims.challenges()[:1]
    one, other = (attack.run(view, few, seeded()) for attack in (IDLG(budget=36), AdaptiveServer(budget=36)))
    assert torch.equal(one[0].x, other[0].x) is not extra and other[0].evaluations <= 36


@pytest.mark.parametrize(
    ("defense", "attack"),
    [
        (NoDefense(), AdaptiveServer()),
        (DP(sigma=0.0), AdaptiveDP()),
        (DPSGD(noise_multiplier=0.0, clip=0.01), AdaptiveDP()),
    ],
)
def test_linear_systems_answer_before_any_search(defense, attack):
    decibels, guesses = reached(seen(defense, net_spec("dlnet", (1, 8, 8), 10), "cross_entropy"), attack)
    assert min(decibels) > 80 and all(guess.is_exact and guess.evaluations == 2 for guess in guesses)


@pytest.mark.parametrize(("best", "noises"), [(0, (0.02, 0.2, 0.3)), (1, (0.3, 0.02, 0.2)), (2, (0.3, 0.2, 0.02))])
def test_of_the_searches_that_are_tried_that_of_the_smallest_angle_goes_on(best, noises, monkeypatch):
    view, victims = seen(NoDefense())
    result, challenge, truth = NoDefense().evidence(view), victims.challenges(), victims.data
    calls, names = [], [("idlg", None), *(("ig", tv) for tv in inversion.PRIORS)]

    def answer(self, result, plan, challenges, generator, attack=None):
        """Return the truth under some noise, less when the budget is large."""
        way = (self.name, getattr(self, "tv", None))
        calls.append((*way, self.budget, len(result)))
        parts = [truth[c.unit[0]] for c in challenges]
        draws = torch.randn(len(parts), *parts[0].x.shape, generator=seeded())
        noise = noises[names.index(way)] * (0.5 if self.budget > 20 else 1.0)
        made = zip(parts, draws, strict=True)
        return [Guess(p.x + noise * d, p.y.argmax(-1), 9.0, evaluations=self.budget) for p, d in made]

    monkeypatch.setattr(IDLG, "answer", answer)
    monkeypatch.setattr(IG, "answer", answer)
    guesses = fittest_guesses(IDLG(budget=120, restarts=5), result, view.plan, challenge, seeded())
    assert calls == [*((*way, 9, IMAGES) for way in names), (*names[best], 89, IMAGES)]
    assert {guess.evaluations for guess in guesses} == {120}
    errors = [float((g.x - truth[c.unit[0]].x).square().mean().sqrt()) for g, c in zip(guesses, challenge, strict=True)]
    assert all(0.005 < error < 0.015 for error in errors), "the last search's"


def test_larger_images_are_left_to_the_usual_prior(monkeypatch):
    """There an answer full of noise that points nearer would win (docs/benchmarks.md)."""
    wide, calls = net_spec("cnn", (1, inversion.SMOOTH_PIXELS, inversion.SMOOTH_PIXELS), 10, {"widths": "8"}), []
    large = torch.nn.functional.interpolate(all_digits().x[:8], size=wide.shape[1:], mode="bilinear")
    data = {0: Data(large, all_digits().y[:8])}
    fed = Federation(NoDefense(), Plan(wide, 1, Local("gradient", batch=8)), data, Seeds(0))
    fed.start(initial(wide, 1))
    view, victims = watched(fed, count=2)
    run = inversion.IG.answer

    def answer(self, result, *rest, **more):
        calls.append((self.tv, self.budget, len(result)))
        return run(self, result, *rest, **more)

    monkeypatch.setattr(IG, "answer", answer)
    guesses = AdaptiveServer(budget=30).run(view, victims.challenges(), seeded())
    assert calls == [(1.0, 29, 2)]
    assert all(0 < g.evaluations <= 30 and 0 < g.confidence < 2 for g in guesses)


@pytest.mark.parametrize("budget", [24, 60])
def test_equal_angles_cost_no_more_than_the_budget(budget):
    """Where no unit fires the gradient does not depend on the image, and all searches end alike."""
    view, victims = seen(NoDefense())

    def dead(evidence):
        """Return evidence that nothing explains, alike whatever is tried."""
        noise = {n: torch.randn(v.shape, generator=seeded()) for n, v in evidence.observed.items()}
        same = {n: v.double() for n, v in evidence.observed.items()}
        simulate = lambda x, y: {n: v.to(x) + 0 * x.sum() for n, v in same.items()}  # noqa: E731
        return replace(evidence, observed=noise, simulate=simulate, params=None)

    pieces = [dead(e) for e in NoDefense().evidence(view)]
    guesses = fittest_guesses(IDLG(budget=budget), pieces, view.plan, victims.challenges(), seeded())
    assert all(0 < guess.evaluations <= budget for guess in guesses)


def test_one_victims_image_does_not_depend_on_what_becomes_of_another():
    view, victims = seen(NoDefense())
    evidence, challenges = NoDefense().evidence(view), victims.challenges()
    both, alone = (
        fittest_guesses(IDLG(budget=60), e, view.plan, challenges, seeded()) for e in (evidence, evidence[:1])
    )
    assert torch.allclose(both[0].x, alone[0].x, atol=0.01), "but for the rounding of other batches"


class Functional(torch.nn.Module):
    """A network of a user's, whose ReLUs are no layers."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3)

    def forward(self, x):
        return torch.nn.functional.relu(self.conv(x)).flatten(1)


class Own(torch.nn.ReLU):
    """A ReLU of a user's."""


@pytest.mark.parametrize(
    ("features", "kinked"),
    [
        (Functional(), True),
        (torch.nn.Sequential(torch.nn.Conv1d(1, 2, 3), Own()), True),
        (torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Tanh(), torch.nn.Flatten()), False),
        (torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.ReLU()), False),
    ],
)
def test_kinks_are_found_as_layers_of_any_kind_and_as_functions(features, kinked):
    net = SimpleNamespace(module=SimpleNamespace(features=features, modules=features.modules), spec=CNN)
    assert has_kinks(net) is kinked


def test_who_has_no_evidence_or_hardly_a_budget_gets_what_the_search_gives(monkeypatch):
    view, victims = seen(NoDefense())
    evidence, challenges = NoDefense().evidence(view), victims.challenges()
    guesses = fittest_guesses(DLG(budget=60), evidence[1:], view.plan, challenges, seeded())
    assert guesses[0].confidence is None and guesses[0].x.shape == guesses[1].x.shape
    assert guesses[1].confidence is not None
    broken = [replace(e, observed={n: v * float("nan") for n, v in e.observed.items()}) for e in evidence]
    assert all(g.confidence is None for g in fittest_guesses(DLG(budget=60), broken, view.plan, challenges, seeded()))
    monkeypatch.setattr(inversion, "_angle", lambda *_: pytest.fail("nothing is compared"))
    tiny = DLG(budget=inversion.TRIAL_DIVISOR * 2 - 1)
    assert len(fittest_guesses(tiny, evidence, view.plan, challenges, seeded())) == IMAGES


def test_an_encrypted_sum_is_searched_so_too(monkeypatch):
    calls = []
    monkeypatch.setattr(inversion, "fittest_guesses", lambda *about: calls.append(about[0]) or fittest_guesses(*about))
    _, guesses = reached(seen(PILE()), AdaptiveEncrypted(budget=60))
    assert [search.budget for search in calls] == [60] and all(0 < g.evaluations <= 60 for g in guesses)
