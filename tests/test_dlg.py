"""DLG and iDLG as attacks: they break what they must, fail where nothing leaks, and never raise on bad observations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ppbench.adversary.attack import Challenge
from ppbench.attacks.reconstruction import dlg
from ppbench.attacks.reconstruction.dlg import DLG, IDLG, match_gradients
from ppbench.attacks.reconstruction.dlg_reference import reference_dlg
from ppbench.attacks.reconstruction.search.priors import ImagePrior
from ppbench.attacks.reconstruction.search.problem import SimulatedObjective, objective
from ppbench.attacks.reconstruction.search.starts import Starts, Victim
from ppbench.base.errors import UsageError
from ppbench.base.tree import Params
from ppbench.defenses.none import NoDefense
from ppbench.federation.evidence import Evidence, simulation
from ppbench.federation.messages import Model, Update
from ppbench.federation.plan import Data, Local, Plan
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER, Envelope, Slot
from ppbench.nets.net import initial, net_spec

PLAN = Plan(net_spec("dlnet", (1, 8, 8), 10), 1, Local("gradient"))
PARAMS = initial(PLAN.spec, 0)
SIMULATE = simulation(PLAN, PARAMS)


def batches(digits: Data, victims: int, batch: int) -> tuple[Tensor, Tensor]:
    """Victims' images [V, B, 1, 8, 8] and one-hot labels [V, B, 10]."""
    count = victims * batch
    return digits.x[:count].unflatten(0, (victims, batch)), digits.y[:count].unflatten(0, (victims, batch))


def gradients(x: Tensor, y: Tensor) -> list[Params]:
    return [
        {n: g.detach() for n, g in SIMULATE(images[None], labels[None]).items()}
        for images, labels in zip(x, y, strict=True)
    ]


def view(observed: Sequence[Params], plan: Plan = PLAN, params: Params = PARAMS) -> View:
    """A server's view of one upload a probe."""
    model, mail = Model(params), []
    for i, update in enumerate(observed):
        mail.append(Envelope(i, 1, 0, SERVER, 0, 0, model))
        mail.append(Envelope(i, 1, 0, 0, SERVER, 0, Update(update)))
    return View("server/1", SERVER, plan, NoDefense(), tuple(mail), ())


def ask(count: int, batch: int = 1, y: Tensor | None = None) -> list[Challenge]:
    return [Challenge((Slot(i, 0),), batch, None if y is None else y[i][None]) for i in range(count)]


