"""The score of a reconstructed image or table row, and the metrics of a cell.

No victim is left out of a mean: a failed reconstruction counts as 0 dB, relative RMSE 1, MSE 1 and SSIM 0 (for LPIPS
and feature errors, which have no upper end, as mid-grey), and a missing label as wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from ppbench.metrics.image import PSNR_CAP, RMSE_RAW_CAP, DataRange, image_figures
from ppbench.metrics.intervals import Estimate, Floats, Interval, Statistic, bootstrap, proportion, unsupported
from ppbench.metrics.modality import EXACT_DB, Modality
from ppbench.metrics.spec import CHANCE, DB, INTERVAL, SHARE, VALUE, Ending, Judgment, MetricSpec
from ppbench.questions.labels import LABEL_ACCURACY, label_accuracy
from ppbench.questions.recognition import RECOGNITION_METRICS, Recognition, share_of_readers
from ppbench.records.figure import bootstrap_seed, grouped, record_metric
from ppbench.records.schema import Metric, Strict
from ppbench.records.scores import Amount, Count, Grown, ProbedScore, Share

if TYPE_CHECKING:
    from torch import Tensor

SSIM_REASON = "images smaller than the 7 x 7 window, or no finite reconstruction"
PERCEPTUAL_REASON = "no file of AlexNet's weights was given, or no images of 28 pixels a side"
OLD_REASON = "scores of before it was measured"
ABOVE_DB = 20.0
"""PSNR in dB of the share that papers report, `share_above_20db`. No verdict asks it: `Modality.rebuilt` does."""
ABOVE_WORDS = f"above {ABOVE_DB:g} dB"
_LAST = 1e-6  # how far rounding may exceed a range
Decibels = Annotated[float, Field(ge=-1000, le=PSNR_CAP)]
"""PSNR in dB; below 0 for table rows outside the range of the training part."""
Relative = Annotated[float, Field(ge=0, le=RMSE_RAW_CAP)]


class LayerScore(Strict):
    """How well a layer's input was determined: `SolvedLayer` (`ppbench.adversary.attack`) on record."""

    name: str
    unknowns: Count
    determined: Count
    condition: Amount
    residual: Amount
    exact: bool


class TextScore(Grown):
    """A reconstructed text beside the original.

    Attributes:
        guess, truth: both as written.
        in_set, exact, run, facts: as in `ppbench.metrics.text.TextFigures`.
        rouge_1, rouge_2, rouge_l: the same; null in older records.
        blind_in_set: in_set of the tokens that share most with public texts; null in older records.
    """

    guess: str
    truth: str
    in_set: Share
    exact: bool
    run: Count
    facts: Share | None
    rouge_1: Share | None = None
    rouge_2: Share | None = None
    rouge_l: Share | None = None
    blind_in_set: Share | None = None
    LATER: ClassVar[Mapping[str, Any]] = dict.fromkeys(("rouge_1", "rouge_2", "rouge_l", "blind_in_set"))


class ImageScore(ProbedScore, Grown):
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
        layers: how well each layer was determined, of attacks that compute inputs layer by layer; else empty.
        text: of a text with a public vocabulary; else null.
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
    layers: list[LayerScore] = Field(default_factory=list)
    text: TextScore | None = None
    LATER: ClassVar[Mapping[str, Any]] = {
        **dict.fromkeys(("detected", "accuracy", "blind_accuracy", "recognition", "text")),
        "layers": [],
    }

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


def score_figures(guess: Tensor, truth: Tensor, data_range: DataRange, kind: Modality) -> dict[str, float | None]:
    """Return the figures of a reconstruction, both [*shape], by field of `ImageScore`: for scores and their checks."""
    return asdict(image_figures(guess, truth, data_range))


Pick = Callable[[ImageScore], float | None]
Compute = Callable[[MetricSpec, Sequence[ImageScore], int, int], Estimate]
"""Computes a metric from its spec, scores, the number of classes and a seed of its own."""


