"""The score of a reconstructed image or table row, and the metrics of a cell.

No victim is left out of a mean: a failed reconstruction counts as 0 dB, relative RMSE 1, MSE 1 and SSIM 0 (for LPIPS
and feature errors, which have no upper end, as mid-grey), and a missing label as wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from ppbench.metrics.image import PSNR_CAP, RMSE_RAW_CAP
from ppbench.metrics.intervals import Estimate, Floats, Interval, Statistic, bootstrap, proportion, unsupported
from ppbench.metrics.labels import multiset_chance
from ppbench.metrics.modality import BROKEN_DB
from ppbench.questions.labels import label_accuracy
from ppbench.records.figure import bootstrap_seed, record_metric
from ppbench.records.schema import Metric, Strict
from ppbench.records.scores import Amount, AtLeastOne, Count, ProbedScore, Share, without_defaults

# -- Recognition in records, and the shares of victims that are re-identified or whose class is read --


class Recognition(Strict):
    """The recognition of one reconstruction, see `metrics.recognition`.

    Attributes:
        gallery: number of held-out images beside its original.
        rank: number of these at least as similar; 0: re-identified. rank_features: the same by features.
        read: whether its class is read; null without classes. read_features: the same by features.
        common: share of the commonest class, the best accuracy of a blind guess; null without classes.
    """

    gallery: AtLeastOne
    rank: Count
    read: bool | None = None
    rank_features: Count | None = None
    read_features: bool | None = None
    common: Share | None = None

    @model_validator(mode="after")
    def _fits(self) -> Recognition:
        if max(self.rank, self.rank_features or 0) > self.gallery:
            raise ValueError(f"no more than the {self.gallery} images of the gallery can be more like the original")
        return self


RECOGNITION_METRICS: dict[str, Callable[[Recognition], float | None]] = {
    "reidentified": lambda recognition: recognition.rank,
    "recognized": lambda recognition: recognition.read,
    "reidentified_features": lambda recognition: recognition.rank_features,
    "recognized_features": lambda recognition: recognition.read_features,
}
"""The field of `Recognition` for each metric, by pixels and by a feature network."""
REIDENTIFIED = "reidentified"
"""Prefix of the metrics that count re-identified originals, not classes that are read."""


def share_of_readers(name: str, scores: Sequence[Any], classes: int, seed: int) -> Metric:
    """Return the share of victims that are re-identified, or whose class is read; one without a figure is neither.

    Chance is the most that blind guesses reach if each is matched to the most similar image of its batch: among B
    images and a gallery of G others the most similar one is of the batch with probability B / (G + B), and the best
    matching of B classes gets `multiset_chance` right, or the commonest class.
    """
    units = successes_of(name, scores)
    reidentifies, sizes = name.startswith(REIDENTIFIED), {unit: len(victims) for unit, victims in units.items()}
    measured = [(s.recognition, sizes[s.unit]) for s in scores if s.recognition is not None]
    blind = [
        size / (recognition.gallery + size)
        if reidentifies
        else max(recognition.common or 0.0, multiset_chance(classes, size))
        for recognition, size in measured
    ]
    share = proportion(list(units.values()), sum(blind) / len(blind))
    return record_metric(name, share, False)


def successes_of(name: str, scores: Sequence[Any]) -> dict[Hashable, NDArray[np.bool_]]:
    """Return, by unit, which victims the metric `name` counts as successes; one without a figure is none."""
    of, units = RECOGNITION_METRICS[name], dict[Hashable, list[bool]]()
    for score in scores:
        value = None if score.recognition is None else of(score.recognition)
        units.setdefault(score.unit, []).append(value == 0 if name.startswith(REIDENTIFIED) else bool(value))
    return {unit: np.array(successes, dtype=np.bool_) for unit, successes in units.items()}


def is_reidentified(score: Any) -> bool:
    """Return whether the original of a victim is re-identified among the gallery, by pixels or by features."""
    recognition: Recognition | None = getattr(score, "recognition", None)
    return recognition is not None and any(
        of(recognition) == 0 for name, of in RECOGNITION_METRICS.items() if name.startswith(REIDENTIFIED)
    )


def gallery_size(scores: Sequence[Any]) -> int:
    """Return the number of held-out images beside each victim; 0 if recognition was not measured."""
    recognitions = (getattr(score, "recognition", None) for score in scores)
    return next((recognition.gallery for recognition in recognitions if recognition is not None), 0)


SSIM_REASON = "images smaller than the 7 x 7 window, or no finite reconstruction"
PERCEPTUAL_REASON = "no file of AlexNet's weights was given, or no images of 28 pixels a side"
OLD_REASON = "scores of before it was measured"
DETECTION = "detection_auc"
GAIN = "gain_median"
ACCURACY = "reconstruction_accuracy"
_LAST = 1e-6  # how far rounding may exceed a range
Decibels = Annotated[float, Field(ge=-1000, le=PSNR_CAP)]
"""PSNR in dB; below 0 for table rows outside the range of the training part."""
Relative = Annotated[float, Field(ge=0, le=RMSE_RAW_CAP)]


class ImageScore(ProbedScore):
    """One reconstructed image. A failed one (not finite) has null figures and counts as psnr 0 dB, rmse 1.

    Attributes:
        psnr: dB, of the reconstruction clipped to the data range.
        rmse: ||guess - x|| / ||x||, clipped ("recon/1"); rmse_raw: the same, not clipped.
        ssim: structural similarity, clipped; null if the image is too small.
        label: whether the guessed label is right; null if the attack gave none.
        confidence: the attack's own figure, as a relative mismatch; smaller is surer.
        at_truth: discrepancy at the truth relative to an all-zero simulation; null with nuisance unknowns.
        evaluations: gradient evaluations spent on the image's batch.
        ratio: magnitude of the undefended gradient over that of the defense's perturbation, at the biases of
            the feature layers (x-axis of a PPC figure); null if nothing is perturbed or it is unknown.
        mse: mean squared error of the clipped reconstruction, in units of the data range ("Test-MSE" of MP-DP).
        lpips: perceptual distance (Zhang et al. 2018) by the network that `CellConfig.perceptual` names; null without.
        feat_mse: mean squared error of that network's last features ("Feat-MSE" of MP-DP); null without.
        blind: PSNR in dB of the better of two blind guesses: the public mean image, and grey. Null in older records,
            which have no `mse`, `oracle` and `path` either.
        oracle: PSNR of the best among the answer and the rejected reconstructions; never a result.
        path: (gradient evaluations, PSNR) of the answer after so many evaluations, ascending.
        detected: for an active server, the share of honest clients who notice less (`run.detection`); else null.
        accuracy: for a table row with public encoding, the share of its columns that are right (`row_accuracy`).
        blind_accuracy: the same of each column's most frequent category, or mean, of the public examples.
        recognition: whether it re-identifies its original and shows its class; null in older records.
    """

    kind: Literal["image"] = "image"
    psnr: Decibels | None
    rmse: Relative | None
    rmse_raw: Relative | None
    ssim: Annotated[float, Field(ge=-1 - _LAST, le=1 + _LAST)] | None
    label: bool | None
    confidence: float | None
    at_truth: Annotated[float, Field(ge=-_LAST)] | None
    evaluations: Count
    ratio: Amount | None = None
    mse: Amount | None = None
    lpips: Annotated[float, Field(ge=-_LAST)] | None = None
    feat_mse: Amount | None = None
    blind: Decibels | None = None
    oracle: Decibels | None = None
    path: list[tuple[Count, Decibels]] = Field(default_factory=list)
    detected: Share | None = None
    accuracy: Share | None = None
    blind_accuracy: Share | None = None
    recognition: Recognition | None = None

    @model_serializer(mode="wrap")
    def _older(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        later = dict.fromkeys(("detected", "accuracy", "blind_accuracy", "recognition"))
        return without_defaults(dump(self), later)

    @property
    def decibels(self) -> float:
        """The PSNR; 0 of a failed reconstruction."""
        return self.psnr or 0.0

    @property
    def error(self) -> float:
        """The relative RMSE; 1 of a failed reconstruction."""
        return 1.0 if self.rmse is None else self.rmse

    @property
    def gain(self) -> float | None:
        """Decibels beyond the better of two blind guesses; None if these were not measured."""
        return None if self.blind is None else self.decibels - self.blind


Pick = Callable[[ImageScore], float | None]
Make = Callable[[Sequence[ImageScore], int, int], Metric]
"""Computes a metric from scores, the number of classes and a seed."""


def image_metrics(scores: Sequence[Any], classes: int, seed: int) -> dict[str, Callable[[], Metric]]:
    """Return functions that compute the `IMAGE_METRICS` which `scores` support, by name.

    `LATER_METRICS` need `ImageScore.blind`, `detection_auc` needs `ImageScore.detected`, `reconstruction_accuracy`
    needs `ImageScore.accuracy`, and `RECOGNITION_METRICS` need their figure of `ImageScore.recognition`.
    """
    absent = {
        *(() if any(score.blind is not None for score in scores) else LATER_METRICS),
        *(() if any(score.detected is not None for score in scores) else (DETECTION,)),
        *(() if any(score.accuracy is not None for score in scores) else (ACCURACY,)),
        *(
            n
            for n, of in RECOGNITION_METRICS.items()
            if all(s.recognition is None or of(s.recognition) is None for s in scores)
        ),
    }
    absent |= set() if any(score.recognition is not None and score.blind is not None for score in scores) else {GAIN}
    return {name: partial(IMAGE_METRICS[name], scores, classes, seed) for name in IMAGE_METRICS if name not in absent}


def _units(scores: Sequence[ImageScore], pick: Pick) -> list[Floats]:
    """Return the scores' figures by unit, the batch of the attack; null counts as 0."""
    groups: dict[Hashable, list[float]] = {}
    for score in scores:
        groups.setdefault(score.unit, []).append(float(pick(score) or 0.0))
    return [np.array(groups[key], dtype=np.float64) for key in groups]


