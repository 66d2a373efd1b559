"""Reconstruction: the inputs of a probed batch, images or rows of a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import repeat
from math import isclose, isfinite
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ppbench.adversary.attack import Guess
from ppbench.adversary.victims import Victims
from ppbench.base.tree import finite
from ppbench.federation.evidence import Evidence, at_truth
from ppbench.federation.plan import Columns, Data
from ppbench.federation.wire import Slot
from ppbench.metrics.image import DataRange, image_figures, match, psnr
from ppbench.metrics.labels import multiset_hits
from ppbench.metrics.modality import (
    BROKEN_DB,
    EXACT_DB,
    IMAGE,
    TABLE_ROW,
    Modality,
    modalities,
    modality_from,
    modality_of,
)
from ppbench.metrics.perceptual import Network, measurable
from ppbench.metrics.recognition import Gallery
from ppbench.metrics.spec import Rule
from ppbench.questions.base import DistanceLaw, Question
from ppbench.questions.image_metrics import IMAGE_METRICS, ImageScore, Recognition, image_metrics, row_accuracy
from ppbench.questions.inquiry import Inquiry, Probe, Scored, Yardstick
from ppbench.questions.labels import LABEL_DISTANCE, mislabelled
from ppbench.records.figure import Terms
from ppbench.records.schema import CellConfig, Flag, Metric, Record
from ppbench.records.store import CellImages

if TYPE_CHECKING:
    from ppbench.adversary.attack import Challenge
    from ppbench.federation.plan import Plan


# -- Scores of reconstructions: the figures of each image, of blind guesses, and along the budget --

INEXACT = 1e-6
"""Relative discrepancy at the truth above which evidence is inexact."""
WORSE = 10.0
"""Largest ratio of the discrepancies at the truth of a defense's own evidence and of its server's step."""


def score_images(
    victims: Victims,
    guesses: Sequence[Guess],
    evidence: Mapping[tuple[Slot, ...], Evidence],
    plain: Mapping[tuple[Slot, ...], Evidence],
    data_range: DataRange,
    yardstick: Yardstick | None = None,
    detected: Mapping[Slot, float] = MappingProxyType({}),
    columns: Columns | None = None,
    modality: Modality | None = None,
) -> Scored:
    """Score reconstructions: each unit's images are matched to the truth by least squared error, labels as multisets.

    evidence: the attack's own, for the discrepancy at the truth, whose median raises "evidence_inexact" unless it is
    about 0 (noise, or an unknown mechanism); plain: the defense's, for the ratio of gradient to perturbation. With a
    yardstick, blind guesses and perceptual figures are measured and the flags of `questions.flags` raised. detected:
    see `Probe`. columns: the encoding of table rows, whose accuracy is then measured. modality: of the
    data; None: by their shape.
    """
    scores: list[ImageScore] = []
    pairs: list[tuple[Tensor, Tensor]] = []
    evidence_and_truth: list[tuple[Evidence, Data]] = []
    mean = None if yardstick is None else yardstick.mean
    modality = modality or modality_from(victims.truth(victims.units[0]).x.shape[1:])
    for unit, guess in zip(victims.units, guesses, strict=True):
        truth, own = victims.truth(unit), evidence.get(unit)
        images = guessed_images(guess, truth)
        images = images[modality.match(images, truth.x, data_range)]
        if own is not None:
            evidence_and_truth.append((own, truth))
        residual = None if own is None or own.nuisance else _finite(at_truth(own, *_there(own, truth, len(unit))))
        ratio = _ratio(plain[unit], truth, len(unit)) if unit in plain else None
        unit_scores = _unit_scores(guess, images, truth, data_range, mean)
        for index, score in enumerate(unit_scores):
            slot = unit[index // victims.batch]
            score["detected"] = detected.get(slot)
            score["accuracy"] = _accuracy(images[index], truth.x[index], columns, modality)
            score["blind_accuracy"] = None if mean is None else _accuracy(mean, truth.x[index], columns, modality)
            score |= dict(probe=slot.probe, client=slot.client, index=index % victims.batch, cohort=len(unit) > 1)
            scores.append(ImageScore(at_truth=residual, ratio=ratio, **score))
        pairs.append((images, truth.x))
    all_images, all_truths = (torch.cat(side) for side in zip(*pairs, strict=True))
    flags = inexact(scores)
    if yardstick is not None:
        scores = perceived(scores, all_images, all_truths, data_range, yardstick.network)
        if yardstick.gallery is not None:
            labels = torch.cat([victims.truth(unit).y for unit in victims.units])
            scores = recognized(scores, all_images, all_truths, labels, yardstick.gallery)
        flags += flags_of(scores, evidence_and_truth, data_range, modality.decibels)
    return Scored(list(scores), flags, all_images, all_truths, mean, modality.drawn)


def _accuracy(guess: Tensor, truth: Tensor, columns: Columns | None, modality: Modality) -> float | None:
    """Return the share of columns, or places, of an input that are right; None where it is not measured."""
    return modality.accuracy(guess, truth) if columns is None else row_accuracy(guess, truth, columns)


def inexact(scores: Sequence[ImageScore]) -> tuple[Flag, ...]:
    """Return the flag of evidence that the truth does not explain, or () if it does."""
    exact = {(s.probe, -1 if s.cohort else s.client): s.at_truth for s in scores if s.at_truth is not None}
    if not exact or (middle := median(exact.values())) <= INEXACT:
        return ()
    detail = f"median discrepancy at the truth {middle:.2g} of the observation's size"
    return (Flag(code="evidence_inexact", severity="info", detail=detail),)


def accounts_differ(
    victims: Victims, server: Mapping[tuple[Slot, ...], Evidence], own: Mapping[tuple[Slot, ...], Evidence]
) -> tuple[Flag, ...]:
    """Return flags of a defense whose own evidence explains its uploads worse than the step that its server takes.

    Both at the truth, with all entries: a defense's own weights must not hide a mismatch.
    """
    units = [unit for unit in victims.units if unit in server]
    step_gaps = [_at_truth(server[unit], victims.truth(unit), len(unit)) for unit in units]
    own_gaps = [_at_truth(own[unit], victims.truth(unit), len(unit)) if unit in own else 1.0 for unit in units]
    flags = []
    if units and median(own_gaps) > max(WORSE * median(step_gaps), INEXACT):
        detail = (
            "the defense's own account of its uploads explains them worse than the step that its server takes on them: "
            f"median discrepancy at the truth {median(own_gaps):.2g}, of the step {median(step_gaps):.2g}"
        )
        flags.append(Flag(code="own_account", severity="warning", detail=detail))
    hidden = [one for one in own.values() if one.weight is not None and not any(map(torch.any, one.weight.values()))]
    if hidden:
        detail = f"in {len(hidden)} of {len(own)} uploads the defense's own evidence weighs all that was sent with zero"
        flags.append(Flag(code="own_weights", severity="warning", detail=detail))
    return tuple(flags)


def _at_truth(evidence: Evidence, truth: Data, units: int) -> float:
    discrepancy = at_truth(replace(evidence, weight=None), *_there(evidence, truth, units))
    return discrepancy if isfinite(discrepancy) else 1.0


def _there(evidence: Evidence, truth: Data, units: int) -> tuple[Tensor, Tensor]:
    """Return the true x [U, B, *shape] and y [U, B, C] float64 on the device of the evidence."""
    x, y = (part.unflatten(0, (units, -1)).to(evidence.device, torch.float64) for part in (truth.x, truth.y))
    return x, y


def _ratio(plain: Evidence, truth: Data, units: int) -> float | None:
    """Return ||g_b|| / ||observed_b - g_b|| over the backbone's biases (SPN, Sec. 5); None: no bias or perturbation."""
    simulated = plain.simulate(*_there(plain, truth, units))
    clean = {n: v.detach() for n, v in simulated.items() if n.startswith("features.") and v.dim() == 1}
    if not clean:
        return None
    size = torch.cat(list(clean.values())).norm()
    perturbation = torch.cat([plain.observed[n].double() - v for n, v in clean.items()]).norm()
    if not bool(perturbation.isfinite()) or perturbation <= size * 1e-5:  # float32 rounding is no defense
        return None
    return float(size / perturbation)


