"""Reconstruction: the inputs of a probed batch, images or rows of a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isclose
from typing import TYPE_CHECKING, Any

import numpy as np

from ppbench.metrics.modality import IMAGE, TABLE_ROW, Modality, modalities, modality_in, modality_of
from ppbench.metrics.spec import Rule
from ppbench.questions.base import DistanceLaw, Question
from ppbench.questions.image_metrics import IMAGE_METRICS, ImageScore, image_metrics, score_figures
from ppbench.questions.inquiry import Inquiry, Probe, Scored
from ppbench.questions.labels import LABEL_DISTANCE, mislabelled
from ppbench.records.figure import Terms, grouped
from ppbench.records.schema import AttackInfo, CellConfig, Flag, Metric, Record
from ppbench.records.store import CellImages, Pictures

if TYPE_CHECKING:
    from ppbench.adversary.attack import Challenge, Guess
    from ppbench.federation.plan import Plan


# -- Checks of a cell's scores and flags against its stored reconstructions and one another, for `ppbench verify` --
# Figures are recomputed as by the scorer, in float64 from the same float32 numbers, so on one machine the difference
# is 0; sums in another order change the last digits (below 1e-9 dB and 1e-12 of SSIM). `FIGURE_TOLERANCE` is far
# above that and far below any visible difference.

FIGURE_TOLERANCE = 1e-6
"""Relative and absolute difference beyond which a figure contradicts the images."""
IMAGE_RANGE = (0.0, 1.0)
"""Range of the images of ppbench's own data sets; records do not store another one."""
PICTURE_ROUNDING = 1 / 255
"""Largest difference of root mean square errors between images and their `Pictures`."""
SHARED = ("confidence", "at_truth", "evaluations", "ratio")
"""Fields that all images of a unit share: they come from one attack on one observation."""
RECOMPUTED = ("evidence_inexact", "budget_hurts", "blind_as_good", "oracle_gap")
"""Flags that are a function of scores alone; others depend on the evidence, which is not stored."""


EXTRA_EVALUATIONS = 8
"""Evaluations by which the smallest budget may be exceeded: each pass of each restart evaluates its start once."""
UNEXPLAINED = 1e-4
"""Mismatch above which a search has not ended by success."""


def _odd_figures(scores: Sequence[ImageScore], images: CellImages, kind: Modality) -> Iterator[str]:
    """Yield where `score_figures` and the blind guess of each image contradict its score."""
    sentences: dict[str, list[str]] = {}
    unmeasured = {name for name in ImageScore.LATER if all(getattr(score, name) is None for score in scores)}
    for score, figures in zip(scores, _figures(images, kind), strict=True):
        for name, computed in figures.items():
            recorded = getattr(score, name)
            if name not in unmeasured and not (
                same_figure(recorded, computed)
                or (recorded is None and name in ("mse", "blind") and score.blind is None)
            ):
                where = ".".join(map(str, score.place))
                sentences.setdefault(name, []).append(
                    f"{name} of victim {where} is {recorded}, its images give {computed}"
                )
    for about_figure in sentences.values():
        yield about_figure[0] + (f" (and {len(about_figure) - 1} more)" if len(about_figure) > 1 else "")


def _figures(images: CellImages, kind: Modality) -> Iterator[Mapping[str, float | None]]:
    """Yield the figures of each image, by field of `ImageScore`."""
    import torch

    from ppbench.questions.images import blind_decibels

    mean = None if images.blind is None else torch.from_numpy(images.blind[0])
    for guess, truth in zip(torch.from_numpy(images.guess), torch.from_numpy(images.truth), strict=True):
        blind = {} if mean is None else {"blind": blind_decibels(mean, truth, IMAGE_RANGE)}
        yield {**score_figures(guess, truth, IMAGE_RANGE, kind), **blind}