def _over_all(name: str, pick: Pick, statistic: Statistic, safer: bool, reason: str = "") -> tuple[str, Make]:
    """Return a statistic over all victims; with a `reason`, no value if a victim has no figure."""

    def make(scores: Sequence[ImageScore], classes: int, seed: int) -> Metric:
        if reason and any(pick(score) is None for score in scores):
            return record_metric(name, unsupported(len(scores), reason), safer)
        return record_metric(name, bootstrap(_units(scores, pick), statistic, bootstrap_seed(seed, name)), safer)

    return name, make


def _over_known(name: str, pick: Pick, reason: str, safer: bool = False) -> tuple[str, Make]:
    """Return the median of a diagnostic over the victims that have it; it describes evidence, not success."""
    _, over_all = _over_all(name, pick, "median", safer)

    def make(scores: Sequence[ImageScore], classes: int, seed: int) -> Metric:
        known = [score for score in scores if pick(score) is not None]
        return over_all(known, classes, seed) if known else record_metric(name, unsupported(len(scores), reason), True)

    return name, make


def median_gain(scores: Sequence[Any], seed: int) -> Metric | None:
    """Return the median of decibels beyond the best blind guess; None unless it was measured for every victim."""
    if any(score.gain is None for score in scores):
        return None
    return IMAGE_METRICS[GAIN](scores, 0, seed)


