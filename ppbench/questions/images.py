"""Scores of reconstructions: the figures of each image, of blind guesses, and along the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from math import isfinite
from statistics import median
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ppbench.adversary.attack import Guess
from ppbench.adversary.victims import Victims
from ppbench.base.tree import finite
from ppbench.base.vocabulary import Vocabulary
from ppbench.federation.evidence import Evidence, at_truth
from ppbench.federation.plan import Columns, Data
from ppbench.federation.wire import Slot
from ppbench.metrics.image import DataRange, match, psnr
from ppbench.metrics.labels import multiset_hits
from ppbench.metrics.modality import IMAGE, Modality, modality_from
from ppbench.metrics.perceptual import Network, measurable
from ppbench.metrics.recognition import Gallery
from ppbench.metrics.text import share_in_text, text_figures, tokens_of
from ppbench.questions.image_metrics import ABOVE_DB, ImageScore, LayerScore, TextScore, score_figures
from ppbench.questions.inquiry import Scored, Yardstick
from ppbench.questions.recognition import Recognition
from ppbench.records.schema import Flag

# -- Accuracy of a reconstructed table row: its share of right columns (Vero et al., ICML 2023) --

NUMBER_TOLERANCE = 0.319
"""Largest error of a right number, in standard deviations of its column in the training data: a quarter of a normal
column's values lie that near to the mean."""


def row_accuracy(guess: Tensor, truth: Tensor, columns: Columns) -> float:
    """Return the share of columns that `guess` [D] has right, both rows being encoded by `columns`: 0 to 1.

    A category is right if the largest entry of its group is that of the truth, a number within `NUMBER_TOLERANCE`. What
    is not finite is wrong, as is a category unknown in training, all zeros in the truth.
    """
    guess = guess.where(guess.isfinite().all(), guess.new_tensor(float("nan")))
    (numbers, groups), (true_numbers, true_groups) = columns.split(guess), columns.split(truth.to(guess))
    hits = int(((numbers - true_numbers).abs() <= NUMBER_TOLERANCE).sum())
    for group, true_group in zip(groups, true_groups, strict=True):
        hits += bool(group.isfinite().all()) and bool(true_group[group.argmax()] > 0.5)
    return hits / (columns.numbers + len(columns.categories))


# -- Warnings about a reconstruction cell, after AutoAttack's flags --
# Each warns that a result may be due to a weak attack, or void: Croce and Hein, "Reliable evaluation of adversarial
# robustness with an ensemble of diverse parameter-free attacks", 2020.

LARGEST_FALL = 0.5  # largest fall in dB of the median from an earlier mark to the end
BLIND_MARGIN = 0.5  # dB by which the median must exceed that of a blind guess
ORACLE_GAP = 3.0  # dB between the oracle's choice and the attacker's
CHECKED_UNITS = 4  # units whose gradient is computed: a flat simulation is flat for all


def flags_of(
    scores: Sequence[ImageScore],
    evidence: Sequence[tuple[Evidence, Data]],
    data_range: tuple[float, float],
    modality: Modality = IMAGE,
) -> tuple[Flag, ...]:
    """Return the flags of a cell, each with its figures.

    budget_hurts: the median PSNR was higher before the end; blind_as_good: a blind guess does as well, in decibels a
    mean or grey image; oracle_gap: the attack rejected better reconstructions; zero_gradient: in half of the units
    nothing was observed, or the simulation is flat. evidence: the attack's own, with truths of which only shapes are
    used; modality: of the inputs, whose `psnr_shown` says what is compared.
    """
    if modality.psnr_shown:
        flags = [_hurts(scores), _blind(scores, modality.decibels), _gap(scores), _flat(evidence, data_range)]
    else:
        flags = [_blind_places(scores, modality), _flat(evidence, data_range) if modality.continuous else None]
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
    return Flag(code="blind_as_good", severity="warning" if decibels and achieved > ABOVE_DB else "info", detail=detail)