def _odd_pictures(scores: Sequence[ImageScore], images: Pictures) -> Iterator[str]:
    """Yield the first picture whose error is farther from its score than rounding can bring it.

    Each number of a guess and of an original moves by half a 255th at most, so their root mean square difference by one
    255th (triangle inequality).
    """
    for score, guess, truth in zip(scores, images.guess, images.truth, strict=True):
        where, is_finite = f"victim {'.'.join(map(str, score.place))}", bool(np.isfinite(guess).all())
        if (score.psnr is not None) != is_finite:
            yield f"the picture of {where} is {'' if is_finite else 'not '}finite, its score says otherwise"
            return
        if score.psnr is None:
            continue
        stated = 10 ** (-score.psnr / 20)
        drawn = float(np.sqrt(((guess.astype(np.float64) - truth) ** 2).mean()))
        if abs(drawn - stated) > PICTURE_ROUNDING + FIGURE_TOLERANCE:
            yield f"the picture of {where} has a root mean square error of {drawn:.4f}, its score {stated:.4f}"
            return


def same_figure(recorded: float | None, computed: float | None) -> bool:
    """Return whether two figures are both null, or equal up to rounding."""
    if recorded is None or computed is None:
        return recorded is computed
    return isclose(recorded, computed, rel_tol=FIGURE_TOLERANCE, abs_tol=FIGURE_TOLERANCE)


def _unmatched(scores: Sequence[ImageScore], images: CellImages) -> Iterator[str]:
    """Yield units whose reconstructions are not in the order of least error: a wrong order makes them seem to fail."""
    import torch

    from ppbench.metrics.image import match

    for unit, places in grouped(range(len(scores)), lambda place: scores[place].unit).items():
        guess, truth = images.guess[places], images.truth[places]
        order = match(torch.from_numpy(guess), torch.from_numpy(truth), IMAGE_RANGE) if len(places) > 1 else [0]
        if _cost(guess, truth) > _cost(guess[order], truth) * (1 + FIGURE_TOLERANCE) + FIGURE_TOLERANCE:
            yield f"the reconstructions of unit {'.'.join(map(str, unit))} are not matched to the nearest originals"


def _cost(guess: Any, truth: Any) -> float:
    finite = np.isfinite(guess.reshape(len(guess), -1)).all(axis=1)
    return float(((guess[finite].astype(np.float64).clip(*IMAGE_RANGE) - truth[finite]) ** 2).sum())


def _odd_units(scores: Sequence[ImageScore]) -> Iterator[str]:
    """Yield contradictions among scores of one unit."""
    for unit, some in grouped(scores, lambda score: score.unit).items():
        name = ".".join(map(str, unit))
        for field in SHARED:
            if len({getattr(score, field) for score in some}) > 1:
                yield f"images of unit {name} differ in {field}, which they share"
        best = sum(score.oracle for score in some if score.oracle is not None)
        if all(score.oracle is not None for score in some) and best < sum(s.decibels for s in some) - FIGURE_TOLERANCE:
            yield f"an oracle chose worse for unit {name} than the attack did: {best} dB in all"


def _odd_flags(scores: Sequence[ImageScore], modality: Modality, flags: Sequence[Flag]) -> Iterator[str]:
    """Yield where flags of `RECOMPUTED` are not those that the scores raise."""
    from ppbench.questions.images import flags_of, inexact

    measured = any(score.blind is not None for score in scores)
    raised = (*inexact(scores), *(flags_of(scores, [], IMAGE_RANGE, modality) if measured else ()))
    expected = {flag.code: flag for flag in raised}
    recorded = {flag.code: flag for flag in flags if flag.code in RECOMPUTED}
    for code in sorted({*expected} | {*recorded}):
        if code not in recorded:
            yield f"flag {code} is missing, which its scores raise: {expected[code].detail}"
        elif code not in expected:
            yield f"flag {code} is there, which its scores do not raise"
        elif recorded[code] != expected[code]:
            yield f"flag {code} says {recorded[code].detail!r}, the scores give {expected[code].detail!r}"


