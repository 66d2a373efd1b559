"""What the scorer measures beside the truth, and its flags: each raised by a planted case and not by a sound one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from ppbench.adversary.attack import Guess
from ppbench.adversary.victims import Candidates, Victims
from ppbench.base.tree import Params
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Data
from ppbench.federation.wire import Slot
from ppbench.metrics.image import psnr
from ppbench.metrics.perceptual import Network, Perceived
from ppbench.questions.flags import flags_of, is_flat, reached
from ppbench.questions.image_metrics import ImageScore
from ppbench.questions.images import score_images
from ppbench.questions.inquiry import Yardstick
from ppbench.questions.membership import score_members

RANGE = (0.0, 1.0)


def images(seed: int, *shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def victims() -> Victims:
    """Two slots of two images each, a dark one and a bright one, which no noise here makes alike."""
    slots = (Slot(0, 0), Slot(0, 1))
    labels, dark = torch.eye(10)[torch.tensor([1, 2])], torch.tensor([0.0, 0.9]).reshape(2, 1, 1, 1)
    data = {slot: Data(0.1 * images(slot.client, 2, 1, 8, 8) + dark, labels) for slot in slots}
    return Victims(data, tuple((slot,) for slot in slots), (), 2)


def noisy(x: Tensor, decibel: float) -> Tensor:
    """Return x with an error of so many dB in every pixel, kept within the range."""
    return torch.where(x < 0.5, x + 10 ** (-decibel / 20), x - 10 ** (-decibel / 20))


def scored(victims: Victims, answer: Callable[[Tensor], Guess], mean: Tensor | None = None) -> list[ImageScore]:
    guesses = [answer(victims.truth(unit).x) for unit in victims.units]
    ruler = Yardstick(torch.full((1, 8, 8), 0.25) if mean is None else mean)
    return [v for v in score_images(victims, guesses, {}, {}, RANGE, ruler).victims if isinstance(v, ImageScore)]


def codes(scores: Sequence[ImageScore], pictures: bool = True) -> dict[str, str]:
    return {flag.code: flag.severity for flag in flags_of(scores, [], RANGE, pictures)}


# -- scores ----------------------------------------------------------------------------------------------------------
def test_every_image_has_its_squared_error_and_that_of_the_better_blind_guess(victims: Victims) -> None:
    found = scored(victims, lambda x: Guess(noisy(x, 20)[[1, 0]]))
    for unit in victims.units:
        for score, x in zip([s for s in found if s.client == unit[0].client], victims.truth(unit).x, strict=True):
            assert score.mse == pytest.approx(0.01, rel=1e-4) and score.psnr == pytest.approx(20, abs=1e-3)
            blind = max(psnr(torch.full_like(x, 0.25), x) or 0, psnr(torch.full_like(x, 0.5), x) or 0)
            assert score.blind == pytest.approx(blind) and score.oracle == pytest.approx(score.psnr)
    mean = victims.truth(victims.units[0]).x[0]
    assert scored(victims, lambda x: Guess(x), mean)[0].blind == 100
    bare = score_images(victims, [Guess(noisy(victims.truth(unit).x, 20)) for unit in victims.units], {}, {}, RANGE)
    assert bare.flags == () and all(v.blind is None and v.oracle is None for v in bare.victims)


def test_the_oracle_chooses_one_result_for_the_whole_batch_the_best_in_the_mean(victims: Victims) -> None:
    def answer(x: Tensor) -> Guess:
        mixed = torch.cat([noisy(x[:1], 40), noisy(x[1:], 8)])
        return Guess(noisy(x, 15), others=(noisy(x, 12), mixed, torch.full_like(x, torch.nan)))

    for score in scored(victims, answer):
        assert score.psnr == pytest.approx(15, abs=1e-3)
        assert score.oracle == pytest.approx(40 if score.index == 0 else 8, abs=1e-3)


def test_the_path_is_matched_and_scored_at_every_mark(victims: Victims) -> None:
    def answer(x: Tensor) -> Guess:
        path = ((20, noisy(x, 10)[[1, 0]]), (5, torch.full_like(x, torch.inf)), (60, noisy(x, 30)))
        return Guess(noisy(x, 35), evaluations=100, path=path)

    for score in scored(victims, answer):
        assert [mark for mark, _ in score.path] == [5, 20, 60]
        assert [value for _, value in score.path] == pytest.approx([0, 10, 30], abs=1e-3)
        assert [reached(score, m) for m in (4, 5, 59, 99, 100)] == pytest.approx([0, 0, 10, 30, 35], abs=1e-3)


def test_a_failed_reconstruction_has_no_figures_but_those_of_others(victims: Victims) -> None:
    for score in scored(victims, lambda x: Guess(None, others=(noisy(x, 20),))):
        assert score.psnr is None and score.mse is None and score.oracle == pytest.approx(20, abs=1e-3)
        assert score.blind is not None


def test_the_network_sees_matched_images_and_small_ones_are_left_out(victims: Victims) -> None:
    class Told(Network):
        def compare(self, guess: Tensor, truth: Tensor, data_range: tuple[float, float] = RANGE) -> list[Perceived]:
            error = (guess - truth).square().flatten(1).mean(1)
            return [Perceived(v, 2 * v) for v in error.tolist()]

    ruler = Yardstick(torch.zeros(1, 8, 8), Told("t", torch.nn.Identity()))
    small = score_images(victims, [Guess(victims.truth(u).x) for u in victims.units], {}, {}, RANGE, ruler)
    assert all(v.lpips is None for v in small.victims)
    slot = Slot(0, 0)
    large = Victims({slot: Data(images(4, 2, 3, 32, 32), torch.eye(10)[:2])}, ((slot,),), (), 2)
    ruler = Yardstick(torch.zeros(3, 32, 32), Told("t", torch.nn.Identity()))
    turned = [Guess(noisy(large.truth((slot,)).x, 20)[[1, 0]])]
    for score in score_images(large, turned, {}, {}, RANGE, ruler).victims:
        assert score.lpips == pytest.approx(0.01, rel=1e-3) and score.feat_mse == pytest.approx(0.02, rel=1e-3)


def test_members_carry_their_family_and_abstentions() -> None:
    n = 8
    half, member = torch.arange(n) // 4, torch.arange(n) % 2 == 0
    families = tuple("average" if i % 4 < 2 else "blank" for i in range(n))
    candidates = Candidates(torch.zeros(n, 2), torch.zeros(n, 2), member, half, families)
    guess = Guess(score=torch.arange(n).double(), decision=member, abstain=torch.arange(n) % 4 == 1)
    found = score_members(candidates, [guess, guess]).victims
    assert [(v.family, v.decision) for v in found] == [
        (families[i], None if i % 4 == 1 else bool(member[i])) for i in range(n)
    ]


# -- flags -----------------------------------------------------------------------------------------------------------
def image(psnr: float | None, evaluations: int = 100, **more: object) -> ImageScore:
    figures = None if psnr is None else 0.1
    base = dict(probe=0, client=0, index=0, psnr=psnr, rmse=figures, rmse_raw=figures, ssim=None, label=None)
    return ImageScore.model_validate(
        {**base, "confidence": None, "at_truth": None, "evaluations": evaluations, "blind": 8.0, "oracle": psnr, **more}
    )


def test_more_budget_that_hurts_is_flagged_and_a_rising_path_is_not() -> None:
    falling = [image(18.0 + i, path=[(10, 12.0), (50, 19.0 + i)]) for i in range(5)]
    assert codes(falling) == {"budget_hurts": "warning"}
    (flag,) = flags_of(falling, [], RANGE)
    assert "median 21.0 dB after 50 gradient evaluations, 20.0 dB at the end" in flag.detail
    assert codes([image(18.0 + i, path=[(10, 12.0), (50, 18.4 + i)]) for i in range(5)]) == {}
    assert codes([image(30.0)] * 4 + [image(5.0, path=[(10, 20.0)])]) == {}, "one of five says nothing about the median"
    paths = [(10, 30.0), (40, 10.0)], [(50, 19.0)], [(60, 19.0)]
    assert codes([image(20.0, path=path) for path in paths]) == {}, "a start that only some have had is no peak"


def test_a_guess_that_sees_nothing_and_does_as_well_is_flagged() -> None:
    assert codes([image(8.2)] * 3) == {"blind_as_good": "info"}
    assert codes([image(8.7)] * 3) == {}
    dark = [image(24.0, blind=26.0)] * 3
    assert codes(dark) == {"blind_as_good": "warning"}, "a success that a mean image has too"
    assert codes(dark, pictures=False) == {"blind_as_good": "info"}
    assert codes([image(None, oracle=0.0)] * 2 + [image(9.0)]) == {"blind_as_good": "info"}


def test_a_gap_between_the_attackers_and_the_oracles_choice_is_flagged() -> None:
    assert codes([image(15.0, oracle=18.5)] * 3) == {"oracle_gap": "warning"}
    assert codes([image(15.0, oracle=17.9)] * 3 + [image(15.0, oracle=40.0)]) == {}
    assert codes([image(3.0, blind=None, oracle=None)] * 3) == {}, "scores of before"


def evidence(simulate: Callable[[Tensor, Tensor], Params], observed: Tensor, **more: object) -> tuple[Evidence, Data]:
    truth = Data(images(1, 2, 1, 4, 4), torch.eye(10)[:2])
    return Evidence((Slot(0, 0),), {"w": observed}, simulate, **more), truth  # type: ignore[arg-type]


def flat(evidence: tuple[Evidence, Data]) -> bool:
    return is_flat(*evidence, RANGE)


def test_a_simulation_without_a_slope_is_flat_and_a_differentiable_one_is_not() -> None:
    def mean(x: Tensor, y: Tensor) -> Params:
        return {"w": x.flatten(2).mean((0, 1)) * y.sum()}

    seen = torch.ones(16)
    assert not flat(evidence(mean, seen))
    assert flat(evidence(lambda x, y: {"w": mean(x, y)["w"].sign().detach()}, seen)), "detached"
    assert flat(evidence(lambda x, y: {"w": torch.round(mean(x, y)["w"])}, seen)), "quantized"
    assert flat(evidence(lambda x, y: {"w": mean(x, y)["w"] * torch.nan}, seen)), "NaN"
    assert flat(evidence(lambda x, y: {"w": y.flatten()[:16].requires_grad_()}, torch.ones(16))), "of the labels alone"
    assert flat(evidence(mean, torch.zeros(16))) and flat(evidence(mean, seen / 0)), "nothing observed"
    assert flat(evidence(mean, seen, weight={"w": torch.zeros(16)})), "nothing weighed"


def test_nuisance_unknowns_are_drawn_and_what_cannot_be_simulated_is_not_called_flat() -> None:
    def secret(x: Tensor, y: Tensor, r: Tensor | None = None) -> Params:
        assert r is not None and r.shape == (3,)
        return {"w": x.flatten(2).mean((0, 1)) * r.prod()}

    assert not flat(evidence(secret, torch.ones(16), nuisance={"r": (3,)}))
    assert not flat(evidence(secret, torch.ones(16)))


@pytest.mark.parametrize(("dead", "raised"), [(0, False), (1, False), (2, True), (4, True)])
def test_zero_gradient_is_flagged_from_half_of_the_units_on(dead: int, raised: bool) -> None:
    def mean(x: Tensor, y: Tensor) -> Params:
        return {"w": x.flatten(2).mean((0, 1))}

    units = [evidence(mean, torch.zeros(16))] * dead + [evidence(mean, torch.ones(16))] * (4 - dead)
    found = {flag.code: flag.detail for flag in flags_of([image(30.0)], units, RANGE)}
    assert ("zero_gradient" in found) is raised
    assert not raised or f"in {dead} of 4 units" in found["zero_gradient"]


def test_the_scorer_raises_flags_of_its_own_evidence(victims: Victims) -> None:
    proofs = {
        unit: Evidence(unit, {"w": torch.zeros(4)}, lambda x, y: {"w": x.flatten()[:4]}) for unit in victims.units
    }
    guesses = [Guess(victims.truth(unit).x) for unit in victims.units]
    result = score_images(victims, guesses, proofs, {}, RANGE, Yardstick(torch.zeros(1, 8, 8)))
    assert "zero_gradient" in [flag.code for flag in result.flags]
