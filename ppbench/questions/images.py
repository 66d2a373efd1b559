"""Reconstructions beside the truth: the figures of each image, of blind guesses, and along the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import repeat
from math import isfinite
from statistics import median
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ppbench.adversary.attack import Guess
from ppbench.adversary.victims import Victims
from ppbench.federation.evidence import Evidence, at_truth
from ppbench.federation.plan import Columns, Data
from ppbench.federation.wire import Slot
from ppbench.metrics.image import image_figures, match, psnr
from ppbench.metrics.labels import multiset_hits
from ppbench.metrics.modalities import modality_from
from ppbench.metrics.modality import Modality
from ppbench.metrics.perceptual import Network, measurable
from ppbench.metrics.recognition import Gallery
from ppbench.questions.flags import flags_of
from ppbench.questions.image_metrics import ImageScore
from ppbench.questions.inquiry import Scored, Yardstick
from ppbench.questions.recognition import Recognition
from ppbench.questions.rows import row_accuracy
from ppbench.records.schema import Flag

Range = tuple[float, float]
INEXACT = 1e-6
"""Relative discrepancy at the truth above which evidence is not called exact."""
WORSE = 10.0
"""How many times as far from the truth a defense's own account may be as its server's step."""


def score_images(
    victims: Victims,
    guesses: Sequence[Guess],
    evidence: Mapping[tuple[Slot, ...], Evidence],
    plain: Mapping[tuple[Slot, ...], Evidence],
    data_range: Range,
    yardstick: Yardstick | None = None,
    detected: Mapping[Slot, float] = MappingProxyType({}),
    columns: Columns | None = None,
    modality: Modality | None = None,
) -> Scored:
    """Score reconstructions: each unit's images are matched to the truth by least squared error, labels as multisets.

    evidence: the attack's own, for the at-truth discrepancy, whose median raises "evidence_inexact" unless it is about
    0: noise, or a mechanism that is not modelled; plain: the defense's, for the ratio of gradient to perturbation. With
    a yardstick blind guesses and perceptual figures are measured, and the flags of `questions.flags` raised. detected:
    see `Probe`. columns: of table rows, whose accuracy is then measured. modality: of the data; None: by their shape.
    """
    scores: list[ImageScore] = []
    pairs: list[tuple[Tensor, Tensor]] = []
    known: list[tuple[Evidence, Data]] = []
    mean = None if yardstick is None else yardstick.mean
    modality = modality or modality_from(victims.truth(victims.units[0]).x.shape[1:])
    for unit, guess in zip(victims.units, guesses, strict=True):
        truth, own = victims.truth(unit), evidence.get(unit)
        found = answered(guess, truth)
        found = found[modality.match(found, truth.x, data_range)]
        if own is not None:
            known.append((own, truth))
        residual = None if own is None or own.nuisance else _finite(at_truth(own, *_there(own, truth, len(unit))))
        ratio = _ratio(plain[unit], truth, len(unit)) if unit in plain else None
        made = _unit_scores(guess, found, truth, data_range, mean)
        for index, score in enumerate(made):
            slot = unit[index // victims.batch]
            score["detected"] = detected.get(slot)
            score["accuracy"] = _accuracy(found[index], truth.x[index], columns, modality)
            score["blind_accuracy"] = None if mean is None else _accuracy(mean, truth.x[index], columns, modality)
            score |= dict(probe=slot.probe, client=slot.client, index=index % victims.batch, cohort=len(unit) > 1)
            scores.append(ImageScore(at_truth=residual, ratio=ratio, **score))
        pairs.append((found, truth.x))
    images, truths = (torch.cat(side) for side in zip(*pairs, strict=True))
    flags = inexact(scores)
    if yardstick is not None:
        scores = perceived(scores, images, truths, data_range, yardstick.network)
        if yardstick.gallery is not None:
            labels = torch.cat([victims.truth(unit).y for unit in victims.units])
            scores = recognized(scores, images, truths, labels, yardstick.gallery)
        flags += flags_of(scores, known, data_range, modality.decibels)
    return Scored(list(scores), flags, images, truths, mean, modality.drawn)


def _accuracy(guess: Tensor, truth: Tensor, columns: Columns | None, modality: Modality) -> float | None:
    """Return the share of columns, or places, of an input that are right; None where it is not measured."""
    return modality.accuracy(guess, truth) if columns is None else row_accuracy(guess, truth, columns)


def inexact(scores: Sequence[ImageScore]) -> tuple[Flag, ...]:
    """Return the flag of evidence that the truth does not explain, or ()."""
    exact = {(s.probe, -1 if s.cohort else s.client): s.at_truth for s in scores if s.at_truth is not None}
    if not exact or (middle := median(exact.values())) <= INEXACT:
        return ()
    detail = f"median discrepancy at the truth {middle:.2g} of the observation's size"
    return (Flag(code="evidence_inexact", severity="info", detail=detail),)


def accounts_differ(
    victims: Victims, server: Mapping[tuple[Slot, ...], Evidence], own: Mapping[tuple[Slot, ...], Evidence]
) -> tuple[Flag, ...]:
    """Return flags of a defense whose own evidence explains its uploads worse than the step that its server takes.

    Both at the truth, entries that it weighs with zero included: who gives an account of himself does not judge it.
    """
    units = [unit for unit in victims.units if unit in server]
    stepped = [_at_truth(server[unit], victims.truth(unit), len(unit)) for unit in units]
    told = [_at_truth(own[unit], victims.truth(unit), len(unit)) if unit in own else 1.0 for unit in units]
    flags = []
    if units and median(told) > max(WORSE * median(stepped), INEXACT):
        detail = (
            "the defense's own account of its uploads explains them worse than the step that its server takes on them: "
            f"median discrepancy at the truth {median(told):.2g}, of the step {median(stepped):.2g}"
        )
        flags.append(Flag(code="own_account", severity="warning", detail=detail))
    hidden = [one for one in own.values() if one.weight is not None and not any(map(torch.any, one.weight.values()))]
    if hidden:
        detail = f"in {len(hidden)} of {len(own)} uploads the defense's own evidence weighs all that was sent with zero"
        flags.append(Flag(code="own_weights", severity="warning", detail=detail))
    return tuple(flags)


def _at_truth(evidence: Evidence, truth: Data, units: int) -> float:
    found = at_truth(replace(evidence, weight=None), *_there(evidence, truth, units))
    return found if isfinite(found) else 1.0


def _there(evidence: Evidence, truth: Data, units: int) -> tuple[Tensor, Tensor]:
    """Return the true x [U, B, *shape] and y [U, B, C] float64 where the evidence lies; the truth is on the CPU."""
    x, y = (part.unflatten(0, (units, -1)).to(evidence.device, torch.float64) for part in (truth.x, truth.y))
    return x, y


def _ratio(plain: Evidence, truth: Data, units: int) -> float | None:
    """Return ||g_b|| / ||observed_b - g_b|| over the backbone's biases (SPN, Sec. 5); None without, or unperturbed."""
    simulated = plain.simulate(*_there(plain, truth, units))
    clean = {n: v.detach() for n, v in simulated.items() if n.startswith("features.") and v.dim() == 1}
    if not clean:
        return None
    size = torch.cat(list(clean.values())).norm()
    perturbation = torch.cat([plain.observed[n].double() - v for n, v in clean.items()]).norm()
    if not bool(perturbation.isfinite()) or perturbation <= size * 1e-5:  # float32 rounding is no defense
        return None
    return float(size / perturbation)