def odd_budget(scores: Sequence[ImageScore], attack: AttackInfo) -> str:
    """Return how the evaluations of an attack of ours contradict its budget, a clause, "" if they do not.

    No more is spent than all budgets together, by each client of a cohort; a descent, whose answer has a path, spends
    its budget; and a search that is to be patient does not stop everywhere before, unless it has succeeded.
    """
    budgets = [value for name, value in attack.parameters.items() if name.endswith("budget") and isinstance(value, int)]
    budget, patience = attack.parameters.get("budget"), attack.parameters.get("patience")
    if attack.code or not budgets:
        return ""
    clients = Counter(unit for unit, _ in {(score.unit, score.slot) for score in scores})
    units = list({score.unit: score for score in scores}.values())
    for score in units:
        if score.evaluations > clients[score.unit] * (sum(budgets) + EXTRA_EVALUATIONS):
            return f"{score.evaluations} evaluations were spent on unit {score.unit}, its budget is {sum(budgets)}"
        if score.path and score.evaluations != sum(budgets):
            return (
                f"{score.evaluations} evaluations were spent on unit {score.unit}, a descent spends its {sum(budgets)}"
            )
    stopped = [score.evaluations for score in units if score.confidence is None or score.confidence > UNEXPLAINED]
    least = min(budget, patience) if isinstance(budget, int) and isinstance(patience, int) else 0
    if len(stopped) == len(units) and all(EXTRA_EVALUATIONS < spent < least for spent in stopped):
        return f"each search stopped after {max(stopped)} evaluations or fewer, its budget is {budget}"
    return ""


_JUDGED = {metric.spec.name: metric.judged for metric in IMAGE_METRICS if metric.judged is not None}