def guessed_images(guess: Guess, truth: Data) -> Tensor:
    """Return a guess's images on the CPU in the dtype of the true ones; NaN if it has none."""
    return torch.full_like(truth.x, torch.nan) if guess.x is None else guess.x.detach().cpu().to(truth.x.dtype)


def _unit_scores(
    guess: Guess, images: Tensor, truth: Data, data_range: DataRange, mean: Tensor | None
) -> list[dict[str, Any]]:
    """Return the score of each image of a unit, by field of `ImageScore`; images: the guess's, matched."""
    hits: Sequence[bool | None] = [None] * len(truth.x)
    if guess.y is not None:
        hits = multiset_hits(guess.y.tolist(), truth.y.argmax(1).tolist())
    paths, oracle = _paths(guess, truth, data_range), _oracle(guess, images, truth, data_range)
    return [
        {
            **asdict(image_figures(image, original, data_range)),
            "label": hits[index],
            "confidence": _finite(guess.confidence),
            "evaluations": guess.evaluations,
            "blind": None if mean is None else blind_decibels(mean, original, data_range),
            "oracle": None if mean is None else oracle[index],
            "path": [(mark, values[index]) for mark, values in paths],
        }
        for index, (image, original) in enumerate(zip(images, truth.x, strict=True))
    ]


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def perceived(
    scores: list[ImageScore], guess: Tensor, truth: Tensor, data_range: DataRange, network: Network | None
) -> list[ImageScore]:
    """Return `scores` with LPIPS and feature errors of the matched images [N, *shape], if these can be measured."""
    if network is None or not measurable(tuple(truth.shape[1:])):
        return scores
    figures = network.compare(guess, truth, data_range)
    return [
        s.model_copy(update={"lpips": f.lpips, "feat_mse": f.feat_mse}) for s, f in zip(scores, figures, strict=True)
    ]