@dataclass(frozen=True)
class ImageMetric:
    """A metric of images. needs: whether a score supports it; the cell has it where any score does.

    diagnostic: whether it describes evidence, not success; without a value its record says that higher is safer.
    judged: a victim's value, the worst one of a failed reconstruction, by which `ppbench compare` judges a metric whose
    spec has a judgment; kinds: whether it does so for a kind of data. ValueError: `judged` is missing.
    """

    spec: MetricSpec
    compute: Compute
    needs: Callable[[ImageScore], bool] = lambda _: True
    diagnostic: bool = False
    judged: Callable[[ImageScore], float] | None = None
    kinds: Callable[[Modality], bool] = lambda _: True

    def __post_init__(self) -> None:
        if self.spec.judgment is not None and self.judged is None:
            raise ValueError(f"metric {self.spec.name} has a judgment; give `judged`, the value of one victim")

    def __call__(self, scores: Sequence[ImageScore], classes: int, seed: int) -> Metric:
        """Return the metric of a cell with master seed `seed`."""
        figure = self.compute(self.spec, scores, classes, bootstrap_seed(seed, self.spec.name))
        metric = record_metric(self.spec, figure)
        unknown = self.diagnostic and figure.value is None
        return metric.model_copy(update={"higher_is_safer": True}) if unknown else metric


def image_metrics(scores: Sequence[Any], classes: int, seed: int) -> dict[str, Callable[[], Metric]]:
    """Return functions that compute the `IMAGE_METRICS` which `scores` support, by name."""
    return {
        metric.spec.name: partial(metric, scores, classes, seed)
        for metric in IMAGE_METRICS
        if any(metric.needs(score) for score in scores)
    }


def _units(scores: Sequence[ImageScore], pick: Pick) -> list[Floats]:
    """Return the scores' figures by unit, the batch of the attack; null counts as 0."""
    units = grouped(scores, lambda score: score.unit).values()
    return [np.array([pick(score) or 0.0 for score in unit], dtype=np.float64) for unit in units]


def _over_all(pick: Pick, statistic: Statistic, reason: str = "") -> Compute:
    """Return a statistic over all victims; with a `reason`, no value if a victim has no figure."""

    def compute(spec: MetricSpec, scores: Sequence[ImageScore], classes: int, seed: int) -> Estimate:
        if reason and any(pick(score) is None for score in scores):
            return unsupported(len(scores), reason)
        return bootstrap(_units(scores, pick), statistic, seed)

    return compute


def _over_known(pick: Pick, reason: str) -> Compute:
    """Return the median of a diagnostic over the victims that have it."""
    over_all = _over_all(pick, "median")

    def compute(spec: MetricSpec, scores: Sequence[ImageScore], classes: int, seed: int) -> Estimate:
        known = [score for score in scores if pick(score) is not None]
        return over_all(spec, known, classes, seed) if known else unsupported(len(scores), reason)

    return compute


def median_of(name: str, pick: Pick, scores: Sequence[Any], seed: int) -> Metric:
    """Return the median of a figure that every score has, with its interval, as the metric `name`."""
    spec = MetricSpec(name, name)
    return record_metric(spec, bootstrap(_units(scores, pick), "median", bootstrap_seed(seed, name)))


def _largest(spec: MetricSpec, scores: Sequence[ImageScore], classes: int, seed: int) -> Estimate:
    none = Interval(None, None, "largest of the sample; no interval bounds the worst image not yet drawn")
    return Estimate(max(s.decibels for s in scores), none, len(scores))


def _ssim(spec: MetricSpec, scores: Sequence[ImageScore], classes: int, seed: int) -> Estimate:
    """Return the mean SSIM; a failed reconstruction counts as 0, images too small for SSIM give no value."""
    if any(s.ssim is None and s.psnr is not None for s in scores) or all(s.ssim is None for s in scores):
        return unsupported(len(scores), SSIM_REASON)
    return _over_all(lambda s: s.ssim, "mean")(spec, scores, classes, seed)


def _above(spec: MetricSpec, scores: Sequence[ImageScore], classes: int, seed: int) -> Estimate:
    return proportion([unit > 0 for unit in _units(scores, lambda s: s.decibels > ABOVE_DB)])


def _labels(spec: MetricSpec, scores: Sequence[ImageScore], classes: int, seed: int) -> Estimate:
    """Return the accuracy of labels that came with images; if the attack gave any, a missing one is wrong."""
    if all(score.label is None for score in scores):
        return unsupported(len(scores), "the attack returned no labels", 1 / classes)
    return label_accuracy([unit > 0 for unit in _units(scores, lambda s: s.label)], classes)