class Reconstruction(Question):
    """What are the inputs of a batch? Images are judged in decibels, table rows by their relative error."""

    name = "reconstruction"
    title = "Reconstruction and label recovery"
    score = ImageScore
    inputs = True
    order = 1
    chart = "budget"
    chapter = "uploads"
    distances = (
        DistanceLaw("recon/1", "rmse_mean", lambda error: error, "relative RMSE"),
        DistanceLaw("recon_unit/1", "rmse_unit_mean", lambda error: error, "relative RMSE, at most 1"),
        DistanceLaw("recon_raw/1", "rmse_raw_mean", lambda error: error, "relative RMSE, not clipped"),
        LABEL_DISTANCE,
    )
    specs = tuple(metric.spec for metric in IMAGE_METRICS)

    def of_probe(self, probe: Probe) -> Inquiry:
        """Return one challenge per unit, without labels."""
        from ppbench.questions.images import accounts_differ, score_images

        view, victims = probe.view, probe.victims
        plan, about = view.plan, (view.plan.columns or view.plan.vocabulary, modality_in(view.plan))

        def score(guesses: Sequence[Guess]) -> Scored:
            if probe.yardstick is None:
                return score_images(victims, guesses, {}, {}, plan.data_range, None, {}, *about)
            own = {e.unit: e for e in reversed(probe.attack.evidence(view))}
            plain = {e.unit: e for e in view.defense.evidence(view)}
            measured_with = probe.yardstick(), probe.detected, *about
            scored = score_images(victims, guesses, own, plain, plan.data_range, *measured_with)
            flags = accounts_differ(victims, own, plain) if probe.attack.replays else ()
            return replace(scored, flags=(*scored.flags, *flags))

        return Inquiry(victims.challenges(), score, victims.digest())

    def malformed(self, guess: Guess, challenge: Challenge, plan: Plan) -> Iterator[str]:
        """Yield faults of the images, float32 without autograd history, and of labels if there are any."""
        import torch

        expected = (len(challenge.unit) * challenge.batch, *plan.spec.shape)
        if guess.x is None or tuple(guess.x.shape) != expected or guess.x.dtype != torch.float32:
            form = "nothing" if guess.x is None else f"{guess.x.dtype} {tuple(guess.x.shape)}"
            yield f"the guess x is {form}; it must be float32 of shape {expected}"
        elif guess.x.requires_grad:
            yield "the guess x drags its autograd history along; detach it"
        if guess.y is not None:
            yield from mislabelled(guess, challenge, plan)

    def metrics(self, scores: Sequence[ImageScore], terms: Terms) -> list[Metric]:
        """Return the metrics of `image_metrics`."""
        return [make() for make in image_metrics(scores, terms.classes, terms.seed).values()]

    def worth(self, scores: Sequence[ImageScore], plan: Plan) -> float:
        """Return the median PSNR; for table rows, where decibels are meaningless, minus the median relative error."""
        return modality_in(plan).worth(scores)

    def flawed(self, record: Record) -> Iterator[str]:
        """Yield fields in which images of one unit wrongly differ, odd budgets, and flags that scores do not give."""
        if record.victims:
            scores = image_scores(record)
            yield from _odd_units(scores)
            yield from _odd_flags(scores, modality_of(record.config), record.flags)
            yield from filter(None, [odd_budget(scores, record.config.attack)])

    def contradicted(self, record: Record, images: CellImages) -> Iterator[str]:
        """Yield figures that contradict the images, and units that are not matched; nothing in an unknown range."""
        scores, (low, high) = image_scores(record), IMAGE_RANGE
        if isinstance(images, Pictures):
            scores = scores[: len(images.truth)]  # a published board keeps the first alone
        expected = (len(scores), *record.config.model.shape)
        if not bool((images.truth >= low).all() and (images.truth <= high).all()):
            return  # figures were computed in another range
        if images.truth.shape != expected:
            yield f"its reconstructions have the shape {images.truth.shape}, its scores and its network {expected}"
            return
        if isinstance(images, Pictures):
            yield from _odd_pictures(scores, images)
            return
        yield from _odd_figures(scores, images, modality_of(record.config))
        yield from _unmatched(scores, images)

    def headline(self, config: CellConfig) -> str:
        """Return the PSNR of images, the relative error of table rows."""
        return modality_of(config).headline

    def columns(self, headline: str) -> tuple[tuple[str, str], ...]:
        """Return the figures of table rows; boards of images have a table of their own."""
        if headline == IMAGE.headline:
            return ()
        if headline == TABLE_ROW.headline:
            return (
                (headline, self.spec(headline).title),
                ("share_rebuilt", TABLE_ROW.rebuilt_title),
                ("reconstruction_accuracy", TABLE_ROW.parts_right),
            )
        kind = next((kind for kind in modalities() if kind.headline == headline), None)
        title, rebuilt = (headline, Modality.rebuilt_title) if kind is None else (kind.title, kind.rebuilt_title)
        return ((headline, title[:1].upper() + title[1:]), ("share_rebuilt", rebuilt))

    def blind(self, scores: Sequence[ImageScore], config: CellConfig) -> tuple[float, int, float]:
        """Return the share of rebuilt victims; chance is 0.05, for nearly uniform images."""
        rebuilt = modality_of(config).rebuilt
        return sum(rebuilt(v) for v in scores) / len(scores), len({v.unit for v in scores}), 0.05

    def judged(self, score: ImageScore, metric: str) -> float:
        """Return `ImageMetric.judged` of a victim. KeyError: the metric is not judged."""
        return _JUDGED[metric](score)

    def rules_of(self, config: CellConfig) -> tuple[Rule, ...]:
        """Return the rules of the metrics that are for the cell's kind of data."""
        kind = modality_of(config)
        return tuple(rule for metric in IMAGE_METRICS if metric.kinds(kind) and (rule := metric.spec.rule))


def image_scores(record: Record) -> list[ImageScore]:
    """Return the scores of a reconstruction cell."""
    return [score for score in record.victims if isinstance(score, ImageScore)]
