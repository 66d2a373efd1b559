"""Checks of a cell's scores and flags against its stored reconstructions and one another, for `ppbench verify`.

Figures are recomputed as by the scorer, in float64 from the same float32 numbers, so on one machine the difference is
0; sums in another order change the last digits (below 1e-9 dB and 1e-12 of SSIM). `FIGURE_TOLERANCE` is far above that
and far below any visible difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import isclose
from typing import Any

import numpy as np

from ppbench.metrics.modality import Modality
from ppbench.questions.image_metrics import ImageScore
from ppbench.records.schema import CellConfig, Flag
from ppbench.records.store import CellImages

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
    from ppbench.questions.images import blind_decibels

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
    from ppbench.questions.flags import flags_of
    from ppbench.questions.images import inexact

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
