"""From per-victim scores to a cell's metrics: a pure function, so that `ppbench verify` can recompute every
figure.

Failures count as failures: a reconstruction without figures is 0 dB, relative RMSE 1, MSE 1 and SSIM 0 (for LPIPS and
feature errors, which have no upper end, the scorer measures it as mid-grey), an image without a label is a wrong label;
no victim drops out of a mean. Figures keep 12 significant digits, so that a last bit that differs between processors
does not read as a forged record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Hashable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ppbench.base.errors import UsageError
from ppbench.metrics.intervals import Estimate, Floats, Interval, Statistic, bootstrap, proportion, refused
from ppbench.metrics.labels import multiset_chance
from ppbench.metrics.tracing import tracing_accuracy
from ppbench.records.figure import metric_of, seed_of
from ppbench.records.members import members_metrics
from ppbench.records.schema import ImageScore, LabelScore, MemberScore, Metric, OutputScore, TraceScore, Victim

BROKEN_DB = 20.0
"""A reconstruction above this PSNR in dB counts as broken: the subject is plain to see."""
SSIM_REASON = "images smaller than the 7 x 7 window, or no finite reconstruction"
PERCEPTUAL_REASON = "no file of AlexNet's weights was given, or no images of 28 pixels a side"

Figure = Callable[[ImageScore], float]
Named = tuple[str, Callable[[], Metric]]
"""A metric's name, and what computes it."""


def aggregate(
    victims: Sequence[Victim], *, classes: int, seed: int, delta: float | None = None, without: Container[str] = ()
) -> list[Metric]:
    """Return a cell's metrics, each with n, a 95 % interval and its method.

    Image cells: psnr_median, psnr_p95, psnr_max (dB), rmse_mean, rmse_raw_mean, rmse_unit_mean, ssim_mean,
    share_above_20db, label_accuracy, at_truth_median, ratio_median, and where scores hold what they are made from:
    psnr_worst_decile, test_mse_mean, lpips_mean, feat_mse_mean, blind_median, oracle_median, evaluations_per_broken.
    Label cells: label_accuracy. Member cells: see `members_metrics`. Trace cells: tracing_accuracy. Output cells:
    agreement, output_error. No victims: no metrics.

    Args:
        victims: the per-victim scores, all of one kind.
        classes: number of classes C, for the chance level of labels.
        seed: the cell's seed; every bootstrap draws from (seed, name of the metric).
        delta: of the guarantee that the defense claims, for the lower bound on epsilon; None: it claims none.
        without: metrics of image cells that are not wanted, and not computed.

    Raises:
        UsageError: scores of different kinds.
    """
    kinds = {victim.kind for victim in victims}
    if len(kinds) > 1:
        raise UsageError(f"A cell's victims are scored as {' and '.join(sorted(kinds))}; expected one kind.")
    images = [v for v in victims if isinstance(v, ImageScore)]
    labels = [v for v in victims if isinstance(v, LabelScore)]
    members = [v for v in victims if isinstance(v, MemberScore)]
    traces = [v for v in victims if isinstance(v, TraceScore)]
    answers = [v for v in victims if isinstance(v, OutputScore)]
    if images:
        return [make() for name, make in _images(images, classes, seed) if name not in without]
    if labels:
        return [metric_of("label_accuracy", _label_cell(labels, classes), False)]
    if members:
        return members_metrics(members, seed, delta)
    if traces:
        figure = tracing_accuracy([v.owner for v in traces], [v.guess for v in traces])
        return [metric_of("tracing_accuracy", figure, False)]
    if answers:
        return _outputs(answers, classes, seed)
    return []


def unit_of(score: ImageScore | LabelScore) -> tuple[int, int]:
    """Return what a victim was observed with: (probe, client), or (probe, -1) for a whole cohort."""
    return score.probe, -1 if score.cohort else score.client


def _units(scores: Sequence[ImageScore], figure: Figure) -> list[Floats]:
    """Return the scores' figures by unit: the batch (probe, client) that they were attacked in."""
    groups: dict[Hashable, list[float]] = {}
    for score in scores:
        groups.setdefault(unit_of(score), []).append(figure(score))
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
    spent = sum({unit_of(score): score.evaluations for score in scores}.values())
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
        figure = proportion(units, _chance(units, classes))
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


def _label_cell(scores: Sequence[LabelScore], classes: int) -> Estimate:
    groups: dict[tuple[int, int], list[bool]] = {}
    for score in scores:
        groups.setdefault(unit_of(score), []).append(score.label)
    units = [np.array(unit, dtype=bool) for unit in groups.values()]
    return proportion(units, _chance(units, classes))


def _chance(units: Sequence[NDArray[np.bool_]], classes: int) -> float:
    """Return the label accuracy of blind guessing: batches compared as multisets, averaged over victims."""
    return sum(len(unit) * multiset_chance(classes, len(unit)) for unit in units) / sum(map(len, units))


def _outputs(scores: Sequence[OutputScore], classes: int, seed: int) -> list[Metric]:
    """Return the share of queries with the true argmax, and the mean relative error of the outputs.

    Chance is the best constant answer's share: the true model may decide alike on most queries, and a mask that drowns
    its outputs makes the masked ones agree with that, or with nothing. 1 / classes where decisions were not kept.
    """
    decisions = Counter(score.decision for score in scores)
    chance = 1 / classes if None in decisions else max(decisions.values()) / len(scores)
    agreement = proportion([np.array([score.agree]) for score in scores], chance)
    units = [np.array([score.error]) for score in scores]
    return [
        metric_of("agreement", agreement, False),
        metric_of("output_error", bootstrap(units, "mean", seed_of(seed, "output_error")), True),
    ]
