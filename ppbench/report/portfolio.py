"""The strength of a defense: for each victim the attack that hurts it most, over all attacks that were run.

An attacker who tries a portfolio keeps what worked; which attack that is differs from victim to victim. Choosing by the
truth is the scorer's right, as in AutoAttack (Croce and Hein 2020): what is judged is the defense, not one attack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ppbench.questions.base import asked
from ppbench.questions.image_metrics import ImageScore
from ppbench.records.aggregate import aggregate
from ppbench.records.schema import Record
from ppbench.report.controls import best, rebuilding

Place = tuple[int, ...]
OF_ONE_ATTACK = (
    *("at_truth_median", "ratio_median", "blind_median", "oracle_median", "evaluations_per_broken"),
    *("rmse_raw_mean", "rmse_unit_mean"),
)
"""Metrics that a portfolio does not have: they describe one attack and its evidence, or count its evaluations alone."""


def worst_case(records: Sequence[Record]) -> Record | None:
    """Return the strongest reconstruction cell, with each victim's score by the attack that rebuilt it best.

    The cells must be of one defense, control value, stage, threat model, batch size and role; where some asked about
    more victims than others, each counts by the attacks that were run on it. A result of several attacks is called
    "portfolio (NAME)" after the attack that is best on most victims, and knows the defense where a winner does; the
    rest of its configuration, images and flags are those of the cell with the best median. Where that cell is best on
    every victim, it is returned as it is. Oracles and cells that are not complete are left out; None of none.
    """
    told = [r for r in records if r.status == "complete" and not r.config.attack.oracle]
    told = sorted((r for r in told if _images(r)), key=lambda r: (r.config.attack.id, r.cell_id))
    first = best(told, rebuilding(told[0])) if told else None
    if first is None:
        return None
    names: Counter[str] = Counter()
    merged, knowing = [], False
    everyone = [(r.config.attack, _images(r)) for r in (first, *told)]  # of equals the first one's counts
    for place in sorted({place for _, own in everyone for place in own}):
        some = [(attack, own[place]) for attack, own in everyone if place in own]
        winner, top = max(some, key=lambda pair: _leak(pair[1], first))
        names[winner.id] += 1
        knowing = knowing or winner.adaptive
        merged.append(top)
    if merged == [score for _, score in sorted(_images(first).items())]:
        return first
    most = max(sorted(names), key=lambda name: names[name])
    attack = first.config.attack.model_copy(update={"id": f"portfolio ({most})", "adaptive": knowing})
    about = first.config
    metrics = aggregate(merged, classes=about.model.classes, seed=about.seed, without=OF_ONE_ATTACK)
    config = first.config.model_copy(update={"attack": attack})
    return first.model_copy(update={"config": config, "victims": merged, "metrics": metrics})


def _images(record: Record) -> dict[Place, Any]:
    return {v.place: v for v in record.victims} if asked(record).inputs else {}


def _leak(score: ImageScore, record: Record) -> float:
    """Return how much of a victim came out, larger being more: dB of an image, minus the error of a table row."""
    if rebuilding(record) == "psnr_median":
        return -1.0 if score.psnr is None else score.psnr
    return -float("inf") if score.rmse is None else -score.rmse