def recognized(scores: list[ImageScore], guess: Tensor, truth: Tensor, y: Tensor, gallery: Gallery) -> list[ImageScore]:
    """Return `scores` with the recognition of the matched images [N, *shape]; y: targets [N, C]."""
    classes = None if gallery.classes is None else y.argmax(1).cpu()
    recognized_images = gallery.recognize(guess, truth, classes)
    shared = dict(gallery=len(gallery.x), common=gallery.common)
    recognitions = [Recognition(**shared, **asdict(one)) for one in recognized_images]  # type: ignore[arg-type]  # by name, as declared
    return [s.model_copy(update={"recognition": one}) for s, one in zip(scores, recognitions, strict=True)]


def _decibels(guess: Tensor, truth: Data, data_range: DataRange) -> list[float]:
    """Return the PSNR of every true image under the best matching; 0 for a reconstruction that is not finite."""
    images = guess.detach().cpu().to(truth.x.dtype)
    order = match(images, truth.x, data_range)
    return [psnr(*pair) or 0.0 for pair in zip(images[order], truth.x, repeat(data_range), strict=False)]


def _paths(guess: Guess, truth: Data, data_range: DataRange) -> list[tuple[int, list[float]]]:
    """Return the PSNR of every image at each mark of the budget, to 1e-6 dB."""
    marks = sorted(guess.path, key=lambda pair: pair[0])
    return [(int(mark), [round(v, 6) for v in _decibels(x, truth, data_range)]) for mark, x in marks]