def _price(spec: MetricSpec, scores: Sequence[ImageScore], classes: int, seed: int) -> Estimate:
    """Return the total of gradient evaluations over the number of victims above `ABOVE_DB`."""
    spent = sum({score.unit: score.evaluations for score in scores}.values())
    broken = sum(score.decibels > ABOVE_DB for score in scores)
    if not broken:
        return unsupported(len(scores), f"no victim came out {ABOVE_WORDS}")
    return Estimate(spent / broken, Interval(None, None, "none: a ratio of totals"), len(scores))


def _detection(spec: MetricSpec, scores: Sequence[ImageScore], classes: int, seed: int) -> Estimate:
    """Return the AUC of the test by which clients distinguish an active server from an honest one.

    Over clients, whose images share one message; the interval is over the attacked ones, the honest ones being many.
    """
    clients: dict[tuple[int, int], float] = {(s.probe, s.client): s.detected for s in scores if s.detected is not None}
    placed = [np.array([value], dtype=np.float64) for value in clients.values()]
    return replace(bootstrap(placed, "mean", seed), chance=0.5)


def _accuracy(spec: MetricSpec, scores: Sequence[ImageScore], classes: int, seed: int) -> Estimate:
    """Return the mean share of right columns; chance is that of a blind guess, if measured."""
    blind = [score.blind_accuracy for score in scores if score.blind_accuracy is not None]
    figure = bootstrap(_units(scores, lambda s: s.accuracy), "mean", seed)
    return replace(figure, chance=sum(blind) / len(blind) if blind else None)


def _is_measured(score: ImageScore) -> bool:
    """Return whether blind guesses were measured, and all that came to records with them."""
    return score.blind is not None


def _reads(name: str) -> Callable[[ImageScore], bool]:
    """Return whether a score has the figure behind a metric of `RECOGNITION_METRICS`."""
    of = RECOGNITION_METRICS[name]
    return lambda score: score.recognition is not None and of(score.recognition) is not None


def _of_texts(name: str, title: str, meaning: str, pick: Callable[[TextScore], float | None], unit: str) -> ImageMetric:
    """Return a mean over the texts that have a figure."""

    def compute(spec: MetricSpec, scores: Sequence[ImageScore], classes: int, seed: int) -> Estimate:
        known = [score for score in scores if score.text is not None and pick(score.text) is not None]
        mean = _over_all(lambda score: None if score.text is None else pick(score.text), "mean")
        return mean(spec, known, classes, seed) if known else unsupported(len(scores), "no text has one")

    return ImageMetric(MetricSpec(name, title, unit, meaning, short=""), compute, lambda score: score.text is not None)


IN_ANY_ORDER = "tokens_in_set"
"""The metric by which texts whose tokens came out in a wrong order are recognizable."""


def _tokens_in_any_order() -> ImageMetric:
    """Return the share of a text's tokens that came out anywhere; chance is a blind guess's, null in older records."""
    meaning = "Share of a text's tokens that came out anywhere."
    metric = _of_texts(IN_ANY_ORDER, "Tokens found", meaning, lambda text: text.in_set, SHARE)

    def compute(spec: MetricSpec, scores: Sequence[ImageScore], classes: int, seed: int) -> Estimate:
        blind = [score.text.blind_in_set for score in scores if score.text is not None]
        known = [share for share in blind if share is not None]
        figure = metric.compute(spec, scores, classes, seed)
        return replace(figure, chance=sum(known) / len(known) if known and len(known) == len(blind) else None)

    return replace(metric, compute=compute)


def _rouge(name: str, title: str, units: str, pick: Callable[[TextScore], float | None]) -> ImageMetric:
    """Return a mean over texts, as DAGER prints it; older records have none."""
    meaning = f"Mean F-measure of the {units} that a text and its original share."
    metric = _of_texts(name, title, meaning, pick, "")
    return replace(metric, needs=lambda score: score.text is not None and pick(score.text) is not None)


def _readers(name: str, meaning: str, columns: tuple[Ending, ...]) -> ImageMetric:
    spec = MetricSpec(name, name.replace("_", " ").capitalize(), SHARE, meaning, short="", columns=columns)
    return ImageMetric(spec, share_of_readers, _reads(name))