def seed(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def psnr(guess: Tensor, truth: Tensor) -> float:
    return float(-10 * torch.log10(((guess.clamp(0, 1) - truth) ** 2).mean().clamp(min=1e-12)))


@pytest.mark.parametrize("attack", [DLG(), IDLG(), DLG(dtype="float64"), DLG(start="normal", restarts=4, hopeless=0.0)])
def test_undefended_single_images_are_broken_with_their_labels(digits: Data, attack: DLG) -> None:
    x, y = batches(digits, 6, 1)
    guesses = attack.run(view(gradients(x, y)), ask(6), seed())
    assert sum(psnr(g.x, x[i]) > 30 for i, g in enumerate(guesses)) >= 5
    assert [int(g.y) for g in guesses] == y[:, 0].argmax(-1).tolist()
    assert all(0 < g.evaluations <= attack.budget for g in guesses)
    assert all(g.confidence is not None and g.confidence < 1e-7 for g in guesses)


def test_the_attack_finds_what_the_plain_loop_finds(digits: Data) -> None:
    """The 50 lines of `dlg_reference` are the oracle: its images, found from the same gradients."""
    x, y = batches(digits, 4, 1)
    observed = gradients(x, y)
    plain = [reference_dlg(PLAN, PARAMS, update, 1e-9, seed(i)) for i, update in enumerate(observed)]
    solved = [i for i, image in enumerate(plain) if psnr(image, x[i]) > 30]
    assert len(solved) >= 2
    guesses = DLG(stop=1e-12).run(view(observed), ask(4), seed())
    assert all(psnr(guesses[i].x, plain[i].clamp(0, 1)) > 30 for i in solved)


def test_a_batch_with_known_labels_is_broken_image_by_image(digits: Data) -> None:
    x, y = batches(digits, 2, 4)
    for i, guess in enumerate(DLG().run(view(gradients(x, y)), ask(2, 4, y), seed())):
        assert guess.x.shape == (4, 1, 8, 8)
        assert torch.equal(guess.y, y[i].argmax(-1))
        # every class of these batches occurs once, so that known labels fix the order
        assert all(psnr(guess.x[b], x[i, b]) > 25 for b in range(4))


def test_a_batch_with_inferred_labels_recovers_the_multiset(digits: Data) -> None:
    x, y = batches(digits, 2, 4)
    for i, guess in enumerate(IDLG().run(view(gradients(x, y)), ask(2, 4), seed())):
        assert sorted(guess.y.tolist()) == sorted(y[i].argmax(-1).tolist())


def test_pure_noise_instead_of_a_gradient_gives_nothing(digits: Data) -> None:
    x, y = batches(digits, 4, 1)
    generator = seed(5)
    noise = [{n: torch.randn(g.shape, generator=generator) for n, g in o.items()} for o in gradients(x, y)]
    guesses = DLG().run(view(noise), ask(4), seed())
    assert all(psnr(g.x, x[i]) < 15 for i, g in enumerate(guesses))
    assert all(g.confidence is not None and g.confidence > 0.5 for g in guesses)
    assert all(g.evaluations < 1800 for g in guesses)  # a stall is seen long before the budget ends


@pytest.mark.parametrize("poison", ["nan", "inf", "zero", "absent"])
def test_an_unusable_observation_is_a_failed_guess_and_harms_no_other(digits: Data, poison: str) -> None:
    x, y = batches(digits, 3, 1)
    observed = gradients(x, y)
    if poison == "zero":
        observed[1] = {n: torch.zeros_like(g) for n, g in observed[1].items()}
    elif poison != "absent":
        observed[1]["head.bias"] = torch.full_like(observed[1]["head.bias"], float(poison))
    seen = view(observed)
    if poison == "absent":
        seen = replace(seen, mail=tuple(m for m in seen.mail if m.probe != 1))
    guesses = DLG().run(seen, ask(3), seed())
    failed = guesses[1]
    assert failed.x is not None
    assert failed.x.shape == (1, 1, 8, 8)
    assert bool(torch.isfinite(failed.x).all())
    assert failed.confidence is None
    assert failed.evaluations == 0
    assert psnr(guesses[0].x, x[0]) > 30
    assert psnr(guesses[2].x, x[2]) > 30


def test_a_victims_guess_does_not_depend_on_who_is_attacked_beside_it(digits: Data) -> None:
    x, y = batches(digits, 5, 1)
    observed, attack = gradients(x, y), DLG(dtype="float64")
    all_five = attack.run(view(observed), ask(5), seed())
    first_two = attack.run(view(observed[:2]), ask(2), seed())
    one_slot = replace(attack, slots=1).run(view(observed), ask(5), seed())
    for guesses in (first_two, one_slot):
        for a, b in zip(guesses, all_five, strict=False):
            assert torch.allclose(a.x, b.x, atol=1e-3)


def test_two_runs_are_the_same_bit_for_bit(digits: Data) -> None:
    x, y = batches(digits, 2, 2)
    a, b = (DLG().run(view(gradients(x, y)), ask(2, 2), seed(7)) for _ in range(2))
    for first, second in zip(a, b, strict=True):
        assert torch.equal(first.x, second.x)
        assert first.confidence == second.confidence


def test_the_sum_of_two_clients_is_attacked_as_one_batch(digits: Data) -> None:
    x, y = batches(digits, 1, 2)
    unit = (Slot(0, 0), Slot(0, 1))
    observed = {n: g.detach() for n, g in SIMULATE(x.transpose(0, 1), y.transpose(0, 1)).items()}
    evidence = Evidence(unit, observed, SIMULATE, PARAMS)
    starts = Starts(0.5 + 0.02 * torch.randn(1, 2, 1, 8, 8, generator=seed()), y, joint=False)
    for fast in (True, False):
        one = evidence if fast else replace(evidence, params=None)
        found = match_gradients(
            [one], starts, PLAN, budget=torch.tensor([800]), stop=torch.full((1,), 1e-9, dtype=torch.float64)
        )
        assert float(found.mismatch) < 1e-7
        assert all(psnr(found.ends.x[0, b], x[0, b]) > 25 for b in range(2))


def test_autograd_and_the_chain_find_the_same_image(digits: Data) -> None:
    x, y = batches(digits, 1, 1)
    evidence = Evidence((Slot(0, 0),), gradients(x, y)[0], SIMULATE, PARAMS)
    blind = replace(evidence, params=None)
    assert isinstance(objective([blind], PLAN, 1, torch.float64), SimulatedObjective)
    assert not isinstance(objective([evidence], PLAN, 1, torch.float64), SimulatedObjective)
    starts = Starts(torch.full((1, 1, 1, 8, 8), 0.5, dtype=torch.float64), y.double(), joint=False)
    options = {"budget": torch.tensor([300]), "stop": torch.full((1,), 1e-13, dtype=torch.float64)}
    a, b = (match_gradients([e], starts, PLAN, **options) for e in (evidence, blind))
    assert torch.allclose(a.ends.x, b.ends.x, atol=1e-3)


def test_entries_without_weight_are_not_matched(digits: Data) -> None:
    """A poisoned layer breaks plain matching, and does nothing when its weight is 0."""
    x, y = batches(digits, 2, 1)
    poisoned = [{**o, "features.2.weight": 5 * torch.ones_like(o["features.2.weight"])} for o in gradients(x, y)]
    weight = {n: torch.full_like(p, 0.0 if n == "features.2.weight" else 1.0) for n, p in PARAMS.items()}
    plain = [Evidence((Slot(i, 0),), o, SIMULATE, PARAMS) for i, o in enumerate(poisoned)]
    masked = [replace(e, weight=weight) for e in plain]
    starts = Starts(0.5 + 0.02 * torch.randn(2, 1, 1, 8, 8, generator=seed()), y, joint=False)
    options = {"budget": torch.tensor([400, 400]), "stop": torch.full((2,), 1e-10, dtype=torch.float64)}
    hit = match_gradients(masked, starts, PLAN, **options)
    missed = match_gradients(plain, starts, PLAN, **options)
    assert all(psnr(hit.ends.x[i, 0], x[i, 0]) > 30 for i in range(2))
    assert all(psnr(missed.ends.x[i, 0], x[i, 0]) < 20 for i in range(2))


def test_nuisance_unknowns_are_found_with_the_image(digits: Data) -> None:
    """The client adds a secret constant to every head bias gradient: knowing of it, the attacker still wins."""
    x, y = batches(digits, 1, 1)

    def shifted(x: Tensor, y: Tensor, shift: Tensor) -> Params:
        plain = SIMULATE(x, y)
        return {**plain, "head.bias": plain["head.bias"] + shift}

    observed = gradients(x, y)[0]
    observed["head.bias"] = observed["head.bias"] + 0.7
    evidence = Evidence((Slot(0, 0),), observed, shifted, nuisance={"shift": (1,)})
    starts = Starts(torch.full((1, 1, 1, 8, 8), 0.5), y, joint=False, nuisance=torch.zeros(1, 1))
    found = match_gradients(
        [evidence], starts, PLAN, budget=torch.tensor([400]), stop=torch.full((1,), 1e-10, dtype=torch.float64)
    )
    assert float(found.ends.extra[0, 0]) == pytest.approx(0.7, abs=0.01)
    assert psnr(found.ends.x[0, 0], x[0, 0]) > 25


def test_the_image_prior_pulls_into_the_box_and_smooths() -> None:
    rough = torch.tensor([[[[[-1.0, 2.0], [2.0, -1.0]]]]])
    box, slope = ImagePrior(box=1.0)(rough, torch.arange(1))
    assert float(box) == pytest.approx(1.0)
    assert bool((slope.sign() == torch.tensor([[[[[-1.0, 1.0], [1.0, -1.0]]]]])).all())
    flat = torch.full((1, 1, 1, 4, 4), 0.3)
    assert float(ImagePrior(tv=1.0, eps=0.01).value(flat)) == pytest.approx(0.01)
    assert float(ImagePrior(tv=1.0).value(rough)) > 3
    assert float(ImagePrior().value(flat)) == 0.0


def test_a_prior_improves_an_image_from_a_noisy_gradient(digits: Data) -> None:
    x, y = batches(digits, 4, 1)
    generator, std = seed(9), 2e-3
    observed = [{n: g + std * torch.randn(g.shape, generator=generator) for n, g in o.items()} for o in gradients(x, y)]
    evidence = [Evidence((Slot(i, 0),), o, SIMULATE, PARAMS) for i, o in enumerate(observed)]
    starts = Starts(0.5 + 0.02 * torch.randn(4, 1, 1, 8, 8, generator=seed()), y, joint=False)
    options = {"budget": torch.full((4,), 300), "stop": torch.zeros(4), "unit": torch.full((4,), 2 * std**2)}
    plain = match_gradients(evidence, starts, PLAN, **options)
    smooth = match_gradients(evidence, starts, PLAN, **options, prior=ImagePrior(tv=20.0, box=300.0))
    gain = [psnr(smooth.ends.x[i, 0], x[i, 0]) - psnr(plain.ends.x[i, 0], x[i, 0]) for i in range(4)]
    assert sum(gain) > 0


def test_restarts_share_the_budget_and_keep_the_best_mismatch(digits: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = batches(digits, 1, 1)
    images = iter([torch.full((1, 1, 1, 8, 8), 1e4), torch.full((1, 1, 1, 8, 8), 0.5)])
    monkeypatch.setattr(dlg, "draw", lambda *_: Starts(next(images), y, joint=False))
    victim = Victim(Evidence((Slot(0, 0),), gradients(x, y)[0], SIMULATE, PARAMS), ask(1)[0], PLAN, seed())
    attack = DLG(budget=600, restarts=1, hopeless=0.0)
    found = attack.matched([victim], torch.full((1,), 1e-10, dtype=torch.float64))
    assert psnr(found.ends.x[0, 0], x[0, 0]) > 30
    assert int(found.evaluations) <= 600
    assert next(images, None) is None


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"start": "gray"}, "start"),
        ({"label": "guessed"}, "label"),
        ({"dtype": "float16"}, "dtype"),
        ({"budget": 0}, "budget"),
        ({"slots": 0}, "slots"),
        ({"hopeless": -1.0}, "hopeless"),
        ({"progress": 1.0}, "progress"),
        ({"stop": 0.0}, "stop"),
        ({"stop": float("nan")}, "stop"),
    ],
)
def test_options_that_do_not_exist_are_named(options: dict[str, object], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        DLG(**options).run(view([]), [], seed())  # type: ignore[arg-type]


def test_no_challenges_is_no_error() -> None:
    assert DLG().run(view([]), [], seed()) == []


def test_a_guess_that_blows_up_has_no_confidence_and_grey_follows_the_data_range(digits: Data) -> None:
    x, y = batches(digits, 1, 1)
    wide = replace(PLAN, data_range=(-100.0, 300.0))
    observed = gradients(x, y)
    diverged = {n: torch.full_like(p, torch.nan) for n, p in PARAMS.items()}
    (guess,) = DLG().run(view(observed, wide, diverged), ask(1), seed())
    assert guess.confidence is None
    assert float(guess.x.mean()) == pytest.approx(100, abs=10)