def _oracle(guess: Guess, images: Tensor, truth: Data, data_range: DataRange) -> list[float]:
    """Return the PSNR of every image if an oracle chose among the unit's answer and the rejected reconstructions."""
    answered = _decibels(images, truth, data_range)
    return max([answered, *(_decibels(x, truth, data_range) for x in guess.others)], key=sum)


def blind_decibels(mean: Tensor, original: Tensor, data_range: DataRange) -> float:
    """Return the PSNR of the better of two blind guesses: the mean image, and mid-grey."""
    grey = torch.full_like(original, sum(data_range) / 2)
    return max(psnr(blind, original, data_range) or 0.0 for blind in (mean.to(original.dtype), grey))


# -- Warnings about a reconstruction cell, after AutoAttack's flags --
# Each warns that a result may be due to a weak attack, or void: Croce and Hein, "Reliable evaluation of adversarial
# robustness with an ensemble of diverse parameter-free attacks", 2020.

LARGEST_FALL = 0.5  # largest fall in dB of the median from an earlier mark to the end
BLIND_MARGIN = 0.5  # dB by which the median must exceed that of a blind guess
ORACLE_GAP = 3.0  # dB between the oracle's choice and the attacker's
SUCCESS = 20.0  # dB from which a median counts as success
CHECKED_UNITS = 4  # units whose gradient is computed: a flat simulation is flat for all


def flags_of(
    scores: Sequence[ImageScore],
    evidence: Sequence[tuple[Evidence, Data]],
    data_range: tuple[float, float],
    decibels: bool = True,
) -> tuple[Flag, ...]:
    """Return the flags of a cell, each with its figures.

    budget_hurts: the median PSNR was higher before the end; blind_as_good: a mean or grey image does as well;
    oracle_gap: the attack rejected better reconstructions; zero_gradient: in half of the units nothing was observed, or
    the simulation is flat. evidence: the attack's own, with truths of which only shapes are used; decibels: whether
    they mean something, see `Modality` (those of table rows prove nothing).
    """
    flags = (_hurts(scores), _blind(scores, decibels), _gap(scores), _flat(evidence, data_range))
    return tuple(flag for flag in flags if flag is not None)


def reached(score: ImageScore, evaluations: int) -> float:
    """Return the PSNR of the attack's answer after `evaluations` gradient evaluations; 0 dB before the first answer."""
    if evaluations >= score.evaluations:
        return score.decibels
    return next((value for mark, value in reversed(score.path) if mark <= evaluations), 0.0)


def _hurts(scores: Sequence[ImageScore]) -> Flag | None:
    traced = [score for score in scores if score.path]
    if 2 * len(traced) < len(scores) or not traced:
        return None
    start = max(score.path[0][0] for score in traced)
    marks = sorted({mark for score in traced for mark, _ in score.path if mark >= start})
    medians = {mark: median(reached(score, mark) for score in traced) for mark in marks}
    best, end = max(medians, key=lambda mark: medians[mark]), median(score.decibels for score in traced)
    if medians[best] - end <= LARGEST_FALL:
        return None
    detail = f"median {medians[best]:.1f} dB after {best} gradient evaluations, {end:.1f} dB at the end"
    return Flag(code="budget_hurts", severity="warning", detail=detail)


def _blind(scores: Sequence[ImageScore], decibels: bool) -> Flag | None:
    blind = [score.blind for score in scores if score.blind is not None]
    if not blind:
        return None
    achieved, blind_median = median(score.decibels for score in scores), median(blind)
    if achieved > blind_median + BLIND_MARGIN:
        return None
    detail = f"median {achieved:.1f} dB, a mean or grey image gives {blind_median:.1f} dB"
    return Flag(code="blind_as_good", severity="warning" if decibels and achieved > SUCCESS else "info", detail=detail)


def _gap(scores: Sequence[ImageScore]) -> Flag | None:
    oracle = [score.oracle for score in scores if score.oracle is not None]
    if not oracle:
        return None
    achieved, oracle_median = median(score.decibels for score in scores), median(oracle)
    if oracle_median - achieved <= ORACLE_GAP:
        return None
    detail = f"median {achieved:.1f} dB, an oracle's choice among the same reconstructions {oracle_median:.1f} dB"
    return Flag(code="oracle_gap", severity="warning", detail=detail)