def answered(guess: Guess, truth: Data) -> Tensor:
    """Return a guess's images like the true ones: on the CPU, in their dtype; NaN where there are none."""
    return torch.full_like(truth.x, torch.nan) if guess.x is None else guess.x.detach().cpu().to(truth.x.dtype)


def _unit_scores(
    guess: Guess, found: Tensor, truth: Data, data_range: Range, mean: Tensor | None
) -> list[dict[str, Any]]:
    """Return what a guess says of each image of a unit, by field of `ImageScore`; found: its images, matched."""
    hits: Sequence[bool | None] = [None] * len(truth.x)
    if guess.y is not None:
        hits = multiset_hits(guess.y.tolist(), truth.y.argmax(1).tolist())
    paths, oracle = _paths(guess, truth, data_range), _oracle(guess, found, truth, data_range)
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
        for index, (image, original) in enumerate(zip(found, truth.x, strict=True))
    ]


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def perceived(
    scores: list[ImageScore], guess: Tensor, truth: Tensor, data_range: Range, network: Network | None
) -> list[ImageScore]:
    """Return `scores` with LPIPS and feature errors of the matched images [N, *shape], where they can be measured."""
    if network is None or not measurable(tuple(truth.shape[1:])):
        return scores
    found = network.compare(guess, truth, data_range)
    return [s.model_copy(update={"lpips": f.lpips, "feat_mse": f.feat_mse}) for s, f in zip(scores, found, strict=True)]


def recognized(scores: list[ImageScore], guess: Tensor, truth: Tensor, y: Tensor, gallery: Gallery) -> list[ImageScore]:
    """Return `scores` with what who looks at the matched images [N, *shape] gets; y: targets [N, C]."""
    classes = None if gallery.classes is None else y.argmax(1).cpu()
    seen = gallery.recognize(guess, truth, classes)
    shared = dict(gallery=len(gallery.x), common=gallery.common)
    found = [Recognition(**shared, **asdict(one)) for one in seen]  # type: ignore[arg-type]  # by name, as declared
    return [s.model_copy(update={"recognition": one}) for s, one in zip(scores, found, strict=True)]


def _decibels(guess: Tensor, truth: Data, data_range: Range) -> list[float]:
    """Return the PSNR of every true image under the best matching; 0 where the reconstruction is not finite."""
    images = guess.detach().cpu().to(truth.x.dtype)
    order = match(images, truth.x, data_range)
    return [psnr(*pair) or 0.0 for pair in zip(images[order], truth.x, repeat(data_range), strict=False)]


def _paths(guess: Guess, truth: Data, data_range: Range) -> list[tuple[int, list[float]]]:
    """Return the PSNR of every image at each mark of the budget, to 1e-6 dB."""
    marks = sorted(guess.path, key=lambda pair: pair[0])
    return [(int(mark), [round(v, 6) for v in _decibels(x, truth, data_range)]) for mark, x in marks]


def _oracle(guess: Guess, found: Tensor, truth: Data, data_range: Range) -> list[float]:
    """Return the PSNR of every image, had an oracle chosen one result for the unit, rejected ones included."""
    mine = _decibels(found, truth, data_range)
    return max([mine, *(_decibels(x, truth, data_range) for x in guess.others)], key=sum)


def blind_decibels(mean: Tensor, original: Tensor, data_range: Range) -> float:
    """Return the PSNR of the better of two guesses that see nothing: the mean image, and mid-grey."""
    grey = torch.full_like(original, sum(data_range) / 2)
    return max(psnr(blind, original, data_range) or 0.0 for blind in (mean.to(original.dtype), grey))
