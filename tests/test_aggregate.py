"""From answers to scores, flags and metrics: planted scores and faults, failures, clusters, canaries, audits."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppbench.adversary.attack import Guess
from ppbench.adversary.victims import Candidates, Victims
from ppbench.base.errors import UsageError
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Data
from ppbench.federation.wire import Slot
from ppbench.metrics.epsilon import epsilon_lower
from ppbench.metrics.image import psnr
from ppbench.metrics.modality import IMAGE, TABLE_ROW
from ppbench.metrics.perceptual import Network, PerceptualFigures
from ppbench.questions.image_metrics import ImageScore
from ppbench.questions.images import flags_of, is_flat, reached, score_images
from ppbench.questions.inquiry import Yardstick
from ppbench.questions.labels import LabelScore
from ppbench.questions.membership import MemberScore, score_members
from ppbench.questions.tracing import TraceScore
from ppbench.records.figure import aggregate


def image(probe, psnr=30.0, index=0, **more):
    """Return a score as the first release made it; `newer` one as the scorer makes it today."""
    figures = dict(zip(("rmse", "rmse_raw", "ssim"), (0.1, 0.2, 0.9) if psnr is not None else (None,) * 3, strict=True))
    base = dict(probe=probe, client=0, index=index, psnr=psnr, label=True, confidence=0.0, at_truth=0.0, evaluations=9)
    return ImageScore.model_validate(base | figures | more)


def newer(probe, psnr, **more):
    figures = dict(mse=None if psnr is None else 10 ** (-psnr / 10), blind=9.0, oracle=psnr or 0.0)
    return image(probe, psnr, **{**figures, "lpips": 0.3, "feat_mse": 2.0, "path": [(3, 8.0)], **more})


def metrics(victims, seed=0):
    return {m.name: m for m in aggregate(victims, classes=10, seed=seed)}


def test_image_cells_give_every_metric_with_n_an_interval_and_its_method():
    result = metrics([image(i, 10.0 + 2 * i) for i in range(11)])
    assert result["psnr_median"].value == 20 and result["psnr_max"].value == 30
    assert result["psnr_p95"].value == pytest.approx(29)
    assert result["share_above_20db"].value == pytest.approx(5 / 11)
    assert result["psnr_max"].low is None and "largest" in result["psnr_max"].method
    for name, metric in result.items():
        assert metric.n == 11 and metric.method
        if name not in ("psnr_max", "ratio_median"):
            assert metric.low <= metric.value <= metric.high


def test_newer_scores_give_further_metrics_after_the_older_ones():
    old, new = (metrics([make(i, 10.0 + i) for i in range(20)]) for make in (image, newer))
    assert list(new)[: len(old)] == list(old)
    assert all(new[name] == old[name] for name in old)
    assert new["psnr_worst_decile"].value == 28.5 and new["oracle_median"].value == 19.5
    assert new["test_mse_mean"].value == pytest.approx(np.mean([10 ** (-1 - i / 10) for i in range(20)]))
    assert new["lpips_mean"].value == 0.3 and new["feat_mse_mean"].value == 2 and new["blind_median"].value == 9
    assert new["test_mse_mean"].higher_is_safer and new["lpips_mean"].higher_is_safer
    assert not new["psnr_worst_decile"].higher_is_safer


def test_the_price_of_a_victim_counts_a_batch_once_and_those_who_were_not_broken_too():
    scores = [newer(i // 2, 25.0 if i < 3 else 15.0, index=i % 2, evaluations=100 * (i // 2 + 1)) for i in range(4)]
    assert metrics(scores)["evaluations_per_broken"].value == 100
    none = metrics([newer(0, 20.0), newer(1, None)])["evaluations_per_broken"]
    assert none.value is None and "no victim" in none.reason
    assert metrics([newer(0, 40.0, evaluations=0)])["evaluations_per_broken"].value == 0, "a closed form"


def test_a_failure_counts_as_a_failure_and_is_perceived_as_the_scorer_saw_it():
    result = metrics([newer(0, 40.0), newer(1, None, label=None, lpips=0.7, feat_mse=4.0)])
    assert result["psnr_median"].value == 20 and result["rmse_mean"].value == pytest.approx(0.55)
    assert result["rmse_raw_mean"].value == pytest.approx(0.6) and result["ssim_mean"].value == pytest.approx(0.45)
    assert result["label_accuracy"].value == result["share_above_20db"].value == 0.5
    assert result["test_mse_mean"].value == pytest.approx((1e-4 + 1) / 2)
    assert result["lpips_mean"].value == pytest.approx(0.5) and result["feat_mse_mean"].value == 3


def test_what_cannot_be_given_is_null_with_the_reason():
    result = metrics([newer(i, 30.0, label=None, ssim=None, at_truth=None, lpips=None if i else 0.1) for i in range(3)])
    for name in ("ssim_mean", "label_accuracy", "at_truth_median", "ratio_median", "lpips_mean"):
        assert result[name].value is None and result[name].reason
    assert "AlexNet" in result["lpips_mean"].reason and "28 pixels" in result["lpips_mean"].reason
    assert metrics([image(i, ratio=float(i)) for i in range(3)])["ratio_median"].value == 1
    mixed = metrics([newer(0, 20.0), image(1, 20.0)])
    assert mixed["test_mse_mean"].value is None and "before" in mixed["test_mse_mean"].reason
    assert aggregate([], classes=10, seed=0) == []
    with pytest.raises(UsageError, match="one kind"):
        aggregate([image(0), TraceScore(index=0, owner=0, guess=0)], classes=2, seed=0)


def test_intervals_know_which_images_shared_a_batch():
    apart = [image(i, float(10 + i % 8 * 5)) for i in range(64)]
    together = [image(i // 8, float(10 + i // 8 * 5), i % 8) for i in range(64)]
    one, two = metrics(apart)["psnr_median"], metrics(together)["psnr_median"]
    assert one.value == two.value and two.high - two.low > 1.5 * (one.high - one.low)


def candidate(index, score, family, **more):
    base = dict(index=index, half=index // 2 % 2, member=index % 2 == 0, score=score, decision=index % 2 == 0)
    return MemberScore.model_validate({**base, "family": family, **more})


def test_canaries_stand_beside_average_records_and_change_none_of_their_figures():
    rng = np.random.default_rng(0)
    average = [candidate(i, float(rng.normal()), "average") for i in range(400)]
    blank = [candidate(i, float(i % 2 == 0), "blank") for i in range(104)]
    noise = [candidate(i, 0.0, "noise") for i in range(104)]
    alone, result = metrics(average), metrics([*average, *blank, *noise])
    assert list(result) == [*alone, "canary_auc", "canary_tpr_at_1pct_fpr", "canary_tpr_at_0.1pct_fpr", "auc_blank",
                           "auc_noise"]  # fmt: skip
    assert all(result[name] == alone[name] for name in ("asr", "auc", "tpr_at_1pct_fpr"))
    assert (result["auc_blank"].value, result["auc_noise"].value, result["canary_auc"].value) == (1, 0.5, 0.75)
    tpr = result["canary_tpr_at_1pct_fpr"]
    assert tpr.value == 0.5 and tpr.realized_fpr == 0 and tpr.n == 208 and "both halves" in tpr.method
    few = metrics([*average, *blank])["canary_tpr_at_1pct_fpr"]
    assert few.value is None and "52 non-members in both halves" in few.reason


def test_an_audit_that_abstains_gives_a_bound_on_epsilon_and_no_asr():
    surest = [candidate(i, 1.0 - i % 2, "blank") for i in range(100)]
    silent = [candidate(100 + i, 0.5, "average", decision=None) for i in range(100)]
    result = metrics([*surest, *silent])
    assert 2 < result["epsilon_lower"].value == pytest.approx(epsilon_lower(100, 50, 50))
    assert result["epsilon_lower"].n == 100 and not result["epsilon_lower"].higher_is_safer
    assert result["asr"].value is None and "abstains" in result["asr"].reason and result["auc"].value == 0.5
    other = {m.name: m for m in aggregate([*surest, *silent], classes=10, seed=0, delta=1e-2)}
    assert (
        other["epsilon_lower"].value < result["epsilon_lower"].value and "delta 0.01" in other["epsilon_lower"].method
    )
    wrong = [s.model_copy(update={"score": 1 - s.score}) for s in surest]
    assert metrics([*wrong, *silent])["epsilon_lower"].value == 0
    alone = metrics(silent)["epsilon_lower"]
    assert alone.value is None and "independent coins" in alone.reason, "average records are in by halves, not by coins"
    assert "epsilon_lower" not in metrics(surest)


@given(st.randoms(), st.integers(0, 9))
@settings(max_examples=10)
def test_values_do_not_depend_on_the_order_of_victims(random, seed):
    victims = [image(i // 2, 5.0 + 3 * i, i % 2, label=i % 3 == 0) for i in range(10)]
    shuffled = random.sample(victims, 10)
    one, two = metrics(victims, seed), metrics(shuffled, seed)
    assert all(one[n].value == two[n].value or one[n].value == pytest.approx(two[n].value) for n in one)


def test_label_member_and_trace_cells():
    labels = [LabelScore(probe=i, client=0, index=0, label=i < 3) for i in range(4)]
    recovered = metrics(labels)["label_accuracy"]
    assert recovered.value == 0.75 and recovered.chance == pytest.approx(0.1)
    batch = [LabelScore(probe=0, client=0, index=i, label=True) for i in range(4)]
    assert metrics(batch)["label_accuracy"].chance > 0.25
    recovered = metrics([TraceScore(index=i, owner=i % 4, guess=0) for i in range(8)])["tracing_accuracy"]
    assert (recovered.value, recovered.chance) == (0.25, 0.25)
    recovered = metrics([candidate(i, float(i % 2 == 0), "average") for i in range(400)])
    assert recovered["auc"].value == recovered["asr"].value == recovered["tpr_at_1pct_fpr"].value == 1
    assert recovered["tpr_at_1pct_fpr"].realized_fpr == 0
    assert recovered["tpr_at_0.1pct_fpr"].value is None and "1000" in recovered["tpr_at_0.1pct_fpr"].reason


def test_halves_are_scored_apart_and_averaged():
    """Scores of one half shifted by a constant say nothing about membership; pooled they would."""
    members = [
        MemberScore(index=i, half=h, member=m, score=10.0 * h + 0.0, decision=True)
        for i, (h, m) in enumerate([(0, False)] * 5 + [(0, True)] * 5 + [(1, True)] * 9 + [(1, False)])
    ]
    assert metrics(members)["auc"].value == 0.5


# -- scores: what the scorer measures beside the truth, and its flags -------------------------------------------------
RANGE = (0.0, 1.0)


def images(seed, *shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def victims():
    """Two slots of two images each, a dark one and a bright one, which no noise here makes alike."""
    slots = (Slot(0, 0), Slot(0, 1))
    labels, dark = torch.eye(10)[torch.tensor([1, 2])], torch.tensor([0.0, 0.9]).reshape(2, 1, 1, 1)
    data = {slot: Data(0.1 * images(slot.client, 2, 1, 8, 8) + dark, labels) for slot in slots}
    return Victims(data, tuple((slot,) for slot in slots), (), 2)


def noisy(x, decibel):
    """Return x with an error of so many dB in every pixel, kept within the range."""
    return torch.where(x < 0.5, x + 10 ** (-decibel / 20), x - 10 ** (-decibel / 20))


def scored(victims, answer, mean=None):
    guesses = [answer(victims.truth(unit).x) for unit in victims.units]
    ruler = Yardstick(torch.full((1, 8, 8), 0.25) if mean is None else mean)
    return [v for v in score_images(victims, guesses, {}, {}, RANGE, ruler).victims if isinstance(v, ImageScore)]


def codes(scores, pictures=True):
    return {flag.code: flag.severity for flag in flags_of(scores, [], RANGE, IMAGE if pictures else TABLE_ROW)}


def test_every_image_has_its_squared_error_and_that_of_the_better_blind_guess(victims):
    scores = scored(victims, lambda x: Guess(noisy(x, 20)[[1, 0]]))
    for unit in victims.units:
        for score, x in zip([s for s in scores if s.client == unit[0].client], victims.truth(unit).x, strict=True):
            assert score.mse == pytest.approx(0.01, rel=1e-4) and score.psnr == pytest.approx(20, abs=1e-3)
            blind = max(psnr(torch.full_like(x, 0.25), x) or 0, psnr(torch.full_like(x, 0.5), x) or 0)
            assert score.blind == pytest.approx(blind) and score.oracle == pytest.approx(score.psnr)
    mean = victims.truth(victims.units[0]).x[0]
    assert scored(victims, lambda x: Guess(x), mean)[0].blind == 100
    bare = score_images(victims, [Guess(noisy(victims.truth(unit).x, 20)) for unit in victims.units], {}, {}, RANGE)
    assert bare.flags == () and all(v.blind is None and v.oracle is None for v in bare.victims)


def test_the_oracle_chooses_one_result_for_the_whole_batch_the_best_in_the_mean(victims):
    def answer(x):
        mixed = torch.cat([noisy(x[:1], 40), noisy(x[1:], 8)])
        return Guess(noisy(x, 15), others=(noisy(x, 12), mixed, torch.full_like(x, torch.nan)))

    for score in scored(victims, answer):
        assert score.psnr == pytest.approx(15, abs=1e-3)
        assert score.oracle == pytest.approx(40 if score.index == 0 else 8, abs=1e-3)


def test_the_oracle_never_chooses_worse_than_the_answer_where_pairs_tie(victims, monkeypatch):
    """Saturated images of noise fit two originals equally well: matched again, a tie may fall to the other pairs."""
    monkeypatch.setattr("ppbench.questions.images.match", lambda guess, *_: [*range(len(guess))][::-1])
    assert all(score.oracle == pytest.approx(score.psnr) for score in scored(victims, lambda x: Guess(noisy(x, 20))))


def test_the_path_is_matched_and_scored_at_every_mark(victims):
    def answer(x):
        path = ((20, noisy(x, 10)[[1, 0]]), (5, torch.full_like(x, torch.inf)), (60, noisy(x, 30)))
        return Guess(noisy(x, 35), evaluations=100, path=path)

    for score in scored(victims, answer):
        assert [mark for mark, _ in score.path] == [5, 20, 60]
        assert [value for _, value in score.path] == pytest.approx([0, 10, 30], abs=1e-3)
        assert [reached(score, m) for m in (4, 5, 59, 99, 100)] == pytest.approx([0, 0, 10, 30, 35], abs=1e-3)


def test_a_failed_reconstruction_has_no_figures_but_those_of_others(victims):
    for score in scored(victims, lambda x: Guess(None, others=(noisy(x, 20),))):
        assert score.psnr is None and score.mse is None and score.oracle == pytest.approx(20, abs=1e-3)
        assert score.blind is not None


def test_the_network_sees_matched_images_and_small_ones_are_left_out(victims):
    class Told(Network):
        def compare(self, guess, truth, data_range=RANGE):
            error = (guess - truth).square().flatten(1).mean(1)
            return [PerceptualFigures(v, 2 * v) for v in error.tolist()]

    ruler = Yardstick(torch.zeros(1, 8, 8), Told("t", torch.nn.Identity()))
    small = score_images(victims, [Guess(victims.truth(u).x) for u in victims.units], {}, {}, RANGE, ruler)
    assert all(v.lpips is None for v in small.victims)
    slot = Slot(0, 0)
    large = Victims({slot: Data(images(4, 2, 3, 32, 32), torch.eye(10)[:2])}, ((slot,),), (), 2)
    ruler = Yardstick(torch.zeros(3, 32, 32), Told("t", torch.nn.Identity()))
    turned = [Guess(noisy(large.truth((slot,)).x, 20)[[1, 0]])]
    for score in score_images(large, turned, {}, {}, RANGE, ruler).victims:
        assert score.lpips == pytest.approx(0.01, rel=1e-3) and score.feat_mse == pytest.approx(0.02, rel=1e-3)


def test_members_carry_their_family_and_abstentions():
    n = 8
    half, member = torch.arange(n) // 4, torch.arange(n) % 2 == 0
    families = tuple("average" if i % 4 < 2 else "blank" for i in range(n))
    candidates = Candidates(torch.zeros(n, 2), torch.zeros(n, 2), member, half, families)
    guess = Guess(score=torch.arange(n).double(), decision=member, abstain=torch.arange(n) % 4 == 1)
    guesses = score_members(candidates, [guess, guess]).victims
    decided = [None if i % 4 == 1 else bool(member[i]) for i in range(n)]
    assert [(v.family, v.decision) for v in guesses] == list(zip(families, decided, strict=True))


# -- flags -----------------------------------------------------------------------------------------------------------
def rebuilt(psnr, **more):
    return image(0, psnr, **{"evaluations": 100, "label": None, "blind": 8.0, "oracle": psnr, **more})


def test_more_budget_that_hurts_is_flagged_and_a_rising_path_is_not():
    falling = [rebuilt(18.0 + i, path=[(10, 12.0), (50, 19.0 + i)]) for i in range(5)]
    assert codes(falling) == {"budget_hurts": "warning"}
    (flag,) = flags_of(falling, [], RANGE)
    assert "median 21.0 dB after 50 gradient evaluations, 20.0 dB at the end" in flag.detail
    assert codes([rebuilt(18.0 + i, path=[(10, 12.0), (50, 18.4 + i)]) for i in range(5)]) == {}
    one = [rebuilt(30.0)] * 4 + [rebuilt(5.0, path=[(10, 20.0)])]
    assert codes(one) == {}, "one of five says nothing about the median"
    paths = [(10, 30.0), (40, 10.0)], [(50, 19.0)], [(60, 19.0)]
    assert codes([rebuilt(20.0, path=path) for path in paths]) == {}, "a start that only some have had is no peak"


def test_a_guess_that_sees_nothing_and_does_as_well_is_flagged():
    assert codes([rebuilt(8.2)] * 3) == {"blind_as_good": "info"}
    assert codes([rebuilt(8.7)] * 3) == {}
    dark = [rebuilt(24.0, blind=26.0)] * 3
    assert codes(dark) == {"blind_as_good": "warning"}, "a success that a mean image has too"
    assert codes(dark, pictures=False) == {"blind_as_good": "info"}
    assert codes([rebuilt(None, oracle=0.0)] * 2 + [rebuilt(9.0)]) == {"blind_as_good": "info"}


def test_a_gap_between_the_attackers_and_the_oracles_choice_is_flagged():
    assert codes([rebuilt(15.0, oracle=18.5)] * 3) == {"oracle_gap": "warning"}
    assert codes([rebuilt(15.0, oracle=17.9)] * 3 + [rebuilt(15.0, oracle=40.0)]) == {}
    assert codes([rebuilt(3.0, blind=None, oracle=None)] * 3) == {}, "scores of before"


def evidence(simulate, observed, **more):
    truth = Data(images(1, 2, 1, 4, 4), torch.eye(10)[:2])
    return Evidence((Slot(0, 0),), {"w": observed}, simulate, **more), truth


def flat(evidence):
    return is_flat(*evidence, RANGE)


def test_a_simulation_without_a_slope_is_flat_and_a_differentiable_one_is_not():
    def mean(x, y):
        return {"w": x.flatten(2).mean((0, 1)) * y.sum()}

    seen = torch.ones(16)
    assert not flat(evidence(mean, seen))
    assert flat(evidence(lambda x, y: {"w": mean(x, y)["w"].sign().detach()}, seen)), "detached"
    assert flat(evidence(lambda x, y: {"w": torch.round(mean(x, y)["w"])}, seen)), "quantized"
    assert flat(evidence(lambda x, y: {"w": mean(x, y)["w"] * torch.nan}, seen)), "NaN"
    assert flat(evidence(lambda x, y: {"w": y.flatten()[:16].requires_grad_()}, torch.ones(16))), "of the labels alone"
    assert flat(evidence(mean, torch.zeros(16))) and flat(evidence(mean, seen / 0)), "nothing observed"
    assert flat(evidence(mean, seen, weight={"w": torch.zeros(16)})), "nothing weighed"


def test_nuisance_unknowns_are_drawn_and_what_cannot_be_simulated_is_not_called_flat():
    def secret(x, y, r=None):
        assert r is not None and r.shape == (3,)
        return {"w": x.flatten(2).mean((0, 1)) * r.prod()}

    assert not flat(evidence(secret, torch.ones(16), nuisance={"r": (3,)}))
    assert not flat(evidence(secret, torch.ones(16)))


@pytest.mark.parametrize(("dead", "raised"), [(0, False), (1, False), (2, True), (4, True)])
def test_zero_gradient_is_flagged_from_half_of_the_units_on(dead, raised):
    def mean(x, y):
        return {"w": x.flatten(2).mean((0, 1))}

    units = [evidence(mean, torch.zeros(16))] * dead + [evidence(mean, torch.ones(16))] * (4 - dead)
    recovered = {flag.code: flag.detail for flag in flags_of([rebuilt(30.0)], units, RANGE)}
    assert ("zero_gradient" in recovered) is raised
    assert not raised or f"in {dead} of 4 units" in recovered["zero_gradient"]


def test_the_scorer_raises_flags_of_its_own_evidence(victims):
    nothing = {"w": torch.zeros(4)}
    proofs = {unit: Evidence(unit, nothing, lambda x, y: {"w": x.flatten()[:4]}) for unit in victims.units}
    guesses = [Guess(victims.truth(unit).x) for unit in victims.units]
    result = score_images(victims, guesses, proofs, {}, RANGE, Yardstick(torch.zeros(1, 8, 8)))
    assert "zero_gradient" in [flag.code for flag in result.flags]