def _flat(evidence: Sequence[tuple[Evidence, Data]], data_range: tuple[float, float]) -> Flag | None:
    checked = evidence[:CHECKED_UNITS]
    dead = sum(is_flat(one, truth, data_range) for one, truth in checked)
    if not checked or 2 * dead < len(checked):
        return None
    detail = (
        f"in {dead} of {len(checked)} units nothing was observed, or the simulation's gradient is zero or not finite"
    )
    return Flag(code="zero_gradient", severity="warning", detail=detail)


def is_flat(evidence: Evidence, truth: Data, data_range: tuple[float, float]) -> bool:
    """Return whether gradient search on `evidence` is hopeless.

    True if the observation, or the discrepancy's gradient at a grey image with some noise and uniform labels, is zero
    or not finite; False if the evidence cannot be simulated. Of `truth` only the shapes are used.
    """
    parts = list(evidence.observed.values())
    if not finite(parts) or not any(bool((part != 0).any()) for part in parts):
        return True
    generator, (low, high), units = torch.Generator().manual_seed(0), data_range, len(evidence.unit)
    noise = torch.randn(truth.x.shape, generator=generator, dtype=torch.float64)
    x = ((low + high) / 2 + 0.1 * (high - low) * noise).unflatten(0, (units, -1)).to(evidence.device).requires_grad_()
    y = x.new_full(truth.y.shape, 1 / truth.y.shape[1]).unflatten(0, (units, -1))
    try:
        secrets = {
            name: torch.randn(shape, generator=generator, dtype=torch.float64).to(evidence.device)
            for name, shape in evidence.nuisance.items()
        }
        value = evidence.discrepancy(evidence.simulate(x, y, **secrets))
        if not value.requires_grad:
            return True
        (slope,) = torch.autograd.grad(value, x, allow_unused=True)
    except Exception:  # noqa: BLE001 - evidence may be third-party code
        return False
    return slope is None or not bool(slope.isfinite().all()) or not bool((slope != 0).any())


# -- Checks of a cell's scores and flags against its stored reconstructions and one another, for `ppbench verify` --
# Figures are recomputed as by the scorer, in float64 from the same float32 numbers, so on one machine the difference
# is 0; sums in another order change the last digits (below 1e-9 dB and 1e-12 of SSIM). `FIGURE_TOLERANCE` is far
# above that and far below any visible difference.

FIGURE_TOLERANCE = 1e-6
"""Relative and absolute difference beyond which a figure contradicts the images."""
IMAGE_RANGE = (0.0, 1.0)
"""Range of the images of ppbench's own data sets; records do not store another one."""
SHARED = ("confidence", "at_truth", "evaluations", "ratio")
"""Fields that all images of a unit share: they come from one attack on one observation."""
RECOMPUTED = ("evidence_inexact", "budget_hurts", "blind_as_good", "oracle_gap")
"""Flags that are a function of scores alone; others depend on the evidence, which is not stored."""


def in_range(images: CellImages) -> bool:
    """Return whether the originals lie in `IMAGE_RANGE`; else figures were computed in another, unknown range."""
    return bool((images.truth >= IMAGE_RANGE[0]).all() and (images.truth <= IMAGE_RANGE[1]).all())


def contradicted(scores: Sequence[ImageScore], config: CellConfig, images: CellImages) -> Iterator[str]:
    """Yield contradictions between `scores` and the stored `images`, in `IMAGE_RANGE`, a clause each.

    Checked are psnr, rmse, rmse_raw, ssim, mse and blind of each image, and the matching of each unit's images.
    """
    expected = (len(scores), *config.model.shape)
    if images.truth.shape != expected:
        yield f"its reconstructions have the shape {images.truth.shape}, its scores and its network {expected}"
        return
    yield from _odd_figures(scores, images)
    yield from _unmatched(scores, images)


