"""From scores to metrics: planted scores, failures, clusters, canaries, audits, scores of before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppbench.base.errors import UsageError
from ppbench.metrics.audit import epsilon_lower
from ppbench.questions.image_metrics import ImageScore
from ppbench.questions.labels import LabelScore
from ppbench.questions.membership import MemberScore
from ppbench.questions.tracing import TraceScore
from ppbench.records.aggregate import aggregate
from ppbench.records.schema import Metric, Victim


def image(probe: int, psnr: float | None = 30.0, index: int = 0, **more: object) -> ImageScore:
    """Return a score as the first release made it; `newer` one as the scorer makes it today."""
    figures = dict(zip(("rmse", "rmse_raw", "ssim"), (0.1, 0.2, 0.9) if psnr is not None else (None,) * 3, strict=True))
    base = dict(probe=probe, client=0, index=index, psnr=psnr, label=True, confidence=0.0, at_truth=0.0, evaluations=9)
    return ImageScore.model_validate(base | figures | more)


def newer(probe: int, psnr: float | None, **more: object) -> ImageScore:
    figures = dict(mse=None if psnr is None else 10 ** (-psnr / 10), blind=9.0, oracle=psnr or 0.0)
    return image(probe, psnr, **{**figures, "lpips": 0.3, "feat_mse": 2.0, "path": [(3, 8.0)], **more})


def metrics(victims: list[Victim], seed: int = 0) -> dict[str, Metric]:
    return {m.name: m for m in aggregate(victims, classes=10, seed=seed)}


def test_image_cells_give_every_metric_with_n_an_interval_and_its_method() -> None:
    found = metrics([image(i, 10.0 + 2 * i) for i in range(11)])
    assert list(found) == [
        "psnr_median", "psnr_p95", "psnr_max", "rmse_mean", "rmse_raw_mean", "rmse_unit_mean", "ssim_mean",
        "share_above_20db", "label_accuracy", "at_truth_median", "ratio_median",
    ]  # fmt: skip
    assert found["psnr_median"].value == 20 and found["psnr_max"].value == 30
    assert found["psnr_p95"].value == pytest.approx(29)
    assert found["share_above_20db"].value == pytest.approx(5 / 11)
    assert found["psnr_max"].low is None and "largest" in found["psnr_max"].method
    for name, metric in found.items():
        assert metric.n == 11 and metric.method
        if name not in ("psnr_max", "ratio_median"):
            assert metric.low <= metric.value <= metric.high


def test_newer_scores_give_further_metrics_after_the_older_ones() -> None:
    old, new = (metrics([make(i, 10.0 + i) for i in range(20)]) for make in (image, newer))
    assert list(new) == [
        *old, "psnr_worst_decile", "test_mse_mean", "lpips_mean", "feat_mse_mean", "blind_median", "oracle_median",
        "evaluations_per_broken",
    ]  # fmt: skip
    assert all(new[name] == old[name] for name in old)
    assert new["psnr_worst_decile"].value == 28.5 and new["oracle_median"].value == 19.5
    assert new["test_mse_mean"].value == pytest.approx(np.mean([10 ** (-1 - i / 10) for i in range(20)]))
    assert new["lpips_mean"].value == 0.3 and new["feat_mse_mean"].value == 2 and new["blind_median"].value == 9
    assert new["test_mse_mean"].higher_is_safer and new["lpips_mean"].higher_is_safer
    assert not new["psnr_worst_decile"].higher_is_safer


def test_the_price_of_a_victim_counts_a_batch_once_and_those_who_were_not_broken_too() -> None:
    scores = [newer(i // 2, 25.0 if i < 3 else 15.0, index=i % 2, evaluations=100 * (i // 2 + 1)) for i in range(4)]
    assert metrics(scores)["evaluations_per_broken"].value == 100
    none = metrics([newer(0, 20.0), newer(1, None)])["evaluations_per_broken"]
    assert none.value is None and "no victim" in none.reason
    assert metrics([newer(0, 40.0, evaluations=0)])["evaluations_per_broken"].value == 0, "a closed form"


def test_a_failure_counts_as_a_failure_and_is_perceived_as_the_scorer_saw_it() -> None:
    found = metrics([newer(0, 40.0), newer(1, None, label=None, lpips=0.7, feat_mse=4.0)])
    assert found["psnr_median"].value == 20 and found["rmse_mean"].value == pytest.approx(0.55)
    assert found["rmse_raw_mean"].value == pytest.approx(0.6) and found["ssim_mean"].value == pytest.approx(0.45)
    assert found["label_accuracy"].value == found["share_above_20db"].value == 0.5
    assert found["test_mse_mean"].value == pytest.approx((1e-4 + 1) / 2)
    assert found["lpips_mean"].value == pytest.approx(0.5) and found["feat_mse_mean"].value == 3


def test_what_cannot_be_given_is_null_with_the_reason() -> None:
    found = metrics([newer(i, 30.0, label=None, ssim=None, at_truth=None, lpips=None if i else 0.1) for i in range(3)])
    for name in ("ssim_mean", "label_accuracy", "at_truth_median", "ratio_median", "lpips_mean"):
        assert found[name].value is None and found[name].reason
    assert "AlexNet" in found["lpips_mean"].reason and "28 pixels" in found["lpips_mean"].reason
    assert metrics([image(i, ratio=float(i)) for i in range(3)])["ratio_median"].value == 1
    mixed = metrics([newer(0, 20.0), image(1, 20.0)])
    assert mixed["test_mse_mean"].value is None and "before" in mixed["test_mse_mean"].reason
    assert aggregate([], classes=10, seed=0) == []
    with pytest.raises(UsageError, match="one kind"):
        aggregate([image(0), TraceScore(index=0, owner=0, guess=0)], classes=2, seed=0)


def test_intervals_know_which_images_shared_a_batch() -> None:
    apart = [image(i, float(10 + i % 8 * 5)) for i in range(64)]
    together = [image(i // 8, float(10 + i // 8 * 5), i % 8) for i in range(64)]
    one, two = metrics(apart)["psnr_median"], metrics(together)["psnr_median"]
    assert one.value == two.value and two.high - two.low > 1.5 * (one.high - one.low)


def candidate(index: int, score: float, family: str, **more: object) -> MemberScore:
    base = dict(index=index, half=index // 2 % 2, member=index % 2 == 0, score=score, decision=index % 2 == 0)
    return MemberScore.model_validate({**base, "family": family, **more})


def test_canaries_stand_beside_average_records_and_change_none_of_their_figures() -> None:
    rng = np.random.default_rng(0)
    average = [candidate(i, float(rng.normal()), "average") for i in range(400)]
    blank = [candidate(i, float(i % 2 == 0), "blank") for i in range(104)]
    noise = [candidate(i, 0.0, "noise") for i in range(104)]
    alone, found = metrics(average), metrics([*average, *blank, *noise])
    assert list(found) == [*alone, "canary_auc", "canary_tpr_at_1pct_fpr", "canary_tpr_at_0.1pct_fpr", "auc_blank",
                           "auc_noise"]  # fmt: skip
    assert all(found[name] == alone[name] for name in ("asr", "auc", "tpr_at_1pct_fpr"))
    assert (found["auc_blank"].value, found["auc_noise"].value, found["canary_auc"].value) == (1, 0.5, 0.75)
    tpr = found["canary_tpr_at_1pct_fpr"]
    assert tpr.value == 0.5 and tpr.realized_fpr == 0 and tpr.n == 208 and "both halves" in tpr.method
    few = metrics([*average, *blank])["canary_tpr_at_1pct_fpr"]
    assert few.value is None and "52 non-members in both halves" in few.reason


def test_three_families_of_seventy_support_one_percent_with_one_threshold_for_both_halves() -> None:
    some = [candidate(i, float(i % 2 == 0), name) for name in ("a", "b", "c") for i in range(70)]
    found = metrics(some)["canary_tpr_at_1pct_fpr"]
    assert found.value == 1 and "one threshold for both halves" in found.method
    assert metrics(some)["auc"] == metrics(some)["canary_auc"].model_copy(
        update={"name": "auc", "low": metrics(some)["auc"].low, "high": metrics(some)["auc"].high}
    ), "where there are only canaries, the plain figures are theirs"


def test_an_audit_that_abstains_gives_a_bound_on_epsilon_and_no_asr() -> None:
    surest = [candidate(i, 1.0 - i % 2, "blank") for i in range(100)]
    silent = [candidate(100 + i, 0.5, "average", decision=None) for i in range(100)]
    found = metrics([*surest, *silent])
    assert 2 < found["epsilon_lower"].value == pytest.approx(epsilon_lower(100, 50, 50))
    assert found["epsilon_lower"].n == 100 and not found["epsilon_lower"].higher_is_safer
    assert found["asr"].value is None and "abstains" in found["asr"].reason and found["auc"].value == 0.5
    other = {m.name: m for m in aggregate([*surest, *silent], classes=10, seed=0, delta=1e-2)}
    assert other["epsilon_lower"].value < found["epsilon_lower"].value and "delta 0.01" in other["epsilon_lower"].method
    wrong = [s.model_copy(update={"score": 1 - s.score}) for s in surest]
    assert metrics([*wrong, *silent])["epsilon_lower"].value == 0
    alone = metrics(silent)["epsilon_lower"]
    assert alone.value is None and "independent coins" in alone.reason, "average records are in by halves, not by coins"
    assert "epsilon_lower" not in metrics(surest)


@given(st.randoms(), st.integers(0, 9))
@settings(max_examples=10, deadline=None)
def test_values_do_not_depend_on_the_order_of_victims(random: object, seed: int) -> None:
    victims = [image(i // 2, 5.0 + 3 * i, i % 2, label=i % 3 == 0) for i in range(10)]
    shuffled = random.sample(victims, 10)
    one, two = metrics(victims, seed), metrics(shuffled, seed)
    assert all(one[n].value == two[n].value or one[n].value == pytest.approx(two[n].value) for n in one)


def test_label_member_and_trace_cells() -> None:
    labels = [LabelScore(probe=i, client=0, index=0, label=i < 3) for i in range(4)]
    assert metrics(labels)["label_accuracy"].value == 0.75
    assert metrics(labels)["label_accuracy"].chance == pytest.approx(0.1)
    batch = [LabelScore(probe=0, client=0, index=i, label=True) for i in range(4)]
    assert metrics(batch)["label_accuracy"].chance > 0.25
    traces = [TraceScore(index=i, owner=i % 4, guess=0) for i in range(8)]
    assert (metrics(traces)["tracing_accuracy"].value, metrics(traces)["tracing_accuracy"].chance) == (0.25, 0.25)
    members = [
        MemberScore(index=i, half=i // 200, member=i % 2 == 0, score=float(i % 2 == 0), decision=i % 2 == 0)
        for i in range(400)
    ]
    found = metrics(members)
    assert found["auc"].value == found["asr"].value == found["tpr_at_1pct_fpr"].value == 1
    assert found["tpr_at_1pct_fpr"].realized_fpr == 0
    assert found["tpr_at_0.1pct_fpr"].value is None and "1000" in found["tpr_at_0.1pct_fpr"].reason


def test_halves_are_scored_apart_and_averaged() -> None:
    """Scores of one half shifted by a constant say nothing about membership; pooled they would."""
    members = [
        MemberScore(index=i, half=h, member=m, score=10.0 * h + 0.0, decision=True)
        for i, (h, m) in enumerate([(0, False)] * 5 + [(0, True)] * 5 + [(1, True)] * 9 + [(1, False)])
    ]
    assert metrics(members)["auc"].value == 0.5
