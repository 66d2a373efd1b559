"""One unit's reconstruction beside the truth: the figures of each image, of blind guesses, and along the budget."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import repeat
from math import isfinite

import torch
from torch import Tensor

from ppbench.adversary.attack import Guess
from ppbench.federation.plan import Data
from ppbench.federation.wire import Slot
from ppbench.metrics.image import image_figures, match, psnr
from ppbench.metrics.labels import multiset_hits
from ppbench.metrics.perceptual import Network, measurable
from ppbench.records.schema import ImageScore

Range = tuple[float, float]


@dataclass(frozen=True, eq=False)
class Yardstick:
    """What reconstructions are measured with, beside the truth.

    Attributes:
        mean: [*shape], the mean of examples that anyone may see: a blind guess. None: blind guesses are not measured,
            nor what a record needs them for.
        network: for LPIPS and feature errors; None: they are null.
    """

    mean: Tensor | None = None
    network: Network | None = None


@dataclass(frozen=True)
class Checks:
    """What the scorer finds about a unit's evidence, whatever the attack makes of it.

    Attributes:
        at_truth: discrepancy at the truth, see `ImageScore`.
        ratio: gradient over perturbation, see `ImageScore`.
    """

    at_truth: float | None
    ratio: float | None


@dataclass(frozen=True)
class Asked:
    """A question's slots, the images in each slot's batch, and the truth about them all."""

    unit: tuple[Slot, ...]
    batch: int
    truth: Data


def answered(guess: Guess, truth: Data) -> Tensor:
    """Return a guess's images like the true ones: on the CPU, in their dtype; NaN where there are none."""
    return torch.full_like(truth.x, torch.nan) if guess.x is None else guess.x.detach().cpu().to(truth.x.dtype)


def unit_scores(
    asked: Asked, guess: Guess, found: Tensor, checks: Checks, data_range: Range, yardstick: Yardstick
) -> list[ImageScore]:
    """Return the scores of a unit's images, perceptual ones aside.

    Args:
        asked: what was asked.
        guess: the answer.
        found: its images [U * B, *shape], matched to the truth.
        checks: of the unit's evidence.
        data_range: smallest and largest value that an input may take.
        yardstick: of its parts the mean image.
    """
    truth, mean = asked.truth, yardstick.mean
    hits = _label_hits(guess, truth)
    paths, oracle = _paths(guess, truth, data_range), _oracle(guess, found, truth, data_range)
    scores = []
    for index, (image, original) in enumerate(zip(found, truth.x, strict=True)):
        figures, slot = image_figures(image, original, data_range), asked.unit[index // asked.batch]
        scores.append(
            ImageScore(
                probe=slot.probe,
                client=slot.client,
                index=index % asked.batch,
                **asdict(figures),
                label=hits[index],
                confidence=_finite(guess.confidence),
                at_truth=checks.at_truth,
                ratio=checks.ratio,
                evaluations=guess.evaluations,
                cohort=len(asked.unit) > 1,
                blind=None if mean is None else _blind(mean, original, data_range),
                oracle=None if mean is None else oracle[index],
                path=[(mark, values[index]) for mark, values in paths],
            )
        )
    return scores


def _label_hits(guess: Guess, truth: Data) -> list[bool | None]:
    """Return which labels came out, as multisets; None each where the attack gave none."""
    if guess.y is None:
        return [None] * len(truth.x)
    return list(multiset_hits(guess.y.tolist(), truth.y.argmax(1).tolist()))


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
    """Return the PSNR of every image, had an oracle chosen among the answer and the reconstructions rejected for it.

    It chooses as the attack must, one result for the whole unit: the one with the largest mean.
    """
    mine = _decibels(found, truth, data_range)
    return max([mine, *(_decibels(x, truth, data_range) for x in guess.others)], key=sum)


def _blind(mean: Tensor, original: Tensor, data_range: Range) -> float:
    """Return the PSNR of the better of two guesses that see nothing: the mean image, and mid-grey."""
    grey = torch.full_like(original, sum(data_range) / 2)
    return max(psnr(blind, original, data_range) or 0.0 for blind in (mean.to(original.dtype), grey))
