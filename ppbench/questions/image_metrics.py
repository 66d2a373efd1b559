"""What is kept of a reconstructed image or table row, and the metrics of a cell of them.

Failures count as failures: a reconstruction without figures is 0 dB, relative RMSE 1, MSE 1 and SSIM 0 (for LPIPS and
feature errors, which have no upper end, the scorer measures it as mid-grey), an image without a label is a wrong label;
no victim drops out of a mean.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
from pydantic import Field

from ppbench.metrics.intervals import Estimate, Floats, Interval, Statistic, bootstrap, proportion, refused
from ppbench.questions.labels import label_accuracy
from ppbench.records.figure import metric_of, seed_of
from ppbench.records.schema import Metric
from ppbench.records.scores import ProbedScore

BROKEN_DB = 20.0
"""A reconstruction above this PSNR in dB counts as broken: the subject is plain to see."""
NEAR = 0.1
"""Relative error within which a table row counts as found."""
SSIM_REASON = "images smaller than the 7 x 7 window, or no finite reconstruction"
PERCEPTUAL_REASON = "no file of AlexNet's weights was given, or no images of 28 pixels a side"


class ImageScore(ProbedScore):
    """One reconstructed image. A failed one (not finite) has null figures and counts as psnr 0 dB, rmse 1.

    Attributes:
        psnr: dB, of the reconstruction clipped to the data range.
        rmse: ||guess - x|| / ||x||, clipped ("recon/1"); rmse_raw: the same, not clipped.
        ssim: structural similarity, clipped; null where the image is too small.
        label: whether the label that came with the reconstruction is right; null when none was given.
        confidence: the attacker's own relative mismatch.
        at_truth: discrepancy at the truth relative to an all-zero simulation; null with nuisance unknowns.
        evaluations: gradient evaluations spent on the image's batch.
        ratio: magnitude of the undefended gradient over that of the defense's perturbation, at the biases of
            the feature layers (x-axis of a PPC figure); null where nothing is perturbed or it is not known.
        mse: mean squared error of the clipped reconstruction, in units of the data range ("Test-MSE" of MP-DP).
        lpips: perceptual distance (Zhang et al. 2018) by the network that `CellConfig.perceptual` names; null without.
        feat_mse: mean squared error of that network's last features ("Feat-MSE" of MP-DP); null without.
        blind: PSNR in dB of the better of two guesses that see nothing: the public mean image, and grey. Null in
            records of before it was measured, which have no `mse`, `oracle` and `path` either.
        oracle: PSNR of the best among the answer and the reconstructions that the attack rejected; never a result.
        path: (gradient evaluations, PSNR) of what the attack would have answered after so many, ascending.
    """

    kind: Literal["image"] = "image"
    psnr: float | None
    rmse: float | None
    rmse_raw: float | None
    ssim: float | None
    label: bool | None
    confidence: float | None
    at_truth: float | None
    evaluations: int
    ratio: float | None = None
    mse: float | None = None
    lpips: float | None = None
    feat_mse: float | None = None
    blind: float | None = None
    oracle: float | None = None
    path: list[tuple[int, float]] = Field(default_factory=list)


def rebuilt(score: Any, pictures: bool) -> bool:
    """Return whether the victim of an `ImageScore` is rebuilt: above 20 dB, a table row within a tenth of its norm."""
    if pictures:
        return bool((score.psnr or 0.0) > BROKEN_DB)
    return bool(score.rmse is not None and score.rmse < NEAR)


Figure = Callable[[ImageScore], float]
Named = tuple[str, Callable[[], Metric]]
"""A metric's name, and what computes it."""


def image_metrics(scores: Sequence[Any], classes: int, seed: int) -> dict[str, Callable[[], Metric]]:
    """Return the metrics of `ImageScore`s by name, each to be computed when it is called for.

    psnr_median, psnr_p95, psnr_max (dB), rmse_mean, rmse_raw_mean, rmse_unit_mean, ssim_mean, share_above_20db,
    label_accuracy, at_truth_median, ratio_median, and where scores hold what they are made from: psnr_worst_decile,
    test_mse_mean, lpips_mean, feat_mse_mean, blind_median, oracle_median, evaluations_per_broken.
    """
    return dict(_images(scores, classes, seed))


def _units(scores: Sequence[ImageScore], figure: Figure) -> list[Floats]:
    """Return the scores' figures by unit: the batch (probe, client) that they were attacked in."""
    groups: dict[Hashable, list[float]] = {}
    for score in scores:
        groups.setdefault(score.unit, []).append(figure(score))
    return [np.array(groups[key], dtype=np.float64) for key in groups]