def _odd_figures(scores: Sequence[ImageScore], images: CellImages) -> Iterator[str]:
    sentences: dict[str, list[str]] = {}
    for score, figures in zip(scores, _figures(images), strict=True):
        for name, computed in figures.items():
            recorded = getattr(score, name)
            if not (
                same_figure(recorded, computed)
                or (recorded is None and name in ("mse", "blind") and score.blind is None)
            ):
                where = ".".join(map(str, score.place))
                sentences.setdefault(name, []).append(
                    f"{name} of victim {where} is {recorded}, its images give {computed}"
                )
    for about_figure in sentences.values():
        yield about_figure[0] + (f" (and {len(about_figure) - 1} more)" if len(about_figure) > 1 else "")


def _figures(images: CellImages) -> Iterator[Mapping[str, float | None]]:
    """Yield the figures of each image, by field of `ImageScore`."""
    import torch

    from ppbench.metrics.image import image_figures

    mean = None if images.blind is None else torch.from_numpy(images.blind[0])
    for guess, truth in zip(torch.from_numpy(images.guess), torch.from_numpy(images.truth), strict=True):
        blind = {} if mean is None else {"blind": blind_decibels(mean, truth, IMAGE_RANGE)}
        yield {**asdict(image_figures(guess, truth, IMAGE_RANGE)), **blind}


def same_figure(recorded: float | None, computed: float | None) -> bool:
    """Return whether two figures are both null, or equal up to rounding."""
    if recorded is None or computed is None:
        return recorded is computed
    return isclose(recorded, computed, rel_tol=FIGURE_TOLERANCE, abs_tol=FIGURE_TOLERANCE)


def _unmatched(scores: Sequence[ImageScore], images: CellImages) -> Iterator[str]:
    """Yield units whose reconstructions are not in the order of least error: a wrong order makes them seem to fail."""
    import torch

    from ppbench.metrics.image import match

    units: dict[tuple[int, ...], list[int]] = {}
    for index, score in enumerate(scores):
        units.setdefault(score.unit, []).append(index)
    for unit, places in units.items():
        guess, truth = images.guess[places], images.truth[places]
        order = match(torch.from_numpy(guess), torch.from_numpy(truth), IMAGE_RANGE) if len(places) > 1 else [0]
        if _cost(guess, truth) > _cost(guess[order], truth) * (1 + FIGURE_TOLERANCE) + FIGURE_TOLERANCE:
            yield f"the reconstructions of unit {'.'.join(map(str, unit))} are not matched to the nearest originals"


def _cost(guess: Any, truth: Any) -> float:
    finite = np.isfinite(guess.reshape(len(guess), -1)).all(axis=1)
    return float(((guess[finite].astype(np.float64).clip(*IMAGE_RANGE) - truth[finite]) ** 2).sum())


def flawed(scores: Sequence[ImageScore], modality: Modality, flags: Sequence[Flag]) -> Iterator[str]:
    """Yield contradictions among scores of one cell and its flags of `RECOMPUTED`, a clause each."""
    units: dict[tuple[int, ...], list[ImageScore]] = {}
    for score in scores:
        units.setdefault(score.unit, []).append(score)
    for unit, some in units.items():
        name = ".".join(map(str, unit))
        for field in SHARED:
            if len({getattr(score, field) for score in some}) > 1:
                yield f"images of unit {name} differ in {field}, which they share"
        best = sum(score.oracle for score in some if score.oracle is not None)
        if all(score.oracle is not None for score in some) and best < sum(s.decibels for s in some) - FIGURE_TOLERANCE:
            yield f"an oracle chose worse for unit {name} than the attack did: {best} dB in all"
    yield from _odd_flags(scores, modality, flags)


