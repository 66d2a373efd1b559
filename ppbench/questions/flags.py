"""What a reader must know about a reconstruction cell, found without judging the defense (after AutoAttack's flags).

Each says that a result may be the attack's weakness, or no result at all: Croce and Hein, "Reliable evaluation of
adversarial robustness with an ensemble of diverse parameter-free attacks", 2020.
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

HURTS = 0.5  # dB that the median may fall from an earlier mark to the end
BLIND = 0.5  # dB by which the median must exceed that of a blind guess
GAP = 3.0  # dB between the oracle's choice and the attacker's
SUCCESS = 20.0  # dB from which on a median reads as success
ASKED = 4  # units whose gradient is looked at: a simulation that is flat is flat everywhere


def flags_of(
    scores: Sequence[ImageScore],
    evidence: Sequence[tuple[Evidence, Data]],
    data_range: tuple[float, float],
    decibels: bool = True,
) -> tuple[Flag, ...]:
    """Return the flags of a cell, each a sentence with its figures.

    budget_hurts: the median PSNR was higher before the end; blind_as_good: a mean or grey image does as well;
    oracle_gap: the attack had better than it chose; zero_gradient: in half of the units nothing was observed, or the
    simulation is flat. evidence: the attack's own, with truths of which only shapes are used; decibels: whether
    they say how much leaks, see `Modality`.
    """
    found = (_hurts(scores), _blind(scores, decibels), _gap(scores), _flat(evidence, data_range))
    return tuple(flag for flag in found if flag is not None)


def reached(score: ImageScore, evaluations: int) -> float:
    """Return the PSNR that an attack would have answered with after so many gradient evaluations; 0 dB before any."""
    if evaluations >= score.evaluations:
        return score.decibels
    return next((value for mark, value in reversed(score.path) if mark <= evaluations), 0.0)


def _hurts(scores: Sequence[ImageScore]) -> Flag | None:
    told = [score for score in scores if score.path]
    if 2 * len(told) < len(scores) or not told:
        return None
    begun = max(score.path[0][0] for score in told)
    marks = sorted({mark for score in told for mark, _ in score.path if mark >= begun})
    medians = {mark: median(reached(score, mark) for score in told) for mark in marks}
    best, end = max(medians, key=lambda mark: medians[mark]), median(score.decibels for score in told)
    if medians[best] - end <= HURTS:
        return None
    detail = f"median {medians[best]:.1f} dB after {best} gradient evaluations, {end:.1f} dB at the end"
    return Flag(code="budget_hurts", severity="warning", detail=detail)


def _blind(scores: Sequence[ImageScore], decibels: bool) -> Flag | None:
    blind = [score.blind for score in scores if score.blind is not None]
    if not blind:
        return None
    mine, theirs = median(score.decibels for score in scores), median(blind)
    if mine > theirs + BLIND:
        return None
    detail = f"median {mine:.1f} dB, a mean or grey image gives {theirs:.1f} dB"
    return Flag(code="blind_as_good", severity="warning" if decibels and mine > SUCCESS else "info", detail=detail)


def _gap(scores: Sequence[ImageScore]) -> Flag | None:
    oracle = [score.oracle for score in scores if score.oracle is not None]
    if not oracle:
        return None
    mine, theirs = median(score.decibels for score in scores), median(oracle)
    if theirs - mine <= GAP:
        return None
    detail = f"median {mine:.1f} dB, an oracle's choice among the same reconstructions {theirs:.1f} dB"
    return Flag(code="oracle_gap", severity="warning", detail=detail)


def _flat(evidence: Sequence[tuple[Evidence, Data]], data_range: tuple[float, float]) -> Flag | None:
    asked = evidence[:ASKED]
    dead = sum(is_flat(one, truth, data_range) for one, truth in asked)
    if not asked or 2 * dead < len(asked):
        return None
    detail = f"in {dead} of {len(asked)} units nothing was observed, or the simulation's gradient is zero or not finite"
    return Flag(code="zero_gradient", severity="warning", detail=detail)


def is_flat(evidence: Evidence, truth: Data, data_range: tuple[float, float]) -> bool:
    """Return whether gradient search can make nothing of `evidence`.

    True where the observation, or the discrepancy's gradient at a grey image with some noise and undecided labels, is
    zero or not finite. Of `truth` only the shapes are used; evidence that cannot be simulated there is no such case.
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
    except Exception:  # noqa: BLE001 - evidence may be a stranger's
        return False
    return slope is None or not bool(slope.isfinite().all()) or not bool((slope != 0).any())