def _images(scores: Sequence[ImageScore], classes: int, seed: int) -> list[Named]:
    """Return the metrics of images by name, each to be computed when it is called for."""

    def of(name: str, figure: Figure, statistic: Statistic, safer: bool) -> Named:
        made = partial(_bootstrapped, scores, name, figure, statistic, safer, seed)
        return name, made

    def psnr(score: ImageScore) -> float:
        return 0.0 if score.psnr is None else score.psnr

    def rmse(score: ImageScore) -> float:
        return 1.0 if score.rmse is None else score.rmse

    def raw(score: ImageScore) -> float:
        return 1.0 if score.rmse_raw is None else score.rmse_raw

    largest = Interval(None, None, "largest of the sample; no interval bounds the worst image not yet drawn")
    return [
        of("psnr_median", psnr, "median", False),
        of("psnr_p95", psnr, "p95", False),
        ("psnr_max", lambda: metric_of("psnr_max", Estimate(max(map(psnr, scores)), largest, len(scores)), False)),
        of("rmse_mean", rmse, "mean", True),
        of("rmse_raw_mean", raw, "mean", True),
        of("rmse_unit_mean", lambda score: min(rmse(score), 1.0), "mean", True),
        ("ssim_mean", lambda: _ssim(scores, seed)),
        ("share_above_20db", lambda: _above(scores, lambda score: psnr(score) > BROKEN_DB)),
        ("label_accuracy", lambda: _image_labels(scores, classes)),
        _known(scores, "at_truth_median", lambda s: s.at_truth, "the evidence has nuisance unknowns", seed),
        _known(scores, "ratio_median", lambda s: s.ratio, "no perturbation, or its size is not known", seed),
        *(_later(scores, seed) if any(score.blind is not None for score in scores) else []),
    ]


def _bootstrapped(
    scores: Sequence[ImageScore], name: str, figure: Figure, statistic: Statistic, safer: bool, seed: int
) -> Metric:
    return metric_of(name, bootstrap(_units(scores, figure), statistic, seed_of(seed, name)), safer)


def _later(scores: Sequence[ImageScore], seed: int) -> list[Named]:
    """Return the metrics that records before `ImageScore.blind` do not have: those must still verify."""

    def psnr(score: ImageScore) -> float:
        return 0.0 if score.psnr is None else score.psnr

    old = "scores of before it was measured"
    decile = "psnr_worst_decile"
    return [
        (decile, partial(_bootstrapped, scores, decile, psnr, "worst_decile", False, seed)),
        _mean(scores, "test_mse_mean", lambda s: 1.0 if s.psnr is None else s.mse, old, seed),
        _mean(scores, "lpips_mean", lambda s: s.lpips, PERCEPTUAL_REASON, seed),
        _mean(scores, "feat_mse_mean", lambda s: s.feat_mse, PERCEPTUAL_REASON, seed),
        _known(scores, "blind_median", lambda s: s.blind, old, seed),
        _known(scores, "oracle_median", lambda s: s.oracle, old, seed),
        ("evaluations_per_broken", lambda: metric_of("evaluations_per_broken", _price(scores), True)),
    ]


def _price(scores: Sequence[ImageScore]) -> Estimate:
    """Return the gradient evaluations spent in all over the number of victims above 20 dB: what one of them costs."""
    spent = sum({score.unit: score.evaluations for score in scores}.values())
    broken = sum(score.psnr is not None and score.psnr > BROKEN_DB for score in scores)
    if not broken:
        return refused(len(scores), "no victim came out above 20 dB")
    return Estimate(spent / broken, Interval(None, None, "none: a ratio of totals"), len(scores))


def _mean(
    scores: Sequence[ImageScore], name: str, pick: Callable[[ImageScore], float | None], reason: str, seed: int
) -> Named:
    """Return the mean of a distance that every victim has; refused with `reason` where one has none."""

    def made() -> Metric:
        if any(pick(score) is None for score in scores):
            return metric_of(name, refused(len(scores), reason), True)
        return _bootstrapped(scores, name, lambda score: float(pick(score) or 0.0), "mean", True, seed)

    return name, made


def _above(scores: Sequence[ImageScore], hit: Callable[[ImageScore], bool]) -> Metric:
    share = proportion([unit > 0 for unit in _units(scores, lambda score: float(hit(score)))])
    return metric_of("share_above_20db", share, False)


def _ssim(scores: Sequence[ImageScore], seed: int) -> Metric:
    """Return the mean SSIM; a failed reconstruction counts as 0, an image too small for SSIM refuses the
    figure.
    """
    small = any(score.ssim is None and score.psnr is not None for score in scores)
    if small or all(score.ssim is None for score in scores):
        return metric_of("ssim_mean", refused(len(scores), SSIM_REASON), False)
    units = _units(scores, lambda score: 0.0 if score.ssim is None else score.ssim)
    return metric_of("ssim_mean", bootstrap(units, "mean", seed_of(seed, "ssim_mean")), False)


def _image_labels(scores: Sequence[ImageScore], classes: int) -> Metric:
    """Return the accuracy of labels that came with images; where the attack gave any, a missing one is
    wrong.
    """
    if all(score.label is None for score in scores):
        figure = refused(len(scores), "the attack returned no labels", 1 / classes)
    else:
        units = [unit > 0 for unit in _units(scores, lambda score: float(score.label is True))]
        figure = label_accuracy(units, classes)
    return metric_of("label_accuracy", figure, False)


def _known(
    scores: Sequence[ImageScore],
    name: str,
    pick: Callable[[ImageScore], float | None],
    reason: str,
    seed: int,
) -> Named:
    """Return the median of a diagnostic over the victims that have it: it describes evidence, not success."""

    def made() -> Metric:
        known = [score for score in scores if pick(score) is not None]
        if not known:
            return metric_of(name, refused(len(scores), reason), True)
        safer = name == "at_truth_median"
        return _bootstrapped(known, name, lambda score: float(pick(score) or 0.0), "median", safer, seed)

    return name, made