def _blind_places(scores: Sequence[ImageScore], modality: Modality) -> Flag | None:
    """Return the flag of a cell whose median share of right places is that of the modality's blind guess, or less."""
    blind = [score.blind_accuracy for score in scores if score.blind_accuracy is not None]
    if not blind:
        return None
    achieved, blind_median = median(score.accuracy or 0.0 for score in scores), median(blind)
    if achieved > blind_median:
        return None
    detail = f"median share of {modality.parts} right {achieved:.2f}, a blind guess gives {blind_median:.2f}"
    return Flag(code="blind_as_good", severity="info", detail=detail)


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
    encoding: Columns | Vocabulary | None = None,
    modality: Modality | None = None,
) -> Scored:
    """Score reconstructions: each unit's images are matched to the truth by least squared error, labels as multisets.

    evidence: the attack's own, for the discrepancy at the truth, whose median raises "evidence_inexact" unless it is
    about 0 (noise, or an unknown mechanism); plain: the defense's, for the ratio of gradient to perturbation. With a
    yardstick, blind guesses and perceptual figures are measured and the flags of `questions.images` raised. detected:
    see `Probe`. encoding: of table rows, whose accuracy is then measured, or of texts. modality: of the data; None: by
    their shape.
    """
    truths = [victims.truth(unit) for unit in victims.units]
    modality = modality or modality_from(truths[0].x.shape[1:])
    mean = None if yardstick is None else yardstick.mean
    measure = _UnitMeasure(data_range, mean, () if yardstick is None else yardstick.tokens, encoding, modality)
    scores: list[ImageScore] = []
    matched: list[Tensor] = []
    for unit, truth, guess in zip(victims.units, truths, guesses, strict=True):
        matched.append(measure.matched(guess, truth))
        residual, ratio = _residual(evidence.get(unit), truth, len(unit)), _ratio(plain.get(unit), truth, len(unit))
        for index, score in enumerate(measure.scores(guess, matched[-1], truth)):
            slot = unit[index // victims.batch]
            score |= dict(probe=slot.probe, client=slot.client, index=index % victims.batch, cohort=len(unit) > 1)
            scores.append(ImageScore(at_truth=residual, ratio=ratio, detected=detected.get(slot), **score))
    images, originals = torch.cat(matched), torch.cat([truth.x for truth in truths])
    flags = inexact(scores)
    if yardstick is not None:
        scores = perceived(scores, images, originals, data_range, yardstick.network)
        scores = recognized(scores, images, originals, torch.cat([t.y for t in truths]), yardstick.gallery)
        own = [(evidence[unit], truth) for unit, truth in zip(victims.units, truths, strict=True) if unit in evidence]
        flags += flags_of(scores, own, data_range, modality)
    return Scored(list(scores), flags, images, originals, mean, modality.drawn)


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


def _residual(evidence: Evidence | None, truth: Data, units: int) -> float | None:
    """Return the discrepancy at the truth; None: no evidence, with unknown secrets, or not finite."""
    if evidence is None or evidence.nuisance:
        return None
    return _finite(at_truth(evidence, *_there(evidence, truth, units)))


def _ratio(plain: Evidence | None, truth: Data, units: int) -> float | None:
    """Return ||g_b|| / ||observed_b - g_b|| over the backbone's biases (SPN, Sec. 5); None: there are none, or no
    perturbation of them."""
    if plain is None:
        return None
    simulated = plain.simulate(*_there(plain, truth, units))
    clean = {n: v.detach() for n, v in simulated.items() if n.startswith("features.") and v.dim() == 1}
    if not clean:
        return None
    size = torch.cat(list(clean.values())).norm()
    perturbation = torch.cat([plain.observed[n].double() - v for n, v in clean.items()]).norm()
    if not bool(perturbation.isfinite()) or perturbation <= size * 1e-5:  # float32 rounding is no defense
        return None
    return float(size / perturbation)


@dataclass(frozen=True)
class _UnitMeasure:
    """Measures the guess about one unit. mean: the blind guess, None: it is not measured; tokens: the same of texts in
    any order; encoding: of rows or texts.
    """

    data_range: DataRange
    mean: Tensor | None
    tokens: tuple[int, ...]
    encoding: Columns | Vocabulary | None
    modality: Modality

    def matched(self, guess: Guess, truth: Data) -> Tensor:
        """Return the guessed images, NaN without any, in the order of the true ones that they fit best."""
        images = torch.full_like(truth.x, torch.nan) if guess.x is None else guess.x.detach().cpu().to(truth.x.dtype)
        return images[self.modality.match(images, truth.x, self.data_range)]

    def accuracy(self, guess: Tensor, truth: Tensor) -> float | None:
        """Return the share of columns, or places, of an input that are right; None where it is not measured."""
        if isinstance(self.encoding, Columns):
            return row_accuracy(guess, truth, self.encoding)
        return self.modality.accuracy(guess, truth)

    def text(self, guess: Tensor, truth: Tensor) -> TextScore | None:
        """Return the score of a text; None of other inputs."""
        if not isinstance(self.encoding, Vocabulary):
            return None
        tokens, original = tokens_of(guess), tokens_of(truth)
        figures = asdict(text_figures(tokens, original, self.encoding))
        del figures["in_place"]  # the score's accuracy
        return TextScore(
            guess=self.encoding.text(tokens),
            truth=self.encoding.text(original),
            blind_in_set=share_in_text(self.tokens, original) if self.tokens else None,
            **figures,
        )

    def scores(self, guess: Guess, images: Tensor, truth: Data) -> list[dict[str, Any]]:
        """Return the score of each image of a unit, by field of `ImageScore`; images: from `matched`."""
        mean, data_range = self.mean, self.data_range
        hits: Sequence[bool | None] = [None] * len(truth.x)
        if guess.y is not None:
            hits = multiset_hits(guess.y.tolist(), truth.y.argmax(1).tolist())
        paths, oracle = _paths(guess, truth, data_range), _oracle(guess, images, truth, data_range)
        return [
            {
                **score_figures(image, original, data_range, self.modality),
                "label": hits[index],
                "confidence": _finite(guess.confidence),
                "evaluations": guess.evaluations,
                "accuracy": self.accuracy(image, original),
                "text": self.text(image, original),
                "blind_accuracy": None if mean is None else self.accuracy(mean, original),
                "blind": None if mean is None else blind_decibels(mean, original, data_range),
                "oracle": None if mean is None else oracle[index],
                "path": [(mark, values[index]) for mark, values in paths],
                "layers": [LayerScore(**asdict(layer)) for layer in guess.layers],
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


def recognized(
    scores: list[ImageScore], guess: Tensor, truth: Tensor, y: Tensor, gallery: Gallery | None
) -> list[ImageScore]:
    """Return `scores` with the recognition of the matched images [N, *shape], if in a gallery; y: targets [N, C]."""
    if gallery is None:
        return scores
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
    """Return the PSNR of every image if an oracle chose among the unit's answer and the rejected reconstructions.

    The answer is matched already: matched again, ties could give other pairs, and a sum below the answer's own.
    """
    answered = [psnr(*pair) or 0.0 for pair in zip(images, truth.x, repeat(data_range), strict=False)]
    return max([answered, *(_decibels(x, truth, data_range) for x in guess.others)], key=sum)


def blind_decibels(mean: Tensor, original: Tensor, data_range: DataRange) -> float:
    """Return the PSNR of the better of two blind guesses: the mean image, and mid-grey."""
    grey = torch.full_like(original, sum(data_range) / 2)
    return max(psnr(blind, original, data_range) or 0.0 for blind in (mean.to(original.dtype), grey))
