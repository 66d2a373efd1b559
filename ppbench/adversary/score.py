"""The scorer: the only place where guesses meet the truth. Attacks never see what is computed here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from ppbench.adversary.attack import Guess
from ppbench.adversary.compare import Asked, Checks, Yardstick, answered, perceived, unit_scores
from ppbench.adversary.flags import flags_of
from ppbench.adversary.victims import Candidates, Victims
from ppbench.federation.evidence import Evidence, at_truth
from ppbench.federation.plan import Data
from ppbench.federation.wire import Slot
from ppbench.metrics.image import match
from ppbench.metrics.labels import multiset_hits
from ppbench.records.schema import Flag, ImageScore, LabelScore, MemberScore, OutputScore, TraceScore, Victim

INEXACT = 1e-6  # relative discrepancy at the truth above which evidence is not called exact


@dataclass(frozen=True)
class Scored:
    """Scores of one cell, and for reconstructions the images themselves in the order of the truth."""

    victims: list[Victim]
    flags: tuple[Flag, ...] = ()
    guess: Tensor | None = None
    truth: Tensor | None = field(default=None, repr=False)


def score_images(
    victims: Victims,
    guesses: Sequence[Guess],
    evidence: Mapping[tuple[Slot, ...], Evidence],
    plain: Mapping[tuple[Slot, ...], Evidence],
    data_range: tuple[float, float],
    yardstick: Yardstick | None = None,
) -> Scored:
    """Score reconstructions: each unit's images are matched to the truth by least squared error.

    Labels are compared as multisets, as `score_labels` does: a gradient does not say which image has which label.
    evidence is the attack's own, plain the defense's: the first gives the at-truth discrepancy, the second the ratio of
    gradient to perturbation. With a yardstick, blind guesses and perceptual figures are measured, and the flags of
    `adversary.flags` raised.

    The at-truth discrepancy of the attack's own evidence stands beside each score; a median that is not about 0
    raises the flag "evidence_inexact": the observation holds noise, or a mechanism that the attacker does not model.
    """
    scores: list[ImageScore] = []
    pairs: list[tuple[Tensor, Tensor]] = []
    known: list[tuple[Evidence, Data]] = []
    for unit, guess in zip(victims.units, guesses, strict=True):
        truth = victims.truth(unit)
        found = answered(guess, truth)
        found = found[match(found, truth.x, data_range)]
        own = evidence.get(unit)
        if own is not None:
            known.append((own, truth))
        residual = None if own is None or own.nuisance else _residual(own, truth, len(unit))
        checks = Checks(residual, _ratio(plain[unit], truth, len(unit)) if unit in plain else None)
        asked = Asked(unit, victims.batch, truth)
        scores += unit_scores(asked, guess, found, checks, data_range, yardstick or Yardstick())
        pairs.append((found, truth.x))
    images, truths = (torch.cat(side) for side in zip(*pairs, strict=True))
    flags = _inexact(scores)
    if yardstick is not None:
        scores = perceived(scores, images, truths, data_range, yardstick.network)
        flags += flags_of(scores, known, data_range, truths.dim() == 4)
    return Scored(list(scores), flags, images, truths)


def _inexact(scores: Sequence[ImageScore]) -> tuple[Flag, ...]:
    exact = {(s.probe, -1 if s.cohort else s.client): s.at_truth for s in scores if s.at_truth is not None}
    if not exact or (middle := median(exact.values())) <= INEXACT:
        return ()
    detail = f"median discrepancy at the truth {middle:.2g} of the observation's size"
    return (Flag(code="evidence_inexact", severity="info", detail=detail),)


def _residual(evidence: Evidence, truth: Data, units: int) -> float | None:
    """Return the discrepancy at the truth, or None where it is not finite."""
    value = at_truth(evidence, *_there(evidence, truth, units))
    return value if value == value and abs(value) != float("inf") else None


def _there(evidence: Evidence, truth: Data, units: int) -> tuple[Tensor, Tensor]:
    """Return the true x [U, B, *shape] and y [U, B, C] float64 where the evidence lies; the truth is on the CPU."""
    x, y = (part.unflatten(0, (units, -1)).to(evidence.device, torch.float64) for part in (truth.x, truth.y))
    return x, y


def _ratio(plain: Evidence, truth: Data, units: int) -> float | None:
    """Return ||g_b|| / ||observed_b - g_b|| over the backbone's biases: gradient against perturbation (SPN, Sec. 5).

    A bias gradient is the diagonal of the matrix that multiplies the input in the paper's linear system. None where
    there are no such biases, or no perturbation.
    """
    simulated = plain.simulate(*_there(plain, truth, units))
    clean = {n: v.detach() for n, v in simulated.items() if n.startswith("features.") and v.dim() == 1}
    if not clean:
        return None
    size = torch.cat(list(clean.values())).norm()
    perturbation = torch.cat([plain.observed[n].double() - v for n, v in clean.items()]).norm()
    if not bool(perturbation.isfinite()) or perturbation <= size * 1e-5:  # float32 rounding is no defense
        return None
    return float(size / perturbation)


def score_labels(victims: Victims, guesses: Sequence[Guess]) -> Scored:
    """Score recovered labels as multisets; no guess is a wrong one."""
    scores: list[Victim] = []
    for unit, guess in zip(victims.units, guesses, strict=True):
        labels = victims.truth(unit).y.argmax(1).tolist()
        hits = multiset_hits(guess.y.tolist() if guess.y is not None else [], labels)
        for index, hit in enumerate(hits):
            slot = unit[index // victims.batch]
            place, cohort = index % victims.batch, len(unit) > 1
            scores.append(LabelScore(probe=slot.probe, client=slot.client, index=place, label=hit, cohort=cohort))
    return Scored(scores)


def score_members(candidates: Candidates, guesses: Sequence[Guess]) -> Scored:
    """Score membership decisions: each half by the answer to the question in which it was unknown.

    Raises:
        ValueError: an answer lacks scores or decisions, or a score is not finite.
    """
    scores: list[Victim] = []
    families = candidates.family
    for half, guess in enumerate(guesses):
        if guess.score is None or guess.decision is None or not bool(guess.score.isfinite().all()):
            raise ValueError("a membership attack must answer finite scores and decisions for every candidate")
        silent = guess.abstain if guess.abstain is not None else torch.zeros(len(guess.score), dtype=torch.bool)
        for index in (candidates.half == half).nonzero().flatten().tolist():
            scores.append(
                MemberScore(
                    index=index,
                    half=half,
                    member=bool(candidates.member[index]),
                    score=float(guess.score[index]),
                    decision=None if silent[index] else bool(guess.decision[index]),
                    family=families[index] if families else "average",
                )
            )
    return Scored(scores)


def score_traces(owners: Tensor, guess: Guess) -> Scored:
    """Score traced owners against the true `owners` [Q] of the queries; -1 is no answer."""
    found = guess.owner.tolist() if guess.owner is not None else [-1] * len(owners)
    pairs = zip(owners.tolist(), found, strict=True)
    return Scored([TraceScore(index=i, owner=owner, guess=answer) for i, (owner, answer) in enumerate(pairs)])


def score_outputs(true: Tensor, guess: Guess) -> Scored:
    """Score guessed outputs against the true model's [Q, C].

    Raises:
        ValueError: the answer has no finite outputs for every query.
    """
    found = guess.outputs
    if found is None or found.shape != true.shape or not bool(found.isfinite().all()):
        raise ValueError("an extraction attack must answer finite outputs for every query")
    found = found.detach().cpu().double()
    decisions = true.argmax(1)
    agree = (found.argmax(1) == decisions).tolist()
    size = true.norm(dim=1).square().mean().sqrt().clamp(min=1e-300)  # of all: a single output may be about 0
    error = ((found - true).norm(dim=1) / size).tolist()
    told = zip(agree, error, decisions.tolist(), strict=True)
    return Scored([OutputScore(index=i, agree=a, error=e, decision=d) for i, (a, e, d) in enumerate(told)])
