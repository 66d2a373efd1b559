"""Warnings about a reconstruction cell, after AutoAttack's flags.

Each warns that a result may be due to a weak attack, or void: Croce and Hein, "Reliable evaluation of adversarial
robustness with an ensemble of diverse parameter-free attacks", 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch

from ppbench.base.tree import finite
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Data
from ppbench.questions.image_metrics import ImageScore
from ppbench.records.schema import Flag

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