def _odd_flags(scores: Sequence[ImageScore], modality: Modality, flags: Sequence[Flag]) -> Iterator[str]:
    measured = any(score.blind is not None for score in scores)
    raised = (*inexact(scores), *(flags_of(scores, [], IMAGE_RANGE, modality.decibels) if measured else ()))
    expected = {flag.code: flag for flag in raised}
    recorded = {flag.code: flag for flag in flags if flag.code in RECOMPUTED}
    for code in sorted({*expected} | {*recorded}):
        if code not in recorded:
            yield f"flag {code} is missing, which its scores raise: {expected[code].detail}"
        elif code not in expected:
            yield f"flag {code} is there, which its scores do not raise"
        elif recorded[code] != expected[code]:
            yield f"flag {code} says {recorded[code].detail!r}, the scores give {expected[code].detail!r}"


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

        view, victims = probe.view, probe.victims
        modality = modality_from(view.plan.spec.shape, view.plan.loss)

        def score(guesses: Sequence[Guess]) -> Scored:
            if probe.yardstick is None:
                return score_images(
                    victims, guesses, {}, {}, view.plan.data_range, columns=view.plan.columns, modality=modality
                )
            own = {e.unit: e for e in reversed(probe.attack.evidence(view))}
            plain = {e.unit: e for e in view.defense.evidence(view)}
            measured_with = probe.yardstick(), probe.detected, view.plan.columns
            scored = score_images(victims, guesses, own, plain, view.plan.data_range, *measured_with)
            flags = accounts_differ(victims, own, plain) if probe.attack.reads_alone else ()
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
        return modality_from(plan.spec.shape, plan.loss).worth(scores)

    def flawed(self, record: Record) -> Iterator[str]:
        """Yield fields in which images of one unit wrongly differ, and flags that do not follow from the scores."""
        if record.victims:
            yield from flawed(image_scores(record), modality_of(record.config), record.flags)

    def contradicted(self, record: Record, images: CellImages) -> Iterator[str]:
        """Yield figures that contradict the images, and units that are not matched; nothing in an unknown range."""
        if in_range(images):
            yield from contradicted(image_scores(record), record.config, images)

    def headline(self, config: CellConfig) -> str:
        """Return the PSNR of images, the relative error of table rows."""
        return modality_of(config).headline

    def columns(self, headline: str) -> tuple[tuple[str, str], ...]:
        """Return the figures of table rows; boards of images have a table of their own."""
        if headline == IMAGE.headline:
            return ()
        if headline == TABLE_ROW.headline:
            accuracy = self.spec("reconstruction_accuracy")
            return (
                (headline, self.spec(headline).title),
                ("share_rebuilt", "Within 10%"),
                (accuracy.name, accuracy.title),
            )
        title = next((kind.title for kind in modalities() if kind.headline == headline), headline)
        return ((headline, title[:1].upper() + title[1:]), ("share_rebuilt", "Rebuilt"))

    def blind(self, scores: Sequence[ImageScore], config: CellConfig) -> tuple[float, int, float]:
        """Return the share of rebuilt victims; chance is 0.05, for nearly uniform images."""
        rebuilt = modality_of(config).rebuilt
        return sum(rebuilt(v) for v in scores) / len(scores), len({v.unit for v in scores}), 0.05

    def judged(self, score: ImageScore, metric: str) -> float:
        """Return dB, relative error, or 1 for a right label; a failed reconstruction is 0 dB and an error of 1."""
        if metric == LABEL_DISTANCE.metric:
            return float(bool(score.label))
        if metric == "rmse_mean":
            return score.error
        return float(score.decibels > BROKEN_DB) if metric == "share_above_20db" else min(score.decibels, EXACT_DB)

    def rules_of(self, config: CellConfig) -> tuple[Rule, ...]:
        """Return the rules in dB for images, in relative error for rows."""
        metrics = modality_of(config).rules
        return tuple(rule for rule in self.all_rules if rule.metric in metrics)


def image_scores(record: Record) -> list[ImageScore]:
    """Return the scores of a reconstruction cell."""
    return [score for score in record.victims if isinstance(score, ImageScore)]
