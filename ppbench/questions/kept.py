"""What kept reconstructions, and scores of one cell, say again of its scores and flags: `ppbench verify` asks.

Figures are computed as the scorer did, in float64, of the very float32 numbers that it saw, so on one machine the
difference is 0; sums in another order move the last digits (below 1e-9 dB and 1e-12 of SSIM). `CLOSE` is far above
that and far below anything that a reader could tell.
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
from ppbench.records.store import Images

CLOSE = 1e-6
"""Relative and absolute difference beyond which a figure is not what the images give."""
RANGE = (0.0, 1.0)
"""Of every image of a data set of ppbench's own; a record does not say another one."""
SHARED = ("confidence", "at_truth", "evaluations", "ratio")
"""What all images of a unit share: they came out of one attack on one observation."""
RECOMPUTED = ("evidence_inexact", "budget_hurts", "blind_as_good", "oracle_gap")
"""Flags that are a function of scores alone; others say what was seen of the evidence, which is not kept."""


def in_range(images: Images) -> bool:
    """Return whether the originals lie in `RANGE`: else figures were computed in another one, which nothing says."""
    return bool((images.truth >= RANGE[0]).all() and (images.truth <= RANGE[1]).all())


def contradicted(scores: Sequence[ImageScore], config: CellConfig, images: Images) -> Iterator[str]:
    """Yield, a clause each, what `scores` say that the kept `images`, in `RANGE`, do not give.

    Checked are psnr, rmse, rmse_raw, ssim, mse and blind of each image, and that each unit's images are matched.
    """
    right = (len(scores), *config.model.shape)
    if images.truth.shape != right:
        yield f"its reconstructions have the shape {images.truth.shape}, its scores and its network {right}"
        return
    yield from _odd_figures(scores, images)
    yield from _unmatched(scores, images)


def _odd_figures(scores: Sequence[ImageScore], images: Images) -> Iterator[str]:
    told: dict[str, list[str]] = {}
    for score, figures in zip(scores, _figures(images), strict=True):
        for name, found in figures.items():
            stated = getattr(score, name)
            if not (same(stated, found) or (stated is None and name in ("mse", "blind") and score.blind is None)):
                where = ".".join(map(str, score.place))
                told.setdefault(name, []).append(f"{name} of victim {where} is {stated}, its images give {found}")
    for some in told.values():
        yield some[0] + (f" (and {len(some) - 1} more)" if len(some) > 1 else "")


def _figures(images: Images) -> Iterator[Mapping[str, float | None]]:
    """Yield the figures of each image, by field of `ImageScore`."""
    import torch

    from ppbench.metrics.image import image_figures
    from ppbench.questions.images import blind_decibels

    mean = None if images.blind is None else torch.from_numpy(images.blind[0])
    for guess, truth in zip(torch.from_numpy(images.guess), torch.from_numpy(images.truth), strict=True):
        blind = {} if mean is None else {"blind": blind_decibels(mean, truth, RANGE)}
        yield {**asdict(image_figures(guess, truth, RANGE)), **blind}


def same(stated: float | None, found: float | None) -> bool:
    """Return whether two figures are one: both null, or equal but for rounding."""
    if stated is None or found is None:
        return stated is found
    return isclose(stated, found, rel_tol=CLOSE, abs_tol=CLOSE)


def _unmatched(scores: Sequence[ImageScore], images: Images) -> Iterator[str]:
    """Yield units whose reconstructions lie nearer to other originals of it: reordered, they would seem to fail."""
    import torch

    from ppbench.metrics.image import match

    units: dict[tuple[int, ...], list[int]] = {}
    for place, score in enumerate(scores):
        units.setdefault(score.unit, []).append(place)
    for unit, places in units.items():
        guess, truth = images.guess[places], images.truth[places]
        order = match(torch.from_numpy(guess), torch.from_numpy(truth), RANGE) if len(places) > 1 else [0]
        if _cost(guess, truth) > _cost(guess[order], truth) * (1 + CLOSE) + CLOSE:
            yield f"the reconstructions of unit {'.'.join(map(str, unit))} are not matched to the nearest originals"


def _cost(guess: Any, truth: Any) -> float:
    finite = np.isfinite(guess.reshape(len(guess), -1)).all(axis=1)
    return float(((guess[finite].astype(np.float64).clip(*RANGE) - truth[finite]) ** 2).sum())


def flawed(scores: Sequence[ImageScore], modality: Modality, flags: Sequence[Flag]) -> Iterator[str]:
    """Yield, a clause each, where scores of one cell and its flags of `RECOMPUTED` contradict one another."""
    units: dict[tuple[int, ...], list[ImageScore]] = {}
    for score in scores:
        units.setdefault(score.unit, []).append(score)
    for unit, some in units.items():
        name = ".".join(map(str, unit))
        for field in SHARED:
            if len({getattr(score, field) for score in some}) > 1:
                yield f"images of unit {name} differ in {field}, which they share"
        best = sum(score.oracle for score in some if score.oracle is not None)
        if all(score.oracle is not None for score in some) and best < sum(s.decibels for s in some) - CLOSE:
            yield f"an oracle chose worse for unit {name} than the attack did: {best} dB in all"
    yield from _odd_flags(scores, modality, flags)


def _odd_flags(scores: Sequence[ImageScore], modality: Modality, flags: Sequence[Flag]) -> Iterator[str]:
    from ppbench.questions.flags import flags_of
    from ppbench.questions.images import inexact

    measured = any(score.blind is not None for score in scores)
    raised = (*inexact(scores), *(flags_of(scores, [], RANGE, modality.decibels) if measured else ()))
    expected = {flag.code: flag for flag in raised}
    stated = {flag.code: flag for flag in flags if flag.code in RECOMPUTED}
    for code in sorted({*expected} | {*stated}):
        if code not in stated:
            yield f"flag {code} is missing, which its scores raise: {expected[code].detail}"
        elif code not in expected:
            yield f"flag {code} is there, which its scores do not raise"
        elif stated[code] != expected[code]:
            yield f"flag {code} says {stated[code].detail!r}, the scores give {expected[code].detail!r}"
