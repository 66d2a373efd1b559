"""Whether a run refutes the stated epsilon: an attack that succeeds more often than it allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppbench.metrics.epsilon import success_bound
from ppbench.metrics.intervals import CONFIDENCE, lower_bound
from ppbench.questions.recognition import RECOGNITION_METRICS, REIDENTIFIED, gallery_size, successes_of
from ppbench.records.figure import best
from ppbench.records.schema import Record
from ppbench.report.controls import widened
from ppbench.report.worst import attack_of

SHARES = ("label_accuracy", "batch_asr", "asr")
"""Shares of right answers, beside the `RECOGNITION_METRICS`, that a guarantee bounds."""


@dataclass(frozen=True)
class Refutation:
    """A refutation. by: "audit" or "attack"; words: the figure beside the one that the stated epsilon allows."""

    by: str
    words: str


def refutation_of(records: Sequence[Record]) -> Refutation | None:
    """Return the clearest refutation of the stated epsilon by the cells of one training, or None.

    Intervals have Bonferroni's level for all figures tested; an audit's bound has its own.
    """
    strongest = best(records, "epsilon_lower")
    claimed = next((r.privacy.epsilon for r in records if r.privacy.epsilon is not None), None)
    bound = None if strongest is None else strongest.metric("epsilon_lower")
    if claimed is not None and bound is not None and bound.value is not None and bound.value > claimed:
        return Refutation(
            "audit", f"an audit shows that epsilon is at least {bound.value:.2g}, {claimed:.3g} is stated"
        )
    figures = [(r, name) for r in records for name in (*RECOGNITION_METRICS, *SHARES) if _bounded(r, name)]
    excesses = [one for r, name in figures if (one := _excess(r, name, len(figures))) is not None]
    if not excesses:
        return None
    return Refutation("attack", max(excesses)[1])


def _guarantee(record: Record) -> tuple[float, float] | None:
    """Return (epsilon, delta) of the attacked uploads, or of the training of an attacked model; None without any."""
    privacy, stage = record.privacy, record.config.stage
    if stage == "audit" or record.config.attack.oracle or record.status != "complete":
        return None
    pair = (privacy.epsilon, privacy.delta)
    if record.metric("asr") is None:
        pair = (privacy.probe_epsilon, privacy.probe_delta)
    elif stage != "final":
        return None
    return None if pair[0] is None or pair[1] is None else (pair[0], pair[1])


def _bounded(record: Record, name: str) -> bool:
    """Return whether a guarantee bounds a figure; not in larger batches, where answers are matched to examples."""
    metric = record.metric(name)
    alone = name in ("batch_asr", "asr") or record.config.batch_size == 1
    return metric is not None and metric.value is not None and alone and _guarantee(record) is not None


def _excess(record: Record, name: str, tried: int) -> tuple[float, str] | None:
    """Return by how much a figure's interval exceeds what the guarantee allows, with words; None if it does not."""
    metric, guarantee = record.metric(name), _guarantee(record)
    assert metric is not None and guarantee is not None  # `_bounded`
    chance = metric.chance if metric.chance is not None else 0.5
    if name == "label_accuracy" or name.startswith("recognized"):
        chance = max(chance, record.utility.floor)  # a guess of the commonest class needs no upload
    allowed = success_bound(chance, *guarantee)
    if name in RECOGNITION_METRICS:
        low = lower_bound([*successes_of(name, record.victims).values()], (1 - CONFIDENCE) / 2 / tried)
    else:
        low = (widened(metric, tried) or (0.0, 1.0))[0]
    if low <= allowed:
        return None
    what = f"{metric.value:.0%} of {_noun(record, name)}"
    return low - allowed, f"{attack_of(record)} finds {what}, epsilon {guarantee[0]:.3g} allows {allowed:.0%}"


def _noun(record: Record, name: str) -> str:
    if name.startswith(REIDENTIFIED):
        return f"images among {gallery_size(record.victims)} others"
    if name == "label_accuracy" or name in RECOGNITION_METRICS:
        return "labels"
    return "members (attack success rate)"