def _largest(scores: Sequence[ImageScore], classes: int, seed: int) -> Metric:
    none = Interval(None, None, "largest of the sample; no interval bounds the worst image not yet drawn")
    return record_metric("psnr_max", Estimate(max(s.decibels for s in scores), none, len(scores)), False)


def _ssim(scores: Sequence[ImageScore], classes: int, seed: int) -> Metric:
    """Return the mean SSIM; a failed reconstruction counts as 0, images too small for SSIM give no value."""
    if any(s.ssim is None and s.psnr is not None for s in scores) or all(s.ssim is None for s in scores):
        return record_metric("ssim_mean", unsupported(len(scores), SSIM_REASON), False)
    return _over_all("ssim_mean", lambda s: s.ssim, "mean", False)[1](scores, classes, seed)


def _above(scores: Sequence[ImageScore], classes: int, seed: int) -> Metric:
    share = proportion([unit > 0 for unit in _units(scores, lambda s: s.decibels > BROKEN_DB)])
    return record_metric("share_above_20db", share, False)


def _labels(scores: Sequence[ImageScore], classes: int, seed: int) -> Metric:
    """Return the accuracy of labels that came with images; if the attack gave any, a missing one is wrong."""
    if all(score.label is None for score in scores):
        figure = unsupported(len(scores), "the attack returned no labels", 1 / classes)
    else:
        figure = label_accuracy([unit > 0 for unit in _units(scores, lambda s: s.label)], classes)
    return record_metric("label_accuracy", figure, False)