NORM = "share of the victim's norm"
GAIN_MEDIAN = ImageMetric(
    MetricSpec("gain_median", "Gain", DB, "Median PSNR beyond the better of two blind guesses.", short=""),
    _over_known(lambda s: s.gain, OLD_REASON),
    lambda score: score.recognition is not None and score.blind is not None,
    diagnostic=True,
)
IMAGE_METRICS: tuple[ImageMetric, ...] = (
    ImageMetric(
        MetricSpec(
            "psnr_median",
            "PSNR median",
            DB,
            "Median PSNR of the reconstructions; a failed one counts as 0 dB, an exact one as 100 dB.",
            digits=1,
            judgment=Judgment("median", 0.5, 1.0, digits=2),
        ),
        _over_all(lambda s: s.decibels, "median"),
        judged=lambda s: min(s.decibels, EXACT_DB),
        kinds=lambda kind: kind.decibels,
    ),
    ImageMetric(
        MetricSpec("psnr_p95", "p95", DB, "95th percentile of the PSNR over the victims.", digits=1, columns=VALUE),
        _over_all(lambda s: s.decibels, "p95"),
    ),
    ImageMetric(
        MetricSpec(
            "psnr_max", "Best PSNR", DB, "PSNR of the best rebuilt victim, without an interval.", short="", columns=()
        ),
        _largest,
    ),
    ImageMetric(
        MetricSpec(
            "rmse_mean",
            "Relative error",
            NORM,
            "Mean of ||guess - x|| / ||x||, the guess clipped to the data range.",
            higher_is_safer=True,
            short="rMSE",
            columns=VALUE,
            judgment=Judgment("mean", 0.02, 0.05),
        ),
        _over_all(lambda s: s.error, "mean"),
        judged=lambda s: s.error,
        kinds=lambda kind: kind.headline == "rmse_mean",
    ),
    ImageMetric(
        MetricSpec(
            "rmse_raw_mean",
            "Relative error, not clipped",
            NORM,
            "The same, not clipped.",
            higher_is_safer=True,
            short="",
            columns=(),
        ),
        _over_all(lambda s: 1.0 if s.rmse_raw is None else s.rmse_raw, "mean"),
    ),
    ImageMetric(
        MetricSpec(
            "rmse_unit_mean",
            "Relative error, at most 1",
            NORM,
            "`rmse_mean` with every victim's error counted as 1 at most.",
            higher_is_safer=True,
            short="",
            columns=(),
        ),
        _over_all(lambda s: min(s.error, 1.0), "mean"),
    ),
    ImageMetric(
        MetricSpec(
            "ssim_mean",
            "SSIM",
            "",
            "Mean structural similarity (uniform windows of 7 x 7), 1 for an exact image.",
            columns=VALUE,
        ),
        _ssim,
    ),
    ImageMetric(
        MetricSpec(
            "share_above_20db",
            f"A{ABOVE_WORDS[1:]}",
            SHARE,
            f"Share of victims rebuilt {ABOVE_WORDS}.",
            short="",
            judgment=Judgment("decision", 0.02, 0.05),
        ),
        _above,
        judged=lambda s: float(s.decibels > ABOVE_DB),
        kinds=lambda kind: kind.decibels,
    ),
    ImageMetric(replace(LABEL_ACCURACY, judgment=None), _labels, judged=lambda s: float(bool(s.label))),
    ImageMetric(
        MetricSpec(
            "at_truth_median",
            "Discrepancy at the truth",
            "",
            "Median discrepancy of the attack's evidence at the truth; about 0 where it is exact.",
            higher_is_safer=True,
            short="",
            columns=(),
        ),
        _over_known(lambda s: s.at_truth, "the evidence has nuisance unknowns"),
        diagnostic=True,
    ),
    ImageMetric(
        MetricSpec(
            "ratio_median",
            "Gradient over perturbation",
            "",
            "Median of the undefended gradient's magnitude over that of the defense's perturbation.",
            short="",
            columns=(),
        ),
        _over_known(lambda s: s.ratio, "no perturbation, or its size is not known"),
        diagnostic=True,
    ),
    ImageMetric(
        MetricSpec(
            "detection_auc",
            "Detection, AUC",
            "",
            "How well clients distinguish an active server from an honest one; 0.5: not at all.",
            higher_is_safer=True,
            short="",
        ),
        _detection,
        lambda score: score.detected is not None,
    ),
    ImageMetric(
        MetricSpec(
            "reconstruction_accuracy",
            "Parts right",
            SHARE,
            "Share of an input's parts that are right: of a table row's columns, of a sequence's places.",
            columns=CHANCE,
            judgment=Judgment("mean", 0.02, 0.05),
        ),
        _accuracy,
        lambda score: score.accuracy is not None,
        judged=lambda score: score.accuracy or 0.0,
        kinds=lambda kind: not kind.decibels and kind.headline != "rmse_mean",
    ),
    _tokens_in_any_order(),
    _of_texts("texts_exact", "Exact texts", "Share of texts that came out word for word.", lambda t: t.exact, SHARE),
    _of_texts(
        "facts_found",
        "Names and numbers",
        "Share of a text's names and numbers that came out.",
        lambda t: t.facts,
        SHARE,
    ),
    _of_texts(
        "common_run", "Longest run", "Longest run of tokens shared with the original, mean.", lambda t: t.run, "tokens"
    ),
    _rouge("rouge_1", "ROUGE-1", "words", lambda t: t.rouge_1),
    _rouge("rouge_2", "ROUGE-2", "pairs of neighboring words", lambda t: t.rouge_2),
    _rouge("rouge_l", "ROUGE-L", "longest subsequence of words", lambda t: t.rouge_l),
    ImageMetric(
        MetricSpec(
            "psnr_worst_decile",
            "Worst tenth",
            DB,
            "Mean PSNR of the best rebuilt tenth of the victims.",
            digits=1,
            columns=VALUE,
        ),
        _over_all(lambda s: s.decibels, "worst_decile"),
        _is_measured,
    ),
    ImageMetric(
        MetricSpec(
            "test_mse_mean",
            "Test-MSE",
            "squared data range",
            "Mean squared error of the clipped reconstructions.",
            higher_is_safer=True,
            digits=4,
        ),
        _over_all(lambda s: 1.0 if s.psnr is None else s.mse, "mean", OLD_REASON),
        _is_measured,
    ),
    ImageMetric(
        MetricSpec(
            "lpips_mean",
            "LPIPS",
            "",
            "Mean perceptual distance (LPIPS) by the network that `perceptual` names.",
            higher_is_safer=True,
        ),
        _over_all(lambda s: s.lpips, "mean", PERCEPTUAL_REASON),
        _is_measured,
    ),
    ImageMetric(
        MetricSpec(
            "feat_mse_mean",
            "Feat-MSE",
            "",
            "Mean squared error of the last features of that network.",
            higher_is_safer=True,
        ),
        _over_all(lambda s: s.feat_mse, "mean", PERCEPTUAL_REASON),
        _is_measured,
    ),
    ImageMetric(
        MetricSpec(
            "blind_median",
            "Blind guess",
            DB,
            "Median PSNR of the better of two blind guesses: the public mean image, and grey.",
            short="",
            columns=VALUE,
        ),
        _over_known(lambda s: s.blind, OLD_REASON),
        _is_measured,
        diagnostic=True,
    ),
    ImageMetric(
        MetricSpec(
            "oracle_median",
            "Oracle",
            DB,
            "Median PSNR of the best among the answer and what the attack rejected; never a result.",
            short="",
            columns=VALUE,
        ),
        _over_known(lambda s: s.oracle, OLD_REASON),
        _is_measured,
        diagnostic=True,
    ),
    ImageMetric(
        MetricSpec(
            "evaluations_per_broken",
            "Evaluations per broken",
            "gradient evaluations",
            f"Total evaluations divided by the number of victims {ABOVE_WORDS}.",
            higher_is_safer=True,
            digits=0,
            columns=VALUE,
        ),
        _price,
        _is_measured,
    ),
    _readers(
        "reidentified", "Originals that their reconstruction is nearest to among held-out images, by pixels.", CHANCE
    ),
    _readers("recognized", "Classes that the five nearest held-out images vote for rightly, by pixels.", CHANCE),
    _readers(
        "reidentified_features", "`reidentified` by the features of the network that `perceptual` names.", INTERVAL
    ),
    _readers("recognized_features", "`recognized` by the features of that network.", INTERVAL),
    GAIN_MEDIAN,
)
"""The metrics of a cell of images, in the order of its record."""