def _price(scores: Sequence[ImageScore], classes: int, seed: int) -> Metric:
    """Return the total of gradient evaluations over the number of victims above 20 dB."""
    spent = sum({score.unit: score.evaluations for score in scores}.values())
    broken = sum(score.decibels > BROKEN_DB for score in scores)
    figure = unsupported(len(scores), "no victim came out above 20 dB")
    if broken:
        figure = Estimate(spent / broken, Interval(None, None, "none: a ratio of totals"), len(scores))
    return record_metric("evaluations_per_broken", figure, True)


def _detection(scores: Sequence[ImageScore], classes: int, seed: int) -> Metric:
    """Return the AUC of the test by which clients distinguish an active server from an honest one.

    Over clients, whose images share one message; the interval is over the attacked ones, the honest ones being many.
    """
    clients: dict[tuple[int, int], float] = {(s.probe, s.client): s.detected for s in scores if s.detected is not None}
    placed = [np.array([value], dtype=np.float64) for value in clients.values()]
    return record_metric(
        DETECTION, replace(bootstrap(placed, "mean", bootstrap_seed(seed, DETECTION)), chance=0.5), True
    )


def _accuracy(scores: Sequence[ImageScore], classes: int, seed: int) -> Metric:
    """Return the mean share of right columns; chance is that of a blind guess, if measured."""
    blind = [score.blind_accuracy for score in scores if score.blind_accuracy is not None]
    figure = bootstrap(_units(scores, lambda s: s.accuracy), "mean", bootstrap_seed(seed, ACCURACY))
    chance = sum(blind) / len(blind) if blind else None
    return record_metric(ACCURACY, replace(figure, chance=chance), False)


LATER_METRICS: dict[str, Make] = dict(
    [
        _over_all("psnr_worst_decile", lambda s: s.decibels, "worst_decile", False),
        _over_all("test_mse_mean", lambda s: 1.0 if s.psnr is None else s.mse, "mean", True, OLD_REASON),
        _over_all("lpips_mean", lambda s: s.lpips, "mean", True, PERCEPTUAL_REASON),
        _over_all("feat_mse_mean", lambda s: s.feat_mse, "mean", True, PERCEPTUAL_REASON),
        _over_known("blind_median", lambda s: s.blind, OLD_REASON),
        _over_known("oracle_median", lambda s: s.oracle, OLD_REASON),
        ("evaluations_per_broken", _price),
    ]
)
IMAGE_METRICS: dict[str, Make] = dict(
    [
        _over_all("psnr_median", lambda s: s.decibels, "median", False),
        _over_all("psnr_p95", lambda s: s.decibels, "p95", False),
        ("psnr_max", _largest),
        _over_all("rmse_mean", lambda s: s.error, "mean", True),
        _over_all("rmse_raw_mean", lambda s: 1.0 if s.rmse_raw is None else s.rmse_raw, "mean", True),
        _over_all("rmse_unit_mean", lambda s: min(s.error, 1.0), "mean", True),
        ("ssim_mean", _ssim),
        ("share_above_20db", _above),
        ("label_accuracy", _labels),
        _over_known("at_truth_median", lambda s: s.at_truth, "the evidence has nuisance unknowns", True),
        _over_known("ratio_median", lambda s: s.ratio, "no perturbation, or its size is not known"),
        (DETECTION, _detection),
        (ACCURACY, _accuracy),
        *LATER_METRICS.items(),
        *((name, partial(share_of_readers, name)) for name in RECOGNITION_METRICS),
        _over_known(GAIN, lambda s: s.gain, OLD_REASON),
    ]
)
"""The metrics of a cell of images, by name; psnr in dB, rmse relative to the victim's norm."""
